"""`plan.traffic()` counts what one compute copies over each link: what the backends are seen to do."""

import numpy as np
from devices import devices

import ggml_sched as gs


def test_a_chain_over_three_backends(ctx):
    backends = devices(3)
    held, x = [], ctx.tensor("f32", (64, 4), "x", input=True)
    y = x
    for k, backend in enumerate(backends):
        weights = gs.Context()
        w = weights.tensor("f32", (64, 64), f"w{k}")
        held.append((weights, backend.alloc_tensors(weights)))
        w.set(np.eye(64, dtype=np.float32))
        y = ctx.mul_mat(w, y)
    graph = gs.Graph(ctx.set_output(y))
    with gs.Scheduler(backends) as scheduler:
        plan = scheduler.plan(graph)
        assert plan.traffic() == {("D0", "D1"): (1, 64 * 4 * 4), ("D1", "HOST"): (1, 64 * 4 * 4)}
        assert plan.traffic()["D0", "D1"].nbytes == 1024


def test_weights_that_stay_where_they_were_copied_do_not_count(ctx):
    gpu, host = devices(2)
    weights = gs.Context()
    w = weights.tensor("f32", (64, 64), "w")
    host.alloc_tensors(weights)
    w.set(np.eye(64, dtype=np.float32))
    x = ctx.tensor("f32", (64, 4), "x", input=True)
    z = ctx.relu(ctx.mul_mat(w, x))
    graph = gs.Graph(ctx.set_output(z))
    with gs.Scheduler([gpu, host]) as scheduler:
        scheduler.set_tensor_backend(z.src[0], gpu)
        scheduler.set_tensor_backend(z, gpu)
        plan = scheduler.plan(graph)
        assert any(copy.tensor is w for copy in plan.copies)
        kept = any(step.kind == "copy" and step.if_changed for step in plan.program.steps)
        assert plan.traffic() == ({} if kept else {("HOST", "D0"): (1, 64 * 64 * 4)})


def test_a_result_that_is_computed_elsewhere_goes_back(ctx):
    gpu, host = devices(2)
    home = gs.Context()
    state = home.tensor("f32", (32,), "state")
    host.alloc_tensors(home)
    x = ctx.tensor("f32", (32,), "x", input=True)
    node = ctx.cpy(ctx.sqr(x), state)
    with gs.Scheduler([gpu, host]) as scheduler:
        scheduler.set_tensor_backend(node.src[0], gpu)
        scheduler.set_tensor_backend(node, gpu)
        plan = scheduler.plan(gs.Graph(node))
        assert any(step.kind == "write back" for step in plan.program.steps)
        assert plan.traffic() == {("HOST", "D0"): (1, 128), ("D0", "HOST"): (1, 128)}
