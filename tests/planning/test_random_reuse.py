"""Random chains of large results of which parts are used on in place: memory handed over through views at any offset.

They verify, and compute the bits that the first generation's placement computes, planned afresh and at the places of
a reserved graph of the same wiring with larger tensors and views elsewhere.
"""

import random

import numpy as np
import pytest

import ggml_sched as gs

OPS = ("relu", "sqr", "neg", "abs")


class Chain:
    """`steps` are (kind, number): the wiring.  `offsets` are eighths of what each view may skip: the rest of it."""

    def __init__(self, steps: list[tuple[str, int]], offsets: list[int], width: int, rows: int) -> None:
        ctx, places = gs.Context("chain"), iter(offsets)
        self.x = ctx.tensor("f32", (width, 1), "x", input=True)
        self.made = []
        held, cur = [self.x], self.x
        for kind, number in steps:
            if kind == "grow":
                row = ctx.view_1d(cur, width, cur.nb[1] * (cur.ne[1] - 1))
                cur = ctx.repeat(row, ctx.tensor("f32", (width, rows), "like"))
            elif kind == "part":
                n = max(1, cur.ne[1] * number // 8)
                skipped = (cur.ne[1] - n) * next(places) // 8
                cur = ctx.view_2d(cur, width, n, cur.nb[1], skipped * cur.nb[1])
            elif kind == "add":
                cur = ctx.add(cur, ctx.view_1d(held[number % len(held)], width))
            elif kind == "hold":
                held.append(cur)
            else:
                cur = getattr(ctx, kind)(cur)
            self.made.append(cur)
        out = ctx.sum_rows(ctx.cont(ctx.transpose(cur)))
        for t in held[-2:]:
            out = ctx.add(ctx.cont(ctx.transpose(ctx.view_1d(t, width))), out)
        self.out = ctx.set_output(out)
        self.graph = gs.Graph(out)

    def inner_heirs(self, plan: gs.Plan) -> int:
        """How many nodes reuse memory in place elsewhere than at its front."""
        data, found = plan.data, 0
        for t in self.made:
            i = self.graph.id_of(t)
            found += data.is_inplace(i) and data.offset(i) != data.offset(data.root(i))
        return found

    def computed(self, scheduler: gs.Scheduler) -> tuple[gs.Plan, np.ndarray]:
        plan = scheduler.alloc(self.graph)
        plan.verify()
        self.x.set(np.linspace(-1.5, 2, self.x.ne[0], dtype=np.float32))
        for _ in range(2):
            scheduler.compute(self.graph)
        return plan, self.out.numpy()


def drawn(rng: random.Random) -> tuple[list[tuple[str, int]], list[int]]:
    steps: list[tuple[str, int]] = [("grow", 0)]
    for _ in range(rng.randrange(3, 16)):
        kind = rng.choice(("grow", "part", "part", "part", "add", "hold", *OPS))
        steps.append((kind, rng.randrange(1, 8)))
        if kind == "part":
            steps.append((rng.choice(OPS), 0))
    return steps, [rng.randrange(9) for kind, _ in steps if kind == "part"]


@pytest.mark.parametrize("n", [70, pytest.param(150, marks=pytest.mark.soak)])
def test_random_heirs_of_parts_compute_the_same_afresh_and_replayed(n):
    fresh = moved = planned_anew = 0
    for seed in range(n):
        rng = random.Random(seed)
        steps, offsets = drawn(rng)
        width, rows = rng.choice((16, 32, 40, 64)), rng.randrange(2, 17)
        smaller = rng.choice([w for w in (16, 24, 32, 64, width) if w <= width]), rng.randrange(1, rows + 1)
        elsewhere = offsets if rng.randrange(2) else [rng.randrange(9) for _ in offsets]
        with gs.Scheduler([gs.CpuBackend()]) as scheduler:
            reserved = Chain(steps, offsets, width, rows)
            scheduler.reserve(reserved.graph)
            plan, results = reserved.computed(scheduler)
            fresh += reserved.inner_heirs(plan) > 0
            chain = Chain(steps, elsewhere, *smaller)
            plan, again = chain.computed(scheduler)
            moved += plan.methods == ("replayed",) and chain.inner_heirs(plan) > 0
            planned_anew += plan.methods != ("replayed",)
        for other, found in ((Chain(steps, offsets, width, rows), results), (Chain(steps, elsewhere, *smaller), again)):
            with gs.Scheduler([gs.CpuBackend()], "seed") as scheduler:
                np.testing.assert_array_equal(other.computed(scheduler)[1], found)
    # Such nodes occur.
    assert fresh >= n // 6 and moved >= n // 11 and planned_anew >= n // 40, (fresh, moved, planned_anew)


def random_chain(seed: int) -> Chain:
    rng = random.Random(seed)
    return Chain(*drawn(rng), rng.choice((16, 32, 40, 64)), rng.randrange(2, 17))


def on_devices(*chains: Chain) -> gs.Plan:
    """A plan in which each chain has a device of its own."""
    devices = [gs.DryBackend(f"device {k}") for k in range(len(chains))]
    scheduler = gs.Scheduler(devices)
    for chain, device in zip(chains, devices, strict=True):
        for t in chain.graph.tensors:
            scheduler.set_tensor_backend(t, device)
    return scheduler.plan(gs.Graph(*(chain.out for chain in chains)))


@pytest.mark.parametrize("n", [300, pytest.param(3000, marks=pytest.mark.soak)])
def test_arenas_of_two_devices_are_as_small_as_each_alone(n):
    """The modes of reuse are tried for all arenas at once, and a try ends early once it can make none smaller: not when
    it cannot make one of them smaller."""
    chains = [random_chain(seed) for seed in range(n)]
    alone = [on_devices(chain) for chain in chains]
    for k in range(n - 1):
        sizes = on_devices(random_chain(k), random_chain(k + 1)).buffer_sizes
        assert sizes == alone[k].buffer_sizes + alone[k + 1].buffer_sizes, f"chains {k} and {k + 1}"
    # More than one mode is the best of some.
    assert n // 10 < sum(chain.inner_heirs(plan) > 0 for chain, plan in zip(chains, alone, strict=True)) < n * 9 // 10
