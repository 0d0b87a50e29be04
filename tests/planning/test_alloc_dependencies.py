"""Alloc dependencies affect lifetimes and node order, and nothing else."""

import numpy as np
import pytest
from devices import resident_tensor

import ggml_sched as gs
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict
from ggml_sched.planning.reorder import reorder
from ggml_sched.planning.verify import check
from ggml_sched.planning.waits import Wait

POLICIES = ("default", "seed")


class Case:
    """`held` is read early, `late` is a much later node that may depend on it; nodes between need memory."""

    def __init__(self, keep=True, reader="relu"):
        self.ctx = ctx = gs.Context()
        self.x = ctx.tensor("f32", (64, 4), "x", input=True)
        self.held = ctx.set_name(ctx.scale(self.x, 2.0), "held")
        self.reader = getattr(ctx, reader)(self.held)
        chain = self.reader
        for _ in range(3):
            chain = ctx.add(ctx.soft_max(chain), ctx.sqr(chain))
        self.late = ctx.set_name(ctx.norm(chain, 1e-5), "late")
        self.out = ctx.set_output(ctx.add(ctx.neg(ctx.norm(self.late, 1e-6)), self.late))
        if keep:
            assert ctx.keep_until(self.held, self.late) is self.held
        self.graph = gs.Graph(self.out)


def death(plan, t):
    """Position in the sequence of the last moment at which the memory of t is taken."""
    return plan.data.lifetime(plan.graph.id_of(t))[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_memory_stays_until_the_node_is_done_and_no_longer(policy):
    case, free = Case(), Case(keep=False)
    with gs.Scheduler([gs.DryBackend("A")], policy) as scheduler:
        plan, without = scheduler.plan(case.graph), scheduler.plan(free.graph)
    plan.verify()
    assert plan.data.sequence[death(plan, case.held)] == case.graph.id_of(case.late)
    assert plan.live_bytes[0] == without.live_bytes[0] + case.held.nbytes
    # The node does not read `held`, so it does not reuse that memory in place; other in-place reuse is as before.
    assert not plan.data.is_inplace(case.graph.id_of(case.reader))
    assert without.data.is_inplace(free.graph.id_of(free.reader))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("through", ["view", "view of the keeping node's source"])
def test_a_view_keeps_its_root(ctx, policy, through):
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    held = ctx.sqr(x)
    part = ctx.view_1d(held, 64, 256)
    node = ctx.neg(ctx.sqr(ctx.view_1d(held, 64) if through != "view" else ctx.view_1d(x, 64)))
    ctx.keep_until(part, node)
    graph = gs.Graph(ctx.set_output(ctx.sqr(node)))
    with gs.Scheduler([gs.DryBackend("A")], policy) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    assert plan.data.sequence[death(plan, held)] == graph.id_of(node)


def test_a_node_does_not_take_over_what_it_keeps_though_it_reads_it_too(ctx):
    held = ctx.sqr(ctx.tensor("f32", 64, "x", input=True))
    node = ctx.neg(held)
    taken = gs.Scheduler([gs.DryBackend("A")]).plan(gs.Graph(node))
    assert taken.data.is_inplace(taken.graph.id_of(node))
    ctx.keep_until(held, node)
    plan = gs.Scheduler([gs.DryBackend("A")]).plan(gs.Graph(node))
    plan.verify()
    assert not plan.data.is_inplace(plan.graph.id_of(node))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_data_is_there_when_the_node_is_done(policy):
    seen = {}
    for keep in (True, False):
        case = Case(keep)
        values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
        with gs.Scheduler([gs.CpuBackend()], policy) as scheduler:
            scheduler.alloc(case.graph)
            case.x.set(values)

            def look(node, case=case, keep=keep, expected=values * 2):
                if node is case.late:
                    seen[keep] = np.array_equal(case.held.numpy(), expected)

            scheduler.compute(case.graph, look)
            scheduler.compute(case.graph)
            seen[keep, "out"] = case.out.numpy()
    assert seen[True] and not seen[False]
    np.testing.assert_array_equal(seen[True, "out"], seen[False, "out"])


def test_the_graph_holds_what_is_kept_and_computes_it_before(ctx):
    x = ctx.tensor("f32", 64, "x", input=True)
    leaf = ctx.tensor("f32", 64, "leaf")
    aside = ctx.neg(ctx.view_1d(leaf, 32))
    node = ctx.sqr(x)
    ctx.keep_until(aside, node)
    ctx.keep_until(aside, node)
    assert node.deps == (aside,) and aside.deps == ()
    graph = gs.Graph(node)
    assert graph.nodes == (aside.src[0], aside, node) and leaf in graph.leafs
    assert graph.deps == {node: (aside,)}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_travels_and_nothing_runs_elsewhere_for_it(policy):
    def planned(keep):
        ctx, backends = gs.Context(), [gs.DryBackend("A"), gs.DryBackend("B")]
        w, v = (resident_tensor(backend, (64, 64)) for backend in backends)
        x = ctx.tensor("f32", (64, 2), "x", input=True)
        held = ctx.mul_mat(w, x)
        there = ctx.relu(held)
        node = ctx.mul_mat(v, there)
        last = ctx.mul_mat(w, node)
        if keep:
            ctx.keep_until(held, node)
        graph = gs.Graph(ctx.set_output(ctx.sqr(last)))
        with gs.Scheduler(backends, policy) as scheduler:
            plan = scheduler.plan(graph)
        plan.verify()
        shown = ([plan.backend_of(t).name for t in graph.tensors], [(s.start, s.stop) for s in plan.splits],
                 [(c.name, c.split) for c in plan.copies])
        return shown, plan, held, node

    shown, plan, held, node = planned(True)
    assert shown == planned(False)[0]
    assert plan.backend_of(held) is not plan.backend_of(node)
    assert plan.data.sequence[death(plan, held)] == plan.graph.id_of(node)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("through_a_view", [False, True])
def test_a_leaf_that_nothing_reads_lies_where_the_node_runs(policy, through_a_view):
    ctx, backends = gs.Context(), [gs.CpuBackend(name="A"), gs.CpuBackend(name="B")]
    node = ctx.mul_mat(resident_tensor(backends[1], (64, 64)), ctx.tensor("f32", (64, 2), "x", input=True))
    leaf = ctx.tensor("f32", (64, 8), "leaf")
    ctx.keep_until(ctx.view_1d(leaf, 64) if through_a_view else leaf, node)
    graph = gs.Graph(ctx.set_output(ctx.sqr(node)))
    with gs.Scheduler(backends, policy) as scheduler:
        plan = scheduler.alloc(graph)
        plan.verify()
        assert plan.offset_of(leaf) is not None
        # The first generation gives a view that nothing reads to the first backend, and its root with it.
        assert plan.backend_of(leaf) is backends[0 if policy == "seed" and through_a_view else 1]
        graph.leafs[0].set(np.zeros(graph.leafs[0].ne[::-1], np.float32))
        scheduler.compute(graph, zero=True)


def test_it_is_part_of_the_fingerprint_and_of_the_wiring():
    kept, again, free = Case().graph, Case().graph, Case(keep=False).graph
    assert kept.fingerprint == again.fingerprint != free.fingerprint
    assert kept.wiring == again.wiring != free.wiring


def test_a_smaller_graph_is_replayed_only_where_it_keeps_the_same():
    def graph(rows, keep):
        ctx = gs.Context()
        x = ctx.tensor("f32", (64, rows), "x", input=True)
        held = ctx.scale(x, 2.0)
        node = ctx.norm(ctx.relu(held), 1e-5)
        if keep:
            ctx.keep_until(held, node)
        return gs.Graph(ctx.set_output(ctx.sqr(node)))

    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        scheduler.reserve(graph(8, True))
        for keep in (True, False):
            plan = scheduler.plan(graph(4, keep))
            plan.verify()
            assert (plan.methods == ("replayed",)) is keep


def test_another_order_of_the_nodes_respects_it(ctx):
    for reader in ("relu", "sqr"):
        case = Case(reader=reader)
        with gs.Scheduler([gs.DryBackend("A")], reorder=True) as scheduler:
            plan = scheduler.plan(case.graph)
            plan.verify()
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    # Without the dependency the small result comes first: fewer bytes are alive after it than after the large one.
    large, small = ctx.repeat(x, ctx.tensor("f32", (64, 64), "like")), ctx.sum_rows(x)
    ctx.keep_until(large, small)
    order = reorder(gs.Graph(small, large)).nodes
    assert order.index(large) < order.index(small)


def test_the_first_generations_allocator_keeps_it_too():
    ends = []
    for keep in (True, False):
        case = Case(keep)
        with gs.Allocator.measure() as allocator:
            allocator.alloc_graph(case.graph)
            ends.append(allocator.offset_of(case.held))
            between = case.graph.nodes[1:case.graph.position_of(case.late)]
            shared = {allocator.offset_of(t) for t in between}
            assert (ends[-1] in shared) is not keep


def test_other_backends_wait_for_the_node_that_keeps_their_data(ctx):
    backends = [gs.CpuBackend(name="A"), gs.CpuBackend(name="B")]
    x, y = (ctx.tensor("f32", (64, 4), name, input=True) for name in "xy")
    held, node = ctx.sqr(x), ctx.neg(ctx.sqr(y))
    ctx.keep_until(held, node)
    graph = gs.Graph(held, ctx.set_output(node))
    with gs.Scheduler(backends) as scheduler:
        for t, backend in ((x, backends[0]), (held, backends[0]), (y, backends[1]), (node, backends[1]),
                           (node.src[0], backends[1])):
            scheduler.set_tensor_backend(t, backend)
        plan = scheduler.alloc(graph)
        plan.verify()
        assert [s.backend for s in plan.splits] == backends and not plan.copies
        steps = plan.program.steps
        first, second = [k for k, step in enumerate(steps) if step.kind == "run"]
        assert Wait(first, 0) in steps[second].waits and Wait(second, 1) in steps[first].waits
        x.set(np.ones((4, 64), np.float32))
        y.set(np.full((4, 64), 3, np.float32))
        scheduler.compute_async(graph)
        scheduler.compute_async(graph)
        scheduler.synchronize()
        assert (node.numpy() == -9).all()
        assert scheduler.compute(graph, lambda t: True) and (node.numpy() == -9).all()


def test_what_cannot_be_kept_or_cannot_keep_is_refused_by_name(ctx):
    x = ctx.tensor("f32", 64, "the leaf", input=True)
    node = ctx.set_name(ctx.sqr(x), "the node")
    view = ctx.set_name(ctx.view_1d(node, 32), "the view")
    later = ctx.set_name(ctx.neg(node), "later")
    with pytest.raises(gs.GraphError, match=r"the leaf.*computes nothing"):
        ctx.keep_until(node, x)
    with pytest.raises(gs.GraphError, match=r"the view.*computes nothing"):
        ctx.keep_until(x, view)
    with pytest.raises(gs.GraphError, match=r"the node.*itself"):
        ctx.keep_until(node, node)
    with pytest.raises(TypeError):
        ctx.keep_until(None, node)
    other = gs.Context("gone")
    lost = other.tensor("f32", 4, "lost")
    other.close()
    with pytest.raises(gs.GraphError, match=r"lost.*gone"):
        ctx.keep_until(lost, node)
    assert node.deps == ()
    ctx.keep_until(later, node)
    with pytest.raises(gs.GraphError, match=r"cycle"):
        gs.Graph(later)
    with pytest.raises(gs.GraphError, match=r"not among the tensors"):
        gs.Graph.from_order([x, node], [node], [x])


def test_graph_files_hold_it(tmp_path):
    case = Case()
    gs.save_graph(case.graph, tmp_path / "g.json")
    loaded = gs.load_graph(tmp_path / "g.json")
    assert loaded.fingerprint == case.graph.fingerprint
    ids = case.graph.id_of(case.late), case.graph.id_of(case.held)
    assert loaded.deps == {loaded.tensors[ids[0]]: (loaded.tensors[ids[1]],)}


@pytest.mark.parametrize("deps, error", [([99], gs.FileFormatError), (["0"], gs.FileFormatError),
                                         (7, gs.FileFormatError), ([-1], gs.FileFormatError), ([2], gs.GraphError)])
def test_wrong_dependencies_in_a_file_name_the_tensor(ctx, deps, error):
    x = ctx.tensor("f32", 4, "x", input=True)
    data = graph_to_dict(gs.Graph(ctx.neg(ctx.sqr(x))))
    data["tensors"][1]["deps"] = deps
    with pytest.raises(error, match=r"deps|tensor 1|SQR"):
        graph_from_dict(data)
    data["tensors"][0]["deps"], data["tensors"][1]["deps"] = [1], []
    with pytest.raises(gs.GraphError, match=r"tensor 0.*computes nothing"):
        graph_from_dict(data)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_checker_finds_data_that_was_not_kept(policy):
    free = Case(keep=False)
    with gs.Scheduler([gs.DryBackend("A")], policy) as scheduler:
        facts = scheduler.plan(free.graph).facts
    assert check(facts) == []
    facts.deps[free.graph.id_of(free.late)] = (free.graph.id_of(free.held),)
    assert {p.reason for p in check(facts)} & {"overlap", "inplace-live"}


def test_drawings_show_it():
    case = Case()
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        text = scheduler.plan(case.graph).to_dot()
    assert f"t{case.graph.id_of(case.held)} -> t{case.graph.id_of(case.late)} [style=dotted]" in text
