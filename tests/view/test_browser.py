"""Pages in a real browser: no network, no errors; pointing, searching, opening layers, comparing."""

import io

import browser
import pytest
from shown_plans import recorded, refused, small

from ggml_sched.view.roles import ROLES

pytest.importorskip("bokeh", reason="needs the extra view")
if browser.MISSING:
    pytest.skip(browser.MISSING, allow_module_level=True)

SEARCH = "input[type=search]"
BLOCKS = """return ggmlView.views[0].plans.map((plan, p) => plan.maps.map(map =>
    [...Bokeh.documents].map(doc => doc.get_model_by_name(`0.${p}.map${map.backend}.` + arguments[0] + '.glyphs'))
        .find(found => found).data_source.data.left.length))"""
"""For each plan and map, how many rectangles of a kind are drawn."""
PIXEL = """const [p, id] = arguments, view = ggmlView.views[0], plan = view.plans[p];
    const [m, [k]] = plan.blocks.get(id), map = plan.maps[m], name = `0.${p}.map${map.backend}`;
    const figure = [...Bokeh.documents].map(doc => doc.get_model_by_name(name)).find(found => found);
    const box = view.boxOf(p, `map${map.backend}`), x = figure.x_range, y = figure.y_range;
    const first = Math.max(map.first[k], x.start), stop = Math.min(map.stop[k], x.end);
    return [box.left + 92 + figure.inner_width * ((first + stop) / 2 - x.start) / (x.end - x.start),
            box.top + 4 + figure.inner_height * (1 - ((map.low[k] + map.high[k]) / 2 - y.start) / (y.end - y.start))]"""
"""The pixel in the middle of what is visible of a block."""


@pytest.fixture(scope="module")
def opened():
    with browser.Browser() as found:
        yield found


@pytest.fixture(scope="module")
def plans():
    return recorded("llama-2-7b-prefill512", "c4", "seed"), recorded("llama-2-7b-prefill512", "c4")


@pytest.fixture(scope="module")
def two(plans, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "two.html"
    plans[0].save_html(path, plans[1], ("ggml's first", "ours"))
    return path


@pytest.fixture
def both(opened, two):
    """The browser at the page of two plans."""
    opened.size(1500, 1000)
    opened.open(two)
    yield opened
    assert opened.faults() == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_a_page_opens_without_network_and_without_errors(opened, two, is_dark):
    opened.dark(is_dark)
    opened.fetched()
    opened.open(two)
    assert opened.fetched() == [two.as_uri()]
    assert opened.faults() == []
    paper = opened.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.removeprefix("rgb(").rstrip(")").split(","))) < 200) == is_dark
    opened.dark(False)


def test_what_a_page_must_not_do_is_noticed(opened, tmp_path):
    """A page that fetches, warns and fails: the test above would see it."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><html data-ready=yes><link rel=icon href='data:,'><img src='http://127.0.0.1:59999/x.png'>"
                    "<script>console.error('wrong'); setTimeout(() => { throw Error('broken') })</script>")
    opened.fetched()
    opened.open(path)
    opened.settle()
    assert "http://127.0.0.1:59999/x.png" in opened.fetched()
    said = " ".join(opened.faults())
    assert "wrong" in said and "broken" in said and "ERR_CONNECTION" in said


def test_both_plans_appear_and_what_is_different_is_listed(both, plans):
    assert both.texts("h2.plan-name") == ["ggml's first", "ours"]
    for p, plan in enumerate(plans):
        titles = both.texts(f".plan:nth-of-type({p + 1}) h3")
        assert [title.split("arena")[0].strip() for title in titles] == [b.name for b in plan.backends]
    found = plans[0].differences(plans[1], ("ggml's first", "ours"))
    cells = both.texts("table.differences tr.link td")
    assert cells == [cell for entry in found for cell in entry[:4]]
    shared = next(k for k, entry in enumerate(found) if entry.kind == "shared memory")
    both.click("table.differences tr.link", shared)
    both.settle()
    assert all(sum(of) == len(found.entries[shared].tensors) for of in both.run(BLOCKS, "hits"))


def test_every_role_is_drawn_in_its_colour(both):
    from PIL import Image

    both.size(1500, 3000)
    both.click("[data-mode=tensors]")
    both.settle()
    pixels = Image.open(io.BytesIO(both.picture())).convert("RGB").crop((110, 150, 1150, 3000)).getcolors(1 << 24)
    drawn = {"#" + bytes(colour).hex(): n for n, colour in pixels}
    for name in ("inputs", "attention", "feed-forward", "copies", "residual stream, norms"):
        assert drawn.get(next(role.colour for role in ROLES if role.name == name), 0) > 60, name


def test_pointing_at_the_largest_tensor_shows_its_name_and_size(both, plans):
    plan = plans[1]
    largest = max(range(plan.data.n_tensors), key=plan.data.size)
    name = plan.name_of(largest)
    both.write(SEARCH, name, enter=True)
    both.settle()
    both.point(*both.run(PIXEL, 1, largest))
    both.settle()
    (tip,) = both.texts(".tip")
    t = plan.graph.tensors[largest]
    assert both.is_visible(".tip")
    assert name in tip and t.op in tip and f"({t.nbytes:,} bytes)" in tip
    assert "4096x512x32" in tip and plan.data.reason(largest) in tip
    assert "written in place: kq_soft_max-0" in tip
    both.point(5, 5)
    both.settle()
    assert not both.is_visible(".tip")


def test_search_finds_by_name_and_op_and_shows_what_was_chosen(both, plans):
    both.write(SEARCH, "FFN_GATE-")
    count = sum("ffn_gate-" in t.name for t in plans[0].graph.tensors)
    assert both.texts(".results p") == [f"{count} found"]
    both.write(SEARCH, "soft_max")
    count = sum("soft_max" in t.name or t.op.lower() == "soft_max" for t in plans[0].graph.tensors)
    assert both.texts(".results p") == [f"{count} found"]
    assert all(sum(of) == count for of in both.run(BLOCKS, "hits")), "outlined in both plans"
    both.write(SEARCH, "blk.7.attn_q.weight", enter=True)
    both.settle()
    (said,) = both.texts(".details")
    assert "blk.7.attn_q.weight" in said and "outside the plan" in said and "Qcur-7" in said
    both.click(".details a")
    both.settle()
    assert both.texts(".details h3") == ["Qcur-7", "Qcur-7"]
    assert both.texts(".details .kind b") == ["ggml's first", "ours"]
    both.press("Escape")
    assert both.texts(".details h3") == ["Nothing chosen"]
    assert not both.is_visible(".results")


def test_layers_are_collapsed_until_asked_for(both):
    cells, blocks = both.run(BLOCKS, "cells"), both.run(BLOCKS, "blocks")
    whole = both.run("return ggmlView.views[0].plans.map(plan => plan.maps.map(map => map.owner.length))")
    assert all(n for of in cells for n in of[:3]) and sum(map(sum, blocks)) < 40 < sum(map(sum, whole))
    # A click on the number of layer 5 opens it, in both plans.
    x, y = both.run("""const view = ggmlView.views[0], box = view.boxOf(1, 'strip');
        const [, first, stop] = view.plans[1].sections.find(([label]) => label === '5');
        const strip = [...Bokeh.documents].map(doc => doc.get_model_by_name('0.1.strip')).find(found => found);
        return [box.left + 92 + strip.inner_width * (first + stop) / 2 / view.plans[1].end, box.top + 4 + 11]""")
    both.click_at(x, y)
    both.settle()
    opened = both.run(BLOCKS, "blocks")
    assert all(5 < after[0] - before[0] < 30 for before, after in zip(blocks, opened, strict=True))
    both.click("[data-mode=tensors]")
    both.settle()
    assert both.run(BLOCKS, "blocks") == whole and both.run(BLOCKS, "cells") == [[0] * len(of) for of in whole]
    both.click("[data-mode=layers]")
    both.settle()
    assert both.run(BLOCKS, "blocks") == blocks


def test_scrolling_zooms_all_figures_of_a_plan_and_a_reset_shows_all(both):
    ranges = "return ggmlView.views[0].figures().map(figure => [figure.x_range.start, figure.x_range.end])"
    before = both.run(ranges)
    x, y = both.run("const box = ggmlView.views[0].boxOf(0, 'map0'); return [box.left + 300, box.top + 80]")
    both.point(x, y)
    both.scroll(x, y, -240)
    both.settle()
    zoomed = both.run(ranges)
    assert all(one == zoomed[0] for one in zoomed[:5]) and zoomed[0][1] - zoomed[0][0] < before[0][1] - before[0][0]
    both.run("ggmlView.on('reset', '0.0.map0', {})")
    assert both.run(ranges) == before


def test_plans_of_other_lengths_show_the_same_layers(both):
    """The first has more copies, so that its layers are longer."""
    layers = """const [wanted] = arguments;
        return ggmlView.views[0].plans.map(plan => plan.sections.find(([label]) => label === wanted).slice(1))"""
    for label, p in (("7", 0), ("20", 1), ("31", 0)):
        there = both.run(layers, label)
        both.run("const [p, start, end] = arguments; ggmlView.views[0].time(p).setv({ start, end })", p, *there[p])
        for k, (first, stop) in enumerate(there):
            start, end = both.run("const r = ggmlView.views[0].time(arguments[0]); return [r.start, r.end]", k)
            assert start == pytest.approx(first) and end == pytest.approx(stop)
    assert there[0][1] - there[0][0] > there[1][1] - there[1][0]


def test_rows_of_peaks_and_splits_show_their_tensors(both):
    rows = both.texts('tr[data-plan="1"][data-series]')
    number = next(k for k, row in enumerate(rows) if row.startswith("kq-# "))
    both.click('tr[data-plan="1"][data-series]', number)
    both.settle()
    count = int(rows[number].split(", ")[1].split(" of them")[0])
    assert both.run(BLOCKS, "hits")[1][0] == count == 11
    both.click('tr[data-plan="1"][data-split="2"]')
    both.settle()
    start, end = both.run("const r = ggmlView.views[0].figures().at(-1).x_range; return [r.start, r.end]")
    _, first, stop, _ = both.run("return ggmlView.views[0].plans[1].splits[2]")
    assert start <= first < stop <= end and end - start < 1.5 * (stop - first)


def test_the_title_of_a_peak_shows_what_is_alive_then(both, plans):
    titles = both.texts('caption[data-plan="1"]')
    peaks = [peak for of in plans[1].peaks() for peak in of.peaks[:4]]
    assert len(titles) == len(peaks) and all(peak.node in title for peak, title in zip(peaks, titles, strict=True))
    for number in (0, len(peaks) - 1):
        both.click('caption[data-plan="1"]', number)
        both.settle()
        bytes_of = both.run("""const plan = ggmlView.views[0].plans[1];
            return plan.maps.map(map => ggmlView.views[0].source(1, `map${map.backend}.hits`).data).map(data =>
                data.top.reduce((sum, top, k) => sum + top - data.bottom[k], 0))""")
        b = next(b for b, of in enumerate(plans[1].peaks()) if peaks[number] in of.peaks)
        assert [n for n in bytes_of if n] == [sum(nbytes for _, nbytes, _ in peaks[number].series)]
        assert bytes_of[b] == plans[1].live_bytes[b]


def test_keys_move_zoom_search_and_choose(both):
    ranges = "return ggmlView.views[0].figures().map(figure => [figure.x_range.start, figure.x_range.end])"
    whole = both.run(ranges)
    for key, is_narrower, way in (("+", True, 0), ("ArrowRight", False, 1), ("ArrowLeft", False, -1),
                                  ("-", False, 0)):
        before = both.run(ranges)
        both.press(key)
        after = both.run(ranges)
        assert after[:5] == [after[0]] * 5 and after[5:] == [after[5]] * 5
        (start, stop), (other, end) = before[0], after[0]
        assert (end - other < stop - start) == is_narrower
        assert not way or (other > start) == (way > 0)
    both.press("0")
    assert both.run(ranges) == whole
    both.press("/")
    both.command("Input.insertText", text="kqv-3")
    assert both.texts(".results a")[0] == "kqv-3" != both.texts(".results a")[1], "what is called so is the first"
    both.run("document.querySelector('.results a').focus()")
    both.press("Enter")
    both.settle()
    assert both.texts(".details h3") == ["kqv-3", "kqv-3"]
    both.press("Escape")
    both.run("document.querySelector('tr[data-plan=\"1\"][data-series]').focus()")
    both.press("Enter")
    assert sum(both.run(BLOCKS, "hits")[1]) > 0


def test_what_is_drawn_has_words_for_a_screen_reader(both, plans):
    labels = both.run("""return [...document.querySelectorAll("[role=img]")]
        .filter(e => e.querySelector("[data-root-id]")).map(e => e.ariaLabel)""")
    assert len(labels) == sum(1 + sum(size > 0 for size in plan.buffer_sizes) for plan in plans)
    assert all(any(backend.name in label for label in labels) for backend in plans[1].backends)
    assert both.run("return document.querySelector('.details').ariaLive") == "polite"
    assert both.run("""return [...document.querySelectorAll("button, input, a, .link")]
        .filter(e => e.tabIndex < 0).length""") == 0


@pytest.mark.parametrize("wide", [1150, 1800])
def test_the_panel_stays_below_the_toolbar(both, wide):
    """Which is one line or several high."""
    both.size(wide, 700)
    both.settle()
    both.run("scrollTo(0, 300)")
    both.settle()
    bar, panel = both.run("""return [".toolbar", "aside"].map(name =>
        document.querySelector(name).getBoundingClientRect()).map(box => [box.top, box.bottom])""")
    assert bar[0] == 0 and bar[1] < panel[0] and panel[1] <= 700


def test_a_legend_entry_hides_its_role(both):
    both.click("[data-mode=tensors]")
    number = both.texts(".legend button").index("attention")
    faint = """return [...Bokeh.documents].map(doc => doc.get_model_by_name('0.1.map0.blocks.glyphs'))
        .find(found => found).data_source.data.alpha.filter(alpha => alpha < 0.1).length"""
    assert both.run(faint) == 0
    both.click(".legend button", number)
    assert both.run(faint) > 20
    both.click(".legend button", number)
    assert both.run(faint) == 0


def test_a_copy_says_what_it_is_a_copy_of(opened, tmp_path):
    plan = refused()
    copy = plan.copies[0]
    plan.save_html(tmp_path / "copies.html")
    opened.open(tmp_path / "copies.html")
    opened.write(SEARCH, f"{copy.backend.name}#{copy.tensor.name}", enter=True)
    (said,) = opened.texts(".details")
    assert "copy of" in said and "reads" not in said
    assert opened.texts(".details a")[0] == copy.tensor.name


def test_nodes_that_fell_back_are_listed_with_the_reason(opened, tmp_path):
    refused().save_html(tmp_path / "refused.html")
    opened.open(tmp_path / "refused.html")
    assert opened.run(BLOCKS, "cells") == [[0, 0]] and all(opened.run(BLOCKS, "blocks")[0]), "few blocks: all are open"
    (row,) = opened.texts("tr[data-fallback]")
    assert "GPU does not support the op UNARY:RELU" in row and "'ffn_relu-0'" in row
    opened.click("tr[data-fallback]")
    opened.settle()
    assert sum(map(sum, opened.run(BLOCKS, "hits"))) == 1
    opened.write(SEARCH, "ffn_relu-0", enter=True)
    assert "GPU does not support the op UNARY:RELU" in opened.texts(".details")[0]
    opened.write(SEARCH, "result", enter=True)
    assert opened.texts(".details h3") == ['result <"out">'], "escaped, and shown as it is"
    assert opened.faults() == []


def test_blocks_of_less_than_a_pixel_have_their_colour_and_not_that_of_their_edges(opened, tmp_path):
    from PIL import Image

    small(nodes=600, outputs=True).save_html(tmp_path / "many.html")
    opened.size(1400, 700)
    opened.open(tmp_path / "many.html")
    opened.click("[data-mode=tensors]")
    opened.settle()
    colour = tuple(bytes.fromhex(next(role.colour for role in ROLES if role.name == "element by element")[1:]))
    x, y = opened.run("""const box = ggmlView.views[0].boxOf(0, "map0");
        return [Math.round(box.left + box.width * 0.8), Math.round(box.top + box.height * 0.7)]""")
    shot = Image.open(io.BytesIO(opened.picture())).convert("RGB").crop((x, y, x + 40, y + 40))
    seen = [sum(value * n for n, value in enumerate(band.histogram())) / 1600 for band in shot.split()]
    assert all(abs(one - other) < 70 for one, other in zip(seen, colour, strict=True)), (seen, colour)
    edges = "const e = ggmlView.views[0].source(0, 'map0.blocks').data.edge; return e.filter(one => one).length"
    assert opened.run(edges) == 0
    small(nodes=100, outputs=True).save_html(tmp_path / "fewer.html")
    opened.open(tmp_path / "fewer.html")
    opened.settle()
    assert opened.run(edges) == 0, "all are open at first, each 2 pixels high"
    small(nodes=30, outputs=True).save_html(tmp_path / "few.html")
    opened.open(tmp_path / "few.html")
    opened.settle()
    assert opened.run(edges) > 25
    assert opened.faults() == []


@pytest.mark.soak
def test_a_hundred_thousand_nodes_open_collapsed(opened, tmp_path):
    import samples

    import ggml_sched as gs

    graph, backends = samples.synthetic(100_000)
    with gs.Scheduler(backends) as scheduler:
        scheduler.plan(graph).save_html(tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 5_000_000
    opened.open(tmp_path / "large.html")
    assert sum(map(sum, opened.run(BLOCKS, "blocks"))) < 100 < sum(map(sum, opened.run(BLOCKS, "cells"))) < 1000
    opened.click("[data-mode=tensors]")
    opened.settle()
    assert sum(map(sum, opened.run(BLOCKS, "blocks"))) > 50_000
    assert opened.faults() == []
