"""The models that placements are compared on: graphs of one token and of 512, with weights of 4 bits, without memory.

Recorded graphs of tests/data, graphs that the runner builds from published sizes, and graphs of llama.cpp where it
computes other nodes than the runner; `python bench/placement_models.py` records these in bench/graphs, with the
installed llama.cpp.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import samples

import ggml_sched as gs
from ggml_sched.graph import graphfile
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.synthetic import _hparams, is_matrix, outline
from ggml_sched.llama.weights import Weights

__all__ = ["MODELS", "file_of", "graphs", "settings"]

N_PROMPT = 512
BLOCK, BLOCK_BYTES = 32, 18
"""Elements and bytes of a block of q4_0."""

DENSE = {"attention.layer_norm_rms_epsilon": 1e-5}
SIZES: dict[str, tuple[str, int, bool, Mapping[str, Any]]] = {
    "dense 70B": ("llama", 8192, True, {
        **DENSE, "vocab_size": 128256, "context_length": 8192, "embedding_length": 8192, "block_count": 80,
        "feed_forward_length": 28672, "attention.head_count": 64, "attention.head_count_kv": 8,
        "rope.dimension_count": 128, "rope.freq_base": 5e5}),
    "30B of 128 experts": ("qwen3moe", 4096, False, {
        **DENSE, "vocab_size": 151936, "context_length": 40960, "embedding_length": 2048, "block_count": 48,
        "feed_forward_length": 6144, "attention.head_count": 32, "attention.head_count_kv": 4,
        "attention.key_length": 128, "attention.value_length": 128, "rope.freq_base": 1e6, "expert_count": 128,
        "expert_used_count": 8, "expert_feed_forward_length": 768}),
    "20B mixture": ("gpt-oss", 4096, False, {
        **DENSE, "vocab_size": 201088, "context_length": 131072, "embedding_length": 2880, "block_count": 24,
        "feed_forward_length": 2880, "attention.head_count": 64, "attention.head_count_kv": 8,
        "attention.key_length": 64, "attention.value_length": 64, "attention.sliding_window": 128,
        "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": 2880}),
    "16B, latent attention": ("deepseek2", 4096, False, {
        **DENSE, "vocab_size": 102400, "context_length": 163840, "embedding_length": 2048, "block_count": 27,
        "feed_forward_length": 10944, "attention.head_count": 16, "attention.head_count_kv": 1,
        "attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192,
        "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64, "expert_count": 64, "expert_used_count": 6, "expert_feed_forward_length": 1408,
        "leading_dense_block_count": 1, "expert_shared_count": 2, "expert_weights_scale": 1.0}),
}
"""{model: architecture, context, flash attention, metadata}, as the models' makers published them."""

RECORDED = ("llama-2-7b", "llama-2-7b-fa", "phi2-2.7b", "mixtral-8x7b")
MODELS = (*RECORDED, *SIZES)
OPTIONAL = {"20B mixture": ("attn", "ffn")}
"""Parts of the names of tensors that a model has beside those of every model of its architecture."""
LLAMA_CPP = {"16B, latent attention": "16b-latent-attention"}
"""Models of SIZES whose graphs are llama.cpp's, and their files' names in GRAPHS.  llama.cpp has one cache of what the
runner has two of, and copies the values of each token that are transposed."""
GRAPHS = Path(__file__).resolve().parent / "graphs"
KINDS = ("decode", "prefill512")


@cache
def graphs(name: str) -> tuple[gs.Graph, gs.Graph]:
    """The graphs of one token and of 512, by the name of a model of MODELS."""
    if name in LLAMA_CPP:
        one, many = (gs.load_graph(GRAPHS / f"{LLAMA_CPP[name]}-{kind}.json.gz") for kind in KINDS)
        return one, many
    if name in SIZES:
        return built(name)
    one, many = (recorded(f"{name}-{kind}") for kind in KINDS)
    return one, many


def recorded(name: str) -> gs.Graph:
    """A recorded graph, its large matrices as q4_0."""
    fields = graphfile.graph_to_dict(gs.load_graph(samples.DATA / "graphs" / f"{name}.json.gz"))
    for t in fields["tensors"]:
        ne = t["ne"]
        if (t.get("resident") == "weight" and t["type"] == "f32" and ne[0] % BLOCK == 0 and ne[1] > 1
                and t["name"].endswith(".weight") and "norm" not in t["name"] and "gate_inp" not in t["name"]
                and math.prod(ne) > 1 << 16):
            row = ne[0] // BLOCK * BLOCK_BYTES
            t["type"], t["nb"] = "q4_0", [BLOCK_BYTES, row, row * ne[1], row * ne[1] * ne[2]]
    return graphfile.graph_from_dict(fields)


def file_of(name: str, folder: Path) -> Path:
    """A model's file without weights, which llama.cpp opens; written unless it exists."""
    from hooked import models

    if name in SIZES:
        arch, _, _, metadata = SIZES[name]
        return models.write(name, folder, model=(arch, metadata, OPTIONAL.get(name, ()), False))
    return models.write(name.removesuffix("-fa"), folder)


def settings(name: str) -> dict[str, Any]:
    """Arguments of `ggml_sched.llama_cpp.dry_run` for a model's context, batch and attention."""
    _, n_ctx, flash, _ = SIZES.get(name, ("", 4096, name.endswith("-fa"), {}))
    return {"n_ctx": n_ctx, "n_batch": N_PROMPT, "flash_attn": flash, "use_extra_bufts": False}


def record() -> None:
    """Write the graphs of LLAMA_CPP."""
    os.environ["GGML_SCHED"] = "off"
    from ggml_sched.llama_cpp import dry_run

    with tempfile.TemporaryDirectory() as folder:
        for name, file in LLAMA_CPP.items():
            run = dry_run(file_of(name, Path(folder)), **settings(name))
            for kind, graph in zip(KINDS, run.graphs, strict=True):
                graph.meta = {**graph.meta, "model": name}
                gs.save_graph(graph, GRAPHS / f"{file}-{kind}.json.gz")


def built(model: str) -> tuple[gs.Graph, gs.Graph]:
    """The graphs that the runner builds for a model of SIZES, with a cache of f16."""
    name, n_ctx, flash, metadata = SIZES[model]
    one, many = graphs_on(gs.DryBackend("dry", alignment=64), name, metadata, n_ctx, flash, (1, N_PROMPT),
                          OPTIONAL.get(model, ()))
    return one, many


def graphs_on(backend: gs.Backend, name: str, metadata: Mapping[str, Any], n_ctx: int, flash: bool,
              tokens: Sequence[int], optional: Sequence[str] = ()) -> list[gs.Graph]:
    """The runner's graphs, one for each number of tokens, for a model of an architecture whose weights and f16 cache
    are on a backend."""
    arch = ARCHITECTURES[name]
    values, specs = outline(name, metadata, optional=optional)
    hparams = _hparams(name, values, ())
    store, weights = gs.Context("weights"), Weights()
    for spec in specs:
        kind = "q4_0" if is_matrix(spec) and spec.ne[0] % BLOCK == 0 else "f32"
        with gs.Context() as scratch:
            plain = scratch.tensor(kind, spec.ne)
            weights.tensors[spec.name] = store.restore("NONE", plain.type, plain.ne, plain.nb, name=spec.name,
                                                      resident="weight")
    backend.alloc_tensors(store)
    kv = KVCache(hparams, n_ctx, lambda name, layer: backend, "f16", flash=flash)
    return [build_graph(arch, hparams, weights, kv, Shape(n, n_ctx, 1), flash).graph for n in tokens]


if __name__ == "__main__":
    record()
