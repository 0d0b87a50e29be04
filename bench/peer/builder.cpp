// Builds and allocates a graph of a llama-like model by ggml's C calls, to time a step without its compute.
//
// A `peer_builder` owns the weights and caches of the model, on one device without memory, and a scheduler.  Every
// run makes the graph anew from nothing, by the calls of bench/building.py, in a block of memory that is kept.
#include "devices.h"

#include <cmath>
#include <memory>

using namespace peers;

// bench/building.py has the same layout.
struct peer_shape {
    int32_t n_layer, n_embd, n_head, n_head_kv, n_ff, n_vocab, n_tokens, n_kv, n_ctx;
};

namespace {

struct Layer {
    ggml_tensor *attn_norm, *wq, *wk, *wv, *wo, *ffn_norm, *gate, *up, *down, *cache_k, *cache_v;
};

using Context = std::unique_ptr<ggml_context, decltype(&ggml_free)>;

Context context(std::vector<char> &memory) {
    return Context(ggml_init({memory.size(), memory.data(), true}), ggml_free);
}

}  // namespace

struct peer_builder {
    peer_shape shape = {};
    std::deque<Device> devices;
    std::vector<char> resident_memory, graph_memory;
    Context residents{nullptr, ggml_free}, step{nullptr, ggml_free};
    std::vector<Layer> layers;
    ggml_tensor *embedding = nullptr, *norm = nullptr, *output = nullptr;
    ggml_backend_sched_t sched = nullptr;
    ggml_cgraph *graph = nullptr;

    ggml_tensor *resident(ggml_backend_buffer_t buffer, ggml_type type, int64_t ne0, int64_t ne1 = 1) {
        ggml_tensor *t = ggml_new_tensor_2d(residents.get(), type, ne0, ne1);
        t->buffer = buffer;
        t->data = buffer->context;
        return t;
    }

    ggml_tensor *input(ggml_type type, int64_t ne0, int64_t ne1 = 1) {
        ggml_tensor *t = ggml_new_tensor_2d(step.get(), type, ne0, ne1);
        ggml_set_input(t);
        return t;
    }

    void open(int64_t alignment) {
        devices.resize(1);
        open_device(devices[0], 0, 1, alignment);
        auto *weights = devices[0].weights, *caches = devices[0].caches;
        const size_t n = 12 * static_cast<size_t>(shape.n_layer) + 16;
        const size_t nodes = 64 * static_cast<size_t>(shape.n_layer) + 64;
        resident_memory.resize(n * ggml_tensor_overhead());
        graph_memory.resize(nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false));
        residents = context(resident_memory);
        const int64_t kv = shape.n_embd / shape.n_head * shape.n_head_kv;
        for (int i = 0; i < shape.n_layer; i++)
            layers.push_back({
                resident(weights, GGML_TYPE_F32, shape.n_embd),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_embd),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, kv),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, kv),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_embd),
                resident(weights, GGML_TYPE_F32, shape.n_embd),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_ff),
                resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_ff),
                resident(weights, GGML_TYPE_Q4_0, shape.n_ff, shape.n_embd),
                resident(caches, GGML_TYPE_F16, kv, shape.n_ctx),
                resident(caches, GGML_TYPE_F16, kv, shape.n_ctx),
            });
        embedding = resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_vocab);
        norm = resident(weights, GGML_TYPE_F32, shape.n_embd);
        output = resident(weights, GGML_TYPE_Q4_0, shape.n_embd, shape.n_vocab);
        ggml_backend_t backend = &devices[0].backend;
        ggml_backend_buffer_type_t type = &devices[0].type;
        sched = ggml_backend_sched_new(&backend, &type, 1, nodes, false, false);
    }

    void build() {
        step = context(graph_memory);
        ggml_context *ctx = step.get();
        graph = ggml_new_graph_custom(ctx, 64 * static_cast<size_t>(shape.n_layer) + 64, false);
        const int64_t d = shape.n_embd / shape.n_head, heads = shape.n_head, kv_heads = shape.n_head_kv;
        const int64_t n = shape.n_tokens, n_kv = shape.n_kv;
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        ggml_tensor *tokens = input(GGML_TYPE_I32, n), *positions = input(GGML_TYPE_I32, n);
        ggml_tensor *rows = input(GGML_TYPE_I64, n), *mask = input(GGML_TYPE_F32, n_kv, n);
        ggml_tensor *x = ggml_get_rows(ctx, embedding, tokens);
        for (const Layer &l : layers) {
            ggml_tensor *y = ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-5f), l.attn_norm);
            ggml_tensor *q = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, l.wq, y), d, heads, n);
            ggml_tensor *k = ggml_reshape_3d(ctx, ggml_mul_mat(ctx, l.wk, y), d, kv_heads, n);
            ggml_tensor *v = ggml_mul_mat(ctx, l.wv, y);
            q = ggml_rope_ext(ctx, q, positions, nullptr, d, 0, 4096, 1e4f, 1, 0, 1, 32, 1);
            k = ggml_rope_ext(ctx, k, positions, nullptr, d, 0, 4096, 1e4f, 1, 0, 1, 32, 1);
            k = ggml_set_rows(ctx, l.cache_k, ggml_reshape_2d(ctx, k, d * kv_heads, n), rows);
            v = ggml_set_rows(ctx, l.cache_v, v, rows);
            ggml_build_forward_expand(graph, q);
            ggml_build_forward_expand(graph, k);
            ggml_build_forward_expand(graph, v);
            const size_t head = ggml_row_size(l.cache_k->type, d), row = l.cache_k->nb[1];
            k = ggml_permute(ctx, ggml_view_3d(ctx, l.cache_k, d, kv_heads, n_kv, head, row, 0), 0, 2, 1, 3);
            v = ggml_permute(ctx, ggml_view_3d(ctx, l.cache_v, d, kv_heads, n_kv, head, row, 0), 0, 2, 1, 3);
            ggml_tensor *scores = ggml_mul_mat(ctx, k, ggml_permute(ctx, q, 0, 2, 1, 3));
            scores = ggml_soft_max_ext(ctx, scores, mask, scale, 0);
            y = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, v)), scores);
            y = ggml_cont_2d(ctx, ggml_permute(ctx, y, 0, 2, 1, 3), shape.n_embd, n);
            x = ggml_add(ctx, ggml_mul_mat(ctx, l.wo, y), x);
            y = ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-5f), l.ffn_norm);
            y = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, l.gate, y), ggml_mul_mat(ctx, l.up, y));
            x = ggml_add(ctx, ggml_mul_mat(ctx, l.down, y), x);
        }
        x = ggml_mul_mat(ctx, output, ggml_mul(ctx, ggml_rms_norm(ctx, x, 1e-5f), norm));
        ggml_set_output(x);
        ggml_build_forward_expand(graph, x);
    }
};

extern "C" {

void peer_builder_free(peer_builder *b) {
    ggml_backend_sched_free(b->sched);
    for (auto &d : b->devices) close_device(d);
    delete b;
}

peer_builder *peer_builder_new(const peer_shape *shape, int64_t alignment) {
    auto *b = new peer_builder;
    b->shape = *shape;
    b->open(alignment);
    b->build();
    if (!ggml_backend_sched_reserve(b->sched, b->graph)) {
        peer_builder_free(b);
        return nullptr;
    }
    return b;
}

// Microseconds of one run: the graph, and where `allocates` its addresses, too.
double peer_builder_run(peer_builder *b, int allocates) {
    return microseconds([&] {
        b->build();
        if (allocates) {
            ggml_backend_sched_reset(b->sched);
            ggml_backend_sched_alloc_graph(b->sched, b->graph);
        }
    });
}

int32_t peer_builder_nodes(peer_builder *b) { return b->graph->n_nodes; }

// ggml's description of node i: "MUL_MAT", "SILU", "SWIGLU".
const char *peer_builder_op(peer_builder *b, int32_t i) { return ggml_op_desc(b->graph->nodes[i]); }

}  // extern "C"
