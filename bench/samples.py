"""The graphs that benchmarks run on: recorded ones of well-known models, a deep one, synthetic ones of any size."""

from __future__ import annotations

import json
from pathlib import Path

import ggml_sched as gs
from ggml_sched.commands.plan import CONFIGS, n_layers, placement
from ggml_sched.llama.arch import llama as arch
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.hparams import Hparams, Rope
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["CONFIGS", "configured", "deep", "names", "recorded", "synthetic"]

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
ALIGNMENT = 32
"""As today's ggml has it."""


def names(folder: Path = DATA / "graphs") -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))


def recorded() -> dict:
    """What today's ggml was seen to do with each graph."""
    return json.loads((DATA / "golden" / "upstream-2026.json").read_text())


def devices(config: str) -> tuple[gs.DryBackend, ...]:
    return tuple(gs.DryBackend(device, alignment=ALIGNMENT) for device in CONFIGS[config])


def configured(name: str, config: str, backends: tuple | None = None,
               folder: Path = DATA / "graphs") -> tuple[gs.Graph, tuple]:
    """A recorded graph, its residents placed on dry backends (new ones unless given)."""
    backends = backends or devices(config)
    path = folder / f"{name}.json.gz"
    place = placement(config, list(backends), n_layers([t.name for t in gs.load_graph(path).tensors]))
    return gs.load_graph(path, place=lambda t: place(t.name)), backends


def deep(config: str, n_tokens: int = 512, backends: tuple | None = None) -> tuple[gs.Graph, tuple]:
    """A graph of 126 layers as this package builds it: Llama 3.1 405B by its shapes, on dry backends."""
    backends = backends or devices(config)
    h = Hparams("llama", n_vocab=128256, n_ctx_train=131072, n_embd=16384, n_layer=126, n_ff=53248, n_head=128,
                n_head_kv=8, n_embd_head_k=128, n_embd_head_v=128, norm_eps=1e-5, attn_scale=128**-0.5,
                rope=Rope(n_dims=128, n_ctx_orig=8192, freq_base=5e5))
    place = placement(config, list(backends), h.n_layer)
    weights = Weights()
    for spec in arch.weights(h):
        if spec.required:
            home = weights.contexts.setdefault(place(spec.name), gs.Context("weights"))
            matrix = len(spec.ne) > 1
            weights.tensors[spec.name] = home.tensor("q4_K" if matrix else "f32", spec.ne, spec.name)
    output = weights.contexts[place("output.weight")]
    weights.tensors["output.weight"] = output.tensor("q6_K", (h.n_embd, h.n_vocab), "output.weight")
    for backend, home in weights.contexts.items():
        backend.alloc_tensors(home)
    cache = KVCache(h, 4096, lambda name, layer: place(name), "f16")
    builder = Builder(h, weights, cache, n_tokens, n_kv=4096)
    return builder.finish(arch.build(builder)).graph, backends


def synthetic(n_nodes: int, config: str = "c4", backends: tuple | None = None) -> tuple[gs.Graph, tuple]:
    """Blocks of 12 nodes as a transformer has them, spread over the backends, n_nodes or a few more."""
    backends = backends or devices(config)
    workers = backends[:-1] or backends
    homes = [gs.Context(backend.name) for backend in workers]
    ctx = gs.Context("synthetic")
    blocks = -(-n_nodes // 12)
    x = ctx.tensor("f32", (64, 4), "input", input=True)
    for i in range(blocks):
        home = homes[i * len(homes) // blocks]
        wide, narrow = home.tensor("f32", (64, 128)), home.tensor("f32", (128, 64))
        y = ctx.mul(ctx.rms_norm(x, 1e-5), home.tensor("f32", (64,)))
        q, k = ctx.mul_mat(wide, y), ctx.mul_mat(wide, y)
        scores = ctx.soft_max(ctx.mul_mat(ctx.reshape_2d(k, 128, 4), q))
        mixed = ctx.mul_mat(ctx.cont(ctx.transpose(k)), scores)
        x = ctx.add(ctx.mul_mat(narrow, mixed), x)
    for home, backend in zip(homes, workers, strict=True):
        backend.alloc_tensors(home)
    return gs.Graph(ctx.scale(x, 1.0)), backends
