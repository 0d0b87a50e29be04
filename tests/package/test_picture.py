"""The memory maps in the README: the drawn tensors are those of the plan, and the file equals the command's output."""

from pathlib import Path

import peer
import picture
import pytest
import samples

import ggml_sched as gs

DRAWN = Path(__file__).resolve().parents[2] / "docs" / "memory.svg"
with_peer = pytest.mark.skipif(not peer.available(), reason="python bench/peer/build.py makes the peer")


def overlaps(blocks) -> list:
    return [(a, b) for i, a in enumerate(blocks) for b in blocks[:i]
            if a.birth < b.death and b.birth < a.death
            and a.offset < b.offset + b.size and b.offset < a.offset + a.size]


def test_our_map_is_the_plan():
    graph, backends = samples.configured(picture.GRAPH, "c1")
    with gs.Scheduler(backends) as scheduler:
        plan = scheduler.plan(graph)
    ours = picture.ours()
    assert (ours.arena, ours.live) == (plan.buffer_sizes[0], plan.live_bytes[0])
    assert max(b.offset + b.size for b in ours.blocks) == ours.arena
    assert overlaps(ours.blocks) == []
    placed = {plan.offset_of(t) for t in graph.tensors if t.view_src is None and plan.offset_of(t) is not None}
    assert {b.offset for b in ours.blocks} == placed


def test_the_drawing_is_of_this_plan_and_of_what_was_recorded_of_ggml():
    drawn, ours = DRAWN.read_text(encoding="utf-8"), picture.ours()
    recorded = samples.recorded()[picture.GRAPH]
    (ggml,) = recorded["c1"]["buffer_bytes"]
    assert ours.live == recorded["live_bytes_lower_bound_align32"]
    right = picture.panel(ours, picture.LEFT + picture.PANEL + picture.GAP, picture.clock(), max(ggml, ours.arena))
    assert "\n".join(right) in drawn
    assert f"{ggml:,} bytes, {ggml / ours.live - 1:.1%} above the line" in drawn
    assert f"most bytes alive at once: {ours.live:,}" in drawn


def test_the_drawing_is_in_the_readme():
    assert "](docs/memory.svg)" in (DRAWN.parent.parent / "README.md").read_text(encoding="utf-8")


@with_peer
def test_ggml_s_map_has_no_overlaps_and_fills_its_arena():
    theirs = picture.theirs()
    assert overlaps(theirs.blocks) == []
    assert max(b.offset + b.size for b in theirs.blocks) == theirs.arena
    assert theirs.live == samples.recorded()[picture.GRAPH]["live_bytes_lower_bound_align32"]


@with_peer
def test_the_command_draws_the_file():
    assert picture.drawing(picture.theirs(), picture.ours()) == DRAWN.read_text(encoding="utf-8")
