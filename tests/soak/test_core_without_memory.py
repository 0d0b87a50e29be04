"""The core's own allocations fail, each in its turn: an OutOfMemory, nothing leaked, and the next call works.

The acts run in core_without_memory.py, a process of its own with failing_malloc.c in the place of malloc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from acts import ACTS
from processes import run_program

HERE = Path(__file__).resolve().parent
SLICE = ("graph", "planning", "replaying", "graph_allocator", "packing", "c_api")
"""The acts of the tests that are no soak; planning allocates most."""


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


def run(library: Path, acts, *options: str) -> dict[str, int]:
    """How often each act failed."""
    said = run_program(HERE / "core_without_memory.py", *acts, *options, LD_PRELOAD=str(library))
    return {line.split()[0]: int(line.split()[2]) for line in said.splitlines()}


def test_an_allocation_that_fails_is_out_of_memory(failing_malloc):
    failures = run(failing_malloc, SLICE, "--step", "3")
    assert list(failures) == list(SLICE) and all(failures.values())


@pytest.mark.soak
@pytest.mark.parametrize("act", ACTS)
def test_each_allocation_of_every_act_that_fails_is_out_of_memory(failing_malloc, act):
    assert act in run(failing_malloc, [act])
