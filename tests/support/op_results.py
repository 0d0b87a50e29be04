"""Helpers of op and backend tests: allocating tensors, computing, and comparing results.

`compute` runs one graph in several ways (addresses, plan or no plan, threads) and asserts bit-equal results, so every
op test is a determinism test as well.  Where ggml is installed and supports the nodes, its results must be near.
"""

import ggml_here
import numpy as np

import ggml_sched as gs
from ggml_sched.graph import quants

FLOATS = ("f32", "f16", "bf16")
QUANTISED = tuple(str(kind) for kind in sorted(quants.QUANTIZED))
KERNELS = "compiled"
"""The kernels that `compute` runs; the fixture `kernels` runs a test with each."""

TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}


def random(rng: np.random.Generator, *ne: int, low: float = -2, high: float = 2) -> np.ndarray:
    """f32 values for a tensor of extents ne: shape reversed."""
    return rng.uniform(low, high, ne[::-1]).astype(np.float32)


def width(least: int, *types: str) -> int:
    """A row length in elements that is a whole number of blocks of every type."""
    return max(least, *(gs.Type[type.upper()].block_size for type in types))


def place(ctx: gs.Context, backend: gs.Backend, gap: int = 0, poison: int | None = None) -> gs.Buffer:
    """Give every tensor of a context an address, `gap` bytes apart, in memory filled with `poison`."""
    roots, total = [], gap
    for tensor in ctx.tensors:
        if tensor.view_src is None:
            roots.append((tensor, total))
            total += -(-tensor.nbytes // 64) * 64 + gap
    buffer = backend.alloc_buffer(total)
    if poison is not None:
        buffer.clear(poison)
    for tensor, offset in roots:
        gs.bind_resident(tensor, buffer, offset)
    return buffer


def set_values(values: dict[gs.Tensor, np.ndarray]) -> None:
    for tensor, array in values.items():
        tensor.set(array)


def raw(tensor: gs.Tensor) -> bytes:
    out = bytearray(tensor.nbytes)
    tensor.backend.get_tensor(tensor, out)
    return bytes(out)


def encoded(tensor: gs.Tensor, array: np.ndarray) -> np.ndarray:
    """An array encoded as the blocks of a quantised tensor, so that it is encoded once and set often; others
    unchanged."""
    if not tensor.type.is_quantized or np.asarray(array).dtype == np.uint8:
        return array
    return quants.quantize(np.asarray(array, np.float32).reshape(tensor.ne[::-1]), tensor.type)


def compute(ctx: gs.Context, out: gs.Tensor, values: dict, ggml: bool = True) -> np.ndarray:
    """Values of `out`, bit-equal over addresses, plans and numbers of threads.

    Those of the compiled kernels are near the oracle's; the oracle's are near ggml's, unless `ggml` is False.
    """
    graph = gs.Graph(out)
    values = {tensor: encoded(tensor, array) for tensor, array in values.items()}
    seen = None
    for n_threads, gap, poison, planned in ((1, 0, 0, False), (2, 192, 0xFF, True), (3, 64, 0x7F, False)):
        with gs.CpuBackend(n_threads, kernels=KERNELS) as backend:
            buffer = place(ctx, backend, gap, poison)
            set_values(values)
            assert all(backend.supports_op(node) for node in graph.nodes)
            if planned:
                plan = backend.graph_plan_create(graph)
                if KERNELS == "compiled":
                    assert plan.n_compiled == sum(map(is_compiled, graph.nodes)), f"{out!r}: compiled nodes"
                backend.graph_plan_compute(plan)
                set_values(values)      # cpy and set_rows have changed their targets
                backend.graph_plan_compute(plan)
                backend.graph_plan_free(plan)
            else:
                backend.graph_compute(graph)
            result, bits = out.numpy(), raw(out)
            if seen is None:
                seen = bits
            elif out.is_contiguous:
                assert bits == seen, (
                    f"{out!r}: other bits with {n_threads} threads, gap {gap}, plan {planned}"
                )
            buffer.close()
    if KERNELS == "compiled":
        check_oracle(ctx, out, values, result)
        if out.op == "MUL_MAT" and out.src[0].type.is_quantized and ggml_here.IS_HERE:
            check_own_product(ctx, out, values, seen)
    elif ggml and ggml_here.IS_HERE:
        check_ggml(ctx, out, values, result)
    return result


NEAR = {"ROPE": (1e-5, 2e-6), "SOFT_MAX": (2e-6, 1e-7), "SUM_ROWS": (1e-5, 3e-5), "MEAN": (1e-5, 1e-6),
        "FLASH_ATTN_EXT": (3e-5, 1e-5), "SSM_CONV": (1e-5, 1e-6), "SSM_SCAN": (2e-5, 1e-5),
        **dict.fromkeys(("UNARY:GELU", "UNARY:GELU_QUICK", "GLU:GEGLU", "GLU:GEGLU_QUICK"), (1.1e-3, 3e-5))}
"""How near to the oracle the compiled kernels' results are: (relative, absolute), 2e-6 and 1e-6 for other ops.

Where results are rounded to f16, another last bit of an f32 may give the neighbouring f16.
"""
ROUNDED = {gs.Type.F16: (1.1e-3, 1e-3), gs.Type.BF16: (8e-3, 1e-3)}
"""Likewise for results of these types."""
COPIES = frozenset({"CPY", "DUP", "CONT", "CONCAT", "REPEAT", "GET_ROWS", "SET_ROWS", "SET", "PAD", "ARGSORT", "TOP_K",
                    "ARGMAX", "DIAG_MASK_INF", "DIAG_MASK_ZERO"})
"""Ops with equal results."""


def is_compiled(node: gs.Tensor) -> bool:
    """Whether a node has a compiled kernel, rather than being left to the oracle."""
    source = node.src[0].type if node.src else node.type
    if node.n_elements == 0:
        return node.computes
    match node.op:
        case "SUM" | "GROUP_NORM" | "SET" | "PAD" | "ARANGE":
            return False
        case "CPY" | "SET_ROWS" if source != node.type:
            return str(node.type) in (*FLOATS, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
        case "CONCAT":
            return not node.type.is_quantized
        case "FLASH_ATTN_EXT":
            return node.src[1].n_elements > 0
        case "MUL_MAT" | "MUL_MAT_ID":
            return node.src[0].n_elements > 0
        case _:
            return node.computes


def check_oracle(ctx: gs.Context, out: gs.Tensor, values: dict, got: np.ndarray) -> None:
    """Assert that compiled kernels computed the nodes, and that the oracle's result is near.

    Matrix products are not compared here: test_kernels_matmul.py compares them with f64, relative to their terms.
    """
    computed = [node for node in gs.Graph(out).nodes if node.computes]
    if any(node.op.startswith("MUL_MAT") for node in computed):
        return
    with gs.CpuBackend(1, kernels="numpy") as backend, place(ctx, backend):
        set_values(values)
        backend.graph_compute(gs.Graph(out))
        want = out.numpy()
    bounds = [(0.0, 0.0)]
    for node in computed:
        if node.op not in COPIES:
            bounds.append(NEAR.get(node.op, (2e-6, 1e-6)))
            bounds += [ROUNDED[t.type] for t in (node, *node.src) if t is not None and t.type in ROUNDED]
    rtol, atol = map(max, zip(*bounds, strict=True))
    np.testing.assert_allclose(got, want, rtol, atol, err_msg=f"{out!r}")


def check_own_product(ctx: gs.Context, out: gs.Tensor, values: dict, want: bytes) -> None:
    """Assert that the kernels give the same bits as a part of ggml's graph, on ggml's threads, each time."""
    for n_threads, gap in ((1, 192), (3, 64)):
        with ggml_here.backend(n_threads, repack=False) as backend, place(ctx, backend, gap, 0xFF):
            backend.own_products = 1
            if not all(backend.supports_op(node) for node in gs.Graph(out).nodes):
                return
            plan = backend.graph_plan_create(gs.Graph(out))
            for _ in range(2):
                set_values(values)
                backend.graph_plan_compute(plan)
                assert raw(out) == want, f"{out!r}: other bits with {n_threads} threads of ggml's"
            backend.graph_plan_free(plan)


def check_ggml(ctx: gs.Context, out: gs.Tensor, values: dict, want: np.ndarray) -> None:
    """Assert that ggml's result is near, if ggml supports the nodes."""
    backend, graph = ggml_here.shared(), gs.Graph(out)
    if not all(backend.supports_op(node) for node in graph.nodes):
        return
    with place(ctx, backend, 64, 0x7F):
        set_values(values)
        backend.graph_compute(graph)
        computed = [node for node in graph.nodes if node.computes]
        error = ggml_here.error_of(out.numpy(), want)
        assert error <= ggml_here.bound_of(computed), f"{computed}: ggml's result is {error:.2e} off"


def stored(array: np.ndarray, type: str) -> np.ndarray:
    """What a tensor of `type` holds once `array` was set, as f64."""
    kind = {"f16": np.float16}.get(type, np.float32)
    if type == "bf16":
        return gs_bf16(np.asarray(array, np.float32)).astype(np.float64)
    if type in QUANTISED:
        member = gs.Type[type.upper()]
        return quants.dequantize(quants.quantize(array, member), member).astype(np.float64)
    return np.asarray(array).astype(kind).astype(np.float64)


def gs_bf16(values: np.ndarray) -> np.ndarray:
    """f32 rounded to bf16 by arithmetic: 8 bits of mantissa, ties to even."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8).astype(np.float32)


def assert_close(got: np.ndarray, want: np.ndarray, type: str = "f32", scale: float | None = None) -> None:
    """|got - want| within the type's relative tolerance of |want| (or of `scale`), NaN and inf alike."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.size == want.size, (got.shape, want.shape)  # leading extents of 1 may be missing
    want = want.reshape(got.shape)
    bound = TOLERANCE[type] * (np.abs(want) + 1 if scale is None else scale)
    with np.errstate(all="ignore"):
        same = (np.abs(got - want) <= bound) | (got == want) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (
        f"{(~same).sum()} of {same.size} differ; first: got {got[~same][0]}, want {want[~same][0]}"
    )
