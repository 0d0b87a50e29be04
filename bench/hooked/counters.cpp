// Calls of ggml's allocators and scheduler, counted and timed: each function here hands on to the one behind it.
//
// Loaded with RTLD_GLOBAL before the library that is asked, so that the dynamic linker finds these first.  Invariant:
// results are those of the functions behind.  Calls inside a function of the same family (allocators, reserving,
// scheduler, buffers) are part of it and not counted again.  Needs none of ggml's headers.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>

namespace {

void *behind = nullptr;  // the library whose functions do the work

struct Tallocr {         // ggml_tallocr, which is returned by value
    void *buffer, *base;
    size_t alignment, offset;
};

struct Counter {
    const char *name;
    Counter *next;
    int family;
    void *function = nullptr;
    std::atomic<int64_t> calls{0}, nanoseconds{0};

    explicit Counter(const char *name);

    template <typename Function> Function find() {
        if (function == nullptr) {
            function = dlsym(behind, name);
        }
        return reinterpret_cast<Function>(function);
    }
};

Counter *first = nullptr;

int family_of(const char *name) {
    const char *families[] = {"_sched_", "_buft_", "_gallocr_reserve"};
    int found = 0;
    for (int i = 0; i < 3; i++) {
        found = strstr(name, families[i]) != nullptr ? i + 1 : found;
    }
    return found;
}

Counter::Counter(const char *named) : name(named), next(first), family(family_of(named)) { first = this; }

thread_local int depth[4];  // calls under way, by family

struct Timer {
    Counter &counter;
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();

    explicit Timer(Counter &of) : counter(of) { depth[of.family]++; }

    ~Timer() {
        if (--depth[counter.family] > 0) {
            return;
        }
        auto passed = std::chrono::steady_clock::now() - start;
        counter.nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(passed).count();
        counter.calls += 1;
    }
};

}  // namespace

#define COUNTED(result, name, parameters, arguments)                       \
    namespace {                                                            \
    Counter counter_of_##name{#name};                                      \
    }                                                                      \
    extern "C" result name parameters {                                    \
        auto function = counter_of_##name.find<result(*) parameters>();    \
        Timer timer{counter_of_##name};                                    \
        return function arguments;                                         \
    }

using Ptr = void *;
using Ids = const int *;

COUNTED(Ptr, ggml_gallocr_new, (Ptr type), (type))
COUNTED(Ptr, ggml_gallocr_new_n, (Ptr *types, int n), (types, n))
COUNTED(void, ggml_gallocr_free, (Ptr galloc), (galloc))
COUNTED(bool, ggml_gallocr_reserve, (Ptr galloc, Ptr graph), (galloc, graph))
COUNTED(bool, ggml_gallocr_reserve_n, (Ptr galloc, Ptr graph, Ids nodes, Ids leafs), (galloc, graph, nodes, leafs))
COUNTED(void, ggml_gallocr_reserve_n_size, (Ptr galloc, Ptr graph, Ids nodes, Ids leafs, size_t *sizes),
        (galloc, graph, nodes, leafs, sizes))
COUNTED(bool, ggml_gallocr_alloc_graph, (Ptr galloc, Ptr graph), (galloc, graph))
COUNTED(size_t, ggml_gallocr_get_buffer_size, (Ptr galloc, int id), (galloc, id))

COUNTED(Ptr, ggml_backend_buft_alloc_buffer, (Ptr type, size_t size), (type, size))

COUNTED(Tallocr, ggml_tallocr_new, (Ptr buffer), (buffer))
COUNTED(int, ggml_tallocr_alloc, (Tallocr *talloc, Ptr tensor), (talloc, tensor))

COUNTED(Ptr, ggml_backend_sched_new, (Ptr *backends, Ptr *types, int n, size_t size, bool parallel, bool offload),
        (backends, types, n, size, parallel, offload))
COUNTED(void, ggml_backend_sched_free, (Ptr sched), (sched))
COUNTED(bool, ggml_backend_sched_reserve, (Ptr sched, Ptr graph), (sched, graph))
COUNTED(void, ggml_backend_sched_reserve_size, (Ptr sched, Ptr graph, size_t *sizes), (sched, graph, sizes))
COUNTED(void, ggml_backend_sched_split_graph, (Ptr sched, Ptr graph), (sched, graph))
COUNTED(bool, ggml_backend_sched_alloc_graph, (Ptr sched, Ptr graph), (sched, graph))
COUNTED(int, ggml_backend_sched_graph_compute, (Ptr sched, Ptr graph), (sched, graph))
COUNTED(int, ggml_backend_sched_graph_compute_async, (Ptr sched, Ptr graph), (sched, graph))
COUNTED(void, ggml_backend_sched_synchronize, (Ptr sched), (sched))
COUNTED(void, ggml_backend_sched_reset, (Ptr sched), (sched))
COUNTED(void, ggml_backend_sched_set_eval_callback, (Ptr sched, Ptr callback, Ptr data), (sched, callback, data))
COUNTED(void, ggml_backend_sched_set_tensor_backend, (Ptr sched, Ptr tensor, Ptr backend), (sched, tensor, backend))
COUNTED(Ptr, ggml_backend_sched_get_tensor_backend, (Ptr sched, Ptr tensor), (sched, tensor))
COUNTED(size_t, ggml_backend_sched_get_buffer_size, (Ptr sched, Ptr backend), (sched, backend))
COUNTED(Ptr, ggml_backend_sched_get_buffer_type, (Ptr sched, Ptr backend), (sched, backend))
COUNTED(int, ggml_backend_sched_get_n_splits, (Ptr sched), (sched))
COUNTED(int, ggml_backend_sched_get_n_copies, (Ptr sched), (sched))
COUNTED(int, ggml_backend_sched_get_n_backends, (Ptr sched), (sched))
COUNTED(Ptr, ggml_backend_sched_get_backend, (Ptr sched, int index), (sched, index))

// Load the library, by its path, whose functions do the work. Nonzero if it cannot be loaded.
extern "C" int counters_open(const char *path) {
    behind = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return behind == nullptr;
}

// The i-th counter's name, or null behind the last; calls and nanoseconds since the last clearing.
extern "C" const char *counters_read(int index, int64_t *calls, int64_t *nanoseconds) {
    Counter *counter = first;
    while (counter != nullptr && index-- > 0) {
        counter = counter->next;
    }
    if (counter == nullptr) {
        return nullptr;
    }
    *calls = counter->calls;
    *nanoseconds = counter->nanoseconds;
    return counter->name;
}

extern "C" void counters_clear() {
    for (Counter *counter = first; counter != nullptr; counter = counter->next) {
        counter->calls = counter->nanoseconds = 0;
    }
}
