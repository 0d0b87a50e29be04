"""Every example runs with warnings as errors."""

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
