"""Guards of the C API and of the hook under llama.cpp: for each file its tests and the edits, as in guards.py."""

from __future__ import annotations

GRAPHS = "tests/capi/test_capi_graphs.py"
PLANS = "tests/capi/test_capi_plans.py"
INSTALLING = "tests/hooked/test_installing.py"
ALLOCATOR = "tests/hooked/test_hooked_allocator.py"
SCHEDULER = "tests/hooked/test_scheduler.py"

GROUPS = (
    ("ggml_sched/_capi.pyx", f"{GRAPHS} {PLANS}",
     ("graphs are finished once", "    if box == NULL or box.finished:\n", "    if box == NULL:\n"),
     ("sizes of graphs", "    if not 0 <= size.n_tensors <= GS_MAX_TENSORS:\n", "    if False:\n"),
     ("no more nodes and leafs than tensors", " or size.n_nodes > size.n_tensors - <int64_t>size.n_leafs:", ":"),
     ("graphs that are not finished", "graph == NULL or problem == NULL or not graph.finished:",
      "graph == NULL or problem == NULL:"),
     ("plans of other graphs", "    if not made_for(first, old):\n", "    if False:\n"),
     ("plans of what a graph held before", " and plan.filling == graph.filling and", " and"),
     ("plans of other problems", " and asked_alike(&first.asked, &box.asked):", ":"),
     ("the buffer that cannot be packed is named", "        error.index = failed\n", "        pass\n"),
     ("types without traits", " or found.block_size == 0:", ":")),
    ("ggml_sched/llama_cpp/install.py", INSTALLING,
     ("levels that there are", "    if asked not in LEVELS:\n", "    if False:\n"),
     ("not after ggml", "        if found:\n", "        if False:\n"),
     ("'off' comes too late", '        if there != "off" and asked == "off":\n', "        if False:\n"),
     ("in front of ggml's names", "os.RTLD_GLOBAL | os.RTLD_NOW)", "os.RTLD_LOCAL | os.RTLD_NOW)"),
     ("calls that do not arrive",
      '        if _make_scheduler(path) and library.served()["allocators"] == before:\n', "        if False:\n"),
     ("clients are checked once they are imported", "        sys.meta_path.insert(0, _Watch())\n", "")),
    ("ggml_sched/llama_cpp/plans.py", f"{ALLOCATOR} {SCHEDULER}",
     ("a tensor larger than a buffer", 'max(arena["max_size"], largest[b])', 'arena["max_size"]'),
     ("bytes that are more than the tensor's", 'found["nbytes"].get((home, like[i]), 0)', "0")),
    ("ggml_sched/llama_cpp/arena.c", ALLOCATOR,
     ("buffers that are refused", "        if (chunk->buffer == NULL) {\n", "        if (0) {\n"),
     ("buffers of computes say so", "        lib->buffer_set_usage(chunk->buffer, GH_USAGE_COMPUTE);\n", ""),
     ("buffers that are too small", "        if (nbytes[i] > a->chunk[i].nbytes) {\n", "        if (0) {\n"),
     ("too few buffers", "    if (n > a->n_chunks) {\n        return false;\n    }\n", "")),
    ("ggml_sched/llama_cpp/looks.c", SCHEDULER,
     ("a graph that differs in wiring alone", " | differing(look->links, t->src, 12)", ""),
     ("graphs of as many nodes", "    if (s->lib->graph_n_nodes(graph) != p->n_given || ", "    if ("),
     ("what the client chose", "!gh_same(c->backend, p->chosen_backend, c->n, sizeof *c->backend)", "false")),
    ("ggml_sched/llama_cpp/pools.c", SCHEDULER,
     ("addresses follow buffers that grow", "        s->generation++;\n", ""),
     ("views move with their roots",
      "            p->spot[i].offset = p->spot[root].offset + v->offset[i] - v->offset[root];\n", "")),
    ("ggml_sched/llama_cpp/bind.c", SCHEDULER,
     ("a graph gets its sources back", "                t->src[k] = s->copy_of[t->src[k] - s->copy];\n", ""),
     ("and loses the memory that was ours", "        t->buffer = NULL;\n        t->data = NULL;\n", "")),
    ("ggml_sched/llama_cpp/compute.c", SCHEDULER,
     ("what was written through a copy goes back", "    s->rt->backend_tensor_copy(copy, node);\n", ""),
     ("it is computed in the copy's memory", "    node->buffer = copy->buffer;\n    node->data = copy->data;\n", ""),
     ("a callback may stop a split", "*stopped = wanted && !s->callback(nodes[i], false, s->callback_user);",
      "*stopped = wanted && s->callback(nodes[i], false, s->callback_user) && false;")),
    ("ggml_sched/llama_cpp/experts.c", SCHEDULER,
     ("experts that are used", "            s->is_used[id] = 1;\n", "")),
    ("ggml_sched/llama_cpp/scheduler.c", SCHEDULER,
     ("a graph is allocated once", "!s->is_allocated && allocate(s, graph)", "allocate(s, graph)"),
     ("backends of others", "        if (b >= 0) {\n            gh_choices_set",
      "        if (1) {\n            gh_choices_set"),
     ("choices end with a reset", "    gh_choices_clear(&s->choices);\n    s->now = NULL;\n", "    s->now = NULL;\n"),
     ("reserving makes room", "p = plan(s, graph, true, true);", "p = plan(s, graph, false, true);")),
)
