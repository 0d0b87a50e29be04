"""Random graphs: recipes that hypothesis draws and shrinks, and their realisation as tensors.

A recipe is plain data, so one graph can be built twice (once with a plan, once with every tensor in memory of its own).
A step whose op does not fit the tensors that it picked becomes a simpler op, so every recipe is a valid graph.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import ggml_sched as gs

SHAPES = ((4, 3, 1, 1), (4, 3, 2, 1), (8, 1, 1, 1), (3, 4, 1, 1), (4, 1, 1, 1), (1, 1, 1, 1), (12, 1, 2, 1),
          (32, 2, 1, 1))
UNARY = ("relu", "neg", "abs", "silu", "tanh", "step")

OPS = (
    "add", "mul", "sub", "scale", "unary", "add", "mul", "unary",       # twice: in-place reuse is the point
    "sqr", "rms_norm", "soft_max", "diag_mask_zero", "clamp", "dup", "mul_mat", "sum_rows",
    "reshape", "view_1d", "view_rows", "permute", "transpose", "cont", "repeat", "concat",
    "add_self", "cpy", "add_inplace", "set_rows", "get_rows", "norm", "glu", "reshape", "mixture", "around",
)


def quick(examples: int) -> settings:
    """Settings for a test: no deadline, as machines are shared.

    GGML_SCHED_EXAMPLES=50 in the environment searches 50 times as long.
    """
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    examples *= int(os.environ.get("GGML_SCHED_EXAMPLES", "1"))
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


@dataclass(frozen=True)
class Recipe:
    leafs: tuple[tuple[int, int], ...]              # (shape, kind); kind % 3: 0 plain, 1 input, 2 resident
    steps: tuple[tuple[int, int, int, int], ...]    # (op, a, b, parameter)
    outputs: tuple[int, ...]                        # picks of tensors to flag as output
    ends: tuple[int, ...]                           # picks of tensors that are given first to Graph()


def recipes(max_steps: int = 24) -> st.SearchStrategy[Recipe]:
    """Drawn as bytes, which hypothesis makes quickly: six for leafs, four for flags, four a step."""
    return st.binary(min_size=10 + 4 * min(4, max_steps), max_size=10 + 4 * max_steps).map(decode)


def decode(data: bytes) -> Recipe:
    leafs = tuple((byte % len(SHAPES), byte // len(SHAPES)) for byte in data[1:6])[: 1 + data[0] % 5]
    flagged, asked = data[6:8], data[8:10]
    steps = tuple((op % len(OPS), a, b, p) for op, a, b, p in zip(*[iter(data[10:])] * 4, strict=False))
    # Zero bytes, to which hypothesis shrinks, flag and pick nothing.
    return Recipe(leafs, steps, tuple(x for x in flagged if x), tuple(x for x in asked if x > 127))


def many_residents(recipe: Recipe) -> Recipe:
    """The same recipe, with leafs of even kinds resident."""
    return replace(recipe, leafs=tuple((s, k if k % 2 else k // 3 * 3 + 2) for s, k in recipe.leafs))


def without_rounding(recipe: Recipe) -> Recipe:
    """The same recipe, with other ops in place of those that round results of small whole numbers."""
    def step(op: int, a: int, b: int, p: int) -> tuple[int, int, int, int]:
        if OPS[op] in ("scale", "rms_norm", "norm", "soft_max", "glu"):
            op = OPS.index("add")
        rounds = OPS[op] == "unary" and UNARY[p % len(UNARY)] in ("silu", "tanh")
        return op, a, b, p - p % len(UNARY) if rounds else p

    return replace(recipe, steps=tuple(step(*given) for given in recipe.steps))


class Built:
    """A recipe as tensors: `ctx` for everything computed, `homes` for residents, one for each backend.

    `keeps`: add alloc dependencies on earlier tensors to some nodes (the first generation has none).  `like`: another
    realisation, whose residents of equal shape and home are used again.
    """

    def __init__(self, recipe: Recipe, n_homes: int = 1, flag_inputs: bool = True, keeps: bool = True,
                 like: Built | None = None) -> None:
        self.ctx = gs.Context("random")
        self.homes = like.homes if like else [gs.Context(f"residents {k}") for k in range(n_homes)]
        self.shared: dict[tuple, gs.Tensor] = like.shared if like else {}
        self.leafs: list[gs.Tensor] = []
        self.residents: list[gs.Tensor] = []
        self.ids: list[gs.Tensor] = []
        self.writes: list[gs.Tensor] = []
        made: list[gs.Tensor] = []
        for shape, kind in recipe.leafs:
            name = f"leaf {len(made)}"
            if kind % 3 == 2:
                home = kind // 3 % n_homes
                leaf = (like and self.shared.get((shape, home))) or self.homes[home].tensor("f32", SHAPES[shape], name)
                self.shared.setdefault((shape, home), leaf)
                self.residents.append(leaf)
            else:
                leaf = self.ctx.tensor("f32", SHAPES[shape], name, input=flag_inputs and kind % 3 == 1)
            self.leafs.append(leaf)
            made.append(leaf)
        for step in recipe.steps:
            made.append(self._step(made, *step))
            if keeps and step[3] % 11 == 10:
                self._keep(made, step[1])
        for pick in recipe.outputs:
            self.ctx.set_output(made[pick % len(made)])
        read = {s for t in made for s in (*t.src, t.view_src)}
        sinks = [t for t in made if t.src and t not in read]
        # Naming other ends first changes the order of nodes.
        self.ends = [*(made[pick % len(made)] for pick in recipe.ends), *sinks, *self.writes]
        self.graph = gs.Graph(*self.ends)

    def _indices(self, n: int | tuple[int, ...], kind: str) -> gs.Tensor:
        ids = self.ctx.tensor(kind, n, f"ids {len(self.ids)}", input=True)
        self.ids.append(ids)
        return ids

    def _step(self, made: list[gs.Tensor], op: int, a: int, b: int, p: int) -> gs.Tensor:
        ctx, name = self.ctx, OPS[op]
        # Recent tensors are picked more often: chains, and sources with few consumers.
        a = made[-1 - a % min(len(made), (len(made), 1, 2, 3)[a % 4])]
        b = made[-1 - b % len(made)]
        try:
            t = self._op(name, a, b, p)
        except gs.GraphError:
            t = ctx.scale(a, 0.5) if p % 2 else ctx.relu(a)
        return ctx.set_name(t, f"{len(made)} {name}")

    def _keep(self, made: list[gs.Tensor], pick: int) -> None:
        """Add an alloc dependency on an earlier tensor to the latest node, unless that is a view."""
        if made[-1].op not in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"):
            self.ctx.keep_until(made[pick % (len(made) - 1)], made[-1])

    def _op(self, name: str, a: gs.Tensor, b: gs.Tensor, p: int) -> gs.Tensor:
        ctx = self.ctx
        ne, nb = a.ne, a.nb
        match name:
            case "add" | "mul" | "sub":
                return getattr(ctx, name)(a, b)
            case "add_self":
                return ctx.add(a, a)
            case "add_inplace":
                if a.nbytes > 4096:
                    raise gs.GraphError
                return ctx.add(a, b, inplace=True)
            case "scale":
                return ctx.scale(a, 0.25 + p / 64)
            case "unary":
                return ctx.unary(a, UNARY[p % len(UNARY)])
            case "sqr" | "dup" | "sum_rows" | "transpose" | "cont":
                return getattr(ctx, name)(a)
            case "rms_norm" | "norm":
                return getattr(ctx, name)(a, 1e-5)
            case "soft_max":
                return ctx.soft_max(a, scale=0.5)
            case "diag_mask_zero":
                return ctx.diag_mask_zero(a, p % 3)
            case "clamp":
                return ctx.clamp(a, -1.0, 1.0)
            case "mul_mat" | "repeat":
                return getattr(ctx, name)(a, b)
            case "reshape":
                n = a.n_elements
                return ctx.reshape(a, n) if p % 2 or n % 2 else ctx.reshape(a, n // 2, 2)
            case "view_1d":
                n = 1 + p % ne[0]
                return ctx.view_1d(a, n, nb[0] * (p // 8 % (ne[0] - n + 1)))
            case "view_rows":
                n = 1 + p % ne[1]
                offset = nb[1] * (p // 8 % (ne[1] - n + 1))
                return ctx.view_4d(a, ne[0], n, ne[2], ne[3], nb[1], nb[2], nb[3], offset)
            case "permute":
                return ctx.permute(a, *((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (0, 1, 3, 2))[p % 4])
            case "concat":
                if a.nbytes + b.nbytes > 4096:
                    raise gs.GraphError
                return ctx.concat(a, b, p % 2)
            case "cpy":
                return ctx.cpy(a, b)
            case "glu":
                return ctx.swiglu(a)
            case "mixture":
                return self._mixture(a, b, p)
            case "around":
                # The same memory, read before and after a node has written to it.
                if b.ne != ne or a.view_src is not None:
                    raise gs.GraphError
                before = ctx.add(a, b)
                self.writes.append(ctx.cpy(before, a))
                return ctx.add(a, before)
            case "get_rows":
                if ne[2] != 1 or ne[3] != 1:
                    raise gs.GraphError
                return ctx.get_rows(a, self._indices(1 + p % 4, "i32"))
            case "set_rows":
                if ne[0] != b.ne[0] or not a.ne[2] == b.ne[2] or a.view_src is not None or b.ne[1] > ne[1]:
                    raise gs.GraphError
                return ctx.set_rows(a, b, self._indices(b.ne[1], "i64"))
        raise AssertionError(name)

    def _mixture(self, a: gs.Tensor, experts: gs.Tensor, p: int) -> gs.Tensor:
        """Multiply each row of `a` by the expert of its id; ids are a leaf, or computed from `a`."""
        ctx, n_expert = self.ctx, experts.ne[2]
        if n_expert < 2 or experts.ne[3] != 1 or a.ne[0] != experts.ne[0] or n_expert > a.ne[0]:
            raise gs.GraphError
        rows = ctx.reshape(ctx.cont(a), a.ne[0], 1, a.n_elements // a.ne[0])
        first = ctx.view_2d(rows, n_expert, rows.ne[2], rows.nb[2])
        ids = self._indices((1, rows.ne[2]), "i32") if p % 2 else ctx.top_k(ctx.cont(first), 1)
        return ctx.mul_mat_id(experts, rows, ids)

    def values(self, seed: int = 7) -> dict[gs.Tensor, np.ndarray]:
        """The data of the leafs: equal for every realisation of one recipe."""
        rng = np.random.default_rng(seed)
        found = {leaf: rng.uniform(-2, 2, leaf.ne[::-1]).astype(np.float32) for leaf in self.leafs}
        for ids in self.ids:
            # SET_ROWS needs distinct rows, GET_ROWS any: a single row satisfies both.
            users = [t for t in self.ctx.tensors if ids in t.src]
            if users and users[0].op == "MUL_MAT_ID":
                found[ids] = rng.integers(0, users[0].src[0].ne[2], ids.ne[1::-1]).astype(np.int32)
                continue
            rows = ids.ne[0]            # ids of a step that became another op
            if users:
                rows = users[0].ne[1] if users[0].op == "SET_ROWS" else users[0].src[0].ne[1]
            kind = np.int64 if ids.type == gs.Type.I64 else np.int32
            found[ids] = rng.permutation(max(rows, ids.ne[0]))[: ids.ne[0]].astype(kind) % rows
        return found
