"""What is compiled once is compiled again only where its source, a header or the command has changed."""

import os
import sys
from pathlib import Path

import pytest
from processes import run_python

pytest.importorskip("setuptools", "70.1")       # before it, editable_wheel needs the package wheel
TOOLS = Path(__file__).resolve().parents[2] / "tools"
SETUP = """
import sys

from setuptools import Extension, setup

sys.path.insert(0, sys.argv.pop(1))
from incremental_build import IncrementalBuild

setup(name="small", version="1", py_modules=[], cmdclass={"build_ext": IncrementalBuild},
      ext_modules=[Extension("small", ["small.c", "part.c"], include_dirs=["."])])
"""
MODULE = """
#include <Python.h>
#include "part.h"
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_small(void) { return part() ? PyModule_Create(&definition) : NULL; }
"""


@pytest.fixture
def tree(tmp_path):
    files = {"setup.py": SETUP, "small.c": MODULE, "part.h": "int part(void);\n",
             "part.c": '#include "part.h"\nint part(void) { return 1; }\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        os.utime(tmp_path / name, (1e9, 1e9))       # older than every object, whatever the clock's steps
    return tmp_path


def compiled(tree: Path, *command: str) -> set[str]:
    """The sources that a command compiles."""
    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (tree / "build").rglob("*.o")}

    before = times()
    run_python("setup.py", str(TOOLS), *command, cwd=tree, timeout=300)
    return {f"{Path(name).stem}.c" for name, made in times().items() if before.get(name) != made}


def test_what_an_editable_installation_compiled_is_not_compiled_again(tree):
    assert compiled(tree, "editable_wheel", "--dist-dir", "dist") == {"small.c", "part.c"}
    assert list(tree.glob("small.*.so")), "compiled in place"
    assert compiled(tree, "build_ext", "--inplace") == set()
    assert compiled(tree, "editable_wheel", "--dist-dir", "dist") == set()


@pytest.mark.parametrize(("changed", "again"), [("part.c", {"part.c"}), ("part.h", {"small.c", "part.c"})])
def test_a_change_compiles_what_reads_it(tree, changed, again):
    assert compiled(tree, "build_ext", "--inplace") == {"small.c", "part.c"}
    with open(tree / changed, "a") as file:
        file.write("/* more */\n")
    assert compiled(tree, "build_ext", "--inplace") == again
    assert compiled(tree, "build_ext", "--inplace") == set()


def test_a_file_that_is_newer_and_the_same_compiles_nothing(tree):
    """Cython translates modules again where its own files are newer: in each new environment."""
    assert compiled(tree, "build_ext", "--inplace") == {"small.c", "part.c"}
    os.utime(tree / "small.c")
    os.utime(tree / "part.h")
    assert compiled(tree, "build_ext", "--inplace") == set()


COMPILER = """#!{python}
import os, sys, time

if "-c" in sys.argv:
    name = sys.argv[sys.argv.index("-c") + 1]
    open(name + ".begun", "w").close()
    end = time.monotonic() + 60
    while not (os.path.exists("small.c.begun") and os.path.exists("part.c.begun")):
        if time.monotonic() > end:
            sys.exit(name + " was compiled alone")
        time.sleep(0.01)
os.execvp({command!r}, [{command!r}, *sys.argv[1:]])
"""


def test_objects_of_one_extension_are_compiled_at_once(tree, monkeypatch):
    """By a compiler that ends only when both sources have been begun."""
    cc, command = tree / "cc", os.environ.get("CC", "cc").split()[0]
    cc.write_text(COMPILER.format(python=sys.executable, command=command), encoding="utf-8")
    cc.chmod(0o755)
    monkeypatch.setenv("CC", str(cc))
    assert compiled(tree, "build_ext", "--inplace", "--parallel", "2") == {"small.c", "part.c"}


def test_a_source_that_does_not_compile_is_an_error(tree):
    (tree / "part.c").write_text("int part(void) { return }\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="part.c"):
        compiled(tree, "build_ext", "--inplace", "--parallel", "2")
    assert not list(tree.glob("small.*.so"))


def test_other_flags_compile_everything(tree, monkeypatch):
    assert compiled(tree, "build_ext", "--inplace") == {"small.c", "part.c"}
    monkeypatch.setenv("CFLAGS", "-DOTHER")
    assert compiled(tree, "build_ext", "--inplace") == {"small.c", "part.c"}
