"""Random graphs over CUDA backends and the CPU: queued, in a ring, alternating, over simulators of several seeds.

Fresh device memory is full of a byte pattern, kernels run when they must, and streams interleave as a seed picks: a
missing event, an early reuse of memory or of staging shows as other bits than those of one device where every tensor
has memory of its own.  The CPU gets ops that both compute to the last bit.
"""

from dataclasses import replace
from functools import partial

import cupy_devices as devices
import numpy as np
from devices import device
from hypothesis import assume, example, given
from hypothesis import strategies as st
from random_graphs import Built, Recipe, many_residents, quick, recipes
from random_results import check, kept, raw, set_all, settle, take_turns

import ggml_sched as gs

EXACT = ("ADD", "SUB", "MUL", "DUP", "CPY", "CONT", "REPEAT", "CONCAT", "SET_ROWS", "GET_ROWS")
"""Ops with the same bits on both, those of zeros' signs included."""


GOES_BACK = Recipe(((0, 0),), ((1, 0, 0, 0), (26, 0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0)), (), ())
"""A product of the CPU that a device adds to, and reads again."""


def refusing(on, name, **options) -> gs.CupyBackend:
    """A backend whose `refuses` and `offloads` are sets of ops."""
    return device(gs.CupyBackend, name, refuses=(), offloads=(), device=on, **options)


def in_memory_of_their_own(recipe: Recipe, n_homes: int = 1) -> tuple[dict[int, bytes], list[bytes]]:
    """(bytes of each kept node, bytes of each resident) after one compute without any planning, on one device."""
    built = Built(recipe, n_homes)
    with devices.backend() as cuda:
        assume(all(map(cuda.supports_op, built.graph.nodes)))
        for ctx in (*built.homes, built.ctx):
            cuda.alloc_tensors(ctx)
        set_all(built)
        cuda.graph_compute(built.graph)
        return ({i: raw(built.ctx.tensors[i]) for i in kept(built)}, [raw(t) for t in built.residents])


@quick(20)
@given(recipes())
def test_results_are_those_of_the_cpu(recipe):
    """Of each node, given what the CPU has computed so far: the norm of a sum that is nothing but rounding would differ
    as it likes."""
    ours, theirs = Built(recipe, keeps=False), Built(recipe, keeps=False)
    with devices.backend() as cuda, gs.CpuBackend(1) as cpu:
        assume(all(map(cuda.supports_op, ours.graph.nodes)))
        for built, backend in ((ours, cuda), (theirs, cpu)):
            for ctx in (*built.homes, built.ctx):
                backend.alloc_tensors(ctx, usage="any")
            set_all(built)
        for node, twin in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
            if not node.computes:
                continue
            largest = 0.0
            for mine, its in zip((node.view_src, *node.src), (twin.view_src, *twin.src), strict=True):
                if mine is not None:
                    data = bytearray(its.root.nbytes)
                    cpu.get_tensor(its.root, data)
                    cuda.set_tensor(mine.root, data)
                    found = np.abs(its.numpy().astype(np.float64))
                    largest = max(largest, found.max(initial=0, where=np.isfinite(found)))
            cuda.graph_compute(gs.GraphView([node]))
            cpu.graph_compute(gs.GraphView([twin]))
            got, want = node.numpy().astype(np.float64), twin.numpy().astype(np.float64)
            with np.errstate(invalid="ignore"):
                same = (got == want) | np.isnan(got) & np.isnan(want)
                assert (same | (np.abs(got - want) <= 1e-4 * (1 + np.abs(want)) + 2e-5 * largest)).all(), f"{node!r}"


@quick(15)
@given(recipes(), st.integers(0, 1000), st.booleans(), st.booleans())
def test_a_scheduler_on_one_device(recipe, seed, capture, overlap):
    """Computed four times: eagerly, captured, and replayed; then another graph grows the arena, and it is back."""
    expected = in_memory_of_their_own(recipe)
    built, other = Built(recipe), Built(replace(recipe, steps=recipe.steps * 2))
    with devices.backend(seed=seed, capture=capture, overlap=overlap) as cuda, gs.Scheduler([cuda]) as sched:
        assume(all(map(cuda.supports_op, other.graph.nodes)))
        cuda.alloc_tensors(built.homes[0])
        cuda.alloc_tensors(other.homes[0])
        for attempt in range(2):
            sched.alloc(built.graph)
            set_all(built)
            for turn in range(4):
                set_all(built, only_residents=True)     # the graph may have written into them
                sched.compute(built.graph, wait=turn % 2 == 0)
                check(built, expected, f"compute {attempt}, {turn}")
            sched.alloc(other.graph)
            set_all(other)
            sched.compute(other.graph)


@quick(20)
@given(st.lists(recipes(), min_size=1, max_size=2), st.integers(1, 2), st.integers(1, 3),
       st.lists(st.sets(st.sampled_from(EXACT), max_size=5), min_size=2, max_size=2),
       st.sets(st.sampled_from(("MUL_MAT", "ADD"))), st.integers(0, 1000), st.booleans(), st.booleans())
@example([GOES_BACK], 1, 1, [{"MUL"}, set()], set(), 0, False, False)
def test_devices_and_the_cpu_share_graphs(pair, n_devices, copies, refused, offloads, seed, peers, queued):
    pair = [*map(many_residents, pair)]
    expected = [in_memory_of_their_own(recipe, n_devices + 1) for recipe in pair]
    made = devices.devices(n_devices, seed, peers)
    cuda = [devices.new(on, f"CUDA{i}", refusing, overlap=seed % 2 == 1) for i, on in enumerate(made)]
    for backend, ops in zip(cuda, refused, strict=False):
        backend.refuses, backend.offloads = set(ops), set(offloads)
    backends = [*cuda, gs.CpuBackend(1)]
    with gs.Scheduler(backends, copies=copies) as sched:
        cases = []
        for recipe, results in zip(pair, expected, strict=True):
            built = Built(recipe, len(backends))
            settle(built, sched, backends, [])
            # Others have to be computed by the kernels that gave the results.
            for node in built.graph.nodes:
                if node.computes and node.op not in EXACT:
                    sched.set_tensor_backend(node, cuda[len(node.name) % n_devices])
            cases.append((built, results))
        queue = sched.compute_async if queued else partial(sched.compute, wait=False)
        take_turns(sched, cases, 3, queue, f"{copies} copies")
    for backend in backends:
        backend.close()
