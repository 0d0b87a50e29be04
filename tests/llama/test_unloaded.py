"""The graphs of a model file that is not loaded: those of a loaded model, without reading a weight."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama import open_gguf
from ggml_sched.llama.builder import Shape
from ggml_sched.llama.synthetic import OWN, SIZES, random_model

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


def test_several_sequences_add_a_graph_of_a_token_each() -> None:
    graphs = llama.model_graphs(random_model("llama"), 64, 16, n_seq=3)
    assert [graph.meta["n_tokens"] for graph in graphs] == [1, 3, 16]


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
