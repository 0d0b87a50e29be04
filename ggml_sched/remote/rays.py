"""Workers as Ray actors, on one machine or many: placement, resources and security are Ray's.

Messages take one of two ways.  By calls: `deliver` of an actor handles a message, and calls the next worker's actor
with the message that results; the driver waits for the results of all these calls.  Or by the relay: a compiled graph
of Ray through all actors in turn, whose channels take a tenth of a call's time.  The numbers in messages give the order
of messages that take different ways.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ggml_sched.errors import BackendError
from ggml_sched.remote.envelope import DRIVER
from ggml_sched.remote.transport import RELAY_BYTES, WorkerOptions, check_names
from ggml_sched.remote.worker import Worker

__all__ = ["RayActors", "initialized"]

try:
    import ray
    import ray.dag
except ImportError as _error:
    raise BackendError("Ray is not installed: pip install 'ggml-sched[ray]'") from _error

logger: logging.Logger = logging.getLogger("ggml_sched.remote")

STARTS_WITHIN = 60.0
"""Seconds that an actor has to be placed by Ray, and to open its backends."""
ENDS_WITHIN = 5.0
"""Seconds that a relay has to end its actors' loops, and then actors to end."""
IN_RELAY = 8
"""The most messages that are under way in a relay at once; further ones are sent by calls."""
CHANNEL_BYTES = 1 << 16
"""Bytes of a channel at first."""
OWN = "ggml-sched"
"""The name of a resource that a Ray has which this package started.  Workers reserve no CPUs there, because nothing
else runs on it."""
IN_TURN = 1e-3
"""Seconds that the driver waits for the relay before it looks at its calls again, where it has messages on both
ways."""


def initialized(address: str | None, n_cpus: int) -> bool:
    """Connect to the Ray cluster at `address`; None: start a local one with `n_cpus` CPUs, even if another Ray runs on
    this machine.  False if this process had initialised Ray before: then that one is used."""
    if ray.is_initialized():
        return False
    # A local Ray runs its workers at a low priority unless the environment says otherwise.
    local = {} if address is not None else {"num_cpus": n_cpus, "include_dashboard": False,
                                            "resources": {OWN: 1}, "_system_config": {"worker_niceness": 0}}
    try:
        ray.init("local" if address is None else address, log_to_driver=False, logging_level="ERROR",
                 runtime_env={"worker_process_setup_hook": _package_import()}, **local)
    except Exception as error:      # any type: for a node that starts too late Ray raises a bare Exception
        raise BackendError(f"Ray at {address or 'this machine'} does not start or answer: {error}") from error
    return True


def _package_import() -> Callable[[], None]:
    """The function that each of Ray's processes calls when it starts.  It imports the installed package before Ray puts
    the driver's folder first on the path: that folder may hold this package's sources without compiled modules.

    It is a nested function, because Ray sends those by value.  So a process without the package can start, too, and the
    error comes where an actor starts.
    """
    def load() -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("ggml_sched")

    return load


def _kill(actor: Any) -> None:
    """End an actor.  Does nothing after Ray was shut down, because a call would start a new Ray."""
    if ray.is_initialized():
        with contextlib.suppress(Exception):        # a new Ray may run, which does not have this actor
            ray.kill(actor)


def _end(actors: Sequence[Any]) -> None:
    """Let actors end by themselves, so that they remove the semaphores of their channels in shared memory, and kill
    those that do not end in time.  Does nothing after Ray was shut down, as `_kill`."""
    if not ray.is_initialized():
        return
    left = [*actors]
    try:
        for actor in actors:
            actor.__ray_terminate__.remote()
        ends = {actor.alive.remote(): actor for actor in actors}        # these calls fail once the actors have ended
        _, late = ray.wait([*ends], num_returns=len(ends), timeout=ENDS_WITHIN) if ends else ([], [])
        left = [ends[end] for end in late]
    except Exception as error:      # a new Ray may run, which does not have these actors
        logger.info("actors are killed, because they cannot be asked to end: %s", error)
    finally:
        for actor in left:
            _kill(actor)


def _ended(actors: Mapping[str, Any], relays: Sequence[_Relay], pid: int) -> None:
    """End the relay and the actors of a transport that was not closed.  Ray does not: the actors hold handles of each
    other.  In another thread, because the garbage collector may have interrupted a function of Ray's in this one."""
    if os.getpid() != pid or not actors:
        return
    ending = threading.Thread(target=_end_all, args=([*relays], [*actors.values()]), daemon=True)
    try:
        ending.start()
    except RuntimeError:        # some versions of Python start no thread when they end
        for actor in actors.values():
            _kill(actor)
    else:
        ENDING[:] = [thread for thread in (*ENDING, ending) if thread.is_alive()]


def _end_all(relays: Sequence[_Relay], actors: Sequence[Any]) -> None:
    for relay in relays:
        relay.close()       # an actor in a relay's loop does not end by itself
    _end(actors)


ENDING: list[threading.Thread] = []
"""Threads that end actors."""
LIVE: weakref.WeakSet[RayActors] = weakref.WeakSet()
"""All transports; the process ends those that were not closed."""


@atexit.register        # after Ray's import, and so before Ray ends
def _end_at_exit() -> None:
    for transport in [*LIVE]:
        transport._stop()
    end = time.monotonic() + 2 * ENDS_WITHIN
    for thread in ENDING:
        thread.join(max(0.0, end - time.monotonic()))


class _Actor:
    """A worker as an actor.  A relay's loop and calls run in different threads of the actor, so each message is
    handled under a lock."""

    def __init__(self, name: str, how: WorkerOptions) -> None:
        from ggml_sched.remote.serve import backends_of

        self.worker = Worker(name, backends_of(how.backends, how.threads), how.memory)
        self.peers: dict[str, Any] = {}
        self.lock = threading.Lock()

    def meet(self, peers: dict[str, Any]) -> str:
        """Receive the handles of the other workers' actors; returns Ray's id of this actor's machine."""
        self.peers |= peers
        return str(ray.get_runtime_context().get_node_id())

    def process(self) -> int:
        """The id of the actor's process on its machine."""
        return os.getpid()

    def alive(self) -> tuple[list[bytes], list[tuple[str, Any]]]:
        """An empty result of the form that `deliver` has; a call of this method fails if the actor is dead."""
        return [], []

    def deliver(self, message: bytes) -> tuple[list[bytes], list[tuple[str, Any]]]:
        """Handle a message: (messages for the driver, (worker, result to come) of each call that this one has made)."""
        with self.lock:
            sent = self.worker.answer(message)
        # This worker does not wait for the results of the calls: it takes the next message while the peers work.
        return ([out for to, out in sent if to == DRIVER],
                [(to, self.peers[to].deliver.remote(out)) for to, out in sent if to in self.peers])

    def pass_on(self, messages: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """A step of the relay: handle the messages, pairs (receiver, message), that are for this worker; returns the
        others and the messages that result."""
        passed = []
        for to, message in messages:
            if to == self.worker.name:
                with self.lock:
                    passed += self.worker.answer(message)
            else:
                passed.append((to, message))
        return passed


class _Relay:
    """A compiled graph through all `actors` in turn; calls the method `note_loss` when it ends with messages under way.
    Raises an error of Ray's if it cannot be compiled.

    An actor takes part in one compiled graph at a time.
    """

    def __init__(self, actors: Mapping[str, Any], note_loss: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._note_loss = note_loss
        # When an actor ends, the wait for its result raises the error; without this line a thread of Ray's prints it as
        # well.
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)
        self._places = {name: k for k, name in enumerate(actors)}
        with ray.dag.InputNode() as step:
            for actor in actors.values():
                step = actor.pass_on.bind(step)
        self._graph = step.experimental_compile(_submit_timeout=0, _buffer_size_bytes=CHANNEL_BYTES,
                                                _max_inflight_executions=IN_RELAY)
        self.open: deque[Any] = deque()
        """References to the results that are to come, in their order."""
        self.broken = False

    def post(self, message: bytes, route: Sequence[str]) -> bool:
        """Send a message; False, with nothing done, if the relay cannot carry it now."""
        places = [self._places.get(worker, -1) for worker in route]
        if self.broken or len(self.open) >= IN_RELAY or len(message) > RELAY_BYTES or not places or places[0] < 0 \
                or any(a >= b for a, b in zip(places, places[1:], strict=False)):
            return False
        try:
            self.open.append(self._graph.execute([(route[0], message)]))
        except (ray.exceptions.RayChannelTimeoutError, ray.exceptions.RayCgraphCapacityExceeded):
            return False        # the first actor has not taken what was sent before
        except ray.exceptions.RayError:
            self.broken = True
            return False
        return True

    def receive(self, timeout: float) -> list[tuple[str, bytes]]:
        """The next messages that leave the relay, as (receiver, message); none after `timeout` seconds, and none once
        an actor has died."""
        try:
            found: list[tuple[str, bytes]] = ray.get(self.open[0], timeout=timeout)
        except ray.exceptions.RayChannelTimeoutError:
            self.open[0]._ray_get_called = False        # else Ray raises when the result is waited for again
            return []
        except ray.exceptions.RayError as error:
            logger.info("the relay of actors has ended, calls take its place: %s", error)
            self.give_up()
            return []
        except BaseException:
            self.open[0]._ray_get_called = False        # after an interrupt the result is waited for again
            raise
        self.open.popleft()
        return found

    def give_up(self) -> None:
        """Carry no further message; messages under way are lost."""
        self.broken = True
        note_loss = self._note_loss()
        if self.open and note_loss is not None:
            note_loss()
        for reference in self.open:
            reference._ray_get_called = True        # else the reference waits for its result when it is freed
        self.open.clear()

    def close(self) -> bool:
        """End the actors' loops; False if one does not end in time.  Idempotent."""
        self.give_up()
        if not ray.is_initialized():
            return True
        ending = threading.Thread(target=self._graph.teardown, daemon=True)
        ending.start()
        ending.join(ENDS_WITHIN)
        return not ending.is_alive()


class RayActors:
    """Starts an actor for each worker: `workers` is {name: its options}; `options` are Ray's, for each actor, such as
    {"num_cpus": 2, "resources": {...}}.  Without them an actor reserves as many CPUs as it has threads, or none on a
    Ray that this package has started.  A `StartingTransport`.

    Ray must have been initialised; `ends_ray`: closing ends it.  `nodes` are Ray's ids of the machines, by worker.
    `relayed`: messages may take the relay, where Ray can compile one.
    """

    patience: float | None = 1.0        # relays between machines have lost messages, and do not show an actor's death

    def __init__(self, workers: Mapping[str, WorkerOptions], options: Mapping[str, Any] | None = None,
                 ends_ray: bool = False, relayed: bool = True) -> None:
        self.nodes: dict[str, str] = {}
        self.losses: int = 0
        self.relayed = relayed
        self.messages_relayed: int = 0
        self.messages_called: int = 0
        """How many messages took the relay, and how many were calls of the driver."""
        resources = ray.cluster_resources()
        self._limits: dict[str, float] | None = resources if OWN in resources else None
        """The resources of a Ray that this package has started, which no other machine joins; None for another Ray."""
        self._options = {**({"num_cpus": 0} if OWN in resources else {}), **(options or {})}
        self._ends_ray = ends_ray
        self._actors: dict[str, Any] = {}
        self._relay: _Relay | None = None
        self._open: dict[Any, str] = {}
        """{reference to the result of a call that has not returned: the worker that was called}."""
        self._inbox: deque[bytes] = deque()
        self._lost: dict[str, str] = {}
        self._pid = os.getpid()
        self._relays: list[_Relay] = []
        """The relay, for the finalizer: [] or [self._relay]."""
        self._stop = weakref.finalize(self, _ended, self._actors, self._relays, self._pid)
        LIVE.add(self)
        try:
            check_names([*workers])
            for name, how in workers.items():
                self._start(name, how)
            self._introduce([*workers])
        except BaseException:
            self.close()
            raise

    def add(self, worker: str, how: WorkerOptions) -> None:
        if not self._is_up():
            raise BackendError(f"worker {worker!r} does not start: Ray was shut down")
        check_names([*self._actors, worker])
        self._start(worker, how)
        try:
            self._introduce([worker])
        except BaseException:
            _kill(self._actors.pop(worker))
            raise

    def _start(self, name: str, how: WorkerOptions) -> None:
        options = {"num_cpus": how.threads or 1, "max_restarts": 0, **self._options}
        made = ray.remote(**options)(_Actor)
        self._check_resources(name, options)
        self._actors[name] = made.remote(name, how)

    def _check_resources(self, name: str, options: Mapping[str, Any]) -> None:
        """BackendError if the limits say that the actor would wait for ever: an actor that lives keeps what it has."""
        if self._limits is None:
            return
        n = len(self._actors.keys() - self._lost.keys())
        asked = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory"),
                 **(options.get("resources") or {})}
        for resource, amount in asked.items():
            has = self._limits.get(resource, 0)
            if amount and (n + 1) * amount > has:
                others = f", of which other workers have {n * amount:g}" if n else ""
                raise BackendError(f"worker {name!r} does not start: it needs {amount:g} {resource}, and the Ray of "
                                   f"this machine has {has:g}{others}")

    def _introduce(self, new: Sequence[str]) -> None:
        """Give each live actor the handles of all others, and make the relay.

        BackendError for one of the `new` workers that does not start; an older worker that fails counts as lost.
        """
        live = {name: actor for name, actor in self._actors.items() if name not in self._lost}
        calls = {name: actor.meet.remote({peer: other for peer, other in live.items() if peer != name})
                 for name, actor in live.items()}
        for name, call in calls.items():
            try:
                self.nodes[name] = ray.get(call, timeout=STARTS_WITHIN)
            except ray.exceptions.RayError as error:
                if name not in new:
                    self._lost[name] = _first_line(error)
                    del live[name]
                    continue
                if not isinstance(error, ray.exceptions.GetTimeoutError):
                    raise BackendError(f"worker {name!r} does not start: {_first_line(error)}") from error
                raise BackendError(f"worker {name!r} does not start within {STARTS_WITHIN:g} s: Ray has "
                                   f"{ray.available_resources()} left") from error
        if not self.relayed or self._relay is not None and not self._relay.close():
            return
        try:
            self._relay = _Relay(live, weakref.WeakMethod(self._note_loss))
            self._relays[:] = [self._relay]
        except Exception as error:
            logger.warning("Ray compiles no graph of the actors, every message is a call: %s", error)
            self._relay = None

    def _note_loss(self) -> None:
        self.losses += 1

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._actors)

    def actor(self, name: str) -> Any:
        """The handle of a worker's actor."""
        return self._actors[name]

    def now(self) -> float:
        return time.monotonic()

    def post(self, worker: str, message: bytes, route: Sequence[str] = ()) -> None:
        if not self._is_up() or worker in self._lost:
            return
        if self._relay is not None and self._relay.post(message, route):
            self.messages_relayed += 1
        else:
            self._call(worker, message)

    def _call(self, worker: str, message: bytes) -> None:
        self.messages_called += 1
        self._open[self._actors[worker].deliver.remote(message)] = worker

    def _is_up(self) -> bool:
        """Whether Ray still runs; if not, all workers are lost.  Ray is not called then, because a call would start a
        new one."""
        if ray.is_initialized():
            return True
        for name in self._actors:
            self._lost.setdefault(name, "Ray was shut down")
        return False

    def receive(self, timeout: float) -> bytes | None:
        if not self._is_up():
            return None
        end = time.monotonic() + timeout
        while not self._inbox:
            left = max(0.0, end - time.monotonic())
            in_relay = self._relay is not None and bool(self._relay.open)
            n_lost = len(self._lost)
            if in_relay:
                self._receive_relayed(min(left, IN_TURN) if self._open else left)
            if self._open:
                self._receive_call(0.0 if in_relay else left)
            elif not in_relay:
                time.sleep(left)
            if len(self._lost) > n_lost or time.monotonic() >= end:
                break
        return self._inbox.popleft() if self._inbox else None

    def _receive_relayed(self, timeout: float) -> None:
        assert self._relay is not None
        for to, message in self._relay.receive(timeout):
            if to == DRIVER:
                self._inbox.append(message)
            elif to not in self._lost:
                self._call(to, message)     # the relay passes messages forward only, and this one goes back
        if self._relay.broken:
            self._probe_actors()

    def _probe_actors(self) -> None:
        """Call every actor that is not lost: the call of one that has died raises when its result is received."""
        for name, actor in self._actors.items():
            if name not in self._lost:
                self._open[actor.alive.remote()] = name

    def _receive_call(self, timeout: float) -> None:
        if len(self._open) == 1 and timeout:        # no need to ask Ray which result is ready first
            reference, = self._open
        else:
            ready, _ = ray.wait([*self._open], num_returns=1, timeout=timeout)
            if not ready:
                return
            reference = ready[0]
        try:
            messages, calls = ray.get(reference, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            return
        except ray.exceptions.ObjectLostError:
            del self._open[reference]       # the actor that has made the call has died, and the answer with it
            self._probe_actors()
            return
        except ray.exceptions.RayError as error:
            self._lost.setdefault(self._open.pop(reference), _first_line(error))
            return
        del self._open[reference]
        self._inbox += messages
        self._open |= {call: name for name, call in calls}

    def lost(self) -> Mapping[str, str]:
        return self._lost

    def abandon(self, worker: str) -> None:
        self._lost.setdefault(worker, "it was given up")
        if self._relay is not None:
            self._relay.give_up()
        _kill(self._actors[worker])

    def close(self) -> None:
        if os.getpid() != self._pid:
            return          # a child after a fork: the actors are its parent's
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self._relays.clear()
        _end([*self._actors.values()])
        self._actors.clear()
        self._open.clear()
        if self._ends_ray:
            self._ends_ray = False
            ray.shutdown()


def _first_line(error: Exception) -> str:
    """The message of one of Ray's errors, without the traceback: the last line for an exception in an actor, also while
    it started, else the first."""
    said = str(error).strip().splitlines() or [type(error).__name__]
    is_raised = isinstance(error, ray.exceptions.RayTaskError) or getattr(error, "actor_init_failed", False)
    return said[-1 if is_raised else 0]
