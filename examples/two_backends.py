"""A network over two dry devices: plan it, verify the plan, explain its decisions."""

import ggml_sched as gs

# The best device first, the host last.  Dry backends have addresses and no memory.
gpu, cpu = gs.DryBackend("GPU", memory=1 << 20), gs.DryBackend("CPU")

weights = {gpu: gs.Context("on the GPU"), cpu: gs.Context("on the CPU")}
embedding = weights[cpu].tensor("q8_0", (256, 1000), "embedding")
up = weights[gpu].tensor("q4_0", (256, 1024), "up")
down = weights[gpu].tensor("q4_0", (1024, 256), "down")
for backend, ctx in weights.items():
    backend.alloc_tensors(ctx)

ctx = gs.Context("network")
tokens = ctx.tensor("i32", 32, "tokens", input=True)
x = ctx.set_name(ctx.get_rows(embedding, tokens), "x")
hidden = ctx.set_name(ctx.relu(ctx.mul_mat(up, x)), "hidden")
y = ctx.set_output(ctx.set_name(ctx.add(ctx.mul_mat(down, hidden), x), "y"))

with gs.Scheduler([gpu, cpu]) as scheduler:
    plan = scheduler.plan(gs.Graph(y))
    plan.verify()  # an independent check of the whole plan; HazardError if it were unsound
    print(plan)
    for tensor in (x, hidden, y):
        print("\n" + plan.explain(tensor))

# A graph that does not fit raises an error with the numbers, before anything is allocated.
with gs.Scheduler([gpu, cpu], budgets={gpu: 100_000}) as scheduler:
    try:
        scheduler.plan(gs.Graph(y))
    except gs.OutOfMemory as error:
        print(f"\n{error}")
