"""SVG drawings: every arena and every memory is there, to scale, escaped; two plans have one scale."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from shown_plans import recorded, refused, small

import ggml_sched as gs
from ggml_sched.view.drawing import column_of, draw
from ggml_sched.view.ink import axis_steps, byte_text
from ggml_sched.view.memory import memory_maps
from ggml_sched.view.roles import ROLES

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text):
    return ElementTree.fromstring(text)


def texts(root):
    return [t.text for t in root.iter(f"{SVG}text")]


def blocks(root):
    """The rectangles of tensors: (title, x, y, width, height)."""
    colours = {role.colour for role in ROLES}
    return [(r[0].text, *(float(r.get(k)) for k in ("x", "y", "width", "height"))) for r in root.iter(f"{SVG}rect")
            if r.get("fill") in colours and len(r)]


def backgrounds(root):
    return [[float(r.get(k)) for k in ("x", "y", "width", "height")] for r in root.iter(f"{SVG}rect")
            if r.get("class") == "back"]


@pytest.mark.parametrize("plan", [recorded("llama-2-7b-decode", "c2half"), refused(), small()],
                         ids=["7b", "small", "one"])
def test_each_arena_has_its_title_its_blocks_and_its_size(plan):
    root = parsed(plan.to_svg())
    words = texts(root)
    maps = [of for of in memory_maps(plan) if of.arena]
    for of in maps:
        assert of.backend in words and any(f"arena {of.arena:,} bytes" in word for word in words)
    titles = [title for title, *_ in blocks(root)]
    wanted = [f"{of.high[k] - of.low[k]:,} bytes at {of.low[k]:,}" for of in maps for k in range(len(of.owner))]
    assert sorted(title.rpartition(": ")[2] for title in titles) == sorted(wanted)
    assert len(backgrounds(root)) == len(maps)


def test_blocks_are_to_scale():
    plan = recorded("llama-2-7b-decode", "c2half")
    root = parsed(plan.to_svg())
    drawn = blocks(root)
    for of, (x, y, wide, high) in zip((m for m in memory_maps(plan) if m.arena), backgrounds(root), strict=True):
        end = max(other.stop.max() for other in memory_maps(plan))
        for k in range(len(of.owner)):
            title = f"{plan.name_of(int(of.owner[k]))}: {of.high[k] - of.low[k]:,} bytes at {of.low[k]:,}"
            assert any(name == title
                       and left == pytest.approx(x + wide * of.first[k] / end, abs=1)
                       and across == pytest.approx(max(0.7, wide * (of.stop[k] - of.first[k]) / end), abs=1)
                       and top + tall == pytest.approx(y + high * (1 - of.low[k] / of.arena), abs=0.6)
                       and tall == pytest.approx(max(0.5, high * (of.high[k] - of.low[k]) / of.arena), abs=0.6)
                       for name, left, top, across, tall in drawn), title


def test_two_plans_stand_side_by_side_to_one_scale():
    seed, ours = (recorded("llama-2-7b-prefill512", "c4", policy) for policy in ("seed", "default"))
    root = parsed(seed.to_svg(ours, ("ggml's first", "ours")))
    assert {"ggml's first: 1,158 nodes", "ours: 1,158 nodes"} <= set(texts(root))
    drawn = backgrounds(root)
    assert len({x for x, *_ in drawn}) == 2 and len({wide for _, _, wide, _ in drawn}) == 1
    sizes = [of.arena for pair in zip(memory_maps(seed), memory_maps(ours), strict=True) for of in pair]
    scale = [high / size for size, (_, _, _, high) in zip(sizes, drawn, strict=True)]
    for one, other in zip(scale[::2], scale[1::2], strict=True):
        assert one == pytest.approx(other, rel=0.01)


def test_a_second_plan_that_is_none_is_refused():
    with pytest.raises(TypeError, match="not a Plan: 3"):
        small().to_svg(3)


def test_characters_that_xml_cannot_have_are_replaced():
    ctx = gs.Context()
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    y = ctx.set_output(ctx.set_name(ctx.sqr(x), "a\x00\x01\x1b\ufffe\t\n\x85b"))
    with gs.Scheduler([gs.DryBackend("A\x02")]) as scheduler:
        root = parsed(scheduler.plan(gs.Graph(y)).to_svg())
    assert "A\ufffd" in texts(root)
    assert any(title.startswith("a\ufffd\ufffd\ufffd\ufffd\t\n\x85b: ") for title, *_ in blocks(root))


def test_names_are_escaped_and_a_node_without_a_name_is_its_op():
    plan = refused()
    text = plan.to_svg()
    assert 'result &lt;"out"&gt;' in text or "result &lt;&quot;out&quot;&gt;" in text
    assert {"sqr"} == {title.partition(":")[0] for title, *_ in blocks(parsed(small().to_svg()))} - {"x"}


def test_many_blocks_are_one_path_for_each_role():
    plan = small(nodes=2000, outputs=True)
    root = parsed(plan.to_svg())
    (of,) = memory_maps(plan)
    assert len(of.owner) == 2001
    assert blocks(root) == []
    paths = [p for p in root.iter(f"{SVG}path") if p.get("fill")]
    assert len(paths) == len(set(of.role.tolist()))


def test_blocks_that_look_alike_are_drawn_once():
    column = column_of(small(nodes=2000, outputs=True))
    (of,) = column.maps
    many = replace(of, **{f: np.tile(getattr(of, f), 20) for f in ("owner", "first", "stop", "low", "high", "role")})
    repeated = replace(column, maps=(many,), names=[column.names[0] * 20])
    assert len(draw([repeated], "")) == len(draw([column], ""))


def test_a_plan_without_memory_is_drawn():
    ctx = gs.Context()
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.tensor("f32", 0, "empty", input=True)))
    assert "0 nodes, policy default" in texts(parsed(plan.to_svg()))


def test_notebooks_show_the_drawing_and_the_text():
    plan = refused()
    assert plan._repr_svg_() == plan.to_svg()
    shown = plan._repr_html_()
    assert shown.startswith(plan.to_svg()) and "buffer bytes" in shown and "<out" not in shown


def test_drawings_follow_the_reader_s_choice_of_light_and_dark_and_load_nothing():
    text = recorded("llama-2-7b-decode", "c2half").to_svg()
    assert "prefers-color-scheme:dark" in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "<script" not in text


@pytest.mark.parametrize("top", [1, 7, 64, 1000, 196_608, 310_384_640, 3 << 40])
@pytest.mark.parametrize("most", [2, 5])
def test_axes_have_a_few_round_numbers(top, most):
    steps = axis_steps(top, most)
    assert steps[0] == 0 and steps[-1] <= top and len(steps) - 1 <= most and 2 * len(steps) > min(most, top)
    assert steps.step.bit_count() == 1


def test_bytes_of_axes_have_their_unit():
    assert [byte_text(n) for n in (0, 512, 1536, 64 << 20)] == ["0", "512 B", "1.5 KiB", "64 MiB"]
