"""Plans that drawings and pages are tested with."""

import functools

import configs

import ggml_sched as gs


@functools.cache
def recorded(name: str, configuration: str, policy: str = "default") -> gs.Plan:
    """The plan of a sample graph; shared between tests."""
    path = configs.graph_path(name)
    count = configs.graph_file(name)["meta"]["n_layer"]
    at = configs.Configured(configuration, count)
    graph = gs.load_graph(path, place=at.place)
    with gs.Scheduler(at.backends, policy=policy) as scheduler:
        return scheduler.plan(graph)


def small(*backends: gs.Backend, nodes: int = 2, outputs: bool = False) -> gs.Plan:
    """A plan of unnamed element-wise nodes, in place of one another unless all are outputs."""
    ctx = gs.Context()
    t = ctx.tensor("f32", (64, 4), "x", input=True)
    for _ in range(nodes):
        t = ctx.set_output(ctx.sqr(t)) if outputs else ctx.sqr(t)
    with gs.Scheduler(backends or [gs.DryBackend("A")]) as scheduler:
        return scheduler.plan(gs.Graph(t))


def refused() -> gs.Plan:
    """A plan in which a node falls back to the host."""
    gpu, cpu = gs.DryBackend("GPU", supports_op=lambda node: node.op != "UNARY:RELU"), gs.DryBackend("CPU")
    weights = gs.Context()
    up, down = weights.tensor("f32", (64, 128), "blk.0.ffn_up.weight"), weights.tensor("f32", (128, 64), "w_down")
    gpu.alloc_tensors(weights)
    ctx = gs.Context()
    x = ctx.tensor("f32", (64, 8), "x", input=True)
    hidden = ctx.set_name(ctx.relu(ctx.set_name(ctx.mul_mat(up, x), "ffn_up-0")), "ffn_relu-0")
    graph = gs.Graph(ctx.set_output(ctx.set_name(ctx.mul_mat(down, hidden), 'result <"out">')))
    with gs.Scheduler([gpu, cpu]) as scheduler:
        return scheduler.plan(graph)
