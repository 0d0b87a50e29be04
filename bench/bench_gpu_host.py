"""Host time of a replayed token of llama-2-7b: scheduler and CUDA backend over an emulated device.

Target: 60 us for "cuda" less "device", which are the emulated device's own calls; it runs no kernel.  "cpu" is the
peer: the same graph on a CPU backend whose kernels are idle.  All three set the inputs, compute and fetch the
logits.  Compare minima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import samples
from cuda_emulator import EmulatedDevice

import ggml_sched as gs

GRAPHS = ("llama-2-7b-decode", "llama-2-7b-fa-decode")
"""1,158 nodes, and with flash attention 998."""
MEMORY = 1 << 40


TYPES = {"i32": np.int32, "i64": np.int64, "f16": np.float16, "f32": np.float32}


class IdleCpu(gs.CpuBackend):
    """Supports every node and computes nothing."""

    def graph_plan_create(self, graph) -> object:
        return graph

    def graph_plan_compute(self, plan) -> None:
        pass

    def graph_plan_free(self, plan) -> None:
        pass


@contextmanager
def token(backend: gs.Backend, name: str) -> Iterator[tuple[Callable[[], None], gs.Graph]]:
    """A function that sets a token's inputs, computes it and reads its logits; planned, and run a few times already."""
    graph = gs.load_graph(samples.DATA / "graphs" / f"{name}.json.gz", place=lambda t: backend)
    with gs.Scheduler([backend]) as sched:
        sched.alloc(graph)
        inputs = [(t, bytes(t.nbytes)) for t in graph.tensors if "input" in t.flags and t.buffer is not None]
        for t, data in inputs:
            t.set(np.frombuffer(data, TYPES[str(t.type)]))
        logits = graph.nodes[-1]
        out = np.empty(logits.n_elements, np.float32)
        waits = not backend.asynchronous

        def step() -> None:
            for t, data in inputs:
                t.stage(data)
            sched.compute(graph, wait=waits)
            if not logits.fetch(out):
                backend.get_tensor(logits, out)

        for _ in range(5):
            step()
        yield step, graph


@pytest.mark.benchmark(group="a replayed token")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("what", ["cuda", "cpu"])
def test_token(benchmark, what, name):
    device = EmulatedDevice(dry=True, memory=MEMORY)
    with gs.CupyBackend(device) if what == "cuda" else IdleCpu(1) as backend, token(backend, name) as (step, graph):
        before, n = dict(vars(device.counts)), 0

        def counted() -> None:
            nonlocal n
            n += 1
            step()

        benchmark.pedantic(counted, rounds=2000, warmup_rounds=50)      # once, not timed
        spent = {name: (count - before[name]) / n for name, count in vars(device.counts).items()}
        benchmark.extra_info |= {"nodes": len(graph), **spent}
        assert what == "cpu" or (spent["graph_launches"], spent["captures"], spent["launches"]) == (1, 0, 0)


@pytest.mark.benchmark(group="a replayed token")
@pytest.mark.parametrize("name", GRAPHS)
def test_device(benchmark, name):
    """The device calls of such a token alone: loads, the graph, the error word, logits, a wait."""
    device = EmulatedDevice(dry=True, memory=MEMORY)
    with gs.CupyBackend(device) as backend, token(backend, name):
        stream, memory, pinned = backend.stream, device.alloc(1 << 20), device.pinned(1 << 20)
        graph = next(plan.graph for plan in backend._plans if plan.graph is not None)
        parts = [pinned[256 * i : 256 * i + 8] for i in range(5)]
        parts.append(pinned[4096 : 4096 + 8192])
        word, logits = pinned[1 << 14 : (1 << 14) + 16], pinned[1 << 15 : (1 << 15) + 4 * 32000]
        address = memory.ptr

        def step() -> None:
            for part in parts:
                stream.copy_in(address, part)
            graph.launch(stream)
            stream.copy_out(logits, address)
            stream.copy_out(word, address)
            stream.synchronize()

        benchmark.pedantic(step, rounds=2000, warmup_rounds=50)
