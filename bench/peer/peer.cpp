// Today's ggml behind a few C functions: the planner alone, on devices that have no memory.
//
// A `peer` owns one graph over fake devices, given as flat records.  Before every run it puts the
// tensors back as they were, outside the measured time; ggml changes them while it plans.
#include "devices.h"

using namespace peers;

// One tensor; bench/peer/__init__.py has the same layout.
struct peer_tensor {
    int64_t ne[4], nb[4], view_offs;
    int32_t op, type, flags, view_src;  // view_src: id of the root, -1 for none
    int32_t src[10];                    // ids, -1 for an empty slot
    int32_t op_params[16];
    int32_t device, is_weight;          // where a resident tensor lives, -1: to be placed
    char name[64];
};

struct peer {
    std::deque<Device> devices;
    std::vector<ggml_tensor> tensors, pristine;
    std::vector<ggml_tensor *> nodes, leafs;
    ggml_cgraph graph = {};
    ggml_backend_sched_t sched = nullptr;
    ggml_gallocr_t gallocr = nullptr;

    void restore() { std::memcpy(tensors.data(), pristine.data(), tensors.size() * sizeof(ggml_tensor)); }
};

extern "C" {

const char *peer_version() { return ggml_version(); }

int peer_op(const char *name) {
    for (int i = 0; i < GGML_OP_COUNT; i++)
        if (std::strcmp(ggml_op_name(static_cast<ggml_op>(i)), name) == 0) return i;
    return -1;
}

int peer_type(const char *name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char *known = ggml_type_name(static_cast<ggml_type>(i));
        if (known != nullptr && std::strcmp(known, name) == 0) return i;
    }
    return -1;
}

void peer_free(peer *p) {
    if (p->sched != nullptr) ggml_backend_sched_free(p->sched);
    if (p->gallocr != nullptr) ggml_gallocr_free(p->gallocr);
    for (auto &d : p->devices) close_device(d);
    delete p;
}

peer *peer_new(int n_devices, int64_t alignment, int asks_cpu, const peer_tensor *given, int32_t n,
               const int32_t *nodes, int32_t n_nodes, const int32_t *leafs, int32_t n_leafs) {
    auto *p = new peer;
    p->devices.resize(n_devices);
    for (int i = 0; i < n_devices; i++) open_device(p->devices[i], i, n_devices, alignment, asks_cpu);
    p->tensors.resize(n);
    for (int32_t i = 0; i < n; i++) {
        const peer_tensor &from = given[i];
        ggml_tensor &t = p->tensors[i];
        std::memset(&t, 0, sizeof t);
        t.op = static_cast<ggml_op>(from.op);
        t.type = static_cast<ggml_type>(from.type);
        t.flags = from.flags;
        for (int k = 0; k < 4; k++) t.ne[k] = from.ne[k], t.nb[k] = from.nb[k];
        for (int k = 0; k < 10; k++) t.src[k] = from.src[k] < 0 ? nullptr : &p->tensors[from.src[k]];
        std::memcpy(t.op_params, from.op_params, sizeof from.op_params);
        std::memcpy(t.name, from.name, sizeof t.name);
        if (from.view_src >= 0) t.view_src = &p->tensors[from.view_src], t.view_offs = from.view_offs;
        if (from.device >= 0) {
            const Device &d = p->devices[from.device];
            t.buffer = from.is_weight ? d.weights : d.caches;
            t.data = t.buffer->context;
        }
    }
    for (auto &t : p->tensors)  // a view that is a leaf has its root's address from the start
        if (t.view_src != nullptr && t.op == GGML_OP_NONE && t.view_src->buffer != nullptr)
            t.buffer = t.view_src->buffer, t.data = static_cast<char *>(t.view_src->data) + t.view_offs;
    p->pristine = p->tensors;
    for (int32_t i = 0; i < n_nodes; i++) p->nodes.push_back(&p->tensors[nodes[i]]);
    for (int32_t i = 0; i < n_leafs; i++) p->leafs.push_back(&p->tensors[leafs[i]]);
    p->graph.size = n_nodes > n_leafs ? n_nodes : n_leafs;
    p->graph.n_nodes = n_nodes;
    p->graph.n_leafs = n_leafs;
    p->graph.nodes = p->nodes.data();
    p->graph.leafs = p->leafs.data();

    std::vector<ggml_backend_t> backends;
    std::vector<ggml_backend_buffer_type_t> types;
    for (auto &d : p->devices) backends.push_back(&d.backend), types.push_back(&d.type);
    p->sched = ggml_backend_sched_new(backends.data(), types.data(), n_devices, 2 * (n_nodes + n_leafs) + 1024,
                                      false, false);
    p->gallocr = ggml_gallocr_new(types.back());
    p->restore();
    if (!ggml_backend_sched_reserve(p->sched, &p->graph)) {
        peer_free(p);
        return nullptr;
    }
    return p;
}

// Each of these runs once and returns microseconds.

double peer_reserve(peer *p) {
    p->restore();
    ggml_backend_sched_reset(p->sched);  // it ends with one itself
    return microseconds([&] { ggml_backend_sched_reserve(p->sched, &p->graph); });
}

double peer_alloc(peer *p) {
    p->restore();
    return microseconds([&] {
        ggml_backend_sched_reset(p->sched);
        ggml_backend_sched_alloc_graph(p->sched, &p->graph);
    });
}

double peer_gallocr(peer *p) {
    p->restore();
    return microseconds([&] { ggml_gallocr_reserve(p->gallocr, &p->graph); });
}

int peer_splits(peer *p) { return ggml_backend_sched_get_n_splits(p->sched); }

// Where the last peer_alloc put a tensor.
uintptr_t peer_address(peer *p, int32_t i) { return reinterpret_cast<uintptr_t>(p->tensors[i].data); }

int64_t peer_buffer_size(peer *p, int i) {
    return ggml_backend_sched_get_buffer_size(p->sched, &p->devices[i].backend);
}

}  // extern "C"
