"""Compilers other than the one that has built the package accept the sources of the CPU kernels."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = ROOT / "ggml_sched" / "backends" / "cpu"
CLANGS = [name for name in ("clang", *(f"clang-{version}" for version in range(12, 31))) if shutil.which(name)]
TIDY = shutil.which("clang-tidy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
SOURCES = pytest.mark.parametrize("source", sorted((CPU / "kernels").glob("*.c")), ids=lambda path: path.name)


@pytest.mark.skipif(TIDY is None, reason="needs clang-tidy (extra dev)")
@SOURCES
def test_the_front_end_of_clang_accepts_the_kernels(source):
    done = subprocess.run([TIDY, "--quiet", "--checks=-*,misc-static-assert", source, "--", "-std=gnu11",
                           f"-I{ROOT / 'include'}", f"-I{CPU}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not CLANGS, reason="needs Clang")
@SOURCES
def test_clang_accepts_the_kernels(source):
    """Old ones, too, which know fewer names of instructions."""
    for clang in CLANGS:
        done = subprocess.run([clang, "-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
                               "-Wno-unused-parameter", "-Wno-missing-field-initializers", "-Wno-cast-function-type",
                               f"-I{ROOT / 'include'}", f"-I{CPU}", source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
