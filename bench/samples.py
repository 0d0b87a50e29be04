"""The graphs that benchmarks run on: recorded ones of well-known models, and synthetic ones of any size."""

from __future__ import annotations

import json
from pathlib import Path

import ggml_sched as gs
from ggml_sched.commands.plan import CONFIGS, n_layers, placement

__all__ = ["CONFIGS", "configured", "names", "recorded", "synthetic"]

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
ALIGNMENT = 32
"""As today's ggml has it."""


def names(folder: Path = DATA / "graphs") -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))


def recorded() -> dict:
    """What today's ggml was seen to do with each graph."""
    return json.loads((DATA / "golden" / "upstream-2026.json").read_text())


def configured(name: str, config: str, backends: tuple | None = None,
               folder: Path = DATA / "graphs") -> tuple[gs.Graph, tuple]:
    """A recorded graph, its residents placed on dry backends (new ones unless given)."""
    if backends is None:
        backends = tuple(gs.DryBackend(device, alignment=ALIGNMENT) for device in CONFIGS[config])
    path = folder / f"{name}.json.gz"
    place = placement(config, list(backends), n_layers([t.name for t in gs.load_graph(path).tensors]))
    return gs.load_graph(path, place=lambda t: place(t.name)), backends


def synthetic(n_nodes: int, config: str = "c4") -> tuple[gs.Graph, tuple]:
    """Blocks of 12 nodes as a transformer has them, spread over the backends, n_nodes or a few more."""
    backends = tuple(gs.DryBackend(device, alignment=ALIGNMENT) for device in CONFIGS[config])
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
