"""A CMake project finds the package: with find_package(ggml-sched), and nothing else that names it.

CMake is that of the system, or of the Python package cmake (extra `dev`).
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ggml_sched as gs


def tool(name: str, folder: str) -> str | None:
    """A program of the system, or that of the Python package of its name, whose attribute `folder` says where."""
    if importlib.util.find_spec(name) is None:
        return shutil.which(name)
    return shutil.which(name, path=getattr(importlib.import_module(name), folder)) or shutil.which(name)


CMAKE, NINJA = tool("cmake", "CMAKE_BIN_DIR"), tool("ninja", "BIN_DIR")
if CMAKE is None or shutil.which("gcc") is None or (NINJA is None and shutil.which("make") is None):
    pytest.skip("needs cmake (pip install cmake ninja), and gcc", allow_module_level=True)

PROJECT = """
cmake_minimum_required(VERSION 3.16)
project(runner LANGUAGES {languages})
set(CMAKE_CXX_STANDARD 17)
find_package(ggml-sched {version} CONFIG REQUIRED)
find_package(ggml-sched CONFIG REQUIRED)
message(STATUS "found ${{ggml-sched_VERSION}}")
foreach(name one two)
  add_library(${{name}} MODULE ${{name}}.cpp plain.c)
  target_link_libraries(${{name}} PRIVATE ggml-sched::headers)
endforeach()
"""
SOURCE = """
#include "ggml_sched/api.h"
extern "C" int major_of(const gs_api *api) {
    return gs_api_check(api, nullptr) == GS_OK ? api->major : -1;
}
"""
DRIVER = """
import ctypes, sys
from ggml_sched import _capi
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
for name in sys.argv[1:]:
    major = ctypes.CDLL(name).major_of
    major.argtypes = [ctypes.c_void_p]
    print(major(pointer(_capi.api, b"ggml_sched._capi.api")))
"""


def cmake(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CMAKE, *arguments], capture_output=True, text=True, timeout=300)


def configure(source: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"] if NINJA else []
    return cmake("-S", str(source), "-B", str(build), *generator, *options,
                 f"-Dggml-sched_DIR={Path(gs.get_include(), 'cmake')}")


def project(folder: Path, version: str, languages: str = "C CXX") -> Path:
    """A project with two libraries, that requires a version of the package."""
    (folder / "CMakeLists.txt").write_text(PROJECT.format(version=version, languages=languages))
    for name in ("one", "two"):
        (folder / f"{name}.cpp").write_text(SOURCE)
    (folder / "plain.c").write_text('#include "ggml_sched/api.h"\n')
    return folder


def test_targets_that_link_to_the_headers_compile_and_run(tmp_path):
    done = configure(project(tmp_path, ".".join(gs.__version__.split(".")[:2])), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"found {gs.__version__}\n" in done.stdout
    built = cmake("--build", str(tmp_path / "out"))
    assert built.returncode == 0, built.stdout + built.stderr
    libraries = sorted(str(path) for path in (tmp_path / "out").glob("lib*.so"))
    ran = subprocess.run([sys.executable, "-c", DRIVER, *libraries], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["2", "2"], ran.stderr


def test_a_version_that_is_too_new_is_refused_with_both(tmp_path):
    done = configure(project(tmp_path, "99.0", "NONE"), tmp_path / "out")
    assert done.returncode != 0
    assert re.search(rf'requested version "99.0".*version: {re.escape(gs.__version__)}', done.stderr, re.DOTALL)


def test_the_example_of_a_runner_runs_two_programs_in_one_set_of_arenas(tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples" / "cpp_runner"
    if not example.exists():
        pytest.skip("needs the source tree")
    done = configure(example, tmp_path / "out", f"-DPython3_ROOT_DIR={sys.base_prefix}",
                     "-DPython3_FIND_STRATEGY=LOCATION", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Werror")
    if "Could NOT find Python3" in done.stderr:
        pytest.skip("needs libpython")
    assert done.returncode == 0, done.stderr
    built = cmake("--build", str(tmp_path / "out"))
    assert built.returncode == 0, built.stdout + built.stderr
    path = os.pathsep.join([str(Path(gs.__file__).parents[1]), *sys.path[1:]])
    ran = subprocess.run([tmp_path / "out" / "runner"], capture_output=True, text=True, timeout=60,
                         env=os.environ | {"PYTHONPATH": path, "PYTHONHOME": sys.base_prefix})
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == ["arenas: 4096 and 1536 bytes", "scores: 8.73834, 5472 bytes moved"]
