"""How many threads compute beside others: by what computes took, and how much CPU time they had."""

from __future__ import annotations

import pytest

pytest.importorskip("ggml_sched.backends.ggml._ggml")

from ggml_sched.backends.ggml._ggml import Crowd  # noqa: E402

TOKEN, OTHER = 1, 2
"""Programs."""


class Machine:
    """CPUs of which others keep some busy; a compute lasts as long as its slowest thread takes."""

    def __init__(self, n: int) -> None:
        self.n, self.busy, self.crowd = n, 0, Crowd()
        self.used: list[int] = []

    def compute(self, n_threads: int, what: int = TOKEN, work: float = 0.01) -> float:
        used = self.crowd.threads(n_threads)
        free = self.n - self.busy
        shares = used > free        # some threads have half a CPU, and the others wait for them
        wall = work / used * (4 if shares else 1)
        cpu = wall * (used - (0.6 * (used - free) if shares else 0))
        self.crowd.note(what, n_threads, used, wall, cpu)
        self.used.append(used)
        return wall

    def run(self, n_threads: int, times: int) -> float:
        """Seconds for each compute."""
        return sum(self.compute(n_threads) for _ in range(times)) / times


def test_alone_all_threads_compute():
    machine = Machine(4)
    machine.run(4, 100)
    assert set(machine.used) == {4}


@pytest.mark.parametrize(("cpus", "busy"), [(2, 1), (4, 1), (8, 2)])
def test_beside_others_fewer_compute_and_all_of_them_afterwards(cpus, busy):
    machine = Machine(cpus)
    idle = machine.run(cpus, 20)
    machine.busy = busy
    crowded = machine.run(cpus, 400)
    assert crowded < 0.6 * 4 * idle             # with all threads it would be 4 * idle
    assert machine.used[-1] < cpus
    machine.busy = 0
    machine.run(cpus, 70)
    assert set(machine.used[-3:]) == {cpus}


def test_one_compute_that_waited_changes_nothing():
    """A page that is read from a file, for one."""
    machine = Machine(2)
    machine.run(2, 5)
    machine.crowd.note(TOKEN, 2, 2, 0.02, 0.01)
    machine.run(2, 5)
    machine.crowd.note(TOKEN, 2, 2, 0.02, 0.01)
    machine.run(2, 5)
    assert set(machine.used) == {2}


def test_fewer_threads_that_are_slower_are_given_up():
    crowd, used = Crowd(), []
    for _ in range(200):
        n = crowd.threads(4)
        used.append(n)
        crowd.note(TOKEN, 4, n, 0.01 if n == 4 else 0.02, 0.01)       # it waits for itself
    assert used.count(4) > 180 and used.count(4) < 200


def test_computes_of_other_graphs_are_not_compared():
    crowd = Crowd()
    for _ in range(2):
        crowd.note(TOKEN, 2, crowd.threads(2), 0.01, 0.012)
    assert crowd.threads(2) == 1
    crowd.note(OTHER, 2, 1, 1.0, 1.0)           # longer, but another graph
    assert crowd.threads(2) == 1


def test_short_computes_say_nothing():
    crowd = Crowd()
    for _ in range(10):
        assert crowd.threads(2) == 2
        crowd.note(TOKEN, 2, 2, 1e-4, 1e-5)


def test_one_thread_stays_one():
    crowd = Crowd()
    for _ in range(10):
        assert crowd.threads(1) == 1
        crowd.note(TOKEN, 1, 1, 0.01, 0.001)
