"""Random graphs with a model in NumPy that gives every tensor's expected data without the package.

Each op made here has a function on NumPy arrays with the same result.  Values are integers (or halves of some)
small enough to be exact in f32 and f16, so that results are compared for equality, however they were computed.
A model has an array for every root; views are NumPy views, so that writes through them are shared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

import ggml_sched as gs

SMALL, LARGE = 16, 1 << 21
"""Bounds of values: of inputs and residents, and the bound to which results are clamped."""
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


@dataclass(eq=False)
class Value:
    """A tensor and its expected data: `run` computes its array from earlier arrays; no |value| exceeds `bound`."""

    tensor: gs.Tensor
    ne: tuple[int, int, int, int]
    bound: int
    root: Value | None = None
    dense: bool = True
    run: Callable[[dict], np.ndarray] | None = None
    kind: str = "f32"

    @property
    def owner(self) -> Value:
        return self.root or self


def four(*ne: int) -> tuple[int, int, int, int]:
    return (*ne, 1, 1, 1, 1)[:4]


def tiled(a: np.ndarray, ne: tuple[int, int, int, int]) -> np.ndarray:
    return np.tile(a, [m // n for m, n in zip(ne[::-1], a.shape, strict=True)])


def window(a: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...], at: int) -> np.ndarray:
    """What a view of memory that starts with `a` sees; strides in bytes, `at` in elements."""
    line = as_strided(a, (at + 1,), (a.itemsize,))
    return as_strided(line[at:], shape, strides)


class Home:
    """Resident tensors, shared by graphs; `arrays` is their expected data."""

    def __init__(self, rng: random.Random, backends) -> None:
        self.contexts: list[gs.Context] = []
        self.values: dict[str, list[Value]] = {"weight": [], "cache": [], "experts": []}
        self.arrays: dict[Value, np.ndarray] = {}
        draw = np.random.default_rng(rng.getrandbits(32))
        n = self.n = rng.choice([4, 8])
        for k in range(rng.randint(1, 3)):
            self._add("weight", rng.choice(["f32", "f32", "f16"]), (n, n), f"w{k}", "weights", backends, rng, draw)
        for k in range(rng.randint(1, 2)):
            self._add("cache", rng.choice(["f32", "f32", "f16"]), (n, 12), f"cache{k}", rng.choice(["any", "weights"]),
                      backends, rng, draw)
        for k in range(rng.randint(0, 2)):
            self._add("experts", "f32", (n, n, 3), f"e{k}", "weights", backends, rng, draw)

    def _add(self, group, kind, ne, name, usage, backends, rng, draw) -> None:
        ctx = gs.Context(name)
        tensor = ctx.tensor(kind, ne, name)
        rng.choice(backends).alloc_tensors(ctx, usage)
        value = Value(tensor, four(*ne), SMALL, kind=kind)
        bound = 2 if group != "cache" else SMALL
        self.arrays[value] = draw.integers(-bound, bound + 1, value.ne[::-1]).astype(DTYPES[kind])
        tensor.set(self.arrays[value])
        self.contexts.append(ctx)
        self.values[group].append(value)


class Model:
    """One graph over a home: `steps` ops drawn by `rng`, `rows` rows to its inputs.

    `leafs`: what the caller sets before a compute; those without the input flag every time.
    """

    def __init__(self, rng: random.Random, home: Home, rows: int, steps: int) -> None:
        self.rng, self.home, self.ctx = rng, home, gs.Context("model")
        self.n, self.m = home.n, rows
        self.of: dict[gs.Tensor, Value] = {v.tensor: v for v in home.arrays}
        self.leafs: list[Value] = []
        self.ids: list[tuple[Value, int]] = []
        self.effects: list[Value] = []
        self.pool: list[Value] = []
        for k in range(rng.randint(1, 3)):
            self.pool.append(self._leaf("f32", (self.n, self.m), f"x{k}", rng.random() < 0.7))
        while len(self.of) - len(home.arrays) < steps:
            made = self._step(rng.choice(OPS))
            if made is not None and made.kind == "f32":
                self.pool.append(made)
        nodes = [v for v in self.pool if v.run is not None]
        ends = rng.sample(nodes, min(len(nodes), rng.randint(1, 3)))
        ends += [e for e in self.effects if rng.random() < 0.8]
        ends = ends or [self._op_clamp()]
        rng.shuffle(ends)
        for value in self.of.values():
            if value.run is not None and rng.random() < 0.15:
                self.ctx.set_output(value.tensor)
        self.graph = gs.Graph(*[e.tensor for e in ends])

    # -- expected results of a compute --------------------------------------------------------------

    def draw(self, draw: np.random.Generator, keep: dict[Value, np.ndarray]) -> dict[Value, np.ndarray]:
        """The data to set before a compute; with `keep`, some flagged inputs keep the data set last."""
        given = {}
        limits = dict(self.ids)
        for leaf in self.leafs:
            if leaf in keep and "input" in leaf.tensor.flags and draw.random() < 0.3:
                given[leaf] = keep[leaf]
            elif leaf in limits:
                picks = [draw.permutation(limits[leaf]) for _ in range(-(-leaf.ne[0] * leaf.ne[1] // limits[leaf]))]
                flat = np.concatenate(picks)[: leaf.ne[0] * leaf.ne[1]]
                given[leaf] = flat.reshape(leaf.ne[::-1]).astype(DTYPES[leaf.kind])
            else:
                given[leaf] = draw.integers(-SMALL, SMALL + 1, leaf.ne[::-1]).astype(DTYPES[leaf.kind])
        return given

    def run(self, given: dict[Value, np.ndarray]) -> dict[gs.Tensor, np.ndarray]:
        """The arrays of all tensors of the graph after a compute; updates the home's expected data."""
        arrays = {**self.home.arrays, **{leaf: a.copy() for leaf, a in given.items()}}
        for node in self.graph.nodes:
            value = self.of[node]
            made = value.run(arrays)
            if value.root is None:
                made = np.ascontiguousarray(made, DTYPES[value.kind])
            assert made.shape == value.ne[::-1], (node, made.shape)
            arrays[value] = made
        return {t: arrays[self.of[t]] for t in self.graph.tensors if self.of[t] in arrays}

    # -- making tensors ------------------------------------------------------------------------

    def _leaf(self, kind: str, ne, name: str, is_input: bool, bound: int = SMALL) -> Value:
        value = Value(self.ctx.tensor(kind, ne, name, input=is_input), four(*ne), bound, kind=kind)
        self.of[value.tensor] = value
        self.leafs.append(value)
        return value

    def _ids(self, kind: str, ne, limit: int) -> Value:
        value = self._leaf(kind, ne, f"ids{len(self.ids)}", self.rng.random() < 0.7)
        self.ids.append((value, limit))
        return value

    def _put(self, tensor: gs.Tensor, run, bound: int, ne=None, kind: str = "f32") -> Value:
        """A result in memory of its own, clamped when it could become too large."""
        value = Value(tensor, ne or self._ne(tensor), bound, run=run, kind=kind)
        self.of[tensor] = value
        return self._clamp(value, SMALL) if bound > LARGE else value

    def _view(self, tensor: gs.Tensor, of: Value, run, ne, dense: bool) -> Value:
        value = Value(tensor, ne, of.owner.bound, of.owner, dense, run, of.kind)
        self.of[tensor] = value
        return value

    @staticmethod
    def _ne(tensor: gs.Tensor) -> tuple[int, int, int, int]:
        return tensor.ne        # compared with what the model computes, in run()

    def _clamp(self, a: Value, limit: int) -> Value:
        a = self._dense(a)
        return self._put(self.ctx.clamp(a.tensor, -limit, limit), lambda s: np.clip(s[a], -limit, limit), limit, a.ne)

    def _dense(self, a: Value) -> Value:
        return a if a.dense else self._put(self.ctx.cont(a.tensor), lambda s: s[a].copy(), a.owner.bound, a.ne)

    def _bound(self, a: Value) -> int:
        return a.owner.bound

    def _pick(self, of=None) -> Value:
        """A value, a recent one more often."""
        found = [v for v in self.pool if of is None or of(v)]
        if not found:
            return self.pool[0]
        return found[-1 - min(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def _rows(self) -> Value:
        """An f32 matrix of n columns without gaps."""
        found = self._pick(self._is_rows)
        return self._dense(found if self._is_rows(found) else self.leafs[0])

    def _is_rows(self, v: Value) -> bool:
        return v.ne[0] == self.n and v.ne[2:] == (1, 1)

    def _step(self, op: str) -> Value | None:
        return getattr(self, "_op_" + op)()

    # -- ops -----------------------------------------------------------------------------------

    def _op_binary(self) -> Value:
        a, ctx = self._pick(), self.ctx
        b = self._pick(lambda v: all(x % y == 0 for x, y in zip(a.ne, v.ne, strict=True)))
        if any(x % y for x, y in zip(a.ne, b.ne, strict=True)):
            b = a
        name = self.rng.choice(["add", "sub", "mul"])
        x, y = self._bound(a), self._bound(b)
        act = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[name]
        return self._put(getattr(ctx, name)(a.tensor, b.tensor), lambda s: act(s[a], tiled(s[b], a.ne)),
                         x * y if name == "mul" else x + y, a.ne)

    def _op_unary(self) -> Value:
        a, (kind, act, bound) = self._dense(self._pick()), self.rng.choice(UNARY)
        return self._put(self.ctx.unary(a.tensor, kind), lambda s: act(s[a]), bound or self._bound(a), a.ne)

    def _op_scale(self) -> Value:
        a, by = self._dense(self._pick()), self.rng.choice([-1.0, 2.0, 0.0, 3.0])
        return self._put(self.ctx.scale(a.tensor, by), lambda s: s[a] * np.float32(by), self._bound(a) * 3, a.ne)

    def _op_sqr(self) -> Value:
        a = self._dense(self._pick())
        return self._put(self.ctx.sqr(a.tensor), lambda s: np.square(s[a]), self._bound(a) ** 2, a.ne)

    def _op_clamp(self) -> Value:
        return self._clamp(self._pick(), self.rng.choice([3, 8]))

    def _op_inplace(self) -> Value:
        """In place over the source; the bound must not grow, as other views share the memory."""
        a = self._pick()
        kind, act, bound = self.rng.choice(UNARY)
        if not a.dense or bound > self._bound(a):
            return self._op_scale()

        def run(s):
            s[a][...] = act(s[a])
            return s[a]
        return self._written(self._view(self.ctx.unary(a.tensor, kind, inplace=True), a, run, a.ne, True))

    def _written(self, value: Value) -> Value:
        self.effects.append(value)
        return value

    def _op_mul_mat(self) -> Value:
        b = self._pick(lambda v: v.ne[0] == self.n)
        if b.ne[0] != self.n:
            b = self.leafs[0]
        if self._bound(b) > 512 or not b.dense:
            b = self._clamp(b, SMALL)
        others = [v for v in self.pool if self._is_rows(v) and v.dense and self._bound(v) <= 512]
        a = self.rng.choice(self.home.values["weight"] * 3 + self.home.values["cache"] + others)
        return self._put(self.ctx.mul_mat(a.tensor, b.tensor),
                         lambda s: s[b].astype(np.float64) @ s[a][0, 0].astype(np.float64).T,
                         self.n * self._bound(a) * self._bound(b), (a.ne[1], *b.ne[1:]))

    def _op_sum_rows(self) -> Value:
        a = self._dense(self._pick())
        if self._bound(a) * a.ne[0] > LARGE:
            a = self._clamp(a, SMALL)
        return self._put(self.ctx.sum_rows(a.tensor), lambda s: s[a].astype(np.float64).sum(-1, keepdims=True),
                         self._bound(a) * a.ne[0], (1, *a.ne[1:]))

    def _op_repeat(self) -> Value:
        like = self._pick()
        a = self._pick(lambda v: v.dense and all(x % y == 0 for x, y in zip(like.ne, v.ne, strict=True)))
        if not a.dense or any(x % y for x, y in zip(like.ne, a.ne, strict=True)):
            a = self._dense(like)
        ne = like.ne
        return self._put(self.ctx.repeat(a.tensor, like.tensor), lambda s: tiled(s[a], ne), self._bound(a), ne)

    def _op_concat(self) -> Value:
        dim = self.rng.randrange(3)
        a = self._dense(self._pick())

        def fits(v: Value) -> bool:
            return v.dense and all(v.ne[i] == a.ne[i] for i in range(4) if i != dim)
        b = self._pick(fits)
        if not fits(b):
            b = a
        ne = list(a.ne)
        ne[dim] += b.ne[dim]
        if ne[0] * ne[1] * ne[2] > 512:
            return self._op_clamp()
        return self._put(self.ctx.concat(a.tensor, b.tensor, dim), lambda s: np.concatenate((s[a], s[b]), 3 - dim),
                         max(self._bound(a), self._bound(b)), tuple(ne))

    def _op_cont(self) -> Value:
        a = self._pick()
        return self._put(self.ctx.cont(a.tensor), lambda s: s[a].copy(), self._bound(a), a.ne)

    def _op_mask(self) -> Value:
        a, past = self._dense(self._pick()), self.rng.randrange(3)

        def run(s):
            column, row = np.arange(a.ne[0]), np.arange(a.ne[1])[:, None]
            return np.where(column > past + row, np.float32(0), s[a])
        return self._put(self.ctx.diag_mask_zero(a.tensor, past), run, self._bound(a), a.ne)

    def _op_reshape(self) -> Value:
        a = self._dense(self._pick())
        count = a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3]
        ne = self.rng.choice([(count,), (a.ne[0] * a.ne[1], a.ne[2] * a.ne[3])] + [(self.n, count // self.n)] * 3)
        if ne[0] * (ne[1] if len(ne) > 1 else 1) != count:
            ne = (count,)
        return self._view(self.ctx.reshape(a.tensor, *ne), a, lambda s: s[a].reshape(four(*ne)[::-1]), four(*ne), True)

    def _op_permute(self) -> Value:
        a, order = self._pick(), self.rng.choice([(1, 0, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)])
        axes, ne = [0] * 4, [0] * 4
        for i, p in enumerate(order):
            axes[3 - p], ne[p] = 3 - i, a.ne[i]
        return self._view(self.ctx.permute(a.tensor, *order), a, lambda s: s[a].transpose(axes), tuple(ne), False)

    def _op_window(self) -> Value:
        """Some rows and columns of a matrix, or a run of its elements."""
        a = self.rng.choice([self._dense(self._pick()), self._dense(self._pick()), *self._caches("f32")])
        if a.ne[2:] != (1, 1):
            return self._op_reshape()
        columns, rows = self.rng.choice([a.ne[0], a.ne[0], self.rng.randint(1, a.ne[0])]), self.rng.randint(1, a.ne[1])
        at = self.rng.randint(0, a.ne[1] - rows) * a.ne[0] + self.rng.randint(0, a.ne[0] - columns)
        ne, row = (columns, rows, 1, 1), 4 * a.ne[0]
        size = row * rows
        return self._view(self.ctx.view_2d(a.tensor, columns, rows, row, 4 * at), a,
                          lambda s: window(s[a], ne[::-1], (size, size, row, 4), at), ne, columns == a.ne[0])

    def _caches(self, *kinds: str) -> list[Value]:
        return [v for v in self.home.values["cache"] if v.kind in kinds]

    def _op_cpy(self) -> Value:
        """Into some rows of a cache, or over an input or a result."""
        targets = self.home.values["cache"] * 3 + [v for v in self.pool if v.owner is v]
        b = self.rng.choice(targets)
        if b.ne[2:] != (1, 1):
            return self._op_cont()
        size = np.dtype(DTYPES[b.kind]).itemsize
        rows = self.rng.randint(1, min(self.m, b.ne[1]))
        start = self.rng.randint(0, b.ne[1] - rows)
        a = self._pick(lambda v: v.ne[0] * v.ne[1] * v.ne[2] * v.ne[3] == rows * b.ne[0])
        if a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3] != rows * b.ne[0]:
            return self._op_cont()
        if self._bound(a) > b.bound:
            a = self._clamp(a, b.bound)
        ne, row = (b.ne[0], rows, 1, 1), size * b.ne[0]
        strides = (row * rows, row * rows, row, size)
        part = self._view(self.ctx.view_2d(b.tensor, *ne[:2], row, row * start), b,
                          lambda s: window(s[b], ne[::-1], strides, start * ne[0]), ne, True)

        def run(s):
            s[part][...] = s[a].copy().reshape(s[part].shape)
            return s[part]
        return self._written(self._view(self.ctx.cpy(a.tensor, part.tensor), b, run, ne, True))

    def _op_set_rows(self) -> Value | None:
        a = self.rng.choice(self.home.values["cache"])
        b = self._rows()
        if b.ne[0] != a.ne[0] or b.ne[1] > a.ne[1] or b.ne[2:] != (1, 1):
            return self._op_cpy()
        if self._bound(b) > a.bound:
            b = self._clamp(b, a.bound)
        ids = self._ids("i64", (b.ne[1],), a.ne[1])

        def run(s):
            s[a][0, 0, s[ids].ravel()] = s[b][0, 0]
            return s[a]
        return self._written(self._view(self.ctx.set_rows(a.tensor, b.tensor, ids.tensor), a, run, a.ne, True))

    def _op_get_rows(self) -> Value:
        a = self.rng.choice([self._rows(), *self.home.values["cache"], *self.home.values["weight"]])
        if a.ne[2:] != (1, 1):
            return self._op_cont()
        ids = self._ids("i32", (self.rng.randint(1, 5),), a.ne[1])
        return self._put(self.ctx.get_rows(a.tensor, ids.tensor), lambda s: s[a][:, :, s[ids].ravel()],
                         self._bound(a), (a.ne[0], ids.ne[0], 1, 1))

    def _op_mixture(self) -> Value:
        """Rows times the experts that ids name, which come from the caller or from the rows."""
        b = self._rows()
        if not self.home.values["experts"] or b.ne[0] != self.n or b.ne[2:] != (1, 1):
            return self._op_mul_mat()
        if self._bound(b) > 512:
            b = self._clamp(b, SMALL)
        experts, ctx = self.rng.choice(self.home.values["experts"]), self.ctx
        n, rows = self.n, b.ne[1]
        columns = self._view(ctx.reshape(b.tensor, n, 1, rows), b, lambda s: s[b].reshape(1, rows, 1, n),
                             (n, 1, rows, 1), True)
        if self.rng.random() < 0.5:
            ids = self._ids("i32", (1, rows), 3)
        else:
            # No two scores are equal: four times the values, plus which one it is.
            low = self._clamp(b, 3)
            tie = self._put(ctx.arange(0, n), lambda s: np.arange(n).reshape(1, 1, 1, n), n, (n, 1, 1, 1))
            wide = self._put(ctx.scale(low.tensor, float(n)), lambda s: s[low] * n, 3 * n, low.ne)
            scores = self._put(ctx.add(wide.tensor, tie.tensor), lambda s: s[wide] + s[tie], 4 * n, wide.ne)
            first = self._view(ctx.view_2d(scores.tensor, 3, rows, 4 * n), scores, lambda s: s[scores][..., :3],
                               (3, rows, 1, 1), False)
            dense = self._dense(first)
            ids = self._put(ctx.top_k(dense.tensor, 1), lambda s: s[dense].argmax(-1)[..., None], 3, (1, rows, 1, 1),
                            "i32")

        def run(s):
            which = s[ids].ravel()
            picked = [s[experts][0, which[i]].astype(np.float64) @ s[columns][0, i, 0].astype(np.float64)
                      for i in range(rows)]
            return np.array(picked).reshape(1, rows, 1, n)
        out = self._put(ctx.mul_mat_id(experts.tensor, columns.tensor, ids.tensor), run,
                        n * self._bound(b) * self._bound(experts), (n, 1, rows, 1))
        return self._view(ctx.reshape(out.tensor, n, rows), out, lambda s: s[out].reshape(1, 1, rows, n),
                          (n, rows, 1, 1), True)

    def _op_around(self) -> Value:
        """The same memory, read before and after a node has written to it."""
        cache = self.rng.choice(self.home.values["cache"])
        ids = self._ids("i32", (self.m,), cache.ne[1])

        def read() -> Value:
            return self._put(self.ctx.get_rows(cache.tensor, ids.tensor), lambda s: s[cache][:, :, s[ids].ravel()],
                             cache.bound, (cache.ne[0], self.m, 1, 1))
        before = read()
        self.effects.append(before)
        self._op_set_rows()
        after = read()
        return self._put(self.ctx.sub(after.tensor, before.tensor), lambda s: s[after] - s[before], 2 * cache.bound,
                         after.ne)

    def _op_keep(self) -> None:
        """An alloc dependency of a node on an earlier result."""
        found = [v for v in self.of.values() if v.run is not None and v.root is None]
        if len(found) > 1 and found[-1].tensor.op not in ("VIEW", "RESHAPE", "PERMUTE"):
            self.ctx.keep_until(self.rng.choice(found[:-1]).tensor, found[-1].tensor)


UNARY = (("relu", lambda x: np.maximum(x, 0), 0), ("neg", np.negative, 0), ("abs", np.abs, 0),
         ("step", lambda x: np.float32(1) * (x > 0), 1), ("sgn", np.sign, 1), ("round", np.rint, 0))
"""Kind, what it does, and the bound of the result (0: that of the source)."""

OPS = tuple(name[4:] for name in vars(Model) if name.startswith("_op_")) + (
    "binary", "unary", "mul_mat", "inplace", "window", "cpy", "set_rows", "mixture", "binary", "around")
