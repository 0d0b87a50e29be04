"""The memory maps in the README: the drawn tensors are those of the plan, and the file equals the command's output."""

from pathlib import Path

import peer
import picture
import pytest
import samples

DRAWN = Path(__file__).resolve().parents[2] / "docs" / "memory.svg"
with_peer = pytest.mark.skipif(not peer.available(), reason="python bench/peer/build.py makes the peer")


@pytest.fixture(scope="module")
def plan():
    return picture.our_plan()


def overlaps(of) -> list:
    blocks = [*zip(of.first.tolist(), of.stop.tolist(), of.low.tolist(), of.high.tolist(), strict=True)]
    return [(a, b) for i, a in enumerate(blocks) for b in blocks[:i]
            if a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]]


def test_our_map_is_the_plan(plan):
    (ours,) = picture.ours(plan).maps
    assert (ours.arena, ours.live) == (plan.buffer_sizes[0], plan.live_bytes[0])
    assert ours.high.max() == ours.arena
    assert overlaps(ours) == []
    placed = {plan.offset_of(t) for t in plan.graph.tensors if t.view_src is None and plan.offset_of(t) is not None}
    assert set(ours.low.tolist()) == placed


def test_the_drawing_is_of_this_plan_and_of_what_was_recorded_of_ggml(plan):
    drawn = DRAWN.read_text(encoding="utf-8")
    ours = picture.ours(plan)
    recorded = samples.recorded()[picture.GRAPH]
    (ggml,) = recorded["c1"]["buffer_bytes"]
    live = recorded["live_bytes_lower_bound_align32"]
    assert ours.maps[0].live == live
    assert f">{ours.title}<" in drawn and f">{ours.subtitle}<" in drawn
    assert f">{ggml:,} bytes, {ggml / live - 1:.1%} above the most that are alive at once<" in drawn
    for name, low, high in zip(ours.names[0], ours.maps[0].low, ours.maps[0].high, strict=True):
        assert f"<title>{name}: {high - low:,} bytes at {low:,}</title>" in drawn


def test_the_drawing_is_in_the_readme():
    assert "](docs/memory.svg)" in (DRAWN.parent.parent / "README.md").read_text(encoding="utf-8")


@with_peer
def test_ggml_s_map_has_no_overlaps_and_fills_its_arena(plan):
    (theirs,) = picture.theirs(plan).maps
    assert overlaps(theirs) == []
    assert theirs.high.max() == theirs.arena
    assert theirs.live == samples.recorded()[picture.GRAPH]["live_bytes_lower_bound_align32"]


@with_peer
def test_the_command_draws_the_file(plan):
    assert picture.drawing(picture.theirs(plan), picture.ours(plan)) == DRAWN.read_text(encoding="utf-8")
