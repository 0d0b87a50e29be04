"""The hook under ggml's libraries: allocators, schedulers and devices, in a process for each case, which loads the hook
and the libraries.  The files of cases document each; devices are those of bench/hooked/devices.cpp, or are made by
ctypes and check every access.
"""

import importlib.util
import subprocess
from pathlib import Path

import ggml_here
import pytest
from hooked import build
from llama_cpp_batches import check_batches
from processes import cases_of, preloading, run_case

from ggml_sched.llama.synthetic import random_model

HERE = Path(__file__).resolve().parent
MISSING = {"older_library": ("ggml_opt_prepare_alloc", "ggml_glu_op_name"),
           "library_without_a_function": ("ggml_backend_event_wait",)}
"""Functions that the libraries of a case lack."""
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


def file_of(name: str) -> Path:
    return HERE / f"{name}_cases.py"


def named(parameters: str, *names: str) -> list[tuple[str, str]]:
    """(file, case) of each case of the files that has these parameters and whose process needs nothing else."""
    return [(name, case) for name in names for case in cases_of(file_of(name), parameters)
            if case not in (*MISSING, "callers")]


@pytest.mark.parametrize("first", [0, 30])
def test_random_graphs_have_the_same_bits_in_less_memory(first):
    run_case(file_of("allocator"), "random_graphs", str(first), str(first + 30))


@pytest.mark.parametrize(("name", "case"), [
    *named("", "allocator", "allocator_reuse", "scheduler", "device_query", "synchronization", "expert"),
    ("synchronization", "fused_nodes_that_read_copies")])
def test_the_hook_does_what_the_case_documents(name, case):
    run_case(file_of(name), case)


@pytest.mark.parametrize(("name", "case"), named("library: str", "scheduler", "scheduler_reuse"))
def test_the_hook_does_on_devices_what_the_case_documents(name, case, devices):
    run_case(file_of(name), case, devices)


def test_the_library_of_a_caller_is_looked_up_once(tmp_path):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "callers.so"
    subprocess.run([*build.compiler().split(), "-shared", "-fPIC", "-O1", str(HERE / "callers.cpp"), "-o", str(library),
                    "-ldl"], check=True)
    run_case(file_of("scheduler"), "callers", str(library), LD_PRELOAD=preloading(library))


def without(folder: Path, *names: str) -> str:
    """A folder with ggml's libraries, in which functions of libggml-base have other names: the same length, so that
    nothing else moves."""
    here = ggml_here.LIBRARY or f"{importlib.util.find_spec('ggml').submodule_search_locations[0]}/lib"
    for path in Path(here).glob("libggml*"):
        text = path.read_bytes()
        for name in names if path.name.startswith("libggml-base") else ():
            word = b"\0" + name.encode() + b"\0"
            assert word in text
            text = text.replace(word, word[:-2] + b"_\0")
        (folder / path.name).write_bytes(text)
    return str(folder)


@pytest.mark.parametrize("case", MISSING)
def test_a_library_without_functions_that_we_use_works_as_before(case, tmp_path):
    run_case(file_of("device_query"), case, GGML_SCHED_TEST_GGML=without(tmp_path, *MISSING[case]))


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("level", ["alloc", "sched"])
@pytest.mark.parametrize(("model", "n_seq", "cache"), [("tiny-llama", 4, "split"), ("mamba", 16, "unified"),
                                                       ("mamba", 4, "split")])
def test_after_the_first_graph_of_each_wiring_random_batches_of_llama_cpp_plan_nothing(model, n_seq, cache, level,
                                                                                      tmp_path):
    path = HERE.parent / "data" / "models" / "tiny-llama-f16.gguf"
    if model != "tiny-llama":
        path = tmp_path / "model.gguf"
        path.write_bytes(random_model(model))
    check_batches(level, path, 150, n_seq, cache)
