"""Small nodes of every op of the oracle, with the values of their sources: what a backend's kernels are tested with.

A case makes its leafs and its nodes in a context; the last node is the result.  The values are random, with a seed from
the case's name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

import ggml_sched as gs
from ggml_sched.graph import quants

__all__ = ["CASES", "PATTERNS", "Case", "Leafs"]

QUANTISED_NMSE = 5e-4
"""The nmse to permit for products with quantised weights: a backend may round the other source to 8 bits."""
ROUNDED = {"f16": 1e-6, "bf16": 1e-4}
"""{type: the nmse to permit for results that are rounded to it}."""


class Leafs:
    """Makes the leafs of a case in the context `ctx`.  Their values are in `values` until `set` writes them to the
    leafs."""

    def __init__(self, name: str) -> None:
        self.ctx: gs.Context = gs.Context(name)
        self.values: dict[gs.Tensor, np.ndarray] = {}
        self._rng = np.random.default_rng(crc32(name.encode()))

    def floats(self, *ne: int, type: str = "f32", low: float = -2, high: float = 2) -> gs.Tensor:
        """A leaf of extents `ne` with uniform random values in low .. high, rounded if the type is quantised."""
        leaf = self.ctx.tensor(type, ne, f"leaf{len(self.values)}")
        values = self._rng.uniform(low, high, ne[::-1]).astype(np.float32)
        self.values[leaf] = quants.quantize(values, leaf.type) if leaf.type.is_quantized else values
        return leaf

    def part(self, *ne: int) -> gs.Tensor:
        """A view of extents `ne` of a leaf with longer rows: it begins inside the leaf, and its rows have gaps."""
        whole = self.floats(2 * ne[0], *ne[1:])
        _, nb1, nb2, nb3 = whole.nb
        return self.ctx.view_4d(whole, ne[0], *whole.ne[1:], nb1, nb2, nb3, ne[0] // 2 * 4)

    def these(self, values: list[float]) -> gs.Tensor:
        """An f32 leaf of one row with these values."""
        leaf = self.ctx.tensor("f32", (len(values),), f"leaf{len(self.values)}")
        self.values[leaf] = np.array(values, np.float32)
        return leaf

    def ids(self, n: int, *ne: int, type: str = "i32", distinct: bool = False) -> gs.Tensor:
        """A leaf of random indices below `n`; `distinct`: no two in a row are equal."""
        leaf = self.ctx.tensor(type, ne, f"leaf{len(self.values)}")
        rows = [self._rng.choice(n, ne[0], replace=not distinct) for _ in range(leaf.n_elements // ne[0])]
        self.values[leaf] = np.array(rows).reshape(ne[::-1]).astype(type.replace("i", "int"))
        return leaf

    def numbers(self, n: int) -> gs.Tensor:
        """A leaf of the i32 numbers 0 .. n - 1."""
        leaf = self.ctx.tensor("i32", (n,), f"leaf{len(self.values)}")
        self.values[leaf] = np.arange(n, dtype=np.int32)
        return leaf

    def mask(self, n_kv: int, n_tokens: int, type: str, largest: float = 0.0) -> gs.Tensor:
        """A causal attention mask: -inf where a token must not attend to a later one, elsewhere `largest`."""
        leaf = self.ctx.tensor(type, (n_kv, n_tokens), f"leaf{len(self.values)}")
        late = np.arange(n_kv) > np.arange(n_tokens)[:, None] + n_kv - n_tokens
        self.values[leaf] = np.where(late, -np.inf, largest).astype(np.float32)
        return leaf

    def set(self) -> None:
        """Write the values to the leafs, which must have addresses."""
        for leaf, values in self.values.items():
            leaf.set(values)


class Case(NamedTuple):
    """A node to compute: `build(leafs)` makes it; `max_nmse` is added to the error that the suite permits."""

    name: str
    build: Callable[[Leafs], gs.Tensor]
    max_nmse: float = 0.0
    is_set: bool = False
    """Whether the elements of each row of the result may be in any order."""
    is_exact: bool = False
    """Whether no error is permitted, as in conversions, which round to nearest, ties to even."""

    def __repr__(self) -> str:
        return f"<Case {self.name!r}>"

    @property
    def op(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def with_other_values(self) -> Case:
        """The same nodes with other values of their leafs."""
        return self._replace(name=f"{self.name} with other values")

    def made(self) -> tuple[Leafs, gs.Tensor]:
        """New tensors of the case, without addresses: (its leafs, the node)."""
        leafs = Leafs(self.name)
        return leafs, leafs.ctx.set_name(self.build(leafs), "out")


def _all() -> list[Case]:
    return [*_binary(), *_unary(), *_reductions(), *_rows(), *_copies(), *_conversions(), *_products(), *_attention(),
            *_recurrent(), *_parts()]


def _of_two(ctx: gs.Context, op: str, x: gs.Tensor, y: gs.Tensor) -> gs.Tensor:
    node: gs.Tensor = getattr(ctx, op)(x, y)
    return node


def _binary() -> list[Case]:
    found = []
    for op in ("add", "sub", "mul", "div"):
        def plain(leafs: Leafs, op: str, x: tuple[int, ...], y: tuple[int, ...]) -> gs.Tensor:
            return _of_two(leafs.ctx, op, leafs.floats(*x), leafs.floats(*y, low=0.5))

        def half(leafs: Leafs, op: str) -> gs.Tensor:
            return _of_two(leafs.ctx, op, leafs.floats(8, 4, type="f16"), leafs.floats(8, 4, type="f16", low=0.5))

        def strided(leafs: Leafs, op: str) -> gs.Tensor:
            turned = leafs.ctx.transpose(leafs.floats(4, 8))
            return _of_two(leafs.ctx, op, turned, leafs.floats(8, 4, low=0.5))

        name = op.upper()
        found += [Case(name, partial(plain, op=op, x=(8, 4), y=(8, 4))),
                  Case(f"{name} of odd extents", partial(plain, op=op, x=(7, 3, 2, 2), y=(7, 3, 2, 2))),
                  Case(f"{name} of each row and one", partial(plain, op=op, x=(8, 4, 3), y=(8,))),
                  Case(f"{name} of each matrix and one", partial(plain, op=op, x=(8, 4, 3, 2), y=(8, 1, 3))),
                  Case(f"{name} of a transposed source", partial(strided, op=op)),
                  Case(f"{name} of f16", partial(half, op=op), ROUNDED["f16"])]

    def add_id(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.add_id(leafs.floats(8, 2, 3), leafs.floats(8, 5), leafs.ids(5, 2, 3))

    def add_number(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.add1(leafs.floats(8, 4), leafs.floats(1))

    return [*found, Case("ADD1", add_number), Case("ADD_ID", add_id)]


def _unary() -> list[Case]:
    def one(leafs: Leafs, make: Callable[..., gs.Tensor], low: float = -2.0, ne: tuple[int, ...] = (8, 4)) -> gs.Tensor:
        return make(leafs.ctx, leafs.floats(*ne, low=low))

    def large(leafs: Leafs, make: Callable[..., gs.Tensor]) -> gs.Tensor:
        # exp(|x|) is infinite for some of these values; the result of the op is finite.
        return make(leafs.ctx, leafs.floats(8, 4, low=-120, high=120))

    def gated(leafs: Leafs, kind: str) -> gs.Tensor:
        return leafs.ctx.glu(leafs.floats(8, 4), kind)

    def gated_by_another(leafs: Leafs, kind: str) -> gs.Tensor:
        return leafs.ctx.glu_split(leafs.floats(8, 4), leafs.floats(8, 4), kind)

    makers = {"SCALE": lambda ctx, x: ctx.scale(x, 0.5), "SCALE and bias": lambda ctx, x: ctx.scale(x, -1.5, 0.25),
              "SCALE by zero": lambda ctx, x: ctx.scale(x, 0.0), "SQR": lambda ctx, x: ctx.sqr(x),
              "CLAMP": lambda ctx, x: ctx.clamp(x, -0.5, 1), "CLAMP to zero": lambda ctx, x: ctx.clamp(x, -0.5, 0)}
    found = [Case(name, partial(one, make=make)) for name, make in makers.items()]
    found += [Case("SQRT", partial(one, make=lambda ctx, x: ctx.sqrt(x), low=0.1)),
              Case("LOG", partial(one, make=lambda ctx, x: ctx.log(x), low=0.1))]
    for kind in ("silu", "gelu", "gelu_quick", "gelu_erf", "relu", "tanh", "sigmoid", "neg", "abs", "exp", "expm1",
                 "step", "sgn", "elu", "hardswish", "hardsigmoid", "softplus", "floor", "ceil", "round", "trunc"):
        def make(ctx: gs.Context, x: gs.Tensor, kind: str = kind) -> gs.Tensor:
            return ctx.unary(x, kind)

        # Backends may look GELU up in a table of f16 values.
        error = 1e-6 if kind.startswith("gelu") else 0.0
        found += [Case(f"UNARY:{kind.upper()}", partial(one, make=make), error),
                  Case(f"UNARY:{kind.upper()} of odd extents", partial(one, make=make, ne=(7, 3, 2, 2)), error)]
        if kind in ("silu", "gelu", "gelu_quick", "gelu_erf", "tanh", "sigmoid", "elu", "softplus"):
            found.append(Case(f"UNARY:{kind.upper()} of large values", partial(large, make=make), error))
    for kind in ("reglu", "geglu", "geglu_erf", "geglu_quick", "swiglu"):
        error = 1e-6 if kind.startswith("geglu") else 0.0
        found += [Case(f"GLU:{kind.upper()}", partial(gated, kind=kind), error),
                  Case(f"GLU:{kind.upper()} of two sources", partial(gated_by_another, kind=kind), error)]

    def xielu(leafs: Leafs, ne: tuple[int, ...]) -> gs.Tensor:
        # No method of Context makes this node.  Its parameters: alpha below and above zero, beta, eps.
        x, params = leafs.floats(*ne), np.array([0.8, 1.2, 0.5, -1e-6], np.float32).view(np.int32)
        return leafs.ctx.restore("UNARY:XIELU", x.type, x.ne, x.nb, (x,), op_params=(15, *params.tolist()))

    found += [Case("UNARY:XIELU", partial(xielu, ne=(8, 4))),
              Case("UNARY:XIELU of odd extents", partial(xielu, ne=(7, 3, 2, 2)))]
    return [*found, Case("GLU:SWIGLU_OAI", lambda leafs: leafs.ctx.swiglu_oai(leafs.floats(8, 4), leafs.floats(8, 4)))]


def _reductions() -> list[Case]:
    def reduced(leafs: Leafs, make: Callable[..., gs.Tensor], ne: tuple[int, ...]) -> gs.Tensor:
        return make(leafs.ctx, leafs.floats(*ne))

    makers: dict[str, Callable[..., gs.Tensor]] = {
        "SUM": lambda ctx, x: ctx.sum(x),
        "SUM_ROWS": lambda ctx, x: ctx.sum_rows(x),
        "MEAN": lambda ctx, x: ctx.mean(x),
        "NORM": lambda ctx, x: ctx.norm(x, 1e-5),
        "RMS_NORM": lambda ctx, x: ctx.rms_norm(x, 1e-5),
        "L2_NORM": lambda ctx, x: ctx.l2_norm(x, 1e-5),
        "GROUP_NORM": lambda ctx, x: ctx.group_norm(x, 2, 1e-5),
        "ARGMAX": lambda ctx, x: ctx.argmax(x),
        "ARGSORT": lambda ctx, x: ctx.argsort(x),
        "ARGSORT from the largest": lambda ctx, x: ctx.argsort(x, "desc"),
    }
    found = []
    for name, make in makers.items():
        for ne, which in (((32, 4), ""), ((13, 3, 4), " of odd extents")):
            if name.startswith("ARGMAX") and len(ne) > 2:
                continue        # ARGMAX takes matrices only
            found.append(Case(name + which, partial(reduced, make=make, ne=ne)))

    def small(leafs: Leafs, op: str) -> gs.Tensor:
        return makers[op](leafs.ctx, leafs.floats(32, 4, low=-1e-7, high=1e-7))

    found += [Case(f"{op} of values below eps", partial(small, op=op))
              for op in ("NORM", "RMS_NORM", "L2_NORM", "GROUP_NORM")]
    return [*found, Case("RMS_NORM and no eps", lambda leafs: leafs.ctx.rms_norm(leafs.floats(32, 4), 0.0)),
            Case("TOP_K", lambda leafs: leafs.ctx.top_k(leafs.floats(32, 4), 5), is_set=True),
            Case("ARANGE", lambda leafs: leafs.ctx.arange(1, 9, 0.5))]


def _rows() -> list[Case]:
    def gathered(leafs: Leafs, type: str, width: int) -> gs.Tensor:
        return leafs.ctx.get_rows(leafs.floats(width, 6, type=type), leafs.ids(6, 5))

    def scattered(leafs: Leafs, type: str) -> gs.Tensor:
        return leafs.ctx.set_rows(leafs.floats(32, 6, type=type), leafs.floats(32, 3),
                                  leafs.ids(6, 3, type="i64", distinct=True))

    found = []
    for type in ("f32", "f16", "bf16", *map(str, sorted(quants.QUANTIZED))):
        width = 256 if gs.Type[type.upper()].block_size > 32 else 32
        found.append(Case(f"GET_ROWS of {type}", partial(gathered, type=type, width=width)))
    for type, error in (("f32", 0.0), ("f16", ROUNDED["f16"]), ("q8_0", QUANTISED_NMSE)):
        found.append(Case(f"SET_ROWS to {type}", partial(scattered, type=type), error, is_exact=type in ROUNDED))
    return [*found, Case("GET_ROWS of batches", lambda leafs: leafs.ctx.get_rows(leafs.floats(32, 6, 3),
                                                                                leafs.ids(6, 5, 3)))]


def _copies() -> list[Case]:
    def turned(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.cont(leafs.ctx.transpose(leafs.floats(8, 4)))

    def permuted(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.cont(leafs.ctx.permute(leafs.floats(8, 4, 3), 0, 2, 1, 3))

    def into_part(leafs: Leafs) -> gs.Tensor:
        whole = leafs.floats(16, 4)
        return leafs.ctx.cpy(leafs.floats(8, 4), leafs.ctx.view_2d(whole, 8, 4, whole.nb[1], 32))

    def converted(leafs: Leafs, of: str, to: str) -> gs.Tensor:
        return leafs.ctx.cpy(leafs.floats(32, 4, type=of), leafs.floats(32, 4, type=to))

    def joined(leafs: Leafs, dim: int, extents: tuple[int, ...]) -> gs.Tensor:
        return leafs.ctx.concat(leafs.floats(8, 4, 3), leafs.floats(*extents), dim)

    found = [Case("CONT of a transposed source", turned), Case("CONT of a permuted source", permuted),
             Case("CPY to a part of each row", into_part),
             Case("DUP", lambda leafs: leafs.ctx.dup(leafs.floats(8, 4))),
             Case("REPEAT", lambda leafs: leafs.ctx.repeat(leafs.floats(4, 2), leafs.ctx.tensor("f32", (8, 4, 3)))),
             Case("PAD", lambda leafs: leafs.ctx.pad(leafs.floats(8, 4), 3, 1)),
             Case("SET", lambda leafs: leafs.ctx.set(leafs.floats(8, 4), leafs.floats(4, 2), 32, 128, 128, 40))]
    for to, error in (("f32", 0.0), ("f16", ROUNDED["f16"]), ("bf16", ROUNDED["bf16"]), ("q8_0", QUANTISED_NMSE),
                      ("q4_0", 2e-2)):
        found.append(Case(f"CPY to {to}", partial(converted, of="f32", to=to), error, is_exact=to in ROUNDED))
    for of in ("f16", "bf16"):
        found.append(Case(f"CPY of {of}", partial(converted, of=of, to="f32")))
    for dim, extents in enumerate(((5, 4, 3), (8, 2, 3), (8, 4, 1))):
        found.append(Case(f"CONCAT along {dim}", partial(joined, dim=dim, extents=extents)))
    return found


def _conversions() -> list[Case]:
    """Conversions of numbers half way between two neighbouring numbers of the type, beyond its range, below its least
    magnitude, and of NaNs."""
    between = {"f16": 2.0**-11, "bf16": 2.0**-8}

    def rounded(leafs: Leafs, type: str) -> gs.Tensor:
        half, largest = between[type], {"f16": 65504.0, "bf16": 3.3895313892515355e38}[type]
        values = [1 + half, 1 + 3 * half, -1 - half, 1 + half * 1.01, 1 - half / 2, 1 / 3, 0.0, largest, -largest,
                  largest * (1 + half / 4), np.inf, -np.inf, np.nan]
        if type == "f16":
            values += [65519.0, 65520.0, -1e6, 2.0**-24, 2.0**-25, 2.0**-25 * 1.01, 3 * 2.0**-25]
        return leafs.ctx.cpy(leafs.these(values), leafs.floats(len(values), type=type))

    return [Case(f"CPY to {type} of values between", partial(rounded, type=type), is_exact=True) for type in between]


def _parts() -> list[Case]:
    """Nodes that read a view whose rows have gaps."""
    def of_part(leafs: Leafs, make: Callable[..., gs.Tensor], ne: tuple[int, ...]) -> gs.Tensor:
        return make(leafs, leafs.ctx, leafs.part(*ne))

    makers: dict[str, tuple[Callable[..., gs.Tensor], tuple[int, ...]]] = {
        "ADD": (lambda leafs, ctx, x: ctx.add(x, leafs.floats(8, 4, 3)), (8, 4, 3)),
        "MUL": (lambda leafs, ctx, x: ctx.mul(leafs.floats(8, 4, 3), x), (8, 4, 3)),
        "SCALE": (lambda leafs, ctx, x: ctx.scale(x, 0.5), (8, 4, 3)),
        "UNARY:SILU": (lambda leafs, ctx, x: ctx.silu(x), (8, 4, 3)),
        "UNARY:RELU": (lambda leafs, ctx, x: ctx.relu(x), (8, 4, 3)),
        "GLU:SWIGLU": (lambda leafs, ctx, x: ctx.swiglu_split(x, leafs.part(8, 4)), (8, 4)),
        "SUM_ROWS": (lambda leafs, ctx, x: ctx.sum_rows(x), (8, 4, 3)),
        "NORM": (lambda leafs, ctx, x: ctx.norm(x, 1e-5), (16, 4, 3)),
        "RMS_NORM": (lambda leafs, ctx, x: ctx.rms_norm(x, 1e-5), (16, 4, 3)),
        "ARGMAX": (lambda leafs, ctx, x: ctx.argmax(x), (16, 5)),
        "ROPE": (lambda leafs, ctx, x: ctx.rope(x, leafs.ids(50, 5), 16), (16, 4, 5)),
        "MUL_MAT": (lambda leafs, ctx, x: ctx.mul_mat(leafs.floats(64, 8), x), (64, 5)),
        "GET_ROWS": (lambda leafs, ctx, x: ctx.get_rows(x, leafs.ids(6, 5)), (32, 6)),
        "SET_ROWS": (lambda leafs, ctx, x: ctx.set_rows(leafs.floats(32, 6), x, leafs.ids(6, 3, type="i64",
                                                                                         distinct=True)), (32, 3)),
        "CPY": (lambda leafs, ctx, x: ctx.cpy(x, leafs.part(8, 4, 3)), (8, 4, 3)),
        "CONT": (lambda leafs, ctx, x: ctx.cont(x), (8, 4, 3)),
    }
    return [Case(f"{op} of a part of each row", partial(of_part, make=make, ne=ne))
            for op, (make, ne) in makers.items()]


def _products() -> list[Case]:
    def product(leafs: Leafs, type: str, n: int, width: int) -> gs.Tensor:
        return leafs.ctx.mul_mat(leafs.floats(width, 8, type=type), leafs.floats(width, n))

    found = []
    for type in ("f32", "f16", "bf16", *map(str, sorted(quants.QUANTIZED))):
        width = 256 if gs.Type[type.upper()].block_size > 32 else 64
        error = QUANTISED_NMSE if gs.Type[type.upper()].is_quantized else ROUNDED.get(type, 0.0)
        for n in (1, 5):
            found.append(Case(f"MUL_MAT of {type} and {n} rows", partial(product, type=type, n=n, width=width), error))

    def batches(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.mul_mat(leafs.floats(16, 4, 2), leafs.floats(16, 3, 4, 2))

    def permuted(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.mul_mat(leafs.ctx.permute(leafs.floats(16, 2, 4), 0, 2, 1, 3), leafs.floats(16, 3, 2))

    def experts(leafs: Leafs, type: str) -> gs.Tensor:
        return leafs.ctx.mul_mat_id(leafs.floats(64, 8, 4, type=type), leafs.floats(64, 1, 5),
                                    leafs.ids(4, 2, 5, distinct=True))

    return [*found, Case("MUL_MAT of batches", batches), Case("MUL_MAT of a permuted source", permuted),
            Case("MUL_MAT_ID of f32", partial(experts, type="f32")),
            Case("MUL_MAT_ID of q8_0", partial(experts, type="q8_0"), QUANTISED_NMSE)]


def _attention() -> list[Case]:
    def masked(leafs: Leafs, type: str) -> gs.Tensor:
        return leafs.ctx.soft_max(leafs.floats(16, 5, 2), leafs.mask(16, 5, type), 0.3)

    def sloped(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.soft_max(leafs.floats(16, 5, 2), leafs.mask(16, 5, "f32"), 0.3, 8.0)

    def rotated(leafs: Leafs, mode: str, n_dims: int, factors: bool = False, **options: Any) -> gs.Tensor:
        return leafs.ctx.rope(leafs.floats(16, 4, 5), leafs.ids(50, 5), n_dims, mode,
                              leafs.floats(n_dims // 2, low=0.5) if factors else None, **options)

    def attended(leafs: Leafs, kv: str, n: int, is_masked: bool = True, has_sinks: bool = False,
                 largest: float = 0.0, **options: Any) -> gs.Tensor:
        k, v = (leafs.floats(32, 64, 2, type=kv) for _ in range(2))
        mask = leafs.mask(64, n, "f16", largest) if is_masked else None
        return leafs.ctx.flash_attn_ext(leafs.floats(32, n, 4), k, v, mask, 32**-0.5,
                                        sinks=leafs.floats(4) if has_sinks else None, **options)

    def large(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.soft_max(leafs.floats(16, 5, 2, low=-200, high=200))

    def with_sinks(leafs: Leafs) -> gs.Tensor:
        return leafs.ctx.soft_max(leafs.floats(16, 5, 2), leafs.mask(16, 5, "f32"), 0.3, sinks=leafs.floats(2))

    found = [Case("SOFT_MAX", lambda leafs: leafs.ctx.soft_max(leafs.floats(16, 5, 2))),
             Case("SOFT_MAX and an f32 mask", partial(masked, type="f32")),
             Case("SOFT_MAX and an f16 mask", partial(masked, type="f16")),
             Case("SOFT_MAX and slopes", sloped), Case("SOFT_MAX and sinks", with_sinks),
             Case("SOFT_MAX of large values", large),
             Case("DIAG_MASK_INF", lambda leafs: leafs.ctx.diag_mask_inf(leafs.floats(8, 4, 2), 2)),
             Case("DIAG_MASK_ZERO", lambda leafs: leafs.ctx.diag_mask_zero(leafs.floats(8, 4, 2), 2))]
    found += [Case(f"ROPE {mode} of {n_dims} of 16", partial(rotated, mode=mode, n_dims=n_dims))
              for mode in ("normal", "neox") for n_dims in (16, 8)]
    found += [Case("ROPE and frequency factors", partial(rotated, mode="neox", n_dims=16, factors=True)),
              Case("ROPE of another base", partial(rotated, mode="normal", n_dims=16, freq_base=5e5, freq_scale=0.25)),
              Case("ROPE and YaRN", partial(rotated, mode="neox", n_dims=16, freq_scale=0.25, ext_factor=1.0,
                                            n_ctx_orig=64, attn_factor=1.2))]
    # An nmse of 5e-4 is permitted: a backend may round the products of attention to f16.
    more: dict[str, dict[str, Any]] = {
        "no mask": {"is_masked": False}, "sinks": {"has_sinks": True}, "slopes": {"max_bias": 8.0},
        "a bound on scores": {"logit_softcap": 5.0}, "large scores": {"largest": 100.0}}
    found += [Case(f"FLASH_ATTN_EXT and {what}", partial(attended, kv="f16", n=5, **options), 5e-4)
              for what, options in more.items()]
    found += [Case(f"FLASH_ATTN_EXT of {kv} and {n} rows", partial(attended, kv=kv, n=n), 5e-4)
              for kv in ("f32", "f16") for n in (1, 5)]
    return found


def _recurrent() -> list[Case]:
    def scanned(leafs: Leafs) -> gs.Tensor:
        state, head, n_head, n_tokens, n_seqs = 4, 8, 2, 3, 2
        return leafs.ctx.ssm_scan(
            leafs.floats(state, head, n_head, n_seqs), leafs.floats(head, n_head, n_tokens, n_seqs),
            leafs.floats(n_head, n_tokens, n_seqs), leafs.floats(1, n_head, low=-1, high=0),
            leafs.floats(state, 1, n_tokens, n_seqs), leafs.floats(state, 1, n_tokens, n_seqs), leafs.numbers(n_seqs))

    return [Case("SSM_CONV", lambda leafs: leafs.ctx.ssm_conv(leafs.floats(6, 8, 2), leafs.floats(4, 8))),
            Case("SSM_SCAN", scanned)]


CASES: tuple[Case, ...] = tuple(_all())
"""The cases of the suite; names begin with the op."""


def _gated(leafs: Leafs) -> gs.Tensor:
    ctx, x = leafs.ctx, leafs.floats(64, 3)
    up, gate = leafs.floats(64, 32), leafs.floats(64, 32)
    return ctx.swiglu_split(ctx.mul_mat(gate, x), ctx.mul_mat(up, x))


def _scores(leafs: Leafs) -> gs.Tensor:
    ctx = leafs.ctx
    return ctx.soft_max(ctx.scale(ctx.mul_mat(leafs.floats(64, 16), leafs.floats(64, 5)), 0.125))


def _squared(leafs: Leafs) -> gs.Tensor:
    norm = leafs.ctx.rms_norm(leafs.floats(32, 4), 1e-5)
    return leafs.ctx.mul(norm, norm)


def _times_a_view(leafs: Leafs) -> gs.Tensor:
    norm = leafs.ctx.rms_norm(leafs.floats(32, 4), 1e-5)
    return leafs.ctx.mul(norm, leafs.ctx.reshape(norm, 32, 4))


PATTERNS: dict[str, Callable[[Leafs], gs.Tensor]] = {
    "RMS_NORM, MUL": lambda b: b.ctx.mul(b.ctx.rms_norm(b.floats(32, 4), 1e-5), b.floats(32)),
    "RMS_NORM, MUL by itself": _squared,
    "RMS_NORM, MUL by a view of itself": _times_a_view,
    "RMS_NORM, MUL, ADD": lambda b: b.ctx.add(b.ctx.mul(b.ctx.rms_norm(b.floats(32, 4), 1e-5), b.floats(32)),
                                              b.floats(32, 4)),
    "NORM, MUL, ADD": lambda b: b.ctx.add(b.ctx.mul(b.ctx.norm(b.floats(32, 4), 1e-5), b.floats(32)), b.floats(32)),
    "ADD of one row, RELU": lambda b: b.ctx.relu(b.ctx.add(b.floats(32, 4), b.floats(32))),
    "ADD of a part of each row, RELU": lambda b: b.ctx.relu(b.ctx.add(b.part(32, 4), b.floats(32, 4))),
    "ADD, ADD": lambda b: b.ctx.add(b.ctx.add(b.floats(32, 4), b.floats(32, 4)), b.floats(32, 4)),
    "ADD, RELU": lambda b: b.ctx.relu(b.ctx.add(b.floats(32, 4), b.floats(32, 4))),
    "MUL, ADD": lambda b: b.ctx.add(b.ctx.mul(b.floats(32, 4), b.floats(32, 4)), b.floats(32, 4)),
    "SILU, MUL": lambda b: b.ctx.mul(b.ctx.silu(b.floats(32, 4)), b.floats(32, 4)),
    "MUL_MAT, ADD": lambda b: b.ctx.add(b.ctx.mul_mat(b.floats(64, 32), b.floats(64, 3)), b.floats(32)),
    "MUL_MAT, ADD, RELU": lambda b: b.ctx.relu(b.ctx.add(b.ctx.mul_mat(b.floats(64, 32), b.floats(64, 3)),
                                                         b.floats(32))),
    "MUL_MAT, MUL_MAT, GLU": _gated,
    "MUL_MAT, SCALE, SOFT_MAX": _scores,
    "SCALE, TANH, SCALE": lambda b: b.ctx.scale(b.ctx.tanh(b.ctx.scale(b.floats(32, 4), 0.1)), 10),
}
"""{ops: makes nodes that backends often compute as one kernel}."""
