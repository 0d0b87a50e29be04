// A runner in C++: it computes a prompt of 8 tokens, then 4 tokens one by one, over one cache, on two devices.
//
// The devices and their kernels are the program's own; ggml-sched plans both graphs, moves the data and calls the
// kernels.  Python starts once, to make the programs; no compute calls Python, takes its lock or allocates memory.
// Weights lie on the device, the cache on the host; both programs share the memory of everything else.

#include <Python.h>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#include "ggml_sched/api.h"

namespace {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void check(int status, const gs_error &error) {
    if (status != GS_OK) throw Failure(error.message);
}

// -- a device: memory, and kernels for the ops that the graphs have -------------------------------------------------

struct Device {
    const char *name;
    int64_t n_bytes = 0;
    int64_t n_moved = 0;
};

int allocate(void *context, int64_t nbytes, void **memory, gs_error *) {
    *memory = std::aligned_alloc(256, (static_cast<size_t>(nbytes) + 255) / 256 * 256);
    if (*memory == nullptr) return GS_OUT_OF_MEMORY;
    static_cast<Device *>(context)->n_bytes += nbytes;
    return GS_OK;
}

void release(void *context, void *memory, int64_t nbytes) {
    static_cast<Device *>(context)->n_bytes -= nbytes;
    std::free(memory);
}

// Writes and reads: this device computes when it is called, so both are done on return.
int move(void *context, void *to, const void *from, int64_t nbytes, gs_error *) {
    static_cast<Device *>(context)->n_moved += nbytes;
    std::memcpy(to, from, static_cast<size_t>(nbytes));
    return GS_OK;
}

// Row r of a matrix of float.
float *row(const gs_node *node, int64_t r) {
    return reinterpret_cast<float *>(static_cast<char *>(node->data) + r * node->layout.nb[1]);
}

// The sources and parameters of a node are those of ggml's op.
bool compute_node(const gs_node *node) {
    const gs_node *a = node->src[0], *b = node->src[1];
    const int64_t columns = node->layout.ne[0], rows = node->layout.ne[1];
    switch (node->op) {
    case GS_OP_MUL_MAT:
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) {
                float sum = 0;
                for (int64_t k = 0; k < a->layout.ne[0]; k++) sum += row(a, c)[k] * row(b, r)[k];
                row(node, r)[c] = sum;
            }
        return true;
    case GS_OP_ADD:
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) row(node, r)[c] = row(a, r)[c] + row(b, r)[c];
        return true;
    case GS_OP_UNARY:
        if (node->sub_op != GS_UNARY_SILU) return false;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++) row(node, r)[c] = row(a, r)[c] / (1 + std::exp(-row(a, r)[c]));
        return true;
    case GS_OP_SET_ROWS: // row r of `a` becomes row number b[r] of the memory that the node computes into
        for (int64_t r = 0; r < a->layout.ne[1]; r++)
            std::memcpy(row(node, static_cast<const int64_t *>(b->data)[r]), row(a, r),
                        static_cast<size_t>(columns) * sizeof(float));
        return true;
    default: return false;
    }
}

int compute(void *, const gs_run_nodes *run, gs_error *error) {
    for (int32_t i = 0; i < run->n_nodes; i++) {
        const gs_node *node = run->nodes[i];
        if (compute_node(node)) continue;
        std::snprintf(error->message, sizeof error->message, "no kernel for op %d", static_cast<int>(node->op));
        return GS_UNSUPPORTED_OP;
    }
    return GS_OK;
}

gs_backend table_of(Device &device) {
    gs_backend table{}; // no queue, so that the functions of queues and events stay NULL
    table.context = &device, table.name = device.name;
    table.alloc = allocate, table.free = release, table.write = table.read = move, table.run = compute;
    return table;
}

// -- graphs ---------------------------------------------------------------------------------------------------------

constexpr int32_t DEVICE = 0, HOST = 1, NOWHERE = -1;
using Extents = std::array<int64_t, 2>;

class Graph {
  public:
    explicit Graph(const gs_api *functions) : api(functions), handle(nullptr, functions->graph_free) {}

    // `memory`: a resident on this backend; nullptr: memory that the planner chooses.
    int32_t leaf(int type, Extents ne, unsigned char flags, int32_t backend = NOWHERE, void *memory = nullptr) {
        layouts.push_back(dense(type, GS_OP_NONE, ne));
        return add({}, flags, backend, memory);
    }

    int32_t node(int op, Extents ne, std::vector<int32_t> sources, unsigned char flags = 0) {
        layouts.push_back(dense(GS_TYPE_F32, op, ne));
        return add(std::move(sources), flags);
    }

    // A node that writes to the memory of `root`, one of its sources.
    int32_t into(int op, int32_t root, std::vector<int32_t> sources) {
        layouts.push_back(layouts[static_cast<size_t>(root)]);
        layouts.back().op = op;
        const int32_t id = add(std::move(sources), 0);
        roots.back() = root;
        return id;
    }

    const gs_api_graph *finish() {
        gs_error error{};
        gs_graph_size size{};
        gs_graph_arrays to{};
        gs_api_graph *made = nullptr;
        size.n_tensors = static_cast<int32_t>(layouts.size());
        for (size_t i = 0; i < layouts.size(); i++) {
            (layouts[i].op == GS_OP_NONE ? size.n_leafs : size.n_nodes)++;
            size.n_src += static_cast<int32_t>(sources_of[i].size());
        }
        check(api->graph_new(&size, &to, &made, &error), error);
        handle.reset(made);
        int32_t n_src = 0, n_nodes = 0, n_leafs = 0;
        for (int32_t i = 0; i < size.n_tensors; i++) {
            const size_t k = static_cast<size_t>(i);
            unsigned char slot = 0;
            to.layout[i] = layouts[k], to.flags[i] = flags_of[k];
            to.view_src[i] = roots[k], to.view_offs[i] = 0;
            to.src_begin[i] = n_src, to.param_begin[i] = 0;
            for (const int32_t source : sources_of[k]) to.src[n_src] = source, to.slot[n_src++] = slot++;
            if (layouts[k].op == GS_OP_NONE) to.leaf[n_leafs++] = i; else to.node[n_nodes++] = i;
        }
        to.src_begin[size.n_tensors] = n_src, to.param_begin[size.n_tensors] = 0;
        check(api->graph_finish(made, &error), error);
        return made;
    }

    std::vector<int32_t> residents;         // the backend of each resident, else NOWHERE
    std::vector<unsigned char> usages;
    std::vector<void *> addresses;

  private:
    const gs_api *api;
    std::unique_ptr<gs_api_graph, void (*)(gs_api_graph *)> handle;
    std::vector<gs_layout> layouts;
    std::vector<std::vector<int32_t>> sources_of;
    std::vector<unsigned char> flags_of;
    std::vector<int32_t> roots;

    int32_t add(std::vector<int32_t> sources, unsigned char flags, int32_t backend = NOWHERE, void *memory = nullptr) {
        sources_of.push_back(std::move(sources)), flags_of.push_back(flags), roots.push_back(-1);
        residents.push_back(backend), addresses.push_back(memory);
        usages.push_back(backend == DEVICE ? GS_USAGE_WEIGHTS : GS_USAGE_ANY);
        return static_cast<int32_t>(layouts.size()) - 1;
    }

    gs_layout dense(int type, int op, const Extents &ne) const {
        gs_type_traits traits{};
        api->type_traits(type, &traits);
        gs_layout layout{};
        layout.type = type, layout.op = op;
        layout.ne[0] = ne[0], layout.ne[1] = ne[1], layout.ne[2] = layout.ne[3] = 1;
        layout.nb[0] = traits.type_size, layout.nb[1] = ne[0] / traits.block_size * traits.type_size;
        layout.nb[2] = layout.nb[3] = layout.nb[1] * ne[1];
        return layout;
    }
};

// -- the model ------------------------------------------------------------------------------------------------------

constexpr int64_t WIDTH = 32, HIDDEN = 64, ROOM = 16;

struct Model {
    std::vector<float> up = std::vector<float>(WIDTH * HIDDEN), down = std::vector<float>(HIDDEN * WIDTH);
    std::vector<float> cache = std::vector<float>(WIDTH * ROOM);

    Model() {
        for (size_t k = 0; k < up.size(); k++) {
            up[k] = (static_cast<float>(k % 13) - 6) / 16;
            down[k] = (static_cast<float>(k % 11) - 5) / 16;
        }
    }
};

// The graph of n tokens: it adds a row for each to the cache, and multiplies each by all rows.
struct Step {
    Step(const gs_api *functions, const std::array<gs_backend_info, 2> &backends, Model &model, int64_t n_tokens)
        : api(functions), graph(functions), plan(nullptr, functions->plan_free),
          program(nullptr, functions->program_free) {
        const int32_t up = graph.leaf(GS_TYPE_F32, {WIDTH, HIDDEN}, 0, DEVICE, model.up.data());
        const int32_t down = graph.leaf(GS_TYPE_F32, {HIDDEN, WIDTH}, 0, DEVICE, model.down.data());
        const int32_t cache = graph.leaf(GS_TYPE_F32, {WIDTH, ROOM}, 0, HOST, model.cache.data());
        x = graph.leaf(GS_TYPE_F32, {WIDTH, n_tokens}, GS_FLAG_INPUT);
        rows = graph.leaf(GS_TYPE_I64, {n_tokens, 1}, GS_FLAG_INPUT);
        const int32_t hidden = graph.node(GS_OP_MUL_MAT, {HIDDEN, n_tokens}, {up, x});
        const int32_t active = graph.node(GS_OP_UNARY + GS_UNARY_SILU, {HIDDEN, n_tokens}, {hidden});
        const int32_t product = graph.node(GS_OP_MUL_MAT, {WIDTH, n_tokens}, {down, active});
        const int32_t y = graph.node(GS_OP_ADD, {WIDTH, n_tokens}, {product, x});
        const int32_t stored = graph.into(GS_OP_SET_ROWS, cache, {y, rows, cache});
        scores = graph.node(GS_OP_MUL_MAT, {ROOM, n_tokens}, {stored, y}, GS_FLAG_OUTPUT);
        made = graph.finish();

        gs_error error{};
        gs_problem problem{};
        gs_api_plan *found = nullptr;
        api->policy_default(&problem.policy);
        problem.n_backends = 2, problem.backends = backends.data();
        problem.resident = graph.residents.data(), problem.usage = graph.usages.data();
        check(api->plan_new(made, &problem, &found, &error), error);
        plan.reset(found);
    }

    void make_program(gs_api_arenas *arenas) {
        gs_error error{};
        gs_api_program *found = nullptr;
        check(api->program_new_in(made, plan.get(), arenas, graph.addresses.data(), &found, &error), error);
        program.reset(found);
    }

    // The scores of all tokens at these positions.
    std::vector<float> run(const std::vector<float> &tokens, const std::vector<int64_t> &positions) {
        gs_error error{};
        std::vector<float> found(static_cast<size_t>(ROOM) * positions.size());
        check(api->program_set(program.get(), x, tokens.data(), nbytes(tokens), &error), error);
        check(api->program_set(program.get(), rows, positions.data(), nbytes(positions), &error), error);
        check(api->program_run(program.get(), &error), error);
        check(api->program_read(program.get(), scores, found.data(), 0, nbytes(found), &error), error);
        return found;
    }

    template <typename T> static int64_t nbytes(const std::vector<T> &values) {
        return static_cast<int64_t>(values.size() * sizeof(T));
    }

    const gs_api *api;
    Graph graph;
    const gs_api_graph *made = nullptr;
    std::unique_ptr<gs_api_plan, void (*)(gs_api_plan *)> plan;
    std::unique_ptr<gs_api_program, void (*)(gs_api_program *)> program;
    int32_t x = -1, rows = -1, scores = -1;
};

void work(const gs_api *api) {
    gs_error error{};
    check(gs_api_check(api, &error), error);
    Device device{"device"}, host{"host"};
    {
        const std::array<gs_backend, 2> tables{table_of(device), table_of(host)};
        const std::array<gs_backend_info, 2> infos{{{device.name, 256, 0, nullptr}, {host.name, 64, 0, nullptr}}};
        Model model;
        Step prompt(api, infos, model, 8), token(api, infos, model, 1);
        const std::array<const gs_api_plan *, 2> plans{prompt.plan.get(), token.plan.get()};
        gs_api_arenas *arenas = nullptr;
        check(api->arenas_new(plans.data(), 2, tables.data(), &arenas, &error), error);
        const std::unique_ptr<gs_api_arenas, void (*)(gs_api_arenas *)> owner(arenas, api->arenas_free);
        prompt.make_program(arenas), token.make_program(arenas);
        std::printf("arenas: %lld and %lld bytes\n", static_cast<long long>(device.n_bytes),
                    static_cast<long long>(host.n_bytes));

        std::vector<float> tokens(WIDTH * 8);
        for (size_t k = 0; k < tokens.size(); k++) tokens[k] = static_cast<float>(k % 7) / 8;
        const std::vector<float> of_prompt = prompt.run(tokens, {0, 1, 2, 3, 4, 5, 6, 7});
        tokens.resize(WIDTH); // the prompt's first token, again and again: its scores are those of row 0
        for (int64_t at = 8; at < 12; at++) {
            const std::vector<float> found = token.run(tokens, {at});
            if (found[static_cast<size_t>(at)] != of_prompt[0]) throw Failure("other scores than in the prompt");
        }
        std::printf("scores: %g, %lld bytes moved\n", static_cast<double>(of_prompt[0]),
                    static_cast<long long>(device.n_moved + host.n_moved));
    }
    if (device.n_bytes + host.n_bytes != 0) throw Failure("memory is left");
}

} // namespace

int main() {
    Py_Initialize(); // in the environment of the `python3` that is first on PATH; see docs/c-api.md
    const gs_api *api = GS_IMPORT_API();
    if (api == nullptr) {
        PyErr_Print();
        return 1;
    }
    PyThreadState *python = PyEval_SaveThread(); // from here on no thread holds Python's lock
    int status = 0;
    try {
        work(api);
    } catch (const std::exception &failed) {
        std::fprintf(stderr, "%s\n", failed.what());
        status = 1;
    }
    PyEval_RestoreThread(python);
    return Py_FinalizeEx() < 0 ? 1 : status;
}
