"""Small models for tests of placement, paths through their chains, and real plans of what a solution says."""

import numpy as np

import ggml_sched as gs
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict
from ggml_sched.placement.chain import Choice, Solution
from ggml_sched.placement.devices import Device
from ggml_sched.placement.pricing import price

CPU = Device("CPU", 1 << 40, 80e9, 1e12, host=True)
GPU = Device("GPU0", 1 << 40, 256e9, 20e12)
FAST = Device("GPU1", 1 << 40, 1000e9, 40e12)


class Parts:
    """Makes residents and stages of a model in a context."""

    def __init__(self, name="model"):
        self.ctx = gs.Context(name)

    def resident(self, name, *ne, kind="weight", type="f32"):
        plain = self.ctx.tensor(type, ne)
        return self.ctx.restore("NONE", type, plain.ne, plain.nb, name=name, resident=kind)

    def embedding(self, width, tokens, rows=64, name="embd"):
        ids = self.ctx.tensor("i32", (tokens,), "tokens", input=True)
        return self.ctx.get_rows(self.resident(name, width, rows), ids)

    def norm(self, x, name):
        return self.ctx.mul(self.ctx.rms_norm(x, 1e-6), self.resident(name, x.ne[0]))

    def feed_forward(self, x, name, hidden):
        """Two matrices with a norm before and a residual around them."""
        up = self.ctx.mul_mat(self.resident(f"{name}.up", x.ne[0], hidden), self.norm(x, f"{name}.norm"))
        down = self.ctx.mul_mat(self.resident(f"{name}.down", hidden, x.ne[0]), self.ctx.silu(up))
        return self.ctx.add(down, x)

    def attention(self, x, name, cells, mask, index, cache=None):
        """One head over a cache, which is written, or another layer's, which is only read; the matrices q, k and o."""
        ctx, width = self.ctx, x.ne[0]
        normal = self.norm(x, f"{name}.norm")
        q = ctx.mul_mat(self.resident(f"{name}.q", width, width), normal)
        if cache is None:
            cache = self.resident(f"{name}.cache", width, cells, kind="kv")
            k = ctx.mul_mat(self.resident(f"{name}.k", width, width), normal)
            cache_now = ctx.set_rows(cache, k, index)
        else:
            cache_now = cache
        scores = ctx.soft_max(ctx.mul_mat(cache_now, q), mask)
        seen = ctx.mul_mat(ctx.cont(ctx.transpose(cache_now)), scores)
        return ctx.add(ctx.mul_mat(self.resident(f"{name}.o", width, width), seen), x)


def decoder(layers=2, width=64, hidden=128, cells=32, tokens=1, tied=False):
    """A graph of sequential blocks: embedding, attention and feed-forward in turn, output."""
    parts = Parts()
    x = parts.embedding(width, tokens)
    mask = parts.ctx.tensor("f32", (cells, tokens), "mask", input=True)
    index = parts.ctx.tensor("i64", (tokens,), "index", input=True)
    embd = x.src[0]
    for k in range(layers):
        x = parts.attention(x, f"l{k}.attn", cells, mask, index)
        x = parts.feed_forward(x, f"l{k}.ffn", hidden)
    head = embd if tied else parts.resident("out", width, 64)
    return gs.Graph(parts.ctx.mul_mat(head, parts.norm(x, "out.norm")))


def windowed(layers=4, tokens=1, cells=32):
    """A decoder whose layers read two masks by turns, as with a sliding window."""
    parts = Parts()
    x, ctx = parts.embedding(64, tokens), parts.ctx
    masks = [ctx.tensor("f32", (cells, tokens), name, input=True) for name in ("mask", "mask of a window")]
    index = ctx.tensor("i64", (tokens,), "index", input=True)
    for k in range(layers):
        normal = parts.norm(x, f"l{k}.norm")
        keys = ctx.set_rows(parts.resident(f"l{k}.keys", 64, cells, kind="kv"),
                            ctx.mul_mat(parts.resident(f"l{k}.k", 64, 64), normal), index)
        query = ctx.mul_mat(parts.resident(f"l{k}.q", 64, 64), normal)
        scores = ctx.soft_max(ctx.mul_mat(keys, query), masks[k % 2])
        seen = ctx.mul_mat(parts.resident(f"l{k}.values", cells, 64, kind="kv"), scores)
        x = ctx.add(ctx.mul_mat(parts.resident(f"l{k}.o", 64, 64), seen), x)
        x = parts.feed_forward(x, f"l{k}.ffn", 128)
    return gs.Graph(ctx.mul_mat(parts.resident("out", 64, 64), parts.norm(x, "out.norm")))


def path_for(chain, multipliers):
    """The cheapest path if a byte of each device costs its multiplier: the solver's subproblem, done plainly."""
    value, back = chain.start.copy(), []
    for c in chain.classes:
        cost = chain.cost[c] + (chain.memory[c] @ np.asarray(multipliers, float))[:, None, None]
        pattern = cost.argmin(0)
        total = value[:, None] + np.take_along_axis(cost, pattern[None], 0)[0]
        back.append((pattern, total.argmin(0)))
        value = total.min(0)
    state, path = int(value.argmin()), []
    for pattern, before in reversed(back):
        path.append(Choice(int(pattern[before[state], state]), int(before[state]), state))
        state = int(before[state])
    return solution_of(chain, path[::-1])


def solution_of(chain, path):
    """A path with its cost and its bytes."""
    cost = chain.start[path[0].state_in] + sum(
        chain.cost[c][choice.pattern, choice.state_in, choice.state_out]
        for c, choice in zip(chain.classes, path, strict=True))
    memory = sum(chain.memory[c][choice.pattern] for c, choice in zip(chain.classes, path, strict=True))
    return Solution(float(cost), 0.0, tuple(path), tuple(map(int, memory)), ())


def planned(graph, names, nodes, devices, budgets=None):
    """The real plan of a copy of `graph` with residents at {name: device} and nodes at {tensor: device}."""
    backends = [device.backend for device in devices]
    placed = graph_from_dict(graph_to_dict(graph), lambda t: backends[names[t.name]])
    scheduler = gs.Scheduler(backends, budgets=budgets and {backends[d]: n for d, n in budgets.items()})
    for node, device in nodes.items():
        scheduler.set_tensor_backend(placed.nodes[graph.position_of(node)], backends[device])
    return scheduler.plan(placed)


def real_price(tables, chain, solution, link, budgets=None, every=False):
    """The seconds of the goal by real plans of what a solution says, and those plans; `every`: also of graphs that the
    goal does not count."""
    assignment = tables.assignment(chain, solution)
    seconds, plans = 0.0, []
    for weight, of, nodes in zip(tables.weights, tables.graphs, assignment.nodes, strict=True):
        if weight or every:
            plans.append(planned(of.graph, assignment.residents, nodes, tables.devices, budgets))
            seconds += weight * price(plans[-1], tables.devices, link).seconds
    return seconds, plans
