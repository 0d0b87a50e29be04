// Kernels that compute nothing and touch the pages of their results: preloaded, to measure memory of models of any
// size.
//
// Takes the place of the CPU backend's ggml_graph_compute.  Invariant: each page of a result is written that its kernel
// would write, but for those of caches, which are as large in every process.  Needs none of ggml's headers.
#include <cstddef>
#include <cstring>
#include <dlfcn.h>
#include <initializer_list>

namespace {

constexpr size_t PAGE = 4096;

// A handle of the library at an address. dlsym with it also finds symbols of its dependencies, which Python loads as
// local.
void *library_of(void *address) {
    Dl_info info;
    return dladdr(address, &info) != 0 ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
}

template <typename Function> Function find(void *library, const char *name) {
    return reinterpret_cast<Function>(dlsym(library, name));
}

bool writes(const char *op) {
    for (const char *aside : {"NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE", "SET_ROWS", "CPY"}) {
        if (strcmp(op, aside) == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

extern "C" int ggml_graph_compute(void *graph, void *) {
    static void *const library = library_of(__builtin_return_address(0));
    static const auto n_nodes = find<int (*)(void *)>(library, "ggml_graph_n_nodes");
    static const auto node_at = find<void *(*)(void *, int)>(library, "ggml_graph_node");
    static const auto describe = find<const char *(*)(const void *)>(library, "ggml_op_desc");
    static const auto data_of = find<void *(*)(const void *)>(library, "ggml_get_data");
    static const auto nbytes_of = find<size_t (*)(const void *)>(library, "ggml_nbytes");
    for (int i = 0, n = n_nodes(graph); i < n; i++) {
        void *node = node_at(graph, i);
        auto *data = static_cast<volatile char *>(data_of(node));
        const size_t nbytes = nbytes_of(node);
        if (nbytes == 0 || !writes(describe(node))) {
            continue;
        }
        for (size_t at = 0; at < nbytes; at += PAGE) {
            data[at] = data[at];
        }
        data[nbytes - 1] = data[nbytes - 1];
    }
    return 0;
}
