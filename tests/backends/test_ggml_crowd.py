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
        self.n, self.busy, self.crowd, self.now = n, 0, Crowd(), 100.0
        self.used: list[int] = []

    def compute(self, n_threads: int, what: int = TOKEN, work: float = 0.01) -> float:
        used = self.crowd.threads(n_threads, self.now)
        free = self.n - self.busy
        shares = used > free        # some threads have half a CPU, and the others wait for them
        wall = work / used * (4 if shares else 1)
        self.note(n_threads, used, wall, wall * (used - (0.6 * (used - free) if shares else 0)), what)
        return wall

    def note(self, n_threads: int, used: int, wall: float, cpu: float, what: int = TOKEN) -> None:
        self.now += wall
        self.used.append(used)
        self.crowd.note(what, n_threads, used, wall, cpu, self.now)

    def run(self, n_threads: int, seconds: float) -> float:
        """Seconds for each compute."""
        start, n = self.now, 0
        while self.now < start + seconds:
            self.compute(n_threads)
            n += 1
        return (self.now - start) / n


def test_alone_all_threads_compute():
    machine = Machine(4)
    machine.run(4, 5)
    assert set(machine.used) == {4}


@pytest.mark.parametrize(("cpus", "busy"), [(2, 1), (4, 1), (8, 2)])
def test_beside_others_fewer_compute_and_all_of_them_afterwards(cpus, busy):
    machine = Machine(cpus)
    idle = machine.run(cpus, 1)
    machine.busy = busy
    crowded = machine.run(cpus, 10)
    assert crowded < 0.6 * 4 * idle             # with all threads it would be 4 * idle
    assert max(machine.used[-20:]) < cpus or min(machine.used[-20:]) < cpus
    machine.busy = 0
    machine.run(cpus, 2.5)
    assert set(machine.used[-3:]) == {cpus}


def test_what_waited_for_a_moment_changes_nothing():
    """A page that is read from a file, for one."""
    machine = Machine(2)
    for _ in range(3):
        machine.run(2, 0.1)
        machine.note(2, 2, 0.015, 0.003)
        machine.run(2, 0.1)
    assert set(machine.used) == {2}


def test_computes_are_looked_at_together():
    """The clocks of threads are coarse where computes are short."""
    machine = Machine(2)
    for k in range(100):
        machine.note(2, machine.crowd.threads(2, machine.now), 0.003, 0.006 if k % 3 else 0.003)
    assert set(machine.used) == {2}


def test_fewer_threads_that_are_slower_are_given_up():
    machine = Machine(4)
    for _ in range(2000):
        used = machine.crowd.threads(4, machine.now)
        machine.note(4, used, 0.01 if used == 4 else 0.02, 0.01)       # it waits for itself
    assert 0.9 * 2000 < machine.used.count(4) < 2000


def test_computes_of_other_graphs_are_not_compared():
    machine = Machine(2)
    for _ in range(10):
        machine.note(2, machine.crowd.threads(2, machine.now), 0.011, 0.012)
    assert machine.crowd.threads(2, machine.now) == 1
    machine.note(2, 1, 0.1, 0.1, OTHER)         # longer, but another graph
    assert machine.crowd.threads(2, machine.now) == 1


def test_one_thread_stays_one():
    machine = Machine(1)
    for _ in range(30):
        assert machine.crowd.threads(1, machine.now) == 1
        machine.note(1, 1, 0.01, 0.001)
