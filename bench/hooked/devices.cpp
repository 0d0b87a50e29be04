// Devices for llama.cpp where there are none: each has buffers of a type of its own and computes as the CPU does.
//
// Owns the devices until the process ends, as ggml does.  Invariant: what a device computes has the bits of the CPU
// backend with one thread.  A dry device has addresses but keeps and computes nothing: for models of any size.  All
// refuse buffers on demand.  The structs are ggml's as 0.15 and 0.25 lay them out (empty slots have no
// name); its headers are not needed.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <string>
#include <sys/mman.h>
#include <vector>

namespace {

constexpr size_t ALIGNMENT = 128;
constexpr size_t MEMORY = size_t(1) << 40;
constexpr int KIND_GPU = 1;

struct Device;
struct Registry;
struct Slot {
    void *unused = nullptr;
};

struct BufferType {
    const char *(*get_name)(BufferType *);
    void *(*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    Slot get_max_size, get_alloc_size, is_host;
    Device *device;
    void *context;
};

struct Memory {  // the head of a ggml_backend_buffer is its slots
    void (*free_buffer)(void *);
    void *(*get_base)(void *);
    Slot init_tensor;
    void (*memset_tensor)(void *, void *, uint8_t, size_t, size_t);
    void (*set_tensor)(void *, void *, const void *, size_t, size_t);
    void (*get_tensor)(void *, const void *, void *, size_t, size_t);
    Slot set_2d, get_2d;
    Slot cpy_tensor;
    void (*clear)(void *, uint8_t);
    Slot reset;
};

struct Buffer {
    Memory slots;
    BufferType *type;
    void *context;
    size_t size;
};

struct Event {
    Device *device;
    void *context;
};

struct Backend {
    void *guid;
    const char *(*get_name)(Backend *);
    void (*free)(Backend *);
    Slot set_async, get_async, set_2d_async, get_2d_async, cpy_async;
    void (*synchronize)(Backend *);
    Slot plan_create, plan_free, plan_update, plan_compute;
    int (*graph_compute)(Backend *, void *);
    void (*event_record)(Backend *, Event *);
    void (*event_wait)(Backend *, Event *);
    Slot graph_optimize;
    Device *device;
    void *context;  // the CPU backend that computes
};

struct Properties {
    const char *name, *description;
    size_t free, total;
    int kind;
    const char *id;
    bool async, host_buffer, from_host_pointer, events, mmap;
};

struct Device {
    const char *(*get_name)(Device *);
    const char *(*get_description)(Device *);
    void (*get_memory)(Device *, size_t *, size_t *);
    int (*get_type)(Device *);
    void (*get_props)(Device *, Properties *);
    Backend *(*init_backend)(Device *, const char *);
    BufferType *(*get_buffer_type)(Device *);
    Slot host_buffer_type, from_host_pointer;
    bool (*supports_op)(Device *, const void *);
    bool (*supports_type)(Device *, BufferType *);
    Slot offload_op;
    Event *(*event_new)(Device *);
    void (*event_free)(Device *, Event *);
    void (*event_synchronize)(Device *, Event *);
    Registry *registry;
    void *context;
};

struct Registry {
    int version;
    const char *(*get_name)(Registry *);
    size_t (*count)(Registry *);
    Device *(*get)(Registry *, size_t);
    void *(*find)(Registry *, const char *);
    void *context;
};

struct Library {  // the functions of ggml that are used
    void *(*buffer_init)(BufferType *, Memory, void *, size_t);
    bool (*supports_op)(void *, const void *);
    void *(*init)(void *, const char *);
    int (*graph_compute)(void *, void *);
    void (*free)(void *);
    void *(*registry_of)(void *);
    void *(*find)(void *, const char *);
    void *(*data_of)(const void *);
};

struct Host {
    Device device{};
    BufferType type{};
    std::string name;
    size_t memory = MEMORY;
    bool dry = false, events = false;
};

Library ggml;
Registry registry;
void *cpu = nullptr;
std::deque<Host> hosts;
std::atomic<int> room{-1};  // how many more buffers may be allocated; negative: no limit
char guid[16] = "ggml-sched host";
std::vector<size_t> memories;

Host &of(Device *device) { return *static_cast<Host *>(device->context); }
Host &of(BufferType *type) { return *static_cast<Host *>(type->context); }
Buffer &buffer_of(void *buffer) { return *static_cast<Buffer *>(buffer); }
bool is_dry(void *buffer) { return of(buffer_of(buffer).type).dry; }
char *data_of(const void *tensor) { return static_cast<char *>(ggml.data_of(tensor)); }

Memory memory_slots() {
    Memory slots{};
    slots.free_buffer = [](void *buffer) {
        munmap(buffer_of(buffer).context, buffer_of(buffer).size + 1);
    };
    slots.get_base = [](void *buffer) { return buffer_of(buffer).context; };
    slots.memset_tensor = [](void *buffer, void *tensor, uint8_t value, size_t offset, size_t size) {
        if (!is_dry(buffer)) {
            memset(data_of(tensor) + offset, value, size);
        }
    };
    slots.set_tensor = [](void *buffer, void *tensor, const void *data, size_t offset, size_t size) {
        if (!is_dry(buffer)) {
            memcpy(data_of(tensor) + offset, data, size);
        }
    };
    slots.get_tensor = [](void *buffer, const void *tensor, void *data, size_t offset, size_t size) {
        if (is_dry(buffer)) {
            memset(data, 0, size);
        } else {
            memcpy(data, data_of(tensor) + offset, size);
        }
    };
    slots.clear = [](void *buffer, uint8_t value) {
        if (!is_dry(buffer)) {
            memset(buffer_of(buffer).context, value, buffer_of(buffer).size);
        }
    };
    return slots;
}

bool is_full() {
    int left = room.load();
    while (left > 0 && !room.compare_exchange_weak(left, left - 1)) {
    }
    return left == 0;
}

void *alloc_buffer(BufferType *type, size_t size) {
    if (is_full()) {
        return nullptr;
    }
    // The system commits pages when they are touched; a dry device touches none.
    void *base = mmap(nullptr, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : ggml.buffer_init(type, memory_slots(), base, size);
}

Backend *init_backend(Device *device, const char *) {
    auto *backend = new Backend{};
    backend->guid = guid;
    backend->get_name = [](Backend *b) { return of(b->device).name.c_str(); };
    backend->free = [](Backend *b) {
        ggml.free(b->context);
        delete b;
    };
    backend->synchronize = [](Backend *) {};
    backend->graph_compute = [](Backend *b, void *graph) {
        return of(b->device).dry ? 0 : ggml.graph_compute(b->context, graph);
    };
    backend->event_record = [](Backend *, Event *) {};
    backend->event_wait = [](Backend *, Event *) {};
    backend->device = device;
    backend->context = ggml.init(cpu, nullptr);
    using SetThreads = void (*)(void *, int);
    if (auto set = reinterpret_cast<SetThreads>(ggml.find(ggml.registry_of(cpu), "ggml_backend_set_n_threads"))) {
        set(backend->context, 1);
    }
    return backend;
}

void open(Host &host) {
    Device &d = host.device;
    d.get_name = d.get_description = [](Device *device) { return of(device).name.c_str(); };
    d.get_memory = [](Device *device, size_t *free, size_t *total) { *free = *total = of(device).memory; };
    d.get_type = [](Device *) { return KIND_GPU; };
    d.get_props = [](Device *device, Properties *props) {
        bool events = of(device).events;
        const char *name = of(device).name.c_str();
        const size_t memory = of(device).memory;
        *props = {name, name, memory, memory, KIND_GPU, nullptr, events, false, false, events, true};
    };
    d.init_backend = init_backend;
    d.get_buffer_type = [](Device *device) { return &of(device).type; };
    d.supports_op = [](Device *, const void *op) { return ggml.supports_op(cpu, op); };
    d.supports_type = [](Device *device, BufferType *type) { return type == &of(device).type; };
    d.event_new = [](Device *device) { return new Event{device, nullptr}; };
    d.event_free = [](Device *, Event *event) { delete event; };
    d.event_synchronize = [](Device *, Event *) {};
    d.registry = &registry;
    d.context = host.type.context = &host;
    host.type.get_name = [](BufferType *type) { return of(type).name.c_str(); };
    host.type.alloc_buffer = alloc_buffer;
    host.type.get_alignment = [](BufferType *) { return ALIGNMENT; };
    host.type.device = &d;
}

template <typename Function> bool find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

}  // namespace

// Once for a process: handles of `count` new devices beside the CPU's of this ggml.  With `events` llama.cpp computes
// in a pipeline over several.  Nonzero if the library is another one.
extern "C" int devices_open(const char *base, void *cpu_device, int count, int dry, int events, void **handles) {
    void *library = dlopen(base, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr || !find(library, "ggml_backend_buffer_init", ggml.buffer_init) ||
        !find(library, "ggml_backend_dev_supports_op", ggml.supports_op) ||
        !find(library, "ggml_backend_dev_init", ggml.init) || !find(library, "ggml_backend_free", ggml.free) ||
        !find(library, "ggml_backend_graph_compute", ggml.graph_compute) ||
        !find(library, "ggml_backend_dev_backend_reg", ggml.registry_of) ||
        !find(library, "ggml_backend_reg_get_proc_address", ggml.find) ||
        !find(library, "ggml_get_data", ggml.data_of)) {
        return 1;
    }
    cpu = cpu_device;
    registry.version = 2;
    registry.get_name = [](Registry *) { return "hosts"; };
    registry.count = [](Registry *) { return hosts.size(); };
    registry.get = [](Registry *, size_t index) { return &hosts[index].device; };
    registry.find = [](Registry *, const char *) -> void * { return nullptr; };
    for (int i = 0; i < count; i++) {
        Host &host = hosts.emplace_back();
        host.name = "HOST" + std::to_string(i);
        host.memory = static_cast<size_t>(i) < memories.size() ? memories[static_cast<size_t>(i)] : MEMORY;
        host.dry = dry != 0;
        host.events = events != 0;
        open(host);
        handles[i] = &host.device;
    }
    return 0;
}

// The bytes that the devices report which are opened next.
extern "C" void devices_have(const size_t *nbytes, int count) { memories.assign(nbytes, nbytes + count); }

// Permit `buffers` more allocations and refuse all later ones; a negative number: no limit.
extern "C" void devices_refuse_after(int buffers) { room = buffers; }
