"""`python -m ggml_sched.llama_cpp --html FILE SCRIPT`: a page with what was planned, also in closed contexts."""

import importlib.util
import re
from pathlib import Path

import pytest
from processes import run_python

TINY = Path(__file__).resolve().parents[1] / "data" / "models" / "tiny-llama-q4_0.gguf"
needs = [pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {name}")
         for module, name in (("llama_cpp", "llama-cpp-python"), ("bokeh", "the extra view"))]
OPENED = f"""
import sys
import ggml_sched.llama_cpp as hooked
from llama_cpp import Llama

def evaluate(n):
    model = Llama({str(TINY)!r}, n_ctx=256, n_batch=64, verbose=False)
    model.eval(list(range(1, n)))
    return model
"""


@pytest.fixture
def shown(tmp_path):
    """A function that runs a script with --html and returns the page, and what was printed."""
    def run(code, status=0, **environment):
        script, page = tmp_path / "script.py", tmp_path / "plans.html"
        script.write_text(OPENED + code)
        done = run_python("-m", "ggml_sched.llama_cpp", "--html", str(page), str(script), "a", status=status,
                          timeout=300, **environment)
        return page.read_text(encoding="utf-8") if page.exists() else None, done

    return run


def titles(page):
    return re.findall(r"<h1>([^<]*)<", page)


@needs[0]
@needs[1]
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_contexts_that_were_closed_and_open_ones_have_a_tab_each(shown, level):
    page, done = shown("evaluate(40).close()\nmodel = evaluate(4)\nprint(sys.argv[1:], hooked.compute_buffers(), "
                       "hooked.saved())", GGML_SCHED=level)
    assert re.findall(r'<button data-tab="(\d)">', page) == ["0", "1"]
    assert all(re.fullmatch(r"\d: \d+ nodes on CPU", title) for title in titles(page))
    held, saved = (int(n) for n in re.search(r"\['a'\] {'CPU': (\d+)} {'CPU': (\d+)}", done.stdout).groups())
    # Of the largest graph, which was reserved: not of the few tokens that were evaluated last.
    headings = re.findall(r"arena ([\d,]+) bytes[^<]*; llama.cpp&#x27;s own buffer \(dotted\): ([\d,]+)<", page)
    assert headings == [(f"{held:,}", f"{held + saved:,}")] * 2


@needs[0]
@needs[1]
def test_plans_of_the_hook_are_drawn_as_others_are(shown, tmp_path):
    """Also beside the plan of the same graph by ggml's first rules."""
    path = tmp_path / "two.html"
    _, done = shown("import ggml_sched as gs\nmodel = evaluate(40)\nplan = hooked.plans()[-1]\n"
                    "with gs.Scheduler(plan.backends, policy='seed') as scheduler:\n"
                    "    other = scheduler.plan(plan.graph)\n"
                    f"other.save_html({str(path)!r}, plan, ('theirs', 'ours'))\n"
                    "print(plan.to_svg().count('<svg'), plan.to_dot().count('layer 1'), len(plan.peaks()))\n"
                    "print(*(entry.kind for entry in other.differences(plan)))")
    assert done.stdout.splitlines()[0] == "1 1 1"
    page = path.read_text(encoding="utf-8")
    assert re.findall(r'<h2 class="plan-name">([^<]*)<', page) == ["theirs", "ours"]
    assert page.count("data-difference=") == len(done.stdout.splitlines()[1].split()) > 0


@needs[0]
@needs[1]
def test_the_page_is_written_when_the_script_fails(shown):
    page, done = shown("model = evaluate(4)\nraise SystemExit('stopped')", status=1)
    assert len(titles(page)) == 1 and "stopped" in done.stderr


@needs[0]
@needs[1]
def test_a_script_that_opens_nothing_is_an_error(shown):
    page, done = shown("", status=1)
    assert page is None and "nothing was planned for llama.cpp" in done.stderr


@needs[1]
def test_without_the_hook_there_is_nothing_to_show(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    done = run_python("-m", "ggml_sched.llama_cpp", "--html", str(tmp_path / "x.html"), str(script), status=1,
                      GGML_SCHED="off")
    assert "HookError: nothing is installed" in done.stderr and "ran" not in done.stdout


def test_the_command_line_is_checked():
    assert "--html names no file" in run_python("-m", "ggml_sched.llama_cpp", "--html", status=2).stderr
    assert "-m names no module" in run_python("-m", "ggml_sched.llama_cpp", "-m", status=2).stderr
    assert "--html FILE" in run_python("-m", "ggml_sched.llama_cpp", "--help").stdout
    assert "usage" in run_python("-m", "ggml_sched.llama_cpp", status=2).stdout


def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for page, why in ((tmp_path / "missing/page.html", "No such file or directory"),
                      (script / "page.html", "Not a directory"), (tmp_path, "Is a directory")):
        done = run_python("-m", "ggml_sched.llama_cpp", "--html", str(page), str(script), status=2)
        assert (done.stdout, done.stderr) == ("", f"python -m ggml_sched.llama_cpp: --html {page}: {why}\n")
