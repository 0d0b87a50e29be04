"""Random graphs: expected results that are computed without a plan, and their comparison with computed ones."""

import numpy as np
from random_graphs import Built, Recipe

import ggml_sched as gs

VIEWS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
REFUSALS = ("ADD", "MUL", "SCALE", "UNARY:RELU", "CPY", "CONT", "RMS_NORM", "SET_ROWS", "MUL_MAT", "GET_ROWS")
"""Ops that tests let a backend refuse."""


def raw(tensor: gs.Tensor) -> bytes:
    """The bytes of a contiguous tensor; of any other tensor its elements."""
    return tensor.numpy().tobytes()


def set_all(built: Built, only_residents: bool = False, seed: int = 7) -> None:
    for tensor, values in built.values(seed).items():
        if tensor in built.residents or (not only_residents and tensor.buffer is not None):
            tensor.set(values)


def settle(built: Built, sched: gs.Scheduler, backends: list, wishes: list[tuple[int, int]],
           usage: str = "weights") -> None:
    """Allocate each backend's residents; assign tensors by `wishes`: (pick of a tensor, pick of a backend)."""
    for ctx, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(ctx, usage)
    for pick, backend in wishes:
        tensors = built.graph.tensors if sched.policy == "default" else built.graph.nodes
        sched.set_tensor_backend(tensors[pick % len(tensors)], backends[backend % len(backends)])


def kept(built: Built) -> list[int]:
    """Positions in ctx.tensors of nodes whose results are defined after a compute: flagged or without readers, and not
    changed afterwards by a node that writes into their memory."""
    graph = built.graph
    read = {s for t in graph.nodes for s in (*t.src, t.view_src, *t.deps)}
    found = []
    for i, t in enumerate(built.ctx.tensors):
        if t in graph and t.op != "NONE" and (t not in read or "output" in t.flags):
            found.append(i)
    return found


def in_memory_of_their_own(recipe: Recipe, n_homes: int = 1, seed: int = 7) -> tuple[dict[int, bytes], list[bytes]]:
    """(bytes of each kept node, bytes of each resident) after one compute without any planning."""
    built = Built(recipe, n_homes)
    with gs.CpuBackend(1) as backend:
        for ctx in (*built.homes, built.ctx):
            backend.alloc_tensors(ctx)
        set_all(built, seed=seed)
        backend.graph_compute(built.graph)
        return ({i: raw(built.ctx.tensors[i]) for i in kept(built)}, [raw(t) for t in built.residents])


def check(built: Built, expected: tuple[dict[int, bytes], list[bytes]], note: str) -> None:
    results, residents = expected
    for i, bits in results.items():
        assert raw(built.ctx.tensors[i]) == bits, f"{note}: {built.ctx.tensors[i]!r}"
    for tensor, bits in zip(built.residents, residents, strict=True):
        assert raw(tensor) == bits, f"{note}: resident {tensor!r}"


def check_three_computes(built: Built, recipe: Recipe, sched: gs.Scheduler, queued: int, note: str) -> None:
    """Compute the allocated graph twice with the same inputs and once with others, queued or not; check the results
    after each."""
    expected = in_memory_of_their_own(recipe, len(built.homes))
    for attempt in range(3):
        if attempt == 2:
            expected = in_memory_of_their_own(recipe, len(built.homes), seed=8)
        set_all(built, only_residents=attempt == 1, seed=8 if attempt == 2 else 7)
        if queued:
            sched.compute_async(built.graph)
            sched.synchronize()
        else:
            sched.compute(built.graph)
        check(built, expected, f"compute {attempt}, {note}")


def writes_to_residents(built: Built) -> bool:
    return any(t.view_src in built.residents and t.op not in VIEWS for t in built.graph.nodes)


def disturb(built: Built) -> None:
    """Overwrite the inputs of which no result is a view."""
    if any(built.ctx.tensors[i].op in VIEWS for i in kept(built)):
        return
    for tensor, values in built.values().items():
        if tensor not in built.residents and tensor.buffer is not None and tensor.type == gs.Type.F32:
            tensor.set(np.full_like(values, 1e9))


def take_turns(sched: gs.Scheduler, cases: list[tuple[Built, tuple]], turns: int, queue, note: str) -> None:
    """Allocate and compute graphs in turn, several rounds, through `queue`; compare with each graph's expected
    results."""
    for attempt in range(turns):
        for built, expected in cases:
            sched.alloc(built.graph).verify()
            # Residents that the graph changes must be set again before the next compute, inputs that were overwritten.
            set_all(built, only_residents=attempt == 1)
            for _ in range(1 if writes_to_residents(built) else 3):
                queue(built.graph)
            if attempt:
                disturb(built)
            sched.synchronize()
            check(built, expected, f"turn {attempt}, {note}")
