"""The suite under GCC's address and undefined-behaviour sanitizers: an access outside memory ends the process.

Built in a copy of the tree (GGML_SCHED_BUILD=sanitize), with every Python object in malloc's memory, so that one used
after it was freed is seen as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("bench", "ggml_sched", "include", "tests", "setup.py", "pyproject.toml", "README.md")
CANARY = """
#include <string.h>
int outside(int n) { char *p = __builtin_malloc(8); int c = p[8 + n]; __builtin_free(p); return c; }
int undefined(int n) { char to[4], *from = n ? to : NULL; memcpy(to, from, n); return to[0]; }
"""


def sanitized(command: list[str], where: Path) -> subprocess.CompletedProcess:
    """Run a command with the sanitizers' runtimes."""
    libraries = [subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True,
                                check=True).stdout.strip() for name in ("asan", "ubsan")]
    if not all(os.path.isabs(library) for library in libraries):
        pytest.skip("this GCC has no sanitizers")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=1800, env={
        **environment, "LD_PRELOAD": " ".join(libraries), "PYTHONMALLOC": "malloc",
        # Python keeps much to its end.  A size that no allocator gives is a test's, not an error.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1", "UBSAN_OPTIONS": "print_stacktrace=1"})


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the sources, built with sanitizers."""
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None:
        pytest.skip("needs Linux and GCC")
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the source tree")
    tree = tmp_path_factory.mktemp("sanitized")
    for name in COPIED:
        if (ROOT / name).is_dir():
            built = shutil.ignore_patterns("*.so", "_*.c", "__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=built)
        else:
            shutil.copy(ROOT / name, tree / name)
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tree, capture_output=True,
                          text=True, timeout=1800, env={**os.environ, "GGML_SCHED_BUILD": "sanitize"})
    assert done.returncode == 0, done.stderr[-4000:]
    return tree


@pytest.mark.parametrize("fault, said", [("outside", "heap-buffer-overflow"), ("undefined", "null pointer")])
def test_the_sanitizers_are_awake(tree, fault, said):
    source, library = tree / "canary.c", tree / "canary.so"
    source.write_text(CANARY)
    subprocess.run(["gcc", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
                    "-o", str(library), str(source)], check=True, capture_output=True)
    done = sanitized([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).{fault}(0)"], tree)
    assert done.returncode != 0 and said in done.stderr


@pytest.mark.parametrize("folder", [
    "core", "capi", "planner", "executor", "backends", "soak", "llama/test_cells.py", "llama/test_one_token.py"])
def test_the_suite_accesses_nothing_that_it_should_not(tree, folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{folder}"]
    if folder == "soak":
        # Has a malloc of its own.
        command += ["--deselect", "tests/soak/test_core_without_memory.py"]
    done = sanitized(command, tree)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-6000:]}"
    assert " passed" in done.stdout
