"""Parts of bench/hooking.py: sparse model files, built libraries, parsed logs, and its page."""

import importlib.util

import ggml_here
import hooking
import numpy as np
import pytest
from hooked import build, models, page, worker
from processes import run_python

from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.synthetic import random_model

with_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return build.build(tmp_path_factory.mktemp("libraries"))


def test_a_model_of_holes_says_all_and_weighs_nothing(tmp_path):
    path = models.write("llama-2-7b", tmp_path)
    assert path.stat().st_size > 3 << 30 and path.stat().st_blocks * 512 < 1 << 20
    with open_gguf(str(path)) as file:
        assert file.metadata["llama.block_count"] == 32 and file.metadata["llama.vocab_size"] == 32000
        assert len(file.tensors) == 32 * 9 + 3
        assert tuple(file.tensors["blk.31.ffn_down.weight"].ne[:2]) == (11008, 4096)


@pytest.mark.parametrize("name", [*models.GRAPHS, *models.OTHERS])
def test_every_model_is_written_and_read_back(name, tmp_path):
    with open_gguf(str(models.write(name, tmp_path))) as file:
        assert file.metadata["general.architecture"] == (models.GRAPHS | models.OTHERS)[name][0]
        assert "token_embd.weight" in file.tensors


@pytest.mark.soak
@with_compiler
def test_the_libraries_build_without_warnings(libraries):
    assert set(libraries) == set(build.NAMES)


@with_compiler
@pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)
def test_calls_inside_ggml_are_counted(libraries):
    """A graph allocator for one buffer is made by the function for several: a call from one file of ggml to itself."""
    code = f"""
import ctypes, importlib.util, sys
sys.path.insert(0, {str(build.HERE)!r})
from worker import Counters
base = importlib.util.find_spec("ggml").submodule_search_locations[0] + "/lib/libggml-base.so"
counters = Counters.in_front({libraries["counters"]!r}, base)
ggml = ctypes.CDLL(base)
for name in ("ggml_backend_cpu_buffer_type", "ggml_gallocr_new"):
    getattr(ggml, name).restype = ctypes.c_void_p
made = ggml.ggml_gallocr_new(ctypes.c_void_p(ggml.ggml_backend_cpu_buffer_type()))
counted = {{name: calls for name, (calls, _) in counters.read().items() if calls}}
ggml.ggml_gallocr_free(ctypes.c_void_p(made))
counters.clear()
print(counted, sum(calls for calls, _ in counters.read().values()))
"""
    assert run_python("-c", code).stdout == "{'ggml_gallocr_new_n': 1} 0\n"


def test_what_llama_cpp_says_of_its_buffers_is_read():
    log = ("~llama_context:        CPU compute buffer size is   0.2079 MiB, matches expectation of   0.2079 MiB\n"
           "~llama_context:      CUDA0 compute buffer size of 12.5000 MiB, does not match expectation of 11.2500 MiB\n")
    assert worker.SIZE.findall(log) == [("CPU", "0.2079", "0.2079"), ("CUDA0", "12.5000", "11.2500")]
    assert worker.GRAPH.search("graph (pp bs=8, tg bs=1): nodes = 9 / 7, splits = 2, input objects = 4").groups() == (
        "9 / 7", "2")


def row(size: float, reserve: int = 2000, allocate: int = 4000) -> dict:
    return {"buffers": [["CPU", size, size]], "nodes": "3", "splits": "1", "copies": 1,
            "reserving": {"ggml_gallocr_reserve_n": [[3, reserve]]},
            "allocating": {"ggml_gallocr_alloc_graph": [[4, allocate]]}}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.fixture
def found() -> dict:
    return {"a": {"CPU": {"stock": [row(10.0)], "alloc": [row(9.0, 1000, 1000)]}},
            "b": {"CPU": {"stock": [row(10.0)], "alloc": [{"failed": "no memory"}]},
                  "flash": {"stock": [{"failed": "no"}], "alloc": [{"failed": "no"}]},
                  "CPU, 1 output": {"stock": [row(10.0)], "alloc": [row(5.0, 1500, 2000)]}}}


def test_hooked_stands_beside_stock(found):
    table = cells(page.table_of_sizes(found, ["alloc"]))
    assert table[0][3:6] == ["10.0000", "2.0", "1.0"] and table[0][-3:] == ["0.9000", "0.500", "0.250"]
    assert table[1][-3:] == ["failed", "", ""] and table[2][2] == "refused: no"


def test_the_summary_has_the_mean_the_worst_and_the_medians(found):
    logits = [page.Tokens("m", 12, 0, {"alloc": 12, "sched": 11}, {"alloc": 0.0, "sched": 2e-6}),
              page.Tokens("n", 4, 1, {"alloc": 4, "sched": 4}, {"alloc": 0.0, "sched": 0.0})]
    memory = {"a": {"CPU": {"stock": [{"anonymous": [5 << 20, 9 << 20]}], "alloc": [{"anonymous": [6 << 20, 8 << 20]}],
                            "sched": [{"failed": "no"}]}}}
    again = {"m": {"stock": {"count": 100, "planned": 90}, "alloc": {"planned": 0}, "sched": {"planned": 3}}}
    measured = page.Found(found, memory, again, logits)
    said = {row[0]: row[1:] for row in cells(page.summary(measured, ["alloc", "sched"], {"": ["a", "b"]}))}
    assert said == {
        "compute buffers / stock's: mean (worst) of 2": ["≤ 0.93 (≤ 1.00)", "0.700 (0.900)", "-"],
        "compute buffers / stock's, one output: mean (worst) of 1": ["≤ 0.93 (≤ 1.00)", "0.500 (0.500)", "-"],
        "reserving / stock's time inside the functions: median (worst)": ["≤ 0.5", "0.62 (0.75)", "-"],
        "allocating a graph / stock's time inside the functions: median (worst)": ["≤ 0.3", "0.38 (0.50)", "-"],
        "anonymous memory above stock's, MiB: median (worst) of ways": ["≤ +1.00", "+1.00 (+1.00)", "-"],
        "random batches planned again: of 100 (stock: 90)": ["0", "0", "3"],
        "logits with the same bits as stock's, ways": ["all of 16", "16", "15"],
        "largest difference of a logit": ["≤ 1e-05", "0.0e+00", "2.0e-06"],
    }
    groups = {"": ["a"], "other models": ["b"]}
    said = {row[0]: row[1:] for row in cells(page.summary(page.Found(found, {}, {}, []), ["alloc"], groups))}
    assert said["compute buffers / stock's, other models: mean (worst) of 1"] == ["(≤ 1.00)", "0.500 (0.500)"]
    assert not any("logit" in what for what in said)


def test_memory_and_batches_are_tables_beside_stock():
    memory = {"a": {"CPU": {"stock": [{"anonymous": [5 << 20, 9 << 20, 9 << 20]}],
                            "alloc": [{"anonymous": [6 << 20, 8 << 20, 9 << 20]}]},
                    "flash": {"stock": [{"failed": "no"}], "alloc": [{"failed": "no"}]}}}
    assert cells(page.table_of_memory(memory, ["alloc"])) == [
        ["a", "CPU", "9.00", "+1.00", "-1.00", "+0.00"], ["a", "flash", "refused: no", "", "", ""]]
    again = {"m": {"stock": {"count": 9, "planned": 8, "grown": 1, "waited": 8}, "alloc": {"failed": "no"}}}
    assert cells(page.table_of_batches(again, ["stock", "alloc"])) == [
        ["m", "9", "8", "1", "8", "failed", "failed", "failed"]]


@with_compiler
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_a_hooked_process_touches_hardly_more_memory_than_stock(level, tmp_path):
    """A prompt that is shorter than what was reserved, of a model whose compute buffer is most of its memory."""
    path, worker = models.write("llama-160m", tmp_path), hooking.Worker(tmp_path)
    way = next(way for words, _, way in hooking.ways_of("llama-160m") if words == "CPU, 1 output")
    rows = {}
    for mode in ("stock", level, level):    # the first of a mode compiles modules
        rows[mode] = worker.run(mode, path, "memory", [way])[0]["anonymous"]
    excess = [ours - theirs for ours, theirs in zip(rows[level], rows["stock"], strict=True)]
    assert max(excess) < 3 << 20 and excess[1] < 2 << 20, excess


@with_compiler
def test_a_process_that_dies_is_a_failure_of_all_it_was_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build", lambda: {"holes": ""})
    asked = hooking.Worker(tmp_path).run("no such mode", tmp_path / "no model", "tokens", [{}, {}])
    assert len(asked) == 2 and all("the process ended with 1" in row["failed"] for row in asked)


@with_compiler
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize(("devices", "pipeline"), [(1, False), (3, True)])
def test_devices_compute_what_the_cpu_does(devices, pipeline, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(random_model("llama"))
    engines = hooking.Worker(tmp_path)
    way = {"n_ctx": 64, "n_batch": 16, "flash": 0, "n_seq": 2, "embeddings": False, "outputs": 0}
    rows = [engines.run("stock", path, "tokens", [way | {"layers": layers, "file": str(tmp_path / f"{count}.npy")}],
                        count, pipeline)[0] for count, layers in ((0, 0), (devices, 999))]
    assert rows == [{"rows": (8 + 6 + 5) * 2}] * 2
    want, got = np.load(tmp_path / "0.npy"), np.load(tmp_path / f"{devices}.npy")
    assert np.abs(want).max() > 0 and np.array_equal(want, got)
    assert not np.array_equal(want[0], want[-1])
