"""Connecting to workers: `connect` starts or joins them, a `Cluster` has their backends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from operator import index
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from ggml_sched.backend import number_of_bytes
from ggml_sched.errors import BackendError, BackendLost, OutOfMemory
from ggml_sched.planning.envelopes import PIECE
from ggml_sched.remote.answers import asked
from ggml_sched.remote.backend import RemoteBackend, RemoteWorker
from ggml_sched.remote.session import Session
from ggml_sched.remote.transport import (
    StartingTransport,
    Transport,
    WorkerOptions,
    check_names,
    checked_deadline,
    machine,
)

if TYPE_CHECKING:
    from ggml_sched.backend import Backend
    from ggml_sched.placement.devices import Link

__all__ = ["Cluster", "cluster_of", "connect"]

AGAIN = "~"
"""Stands between the name of a worker and the number of its start, where the worker replaces a lost one."""
NAME_BYTES = 40
"""The most bytes of the name of a worker: it is a part of the path of a socket, as what follows AGAIN is."""


class Cluster:
    """The `workers`, and their `backends`, the best of each worker first: w0:CPU, or w0:CPU0, w0:CPU1 where worker w0
    has several of one name.  A context manager: closing it frees what the session holds, and ends the workers that
    `connect` has started."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.session.sharers[machine()] += 1        # this process uses the machine's memory, too
        self.workers: tuple[RemoteWorker, ...] = ()
        self.backends: tuple[RemoteBackend, ...] = ()
        self._last: dict[str, str] = {}
        """{name of a worker: the transport's name of the last one that was started under it}."""
        for worker in session.transport.workers:
            self._join(worker, worker)

    def _join(self, worker: str, title: str) -> tuple[RemoteBackend, ...]:
        self._last[title] = worker
        said = asked(self.session, worker, "hello", [])
        there = RemoteWorker(self.session, worker, said)
        names = [f"{title}:{facts['name']}" for facts in said]
        joined = tuple(RemoteBackend(there, k, f"{name}{k}" if names.count(name) > 1 else name)
                       for k, name in enumerate(names))
        self.workers += there,
        self.backends += joined
        for backend in joined:
            if backend.facts["host"] and not backend.facts["bounded"]:
                self.session.sharers[backend.facts["machine"]] += 1
        return joined

    def join(self, worker: str, backends: Sequence[str] = ("cpu",), threads: int | None = None,
             memory: int | None = None) -> tuple[RemoteBackend, ...]:
        """Start another worker; returns its backends.  It may have the name of a lost worker, which it then replaces:
        its backends have the names of the lost ones, and the transport calls it w1~2, w1~3, ..., so that it gets no
        message that was sent to the lost worker.

        Raises BackendError if it does not start, the cluster is closed, or its transport starts no workers; ValueError
        for a name of a worker that is not lost; the error of queued work, unless that is the loss of the worker in
        whose place this one comes.
        """
        how = _checked_options(backends, threads, memory)
        _short(check_names([worker]))
        transport = self.session.transport
        if not isinstance(transport, StartingTransport):
            raise BackendError(f"{transport!r} starts no workers")
        if self.session.closed:
            raise BackendError(f"worker {worker!r} cannot join: the cluster is closed")
        with self.session.lock:     # another thread may be computing
            self.session.lose_dead()
            last, id_ = self._last.get(worker), worker
            if last in self.session.lost:
                id_ = next(id_ for k in count(2) if (id_ := f"{worker}{AGAIN}{k}") not in transport.workers)
            error = self.session.take_error()
            if error is not None and not (isinstance(error, BackendLost) and error.worker == last):
                raise error
            transport.add(id_, how)
            self.session.add(id_)
            try:
                joined = self._join(id_, worker)
            except BaseException:       # an interrupt, too: no caller has the worker, and its name may be used again
                self.session.dismiss(id_)
                raise
            if self.session.links:
                names = {backend.name for backend in joined}
                self.session.links = {pair: way for pair, way in self.session.links.items() if not names & {*pair}}
                self.measure()
            return joined

    @property
    def lost(self) -> tuple[RemoteBackend, ...]:
        """The backends whose worker is lost."""
        return tuple(backend for backend in self.backends if backend.lost is not None)

    def measure(self, seconds: float = 0.5) -> None:
        """Measure the links between the workers, and between this process and each, by copies of some KiB and MiB for
        about `seconds`.  Then the backends state the links (`Backend.link_to`), so that `gs.fit` need not measure them.
        Links of lost workers, and links that were measured before, are left out.  If a worker has no room for the
        copies, no new link is stated.
        """
        from ggml_sched.placement.devices import DRIVER, Link
        from ggml_sched.placement.measure import measure_links

        of = {DRIVER: DRIVER}
        first: dict[str, RemoteBackend] = {}
        for backend in self.backends:
            if backend.lost is None:
                of[backend.name] = first.setdefault(backend.worker, backend).name
        known = {pair: Link(*way) for pair, way in self.session.links.items()}
        try:
            found = measure_links(first.values(), seconds, self.session.transport.now, PIECE, known)
        except (OutOfMemory, ValueError):
            return
        self.session.links.update({(a, b): (found[of[a], of[b]].bandwidth, found[of[a], of[b]].latency)
                                   for a in of for b in of if of[a] != of[b]})

    def links(self, *others: Backend, seconds: float = 1.0) -> dict[tuple[str, str], Link]:
        """{(name, name): link} between each two of the backends and of `others`, such as the host's, as `gs.fit` and
        `gs.price` accept them; measured by copies of up to 64 MiB for about `seconds`, on the transport's clock.
        Without a host among `others` this process is one end, too, under the name "driver"."""
        from ggml_sched.placement.measure import measure_links

        return measure_links([*self.backends, *others], seconds, self.session.transport.now, anew=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the session holds, and end the workers; idempotent."""
        try:
            self.session.close()
        finally:
            self.session.transport.close()


def cluster_of(transport: Transport, deadline: float = 60.0) -> Cluster:
    """The Cluster of the workers of a connected transport, which is closed if one of them does not answer."""
    try:
        return Cluster(Session(transport, deadline))
    except BaseException:
        transport.close()
        raise


def _names(workers: int | Iterable[str]) -> list[str]:
    """The names of workers that are given by their number or by their names."""
    if isinstance(workers, str | bytes):
        raise TypeError(f"workers are their number or a list of their names, such as [{workers!r}]")
    if isinstance(workers, Iterable):
        names = [*workers]
    else:
        names = [f"w{i}" for i in range(_whole(workers, "workers are their number or a list of their names"))]
    if not names:
        raise ValueError("a cluster has one worker or more")
    return names


def _short(names: Sequence[str]) -> Sequence[str]:
    """The names of workers; ValueError for one that is longer than NAME_BYTES."""
    for name in names:
        if len(name.encode()) > NAME_BYTES:
            raise ValueError(f"the name of a worker has {len(name.encode())} bytes, at most {NAME_BYTES}: "
                             f"{name[:20]!r}...")
    return names


def _whole(value: Any, what: str) -> int:
    """`value` as an int; TypeError if it is no integer."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what}, not {value!r}")
    return index(value)


def _checked_options(backends: Sequence[str], threads: int | None, memory: int | None) -> WorkerOptions:
    """How a worker is started; TypeError or ValueError for what no worker could start with."""
    if isinstance(backends, str):
        raise ValueError(f"backends are a list of names, such as [{backends!r}]")
    names = [*backends]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"backends are {names!r}: a list of one name or more")
    if threads is not None:
        threads = _whole(threads, "threads are the number of threads of a worker")
        if threads < 1:
            raise ValueError(f"a worker with {threads} threads: 1 or more")
    if memory is not None:
        memory = number_of_bytes(memory, "the memory of a worker")
    return WorkerOptions(names, threads, memory)


def connect(address: str | None = None, workers: int | Sequence[str] = 2, backends: Sequence[str] = ("cpu",),
            threads: int | None = None, memory: int | None = None, deadline: float = 60.0, transport: str = "ray",
            options: Mapping[str, Any] | None = None) -> Cluster:
    """Workers with the named `backends` each (cpu, ggml, cuda, cuda:N, or MODULE:FUNCTION, which returns backends).

    `transport` "ray": actors of the Ray cluster at `address` ("auto", host:port), or of a local Ray that is started and
    ended with the cluster (None; where Ray is already initialised, that one is used).  "processes": processes of this
    machine, without Ray.  `workers`: how many, or their names.  `threads` and `memory` (bytes) of each; `options`:
    those of Ray's actors, such as {"resources": {"big": 1}}.  `deadline`: seconds without an answer after which a
    worker is lost.

    The links between the workers are measured, see `Cluster.measure`.

    Raises BackendError if Ray is missing, does not start or does not answer, or a worker does not start.  Before a
    worker starts: TypeError for an argument of a wrong type; ValueError for an unknown transport, a deadline that is
    not above 0, fewer than one worker, backend or thread, names of workers that are equal, longer than 40 bytes or no
    names of files, and an address or options of Ray for processes.
    """
    checked_deadline(deadline)
    names = _names(workers)
    if transport not in ("ray", "processes"):
        raise ValueError(f"transport {transport!r} is neither 'ray' nor 'processes'")
    if not isinstance(address, str | None):
        raise TypeError(f"the address of a Ray cluster is a text, not {address!r}")
    if not isinstance(options, Mapping | None):
        raise TypeError(f"options of Ray's actors are a mapping, not {options!r}")
    if transport == "processes" and (address is not None or options):
        raise ValueError(f"{'options' if address is None else f'address {address!r}'}: for Ray, not for processes")
    how = dict.fromkeys(_short(check_names(names)), _checked_options(backends, threads, memory))
    carrier: StartingTransport
    if transport == "processes":
        from ggml_sched.remote.processes import Processes

        carrier = Processes(how)
    else:
        from ggml_sched.remote.rays import RayActors, initialized

        started = initialized(address, max(len(names) * (threads or 1), 1))
        carrier = RayActors(how, options, ends_ray=started)
    cluster = cluster_of(carrier, deadline)
    try:
        cluster.measure()
    except BaseException:
        cluster.close()
        raise
    return cluster
