"""Pages as files: whole, with all that they say, escaped, replaced atomically; Error without Bokeh."""

import base64
import json
import re
import sys
import warnings
import zlib
from dataclasses import replace
from html import escape

import pytest
from shown_plans import recorded, refused, small

import ggml_sched as gs
from ggml_sched.view.content import content_of
from ggml_sched.view.page import Shown, page

pytest.importorskip("bokeh", reason="needs the extra view")


def data_of(html):
    packed = re.search(r'<script type="text/plain" id="packed">([^<]*)</script>', html)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def around(html):
    """The page without Bokeh's program and the data."""
    return re.sub(r'<script(?: type="text/plain" id="packed")?>.*?</script>', "", html, flags=re.S)


def test_the_data_of_a_page_are_those_of_the_plan():
    plan = recorded("llama-2-7b-decode", "c2half")
    (tab,) = data_of(page([Shown("", plan)]))["tabs"]
    (shown,) = tab["plans"]
    columns, data = shown["tensors"], plan.data
    count = data.n_tensors + data.n_copies
    assert columns["name"] == [plan.name_of(i) for i in range(count)]
    assert columns["bytes"][: data.n_tensors] == [t.nbytes for t in plan.graph.tensors]
    assert [shown["words"][k] for k in columns["op"][: data.n_tensors]] == [t.op for t in plan.graph.tensors]
    reasons = [shown["words"][k] for k in columns["why"][: data.n_tensors]]
    assert reasons == [data.reason(i) for i in range(data.n_tensors)]
    assert columns["backend"] == [data.backend_index(i) for i in range(count)]
    assert columns["inplace"] == [i for i in range(count) if data.is_inplace(i)]
    assert [(m["arena"], m["live"]) for m in shown["maps"]] == [*zip(plan.buffer_sizes, plan.live_bytes, strict=True)]
    for one in shown["maps"]:
        sizes = {}
        for owner, low, high in zip(one["owner"], one["low"], one["high"], strict=True):
            sizes[owner] = sizes.get(owner, 0) + high - low
        assert sizes == {i: data.size(i) for i in range(count) if data.memory_index(i) == one["backend"]
                         and data.size(i) and data.lifetime(i)}
    assert [split[3] for split in shown["splits"]] == [len(split) for split in plan.splits]
    assert [(c[1], columns["name"][c[3]]) for c in shown["copies"]] == [
        (plan.backends.index(copy.backend), copy.name) for copy in plan.copies]


def test_a_page_says_what_assigned_backends():
    ctx = gs.Context()
    out = ctx.silu(ctx.tensor("f32", (4,), "x", input=True))
    with gs.Scheduler([gs.DryBackend("GPU"), gs.DryBackend("CPU")]) as scheduler:
        scheduler.set_tensor_backend(out, scheduler.backends[1])
        plan = replace(scheduler.plan(gs.Graph(out)), assigned_by="llama.cpp")
    (tab,) = data_of(page([Shown("", plan)]))["tabs"]
    assert "llama.cpp assigned it" in tab["plans"][0]["words"]


def test_only_nodes_that_fell_back_are_said_to_have():
    gpu = gs.DryBackend("GPU", supports_op=lambda node: node.op != "MUL_MAT" or node.ne[1] != 8)
    weights, ctx = gs.Context(), gs.Context()
    w = weights.tensor("f32", (64, 64), "w")
    gpu.alloc_tensors(weights)
    products = [ctx.mul_mat(w, ctx.tensor("f32", (64, n), f"x{n}", input=True)) for n in (8, 4)]
    sums = [ctx.sqr(product) for product in products]
    graph = gs.Graph(*(ctx.set_output(ctx.set_name(t, "equal")) for t in (*products, *sums)))
    with gs.Scheduler([gpu, gs.DryBackend("CPU")]) as scheduler:
        plan = scheduler.plan(graph)
    tensors = content_of(plan, "").data["tensors"]
    assert tensors["fell"] == [[graph.id_of(products[0]), 0]]


def test_nodes_that_fell_back_to_a_backend_of_an_equal_name_are_found():
    first = gs.DryBackend("GPU", supports_op=lambda node: node.op != "SQR")
    weights, ctx = gs.Context(), gs.Context()
    w = weights.tensor("f32", (64, 64), "w")
    first.alloc_tensors(weights)
    product = ctx.mul_mat(w, ctx.tensor("f32", (64, 4), "x", input=True))
    graph = gs.Graph(ctx.set_output(ctx.sqr(product)))
    with gs.Scheduler([first, gs.DryBackend("GPU"), gs.DryBackend("CPU")]) as scheduler:
        plan = scheduler.plan(graph)
    (square,) = (node for node in graph.nodes if node.op == "SQR")
    assert plan.backend_of(square) is plan.backends[1]
    assert content_of(plan, "").data["tensors"]["fell"] == [[graph.id_of(square), 0]]


def test_the_tables_have_peaks_splits_and_what_fell_back():
    plan = refused()
    html = around(page([Shown("", plan)]))
    for of in plan.peaks():
        for peak in of.peaks:
            for series, nbytes, _ in peak.series:
                assert escape(series.name) in html and f">{nbytes:,}<" in html
        for cap in of.caps:
            assert f'<td class="n">{cap.saves:,}' in html
    assert len(re.findall(r'data-split="\d+"', html)) == len(plan.splits) == 3
    assert "GPU does not support the op UNARY:RELU" in html and "&#x27;ffn_relu-0&#x27;" in html
    assert 'result <"out">' not in html and "result &lt;&quot;out&quot;&gt;" in html
    (shown,) = data_of(page([Shown("", plan)]))["tabs"][0]["plans"]
    (fell,) = shown["tensors"]["fell"]
    assert [shown["tensors"]["name"][i] for i in fell[:-1]] == ["ffn_relu-0"]


def test_series_of_a_peak_are_the_tensors_of_its_rows():
    plan = recorded("llama-2-7b-decode", "c2half")
    html = page([Shown("", plan)])
    (shown,) = data_of(html)["tabs"][0]["plans"]
    rows = re.findall(r'data-series="([\d,]+)"><td>([^<]*)<', around(html))
    named = {words: [i for k in numbers.split(",") for i in shown["series"][int(k)]] for numbers, words in rows}
    members = next(ids for words, ids in named.items() if words.startswith("kq-#"))
    assert {re.sub(r"\d+", "#", shown["tensors"]["name"][i]) for i in members} == {"kq-#"}
    homes = {plan.data.memory_index(i) for i in members}
    assert len(homes) == 1 and len(members) == sum(
        t.name.startswith("kq-") and plan.data.memory_index(plan.graph.id_of(t)) in homes for t in plan.graph.nodes)


def test_a_weight_of_a_store_arrives_when_it_is_fetched_and_not_when_it_is_read():
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    weights, ctx = gs.Context(), gs.Context()
    tensors = [weights.tensor("f32", (64, 64), f"w{k}") for k in range(6)]
    store.alloc_tensors(weights)
    t = ctx.tensor("f32", (64, 2), "x", input=True)
    for w in tensors:
        t = ctx.mul_mat(w, t)
    with gs.Scheduler([store, cpu], windows={cpu: 3 * 64 * 64 * 4}) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(t)))
    html = page([Shown("", plan)])
    (shown,) = data_of(html)["tabs"][0]["plans"]
    times = {shown["tensors"]["name"][i]: at for _, _, at, i, _ in shown["copies"]}
    assert [*times] == [f"CPU#w{k}" for k in range(6)] and [*times.values()] == sorted(set(times.values()))
    read = {split: first for split, (_, first, _, _) in enumerate(shown["splits"])}
    assert any(at < read[split] - 1 for _, _, at, _, split in shown["copies"])
    assert "Nodes that fell back" not in html


def test_two_plans_have_their_names_and_their_differences():
    seed, ours = (recorded("llama-2-7b-decode", "c4", policy) for policy in ("seed", "default"))
    html = page([Shown("", seed, ours)])
    assert re.findall(r'<h2 class="plan-name">([^<]*)<', html) == ["seed", "default"]
    found = seed.differences(ours)
    assert len(re.findall(r'data-difference="\d+"', around(html))) == len(found) > 3
    assert data_of(html)["tabs"][0]["differences"] == [[list(pair) for pair in entry.tensors] for entry in found]
    assert "The plans are equal" in page([Shown("", ours, ours)])


def test_a_page_asks_for_nothing_from_elsewhere(tmp_path):
    path = tmp_path / "plan.html"
    small().save_html(path)
    html = path.read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="([^"]*)"', around(html)) == ["data:,"]
    assert "default-src 'none'" in html and "connect-src" not in html and "@import" not in around(html)
    assert len(html) < 2_000_000


def test_an_existing_file_is_replaced_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        small().save_html(path)
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]
    monkeypatch.undo()
    small().save_html(str(path))
    assert path.read_text().startswith("<!doctype html>")


def test_a_second_plan_that_is_none_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not a Plan: 3"):
        small().save_html(tmp_path / "plan.html", 3)
    assert not [*tmp_path.iterdir()]


def test_without_bokeh_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    monkeypatch.setattr("ggml_sched.view.page.find_spec", lambda name: None)
    with pytest.raises(gs.Error, match=r"pip install 'ggml-sched\[view\]'"):
        small().save_html(tmp_path / "plan.html")
    assert not [*tmp_path.iterdir()]


def test_a_plan_without_memory_has_a_page():
    ctx = gs.Context()
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.tensor("f32", 0, "empty", input=True)))
    text = page([Shown("", plan)])
    assert "Plan of 0 nodes on A" in text and "No arena has bytes." in text


def test_an_arena_of_more_bytes_than_a_float_counts_has_a_page_without_a_warning(tmp_path):
    ctx = gs.Context()
    x = ctx.tensor("f32", (1 << 28, 1 << 28), "x", input=True)
    with gs.Scheduler([gs.DryBackend("A")]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(ctx.sqr(x))))
    assert plan.buffer_sizes[0] > 1 << 53
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.save_html(tmp_path / "plan.html")
