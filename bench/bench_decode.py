"""One decode step, the CPU computing: the synthetic model, and a small real layout."""

from __future__ import annotations

import pytest
import samples

import ggml_sched as gs

MODELS = {"random": None, "tiny-llama-q4_0": samples.DATA / "models" / "tiny-llama-q4_0.gguf"}


@pytest.mark.parametrize("n_backends", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_decode_step(benchmark, name, n_backends):
    backends = [gs.CpuBackend(1, name=f"CPU{i}") for i in range(n_backends)]
    source = MODELS[name] or gs.llama.random_llama()
    with gs.llama.load(source, backends, n_ctx=64) as model:

        def setup():
            # The graph stays the same: 32 rows of the cache, whatever came before.
            model.reset()
            model.eval([1, 2, 3])

        benchmark.pedantic(model.eval, ([4],), setup=setup, rounds=50, warmup_rounds=3)
        plan = model.scheduler.plan(model.batch_graph(1, 32).graph)
        benchmark.extra_info |= {"nodes": len(plan.graph), "splits": len(plan.splits),
                                 "copies": len(plan.copies), "bytes": sum(plan.buffer_sizes)}
    for backend in backends:
        backend.close()
