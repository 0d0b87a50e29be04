"""The core survives allocations that fail, its own and Python's: an error, nothing leaked, and the next call works.

The acts run in without_memory.py, in processes of their own, which a crash would end.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from acts import ACTS
from processes import run_program

HERE = Path(__file__).resolve().parent
CORE = HERE.parent.parent / "ggml_sched"
SLICE = ("graph", "planning", "replaying", "graph_allocator", "packing", "c_api", "c_programs", "kernels")
"""The acts of the tests of malloc that are no soak; planning allocates most."""
OF_PYTHON = [act for act in ACTS if act not in ("c_api", "c_programs", "kernels")]
"""The C API has no Python object: what would fail in those acts is ctypes.  Where `kernels` asks for the address of an
array, NumPy crashes without memory by itself (`array.__array_interface__`)."""
SOURCES = sorted([*CORE.glob("_*.pyx"), *CORE.glob("core/*/*.p[xy][ix]")])


@pytest.fixture(scope="module")
def failing_malloc(tmp_path_factory) -> Path:
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("malloc") / "failing_malloc.so"
    done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(HERE / "failing_malloc.c")],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no libc that can be wrapped: {done.stderr[-200:]}")
    return library


def run(allocator: str, acts, *options: str, **environment: str) -> dict[str, tuple[int, int]]:
    """{act: (how often it ran, how often it failed)}."""
    printed = run_program(HERE / "without_memory.py", allocator, *acts, *options, **environment)
    found = {name: (int(runs), int(failures)) for name, runs, failures in map(str.split, printed.splitlines())}
    assert list(found) == list(acts)
    return found


def test_an_allocation_that_fails_is_out_of_memory(failing_malloc):
    found = run("malloc", SLICE, "--step", "10", LD_PRELOAD=str(failing_malloc))
    assert all(failures for _, failures in found.values())


@pytest.mark.soak
@pytest.mark.parametrize("act", ACTS)
def test_each_allocation_of_every_act_that_fails_is_out_of_memory(failing_malloc, act):
    run("malloc", [act], LD_PRELOAD=str(failing_malloc))


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="needs _testcapi, which makes Python's fail")
@pytest.mark.parametrize("acts, options", [
    (OF_PYTHON, ("--step", "7")),
    *(pytest.param([act], ("--first", str(first)), marks=pytest.mark.soak) for act in OF_PYTHON for first in range(3))])
def test_missing_allocations_of_python_are_memory_errors(acts, options):
    for act, (runs, failures) in run("python", acts, *options).items():
        assert failures > runs // 2 > 0, act


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
