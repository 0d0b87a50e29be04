"""The core survives Python's allocator giving nothing: a MemoryError, and the next call works.

The acts run in python_without_memory.py, in processes of their own, which a crash would end.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from acts import ACTS
from processes import run_program

CORE = Path(__file__).resolve().parent.parent.parent / "ggml_sched"
OF_PYTHON = [act for act in ACTS if act != "c_api"]
"""The C API has no Python object: what would fail in that act is ctypes."""
SOURCES = sorted([*CORE.glob("_*.pyx"), *CORE.glob("core/*/*.p[xy][ix]")])


def run(acts, *options: str) -> None:
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("this Python has no _testcapi, which makes its allocator fail")
    said = run_program(Path(__file__).with_name("python_without_memory.py"), *acts, *options).splitlines()
    assert [line.split()[0] for line in said] == list(acts)
    for line in said:
        _, runs, failures = line.split()
        assert int(failures) > int(runs) // 2 > 0, line


def test_some_missing_allocations_are_memory_errors():
    run(OF_PYTHON, "--step", "5")


@pytest.mark.soak
@pytest.mark.parametrize("act", OF_PYTHON)
def test_every_missing_allocation_is_a_memory_error(act):
    for first in range(3):
        run([act], "--first", str(first))


# -- the construct that Cython 3.3 gets wrong ------------------------------------------------------


def comprehensions(text: str) -> list[int]:
    """The lines on which a list is made by `for`: a comprehension, or a generator that Cython turns into one."""
    # Comments and docstrings may say anything.
    text = re.sub(r'"""(.|\n)*?"""', lambda found: "\n" * found.group().count("\n"), text)
    text = re.sub(r"#.*", "", text)
    found, opened = [], []
    for token in re.finditer(r"[\[\](){}]|\bfor\b|\n", text):
        match token.group():
            case "[" | "(" | "{" as bracket:
                before = re.search(r"(\w*)$", text[max(token.start() - 9, 0) : token.start()]).group(1)
                opened.append(bracket if bracket != "(" else before)
            case "]" | ")" | "}":
                if opened:
                    opened.pop()
            case "for" if opened and opened[-1] in ("[", "list", "tuple", "sorted", "join"):
                found.append(text.count("\n", 0, token.start()) + 1)
    return found


def test_the_scan_finds_comprehensions():
    text = '"""[x for x in y]\n"""\na = [f(x[0]) for x in y]  # [for]\nb = tuple(x\n for x in y)\n' \
        'for x in [y]: pass\nc = all(x for x in y)\nd = ", ".join(f(x) for x in y)\n'
    assert comprehensions(text) == [3, 5, 8]


@pytest.mark.skipif(not SOURCES, reason="an installed package has no sources of its core")
def test_no_list_is_made_by_a_comprehension():
    """Cython 3.3 appends what it has just made, and where that fails it drops its reference twice.

    Loops that append do not: what is appended is dropped by the loop alone.
    """
    assert len(SOURCES) > 30
    assert not [f"{path.name}:{line}" for path in SOURCES for line in comprehensions(path.read_text())]


def test_no_generated_code_drops_a_reference_twice():
    generated = sorted(CORE.glob("core/*/*.c"))
    if not generated:
        pytest.skip("not compiled here")
    assert not [f"{path.name}: {line}" for path in generated for line in path.read_text().splitlines()
                if "__Pyx_ListComp_AppendAndDecref(" in line and "static" not in line]
