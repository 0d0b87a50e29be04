"""Time of a token without its kernels, for a model of 12 layers on a backend that has memory and computes nothing.

Targets: 60 us a token, 300 us for a new shape.  Compare minima.
"""

from __future__ import annotations

import pytest

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

SHAPES = {"n_vocab": 320, "n_embd": 64, "n_layer": 12, "n_head": 4, "n_head_kv": 4, "n_ff": 128}
N_CTX = 16384


class Idle:
    """Prepares plans, and runs none."""

    def graph_plan_compute(self, plan) -> None:
        pass

    def graph_compute(self, graph) -> None:
        pass


class IdleCpu(Idle, gs.CpuBackend):
    pass


@pytest.fixture(params=["cpu", "ggml"])
def model(request):
    if request.param == "cpu":
        backend = IdleCpu(1)
    else:
        pytest.importorskip("ggml", reason="a ggml to compile for")
        backend = type("IdleGgml", (Idle, gs.GgmlBackend), {})(n_threads=1)
    with backend, load(random_llama(1, **SHAPES), [backend], N_CTX, kv_type="f16") as model:
        model.eval([1, 2, 3])
        yield model


@pytest.mark.parametrize("what", ["eval", "generate"])
def test_token(benchmark, model, what):
    """`eval` of one token, and one step of `generate`; the cache keeps its padded size."""
    if what == "eval":
        def step():
            model.eval([5], last_only=True)
    else:
        running = [model.generate([1], ignore_eos=True)]

        def step():
            next(running[0])

    def setup():
        if model.n_past > 20:
            model.truncate(8)
            if what == "generate":      # a generation does not go on in a sequence that was changed
                running[0] = model.generate([1], ignore_eos=True)

    step()
    benchmark.pedantic(step, setup=setup, rounds=2000, warmup_rounds=50)
    benchmark.extra_info["nodes"] = len(model.batch_graph(1, 32, 1).graph)


def test_new_shape(benchmark, model):
    """A token of a text that has grown by a padding: its graph is built, planned and prepared."""
    padding = model._runner.cache.padded(1)
    model.eval([5] * (padding - 3))

    def setup():
        if model.n_past > padding:
            model.eval([5] * (padding - 2))
            model.eval([5], last_only=True)
        assert model.n_past % padding == 0

    benchmark.pedantic(lambda: model.eval([5], last_only=True), setup=setup, rounds=200, warmup_rounds=10)
    benchmark.extra_info["nodes"] = len(model.batch_graph(1, padding, 1).graph)


@pytest.mark.parametrize("n_rows", [100, 4000])
def test_cells(benchmark, n_rows):
    """Placing a token and masking a full cache."""
    import numpy as np

    from ggml_sched.llama._cells import Cells

    cells = Cells(N_CTX)
    cells.place(np.arange(n_rows, dtype=np.int32), np.zeros(n_rows, np.int32))
    position, sequence = np.array([n_rows], np.int32), np.zeros(1, np.int32)

    def step():
        cells.place_each([n_rows], [0])
        cells.mask(position, sequence, n_rows + 1, half=True)

    def setup():
        cells.remove(0, n_rows)

    benchmark.pedantic(step, setup=setup, rounds=1000, warmup_rounds=20)
