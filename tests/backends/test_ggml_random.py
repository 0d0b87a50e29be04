"""Random graphs on ggml, with the CPU backend for nodes that ggml does not compute: however they are planned, the same
bits as node by node, with every tensor in memory of its own."""

import ggml_here
import numpy as np
import pytest
from devices import POISON, device
from hypothesis import example, given
from hypothesis import strategies as st
from random_graphs import Built, Recipe, quick, recipes
from random_results import kept, set_all

import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes

if not ggml_here.IS_HERE:
    pytest.skip(ggml_here.WHY_NOT, allow_module_level=True)

GGML = {"n_threads": 2, "library": ggml_here.LIBRARY, "own_products": False}
"""Without own products, whose bits differ from ggml's, and which take only weights: a tensor that another backend has
computed is one for the split that reads it.  test_ggml_products.py has these."""


class NodeByNode(gs.GgmlBackend):
    """Computes node by node: with the CPU backend's kernels at the given `positions`, else with ggml."""

    def graph_compute(self, graph):
        for position, node in enumerate(graph.nodes):
            if position not in self.positions:
                super().graph_compute(gs.GraphView([node]))
            else:
                run_nodes([node], lambda buffer: buffer.memory)


def poisoned() -> gs.GgmlBackend:
    return device(gs.GgmlBackend, "GGML", poison=POISON, **GGML)


def results(built: Built) -> dict[int, bytes]:
    found = {i: built.ctx.tensors[i].numpy().tobytes() for i in kept(built)}
    return found | {-1 - i: t.numpy().tobytes() for i, t in enumerate(built.residents)}


def of_the_cpu(plan: gs.Plan) -> set[int]:
    """Positions of the nodes that a plan gives to the CPU backend."""
    return {k for k, node in enumerate(plan.graph.nodes) if node.computes and plan.backend_of(node).name == "CPU"}


def in_memory_of_their_own(recipe: Recipe, positions: set[int] = frozenset()) -> dict[int, bytes]:
    built = Built(recipe)
    with np.errstate(all="ignore"), NodeByNode(**GGML) as backend:
        backend.positions = positions
        for ctx in (*built.homes, built.ctx):
            backend.alloc_tensors(ctx)
        set_all(built)
        backend.graph_compute(built.graph)
        return results(built)


def check(built: Built, want: dict[int, bytes]) -> None:
    got = results(built)
    for i, bits in want.items():
        if got[i] != bits:
            raise AssertionError((i, built.ctx.tensors[i], np.frombuffer(got[i], np.float32),
                                  np.frombuffer(bits, np.float32)))


@quick(150)
@given(recipes(), st.sampled_from(["seed", "default"]))
def test_a_scheduler_on_ggml_and_cpu(recipe, policy):
    built = Built(recipe)
    with poisoned() as ggml, gs.CpuBackend(1, kernels="numpy") as cpu, \
            gs.Scheduler([ggml, cpu], policy=policy) as sched:
        ggml.alloc_tensors(built.homes[0])
        sched.alloc(built.graph)
        want = in_memory_of_their_own(recipe, of_the_cpu(sched.plan(built.graph)))
        set_all(built)
        for _ in range(3):
            set_all(built, only_residents=True)
            sched.compute(built.graph)
            check(built, want)


@quick(60)
@given(recipes(), st.booleans())
def test_a_graph_allocator_loads_leafs_in_time(recipe, planned):
    with poisoned() as ggml:
        built = Built(recipe)
        if not all(ggml.supports_op(node) for node in built.graph.nodes):
            return
        want = in_memory_of_their_own(recipe)
        ggml.alloc_tensors(built.homes[0])
        with gs.TensorAllocator.measure(64) as measuring:
            size = gs.GraphAllocator().alloc_graph(measuring, built.graph)
        with gs.TensorAllocator(ggml.alloc_buffer(4 * size + 64)) as tallocr:
            gs.GraphAllocator().alloc_graph(tallocr, built.graph)
            set_all(built)
            for _ in range(2):
                set_all(built, only_residents=True)
                if planned:
                    plan = ggml.graph_plan_create(built.graph)
                    ggml.graph_plan_compute(plan)
                    ggml.graph_plan_free(plan)
                else:
                    ggml.graph_compute(built.graph)
                check(built, want)


@quick(60)
@example(Recipe(leafs=((0, 0),), steps=((0, 0, 0, 0), (0, 0, 0, 0), (28, 8, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0),
                                        (14, 0, 51, 0)), outputs=(), ends=()), 1)
@given(recipes(), st.sampled_from([1, 2]))
def test_computing_in_the_background(recipe, copies):
    built = Built(recipe)
    with poisoned() as ggml, gs.CpuBackend(1, kernels="numpy") as cpu, \
            gs.Scheduler([ggml, cpu], copies=copies) as sched:
        ggml.alloc_tensors(built.homes[0])
        sched.alloc(built.graph)
        want = in_memory_of_their_own(recipe, of_the_cpu(sched.plan(built.graph)))
        set_all(built)
        for _ in range(2):
            set_all(built, only_residents=True)
            sched.compute_async(built.graph)
            sched.synchronize()
        check(built, want)
