"""Drawings of fits: the bytes and the seconds of the answer are in the bars, to scale; before and after."""

import json
import re
from xml.etree import ElementTree

import pytest
from small_llama import SMALL

import ggml_sched as gs
from ggml_sched.planning.tables import memory_text, seconds
from ggml_sched.view.bars import KINDS, kind_of

SVG = "{http://www.w3.org/2000/svg}"
LINK = gs.Link(25e9, 8e-6)


def fitted(kib, **options):
    """A small model on a GPU of so much memory and a host."""
    devices = [gs.Device("GPU", kib << 10, bandwidth=1e12, flops=80e12, reserve=2 << 10),
               gs.Device("CPU", 1 << 30, bandwidth=60e9, flops=1e12, host=True)]
    return gs.fit(gs.llama.model_graphs(SMALL, 64, 8), devices, LINK, **options)


@pytest.fixture(scope="module")
def fit():
    return fitted(120)


def parsed(text):
    return ElementTree.fromstring(text)


def words(root):
    return [t.text for t in root.iter(f"{SVG}text")]


def titled(root):
    """{title: (x, width)} of rectangles with a title, in order."""
    return [(r[0].text, float(r.get("x")), float(r.get("width"))) for r in root.iter(f"{SVG}rect") if len(r)]


@pytest.mark.parametrize("name, kind", [
    ("blk.0.ffn_up_exps.weight", "experts"), ("blk.3.ffn_up.weight", "feed-forward"),
    ("blk.3.attn_q.bias", "attention"),
    ("blk.3.ssm_in.weight", "recurrent"), ("output.weight", "output"), ("token_embd.weight", "embedding, norms"),
    ("blk.2.attn_norm.weight", "embedding, norms"), ("w17", "other weights")])
def test_weights_are_told_apart_by_their_names(name, kind):
    assert kind_of(name) == kind and kind in KINDS


def test_every_byte_of_a_device_is_in_its_bar(fit):
    root = parsed(fit.to_svg())
    shown = titled(root)
    held = {}
    for entry in fit.placed:
        key = fit.devices[entry.device].name, kind_of(entry.name) if entry.kind == "weight" else "cache"
        held[key] = held.get(key, 0) + entry.nbytes
    for use in fit.memory:
        held |= {(use.device.name, "arena"): use.arena, (use.device.name, "reserve"): use.reserve}
    scale = None
    drawn = {title: (x, wide) for title, x, wide in shown}
    for (device, kind), nbytes in held.items():
        if nbytes:
            x, wide = drawn[f"{device}: {kind} {memory_text(nbytes)}"]
            scale = scale or wide / nbytes
            assert wide == pytest.approx(nbytes * scale, abs=0.11)
    for use in fit.memory:
        assert any(f"{memory_text(use.left)} free" in word for word in words(root))
        assert {use.device.name, memory_text(use.device.memory)} <= set(words(root))
    ends = {}
    for title, x, wide in shown:
        device = title.partition(":")[0]
        assert x == pytest.approx(ends.get(device, x), abs=0.2), "one beside the other"
        ends[device] = x + wide


@pytest.mark.parametrize("name", ["G\nPU", "GPU\u2028", "\x85", "<GPU\r"])
def test_a_name_with_a_line_break_is_drawn(name):
    fit = gs.fit(gs.llama.model_graphs(SMALL, 64, 8), [gs.Device(name, 1 << 30, 1e12, 8e13),
                                                       gs.Device("CPU", 1 << 30, 6e10, 1e12, host=True)], LINK)
    assert any((word or "").startswith("yes: all of it fits") for word in words(parsed(fit.to_svg())))


def test_the_time_has_its_parts_the_bound_and_the_gap(fit):
    root = parsed(fit.to_svg())
    said = words(root)
    assert f"no placement takes less than {seconds(fit.bound)}" in said
    assert f"{seconds(fit.seconds)}, {fit.full_gap:.2%} above the bound" in said
    (price, *_), (weight, *rest) = fit.prices, fit.goal
    assert weight == 1 and not any(rest)
    shown = {title: wide for title, _, wide in titled(root)}
    parts = {f"{d.name} computes": took for d, took in zip(fit.devices, price.compute, strict=True)}
    parts |= {"copies": price.copies, "splits": price.splits}
    wides = {what: shown[f"{what}: {seconds(took)}"] for what, took in parts.items() if took}
    scale = sum(wides.values()) / fit.seconds
    for what, wide in wides.items():
        assert wide == pytest.approx(parts[what] * scale, abs=0.2)
    line = next(p for p in root.iter(f"{SVG}path") if p.get("class") == "s-limit")
    x = float(re.match(r"M([\d.]+)", line.get("d"))[1])
    left = min(x for title, x, _ in titled(root) if "computes" in title)
    assert x == pytest.approx(left + fit.bound * scale, abs=0.5)


@pytest.mark.parametrize("kind", ["fit", "dict", "json"])
def test_another_answer_is_drawn_above_to_the_same_scale(fit, kind):
    earlier = fitted(90)
    before = {"fit": earlier, "dict": earlier.to_dict(), "json": json.loads(earlier.to_json())}[kind]
    root = parsed(fit.to_svg(before, ("small", "large")))
    said = words(root)
    assert said.count("small") == said.count("large") == 3, "of two devices, and of the time"
    slower = f"small {seconds(earlier.seconds)}, {earlier.seconds / fit.seconds:.2f} times as long"
    assert any(slower in word for word in said)
    both = {title: wide for title, _, wide in titled(root) if title.startswith("GPU: ")}
    for answer in (earlier, fit):
        use = answer.memory[0]
        nbytes = sum(e.nbytes for e in answer.placed if e.device == 0 and kind_of(e.name) == "feed-forward")
        if nbytes:
            assert both[f"GPU: feed-forward {memory_text(nbytes)}"] / nbytes == pytest.approx(
                both[f"GPU: arena {memory_text(use.arena)}"] / use.arena, rel=0.05)


def test_what_llama_cpp_can_have_is_drawn_above(fit):
    stock = fit.llama_cpp()
    root = parsed(fit.to_svg(stock))
    assert words(root).count("before") == words(root).count("after") == 3
    arenas = [use.arena for use in stock.memory] + [use.arena for use in fit.memory]
    titles = [title for title, _, _ in titled(root)]
    assert sorted(t.rpartition("arena ")[2] for t in titles if ": arena" in t) == sorted(map(memory_text, arenas))
    named = fit.llama_cpp(names={"GPU": "CUDA0"})
    assert titles == [title for title, _, _ in titled(parsed(fit.to_svg(named)))], "devices have their names here"


def test_a_weight_that_this_fit_does_not_have_is_another_weight(fit):
    before = fit.to_dict()
    before["residents"] = {f"x{k}": device for k, device in enumerate(before["residents"].values())}
    titles = [title for title, _, _ in titled(parsed(fit.to_svg(before)))]
    assert f"GPU: other weights {memory_text(fit.memory[0].weights)}" in titles


def test_notebooks_show_the_drawing_and_the_text(fit):
    assert fit._repr_svg_() == fit.to_svg()
    shown = fit._repr_html_()
    assert shown.startswith(fit.to_svg()) and "no placement that was compared" in shown


@pytest.mark.parametrize("resident", [True, False])
def test_graphs_without_nodes_take_no_time(resident):
    ctx = gs.Context()
    leaf = ctx.tensor("f32", 16, "leaf", input=not resident)
    if resident:
        gs.DryBackend("CPU").alloc_tensors(ctx)
    cpu = gs.Device("CPU", 1 << 20, 1e9, 1e9, host=True)
    empty = gs.fit([gs.Graph(leaf)], [cpu])
    assert empty.seconds == 0
    for before in (None, empty, empty.to_dict()):
        said = words(parsed(empty.to_svg(before)))
        assert "no placement takes less than 0 us" in said
        assert any(word.startswith("0 us, 0.00% above the bound") for word in said)


def replaced(value, way=()):
    """(Where, the value with something else there) for each place in a JSON value."""
    for other in ("x", None, [], {}, float("nan"), -1.5, 1e300, 10**400, 1 << 63, True):
        yield (*way, other), other
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for where, other in replaced(inner, (*way, key)):
                yield where, {**value, key: other} if isinstance(value, dict) else [*value[:key], other,
                                                                                    *value[key + 1:]]
            if isinstance(value, dict):
                yield (*way, key, "left out"), {k: v for k, v in value.items() if k != key}


def test_what_is_no_answer_is_refused(fit):
    before = fit.to_dict()
    before["residents"] = dict([*before["residents"].items()][:2])
    refused = set()
    for key in before:
        for where, wrong in replaced(before[key], (key,)):
            try:
                text = fit.to_svg({**before, key: wrong})
            except ValueError as error:
                assert "`before` is not what Fit.to_dict returns: " in str(error), where
                refused.add(key)
            else:
                assert "nan" not in text and parsed(text) is not None, where
    assert {"devices", "memory", "graphs", "seconds", "residents"} <= refused


def test_misuse(fit):
    with pytest.raises(ValueError, match="names of two answers, not 1"):
        fit.to_svg(fit, ("one",))
