"""Random graphs, scheduled in every way there is, give what they give in memory of their own, without a plan.

One seed is one life of a scheduler: backends of several kinds, graphs that share weights and caches, and a sequence of
allocations, computes, queued computes, switches and loaded plans.  `GGML_SCHED_SEED=n` repeats round n alone,
`GGML_SCHED_SOAK=n` makes n times as many rounds.
"""

import contextlib
import random

import numpy as np
from devices import poisoned
from random_graphs import Built, decode, many_residents
from random_results import REFUSALS, VIEWS, kept, raw, set_all
from rounds import attack, rounds

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

EVERY_RUN, SOAK = 30, 4000
OFFLOADS = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS")


def some(rng: random.Random, of, share: float) -> frozenset[str]:
    return frozenset(x for x in of if rng.random() < share)


def make_backends(rng: random.Random, seed: int) -> list[gs.Backend]:
    """One to three; the last one refuses nothing."""
    world, made = DeferredQueues(seed), []
    n, late = rng.randint(1, 3), rng.choice([0, 0, 0.5, 1])
    for k in range(n):
        refused = some(rng, REFUSALS, rng.choice([0, 0.3])) if k < n - 1 else frozenset()
        offloads = some(rng, OFFLOADS, rng.choice([0, 0.5]))
        if rng.random() < late:
            made.append(poisoned(f"L{k}", refused, offloads, base=DeferredBackend, queues=world,
                                 copies=rng.random() < 0.5))
        else:
            made.append(poisoned(f"P{k}", refused, offloads))
            made[-1].concurrent_copies = rng.random() < 0.5
    for a in made:
        if not a.asynchronous and rng.random() < 0.3:
            a.reads = [b for b in made if not b.asynchronous]
    return made


class Life:
    """A scheduler over random backends, and some graphs that share residents.

    Each graph has a twin, computed without a plan, with every tensor in memory of its own.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, seed = rng, rng.randrange(1 << 32)
        self.backends, self.alone = make_backends(rng, seed), gs.CpuBackend(1)
        self.pairs: list[tuple[Built, Built]] = []
        first: tuple[Built | None, Built | None] = None, None
        for _ in range(rng.randint(1, 3)):
            recipe = many_residents(decode(rng.randbytes(10 + 4 * rng.choice([3, 8, 8, 20]))))
            for _ in range(rng.choice([1, 1, 2])):
                ours, twin = (Built(recipe, len(self.backends), like=other) for other in first)
                self.pairs.append((ours, twin))
                first = self.pairs[0]
        usages = [rng.choice(["any", "weights"]) for _ in self.backends]
        self.buffers = [backend.alloc_tensors(home, usage) for home, backend, usage in zip(
            first[0].homes, self.backends, usages, strict=True)]
        for home in first[1].homes:
            self.alone.alloc_tensors(home)
        for ours, twin in self.pairs:
            self.alone.alloc_tensors(twin.ctx)
            for built in (ours, twin):
                set_all(built, only_residents=True)
        options = {"policy": rng.choice(["default", "default", "seed"]), "copies": rng.randint(1, 3),
                   "plan_cache": rng.choice([0, 1, 2, 8]), "reorder": rng.random() < 0.2}
        self.scheduler = gs.Scheduler(self.backends, **options)
        for ours, _ in self.pairs:
            for node in ours.graph.nodes:
                able = [b for b in self.backends if b.supports_op(node)]
                if rng.random() < 0.1 and node.view_src is None:
                    self.scheduler.set_tensor_backend(node, rng.choice(able))
        self.current: Built | None = None
        self.last: dict[gs.Tensor, np.ndarray] = {}
        self.read = 0

    def close(self) -> None:
        self.scheduler.close()
        for owned in (*self.buffers, *self.backends):
            owned.close()

    def play(self, tmp_path, rounds: int = 6) -> None:
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.3:
            scheduler.reserve(*(ours.graph for ours, _ in rng.sample(self.pairs, rng.randint(1, len(self.pairs)))))
        for _ in range(rounds):
            ours, twin = rng.choice(self.pairs)
            if rng.random() < 0.1:
                scheduler.plan(ours.graph).save(tmp_path / "plan.json")
                scheduler.adopt(gs.load_plan(tmp_path / "plan.json", ours.graph, self.backends))
                self.current = None
            if ours is not self.current or rng.random() < 0.2:
                scheduler.alloc(ours.graph)
                self.current, self.last = ours, {}
            self.compute(ours, twin, rng.choice([0, 0, 1, 2, 5]))

    def compute(self, ours: Built, twin: Built, queued: int) -> None:
        written = {t.view_src for t in ours.graph.nodes if t.op not in VIEWS}
        for _ in range(max(queued, 1)):
            seed = self.rng.randrange(1 << 32)
            for (t, array), like in zip(ours.values(seed).items(), twin.values(seed), strict=True):
                if t in ours.residents or t.buffer is None:
                    continue
                keeps = t in self.last and "input" in t.flags and t not in written and self.rng.random() < 0.3
                if not keeps:
                    t.set(array)
                    self.last[t] = array
                like.set(self.last[t])
            (self.scheduler.compute_async if queued else self.scheduler.compute)(ours.graph)
            self.alone.graph_compute(twin.graph)
        self.scheduler.synchronize()
        self.check(ours, twin)

    def check(self, ours: Built, twin: Built) -> None:
        """Every result that can be read is the twin's; those that nothing has changed since can be."""
        lasting = set(kept(ours))
        for i, (t, like) in enumerate(zip(ours.ctx.tensors, twin.ctx.tensors, strict=True)):
            if t.op == "NONE" or t not in ours.graph:
                continue
            try:
                found = raw(t)
            except gs.HazardError:
                assert i not in lasting, t      # other tensors reused its memory
                continue
            self.read += 1
            assert found == raw(like), t
        for t, like in zip(ours.shared.values(), twin.shared.values(), strict=True):
            assert raw(t) == raw(like), f"resident {t!r}"


@rounds(EVERY_RUN, SOAK)
def test_graphs_give_what_their_twins_give(rounds, tmp_path):
    def live(rng: random.Random) -> None:
        with contextlib.closing(Life(rng)) as life:
            life.play(tmp_path)
            assert life.read

    attack(live, rounds)
