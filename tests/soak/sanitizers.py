"""The package built with GCC's sanitizers, and programs run with their runtimes.

Owns nothing.  Invariant: a program writes each finding of a sanitizer to stderr and exits with an error.  With leak
checking the exit status has no meaning, since Python itself leaks at its end; `leaks` selects the reports about our
code.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["build_sanitized", "leaks", "sanitized", "sanitizing"]

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("bench", "ggml_sched", "include", "tests", "tools", "setup.py", "pyproject.toml", "README.md")
LEAK = re.compile(r"^(?:Direct|Indirect) leak of .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


def sanitizing(*, leaks: bool = False, runtimes: tuple[str, ...] = ("asan", "ubsan")) -> dict[str, str]:
    """What the environment of a sanitized program says.

    With `leaks` it reports them at its end, and never ends with an error for what a sanitizer found: read its stderr.
    """
    libraries = [subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True,
                                check=True).stdout.strip() for name in runtimes]
    if not all(os.path.isabs(library) for library in libraries):
        pytest.skip("this GCC has no sanitizers")
    return {"LD_PRELOAD": " ".join(libraries), "PYTHONMALLOC": "malloc",
            # A size that no allocator gives is a test's, not an error.
            "ASAN_OPTIONS": f"detect_leaks={int(leaks)}:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1", **({"LSAN_OPTIONS": "exitcode=0"} if leaks else {})}


def sanitized(command: list[str], where: Path, **how) -> subprocess.CompletedProcess:
    """Run a command with the sanitizers' runtimes."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=1800,
                          env={**environment, **sanitizing(**how)})


def leaks(stderr: str, *places: str) -> list[str]:
    """The reports of leaks whose memory was taken in one of these libraries or source files."""
    found = (report[0] for report in LEAK.finditer(stderr))
    return [report for report in found if any(place in report for place in places)]


def build_sanitized(tree: Path) -> Path:
    """A copy of the sources in a folder, built with sanitizers."""
    if not sys.platform.startswith("linux") or shutil.which("gcc") is None:
        pytest.skip("needs Linux and GCC")
    if not (ROOT / "setup.py").exists():
        pytest.skip("needs the source tree")
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
