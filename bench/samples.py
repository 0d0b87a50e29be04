"""The graphs that benchmarks run on: recorded ones of well-known models, a deep one, synthetic ones of any size."""

from __future__ import annotations

import json
from pathlib import Path

import ggml_sched as gs
from ggml_sched.cli.plan import CONFIGS, n_layers, placement
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.hparams import Hparams, Layer, Rope
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["CONFIGS", "configured", "deep", "names", "recorded", "recurrent", "synthetic"]

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
ALIGNMENT = 32
"""ggml's alignment in bytes today."""


def names(folder: Path = DATA / "graphs") -> list[str]:
    return sorted(path.name.removesuffix(".json.gz") for path in folder.glob("*.json.gz"))


def recorded() -> dict:
    """Recorded results of today's ggml for each graph."""
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
    rope = Rope(n_dims=128, n_ctx_orig=8192, freq_base=5e5)
    layer = Layer(n_head=128, n_head_kv=8, n_ff=53248, n_embd_k=1024, n_embd_v=1024, rope=rope)
    h = Hparams("llama", n_vocab=128256, n_ctx_train=131072, n_embd=16384, n_embd_head_k=128, n_embd_head_v=128,
                norm_eps=1e-5, attn_scale=128**-0.5, layers=(layer,) * 126, rope=rope)
    place = placement(config, list(backends), h.n_layer)
    weights = Weights()
    arch = ARCHITECTURES["llama"]
    for spec in arch.weights(h):
        if spec.required:
            store = weights.contexts.setdefault(place(spec.name), gs.Context("weights"))
            matrix = len(spec.ne) > 1
            weights.tensors[spec.name] = store.tensor("q4_K" if matrix else "f32", spec.ne, spec.name)
    output = weights.contexts[place("output.weight")]
    weights.tensors["output.weight"] = output.tensor("q6_K", (h.n_embd, h.n_vocab), "output.weight")
    for backend, store in weights.contexts.items():
        backend.alloc_tensors(store)
    cache = KVCache(h, 4096, lambda name, layer: place(name), "f16")
    shape = Shape(n_tokens, 4096, n_tokens)
    return build_graph(arch, h, weights, cache, shape, flash=False).graph, backends


def synthetic(n_nodes: int, config: str = "c4", backends: tuple | None = None) -> tuple[gs.Graph, tuple]:
    """Blocks of 12 nodes as a transformer has them, spread over the backends, n_nodes or a few more."""
    backends = backends or devices(config)
    workers = backends[:-1] or backends
    stores = [gs.Context(backend.name) for backend in workers]
    ctx = gs.Context("synthetic")
    blocks = -(-n_nodes // 12)
    x = ctx.tensor("f32", (64, 4), "input", input=True)
    for i in range(blocks):
        store = stores[i * len(stores) // blocks]
        wide, narrow = store.tensor("f32", (64, 128)), store.tensor("f32", (128, 64))
        y = ctx.mul(ctx.rms_norm(x, 1e-5), store.tensor("f32", (64,)))
        q, k = ctx.mul_mat(wide, y), ctx.mul_mat(wide, y)
        scores = ctx.soft_max(ctx.mul_mat(ctx.reshape_2d(k, 128, 4), q))
        mixed = ctx.mul_mat(ctx.cont(ctx.transpose(k)), scores)
        x = ctx.add(ctx.mul_mat(narrow, mixed), x)
    for store, backend in zip(stores, workers, strict=True):
        backend.alloc_tensors(store)
    return gs.Graph(ctx.scale(x, 1.0)), backends


def recurrent(config: str, n_tokens: int = 1, backends: tuple | None = None,
              depth: int = 24) -> tuple[gs.Graph, tuple]:
    """RWKV 6 1.6B by its shapes, 24 layers: time mixing over a state, then channel mixing."""
    backends = backends or devices(config)
    workers = backends[:-1] or backends
    width, hidden, head, low = 2048, 7168, 64, 32
    ctx, stores = gs.Context("recurrent"), [gs.Context(backend.name) for backend in workers]
    x = ctx.tensor("f32", (width, n_tokens), "input", input=True)
    slot = ctx.tensor("i32", (1,), "state slot", input=True)
    ends = []

    def normed(y: gs.Tensor) -> gs.Tensor:
        return ctx.add(ctx.mul(ctx.norm(y, 1e-5), store.tensor("f32", (width,))), store.tensor("f32", (width,)))

    def shifted(y: gs.Tensor, last: gs.Tensor) -> gs.Tensor:
        """The difference between each token and the one before; the last token is stored for the next graph."""
        ends.append(ctx.cpy(ctx.view_2d(y, width, 1, y.nb[1], (n_tokens - 1) * y.nb[1]), last))
        before = ctx.get_rows(last, slot)
        if n_tokens > 1:
            before = ctx.concat(before, ctx.view_2d(y, width, n_tokens - 1, y.nb[1]), 1)
        return ctx.sub(before, y)

    def mixed(y: gs.Tensor, by: gs.Tensor, share: gs.Tensor) -> gs.Tensor:
        return ctx.add(ctx.mul(by, share), y)

    def matrix(*ne: int) -> gs.Tensor:
        return store.tensor("f16", ne)

    for layer in range(depth):
        store = stores[layer * len(stores) // depth]
        state = store.tensor("f32", (head * width, 1))
        y = normed(x)
        by = shifted(y, store.tensor("f32", (width, 1)))
        shares = ctx.tanh(ctx.mul_mat(matrix(width, 5 * low), mixed(y, by, store.tensor("f32", (width,)))))
        shares = ctx.cont(ctx.permute(ctx.reshape_3d(shares, low, 5, n_tokens), 0, 2, 1, 3))
        shares = ctx.mul_mat(matrix(low, width, 5), shares)
        each = [mixed(y, by, ctx.add(ctx.view_2d(shares, width, n_tokens, shares.nb[1], k * shares.nb[2]),
                                     store.tensor("f32", (width,)))) for k in range(5)]
        decay = ctx.mul_mat(matrix(64, width), ctx.tanh(ctx.mul_mat(matrix(width, 64), each[0])))
        decay = ctx.exp(ctx.neg(ctx.exp(ctx.add(decay, store.tensor("f32", (width,))))))
        r, k, v = (ctx.reshape_3d(ctx.mul_mat(matrix(width, width), y), head, width // head, n_tokens)
                   for y in (each[3], each[1], each[2]))
        gate = ctx.silu(ctx.mul_mat(matrix(width, width), each[4]))
        found = ctx.restore("RWKV_WKV6", "f32", (width, n_tokens + head, 1, 1),
                            [4, 4 * width, *[4 * width * (n_tokens + head)] * 2],
                            src=(k, v, r, store.tensor("f32", (head, width // head)),
                                 ctx.reshape_3d(decay, head, width // head, n_tokens), ctx.get_rows(state, slot)))
        ends.append(ctx.cpy(ctx.view_1d(found, head * width, n_tokens * found.nb[1]), state))
        y = ctx.reshape_3d(ctx.view_1d(found, width * n_tokens), head, width // head, n_tokens)
        y = ctx.reshape_2d(ctx.norm(y, 64e-5), width, n_tokens)
        y = ctx.add(ctx.mul(y, store.tensor("f32", (width,))), store.tensor("f32", (width,)))
        x = ctx.add(ctx.mul_mat(matrix(width, width), ctx.mul(y, gate)), x)
        y = normed(x)
        by = shifted(y, store.tensor("f32", (width, 1)))
        k = ctx.sqr(ctx.relu(ctx.mul_mat(matrix(width, hidden), mixed(y, by, store.tensor("f32", (width,))))))
        r = ctx.sigmoid(ctx.mul_mat(matrix(width, width), mixed(y, by, store.tensor("f32", (width,)))))
        x = ctx.add(ctx.mul(r, ctx.mul_mat(matrix(hidden, width), k)), x)
    for store, backend in zip(stores, workers, strict=True):
        backend.alloc_tensors(store)
    return gs.Graph(*ends, ctx.scale(x, 1.0)), backends
