"""Fusion groups: which of those that backends offer a plan keeps, the memory of their members, and how backends receive
them."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from configs import DATA, sample_paths
from devices import device, poisoned, resident_tensor
from fusing import Fusing, anything, chains, groups_of
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan, plan_values
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import Program
from ggml_sched.planning.verify import check

NORM_MUL = chains(("RMS_NORM", "MUL"), ("NORM", "MUL"))
ADD_NORM_MUL = chains(("ADD", "RMS_NORM", "MUL"), ("ADD", "NORM", "MUL"), ("RMS_NORM", "MUL"), ("NORM", "MUL"))


def offering(name="A", offer=(), **options):
    """A dry backend that offers these groups, or those that a function finds in the graph; records the queries."""
    answers = {"fusion_groups": lambda _, graph: made.offer(graph) if callable(made.offer) else made.offer}
    made = device(gs.DryBackend, name, {"fusion_groups"}, answers=answers, attributes={"offer": offer}, **options)
    return made


def planned(graph, *backends, policy="default", assigned=(), **options):
    with gs.Scheduler(backends, policy, **options) as scheduler:
        for t, backend in assigned:
            scheduler.set_tensor_backend(t, backend)
        plan = scheduler.plan(graph)
    plan.verify()
    return plan


def layer(ctx, x, w):
    """x + (norm(x) * w)**2: nodes norm, mul, sqr, add."""
    h = ctx.set_name(ctx.mul(ctx.set_name(ctx.rms_norm(x, 1e-5), "norm"), w), "scaled")
    return ctx.add(x, ctx.sqr(h))


class Case:
    """Two layers: silu, norm, mul, sqr, add, norm, mul, sqr, add."""

    def __init__(self, rows=4):
        self.ctx = ctx = gs.Context()
        self.x = ctx.tensor("f32", (64, rows), "x", input=True)
        self.w = ctx.tensor("f32", 64, "w", input=True)
        h = ctx.silu(self.x)
        for _ in range(2):
            h = layer(ctx, h, self.w)
        self.out = ctx.set_output(h)
        self.graph = gs.Graph(h)
        self.ops = [t.op for t in self.graph.nodes]


def death(plan, t):
    """The last node whose computation needs the memory of t."""
    return plan.data.sequence[plan.data.lifetime(plan.graph.id_of(t))[1]]


# -- queries for groups ----------------------------------------------------------------------------


def test_a_backend_offers_nothing_unless_it_says_so():
    case = Case()
    assert tuple(gs.CpuBackend(1).fusion_groups(case.graph)) == ()
    plan = planned(case.graph, gs.DryBackend("A"))
    assert plan.data.groups == plan.groups == ()
    assert "groups" not in plan_values(plan.data)


def test_groups_are_asked_for_once_for_each_new_plan():
    a, b = offering("A", ()), offering("B", NORM_MUL)
    with gs.Scheduler([a, b]) as scheduler:
        first = scheduler.plan(Case().graph)
        again = scheduler.plan(Case().graph)
        assert again.data is first.data and [x.count("fusion_groups") for x in (a, b)] == [1, 1]
        scheduler.reset()
        scheduler.plan(Case().graph)
        assert [x.count("fusion_groups") for x in (a, b)] == [2, 2]
        assert len(first.data.groups) == 2
        b.answers_version += 1
        b.offer = ()
        assert scheduler.plan(Case().graph).data.groups == ()
        assert [x.count("fusion_groups") for x in (a, b)] == [3, 3]


def test_the_seed_policy_asks_for_none_and_stays_as_it_was():
    case, backend = Case(), offering("A", NORM_MUL)
    plan = planned(case.graph, backend, policy="seed")
    assert backend.count("fusion_groups") == 0
    assert plan_values(plan.data) == plan_values(planned(Case().graph, gs.DryBackend("A"), policy="seed").data)


@pytest.mark.parametrize("offer", [[], [(1, 2)]])
def test_what_is_offered_and_not_kept_changes_nothing(offer):
    """Nodes 1 and 2 come to lie in two splits."""
    plans = []
    for groups in (offer, ()):
        case, a, b = Case(), offering("A", groups), gs.DryBackend("B")
        plans.append(planned(case.graph, a, b, assigned=[(case.graph.nodes[1], a), (case.graph.nodes[2], b)]))
        assert len(plans[-1].splits) > 1
    assert plan_values(plans[0].data) == plan_values(plans[1].data)


@pytest.mark.parametrize(("offer", "said"), [
    ([(1, "two")], r"'A' would compute \(1, 'two'\) as one, which are no positions"),
    ([1], "'A' would compute 1 as one, which are no positions"),
    ([(1,)], r"'A' would compute the nodes \[1\] as one: a group has two or more"),
    ([()], r"nodes \[\] as one: a group has two or more"),
    ([(7, 9)], r"nodes \[7, 9\] as one: the graph has the nodes 0 .. 8"),
    ([(-1, 3)], r"nodes \[-1, 3\] as one: the graph has"),
    ([(2, 1)], r"nodes \[2, 1\] as one \(.*'scaled'.*, .*'norm'.*\): they do not ascend"),
    ([(1, 1)], r"nodes \[1, 1\] as one .*: they do not ascend"),
    ([(1, 2), (2, 3)], r"nodes \[2, 3\] as one .*'scaled'.* is in another group of this backend already"),
    ([(1, 3), (0, 1)], r"'norm'.* is in another group"),
    ([(3, 2**40)], r"nodes \[3, 1099511627776\] as one: the graph has"),
])
def test_nonsense_is_an_error_that_names_the_backend_and_the_nodes(offer, said):
    backend = offering("A", offer)
    with gs.Scheduler([backend]) as scheduler:
        for _ in range(2):
            with pytest.raises(gs.BackendError, match=said):
                scheduler.plan(Case().graph)
        backend.offer = [(1, 2)]
        assert scheduler.plan(Case().graph).data.groups == ((1, 2),)


def test_a_view_computes_nothing_and_is_in_no_group(ctx):
    t = ctx.relu(ctx.reshape(ctx.neg(ctx.tensor("f32", (4, 2), "x", input=True)), 8))
    backend = offering("A", [(0, 1, 2)])
    with gs.Scheduler([backend]) as scheduler, pytest.raises(gs.BackendError, match="computes nothing"):
        scheduler.plan(gs.Graph(t))


def test_what_a_backend_raises_reaches_the_caller():
    broken = device(gs.DryBackend, "A", fails={"fusion_groups"})
    broken.fail_next("fusion_groups", RuntimeError("no idea"))
    with gs.Scheduler([broken]) as scheduler, pytest.raises(RuntimeError, match="no idea"):
        scheduler.plan(Case().graph)


# -- which are kept ------------------------------------------------------------------------------------


def test_the_group_is_kept_where_all_its_nodes_are_in_one_split():
    case, a, b = Case(), offering("A", NORM_MUL), offering("B", NORM_MUL)
    assert case.ops == ["UNARY:SILU", "RMS_NORM", "MUL", "SQR", "ADD"] + ["RMS_NORM", "MUL", "SQR", "ADD"]
    plan = planned(case.graph, a, b, assigned=[(t, b if k >= 5 else a) for k, t in enumerate(case.graph.nodes)])
    assert plan.data.groups == ((1, 2), (5, 6))
    assert [plan.backend_of(group[-1]) for group in plan.groups] == [a, b]
    cut = planned(case.graph, a, b, assigned=[(t, b if k >= 6 else a) for k, t in enumerate(case.graph.nodes)])
    assert cut.data.groups == ((1, 2),)


def test_backends_do_not_get_the_groups_of_others():
    case, b = Case(), gs.DryBackend("B")
    plan = planned(case.graph, offering("A", NORM_MUL), b, assigned=[(t, b) for t in case.graph.nodes])
    assert plan.data.groups == ()


@pytest.mark.parametrize(("between", "kept"), [
    ("reads a member", False), ("reads a view of a member", False), ("writes what a member reads", False),
    ("writes what a member keeps", False), ("writes what a member writes", False),
    ("reads what a member writes", False),
    ("keeps a member", False), ("keeps a source", True), ("reads a source", True), ("nothing to do with it", True),
])
def test_a_node_between_the_members_must_not_notice(ctx, between, kept):
    """Members are `first` and `last`; `n` stands between them."""
    x, y = (ctx.tensor("f32", (8, 2), name, input=True) for name in "xy")
    cache = ctx.tensor("f32", (8, 2), "cache", input=True)
    source = ctx.sqr(x)
    first = ctx.add(source, cache)
    match between:
        case "reads a member":
            n = ctx.neg(first)
        case "reads a view of a member":
            n = ctx.neg(ctx.reshape(first, 16))
        case "writes what a member reads":
            n = ctx.cpy(y, cache)
        case "writes what a member keeps":
            n = ctx.cpy(y, cache)
            first = ctx.neg(source)
            ctx.keep_until(cache, first)
        case "writes what a member writes":
            first, n = ctx.cpy(source, cache), ctx.cpy(y, cache)
        case "reads what a member writes":
            first, n = ctx.cpy(source, cache), ctx.add(cache, y)
        case "keeps a member":
            n = ctx.neg(y)
            ctx.keep_until(first, n)
        case "keeps a source":
            n = ctx.neg(y)
            ctx.keep_until(source, n)
        case "reads a source":
            n = ctx.neg(source)
        case _:
            n = ctx.neg(y)
    last = ctx.add(first, source)
    graph = gs.Graph(first, n, last)
    at = {t: graph.position_of(t) for t in (first, n, last)}
    assert at[first] < at[n] < at[last]
    plan = planned(graph, offering("A", [(at[first], at[last])]))
    assert (plan.data.groups == ((at[first], at[last]),)) is kept


def test_groups_may_overlap_in_the_order_of_nodes(ctx):
    a, b = (ctx.tensor("f32", (8, 2), name, input=True) for name in "ab")
    p, q = ctx.neg(a), ctx.neg(b)
    r, s = ctx.abs(p), ctx.abs(q)
    graph = gs.Graph(p, q, r, s)
    plan = planned(graph, offering("A", [(0, 2), (1, 3)]))
    assert plan.data.groups == ((0, 2), (1, 3))


def test_a_group_that_something_goes_back_from_in_its_midst_is_not_kept():
    """B computes into a copy of a cache of A, which goes back before the next node."""
    a, b, ctx = gs.DryBackend("A"), offering("B"), gs.Context()
    cache = resident_tensor(a, (8, 2), "cache", usage="any")
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    h = ctx.neg(x)
    write = ctx.cpy(h, cache)
    t = ctx.sqr(h)
    graph = gs.Graph(h, write, t)
    for offer, kept in (((0, 1), True), ((0, 1, 2), False), ((0, 2), False), ((1, 2), False)):
        b.offer = [offer]
        plan = planned(graph, a, b, assigned=[(node, b) for node in graph.nodes])
        assert len(plan.data.write_backs) == 1
        assert (plan.data.groups == (offer,)) is kept, offer


# -- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [(1, 3), (0, 1, 3)], ids=["source", "member"])
def test_sources_and_members_stay_until_the_last_member_is_done(ctx, group):
    """Though no member reads them any more: a backend may compute all where the last stands, after `between`."""
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    first = ctx.sqr(x)
    second = ctx.sum_rows(first)
    between = ctx.soft_max(x)
    last = ctx.mul(between, second)
    graph = gs.Graph(first, second, between, last)
    alone, plan = planned(graph, gs.DryBackend("A")), planned(graph, offering("A", [group]))
    assert plan.data.groups == (group,)
    assert death(alone, first) == graph.id_of(second)
    assert death(plan, first) == death(plan, between) == graph.id_of(last)


def test_members_take_each_other_over_and_nothing_from_outside(ctx):
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    source = ctx.sqr(x)
    nodes = [source, ctx.neg(source)]
    nodes.append(ctx.relu(nodes[-1]))
    nodes.append(ctx.abs(nodes[-1]))
    nodes.append(ctx.sqr(nodes[-1]))
    graph = gs.Graph(nodes[-1])
    assert list(graph.nodes) == nodes

    def took(plan):
        return [plan.data.is_inplace(graph.id_of(t)) for t in nodes]

    assert took(planned(graph, gs.DryBackend("A"))) == [False, True, True, True, True]
    # The node after the group reuses its memory in place.
    plan = planned(graph, offering("A", [(1, 2, 3)]))
    assert took(plan) == [False, False, True, True, True]
    assert [plan.data.is_inner(graph.id_of(t)) for t in nodes] == [False, True, True, False, False]


def test_a_member_gives_no_tail_back_before_the_last_is_done(ctx):
    """The second member takes over the front of the first, whose memory a backend may write once more."""
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    first = ctx.sqr(x)
    front = ctx.neg(ctx.view_1d(first, 64))
    between = ctx.soft_max(x)
    last = ctx.add(between, front)
    graph = gs.Graph(first, front, between, last)
    at = tuple(graph.position_of(t) for t in (first, front, last))
    plan = planned(graph, offering("A", [at]), policy="default")
    assert plan.data.groups == (at,)
    begin, size = plan.offset_of(first), plan.data.size(graph.id_of(first))
    assert not begin < plan.offset_of(between) + between.nbytes <= begin + size


def test_what_somebody_else_reads_later_is_needed_and_what_the_caller_reads_too(ctx):
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    names = {}
    names["read later"] = a = ctx.neg(x)
    names["inner"] = b = ctx.sqr(a)
    names["output"] = c = ctx.set_output(ctx.relu(b))
    names["viewed by an output"] = d = ctx.abs(c)
    view = ctx.set_output(ctx.view_1d(d, 8))
    names["unread"] = e = ctx.scale(d, 2.0)
    names["kept"] = f = ctx.scale(d, 3.0)
    names["last"] = g = ctx.add(d, f)
    after = ctx.add(g, a)
    ctx.keep_until(f, after)
    graph = gs.Graph(a, b, c, d, view, e, f, g, after)
    group = tuple(graph.position_of(t) for t in (a, b, c, d, e, f, g))
    plan = planned(graph, offering("A", [group]))
    assert plan.data.groups == (group,)
    assert [name for name, t in names.items() if plan.data.is_inner(graph.id_of(t))] == ["inner"]


def test_a_member_in_memory_of_its_own_outside_the_plan_is_needed():
    backend, ctx = Fusing("F", lambda graph: [(0, 1)]), gs.Context()
    x = ctx.tensor("f32", 8, "x", input=True)
    inner = ctx.neg(x)
    t = ctx.relu(inner)
    with backend:
        memory = backend.alloc_buffer(64)
        gs.bind_resident(inner, memory, 0)
        with gs.Scheduler([backend]) as scheduler:
            plan = scheduler.alloc(gs.Graph(t))
            assert plan.data.groups == ((0, 1),) and not plan.data.is_inner(plan.graph.id_of(inner))
            x.set(np.arange(8, dtype=np.float32) - 4)
            scheduler.compute(plan.graph)
            assert inner.numpy().tolist() == [4, 3, 2, 1, 0, -1, -2, -3]
            assert t.numpy().tolist() == [4, 3, 2, 1, 0, 0, 0, 0]
        memory.close()


def test_members_without_bytes(ctx):
    x = ctx.tensor("f32", (0, 4), "x", input=True)
    t = ctx.relu(ctx.neg(x))
    plan = planned(gs.Graph(t), offering("A", [(0, 1)]))
    assert plan.data.groups == ((0, 1),)


def test_a_group_that_a_leaf_is_loaded_in_the_midst_of_is_not_kept(ctx):
    """Leafs are born with their first readers here, where others have lived; the second member reads one."""
    x, late = (ctx.tensor("f32", (64, 4), name, input=True) for name in ("x", "late"))
    h = ctx.sum_rows(ctx.mul_mat(x, x))
    inner = ctx.neg(h)
    t = ctx.mul(late, inner)
    graph = gs.Graph(t)
    backend = offering("A", [tuple(graph.position_of(node) for node in (inner, t))])
    for offsets, kept in (("best fit", 0), ("packed", 1)):
        policy = Policy(leafs_first=offsets == "packed", offsets=offsets)
        data = make_plan(Request(graph, Devices((backend,)), None), policy)
        assert data.is_late(graph.id_of(late)) is not bool(kept)
        assert len(data.groups) == kept
        assert data.is_inner(graph.id_of(inner)) is bool(kept)
        Plan(graph, data, (backend,), "some").verify()


@quick(100)
@given(recipes(), st.integers(0, 1000), st.integers(1, 3), st.booleans(), st.integers(1, 3),
       st.sampled_from(["first", "whole", "front", "all"]), st.sampled_from(["packed", "best fit"]), st.booleans(),
       st.sampled_from([None, 512, 4096]), st.lists(st.tuples(st.integers(0, 63), st.integers(0, 2)), max_size=3))
def test_random_plans_of_any_policy_are_sound(recipe, seed, n, stream, places, reuse, offsets, late, chunk,
                                               wishes):
    built = Built(recipe, n)
    backends = tuple(offering(f"A{k}", anything(seed + k), max_buffer_size=chunk) for k in range(n))
    policy = Policy(reuse=reuse, offsets=offsets, leafs_first=not late, stream=stream, n_copies=places)
    assigned = {built.graph.nodes[k % len(built.graph)]: backends[b % n] for k, b in wishes}
    try:
        for home, backend in zip(built.homes, backends, strict=True):
            backend.alloc_tensors(home, "weights" if seed % 2 else "any")
        request = Request(built.graph, Devices(backends), assigned)
        data = make_plan(request, policy)
    except gs.OutOfMemory:      # the residents, or a tensor of the plan, are larger than a buffer may be
        return
    plan = Plan(built.graph, data, backends, "random")
    plan.verify()
    groups = request.groups(policy)
    assert set(data.groups) <= {members for _, members in groups}
    for group in plan.groups:
        assert len({plan.backend_of(t) for t in group}) == 1


FREE_OF_COST = [path for path in sample_paths()
                if path.name.startswith(("llama-160m-d", "gpt2-124m-d", "llama-2-7b-fa-d"))]


@pytest.mark.skipif(not (DATA / "graphs").is_dir(), reason="the recorded graphs are not here")
@pytest.mark.parametrize("path", FREE_OF_COST, ids=lambda path: path.name.split(".")[0])
def test_the_usual_groups_cost_no_bytes_on_recorded_graphs(path):
    offers = {"none": (), "norm": NORM_MUL, "add": ADD_NORM_MUL, "rope": chains(("ROPE", "SET_ROWS"), ("ROPE", "CPY"))}
    sizes, groups = {}, {}
    for name, offer in offers.items():
        backend = offering("A", offer)
        graph = gs.load_graph(path, place=lambda t, backend=backend: backend)
        # Planned only: the plans of these graphs are verified in other tests, which takes long.
        with gs.Scheduler([backend]) as scheduler:
            plan = scheduler.plan(graph)
        sizes[name], groups[name] = plan.buffer_sizes, len(plan.data.groups)
        assert groups[name] == len(list(offer(graph) if offer else ()))
    assert len(set(sizes.values())) == 1
    assert groups["norm"] > 20 and groups["add"] == groups["norm"]


# -- rules of verify ------------------------------------------------------------------------------------


def spread_group():
    """Facts of: source, inner (member), between, last (member), after."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    source = ctx.set_name(ctx.sqr(x), "source")
    inner = ctx.set_name(ctx.norm(source, 1e-5), "inner")
    between = ctx.set_name(ctx.soft_max(x), "between")
    last = ctx.set_name(ctx.add(inner, between), "last")
    after = ctx.set_name(ctx.soft_max(last), "after")
    graph = gs.Graph(source, inner, between, last, after)
    plan = planned(graph, offering("A", [(1, 3)]))
    assert plan.data.groups == ((1, 3),)
    return plan.facts


def moved(facts, new, old):
    """Give one tensor the offset of another, and mark the other as overwritten."""
    x, y = (facts.name.index(name) for name in (new, old))
    offset = list(facts.offset)
    offset[x] = offset[y]
    steps = [step if step.kind == "run" else step._replace(locations=tuple(
        p._replace(offset=offset[p.id]) for p in step.locations)) for step in facts.program.steps]
    return replace(facts, offset=offset, program=Program(tuple(steps), facts.program.inputs, facts.program.copy_slots),
                   overwritten=facts.overwritten - {x} | {y})


@pytest.mark.parametrize(("new", "old", "reason"), [
    ("between", "source", "overlap"),       # the group has yet to read it
    ("last", "source", "clobbered-read"),   # the group reads it at the same time
    ("inner", "source", "overlap"),
    ("between", "inner", "overlap"),        # a backend may still write it
])
def test_memory_that_a_group_still_needs_is_refused(new, old, reason):
    facts = spread_group()
    assert check(facts) == []
    found = check(moved(facts, new, old))
    assert reason in {problem.reason for problem in found}
    if new == "between" and old == "source":
        # Without the group it is sound.
        assert check(replace(moved(facts, new, old), groups=(), inner=frozenset())) == []


def test_a_member_that_takes_over_what_comes_from_outside_is_refused(ctx):
    source = ctx.set_name(ctx.sqr(ctx.tensor("f32", (64, 4), "x", input=True)), "source")
    inner = ctx.set_name(ctx.neg(source), "inner")
    graph = gs.Graph(ctx.set_name(ctx.relu(inner), "last"))
    facts = planned(graph, gs.DryBackend("A")).facts
    assert facts.is_inplace[facts.name.index("inner")] and check(facts) == []
    found = check(replace(facts, groups=((1, 2),), inner=frozenset({facts.name.index("inner")})))
    assert [problem.reason for problem in found] == ["inplace-live"]
    assert "'inner'" in found[0].message and "group" in found[0].message


def test_data_that_is_said_to_be_nowhere_and_is_read_is_refused(ctx):
    a = ctx.set_name(ctx.sqr(ctx.tensor("f32", (64, 4), "x", input=True)), "a")
    b = ctx.set_name(ctx.norm(a, 1e-5), "b")
    graph = gs.Graph(ctx.add(ctx.norm(b, 1e-5), a))
    facts = planned(graph, offering("A", [(0, 1)])).facts
    assert facts.inner == frozenset()
    lied = replace(facts, inner=frozenset({facts.name.index("a")}))
    assert {problem.reason for problem in check(lied)} <= {"read-before-write", "stale-read", "clobbered-read"}
    assert check(lied)


@pytest.mark.parametrize(("groups", "inner", "reason"), [
    (((1, 9),), (), "bad-index"), (((-1, 1),), (), "bad-index"), (((3, 1),), (), "bad-group"),
    (((1,),), (), "bad-group"), (((1, 3), (3, 4)), (), "bad-group"), (((),), (), "bad-group"),
    (((1, 3),), ("after",), "bad-group"), (((1, 3),), ("last",), "bad-group"),
])
def test_groups_that_are_none_are_refused(groups, inner, reason):
    facts = spread_group()
    facts = replace(facts, groups=groups, inner=frozenset(facts.name.index(name) for name in inner))
    assert check(facts)[0].reason == reason


def test_a_group_in_two_runs_is_refused():
    facts = spread_group()
    (k,) = [k for k, step in enumerate(facts.program.steps) if step.kind == "run"]
    steps = list(facts.program.steps)
    run = steps[k]
    steps[k : k + 1] = [run._replace(last=run.first + 2), run._replace(first=run.first + 3)]
    facts = replace(facts, program=Program(tuple(steps), facts.program.inputs, facts.program.copy_slots))
    assert check(facts)[0].reason == "bad-group"
    assert check(replace(facts, groups=(), inner=frozenset())) == []


# -- views that backends receive ---------------------------------------------------------------------------


class Seeing(Fusing):
    """Keeps the views that it computes."""

    def graph_compute(self, graph):
        if groups_of(graph):
            self.views.append(graph)
        super().graph_compute(graph)


def seeing(offer, name="F"):
    backend = Seeing(name, offer)
    backend.views = []
    return backend


def test_a_view_names_groups_by_the_nodes_that_compute_and_what_is_needed(ctx):
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    a = ctx.reshape(ctx.sqr(x), 8)
    b = ctx.neg(a)
    c = ctx.reshape(b, 4, 2)
    d = ctx.relu(c)
    alone = ctx.scale(d, 2.0)
    out = ctx.add(alone, d)
    graph = gs.Graph(out)
    with seeing(lambda graph: [(graph.position_of(b), graph.position_of(d))]) as backend, gs.Scheduler([backend]) as s:
        s.alloc(graph)
        x.set(np.arange(8, dtype=np.float32).reshape(2, 4) - 3)
        s.compute(graph)
        (view,) = backend.views
    assert [t.op for t in view.nodes] == ["SQR", "UNARY:NEG", "UNARY:RELU", "SCALE", "ADD"]
    assert view.groups == ((1, 2),)
    assert view.needed == {2, 4}            # the relu is read outside of its group, the sum by the caller
    assert gs.GraphView(graph.nodes[:3]).needed == {0, 1, 2} and gs.GraphView(()).groups == ()


def test_nodes_outside_of_groups_are_needed_where_another_view_reads_them():
    ctx, offer = gs.Context(), lambda graph: [(1, 2)]
    x = ctx.tensor("f32", 8, "x", input=True)
    a = ctx.sqr(x)
    b = ctx.relu(ctx.neg(a))
    c = ctx.abs(ctx.add(a, b))
    with seeing(offer) as f, gs.CpuBackend(1, "C") as host, gs.Scheduler([f, host]) as scheduler:
        graph = gs.Graph(c)
        for k, t in enumerate(graph.nodes):
            scheduler.set_tensor_backend(t, host if k >= 3 else f)
        scheduler.alloc(graph)
        x.set(np.arange(8, dtype=np.float32))
        scheduler.compute(graph)
        (view,) = f.views
    assert len(view.nodes) == 3 and view.needed == {0, 2}


def test_a_group_whose_members_read_copies(ctx):
    """Both members are twins, and the second one reads the first one's twin."""
    backend, host = seeing(lambda graph: [(graph.position_of(n), graph.position_of(m))]), gs.CpuBackend(1, "C")
    x, y = (ctx.tensor("f32", 8, name, input=True) for name in "xy")
    p, q = ctx.sqr(x), ctx.neg(y)
    n = ctx.add(p, q)
    m = ctx.mul(n, q)
    out = ctx.add(m, ctx.scale(m, 2.0))
    graph = gs.Graph(p, q, out)
    with backend, host, gs.Scheduler([backend, host], copies=2) as scheduler:
        for t in (p, q):
            scheduler.set_tensor_backend(t, host)
        for t in (n, m):
            scheduler.set_tensor_backend(t, backend)
        plan = scheduler.alloc(graph)
        assert plan.groups == ((n, m),) and plan.copies
        for turn in range(1, 5):
            x.set(np.arange(8, dtype=np.float32) * turn)
            y.set(np.arange(8, dtype=np.float32) - turn)
            scheduler.compute_async(graph)
            scheduler.synchronize()
            first, second = ((np.arange(8) * turn) ** 2, turn - np.arange(8))
            np.testing.assert_array_equal(out.numpy(), 3 * (first + second) * second)
        for view in backend.views:
            a, b = (view.nodes[k] for k in view.groups[0])
            assert a is not n and b.src[0] is a


def test_an_inner_result_cannot_be_read_unless_it_is_an_output():
    for output in (False, True):
        case = Case()
        norm = case.graph.nodes[1]
        if output:
            case.ctx.set_output(norm)
        graph = gs.Graph(case.out)
        with poisoned("F", base=Fusing, offer=NORM_MUL) as backend, gs.Scheduler([backend]) as scheduler:
            scheduler.alloc(graph)
            case.x.set(np.ones((4, 64), np.float32))
            case.w.set(np.ones(64, np.float32))
            scheduler.compute(graph)
            assert backend.fused == [("RMS_NORM", "MUL")] * 2
            if output:
                assert np.allclose(norm.numpy(), 1, atol=1e-3)
            else:
                with pytest.raises(gs.HazardError, match=r"'norm' \(RMS_NORM\) is nowhere: backend 'F' computes it as"):
                    norm.numpy()
            case.out.numpy()


# -- plans that are kept, replayed, saved ----------------------------------------------------------------


def test_a_reserved_plan_serves_smaller_graphs_with_its_groups():
    results = []
    for reserved in (True, False):
        with Fusing("F", NORM_MUL) as backend, gs.Scheduler([backend]) as scheduler:
            if reserved:
                scheduler.reserve(Case(8).graph)
            case = Case(3)
            plan = scheduler.alloc(case.graph)
            plan.verify()
            assert (plan.methods == ("replayed",)) is reserved
            assert plan.data.groups == ((1, 2), (5, 6))
            assert plan.data.is_inner(case.graph.id_of(case.graph.nodes[1]))
            rng = np.random.default_rng(0)
            case.x.set(rng.normal(size=(3, 64)).astype(np.float32))
            case.w.set(rng.normal(size=64).astype(np.float32))
            scheduler.compute(case.graph)
            results.append(case.out.numpy())
    np.testing.assert_array_equal(*results)


def test_a_reserved_plan_does_not_serve_a_graph_of_which_other_groups_are_offered():
    def offer(graph):
        return NORM_MUL(graph) if graph.nodes[0].ne[1] > 4 else ()

    with gs.Scheduler([offering("A", offer)]) as scheduler:
        scheduler.reserve(Case(8).graph)
        same, other = scheduler.plan(Case(5).graph), scheduler.plan(Case(3).graph)
    assert same.methods == ("replayed",) and len(same.data.groups) == 2
    assert other.methods != ("replayed",) and other.data.groups == ()


def test_reordered_graphs_are_asked_about_in_their_order(ctx):
    seen = []

    def offer(graph):
        seen.append([t.op for t in graph.nodes])
        return NORM_MUL(graph)

    x = ctx.tensor("f32", (64, 4), "x", input=True)
    w = ctx.tensor("f32", 64, "w", input=True)
    # Large results early, small ones of each late: the other order is better.
    wide = [ctx.repeat(ctx.scale(x, float(k)), ctx.tensor("f32", (64, 64), "like")) for k in range(1, 5)]
    ends = [ctx.sum_rows(ctx.mul(ctx.rms_norm(t, 1e-5), w)) for t in wide]
    graph = gs.Graph(*wide, *ends)
    plan = planned(graph, offering("A", offer), reorder=True)
    assert plan.graph is not graph and len(seen) == 2 and seen[0] != seen[1]
    assert [[t.op for t in group] for group in plan.groups] == [["RMS_NORM", "MUL"]] * 4


def test_saved_plans_bring_their_groups_and_are_refused_where_nobody_offers_them(tmp_path):
    case, backend = Case(), offering("A", ADD_NORM_MUL)
    plan = planned(case.graph, backend)
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    assert data["version"] == 2 and data["plan"]["groups"] == [[1, 2], [4, 5, 6]]
    loaded = gs.load_plan(path, Case().graph, [backend])
    assert plan_values(loaded.data) == plan_values(plan.data) and str(loaded) == str(plan)
    with pytest.raises(gs.PlacementError, match=r"'A' does not compute the nodes \[4, 5, 6\] .* as one"):
        gs.load_plan(path, case.graph, [offering("A", NORM_MUL)])
    with pytest.raises(gs.PlacementError, match="as one"):
        gs.load_plan(path, case.graph, [gs.DryBackend("A")])
    for groups in ([[1]], [[1, 99]], [["a", 2]], {"a": 1}, [3], [[]]):
        data["plan"]["groups"] = groups
        path.write_text(json.dumps(data))
        with pytest.raises(gs.FileFormatError, match="groups"):
            gs.load_plan(path, case.graph, [backend])
    # A file without groups is what it was.
    planned(case.graph, gs.DryBackend("A")).save(path)
    plain = json.loads(path.read_text())
    assert plain["version"] == 1 and "groups" not in plain["plan"]


def test_a_file_that_claims_that_needed_data_is_nowhere_is_refused(tmp_path):
    case, backend = Case(), offering("A", ADD_NORM_MUL)
    plan = planned(case.graph, backend)
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    data["plan"]["state"][case.graph.id_of(case.graph.nodes[4])] |= 128      # the sum, which is read again
    path.write_text(json.dumps(data))
    with pytest.raises(gs.HazardError):
        gs.load_plan(path, case.graph, [backend])


def test_a_pickled_plan_has_its_groups_and_its_backends_offer_them():
    plan = planned(Case().graph, offering("A", NORM_MUL), offering("B", ADD_NORM_MUL))
    again = pickle.loads(pickle.dumps(plan))
    again.verify()
    assert again.data.groups == plan.data.groups == ((1, 2), (4, 5, 6))
    assert plan_values(again.data) == plan_values(plan.data) and str(again) == str(plan)
    a, b = again.backends
    assert list(b.fusion_groups(again.graph)) == [(1, 2), (4, 5, 6)]
    assert list(b.fusion_groups(Case(3).graph)) == list(a.fusion_groups(again.graph)) == []


def test_an_adopted_plan_is_computed_with_its_groups(tmp_path):
    case, path = Case(), tmp_path / "plan.json"
    planned(Case().graph, offering("A", ADD_NORM_MUL, alignment=64)).save(path)
    text = json.loads(path.read_text())
    with Fusing("A", ADD_NORM_MUL) as backend, gs.Scheduler([backend]) as scheduler:
        text["backends"] = [{**text["backends"][0], "concurrent_copies": backend.concurrent_copies,
                             "inplace": {op: backend.inplace_sources(op) for op in text["backends"][0]["inplace"]}}]
        path.write_text(json.dumps(text))
        scheduler.adopt(gs.load_plan(path, case.graph, [backend]))
        scheduler.alloc(case.graph)
        case.x.set(np.ones((4, 64), np.float32))
        case.w.set(np.ones(64, np.float32))
        scheduler.compute(case.graph)
        assert backend.fused == [("RMS_NORM", "MUL"), ("ADD", "RMS_NORM", "MUL")]


# -- reports --------------------------------------------------------------------------------


def test_explain_print_and_the_drawing_name_the_groups():
    case, backend = Case(), offering("G", ADD_NORM_MUL)
    plan = planned(case.graph, backend)
    add, norm, mul = plan.groups[1]
    together = "computed as one with tensor 7 'norm', tensor 8 'scaled' in place of node 6, as G offers"
    assert together in plan.explain(add)
    assert "need not be written" not in plan.explain(add)
    assert "in place of node 6, as G offers; only they read its result, so that it need not be w" in plan.explain(norm)
    assert "computed as one with" in plan.explain(mul) and "in place of" not in plan.explain(mul)
    assert "computed as one" not in plan.explain(case.graph.nodes[0])
    head = "computed as one: 5 nodes in 2 groups, 1 of RMS_NORM + MUL, 1 of ADD + RMS_NORM + MUL"
    assert head in str(plan).splitlines()
    assert plan.to_dot().count("\\ngroup 0") == 2 and plan.to_dot().count("\\ngroup 1") == 3
    plain = planned(case.graph, gs.DryBackend("G"))
    assert "as one" not in str(plain) and "as one" not in plain.explain(add) and "group" not in plain.to_dot()
