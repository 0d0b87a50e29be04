"""The placement rules of the default policy, one at a time, and the reasons that `plan.explain` gives."""

from itertools import pairwise

import pytest
from devices import resident_tensor, verified
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import quick
from small_graphs import dry_device

import ggml_sched as gs


class Setting:
    """Dry backends best first, a place for weights, a context for everything else."""

    def __init__(self, *backends, **options):
        self.backends = tuple(dry_device(b) if isinstance(b, str) else b for b in backends)
        self.sched = gs.Scheduler(self.backends, **options)
        self.ctx = gs.Context()

    def input(self, *ne, name="x"):
        return self.ctx.tensor("f32", ne or (8, 4), name, input=True)

    def weight(self, backend, *ne, name="w", usage="weights"):
        return resident_tensor(backend, ne or (8, 8), name, usage=usage)

    def named(self, name, t):
        return self.ctx.set_name(t, name)

    def plan(self, *outputs):
        return verified(self.sched.plan(gs.Graph(*outputs)))


def says(plan, t, *words):
    """The explanation names the backend and each of the words."""
    text = plan.explain(t)
    assert plan.backend_of(t).name in text
    for word in words:
        assert word in text, text


# -- backends that neighbours cannot change ----------------------------------------


def test_a_tensor_with_memory_stays_where_it_is():
    s = Setting("GPU", "CPU")
    gpu, cpu = s.backends
    kept = s.weight(cpu, 8, 4, name="state", usage="any")
    out = s.ctx.add(s.input(), kept)
    s.sched.set_tensor_backend(kept, gpu)       # an assignment moves no memory
    plan = s.plan(out)
    assert plan.backend_of(kept) is cpu and plan.offset_of(kept) is None
    says(plan, kept, "memory is there already")


def test_a_node_that_writes_into_a_tensor_with_memory_runs_there():
    s = Setting("GPU", "CPU")
    gpu, cpu = s.backends
    w = s.weight(gpu)
    cache = s.weight(cpu, 8, 4, name="cache", usage="any")
    node = s.ctx.cpy(s.ctx.mul_mat(w, s.input()), cache)
    plan = s.plan(node)
    assert plan.backend_of(node) is cpu
    says(plan, node, "memory is there already")


def test_memory_that_is_no_weight_draws_no_op():
    """A cache on the host, a weight on the device: the op between them stays with the weight's neighbours."""
    s = Setting("GPU", "CPU")
    gpu, cpu = s.backends
    cache = s.weight(cpu, 8, 4, name="cache", usage="any")
    h = s.ctx.mul_mat(s.weight(gpu), s.input())
    out = s.ctx.add(h, cache)
    assert s.plan(out).backend_of(out) is gpu


def test_inputs_are_on_the_last_backend():
    s = Setting("GPU", "CPU")
    x = s.input()
    out = s.ctx.mul_mat(s.weight(s.backends[0]), x)
    plan = s.plan(out)
    assert plan.backend_of(x) is s.backends[1]
    assert [(c.tensor, c.backend) for c in plan.copies] == [(x, s.backends[0])]
    says(plan, x, "input", "host")


def exceptions(s, small):
    """Ops with a small weight-like source on another backend than their large ones."""
    ctx = s.ctx
    h = s.named("h", ctx.mul_mat(s.weight(s.backends[0], 8, 64), s.input()))
    h = ctx.reshape(h, 8, 8, 4)
    if small == "ROPE":
        factors = s.weight(s.backends[1], 4, name="factors")
        positions = ctx.tensor("i32", 4, "positions", input=True)
        return ctx.rope(h, positions, 8, freq_factors=factors)
    if small == "SOFT_MAX":
        sinks = s.weight(s.backends[1], 4, name="sinks")
        return ctx.soft_max(h, None, 1.0, 0.0, sinks)
    sinks = s.weight(s.backends[1], 8, name="sinks")
    q = ctx.permute(h, 0, 2, 1, 3)
    return ctx.flash_attn_ext(q, q, q, None, 1.0, 0.0, 0.0, sinks)


@pytest.mark.parametrize("small", ["ROPE", "SOFT_MAX", "FLASH_ATTN_EXT"])
def test_ops_with_small_weights_stay_with_their_neighbours(small):
    s = Setting("GPU", "CPU")
    out = exceptions(s, small)
    assert out.op == small
    plan = s.plan(out)
    assert plan.backend_of(out) is s.backends[0]
    says(plan, out, "nearest node")


# -- chains of nodes ----------------------------------------


def refusing(name, *ops, **options):
    return lambda: dry_device(name, supports_op=lambda t: t.op not in ops, **options)


CHAINS = {
    "a node is placed with its weight, on the first device": (("GPU0", "GPU1", "CPU"), [0], [0], {0: "weight"}),
    "a node is placed with its weight, on another device": (("GPU0", "GPU1", "CPU"), [1], [1], {0: "weight"}),
    "a node is placed with its weight, on the host": (("GPU0", "GPU1", "CPU"), [2], [2], {0: "weight"}),
    "devices spread down": (("GPU", "CPU"), [0, "silu", 1], [0, 0, 1], {1: "nearest node"}),
    "devices spread up before the host spreads at all": (("GPU", "CPU"), [1, "silu", 0], [1, 0, 0], {}),
    "the host spreads between two of its nodes": (("GPU", "CPU"), [1, "silu", 1, 0], [1, 1, 1, 0], {1: "nearest node"}),
    "a device does not spread over what it does not support": (
        (refusing("GPU", "UNARY:SILU"), "CPU"), [0, "silu", "sqr", 0], [0, 1, 0, 0], {1: "not supported by: GPU"}),
    "nodes move to a better backend that shares the memory": (
        (refusing("BLAS", "UNARY:SILU", reads=("CPU",)), lambda: dry_device("CPU", reads=("BLAS",))),
        [1, "silu", 1], [0, 1, 0], {}),
    "a moved node names the rule": (
        (refusing("FAST", "MUL_MAT", reads=("CPU",)), lambda: dry_device("CPU", reads=("FAST",))),
        [1, "silu"], [1, 0], {1: "a better backend that reads the same memory supports it: tensor 2 'n0'\n"}),
    "memory that only the better backend reads moves no node": (
        (refusing("FAST", "MUL_MAT", reads=("CPU",)), "CPU"), [1, "silu"], [1, 1], {}),
    "memory that only the other backend reads moves no node": (
        (refusing("FAST", "MUL_MAT"), lambda: dry_device("CPU", reads=("FAST",))), [1, "silu"], [1, 1], {}),
    "a node is placed with the node after it where the backend before does not support it": (
        (refusing("a", "UNARY:SILU"), "b", "c", "host"), [0, "silu", 2], [0, 2, 2], {}),
    "an op is offloaded to the first backend that supports and offloads it": (
        (refusing("a", "MUL_MAT", offload=lambda t: True), lambda: dry_device("b", offload=lambda t: True), "host"),
        [2], [1], {0: "offload_op"}),
    "an op that the device does not support is not offloaded": (
        (refusing("GPU", "MUL_MAT", offload=lambda t: True), "CPU"), [1], [1], {}),
    "memory that the device reads needs no copy": ((lambda: dry_device("GPU", reads=("CPU",)), "CPU"), [0], [0], {}),
}
"""{rule: (backends, nodes, the expected backend of each node, words of its explanation)}.

A node is an op, or the index of the backend that has the weight of a product.
"""

WITHOUT_COPIES = {"nodes move to a better backend that shares the memory", "a moved node names the rule",
                  "memory that the device reads needs no copy",
                  "an op that the device does not support is not offloaded"}


@pytest.mark.parametrize("rule", CHAINS)
def test_each_node_of_a_chain_is_placed_by_the_rule(rule):
    backends, steps, expected, explanations = CHAINS[rule]
    s = Setting(*(b if isinstance(b, str) else b() for b in backends))
    nodes, h = [], s.input()
    for k, step in enumerate(steps):
        is_op = isinstance(step, str)
        h = getattr(s.ctx, step)(h) if is_op else s.ctx.mul_mat(s.weight(s.backends[step], name=f"w{k}"), h)
        nodes.append(s.named(f"n{k}", h))
    plan = s.plan(h)
    assert [s.backends.index(plan.backend_of(t)) for t in nodes] == expected
    for k, words in explanations.items():
        says(plan, nodes[k], words)
    assert len(plan.splits) == 1 + sum(a != b for a, b in pairwise(expected))
    assert rule not in WITHOUT_COPIES or not plan.copies


# -- the rest ----------------------------------------


def test_leftovers_go_where_most_of_their_sources_are():
    s = Setting("GPU0", "GPU1", "CPU")
    _, gpu1, _ = s.backends
    kept = [s.weight(gpu1, 8, 4, name=f"k{k}", usage="any") for k in range(2)]
    out = s.ctx.add(*kept)
    plan = s.plan(out)
    assert plan.backend_of(out) is gpu1
    says(plan, out, "most of its sources")


def test_leftovers_without_placed_sources_go_to_the_first_backend_that_supports_them():
    s = Setting(dry_device("GPU0", supports_op=lambda t: t.op != "ADD"), "GPU1", "CPU")
    x = s.ctx.tensor("f32", (8, 4), "x")
    out = s.ctx.add(x, x)
    plan = s.plan(out)
    assert plan.backend_of(out) is s.backends[1]
    assert plan.backend_of(x) is s.backends[1]      # and a leaf to its first reader
    assert "not supported by: GPU0" in plan.explain(out)


def test_a_leaf_of_which_no_node_reads_a_view_is_on_the_host():
    s = Setting("GPU", "CPU")
    x = s.ctx.tensor("f32", (8, 4), "x")
    view = s.ctx.view_1d(x, 8, 0)
    plan = s.plan(view)
    assert plan.backend_of(x) is plan.backend_of(view) is s.backends[1]
    says(plan, x, "starts on the last (host) backend")
    s.sched.set_tensor_backend(view, s.backends[0])
    assert s.plan(view).backend_of(x) is s.backends[0]


@pytest.mark.parametrize("pinned", [0, 1])
def test_a_leaf_of_which_no_node_reads_a_view_is_where_the_caller_assigned_one_of_its_views(pinned):
    s = Setting("GPU", "CPU")
    x = s.ctx.tensor("f32", (8, 4), "x")
    views = [s.ctx.view_1d(x, 8, 32 * k) for k in range(2)]
    s.sched.set_tensor_backend(views[pinned], s.backends[0])
    plan = s.plan(*views)
    assert {plan.backend_of(t) for t in (x, *views)} == {s.backends[0]}
    says(plan, x, "its first consumer runs there")


def test_an_op_that_its_backend_does_not_support_falls_back_with_copies_in_and_out():
    s = Setting(dry_device("GPU", supports_op=lambda t: t.op != "SOFT_MAX"), "CPU")
    gpu, cpu = s.backends
    h = s.named("h", s.ctx.mul_mat(s.weight(gpu, name="w1"), s.input()))
    p = s.named("p", s.ctx.soft_max(h))
    out = s.ctx.mul_mat(s.weight(gpu, name="w2"), p)
    s.sched.set_tensor_backend(p, gpu)
    plan = s.plan(out)
    assert plan.backend_of(p) is cpu
    says(plan, p, "does not support the op", "not supported by: GPU")
    assert [(c.tensor.name, c.backend) for c in plan.copies][1:] == [("h", cpu), ("p", gpu)]


# -- weights that are brought in ----------------------------------------


def offloading(n, n_rows=8):
    s = Setting(dry_device("GPU"), "CPU")
    gpu, cpu = s.backends
    gpu.offload_op = lambda t: t.op == "MUL_MAT"
    s = Setting(gpu, cpu)
    h = s.input(64, n_rows)
    weights = [s.weight(cpu, 64, 64, name=f"w{k}") for k in range(n)]
    for k, w in enumerate(weights):
        h = s.named(f"h{k}", s.ctx.mul_mat(w, h))
    return s, weights, h


@pytest.mark.parametrize("n", [1, 2])
def test_few_offloaded_weights_are_kept(n):
    s, weights, out = offloading(n)
    plan = s.plan(out)
    assert len(plan.splits) == 1 and plan.backend_of(out) is s.backends[0]
    assert plan.buffer_sizes[0] >= sum(w.nbytes for w in weights)
    assert sum(plan.data.kept) == n
    says(plan, out, "offload_op")


@pytest.mark.parametrize("n", [3, 4, 9])
def test_many_offloaded_weights_open_a_split_each_and_use_one_memory(n):
    s, weights, out = offloading(n)
    plan = s.plan(out)
    assert len(plan.splits) == n
    assert plan.buffer_sizes[0] < sum(w.nbytes for w in weights)
    assert plan.buffer_sizes[0] <= weights[0].nbytes + 3 * out.nbytes
    assert not any(plan.data.kept)
    assert [c.tensor for c in plan.copies if c.tensor in weights] == weights


# -- the caller's assignments ----------------------------------------


def test_assigned_leafs_and_views():
    s = Setting("GPU0", "GPU1", "CPU")
    gpu0, gpu1, cpu = s.backends
    x, y = s.input(name="x"), s.ctx.tensor("f32", (8, 4), "y")
    out = s.ctx.add(s.ctx.mul_mat(s.weight(gpu0), x), s.ctx.reshape(y, 8, 4))
    s.sched.set_tensor_backend(x, gpu0)
    s.sched.set_tensor_backend(y, gpu1)
    plan = s.plan(out)
    assert plan.backend_of(x) is gpu0 and plan.backend_of(y) is gpu1
    says(plan, x, "caller")
    assert [c.tensor.view_src for c in plan.copies] == [y]


def test_inputs_are_copied_once_for_the_whole_graph():
    """Four splits, two on the device; both read x and y, each of which travels once."""
    s = Setting("GPU", "CPU")
    gpu, cpu = s.backends
    x, y = s.input(name="x"), s.input(name="y")
    h = s.ctx.mul_mat(s.weight(gpu, name="w0"), x)
    h = s.ctx.mul(s.ctx.add(h, y), x)
    h = s.ctx.mul_mat(s.weight(cpu, name="w1"), h)
    h = s.ctx.mul_mat(s.weight(gpu, name="w2"), h)
    h = s.ctx.mul(s.ctx.add(h, y), x)
    plan = s.plan(s.ctx.mul_mat(s.weight(cpu, name="w3"), h))
    assert [sp.backend for sp in plan.splits] == [gpu, cpu, gpu, cpu]
    names = [c.tensor.name for c in plan.copies]
    assert names.count("x") == names.count("y") == 1


# -- seams ----------------------------------------


def test_a_seam_moves_to_where_the_fewest_bytes_cross():
    """Between two weights the values shrink to a row sum and grow again."""
    s = Setting("GPU0", "GPU1", "CPU")
    gpu0, gpu1, _ = s.backends
    h = s.ctx.mul_mat(s.weight(gpu0, name="w1"), s.input())
    rows = s.ctx.sum_rows(s.ctx.sqr(h))
    grown = s.ctx.repeat(rows, s.ctx.tensor("f32", (8, 4), "like"))
    out = s.ctx.mul_mat(s.weight(gpu1, name="w2"), s.ctx.silu(grown))
    plan = s.plan(out)
    assert plan.backend_of(rows) is gpu0 and plan.backend_of(grown) is gpu1
    assert [c.tensor for c in plan.copies if c.backend is gpu1 and c.tensor.op != "NONE"] == [rows]
    ids = {t: f"tensor {plan.index_of(t)}" for t in (rows, grown)}
    says(plan, grown, f"fewer bytes cross: {ids[rows]}, {ids[grown]}\n")


def random_seams(rng, n_nodes, n_runs):
    """A graph over two or three devices whose weights fix a node here and there; shapes of many sizes."""
    backends = [dry_device(f"D{k}") for k in range(rng.randint(2, 3))] + [dry_device("HOST")]
    s = Setting(*backends)
    values = [s.input(8, 4), s.ctx.mul_mat(s.weight(backends[0], name="w"), s.input(8, 4, name="y"))]
    anchors = sorted(rng.sample(range(1, n_nodes), n_runs))
    for k in range(n_nodes):
        a = rng.choice(values[-3:])
        kind = rng.choice(["silu", "sum_rows", "concat", "add", "view", "sqr", "mul"])
        if k in anchors:
            side = s.weight(rng.choice(backends[:-1]), a.ne[0], 3, name=f"w{k}")
            t = s.ctx.mul_mat(side, a)
        elif kind == "concat" and a.nbytes < 4096:
            t = s.ctx.concat(a, a, 1)
        elif kind == "sum_rows":
            t = s.ctx.sum_rows(a)
        elif kind in ("add", "mul"):
            same = [v for v in values if v.ne == a.ne]
            t = getattr(s.ctx, kind)(a, rng.choice(same))
        elif kind == "view":
            t = s.ctx.sqr(s.ctx.reshape(a, a.n_elements)) if a.is_contiguous else s.ctx.neg(a)
            t = s.ctx.reshape(t, *a.ne)
        else:
            t = getattr(s.ctx, "silu" if kind == "silu" else "sqr")(a)
        values.append(s.named(f"t{k}", t))
    return s, gs.Graph(*values)


def open_nodes(plan):
    """Positions among the computing nodes, and those of them that no rule decides."""
    work = [t for t in plan.graph.nodes if t.op not in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")]
    return work, [any(words in plan.explain(t) for words in ("nearest node", "fewer bytes cross")) for t in work]


def bytes_of(s, graph, placed, leafs):
    """Bytes copied per compute with the nodes on the backends of `placed`."""
    with gs.Scheduler(s.backends) as sched:
        for t, backend in (*placed.items(), *leafs.items()):
            sched.set_tensor_backend(t, backend)
        plan = verified(sched.plan(graph))
        assert all(plan.backend_of(t) is backend for t, backend in placed.items())
        return plan.copy_bytes


@quick(40)
@given(st.randoms(use_true_random=False), st.integers(3, 14))
def test_no_other_cut_of_a_seam_is_cheaper(rng, n_nodes):
    """Brute force: every seam, every other place for it within the open stretch."""
    s, graph = random_seams(rng, n_nodes, rng.randint(1, min(3, n_nodes - 1)))
    plan = verified(s.sched.plan(graph))
    work, is_open = open_nodes(plan)
    where = [plan.backend_of(t) for t in work]
    leafs = {t: plan.backend_of(t) for t in graph.leafs if not t.is_resident and plan.backend_of(t)}
    chosen = bytes_of(s, graph, dict(zip(work, where, strict=True)), leafs)
    assert chosen == plan.copy_bytes
    for seam in range(1, len(work)):
        left, right = where[seam - 1], where[seam]
        if left is right:
            continue
        low = high = seam
        while low > 0 and is_open[low - 1] and where[low - 1] is left:
            low -= 1
        while high < len(work) and is_open[high] and where[high] is right:
            high += 1
        for cut in range(low, high + 1):
            moved = [*where[:low], *[left] * (cut - low), *[right] * (high - cut), *where[high:]]
            assert bytes_of(s, graph, dict(zip(work, moved, strict=True)), leafs) >= chosen, (seam, cut)


def test_plans_tell_buffers_of_one_backend_apart_by_who_reads_them():
    """Equal graphs with weights on the same backend, but the device reads only one of the two buffers."""
    device, host = dry_device("GPU", reads=()), gs.DryBackend("CPU")
    device.answers["supports_buffer"] = lambda inherited, buffer: inherited(buffer) or getattr(buffer, "pinned", False)
    with gs.Scheduler((device, host)) as sched:
        for pinned in (True, False, True, False):
            ctx, w = gs.Context(), resident_tensor(host, (8, 8))
            w.buffer.pinned = pinned
            out = ctx.mul_mat(w, ctx.tensor("f32", (8, 4), "x", input=True))
            sched.set_tensor_backend(out, device)
            plan = verified(sched.plan(gs.Graph(out)))
            assert [c.tensor.name for c in plan.copies] == (["x"] if pinned else ["w", "x"])
