"""Workers as Ray actors, on one machine or many: placement, resources and security are Ray's.

A message to a worker is a call of its actor; what an envelope causes at the next worker is a call of that actor by the
first one, whose result is the driver's to wait for.  The messages for the driver are the calls' results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ggml_sched.errors import BackendError
from ggml_sched.remote.envelope import DRIVER
from ggml_sched.remote.messages import MessageError
from ggml_sched.remote.session import check_names
from ggml_sched.remote.worker import Worker

__all__ = ["RayActors", "initialized", "shut_down"]

try:
    import ray
except ImportError as _error:
    raise BackendError("Ray is not installed: pip install 'ggml-sched[ray]'") from _error


STARTS_WITHIN = 60.0
"""Seconds that an actor has to be placed by Ray, and to open its backends."""


def initialized(address: str | None, n_cpus: int) -> bool:
    """Connect to the Ray cluster at `address`, or start a local one with so many CPUs; False if Ray was initialised
    before, which is then used."""
    if ray.is_initialized():
        return False
    # A local Ray runs its workers at a low priority unless the environment says otherwise.
    local = {} if address is not None else {"num_cpus": n_cpus, "include_dashboard": False,
                                            "_system_config": {"worker_niceness": 0}}
    ray.init(address, log_to_driver=False, logging_level="ERROR", **local)
    return True


def shut_down() -> None:
    """End the connection, and a local Ray with it."""
    ray.shutdown()


class _Actor:
    """A worker as an actor: `deliver` handles a message, and returns those for the driver and the calls of peers that
    it has made, by their names."""

    def __init__(self, name: str, backends: Sequence[str], n_threads: int | None, memory: int | None) -> None:
        from ggml_sched.remote.serve import backends_of

        self.worker = Worker(name, backends_of(backends, n_threads), memory)
        self.peers: dict[str, Any] = {}

    def meet(self, peers: dict[str, Any]) -> str:
        self.peers |= peers
        return str(ray.get_runtime_context().get_node_id())

    def deliver(self, message: bytes) -> tuple[list[bytes], list[tuple[str, Any]]]:
        try:
            sent = self.worker.handle(message)
        except MessageError as error:
            return [self.worker.refusal(error)], []
        # The peers' results are not waited for: this worker takes the next message while they work.
        return ([out for to, out in sent if to == DRIVER],
                [(to, self.peers[to].deliver.remote(out)) for to, out in sent if to in self.peers])


class RayActors:
    """Starts an actor for each worker: `workers` is {name: (backends, threads, memory)}, `options` those of Ray's
    actors, such as {"num_cpus": 2, "resources": {...}}, for each worker.

    Ray must have been initialised.  `nodes` are Ray's ids of the machines, by worker.
    """

    def __init__(self, workers: Mapping[str, tuple[Sequence[str], int | None, int | None]],
                 options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        check_names([*workers])
        self.nodes: dict[str, str] = {}
        self._actors: dict[str, Any] = {}
        self._open: dict[Any, str] = {}
        """{reference to a result that is to come: the worker that was called}."""
        self._inbox: deque[bytes] = deque()
        self._lost: dict[str, str] = {}
        try:
            for name, given in workers.items():
                self._start(name, given, (options or {}).get(name, {}))
            self._introduce()
        except BaseException:
            self.close()
            raise

    def add(self, name: str, given: tuple[Sequence[str], int | None, int | None],
            options: Mapping[str, Any] | None = None) -> None:
        """Start another actor, which the others reach as well."""
        check_names([*self._actors, name])
        self._start(name, given, options or {})
        self._introduce()

    def _start(self, name: str, given: tuple[Sequence[str], int | None, int | None],
               options: Mapping[str, Any]) -> None:
        backends, n_threads, memory = given
        made = ray.remote(**{"num_cpus": n_threads or 1, "max_restarts": 0, **options})(_Actor)
        self._actors[name] = made.remote(name, [*backends], n_threads, memory)

    def _introduce(self) -> None:
        """Give each actor those of its peers; BackendError for one that does not start."""
        calls = {name: actor.meet.remote({peer: other for peer, other in self._actors.items() if peer != name})
                 for name, actor in self._actors.items() if name not in self._lost}
        for name, call in calls.items():
            try:
                self.nodes[name] = ray.get(call, timeout=STARTS_WITHIN)
            except ray.exceptions.GetTimeoutError as error:
                raise BackendError(f"worker {name!r} does not start within {STARTS_WITHIN:g} s: Ray has "
                                   f"{ray.available_resources()} left") from error
            except ray.exceptions.RayError as error:
                raise BackendError(f"worker {name!r} does not start: {error}") from error

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._actors)

    def actor(self, name: str) -> Any:
        """The handle of a worker's actor."""
        return self._actors[name]

    def now(self) -> float:
        return time.monotonic()

    def post(self, worker: str, message: bytes) -> None:
        if worker not in self._lost:
            self._open[self._actors[worker].deliver.remote(message)] = worker

    def receive(self, timeout: float) -> bytes | None:
        end = time.monotonic() + timeout
        while not self._inbox and self._open:
            left = max(0.0, end - time.monotonic())
            if len(self._open) == 1:        # one call less than waiting first
                reference, = self._open
            else:
                ready, _ = ray.wait([*self._open], num_returns=1, timeout=left)
                if not ready:
                    return None
                reference = ready[0]
            try:
                messages, calls = ray.get(reference, timeout=left)
            except ray.exceptions.GetTimeoutError:
                return None
            except ray.exceptions.RayActorError as error:
                self._lost.setdefault(self._open.pop(reference), str(error).partition("\n")[0])
                return None
            del self._open[reference]
            self._inbox += messages
            self._open |= {call: name for name, call in calls}
        if not self._inbox and not self._open:
            time.sleep(max(0.0, min(end - time.monotonic(), timeout)))
        return self._inbox.popleft() if self._inbox else None

    def lost(self) -> Mapping[str, str]:
        return self._lost

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors, self._open = {}, {}
