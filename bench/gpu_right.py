"""Checks a CUDA backend on this device against the oracle: each op, each type of weights and each architecture.

Owns the cases.  Each check gives the largest distance from results of `CpuBackend(kernels="numpy")`, as nmse (sum of
squared differences / sum of squares), and the largest allowed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

import ggml_sched as gs
from ggml_sched.backends.cupy.ops import OPS
from ggml_sched.backends.cupy.ops.matrix import FAMILY
from ggml_sched.graph import quants
from ggml_sched.llama import load, random_llama
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model

__all__ = ["EXACT", "FAMILIES", "HALVES", "ROUNDED", "Check", "Open", "checks"]

EXACT = 1e-6
"""Allowed nmse of f32 results computed in f32."""
HALVES = 1e-4
"""Allowed nmse where results or lookup tables are f16."""
ROUNDED = 2e-3
"""Allowed nmse where activations are rounded to 8 bits."""

Open = Callable[..., gs.CupyBackend]
"""Makes a backend on the device, with these options; the caller closes it."""

TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


class Check(NamedTuple):
    """`run()` gives the distance, which is to be `allowed` at most."""

    name: str
    allowed: float
    run: Callable[[], float]


class Case:
    """A context for nodes, another for leafs, and the data of the leafs."""

    def __init__(self, seed: int = 5) -> None:
        self.ctx, self.store = gs.Context("case"), gs.Context("leafs")
        self.rng = np.random.default_rng(seed)
        self.values: dict[gs.Tensor, np.ndarray] = {}

    def given(self, type: str, ne: tuple[int, ...], values: np.ndarray) -> gs.Tensor:
        t = self.store.tensor(type, ne)
        self.values[t] = values
        return t

    def leaf(self, *ne: int, type: str = "f32", least: float = -2.0, most: float = 2.0) -> gs.Tensor:
        values = self.rng.uniform(least, most, ne[::-1]).astype(np.float32)
        kind = gs.Type[type.upper()]
        return self.given(type, ne, quants.quantize(values, kind).reshape(-1) if kind.is_quantized else values)

    def ids(self, n: int, stop: int) -> gs.Tensor:
        return self.given("i32", (n,), self.rng.integers(0, stop, n).astype(np.int32))

    def different(self, n: int, stop: int, tokens: int = 1) -> gs.Tensor:
        """n distinct ids for each token."""
        return self.given("i32", (n, tokens), np.stack([self.rng.permutation(stop)[:n] for _ in range(tokens)]))

    def mask(self, cells: int, rows: int) -> gs.Tensor:
        """A mask that hides some cells of each row, but never the first."""
        hidden = self.rng.random((rows, cells)) < 0.4
        hidden[:, 0] = False
        return self.given("f16", (cells, rows), np.where(hidden, -np.inf, 0).astype(np.float16))


def _arithmetic(c: Case) -> list[gs.Tensor]:
    ctx, a, b, row = c.ctx, c.leaf(96, 5, 3), c.leaf(96, 5, 3, least=0.5), c.leaf(96, least=0.5)
    half = c.leaf(96, 5, 3, type="f16")
    nodes = [op(a, other) for op in (ctx.add, ctx.sub, ctx.mul, ctx.div) for other in (b, row)]
    return [*nodes, ctx.add1(a, c.leaf(1)), ctx.add_id(c.leaf(64, 4, 3), c.leaf(64, 6), c.different(4, 6, 3)),
            ctx.scale(a, 1.5, -0.25), ctx.sqr(a), ctx.sqrt(b), ctx.log(b), ctx.clamp(a, -0.5, 0.5), ctx.sqr(half)]


def _unary(c: Case) -> list[gs.Tensor]:
    a = c.leaf(101, 7, least=-4, most=4)
    words = np.float32([0.8, 1.2, 0.5, -1e-6]).view(np.int32).tolist()
    kinds = [op.partition(":")[2] for op in OPS if op.startswith("UNARY:") and op != "UNARY:XIELU"]
    return [*(c.ctx.unary(a, kind) for kind in kinds),
            c.ctx.restore("UNARY:XIELU", "f32", a.ne, a.nb, (a,), op_params=(15, *words))]


def _gated(c: Case) -> list[gs.Tensor]:
    a, b, both = c.leaf(80, 6), c.leaf(80, 6), c.leaf(160, 6)
    kinds = [op.partition(":")[2].lower() for op in OPS if op.startswith("GLU:") and op != "GLU:SWIGLU_OAI"]
    return [*(c.ctx.glu_split(a, b, kind) for kind in kinds), c.ctx.swiglu(both), c.ctx.swiglu_oai(a, b)]


def _rows(c: Case) -> list[gs.Tensor]:
    ctx = c.ctx
    tables = [c.leaf(256, 20, type=kind) for kind in ("f32", "f16", "bf16", "q4_0", "q8_0", "q4_K", "q6_K")]
    return [*(ctx.get_rows(table, c.ids(9, 20)) for table in tables),
            *(ctx.set_rows(c.leaf(64, 12, type=kind), c.leaf(64, 5), c.different(5, 12))
              for kind in ("f32", "f16", "q8_0"))]


def _copies(c: Case) -> list[gs.Tensor]:
    ctx, a = c.ctx, c.leaf(40, 6, 3)
    b, small = c.leaf(40, 6, 3), c.leaf(20, 3)
    return [ctx.dup(a), ctx.cont(ctx.permute(a, 1, 0, 2, 3)), ctx.cast(a, "f16"), ctx.cpy(a, c.leaf(40, 6, 3)),
            ctx.cpy(ctx.transpose(c.leaf(33, 65)), c.leaf(65, 33)), ctx.concat(a, b, 1), ctx.concat(a, b, 0),
            ctx.pad(a, 3, 2), ctx.repeat(c.leaf(40, 1, 3), a),
            ctx.set(c.leaf(40, 6), small, 160, 960, 960, 160 + 8)]


def _norms(c: Case) -> list[gs.Tensor]:
    ctx, wide, narrow = c.ctx, c.leaf(1030, 3), c.leaf(48, 9)
    scale = c.leaf(1030)
    return [*(norm(a, 1e-5) for a in (wide, narrow) for norm in (ctx.norm, ctx.rms_norm, ctx.l2_norm)),
            ctx.mul(ctx.rms_norm(ctx.add(wide, c.leaf(1030, 3)), 1e-5), scale),
            ctx.group_norm(c.leaf(9, 5, 8), 4, 1e-5)]


def _soft_max(c: Case) -> list[gs.Tensor]:
    ctx, a = c.ctx, c.leaf(130, 5, 4)
    mask = c.mask(130, 5)
    return [ctx.soft_max(a), ctx.soft_max(a, mask, 0.3), ctx.soft_max(a, mask, 0.3, 8.0),
            ctx.soft_max(a, mask, 1.0, 0.0, c.leaf(4)), ctx.diag_mask_zero(c.leaf(9, 7, 2), 2),
            ctx.soft_max(ctx.diag_mask_inf(c.leaf(9, 7, 2), 2))]


def _rope(c: Case) -> list[gs.Tensor]:
    ctx, at = c.ctx, c.ids(6, 100)
    a = c.leaf(64, 4, 6)
    factors = c.leaf(32, least=1, most=4)
    return [ctx.rope(a, at, 64), ctx.rope(a, at, 64, "neox"), ctx.rope(a, at, 32, "neox"),
            ctx.rope(a, at, 64, "normal", factors, freq_base=5e5),
            ctx.rope(a, at, 64, n_ctx_orig=2048, freq_scale=0.25, ext_factor=1.0)]


def _reductions(c: Case) -> list[gs.Tensor]:
    ctx, a, long = c.ctx, c.leaf(70, 5, 2), c.leaf(3000, 2)
    return [*(op(t) for t in (a, long) for op in (ctx.sum, ctx.sum_rows, ctx.mean)), ctx.argmax(long),
            ctx.argsort(a, "desc"), ctx.argsort(long), ctx.arange(0.5, 9, 0.25)]


def _top_k(c: Case) -> list[gs.Tensor]:
    """The values of the k picked elements, sorted, since their order is undefined."""
    ctx, a = c.ctx, c.leaf(1, 900, 1)
    found = ctx.get_rows(a, ctx.reshape(ctx.top_k(ctx.reshape(a, 900), 8), 8))
    return [ctx.sum(found), ctx.sum(ctx.sqr(found))]


def _recurrent(c: Case) -> list[gs.Tensor]:
    ctx, state, heads, tokens = c.ctx, 16, 24, 6
    scan = ctx.ssm_scan(c.leaf(state, 1, heads, 2), c.leaf(1, heads, tokens, 2), c.leaf(heads, tokens, 2),
                        c.leaf(state, heads, most=-0.1), c.leaf(state, 1, tokens, 2), c.leaf(state, 1, tokens, 2),
                        c.ids(2, 2))
    return [ctx.ssm_conv(c.leaf(3 + tokens, heads, 2), c.leaf(4, heads)), scan]


def _attention(c: Case) -> list[gs.Tensor]:
    ctx, nodes = c.ctx, []
    for kind, cells, queries, d in (("f16", 520, 1, 64), ("f16", 96, 5, 128), ("q8_0", 64, 3, 64), ("f32", 33, 2, 40)):
        mask = c.mask(cells, queries)
        q, k, v = c.leaf(d, queries, 4), c.leaf(d, cells, 2, type=kind), c.leaf(d, cells, 2, type=kind)
        nodes += [ctx.flash_attn_ext(q, k, v, mask, d**-0.5), ctx.flash_attn_ext(q, k, v, None, 0.1, 0.0, 5.0)]
    return [*nodes, ctx.flash_attn_ext(q, k, v, mask, 0.2, 0.0, 0.0, c.leaf(4))]


def _products(c: Case) -> list[gs.Tensor]:
    ctx, nodes = c.ctx, []
    for kind in FAMILY:
        w, experts = c.leaf(256, 20, type=str(kind)), c.leaf(256, 12, 4, type=str(kind))
        nodes += [ctx.mul_mat(w, c.leaf(256, n)) for n in (1, 5, 40)]
        nodes += [ctx.mul_mat_id(experts, c.leaf(256, 1, n), c.different(2, 4, n)) for n in (1, 12)]
    return [*nodes, ctx.mul_mat(c.leaf(64, 9, 2, type="f16"), c.leaf(64, 3, 4)),
            ctx.mul_mat(ctx.permute(c.leaf(64, 2, 9), 0, 2, 1, 3), c.leaf(64, 1, 6))]


FAMILIES: dict[str, tuple[Callable[[Case], list[gs.Tensor]], float]] = {
    "arithmetic": (_arithmetic, EXACT), "unary functions": (_unary, HALVES), "gated units": (_gated, HALVES),
    "rows by number": (_rows, EXACT), "copies": (_copies, EXACT), "norms": (_norms, EXACT),
    "soft_max and masks": (_soft_max, EXACT), "rope": (_rope, EXACT), "reductions, sorting": (_reductions, EXACT),
    "top_k": (_top_k, EXACT), "recurrent": (_recurrent, EXACT), "flash attention": (_attention, HALVES),
    "matrix products, exact": (_products, EXACT),
}
"""Each family's function that builds its nodes, and the allowed distance of their results."""


def of_family(open_backend: Open, make: Callable[[Case], list[gs.Tensor]], exact: bool = True) -> float:
    """The largest distance of a family's nodes, each on its own chain."""
    case = Case()
    graph = gs.Graph(*make(case))
    with (gs.CpuBackend(1, kernels="numpy") as oracle, oracle.alloc_tensors(case.store),
          open_backend(exact=exact) as cuda):
        for leaf, values in case.values.items():
            leaf.set(values)
        return _worst(difference.nmse for difference in gs.compare(graph, oracle, cuda))


def _worst(distances: Iterable[float]) -> float:
    """The largest distance; infinite if one is NaN."""
    return max((d if d == d else float("inf") for d in distances), default=0.0)


def kept_weights(open_backend: Open, kind: gs.Type, exact: bool) -> float:
    """The distance of products and rows of weights that the backend rearranges, computed four times."""

    def run(backend: gs.Backend) -> np.ndarray:
        rng = np.random.default_rng(3)
        store, ctx = gs.Context("weights"), gs.Context("graph")
        with gs.Scheduler([backend]) as sched:
            w = store.tensor(str(kind), (512, 48))
            values = rng.standard_normal((48, 512)).astype(np.float32)
            with backend.alloc_tensors(store):
                w.set(quants.quantize(values, kind).reshape(-1) if kind.is_quantized else values)
                leafs = [ctx.tensor("f32", (512, n), input=True) for n in (1, 7, 64)]
                ids = ctx.tensor("i32", (5,), input=True)
                nodes = [*(ctx.mul_mat(w, x) for x in leafs), ctx.get_rows(w, ids)]
                graph = gs.Graph(*(ctx.set_output(node) for node in nodes))
                found = []
                for _ in range(4):
                    sched.alloc(graph)
                    for x in leafs:
                        x.set(rng.standard_normal(x.ne[::-1]).astype(np.float32))
                    ids.set(rng.integers(0, 48, 5).astype(np.int32))
                    sched.compute(graph)
                    found += [node.numpy().ravel() for node in nodes]
        return np.concatenate(found)

    with gs.CpuBackend(1, kernels="numpy") as oracle:
        expected = run(oracle)
    with open_backend(exact=exact) as cuda:
        return _nmse(expected, run(cuda))


def fused(open_backend: Open, n: int, experts: bool) -> float:
    """The distance of a layer of n tokens computed in fused kernels from one whose nodes are computed one by one."""
    case = Case()
    ctx, width = case.ctx, 128
    x = case.leaf(width, n)
    position, row = case.ids(n, 50), case.different(n, 64)
    row = case.given("i64", (n,), case.values.pop(row).astype(np.int64)[0])

    def normed(t: gs.Tensor) -> gs.Tensor:
        return ctx.mul(ctx.rms_norm(t, 1e-5), case.leaf(width, least=0.5))

    def matrix(*ne: int) -> gs.Tensor:
        return case.leaf(*ne, type="q4_0", least=-0.2, most=0.2)

    def heads(t: gs.Tensor, n_heads: int) -> gs.Tensor:
        return ctx.rope(ctx.reshape_3d(t, 32, n_heads, n), position, 32, "neox")

    y = normed(x)
    q = heads(ctx.add(ctx.mul_mat(matrix(width, width), y), case.leaf(width)), 4)
    k = heads(ctx.add(ctx.mul_mat(matrix(width, 64), y), case.leaf(64)), 2)
    v = ctx.mul_mat(matrix(width, 64), y)
    caches = [ctx.set_rows(case.leaf(64, 64, type="f16"), ctx.reshape_2d(t, 64, n), row) for t in (k, v)]
    cells = [ctx.permute(ctx.reshape_3d(t, 32, 2, 64), 0, 2, 1, 3) for t in caches]
    found = ctx.flash_attn_ext(ctx.permute(q, 0, 2, 1, 3), *cells, None, 0.2, 0.0, 0.0)
    x = ctx.add(ctx.mul_mat(matrix(width, width), ctx.reshape_2d(found, width, n)), x)
    y = normed(x)
    if experts:
        scores = ctx.soft_max(ctx.mul_mat(case.leaf(width, 8), y))
        order = ctx.argsort(scores, "desc")
        ids = ctx.view_2d(order, 3, n, order.nb[1])
        weights = ctx.reshape_2d(ctx.get_rows(ctx.reshape_3d(scores, 1, 8, n), ids), 3, n)
        weights = ctx.div(weights, ctx.clamp(ctx.sum_rows(weights), 6e-5, float("inf")))
        y = ctx.reshape_3d(y, width, 1, n)
        gate, up = (ctx.mul_mat_id(matrix(width, 96, 8), y, ids) for _ in range(2))
        y = ctx.mul_mat_id(matrix(96, width, 8), ctx.swiglu_split(gate, up), ids)
        y = ctx.mul(y, ctx.reshape_3d(weights, 1, 3, n))
        parts = [ctx.view_2d(y, width, n, y.nb[2], i * y.nb[1]) for i in range(3)]
        y = ctx.add(ctx.add(parts[0], parts[1]), parts[2])
    else:
        gate, up = (ctx.mul_mat(matrix(width, 160), y) for _ in range(2))
        y = ctx.mul_mat(matrix(160, width), ctx.swiglu_split(gate, up))
    out = ctx.set_output(ctx.add(y, x))
    graph = gs.Graph(q, v, *caches, out)
    with open_backend() as cuda, cuda.alloc_tensors(case.store), gs.Scheduler([cuda]) as sched:
        plan, results = sched.alloc(graph), []
        if max(map(len, plan.groups), default=0) < 7:
            raise RuntimeError("the plan does not compute queries, keys and values together")
        for callback in (None, lambda node: True):
            for leaf, values in case.values.items():
                leaf.set(values)
            sched.compute(graph, callback)
            results.append(out.numpy().copy())
    return _nmse(results[1], results[0])


def _nmse(a: np.ndarray, b: np.ndarray) -> float:
    distance = float(((a - b) ** 2).sum() / (a**2).sum())
    return distance if distance == distance else float("inf")


def logits(data: bytes, backends: list[gs.Backend]) -> np.ndarray:
    """Logits of a prompt, and of single tokens, of which the later ones are replayed."""
    with load(data, backends, n_ctx=64) as model:
        return np.concatenate([model.eval(TOKENS), *(model.eval([t]) for t in TOKENS[:5])])


def of_model(open_backend: Open, make: Callable[[], bytes], names: str, exact: bool) -> float:
    """The distance of a model's logits, its layers spread over these backends."""
    data = make()
    with gs.CpuBackend(1, kernels="numpy") as oracle:
        expected = logits(data, [oracle])
        with open_backend(exact=exact) as cuda:
            spread = [cuda if name == "GPU" else oracle for name in names.split(" + ")]
            return _nmse(expected, logits(data, spread))


def q4_llama() -> bytes:
    return random_llama(5, n_vocab=64, n_embd=256, n_layer=2, n_head=4, n_head_kv=2, n_ff=256, dtype="q4_0")


def checks(open_backend: Open, few: bool = False) -> Iterator[Check]:
    """All checks, in the order in which they run; `few`: all ops, a sample of types, and one architecture."""
    for name, (make, allowed) in FAMILIES.items():
        yield Check(name, allowed, lambda make=make: of_family(open_backend, make))
    yield Check("matrix products, 8-bit activations", ROUNDED, lambda: of_family(open_backend, _products, False))
    for n, experts in ((1, False), (5, True)) if few else ((1, False), (5, False), (1, True), (5, True)):
        yield Check(f"{'experts' if experts else 'a layer'} of {n} token{'s' * (n > 1)}, fused and one by one", HALVES,
                    lambda n=n, experts=experts: fused(open_backend, n, experts))
    for kind in (*FAMILY,)[3::5] if few else FAMILY:
        for exact in (True, False):
            yield Check(f"weights of {kind}{', exact' if exact else ''}", EXACT if exact else ROUNDED,
                        lambda kind=kind, exact=exact: kept_weights(open_backend, kind, exact))
    for names in ("GPU", "GPU + CPU"):
        for arch in ("llama",) if few else ARCHITECTURES:
            yield Check(f"{arch} on {names}", EXACT, lambda arch=arch, names=names: of_model(
                open_backend, lambda: random_model(arch, 1), names, True))
        yield Check(f"llama of q4_0 on {names}", ROUNDED,
                    lambda names=names: of_model(open_backend, q4_llama, names, False))
