"""Run a GGUF model over two backends with memory of their own.

    python run_model.py [MODEL.gguf]
"""

import sys

import ggml_sched as gs

source = sys.argv[1] if len(sys.argv) > 1 else gs.llama.random_llama(seed=1)
backends = [gs.CpuBackend(1, name="CPU0"), gs.CpuBackend(1, name="CPU1")]


def place(name, layer):
    """The first two layers on CPU0, the others and what belongs to no layer on CPU1."""
    return backends[0] if layer is not None and layer < 2 else backends[1]


with gs.llama.load(source, backends, n_ctx=128, place=place) as model:
    print(model)
    logits = model.eval([1, 2, 3])
    print("likeliest after the prompt:", logits[-1].argsort()[::-1][:5].tolist())
    model.reset()
    print("generated:", list(model.generate([1, 2, 3], 8)))

    plan = model.scheduler.plan(model.batch_graph(1, 32).graph)
    print(f"\none token: {len(plan.splits)} splits, {len(plan.copies)} copies of {plan.copy_bytes:,} bytes")
    for backend, size in zip(backends, plan.buffer_sizes, strict=True):
        print(f"{backend.name}: {size:,} bytes of arena")
for backend in backends:
    backend.close()
