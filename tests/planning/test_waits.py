"""The waits of a program: every conflict is ordered by them, and none of them could be left out.

Checked against a slow model: the steps of several computes as a graph, an edge for every queue and every wait.
"""

import random
from itertools import combinations

import numpy as np

from ggml_sched.planning.waits import Access, Wait, order

ROUNDS = 6


class Case:
    """Steps in queues, and the memory that each accesses: (step, memory, start, stop, writes)."""

    def __init__(self, rng: random.Random) -> None:
        n, n_queues = rng.randint(2, 7), rng.randint(1, 3)
        self.queues = [rng.randrange(n_queues) for _ in range(n)]
        self.optional = [rng.random() < 0.25 for _ in range(n)]
        n_memories = rng.randint(1, 3)
        self.owner = [rng.choice([-1, *range(n_queues)]) for _ in range(n_memories)]
        self.period = [rng.choice([1, 1, 1, 2, 3]) for _ in range(n_memories)]
        self.exclusive = [q for q in range(n_queues) if rng.random() < 0.2]
        self.touched = []
        for step in range(n):
            for _ in range(rng.randint(1, 2)):
                memory, start = rng.randrange(n_memories), rng.randint(0, 6)
                self.touched.append((step, memory, start, start + rng.randint(1, 4), rng.random() < 0.4))

    def waits(self) -> list[tuple[Wait, ...]]:
        columns = [np.array(column) for column in zip(*self.touched, strict=True)]
        access = Access(*columns, np.array(self.owner), np.array(self.period), self.exclusive)
        return order(self.queues, self.optional, access)

    def conflicts(self) -> set[tuple[int, int]]:
        """Pairs of steps, numbered through all computes, of which the first must be done before the second begins."""
        n, found = len(self.queues), set()
        for a, b in combinations(range(n * ROUNDS), 2):
            i, j = a % n, b % n
            if self.queues[i] == self.queues[j]:
                continue
            if any(self._clash(x, y, b // n - a // n) for x in self.touched if x[0] == i
                   for y in self.touched if y[0] == j) or self._share_a_backend(i, j):
                found.add((a, b))
        return found

    def _clash(self, x, y, apart: int) -> bool:
        """Whether two accesses overlap and one writes; a copy slot is the same memory every `copies` computes."""
        return (x[1] == y[1] and (x[4] or y[4]) and x[2] < y[3] and y[2] < x[3] and apart % self.period[x[1]] == 0)

    def _share_a_backend(self, i: int, j: int) -> bool:
        """Whether both steps use one backend that runs one operation at a time, through its queue or its memory."""
        def used(step):
            return {self.queues[step]} | {self.owner[m] for s, m, *_ in self.touched if s == step}
        return any(b in used(i) and b in used(j) for b in self.exclusive)

    def is_ordered(self, waits, runs: list[bool]) -> bool:
        """Whether queues and waits order every conflict of the steps that run; others are left out, and do not wait.

        A wait for a step that is left out is a wait for the step before it in its queue.
        """
        n, total = len(self.queues), len(self.queues) * ROUNDS
        before: list[set[int]] = [set() for _ in range(total)]
        for b in range(total):
            ahead = [a for a in range(b) if self.queues[a % n] == self.queues[b % n]]
            named = ahead[-1:]
            if runs[b]:
                named += [w.step + (b // n - w.back) * n for w in waits[b % n]]
            for a in named:
                if a >= 0:
                    before[b] |= {a} | before[a]
        return all(a in before[b] for a, b in self.conflicts() if runs[a] and runs[b])


def test_every_conflict_is_ordered_and_every_wait_is_needed():
    n_waits = 0
    for seed in range(100):
        rng = random.Random(seed)
        case = Case(rng)
        waits = case.waits()
        n_steps = len(case.queues)
        # Optional steps are left out at random.
        patterns = [[True] * (n_steps * ROUNDS), [not case.optional[k % n_steps] for k in range(n_steps * ROUNDS)]]
        patterns += [[not case.optional[k % n_steps] or rng.random() < 0.5 for k in range(n_steps * ROUNDS)]
                     for _ in range(3)]
        assert all(case.is_ordered(waits, runs) for runs in patterns), seed
        for k, wait in [(k, wait) for k, found in enumerate(waits) for wait in found]:
            fewer = [tuple(w for w in found if (j, w) != (k, wait)) for j, found in enumerate(waits)]
            runs = [not case.optional[j % n_steps] or j % n_steps in (k, wait.step) for j in range(n_steps * ROUNDS)]
            n_waits += 1
            assert not all(case.is_ordered(fewer, runs) for runs in (*patterns, runs)), (seed, k, wait)
    assert n_waits > 100


def test_who_only_reads_does_not_wait():
    access = Access(*map(np.array, ([0, 1], [0, 0], [0, 0], [8, 8], [False, False], [0], [1])), [])
    assert order([0, 1], [False, False], access) == [(), ()]
