"""What tests leave alive is found, and a session of a debug build that leaves something fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from alive import BLOCKS, alive, block_counts, leaked
from processes import run_python

import ggml_sched as gs
from ggml_sched.threads.locks import ForkLock

TESTS = Path(__file__).resolve().parents[1]
GRAPH = "ggml_sched.core.graph.graph.Graph"
counting = pytest.mark.skipif(not block_counts(), reason="needs a debug build: nox -s build -- debug")
SESSION = """
import ctypes
import numpy as np
import ggml_sched as gs

def test_that_passes():
    ctx = gs.Context()
    {keep}gs.Graph(ctx.neg(ctx.tensor("f32", 4)))
"""


def a_graph() -> gs.Graph:
    ctx = gs.Context()
    return gs.Graph(ctx.neg(ctx.tensor("f32", 4)))


def test_an_object_counts_while_it_is_alive():
    a_graph()
    before = alive()
    graph = a_graph()
    assert f"1 {GRAPH}" in leaked(before, alive())
    del graph
    assert leaked(before, alive()) == []


@counting
def test_the_arrays_of_a_graph_count_while_it_is_alive():
    a_graph()
    before = alive()
    graph = a_graph()
    assert any(line.endswith(BLOCKS) for line in leaked(before, alive()))
    del graph
    assert leaked(before, alive()) == []


@counting
@pytest.mark.parametrize("keep, status", [("", 0), ("ctypes.pythonapi.Py_IncRef(ctypes.py_object(", 1)])
def test_a_session_that_leaves_something_alive_fails(tmp_path, keep, status):
    for name in ("conftest.py", "support/alive.py", "support/forks.py", "support/spread.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = tests/support\n")
    text = SESSION.format(keep=keep)
    (tmp_path / "tests" / "test_one.py").write_text(text.rstrip() + ("))\n" if keep else "\n"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(Path(gs.__file__).parents[1])})
    assert done.returncode == status, done.stdout + done.stderr
    assert "1 passed" in done.stdout and (f"1 {GRAPH}" in done.stdout) == bool(status)


def test_a_global_of_a_module_that_is_imported_later_is_not_left(monkeypatch):
    before = alive()
    module = ModuleType("ggml_sched.imported_later")
    module.lock, module.locks = ForkLock(), [ForkLock()]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert leaked(before, alive()) == ["1 ggml_sched.threads._locks.ForkLock"]     # that in the list


IMPORTED = f"""
import sys
sys.path.append({str(TESTS / "support")!r})
import alive
from pathlib import Path
import ggml_sched

alive.import_extensions()
loaded = {{getattr(module, "__file__", None) for module in list(sys.modules.values())}}
files = Path(ggml_sched.__file__).parent.rglob("*" + alive.EXTENSION_SUFFIXES[0])
print(*(file.name.split(".")[0] for file in files if str(file) not in loaded), "ggml_sched.llama_cpp" in sys.modules)
"""


def test_counting_imports_every_compiled_module_but_the_hook():
    """The hook would take the place of ggml's functions in the process of the tests, and keep lists of its own."""
    assert run_python("-c", IMPORTED).stdout == "_hook False\n"
