// The buffers that an unmodified llama.cpp holds: types, bytes and usages, as ggml's own functions report them.
//
// Loaded with RTLD_GLOBAL before ggml's libraries, so that the dynamic linker finds these functions first; each hands
// on to the one behind it.  Needs none of ggml's headers, and nothing of ggml_sched.
#include <cstddef>
#include <dlfcn.h>
#include <mutex>
#include <vector>

namespace {

void *behind = nullptr;  // ggml's base library

struct Held {
    void *buffer;
    bool mapped;
};

std::mutex lock;
std::vector<Held> held;

template <typename Function> Function find(const char *name) {
    return reinterpret_cast<Function>(dlsym(behind, name));
}

void *note(void *buffer, bool mapped) {
    std::lock_guard<std::mutex> guard{lock};
    for (Held &one : held) {
        if (one.buffer == buffer) {
            one.mapped |= mapped;
            return buffer;
        }
    }
    if (buffer != nullptr) {
        held.push_back({buffer, mapped});
    }
    return buffer;
}

}  // namespace

extern "C" void *ggml_backend_buft_alloc_buffer(void *type, size_t size) {
    return note(find<void *(*)(void *, size_t)>("ggml_backend_buft_alloc_buffer")(type, size), false);
}

extern "C" void *ggml_backend_dev_buffer_from_host_ptr(void *device, void *memory, size_t size, size_t most) {
    auto function = find<void *(*)(void *, void *, size_t, size_t)>("ggml_backend_dev_buffer_from_host_ptr");
    return note(function(device, memory, size, most), true);
}

extern "C" void ggml_backend_buffer_free(void *buffer) {
    {
        std::lock_guard<std::mutex> guard{lock};
        for (size_t i = 0; i < held.size(); i++) {
            if (held[i].buffer == buffer) {
                held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
                break;
            }
        }
    }
    find<void (*)(void *)>("ggml_backend_buffer_free")(buffer);
}

// Load ggml's base library by its path.  Nonzero if it cannot be loaded.
extern "C" int buffers_open(const char *path) {
    behind = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return behind == nullptr;
}

// The name of the type of the i-th buffer that is held, or null behind the last; its bytes, ggml's number of its usage,
// and whether it is memory that was there before.
extern "C" const char *buffers_read(int index, size_t *nbytes, int *usage, int *mapped) {
    std::lock_guard<std::mutex> guard{lock};
    if (index < 0 || static_cast<size_t>(index) >= held.size()) {
        return nullptr;
    }
    const Held &one = held[static_cast<size_t>(index)];
    *nbytes = find<size_t (*)(void *)>("ggml_backend_buffer_get_size")(one.buffer);
    *usage = find<int (*)(void *)>("ggml_backend_buffer_get_usage")(one.buffer);
    *mapped = one.mapped;
    return find<const char *(*)(void *)>("ggml_backend_buft_name")(
        find<void *(*)(void *)>("ggml_backend_buffer_get_type")(one.buffer));
}
