"""A dry run predicts every buffer that llama.cpp allocates, to the byte, and no end of llama.cpp ends the caller."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from allocations import MODES, allocated, predicted
from hooked import build, models
from processes import run_python

from ggml_sched._graph import Type
from ggml_sched.llama.gguf_reader import Kind
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.synthetic import is_matrix, outline, random_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests/data/models"
TINY = MODELS / "tiny-llama-q4_0.gguf"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")

ONE, UNEQUAL = [("HOST0", 8 << 30)], [("HOST0", 8 << 30), ("HOST1", 24 << 30)]
THREE = [("HOST0", 8 << 30), ("HOST1", 24 << 30), ("HOST2", 12 << 30)]
SMALL = {"n_ctx": 256, "n_batch": 64}
CPU_WAYS = ({}, {"flash_attn": True}, {"n_seq_max": 3}, {"use_mmap": False}, {"use_extra_bufts": False},
            {"type_k": "f32", "type_v": "bf16"}, {"flash_attn": "auto", "kv_unified": True})
DEVICE_WAYS = ({"n_gpu_layers": 1}, {"n_gpu_layers": 3}, {"n_gpu_layers": -1}, {"n_gpu_layers": -1, "flash_attn": True},
               {"n_gpu_layers": -1, "offload_kqv": False}, {"n_gpu_layers": -1, "override_tensor": {"ffn_.*": "CPU"}},
               {"n_gpu_layers": 2, "override_tensor": {"token_embd": "HOST0", "attn_q": "CPU"}},
               {"n_gpu_layers": -1, "tensor_split": [3, 1, 2]})


@pytest.fixture
def dry_run(monkeypatch):
    """The function in a process that is not hooked."""
    monkeypatch.setenv("GGML_SCHED", "off")
    from ggml_sched.llama_cpp import dry_run

    return dry_run


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> dict[str, str]:
    return build.build(tmp_path_factory.mktemp("libraries"))


def model_file(name: str, folder: Path) -> Path:
    if not name.startswith("random"):
        return MODELS / f"{name}.gguf"
    path = folder / f"{name.replace(' ', '-')}.gguf"
    path.write_bytes(random_model(name.split()[1], 7, tied="gemma" in name))
    return path


@needs_compiler
@pytest.mark.parametrize(("devices", "ways", "pipeline"), [
    ([], CPU_WAYS[:4], False), ([], CPU_WAYS[4:], False), (ONE, DEVICE_WAYS[:4], False), (ONE, DEVICE_WAYS[4:7], False),
    (UNEQUAL, (DEVICE_WAYS[2], DEVICE_WAYS[7]), False), (UNEQUAL, (DEVICE_WAYS[2],), True),
    (THREE, (DEVICE_WAYS[3], DEVICE_WAYS[7]), False)],
    ids=["CPU", "CPU, caches", "one, layers", "one, tensors", "two", "two, pipeline", "three"])
def test_every_buffer_has_the_predicted_bytes(devices, ways, pipeline, dry_run, libraries, tmp_path):
    compare(TINY, [SMALL | way for way in ways], devices, pipeline, dry_run, libraries, tmp_path)


@needs_compiler
@pytest.mark.parametrize("name", ["random gpt-oss", "random gemma3", "random mamba", "random qwen3moe"])
def test_other_architectures_have_the_predicted_bytes_too(name, dry_run, libraries, tmp_path):
    ways = [SMALL | {"n_gpu_layers": 2}, SMALL | {"n_gpu_layers": -1, "n_seq_max": 2}]
    compare(model_file(name, tmp_path), ways, UNEQUAL, False, dry_run, libraries, tmp_path)


@needs_compiler
def test_a_model_in_two_files_has_a_buffer_for_each(dry_run, libraries, tmp_path):
    arch, metadata, optional, tied = models.GRAPHS["llama-160m"]
    values, specs = outline(arch, metadata, optional=optional, tied=tied)
    nothing = memoryview(np.zeros(1 << 27, np.uint8))
    for i, part in enumerate((specs[: len(specs) // 2], specs[len(specs) // 2 :])):
        head = values if i == 0 else {"general.architecture": arch}
        kinds = [Type.Q4_0 if is_matrix(spec) else Type.F32 for spec in part]
        tensors = {spec.name: (kind, spec.ne, nothing[: kind.type_size * int(np.prod(spec.ne)) // kind.block_size])
                   for spec, kind in zip(part, kinds, strict=True)}
        write_gguf(tmp_path / f"model-{i + 1:05d}-of-00002.gguf",
                   {**head, "split.no": (Kind.U16, i), "split.count": (Kind.U16, 2),
                    "split.tensors.count": (Kind.I32, len(specs))}, tensors)
    ways = [SMALL | {"use_extra_bufts": False}, SMALL | {"use_extra_bufts": False, "n_gpu_layers": 5}]
    compare(tmp_path / "model-00001-of-00002.gguf", ways, ONE, False, dry_run, libraries, tmp_path)


def compare(path, ways, devices, pipeline, dry_run, libraries, folder) -> None:
    runs = [dry_run(path, devices=devices or None, pipeline=pipeline, **way) for way in ways]
    for mode in MODES:
        for way, run, held in zip(ways, runs, allocated(folder, mode, path, libraries, ways, devices, pipeline),
                                  strict=True):
            assert predicted(run, mode) == held, (mode, way)
            assert {kind for _, kind, _ in held} == {"weights", "compute", "other"}


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize("name", [*models.GRAPHS, *models.VOCABULARIES, *models.OTHERS])
def test_models_of_real_sizes_have_the_predicted_bytes(name, dry_run, libraries, tmp_path):
    path = models.write(name, tmp_path)
    layers = (models.GRAPHS | models.VOCABULARIES | models.OTHERS)[name][1]["block_count"]
    usual = {"n_ctx": 2048, "use_extra_bufts": False}
    for devices, ways in (([], [{}, {"flash_attn": True}, {"n_batch": 64}, {"n_seq_max": 4}, {"embedding": True}]),
                          (ONE, [{"n_gpu_layers": -1}, {"n_gpu_layers": layers // 2},
                                 {"n_gpu_layers": layers // 2, "flash_attn": True}]),
                          (UNEQUAL, [{"n_gpu_layers": -1}, {"n_gpu_layers": layers - 1, "flash_attn": True},
                                     {"n_gpu_layers": -1, "override_tensor": {r"ffn_.*_exps|ffn_up": "CPU"}}]),
                          (THREE, [{"n_gpu_layers": -1}, {"n_gpu_layers": -1, "tensor_split": [2, 1, 1]}])):
        compare(path, [usual | way for way in ways], devices, False, dry_run, libraries, tmp_path)


def test_a_run_has_graphs_residents_and_bytes(dry_run):
    run = dry_run(TINY, devices=[("A", 1 << 30), ("B", 3 << 30)], n_gpu_layers=-1, use_extra_bufts=False, **SMALL)
    assert run.devices == ("A", "B", "CPU") and run.settings["n_ctx"] == 256
    assert [graph.meta["n_tokens"] for graph in run.graphs] == [1, 64]
    names = [{t.name: t.nbytes for t in graph.tensors if t.resident} for graph in run.graphs]
    assert names[0] == names[1] == {one.name: one.nbytes for one in run.residents}
    assert {t.name for t in run.token.tensors if t.resident == "kv"} == {
        f"cache_{which}_l{layer}" for which in "kv" for layer in range(4)}
    memory = run.memory()
    assert sum(held.weights for held in memory.values()) >= sum(
        one.nbytes for one in run.residents if one.kind == "weights")
    assert {one.device for one in run.residents if one.name.startswith("blk.0")} == {"A"}
    assert {one.device for one in run.residents if one.name.startswith("output")} == {"B"}
    assert memory["CPU"].mapped == memory["CPU"].weights > 0 and memory["A"].mapped == 0
    assert run.memory("sched")["A"].compute < memory["A"].compute


def test_a_run_is_a_value(dry_run):
    run, again = (dry_run(TINY, **SMALL) for _ in range(2))
    assert run == again and hash(run) == hash(again) and pickle.loads(pickle.dumps(run)) == run
    assert json.loads(json.dumps(run.to_dict()))["memory"]["off"]["CPU"]["total"] == run.memory()["CPU"].total
    assert run != dry_run(TINY, n_ctx=512)
    assert "CPU" in str(run) and f"{run.memory()['CPU'].total:,}" in str(run)


def test_graphs_are_planned_like_others(dry_run):
    import ggml_sched as gs
    from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict

    run = dry_run(TINY, use_extra_bufts=False, **SMALL)
    dry = gs.DryBackend("CPU")
    placed = graph_from_dict(graph_to_dict(run.prompt), lambda t: dry)
    assert gs.Scheduler([dry]).plan(placed).buffer_sizes[0] == run.memory("sched")["CPU"].compute


def test_backends_that_compute_support_all_nodes(dry_run):
    """The hook's nodes that keep the memory of unread leafs, which no backend computes, are not in the graphs."""
    import ggml_sched as gs
    from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict

    run = dry_run(TINY, use_extra_bufts=False, **SMALL)
    cpu = gs.CpuBackend()
    placed = graph_from_dict(graph_to_dict(run.prompt), lambda t: cpu)
    with gs.Scheduler([cpu]) as scheduler:
        assert scheduler.plan(placed).buffer_sizes[0] >= run.memory("sched")["CPU"].compute
    assert gs.fit(run.graphs, [gs.measure(gs.CpuBackend())])


@pytest.mark.parametrize(("settings", "message", "status"), [
    ({"type_v": "q8_0"}, "requires flash_attn", 1),
    ({"type_k": 200}, "GGML_ASSERT(type >= 0", -6),
    ({"kv_overrides": {"llama.block_count": 9}}, "blk.4.attn_norm.weight' not found", 1),
    ({"kv_overrides": {"general.name": "x" * 128}}, "'general.name' has 128 bytes; llama.cpp takes 127 at most", 1),
    ({"tensor_split": [1] * 17}, "tensor_split has 17 parts; llama.cpp has 16 devices at most", 1),
    ({"override_tensor": {f"x{i}": "CPU" for i in range(4096)}},
     "4096 overrides of tensors; llama.cpp takes 4095 at most", 1),
    ({"override_tensor": {"x": "HOST9"}}, "no buffer type has the name 'HOST9'", 1)])
def test_what_llama_cpp_refuses_or_aborts_on_is_an_error_with_its_words(settings, message, status, dry_run):
    from ggml_sched.llama_cpp import DryRunError

    with pytest.raises(DryRunError) as caught:
        dry_run(TINY, **settings)
    assert message in caught.value.message and message in str(caught.value) and caught.value.status == status
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.message, copied.status) == (str(caught.value), caught.value.message, status)


def test_a_graph_that_the_planner_refuses_is_an_error_with_its_reason(dry_run, tmp_path):
    """Heads of 80 elements, which are no whole number of blocks of 32."""
    from ggml_sched.llama_cpp import DryRunError

    path = tmp_path / "heads.gguf"
    path.write_bytes(random_model("phi2", metadata={"embedding_length": 160, "attention.head_count": 2,
                                                    "attention.head_count_kv": 2, "rope.dimension_count": 32}))
    with pytest.raises(DryRunError, match=r"\(VIEW\): layout.ne\[0\] = 80 is no whole number of blocks"):
        dry_run(path, n_ctx=64, type_k="q8_0")


@pytest.mark.parametrize("settings", [
    {"tensor_split": [1] * 16}, {"override_tensor": {f"x{i}": "CPU" for i in range(4095)}}], ids=["split", "overrides"])
def test_as_many_parts_and_overrides_as_llama_cpp_takes_are_taken(settings, dry_run):
    assert dry_run(TINY, **SMALL, **settings).memory() == dry_run(TINY, **SMALL).memory()


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "signal 40"), (64, "SIGRTMAX")])
def test_a_signal_that_ends_llama_cpp_is_named_or_numbered(number, name, dry_run, monkeypatch):
    """Of the real-time signals only the first and the last have names."""
    from ggml_sched.llama_cpp import DryRunError, dryrun

    monkeypatch.setattr(dryrun, "_start", lambda folder, deadline: (-number, "the last line\n"))
    with pytest.raises(DryRunError, match=f"was ended by {name}: the last line") as caught:
        dry_run(TINY)
    assert caught.value.status == -number


def test_the_deadline_ends_llama_cpp(dry_run):
    from ggml_sched.llama_cpp import DryRunError

    began = time.monotonic()
    with pytest.raises(DryRunError, match=r"did not end within 1\.5 s") as caught:
        dry_run(TINY, n_ctx=1 << 31, deadline=1.5)
    assert time.monotonic() - began < 20 and caught.value.status is None
    # Without the sanitizers' libraries, with which `ps` may wait for itself for ever.
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"LD_PRELOAD": ""}).stdout
    assert "python" in left
    assert not [line for line in left.splitlines() if "dryrun_child" in line and str(os.getpid()) in line]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"n_layers": 3}, TypeError, "'n_layers' is not one of llama.cpp's settings"),
    ({"split_mode": "rows"}, ValueError, "split_mode='rows'"), ({"flash_attn": 7}, ValueError, "flash_attn=7"),
    ({"type_k": "q9"}, ValueError, "type_k='q9'"), ({"n_ubatch": 0}, ValueError, "n_ubatch=0"),
    ({"deadline": 0}, ValueError, "deadline=0"), ({"devices": [3]}, TypeError, "devices: 3"),
    ({"devices": ["A", "A"]}, ValueError, "A, A"), ({"devices": ["CPU"]}, ValueError, "not 'CPU'"),
    ({"devices": [f"D{i}" for i in range(16)]}, ValueError, "16 devices"),
    ({"devices": "CUDA0"}, TypeError, "devices='CUDA0' is one text"),
    ({"devices": [("A", -5)]}, ValueError, "'A' has memory=-5"), ({"devices": [("A", 1 << 64)]}, ValueError, "64 bits"),
    ({"devices": [("A", "8G")]}, TypeError, "'A' has memory='8G'"), ({"devices": [(3, 4)]}, TypeError, r"\(3, 4\)"),
    ({"devices": ["a\0b"]}, ValueError, "a name has a zero byte"),
    *(({name: 1 << 32}, ValueError, f"{name}=4294967296 is not between")
      for name in ("n_ctx", "n_batch", "n_seq_max", "n_gpu_layers", "main_gpu", "yarn_orig_ctx", "pooling_type")),
    *(({name: value}, TypeError, f"{name}=.* is not a whole number")
      for name in ("n_ctx", "n_gpu_layers", "type_k") for value in (True, 1.5, np.float32(2))),
    ({"type_v": -1}, ValueError, "type_v=-1"), ({"use_mmap": "no"}, TypeError, "use_mmap='no'"),
    ({"flash_attn": [1]}, TypeError, r"flash_attn=\[1\]"), ({"tensor_split": 1.0}, TypeError, "tensor_split=1.0"),
    ({"kv_overrides": [1]}, TypeError, "kv_overrides"), ({"kv_overrides": {"a": []}}, TypeError, "'a'=.* not a number"),
    ({"override_tensor": {3: "CPU"}}, TypeError, "override_tensor"), ({"rope_freq_base": "x"}, TypeError, "'x'")])
def test_wrong_arguments_start_no_process(arguments, error, message, dry_run, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(error, match=message):
        dry_run(TINY, **arguments)


def test_numbers_of_numpy_and_paths_of_bytes_are_taken(dry_run):
    settings = {"n_gpu_layers": 2, "tensor_split": [1, 2], "flash_attn": True, "offload_kqv": False,
                "kv_overrides": {"a.b": 3, "a.c": 0.5, "a.d": True}} | SMALL
    run = dry_run(os.fsencode(TINY), deadline=np.float32(60), devices=[("A", np.int64(1 << 30)), "B"],
                  n_gpu_layers=np.int64(2), tensor_split=np.array([1, 2], np.float32), flash_attn=np.True_,
                  offload_kqv=np.False_, n_ctx=np.int32(256), n_batch=np.uint8(64),
                  kv_overrides={"a.b": np.int16(3), "a.c": np.float32(0.5), "a.d": np.True_})
    assert run == dry_run(TINY, devices=[("A", 1 << 30), "B"], **settings)


def test_a_missing_file_and_one_that_is_no_model(dry_run, tmp_path):
    from ggml_sched.llama_cpp import DryRunError

    with pytest.raises(FileNotFoundError, match="no such file"):
        dry_run(tmp_path / "missing.gguf")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(DryRunError, match="failed to load model"):
        dry_run(tmp_path / "text.gguf")


def test_the_caller_need_not_be_hooked_and_may_be():
    code = ("from ggml_sched.llama_cpp import dry_run; import sys; run = dry_run(sys.argv[1], n_ctx=256, n_batch=64); "
            "print(run.memory()['CPU'].total, 'llama_cpp' in sys.modules)")
    totals = {run_python("-c", code, str(TINY), GGML_SCHED=level).stdout for level in ("off", "alloc", "sched")}
    assert len(totals) == 1 and totals.pop().endswith("False\n")


def test_dry_runs_work_after_llama_cpp_was_imported_where_the_hook_is_off():
    code = ("import llama_cpp, os, sys; os.environ['GGML_SCHED'] = 'off'; from ggml_sched.llama_cpp import dry_run; "
            "print(dry_run(sys.argv[1], n_ctx=256, n_batch=64).memory('sched')['CPU'].compute > 0)")
    assert run_python("-c", code, str(TINY), GGML_SCHED="alloc").stdout == "True\n"


def test_no_weights_are_read(dry_run, tmp_path):
    """Of a file that ends where its weights begin llama.cpp reads all that a dry run needs, but for its length."""
    path = models.write("llama-2-7b", tmp_path)
    before = path.stat()
    run = dry_run(path, n_ctx=32768, flash_attn=True, use_extra_bufts=False)
    assert run.memory()["CPU"].weights > 3 << 30 and run.memory()["CPU"].caches == 16 << 30
    assert path.stat().st_blocks == before.st_blocks < 8192, "holes stay holes"
    assert sys.getsizeof(run) < 1 << 10
