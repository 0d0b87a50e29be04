"""ssm_conv and ssm_scan against naive f64 loops."""

import numpy as np
import pytest
from op_results import assert_close, compute, random

import ggml_sched as gs

pytestmark = pytest.mark.usefixtures("kernels")

RNG = np.random.default_rng(9)


def conv(sx: np.ndarray, c: np.ndarray) -> np.ndarray:
    n_seqs, d_inner, length = sx.shape
    d_conv = c.shape[1]
    out = np.zeros((n_seqs, length - d_conv + 1, d_inner))
    for s, t, i in np.ndindex(out.shape):
        out[s, t, i] = sum(float(sx[s, i, t + k]) * float(c[i, k]) for k in range(d_conv))
    return out


@pytest.mark.parametrize(("d_conv", "d_inner", "n_tokens", "n_seqs"),
                         [(4, 12, 5, 2), (1, 3, 4, 1), (4, 6, 1, 3), (3, 300, 130, 1), (4, 5, 0, 1)])
def test_ssm_conv(ctx, d_conv, d_inner, n_tokens, n_seqs):
    sx, c = ctx.tensor("f32", (d_conv - 1 + n_tokens, d_inner, n_seqs)), ctx.tensor("f32", (d_conv, d_inner))
    x, f = random(RNG, *sx.ne[:3]), random(RNG, d_conv, d_inner)
    assert_close(compute(ctx, ctx.ssm_conv(sx, c), {sx: x, c: f}), conv(x, f), scale=10)


def scan(s, x, dt, a, b, c, ids) -> np.ndarray:
    n_seqs, n_tokens, n_head, head_dim = x.shape
    n_group = b.shape[2]
    y, kept = np.zeros(x.shape), np.zeros((n_seqs, *s.shape[1:]))
    for q in range(n_seqs):
        state = s[ids[q]].astype(float)
        for t in range(n_tokens):
            for h in range(n_head):
                step = np.log1p(np.exp(float(dt[q, t, h])))
                g = h // (n_head // n_group)
                for d in range(head_dim):
                    state[h, d] = state[h, d] * np.exp(step * a[h]) + step * x[q, t, h, d] * b[q, t, g]
                    y[q, t, h, d] = state[h, d] @ c[q, t, g]
        kept[q] = state
    return np.concatenate([y.reshape(-1), kept.reshape(-1)])


SCANS = {
    "mamba": (16, 1, 24, 1, 16, 5, 2),
    "mamba2": (8, 4, 6, 2, 1, 5, 2),
    "one token": (16, 1, 40, 1, 16, 1, 1),
    "many heads": (16, 1, 1500, 1, 16, 2, 1),
    "no tokens": (4, 2, 3, 1, 4, 0, 2),
}


def make_scan(d_state, head_dim, n_head, n_group, a_rows, n_tokens, n_seqs):
    ctx = gs.Context()
    extents = {"s": (d_state, head_dim, n_head, 4), "x": (head_dim, n_head, n_tokens, n_seqs),
               "dt": (n_head, n_tokens, n_seqs), "a": (a_rows, n_head), "b": (d_state, n_group, n_tokens, n_seqs),
               "c": (d_state, n_group, n_tokens, n_seqs)}
    given = {name: ctx.tensor("f32", ne, name) for name, ne in extents.items()}
    values = {given[name]: random(RNG, *ne) for name, ne in extents.items()}
    values[given["a"]] = -np.abs(values[given["a"]])
    ids = ctx.tensor("i32", (n_seqs,), "ids")
    return ctx, ctx.ssm_scan(*given.values(), ids), values, ids


@pytest.mark.parametrize("form", SCANS.values(), ids=SCANS.keys())
def test_ssm_scan(form):
    ctx, out, values, ids = make_scan(*form)
    names = np.array([3, 1][: form[-1]], np.int32)
    values[ids] = names
    assert_close(compute(ctx, out, values), scan(*list(values.values())[:-1], names), scale=30)


def test_steps_above_20_are_their_own_softplus():
    """As ggml has it; exp would overflow at 89."""
    ctx, out, values, ids = make_scan(1, 1, 2, 1, 1, 1, 1)
    s, x, dt, a, b, c = list(values)
    got = compute(ctx, out, {s: np.zeros(s.ne[::-1]), x: np.ones((2, 1)), dt: np.array([100.0, 20.5]), a: np.zeros(2),
                             b: np.ones(1), c: np.ones(1), ids: [0]})
    assert got.tolist() == [100.0, 20.5, 100.0, 20.5]


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 30])
def test_a_state_that_is_not_there_is_an_error_before_anything_is_written(wrong):
    ctx, out, values, ids = make_scan(*SCANS["mamba"])
    with gs.CpuBackend() as backend:
        backend.alloc_tensors(ctx)
        for tensor, array in values.items():
            tensor.set(array)
        ids.set(np.array([0, wrong], np.int32))
        out.set(np.full(out.ne[0], 7.0))
        with pytest.raises(gs.BackendError, match=str(wrong)):
            backend.graph_compute(gs.Graph(out))
        assert (out.numpy() == 7).all()


def test_other_numbers_of_kept_states_are_refused():
    """ggml has a form that keeps several states of each sequence: its result is another."""
    ctx, out, _, _ = make_scan(*SCANS["mamba"])
    backend = gs.CpuBackend(1)
    for kept, supported in ((0, True), (1, True), (2, False), (-1, False)):
        node = ctx.restore("SSM_SCAN", "f32", out.ne, out.nb, out.src, op_params=(kept,))
        assert backend.supports_op(node) is supported


def test_a_scan_reads_views_of_one_projection(ctx):
    """B and C lie side by side in the rows of one product, as mamba's graph has them."""
    d_state, n_head, n_tokens = 4, 6, 3
    both = ctx.tensor("f32", (2 * d_state, n_tokens))
    row = both.nb[1]
    b, c = (ctx.view_4d(both, d_state, 1, n_tokens, 1, 4 * d_state, row, row * n_tokens, 4 * d_state * i)
            for i in range(2))
    s, x = ctx.tensor("f32", (d_state, 1, n_head)), ctx.tensor("f32", (1, n_head, n_tokens))
    dt, a, ids = ctx.tensor("f32", (n_head, n_tokens)), ctx.tensor("f32", (d_state, n_head)), ctx.tensor("i32", (1,))
    v = {t: random(RNG, *t.ne) for t in (both, s, x, dt, a)}
    pair = v[both].reshape(1, n_tokens, 1, 2 * d_state)
    want = scan(v[s], v[x], v[dt][0], v[a][0, 0], pair[..., :d_state], pair[..., d_state:], [0])
    assert_close(compute(ctx, ctx.ssm_scan(s, x, dt, a, b, c, ids), v | {ids: [0]}), want, scale=np.abs(want).max())


@pytest.mark.parametrize("d_state", [3, 4, 8, 11])
def test_an_infinite_input_of_ssm_scan_gives_no_nan_from_lanes_without_a_state(ctx, d_state):
    state, ids = ctx.tensor("f32", (d_state, 1, 1, 1)), ctx.tensor("i32", (1,))
    x, dt, a = ctx.tensor("f32", (1, 1, 1, 1)), ctx.tensor("f32", (1, 1, 1)), ctx.tensor("f32", (1, 1))
    b, c = (ctx.tensor("f32", (d_state, 1, 1, 1)) for _ in range(2))
    graph, seen = gs.Graph(ctx.ssm_scan(state, x, dt, a, b, c, ids)), []
    for kernels in ("numpy", "compiled"):
        with gs.CpuBackend(1, kernels=kernels) as backend, backend.alloc_tensors(ctx, usage="any"):
            for tensor, value in ((state, 1), (x, np.inf), (dt, 1), (a, -0.5), (b, 1), (c, 1)):
                tensor.set(np.full(tensor.ne[::-1], value, np.float32))
            ids.set(np.zeros(1, np.int32))
            backend.graph_compute(graph)
            seen.append(graph.nodes[-1].numpy())
    assert np.array_equal(*seen) and np.all(np.isinf(seen[0]))
