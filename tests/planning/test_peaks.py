"""Peaks of arenas: all that is alive there, and sets of series that lower them, against a search over all sets."""

import itertools
import pickle
import tracemalloc

import pytest
from hypothesis import given
from random_graphs import Built, quick, recipes

import ggml_sched as gs


def plan_of(graph, *backends, assigned=None, **options):
    with gs.Scheduler(backends or [gs.DryBackend("A")], **options) as scheduler:
        for node, backend in (assigned or {}).items():
            scheduler.set_tensor_backend(node, backend)
        return scheduler.plan(graph)


def slow_live(plan, backend):
    """For each position {id: bytes} alive on a backend."""
    data, found = plan.data, []
    ids = range(data.n_tensors + data.n_copies + len(data.slot_copies))
    owners = [i for i in ids if data.memory_index(i) == backend and data.size(i) and data.lifetime(i)]
    for position in range(len(data.sequence) + 1):
        alive = {}
        for i in owners:
            birth, death = data.lifetime(i)
            end, rest = data.trimmed(i) or (death, data.size(i))
            if birth <= position <= death:
                alive[i] = data.size(i) if position <= end else rest
        found.append({i: nbytes for i, nbytes in alive.items() if nbytes})
    return found


def saved(positions, names, without):
    """Bytes that the peak falls by if series have no memory; `names`: {id: series}."""
    def peak(left_out):
        return max((sum(n for i, n in alive.items() if names[i] not in left_out) for alive in positions), default=0)
    return peak(()) - peak(without)


@given(recipes(max_steps=12))
@quick(80)
def test_peaks_and_caps_are_those_of_a_search_over_all_sets(recipe):
    built = Built(recipe)
    for k, node in enumerate(built.graph.nodes):
        built.ctx.set_name(node, f"{node.op}-{k}")
    backend = gs.DryBackend("A")
    backend.alloc_tensors(built.homes[0])
    plan = plan_of(built.graph, backend)
    (found,) = plan.peaks()
    positions = slow_live(plan, 0)
    assert (found.backend, found.arena, found.live) == ("A", plan.buffer_sizes[0], plan.live_bytes[0])
    if not found.live:
        assert found.peaks == found.caps == ()
        return

    def series_of(i):
        like = plan.graph.tensors[i if i < plan.data.n_tensors else plan.data.copies[i - plan.data.n_tensors][0]]
        ne = like.ne[: max((k + 1 for k in range(4) if like.ne[k] != 1), default=1)]
        digits = itertools.groupby(like.name, str.isdigit)
        name = "".join("#" if number else "".join(part) for number, part in digits)
        return name, like.op, str(like.type), ne

    names = {i: series_of(i) for alive in positions for i in alive}
    most = max(sum(alive.values()) for alive in positions)
    assert found.live == most
    wanted = {frozenset((name, sum(n for i, n in alive.items() if names[i] == name)) for name in map(names.get, alive))
              for alive in positions if sum(alive.values()) == most}
    shown = [frozenset(((s.name, s.op, s.type, s.ne), nbytes) for s, nbytes, _ in peak.series) for peak in found.peaks]
    assert set(shown) == wanted and len(shown) == len(wanted)
    for peak in found.peaks:
        assert sum(nbytes for _, nbytes, _ in peak.series) == most
        for s, _, alone in peak.series:
            assert alone == saved(positions, names, {(s.name, s.op, s.type, s.ne)})
    all_series = sorted(set(names.values()), key=str)
    for cap in found.caps:
        members = {(s.name, s.op, s.type, s.ne) for s in cap.series}
        assert cap.saves == saved(positions, names, members) > 0
        assert all(saved(positions, names, members - {one}) < cap.saves for one in members)
    if len(all_series) <= 12:
        best = 0
        for size in (1, 2, 3):
            search = max((saved(positions, names, set(chosen)) for chosen in itertools.combinations(all_series, size)),
                         default=0)
            shown = max((cap.saves for cap in found.caps if len(cap.series) == size), default=0)
            assert max(best, shown) == max(best, search)
            best = max(best, search)


def two_peaks(ctx):
    """A wide tensor early and another late, with a narrow one between them."""
    x = ctx.tensor("f32", (10,), "x", input=True)
    for name in ("first", "second"):
        wide = ctx.set_name(ctx.repeat(x, ctx.tensor("f32", (10, 1000))), f"{name}-wide")
        x = ctx.set_name(ctx.mul_mat(wide, x), f"{name}-scores")
        x = ctx.set_name(ctx.cont(ctx.view_1d(x, 10)), f"{name}-end")
    return gs.Graph(x)


def test_two_independent_peaks_need_a_cap_of_two():
    with gs.Context("two") as ctx:
        plan = plan_of(two_peaks(ctx))
        (found,) = plan.peaks()
    assert len(found.peaks) == 2
    alone = {series.name: saves for peak in found.peaks for series, _, saves in peak.series if "wide" in series.name}
    assert alone == {"first-wide": 0, "second-wide": 0}, "capping either alone saves nothing"
    sets = {frozenset(series.name for series in cap.series): cap.saves for cap in found.caps}
    assert sets[frozenset({"first-wide", "second-wide"})] > 30000
    assert all(len(members) > 1 for members in sets)
    assert pickle.loads(pickle.dumps(found)) == found
    text = str(found)
    assert "A: arena" in text and "alone saves" in text and "first-wide and second-wide" in text


def test_layers_are_one_series():
    with gs.Context("layers") as ctx:
        x = ctx.tensor("f32", (64,), "x", input=True)
        for layer in range(5):
            wide = ctx.set_name(ctx.repeat(x, ctx.tensor("f32", (64, 100))), f"wide-{layer}")
            x = ctx.view_1d(ctx.set_name(ctx.sqr(wide), f"square-{layer}"), 64)
        (found,) = plan_of(gs.Graph(ctx.relu(x))).peaks()
    peak = max(found.peaks, key=lambda peak: peak.times)
    assert any(series.name == "wide-#" and series.count == 5 for series, _, _ in peak.series)


def test_copies_are_named_as_copies_and_each_backend_has_its_peaks():
    with gs.Context("copies") as ctx:
        a, b = gs.DryBackend("A"), gs.DryBackend("B")
        x = ctx.tensor("f32", (100,), "x", input=True)
        there = ctx.set_name(ctx.relu(x), "there")
        here = ctx.set_name(ctx.sqr(there), "here")
        plan = plan_of(gs.Graph(here), a, b, assigned={there: a, here: b})
        found = plan.peaks()
    assert [arena.backend for arena in found] == ["A", "B"]
    assert any(series.name == "copy of there" for peak in found[1].peaks for series, _, _ in peak.series)
    assert [arena.live for arena in found] == list(plan.live_bytes)


def test_an_arena_without_tensors_has_no_peaks():
    with gs.Context("none") as ctx:
        plan = plan_of(gs.Graph(ctx.relu(ctx.tensor("f32", (4,), input=True))), gs.DryBackend("A"), gs.DryBackend("B"))
        empty = next(arena for arena in plan.peaks() if not arena.live)
    assert (empty.arena, empty.peaks, empty.caps) == (0, (), ()) and "arena 0 bytes" in str(empty)


@pytest.mark.parametrize("copies", [1, 3])
def test_copy_slots_count(copies):
    with gs.Context("slots") as ctx:
        a, b = gs.DryBackend("A"), gs.DryBackend("B")
        there = ctx.relu(ctx.tensor("f32", (100,), "x", input=True))
        here = ctx.sqr(there)
        plan = plan_of(gs.Graph(here), a, b, assigned={there: a, here: b}, copies=copies)
        assert [arena.live for arena in plan.peaks()] == list(plan.live_bytes)


def test_series_without_a_name_in_common_take_memory_by_their_number_alone():
    def letters(k):
        return chr(97 + k % 26) + (letters(k // 26) if k >= 26 else "z")

    n = 3000
    with gs.Context("letters") as ctx:
        x = t = ctx.tensor("f32", (64, 4), "x", input=True)
        for k in range(n):
            t = ctx.set_name(ctx.repeat(ctx.sum_rows(t), x), letters(k))
        plan = plan_of(gs.Graph(ctx.set_output(t)))
        tracemalloc.start()
        try:
            (found,) = plan.peaks()
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert most < 6000 * n, "a table of series times positions would have many times as many bytes"
    assert found.live == plan.live_bytes[0] and len(found.peaks) > n // 2
