"""A network in this process, with a clock of its own: delays, losses, repeats, reorderings and deaths by a seed.

For tests, and for measuring which work overlaps: a worker is busy for the seconds that `cost` gives for a message, and
the clock moves only while the driver waits.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ggml_sched.remote.envelope import DRIVER
from ggml_sched.remote.transport import check_names
from ggml_sched.remote.worker import Worker

__all__ = ["Faults", "SimulatedNetwork"]


class Faults(NamedTuple):
    """The faults of a network.

    `loss`, `repeat`: probabilities that a message is lost, or comes twice; `late`: the most seconds that it is late;
    `deaths`: {worker: after how many messages it dies}; `hangs`: {worker: after how many messages it answers
    nothing any more}; `cut`: {(sender, receiver): after how many messages nothing passes any more}.
    """

    loss: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    deaths: Mapping[str, int] = {}
    hangs: Mapping[str, int] = {}
    cut: Mapping[tuple[str, str], int] = {}


class SimulatedNetwork:
    """Carries messages to workers in this process.

    `delay` and `bandwidth`: seconds, and bytes a second, of each message on its way; a link, from one sender to one
    receiver, carries one message at a time.  `cost(worker, message)`: seconds that a worker takes for a message.
    `patience`: see `Transport`.  Equal seeds give equal runs.  `carried` counts messages by
    (sender, receiver), `bytes_carried` their bytes.
    """

    losses: int = 0
    patience: float | None = 0.25

    def __init__(self, workers: Sequence[Worker], seed: int = 0, faults: Faults | None = None, delay: float = 0.0,
                 bandwidth: float = float("inf"),
                 cost: Callable[[Worker, bytes], float] = lambda worker, message: 0.0) -> None:
        self._workers = dict(zip(check_names([worker.name for worker in workers]), workers, strict=True))
        self.faults: Faults = faults or Faults()
        self.delay: float = delay
        self.bandwidth: float = bandwidth
        self.cost: Callable[[Worker, bytes], float] = cost
        self.time: float = 0.0
        self.carried: dict[tuple[str, str], int] = {}
        self.bytes_carried: dict[tuple[str, str], int] = {}
        self.handled: dict[str, int] = dict.fromkeys(self._workers, 0)
        self.dead: dict[str, str] = {}
        self._random = random.Random(seed)
        self._count = 0
        self._coming: list[tuple[float, int, str, bytes]] = []
        """A heap of (time of arrival, number, receiver, message)."""
        self._free_at: dict[str, float] = dict.fromkeys(self._workers, 0.0)
        self._link_free_at: dict[tuple[str, str], float] = {}

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._workers)

    @property
    def handlers(self) -> dict[str, Worker]:
        """The workers by name."""
        return dict(self._workers)

    def begin(self, faults: Faults) -> None:
        """Let these faults happen from now on."""
        self.faults = faults

    def now(self) -> float:
        return self.time

    def lost(self) -> Mapping[str, str]:
        return self.dead

    def abandon(self, worker: str) -> None:
        pass        # a worker that was given up may still send: the session must refuse that

    def post(self, worker: str, message: bytes, route: Sequence[str] = ()) -> None:
        self._send(DRIVER, worker, message, self.time)

    def receive(self, timeout: float) -> bytes | None:
        end = self.time + timeout
        while self._coming and self._coming[0][0] <= end:
            at, _, receiver, message = heapq.heappop(self._coming)
            if receiver == DRIVER:
                self.time = max(self.time, at)
                return message
            self._deliver(receiver, message, at)
        self.time = end
        return None

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    def _send(self, sender: str, receiver: str, message: bytes, at: float) -> None:
        pair = sender, receiver
        self.carried[pair] = self.carried.get(pair, 0) + 1
        self.bytes_carried[pair] = self.bytes_carried.get(pair, 0) + len(message)
        if self.carried[pair] > self.faults.cut.get(pair, self.carried[pair]):
            return
        for _ in range(2 if self._random.random() < self.faults.repeat else 1):
            late = self._random.random() * self.faults.late
            sent = max(at, self._link_free_at.get(pair, 0.0)) + len(message) / self.bandwidth
            self._link_free_at[pair] = sent
            if self._random.random() >= self.faults.loss:
                self._count += 1
                arrival = sent + self.delay + late
                heapq.heappush(self._coming, (arrival, self._count, receiver, message))

    def _deliver(self, name: str, message: bytes, at: float) -> None:
        worker = self._workers.get(name)
        if worker is None or name in self.dead:
            return
        n = self.handled[name]
        if n >= self.faults.hangs.get(name, n + 1):
            return
        if n >= self.faults.deaths.get(name, n + 1):
            self.dead[name] = "it was ended"
            return
        self.handled[name] = n + 1
        start = max(at, self._free_at[name])
        sent = worker.answer(message)
        end = self._free_at[name] = start + self.cost(worker, message)
        for receiver, out in sent:
            self._send(name, receiver, out, end)
