"""The suite under GCC's address and undefined-behaviour sanitizers: an access outside memory ends the process.

Built in a copy of the tree (GGML_SCHED_BUILD=sanitize), with every Python object in malloc's memory, so that one used
after it was freed is seen as well.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from sanitizers import sanitized

pytestmark = pytest.mark.soak

CANARY = """
#include <string.h>
int outside(int n) { char *p = __builtin_malloc(8); int c = p[8 + n]; __builtin_free(p); return c; }
int undefined(int n) { char to[4], *from = n ? to : NULL; memcpy(to, from, n); return to[0]; }
"""


@pytest.mark.parametrize("fault, said", [("outside", "heap-buffer-overflow"), ("undefined", "null pointer")])
def test_the_sanitizers_are_awake(sanitized_tree, fault, said):
    source, library = sanitized_tree / "canary.c", sanitized_tree / "canary.so"
    source.write_text(CANARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
                    "-o", str(library), str(source)], check=True, capture_output=True)
    done = sanitized([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).{fault}(0)"], sanitized_tree)
    assert done.returncode != 0 and said in done.stderr


TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(path.relative_to(TESTS).as_posix() for room in ("cli", "llama", "remote", "view")
               for path in (TESTS / room).glob("test_*.py"))
"""Folders that take too long at once.  Not here: tests/cupy, whose kernels its own tests compile with sanitizers, and
tests/package, which is about files."""


@pytest.mark.parametrize("folder", [
    "core", "graph", "capi", "planning", "execution", "threads", "testing", "backends", "llama_cpp", "placement",
    "soak", *FILES])
def test_the_suite_accesses_nothing_that_it_should_not(sanitized_tree, folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{folder}"]
    if folder == "soak":
        # Has a malloc of its own.
        command += ["--deselect", "tests/soak/test_without_memory.py"]
    done = sanitized(command, sanitized_tree)
    if folder in FILES and done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED) and " passed" not in done.stdout:
        pytest.skip(f"no test of {folder} runs here: {done.stdout.strip().splitlines()[-1]}")
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
    assert " passed" in done.stdout
