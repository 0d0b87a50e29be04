"""docs/backends.md and examples/array_backend: one code, which passes the contract suite as a package of its own."""

import re
from importlib import metadata
from pathlib import Path

import pytest
from out_of_tree import EXAMPLE, suite_in_new_environment
from processes import run_python

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "backends.md"
if not PAGE.exists():
    pytest.skip("the working tree is needed", allow_module_level=True)


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_steps_of_the_page_are_the_package():
    """Word for word, and nothing is left out but the docstring of the module."""
    module = (EXAMPLE / "array_backend.py").read_text(encoding="utf-8")
    steps = [block for block in blocks("python") if block in module]
    assert len(steps) == 4
    docstring, _, code = module.partition('"""\n\n')
    assert code == "\n\n".join(steps) and docstring.startswith('"""')


def test_the_page_says_what_the_suite_says_of_the_first_step(tmp_path):
    (tmp_path / "array_backend.py").write_text((EXAMPLE / "array_backend.py").read_text(encoding="utf-8"))
    done = run_python("-m", "pytest", "-p", "_ggml_sched_pytest", "-p", "no:cacheprovider", "-W", "error", "--pyargs",
                      "ggml_sched.testing", "--backend", "array_backend:ArrayBackend", cwd=tmp_path)
    (header,) = blocks("text")
    assert header in done.stdout
    assert re.search(r" \d+ passed, \d+ skipped in ", done.stdout), done.stdout[-500:]


def test_the_classes_of_the_suite_are_those_of_the_page():
    source = (ROOT / "ggml_sched" / "testing" / "test_backend.py").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Test\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M) == re.findall(
        r"^class (Test\w+)\(", source, re.M)


def test_the_package_on_the_page_is_that_of_the_example():
    (lines,) = blocks("toml")
    project = (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
    assert [line for line in lines.splitlines() if line not in project.splitlines()] == []


def test_the_example_is_built_and_tested_in_a_new_environment(tmp_path):
    pytest.importorskip("setuptools", "70.1", "needs a setuptools that builds wheels (the extra dev)")
    installed = any(entry.value == "_ggml_sched_pytest" for entry in metadata.entry_points(group="pytest11"))
    printed = suite_in_new_environment(tmp_path, None, *([] if installed else ["-p", "_ggml_sched_pytest"]))
    assert "backend: <FusedBackend 'arrays'>" in printed and " passed" in printed
