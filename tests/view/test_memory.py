"""Memory maps have every byte of a plan for as long as it is taken, and collapsing layers keeps their sum."""

from random import Random

import numpy as np
import pytest
from random_problems import plan_of, random_case
from shown_plans import recorded, small

import ggml_sched as gs
from ggml_sched.view.collapse import collapse
from ggml_sched.view.layers import Section, sections_of
from ggml_sched.view.memory import clock_of, memory_maps
from ggml_sched.view.roles import COPIES


def timed(plan):
    clock = clock_of(plan)
    return [Section(s.label, int(clock[s.first]), int(clock[s.stop])) for s in sections_of(plan)]


def taken(plan, b):
    """{time: {id: bytes}} alive on a backend, position by position; views take no time, so the last of equal counts."""
    data, clock, found = plan.data, clock_of(plan), {}
    ids = range(data.n_tensors + data.n_copies + len(data.slot_copies))
    for position in range(len(data.sequence)):
        if clock[position + 1] == clock[position]:
            continue        # a view
        alive = {}
        for k in ids:
            if data.memory_index(k) == b and data.size(k) and data.lifetime(k):
                (birth, death), (end, rest) = data.lifetime(k), data.trimmed(k) or (data.lifetime(k)[1], data.size(k))
                if birth <= position <= death:
                    alive[k] = data.size(k) if position <= end else rest
        found[int(clock[position])] = {k: n for k, n in alive.items() if n}
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_map_has_what_is_alive_at_each_time_and_no_two_blocks_overlap(seed):
    plan = plan_of(random_case(Random(seed)))
    for b, of in enumerate(memory_maps(plan)):
        assert (of.backend, of.arena, of.live) == (plan.backends[b].name, plan.buffer_sizes[b], plan.live_bytes[b])
        for time, alive in taken(plan, b).items():
            now = (of.first <= time) & (time < of.stop)
            shown = {}
            for owner, size in zip(of.owner[now].tolist(), (of.high - of.low)[now].tolist(), strict=True):
                shown[owner] = shown.get(owner, 0) + size
            assert alive.items() <= shown.items()
            # What is born at a view is drawn at the step before or after it.
            assert all(plan.data.lifetime(i) is not None for i in shown.keys() - alive.keys())
            order = np.argsort(of.low[now])
            low, high = of.low[now][order], of.high[now][order]
            if shown.keys() == alive.keys():
                assert (high[:-1] <= low[1:]).all()
        assert of.high.max(initial=0) <= of.arena
        times, nbytes = of.curve()
        assert nbytes.max(initial=0) >= max((sum(a.values()) for a in taken(plan, b).values()), default=0)
        assert not len(nbytes) or nbytes[-1] == 0
        assert list(times) == sorted(set(times.tolist()))


@pytest.mark.parametrize("name, configuration", [("llama-2-7b-prefill512", "c4"), ("mamba-1.4b-prefill512", "c1")])
def test_the_curve_of_a_model_reaches_the_live_bytes(name, configuration):
    for of in memory_maps(recorded(name, configuration)):
        assert of.curve()[1].max() == of.live


def test_buffers_of_an_arena_follow_one_another_and_copies_have_their_role():
    plan = recorded("llama-2-7b-decode", "c2half")
    gpu, _ = memory_maps(plan)
    of_copies = [i >= plan.data.n_tensors for i in gpu.owner.tolist()]
    assert any(of_copies) and (gpu.role == COPIES).tolist() == of_copies
    ctx = gs.Context()
    x = ctx.tensor("f32", (64,), "x", input=True)
    both = ctx.add(ctx.set_output(ctx.sqr(x)), ctx.set_output(ctx.sqrt(x)))
    with gs.Scheduler([gs.DryBackend("A", max_buffer_size=256)]) as scheduler:
        plan = scheduler.plan(gs.Graph(both))
    (of,) = memory_maps(plan)
    assert len(plan.chunk_sizes[0]) > 1 and of.high.max() == of.arena == sum(plan.chunk_sizes[0])
    assert len(set(of.low.tolist())) == len(plan.chunk_sizes[0])


@pytest.mark.parametrize("name, configuration", [("llama-2-7b-prefill512", "c4"), ("mixtral-8x7b-decode", "c2half"),
                                                 ("mamba-1.4b-prefill512", "c1")])
def test_collapsing_keeps_bytes_times_time_and_leaves_long_lived_blocks(name, configuration):
    plan = recorded(name, configuration)
    sections = timed(plan)
    for of in memory_maps(plan):
        found = collapse(of, sections)
        assert len(found.cells) < 10 * len(sections)
        for k, section in enumerate(sections):
            inside = found.section >= 0
            time = np.minimum(of.stop, section.stop) - np.maximum(of.first, section.first)
            area = ((of.high - of.low) * np.maximum(time, 0))[inside].sum()
            mine = [cell for cell in found.cells if cell.section == k]
            drawn = sum(c.part * (c.high - c.low) * (section.stop - section.first) for c in mine)
            assert drawn == pytest.approx(area)
            for one, other in zip(mine, mine[1:], strict=False):
                assert one.high <= other.low
            for cell in mine:
                assert 0 < cell.part <= 1 and cell.count > 0
                assert of.low[cell.largest] < cell.high and of.high[cell.largest] > cell.low
        for block in np.flatnonzero(found.section < 0):
            first, stop = of.first[block], of.stop[block]
            assert len([s for s in sections if s.first < stop and s.stop > first and s.stop > s.first]) > 2


def test_one_section_holds_all_blocks():
    plan = small(nodes=5)
    (of,) = memory_maps(plan)
    assert set(collapse(of, timed(plan)).section.tolist()) == {0}


def test_a_layer_of_views_alone_has_no_cells():
    ctx = gs.Context()
    x = ctx.tensor("f32", (8, 4), "x", input=True)
    view = ctx.set_name(ctx.reshape(ctx.set_name(ctx.mul_mat(x, x), "a-0"), (2, 8)), "v-1")
    with gs.Scheduler([gs.DryBackend("CPU")]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(ctx.set_name(ctx.sum_rows(view), "b-2"))))
    sections = timed(plan)
    assert [s.label for s in sections] == ["0", "1", "2"] and sections[1].first == sections[1].stop
    (of,) = memory_maps(plan)
    with np.errstate(all="raise"):
        found = collapse(of, sections)
    assert {cell.section for cell in found.cells} == {0, 2}
