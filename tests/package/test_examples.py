"""Every example, and the README's code, runs with warnings as errors."""

import re
from pathlib import Path

import pytest
from processes import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAID = {
    "chat": "tokens were there]",
    "generate_text": "ended by 'stop'",
    "python_backend": "2 splits",
    "run_model": "generated: [",
    "two_backends": "alive at the peak",
}
"""A part of each example's expected output."""
NEEDS = {"chat": ("tokenizers", "jinja2"), "generate_text": ("tokenizers",)}
"""Modules that each example needs beside numpy."""


def run(*argv) -> str:
    done = run_python("-X", "dev", "-W", "error", *argv)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name)
    assert SAID[path.stem] in run(str(path))


def test_example_with_a_model_file():
    model = ROOT / "tests" / "data" / "models" / "tiny-llama-q4_0.gguf"
    assert "vocabulary" in run(str(ROOT / "examples" / "run_model.py"), str(model))


@pytest.mark.parametrize("page", ["benchmarks", "speed"])
def test_figures_in_the_readme_are_those_that_were_measured(page):
    """Word for word the summary that bench/report.py or bench/speed.py wrote."""
    readme, measured = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", f"docs/{page}.md"))
    summary = re.search(r"## Summary\n\n(.*?)\n\n", measured, re.S)[1]
    assert summary in readme


def python_in_the_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


def test_planning_in_the_readme():
    """It prints what the README says it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(code for code in python_in_the_readme() if "DryBackend" in code)
    said = re.match(r"```\n\n```\n(.*?)```", text[text.index(code) + len(code) :], re.S)[1]
    assert run("-c", code) == said


def test_text_in_the_readme():
    for name in ("tokenizers", "jinja2"):
        pytest.importorskip(name)
    code = next(code for code in python_in_the_readme() if "generate" in code)
    assert "Stats(n_prompt=" in run("-c", code.replace('"model.gguf"', "llama.small_model()").replace("4096", "512"))
