"""Element-wise ops against f64 formulas: arithmetic, functions, gated units."""

import math

import numpy as np
import pytest
from op_results import FLOATS, assert_close, compute, random, stored

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(1)
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}
SHAPES = [
    ((5, 4, 3, 2), (5, 4, 3, 2)), ((5, 4, 3, 2), (5, 1, 1, 1)), ((5, 4, 3, 2), (1, 4, 1, 2)),
    ((5, 4, 3, 2), (1, 1, 1, 1)), ((6, 4, 3, 4), (3, 2, 1, 2)), ((1, 1, 1, 1), (1, 1, 1, 1)),
    ((0, 4, 3, 2), (0, 4, 1, 1)), ((7, 0, 1, 1), (7, 0, 1, 1)),
]


def tiled(b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    b = b.reshape((1,) * (len(shape) - b.ndim) + b.shape)
    return np.tile(b, [n // m if m else 1 for n, m in zip(shape, b.shape, strict=True)])


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", BINARY)
def test_binary_broadcasts(op, type):
    for ne in SHAPES:
        ctx = gs.Context()
        a, b = ctx.tensor(type, ne[0]), ctx.tensor(type, ne[1])
        x, y = random(RNG, *ne[0]), random(RNG, *ne[1], low=0.5)
        got, held = compute(ctx, getattr(ctx, op)(a, b), {a: x, b: y}), stored(x, type)
        assert_close(got, BINARY[op](held, tiled(stored(y, type), held.shape)), type)


@pytest.mark.spread("op kernels", "type_a type_b kernels")
@pytest.mark.parametrize("type_b", FLOATS)
@pytest.mark.parametrize("type_a", FLOATS)
@pytest.mark.parametrize("op", BINARY)
def test_binary_types(ctx, op, type_a, type_b):
    a, b = ctx.tensor(type_a, (33, 5)), ctx.tensor(type_b, (33, 5))
    x, y = random(RNG, 33, 5), random(RNG, 33, 5, low=0.5)
    got = compute(ctx, getattr(ctx, op)(a, b), {a: x, b: y})
    assert_close(got, BINARY[op](stored(x, type_a), stored(y, type_b)), type_a)


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", BINARY)
def test_binary_of_permuted_and_sliced_operands(ctx, op, type):
    a, b = ctx.tensor(type, (4, 6, 3)), ctx.tensor("f32", (8, 9, 3))
    left = ctx.permute(a, 1, 0, 2, 3)
    right = ctx.view_3d(b, 6, 4, 3, b.nb[1] * 2, b.nb[2], 4)
    x, y = random(RNG, 4, 6, 3), random(RNG, 8, 9, 3, low=0.5)
    got = compute(ctx, getattr(ctx, op)(left, right), {a: x, b: y})
    assert_close(got, BINARY[op](stored(x, type).swapaxes(1, 2), y.astype(float)[:, 0:8:2, 1:7]), type)


def test_binary_in_place_writes_through_to_the_root(ctx):
    a, b = ctx.tensor("f32", (4, 6)), ctx.tensor("f32", (3,))
    rows = ctx.view_2d(a, 3, 2, a.nb[1] * 2, 4)
    x, y = random(RNG, 4, 6), random(RNG, 3)
    got = compute(ctx, ctx.add(ctx.view_2d(ctx.add(rows, b, inplace=True), 3, 2, a.nb[1] * 2), b), {a: x, b: y})
    assert_close(got, x[0:4:2, 1:4].astype(float) + 2 * y)


def test_an_in_place_node_reads_before_it_writes(ctx):
    """The second operand is a row of the first, which the node overwrites."""
    a = ctx.tensor("f32", (300, 400))
    x = random(RNG, 300, 400)
    got = compute(ctx, ctx.add(a, ctx.view_1d(a, 300, 7 * a.nb[1]), inplace=True), {a: x})
    assert_close(got, x.astype(float) + x[7])


def test_large_nodes_are_cut_without_a_seam(ctx):
    for type in FLOATS:
        a, b = ctx.tensor(type, (1000, 3, 70)), ctx.tensor("f32", (1000, 1, 70))
        x, y = random(RNG, 1000, 3, 70), random(RNG, 1000, 1, 70)
        assert_close(compute(ctx, ctx.mul(a, b), {a: x, b: y}), stored(x, type) * y, type)


def test_division_by_zero_and_overflow_follow_ieee(ctx):
    a, b = ctx.tensor("f32", (5,)), ctx.tensor("f32", (5,))
    x, y = [1, -1, 0, 3e38, np.nan], [0, 0, 0, 1e-10, 1]
    got = compute(ctx, ctx.div(a, b), {a: np.float32(x), b: np.float32(y)})
    assert_close(got, [np.inf, -np.inf, np.nan, np.inf, np.nan])


def test_add1_and_add_id(ctx):
    a, one = ctx.tensor("f32", (5, 3)), ctx.tensor("f32", (1,))
    x = random(RNG, 5, 3)
    assert_close(compute(ctx, ctx.add1(a, one), {a: x, one: np.float32([2.5])}), x + 2.5)
    c, b, ids = ctx.tensor("f32", (5, 2, 3)), ctx.tensor("f32", (5, 4)), ctx.tensor("i32", (2, 3))
    y, z, names = random(RNG, 5, 2, 3), random(RNG, 5, 4), np.int32([[0, 3], [1, 1], [2, 0]])
    want = np.stack([[y[t, u] + z[names[t, u]] for u in range(2)] for t in range(3)])
    assert_close(compute(ctx, ctx.add_id(c, b, ids), {c: y, b: z, ids: names}), want)


def test_add_id_of_a_tensor_to_itself(ctx):
    a, ids = ctx.tensor("f32", (3, 4)), ctx.tensor("i32", (4,))
    x, names = random(RNG, 3, 4), np.int32([3, 3, 0, 1])
    assert_close(compute(ctx, ctx.add_id(a, a, ids), {a: x, ids: names}), x + x[names])


SIMPLE = {
    "sqr": lambda x: x * x,
    "sqrt": np.sqrt,
    "log": np.log,
    "scale": lambda x: x * 1.5 - 0.25,
    "clamp": lambda x: np.where(x < -0.5, -0.5, np.where(x > 1, 1, x)),
}


@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("op", SIMPLE)
def test_simple(ctx, op, type):
    arguments = {"scale": (1.5, -0.25), "clamp": (-0.5, 1.0)}.get(op, ())
    for ne in ((7, 3, 2, 2), (1,), (0, 3)):
        a = ctx.tensor(type, ne)
        x = random(RNG, *ne, low=0.1 if op in ("sqrt", "log") else -2)
        assert_close(compute(ctx, getattr(ctx, op)(a, *arguments), {a: x}), SIMPLE[op](stored(x, type)), type)


def test_scale_without_bias_keeps_the_sign_of_zero(ctx):
    a = ctx.tensor("f32", (2,))
    assert np.signbit(compute(ctx, ctx.scale(a, -1.0), {a: np.float32([0, 1])})).all()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def c_round(x):
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def of_halves(formula):
    """As ggml's tables have it: of an f16, rounded to f16, whatever the type."""
    return lambda x: formula(np.float16(x).astype(np.float64)).astype(np.float16).astype(np.float64)


UNARY = {
    "abs": np.fabs,
    "sgn": np.sign,
    "neg": lambda x: -x,
    "step": lambda x: np.heaviside(x, 0),
    "tanh": lambda x: 1 - 2 / (np.exp(2 * x) + 1),
    "elu": lambda x: np.where(x > 0, x, np.exp(x) - 1),
    "relu": lambda x: (x + np.abs(x)) / 2,
    "sigmoid": sigmoid,
    "gelu": of_halves(lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_quick": of_halves(lambda x: x * sigmoid(1.702 * x)),
    "silu": lambda x: x * sigmoid(x),
    "hardswish": lambda x: x * np.clip((x + 3) / 6, 0, 1),
    "hardsigmoid": lambda x: np.clip((x + 3) / 6, 0, 1),
    "exp": lambda x: np.vectorize(math.exp, otypes=[float])(x),
    "gelu_erf": lambda x: np.vectorize(lambda v: v / 2 * math.erfc(-v / math.sqrt(2)), otypes=[float])(x),
    "floor": np.floor,
    "ceil": lambda x: -np.floor(-x),
    "round": c_round,
    "trunc": lambda x: np.sign(x) * np.floor(np.abs(x)),
    "expm1": lambda x: np.exp(x) - 1,
    "softplus": lambda x: np.logaddexp(x, 0),
}


HALVES = ("gelu", "gelu_quick")
"""What is rounded to f16, where the last bit of an f32 may decide between two neighbours."""


@pytest.mark.parametrize("kind", HALVES)
def test_gelu_is_a_function_of_halves(ctx, kind):
    every = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    x = every[np.abs(every) < 10].astype(np.float32)
    a = ctx.tensor("f32", x.shape)
    got, want = compute(ctx, ctx.unary(a, kind), {a: x}), UNARY[kind](x.astype(np.float64))
    assert (got == got.astype(np.float16)).all()
    same = got == want
    assert same.mean() > 0.99
    # A step of f16; far below zero, of what 1 + tanh leaves in f32.
    assert (np.abs(got - want)[~same] <= np.maximum(np.abs(want[~same]) * 2**-10, 10 * 2**-24)).all()
    between = np.nextafter(x, np.float32(np.inf), dtype=np.float32)
    assert (compute(ctx, ctx.unary(a, kind), {a: between}) == got).mean() > 0.99


@pytest.mark.spread("kind kernels", "kind type", "type kernels")
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("kind", UNARY)
def test_unary(ctx, kind, type):
    for ne in ((31, 3, 2), (1,), (4, 0)):
        a = ctx.tensor(type, ne)
        x = random(RNG, *ne, low=-4, high=4)
        tolerance = "f16" if kind in HALVES and type == "f32" else type
        assert_close(compute(ctx, ctx.unary(a, kind), {a: x}), UNARY[kind](stored(x, type)), tolerance)


@pytest.mark.parametrize("kind", UNARY)
def test_unary_of_permuted_and_sliced(ctx, kind):
    a = ctx.tensor("f32", (9, 8, 2))
    x = random(RNG, 9, 8, 2, low=-4, high=4)
    view = ctx.transpose(ctx.view_3d(a, 5, 4, 2, 2 * a.nb[1], a.nb[2], 8))
    assert_close(
        compute(ctx, ctx.unary(view, kind), {a: x}),
        UNARY[kind](x.astype(float)[:, 0:8:2, 2:7].swapaxes(1, 2)),
        "f16" if kind in HALVES else "f32",
    )


@pytest.mark.parametrize(
    "kind", ["silu", "gelu", "gelu_quick", "gelu_erf", "sigmoid", "tanh", "softplus", "elu", "relu"]
)
def test_unary_far_out(ctx, kind):
    a = ctx.tensor("f32", (6,))
    x = np.float32([-1e30, -200, -12, 12, 200, 1e18])
    want = {
        "silu": [0, 0, -12 / (1 + math.exp(12)), 12, 200, 1e18],
        "sigmoid": [0, 0, 0, 1, 1, 1],
        "tanh": [-1, -1, -1, 1, 1, 1],
        "elu": [-1, -1, -1, 12, 200, 1e18],
    }.get(kind, [0, 0, 0, 12, 200, 1e18])
    assert_close(compute(ctx, ctx.unary(a, kind), {a: x}), want, "f32")


def test_round_is_exact_next_to_a_half(ctx):
    a = ctx.tensor("f32", (6,))
    x = np.float32([0.49999997, 0.5, -0.5, 2.5, -2.5, 8388609])
    assert compute(ctx, ctx.unary(a, "round"), {a: x}).tolist() == [0, 1, -1, 3, -3, 8388609]


def test_xielu(ctx):
    a = ctx.tensor("f32", (8,))
    words = np.float32([0.8, 1.2, 0.5, -1e-6]).view(np.int32).tolist()
    out = ctx.restore("UNARY:XIELU", "f32", (8, 1, 1, 1), (4, 32, 32, 32), (a,), op_params=(15, *words))
    x = random(RNG, 8).astype(np.float64)
    want = np.where(x > 0, 1.2 * x * x + 0.5 * x, (np.expm1(np.minimum(x, -1e-6)) - x) * 0.8 + 0.5 * x)
    assert_close(compute(ctx, out, {a: x}), want)


GATES = {
    "reglu": "relu",
    "geglu": "gelu",
    "swiglu": "silu",
    "geglu_erf": "gelu_erf",
    "geglu_quick": "gelu_quick",
}


@pytest.mark.spread("kind kernels", "type kernels")
@pytest.mark.parametrize("type", FLOATS)
@pytest.mark.parametrize("kind", GATES)
def test_glu(ctx, kind, type):
    gate = UNARY[GATES[kind]]
    tolerance = "f16" if GATES[kind] in HALVES and type == "f32" else type
    for ne in ((14, 3, 2), (2,), (6, 0), (128, 4), (2200, 37)):
        n = ne[0] // 2
        a, b, c = ctx.tensor(type, ne), ctx.tensor(type, (n, *ne[1:])), ctx.tensor(type, (n, *ne[1:]))
        x, y, z = random(RNG, *ne), random(RNG, n, *ne[1:]), random(RNG, n, *ne[1:])
        full, left, right = (stored(v, type) for v in (x, y, z))
        values = {a: x, b: y, c: z}
        assert_close(compute(ctx, ctx.glu(a, kind), values), gate(full[..., :n]) * full[..., n:], tolerance)
        assert_close(
            compute(ctx, ctx.glu(a, kind, swapped=True), values), gate(full[..., n:]) * full[..., :n], tolerance
        )
        assert_close(compute(ctx, ctx.glu_split(b, c, kind), values), gate(left) * right, tolerance)


def test_glu_of_strided_rows(ctx):
    a = ctx.tensor("f32", (12, 6))
    view = ctx.view_2d(a, 8, 3, 2 * a.nb[1], 8)
    x = random(RNG, 12, 6)
    rows = x.astype(float)[0:6:2, 2:10]
    assert_close(compute(ctx, ctx.swiglu(view), {a: x}), UNARY["silu"](rows[:, :4]) * rows[:, 4:])


@pytest.mark.parametrize("type", FLOATS)
def test_swiglu_oai(type):
    for n, rows in ((50, 1), (5, 3), (1100, 37)):
        ctx = gs.Context()
        a, b = ctx.tensor(type, (n, rows)), ctx.tensor(type, (n, rows))
        x, y = random(RNG, n, rows, low=-6, high=6), random(RNG, n, rows, low=-6, high=6)
        gate, factor = np.minimum(stored(x, type), 3), np.clip(stored(y, type), -3, 3)
        want = gate * sigmoid(1.702 * gate) * (factor + 1)
        assert_close(compute(ctx, ctx.swiglu_oai(a, b, 1.702, 3.0), {a: x, b: y}), want, type)
