"""The graphs of a model file that is not loaded: those of a loaded model, without reading a weight."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama import open_gguf
from ggml_sched.llama.builder import Shape
from ggml_sched.llama.synthetic import OWN, SIZES, random_llama, random_model

ARCHES = sorted({"llama", *OWN})


@pytest.mark.parametrize("arch", ARCHES)
def test_graphs_are_those_of_the_loaded_model(arch: str) -> None:
    file = random_model(arch)
    found = llama.model_graphs(file, 64, 16, kv_type="f16")
    backend = gs.DryBackend("all", alignment=64)
    with llama.load(file, [backend], 64, 16, kv_type="f16") as model:
        runner = model._runner
        n_kv = model.cache.padded(64)
        loaded = [runner.graph(Shape(1, n_kv, 1)).graph, runner.graph(runner._largest(Shape(16, n_kv, 1))).graph]
    assert [graph.fingerprint for graph in found] == [graph.fingerprint for graph in loaded]
    assert [graph.meta for graph in found] == [graph.meta for graph in loaded]


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_model("llama"))
    with open_gguf(path) as file:
        start = min(info.offset for info in file.tensors.values())
    # The file without its weights, as large as before: a read would find zeros, a touched page would take disk space.
    os.truncate(path, start)
    os.truncate(path, start + (8 << 20))
    blocks = path.stat().st_blocks
    graphs = llama.model_graphs(path, 64, 16)
    assert len(graphs) == 2
    assert path.stat().st_blocks == blocks


@pytest.mark.parametrize(("n_batch", "n_tokens"), [(16, [1, 4, 16]), (4, [1, 4, 4]), (2, [1, 2, 2]), (1, [1])])
def test_several_sequences_add_a_graph_of_a_token_each_and_of_one_for_embeddings(
        n_batch: int, n_tokens: list[int]) -> None:
    graphs = llama.model_graphs(random_model("llama"), 64, n_batch, n_seq=3)
    assert [graph.meta["n_tokens"] for graph in graphs] == n_tokens


@pytest.mark.parametrize("n_batch", [1, 2, 3, 4, 5, 16])
@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_a_loaded_model_of_several_sequences_holds_the_arena_of_its_fit(arch: str, n_batch: int) -> None:
    file = random_model(arch, metadata={"vocab_size": 2000})        # of few tokens, the logits need most memory
    with gs.CpuBackend(1, name="CPU") as backend:
        cpu = gs.Device("CPU", 1 << 30, 1e10, 1e11, host=True, backend=backend)
        fit = gs.fit(llama.model_graphs(file, 64, n_batch, n_seq=3, backends=[backend]), [cpu])
        with llama.load(file, place=fit, n_seq=3, use_mmap=False) as model:
            assert model.n_batch == n_batch
            for i in range(3):
                model.sequence(i).eval(range(1, n_batch + 1), last_only=True)
            model.eval_batch([(i, [1]) for i in range(3)])
            (held,), (use,) = model.memory().values(), fit.memory
            assert (held.weights, held.cache, held.arena) == (use.weights, use.cache, use.arena)


def test_a_placement_for_all_outputs_has_room_for_the_logits_of_every_token() -> None:
    file = llama.random_llama(n_vocab=2000, n_embd=64, n_layer=2)
    for all_outputs, rows in (False, [1, 2]), (True, [1, 2, 15, 16]):
        graphs = llama.model_graphs(file, 32, 16, all_outputs=all_outputs)
        assert [graph.nodes[-1].ne[1] for graph in graphs] == rows
        cpu = gs.Device("CPU", 1 << 30, 1e10, 1e11, host=True)
        [use] = gs.fit(graphs, [cpu]).memory
        fit = gs.fit(graphs, [cpu.replace(memory=cpu.memory - use.left)])
        with gs.CpuBackend(1, name="CPU") as backend, llama.load(file, [backend], place=fit) as model:
            assert model.eval(range(1, 17), last_only=True).shape == (1, 2000)
            model.reset()
            if all_outputs:
                assert model.eval(range(1, 17)).shape == (16, 2000)
                model.reset()
                assert model.eval(range(1, 16)).shape == (15, 2000)
            else:
                with pytest.raises(gs.OutOfMemory, match="'result_output' 128000") as caught:
                    model.eval(range(1, 17))
                [note] = caught.value.__notes__
                assert "has 16 outputs, the graphs of the placement have 2 at most" in note
                assert "last_only=True" in note and "model_graphs(all_outputs=True)" in note
                assert model.eval(range(1, 17), last_only=True).shape == (1, 2000)
        if not all_outputs:
            with gs.CpuBackend(1, name="CPU") as backend, llama.load(file, [backend], n_batch=32, place=fit) as model, \
                    pytest.raises(gs.OutOfMemory) as caught:
                model.eval(range(1, 33), last_only=True)
            assert not hasattr(caught.value, "__notes__")      # a batch of too many tokens, not of too many outputs


def test_a_context_of_0_is_the_one_that_the_model_was_trained_with() -> None:
    [decode, prompt] = llama.model_graphs(io.BytesIO(random_model("llama")), 0, 16)
    assert decode.meta["n_ctx"] == prompt.meta["n_ctx"] == SIZES["context_length"]


def test_flash_attention_only_where_the_backends_compute_it() -> None:
    file = random_model("llama")
    without = gs.DryBackend("plain", supports_op=lambda node: node.op != "FLASH_ATTN_EXT")
    assert any(node.op == "FLASH_ATTN_EXT" for node in llama.model_graphs(file, 64, 16)[0].nodes)
    [decode, _] = llama.model_graphs(file, 64, 16, backends=[without])
    assert not any(node.op == "FLASH_ATTN_EXT" for node in decode.nodes)


@pytest.mark.parametrize(("arguments", "message"), [
    ((-1, 16), "n_ctx"), ((64, 0), "n_batch"), (("many", 16), "n_ctx")])
def test_arguments_are_checked(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        llama.model_graphs(random_model("llama"), *arguments)


def test_a_file_that_is_no_model_is_an_error() -> None:
    with pytest.raises(gs.FileFormatError):
        llama.model_graphs(b"GGUF" + bytes(40))


def placed(n_ctx: int = 64, n_batch: int = 16, gpu: int = 40000) -> tuple[bytes, gs.Fit, list[gs.CpuBackend]]:
    """A model's file, a fit of it to two CPU backends of which one is small, and these."""
    file = random_model("llama")
    backends = [gs.CpuBackend(1, name="GPU"), gs.CpuBackend(1, name="CPU")]
    backends[0].is_host = False
    given = [gs.Device("GPU", gpu, 1e12, 1e13, backend=backends[0]),
             gs.Device("CPU", 1 << 30, 1e9, 1e10, host=True, backend=backends[1])]
    graphs = llama.model_graphs(file, n_ctx, n_batch, kv_type="f16", backends=backends)
    return file, gs.fit(graphs, given), backends


def test_a_model_is_loaded_where_its_fit_has_it() -> None:
    file, fit, backends = placed()
    try:
        assert {entry.device for entry in fit.placed} == {0, 1}
        with (llama.load(file, place=fit, use_mmap=False) as model,
              llama.load(file, n_ctx=64, n_batch=16, kv_type="f16") as plain):
            assert (model.n_ctx, model.n_batch, model.kv_type) == (64, 16, "f16")
            tokens = list(range(1, 14))
            assert np.allclose(model.eval(tokens, last_only=True), plain.eval(tokens, last_only=True), atol=1e-4)
            assert np.allclose(model.eval([3]), plain.eval([3]), atol=1e-4)
            for name, tensor in model.weights.tensors.items():
                assert tensor.backend.name == fit.place(name).name
            for use, backend in zip(fit.memory, backends, strict=True):
                held = model.memory()[backend]
                assert (held.weights, held.cache) == (use.weights, use.cache)
                assert held.arena <= use.arena + use.left
    finally:
        for backend in backends:
            backend.close()


@pytest.mark.parametrize(("gpu", "cpu"), [(150_000, 500_000), (250_000, 330_000), (400_000, 420_000)])
def test_a_fit_that_fetches_weights_keeps_its_memory_and_gives_the_same_bits(tmp_path: Path, gpu: int,
                                                                             cpu: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160))
    tokens = list(range(1, 14))
    with gs.CpuBackend(1, name="GPU") as one, gs.CpuBackend(1, name="CPU") as host:
        one.is_host = False
        given = [gs.Device("GPU", gpu, 1e11, 1e13, backend=one),
                 gs.Device("CPU", cpu, 1e10, 1e11, host=True, backend=host, fetch=gs.Link(1e9, 1e-5))]
        fit = gs.fit(llama.model_graphs(path, 64, 16, kv_type="f16", backends=[one, host]), given, within=0.1)
        with llama.load(path, [host], n_ctx=64, n_batch=16, kv_type="f16") as plain:
            expected = [plain.eval(tokens, last_only=True).tobytes(), *(plain.eval([t]).tobytes() for t in (3, 4))]
        with llama.load(path, place=fit) as model:
            found = [model.eval(tokens, last_only=True).tobytes()]
            for token in (3, 4):
                before = model.store.traffic.nbytes
                found.append(model.eval([token]).tobytes())
                rows = 64 * 4 * len(fit.fetching.rows)
                assert model.store.traffic.nbytes - before == fit.fetching.nbytes + rows
            assert found == expected
            assert model.residency.fetched == fit.fetching.names and model.residency.rows == fit.fetching.rows
            for use, backend in zip(fit.memory, (one, host), strict=True):
                held = model.memory()[backend]
                assert (held.weights, held.cache) == (use.weights, use.cache)
                assert held.arena <= use.arena + use.left
            held = [on.total for backend, on in model.memory().items() if backend is not one]
            assert sum(held) <= cpu
            model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph).verify()


def test_a_context_shift_that_no_device_has_room_for_is_left_out(tmp_path: Path) -> None:
    """It is no graph of the fit: the model runs without, and the shift alone is refused."""
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160))
    with gs.CpuBackend(1, name="GPU") as one, gs.CpuBackend(1, name="CPU") as host:
        one.is_host = False
        given = [gs.Device("GPU", 800_000, 1e11, 1e13, backend=one),
                 gs.Device("CPU", 400_000, 1e10, 1e11, host=True, backend=host, fetch=1e9)]
        fit = gs.fit(llama.model_graphs(path, 1024, 4, kv_type="f16", backends=[one, host]), given, within=0.1)
        with llama.load(path, place=fit) as model:
            assert model.residency.fetched == fit.fetching.names
            model.eval([1, 2, 3, 4], last_only=True)
            with pytest.raises(gs.OutOfMemory, match="backend 'GPU': the arena needs"):
                model.shift(1, 1)
            assert np.isfinite(model.eval([5])).all()


def test_several_sequences_of_a_fit_that_fetches_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160))
    with gs.CpuBackend(1, name="CPU") as host:
        given = gs.Device("CPU", 800_000, 1e10, 1e11, host=True, backend=host, fetch=1e9)
        fit = gs.fit(llama.model_graphs(path, 128, 8, n_seq=3, kv_type="f16", backends=[host]), [given])
        with llama.load(path, place=fit, n_seq=3) as model:
            assert model.residency.fetched == fit.fetching.names
            for k in range(3):
                model.sequence(k).eval([1, 2, 3], last_only=True)
            assert sum(on.total for on in model.memory().values()) <= given.memory


def test_a_loaded_model_fetches_what_its_fit_does_also_where_less_would_do(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160))
    with gs.CpuBackend(1, name="CPU") as host:
        given = gs.Device("CPU", 800_000, 1e10, 1e11, host=True, backend=host, fetch=1e9)
        fit = gs.fit(llama.model_graphs(path, 128, 8, kv_type="f16", backends=[host]), [given])
        roomy = dataclasses.replace(fit, devices=(fit.devices[0].replace(memory=900_000),))
        with llama.load(path, place=roomy) as model:
            assert model.residency.fetched == fit.fetching.names != ()


def test_where_a_loaded_model_needs_more_than_its_fit_more_is_fetched(tmp_path: Path) -> None:
    """Kernels of a real backend need work memory that a device of numbers does not know."""
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160))
    numbers = gs.Device("CPU", 800_000, 1e10, 1e11, host=True, fetch=1e9)
    graphs = llama.model_graphs(path, 64, 16, kv_type="f16")
    fit = gs.fit(graphs, [numbers])
    with gs.CpuBackend(1, name="CPU") as host, llama.load(path, [host], place=fit) as model:
        assert model.residency.nbytes > fit.fetching.nbytes
        model.eval(list(range(1, 14)), last_only=True)
        assert sum(on.total for on in model.memory().values()) <= 800_000
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit(graphs, [numbers.replace(memory=100_000)])
    least = gs.fit(graphs, [numbers.replace(memory=caught.value.needed)])
    with (gs.CpuBackend(1, name="CPU") as host,
          pytest.raises(gs.OutOfMemory, match=rf"a limit of {caught.value.needed:,} bytes on 'CPU'")):
        llama.load(path, [host], place=least)


def test_backends_are_found_by_the_names_of_the_devices() -> None:
    file, fit, backends = placed()
    others = [gs.DryBackend("CPU", alignment=64), gs.DryBackend("GPU", alignment=64)]
    try:
        with llama.load(file, others, place=fit) as model:
            assert all(tensor.backend.name == fit.place(name).name for name, tensor in model.weights.tensors.items())
            assert [backend.name for backend in model.scheduler.backends] == ["GPU", "CPU"]
        with pytest.raises(gs.PlacementError, match="GPU"):
            llama.load(file, others[:1], place=fit)
    finally:
        for backend in backends:
            backend.close()


def test_a_function_may_return_devices() -> None:
    backends = [gs.DryBackend("GPU", alignment=64), gs.DryBackend("CPU", alignment=64)]
    gpu = gs.Device("GPU", 1 << 30, 1e12, 1e13)
    with llama.load(random_model("llama"), backends, 64, place=lambda name, layer: gpu) as model:
        assert {tensor.backend for tensor in model.weights.tensors.values()} == {backends[0]}
    with pytest.raises(gs.PlacementError, match="TPU"):
        llama.load(random_model("llama"), backends, 64, place=lambda name, layer: gpu.replace(name="TPU"))
