"""Runs launches of the CUDA kernels over host memory, on an emulated GPU, and compares with the oracle.

Tensors lie in buffers of a CpuBackend, whose addresses the emulated device's kernels read and write: so the oracle
computes over the same memory.  `compute` is `op_results.compute` for these kernels, and insists on the same bits from
threads that run forward, backward and in a shuffled order.  Where kernels are compiled for a sanitizer, each tensor has
memory of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import cupy_exact
import numpy as np
import op_results
import pytest
from cuda_emulator import EmulatedDevice
from cuda_emulator.compile import compiler, sanitizers
from cupy_devices import gemm

import ggml_sched as gs
from ggml_sched.backends.cupy import ops, source
from ggml_sched.backends.cupy.launch import STATE, Builder
from ggml_sched.backends.cupy.ops.library import PRODUCT

if compiler() is None:
    pytest.skip("no C++ compiler for the kernels", allow_module_level=True)

ORDERS = (4711,) if sanitizers() else (0, 4711, 1)
"""Orders in which the threads of a block run: forward, shuffled, backward.  One is enough for a sanitizer."""


@cache
def device(order: int = 0) -> EmulatedDevice:
    return EmulatedDevice(order=order, host_access=True)


@cache
def stream(order: int):
    return device(order).stream()


@cache
def function(kernel: str, order: int):
    return device(order).function(kernel)


def edit_sources(monkeypatch: pytest.MonkeyPatch, folder: Path, *edits: tuple[str, str, str]) -> None:
    """Compile kernels from a copy of their sources in `folder`, with edits (file, text that it has once, new text)."""
    for path in source.KERNELS.glob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        for name, old, new in edits:
            if path.name == name:
                assert text.count(old) == 1
                text = text.replace(old, new)
        (folder / path.name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(source, "KERNELS", folder)
    for name in ("device", "stream", "function"):        # that know no kernels yet
        monkeypatch.setitem(globals(), name, cache(globals()[name].__wrapped__))


def run(builder: Builder, order: int = 0) -> np.void:
    """Run the built launches; returns the device's error word."""
    work, state = device(order).alloc(builder.work_size), np.zeros(1, STATE)
    try:
        for launch in builder.launches:
            args = launch.bound(work.ptr, state.ctypes.data)
            if launch.kernel == PRODUCT:
                gemm(*map(int, args))
                continue
            kernel = function(launch.kernel, order)
            packed = kernel.pack(args)
            kernel.launch(launch.grid, launch.block, packed, launch.shared, stream(order))
            stream(order).synchronize()
    finally:
        work.free()
    assert not state["counters"].any()
    return state["fault"][0]


@contextmanager
def placed(ctx: gs.Context, order: int, gap: int, poison: int) -> Iterator[gs.Backend]:
    """Within the context, the tensors have addresses on a host backend."""
    if sanitizers():
        with cupy_exact.ExactBackend(device(order)) as exact, cupy_exact.place(ctx, exact, poison):
            yield exact
    else:
        with gs.CpuBackend(1) as backend, op_results.place(ctx, backend, gap, poison):
            yield backend


@contextmanager
def filled(ctx: gs.Context, values: dict, gap: int = 0, poison: int | None = None, **options) -> Iterator[gs.Buffer]:
    """Within the context, the tensors of `ctx` lie in one host buffer, those in `values` with their values."""
    with gs.CpuBackend(1, **options) as backend, op_results.place(ctx, backend, gap, poison) as buffer:
        op_results.set_values(values)
        yield buffer


def leaves(ctx: gs.Context, rng: np.random.Generator, n_ids: int = 4) -> dict:
    """Random values of tensors that nothing computes; i32 ones name one of `n_ids` rows."""
    return {t: rng.integers(0, n_ids, t.ne[::-1]).astype(np.int32) if t.type == gs.Type.I32
            else op_results.random(rng, *t.ne) for t in ctx.tensors if t.op == "NONE" and t.view_src is None}


def build(nodes, **options) -> Builder:
    builder = Builder("EMULATED", **options)
    for position, node in enumerate(nodes):
        ops.build(builder, position, node)
    return builder


def build_grouped(nodes, rounds: bool = True, **options) -> Builder:
    """The launches of a graph's nodes, fused where kernels for groups of them exist.  `rounds`: kernels write what
    products read rounded, as in plans."""
    rounded = ops.rounding.results(nodes, options.get("exact", False), options.get("blas", False),
                                   options.get("tensor", True)) if rounds else ()
    builder = Builder("EMULATED", rounded=rounded, **options)
    groups = {group[-1]: group for group in ops.fusion_groups(nodes)}
    inner = {i for group in groups.values() for i in group[:-1]}
    for i, node in enumerate(nodes):
        if i in groups:
            ops.build_group(builder, groups[i], [nodes[j] for j in groups[i]])
        elif i not in inner:
            ops.build(builder, i, node)
    return builder


def placed_launches(ctx: gs.Context, nodes, how=build, **options) -> Builder:
    """Launches that are not to run."""
    with filled(ctx, {}):
        return how(nodes, **options)


def compute(ctx: gs.Context, out: gs.Tensor, values: dict, ggml: bool = True, **options) -> np.ndarray:
    """Values of `out`, checked to be bit-equal over thread orders and addresses; `options` go to the builder."""
    graph, seen = gs.Graph(out), None
    for order, gap, poison in zip(ORDERS, (0, 64, 192), (0, 0x7F, 0xFF), strict=False):
        with placed(ctx, order, gap, poison):
            op_results.set_values(values)
            assert all(ops.supports(node) for node in graph.nodes if node.computes)
            fault = run(build(graph.nodes, **options), order)
            if fault["position"]:
                raise gs.BackendError(f"row {fault['value']} of {fault['limit']}: {graph.nodes[fault['position'] - 1]}")
            result, bits = out.numpy(), op_results.raw(out)
            if seen is None:
                seen = bits
            elif out.is_contiguous:
                assert bits == seen, f"{out!r}: other bits with order {order}"
    return result


def oracle(ctx: gs.Context, out: gs.Tensor, values: dict) -> np.ndarray:
    """Results of the CPU backend's NumPy kernels."""
    with filled(ctx, values, kernels="numpy") as buffer:
        buffer.backend.graph_compute(gs.Graph(out))
        return out.numpy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Normalised mean squared error."""
    got, want = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    return float(((got - want) ** 2).sum() / max((want**2).sum(), 1e-30))


def error_of(ctx: gs.Context, out: gs.Tensor, values: dict, **options) -> float:
    """The error of the kernels, as the oracle has the values."""
    return error(compute(ctx, out, values, **options), oracle(ctx, out, values))
