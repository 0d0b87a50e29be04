"""The interface between a driver and what carries its messages: Ray's actors, processes, or a simulated network."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsFloat, runtime_checkable

__all__ = ["RELAY_BYTES", "StartingTransport", "Transport", "WorkerOptions", "check_names", "checked_deadline",
           "machine"]

RELAY_BYTES = 1 << 20
"""The most bytes of a message with a route: channels of Ray's relay grow to the largest message that they have had, and
lose large ones."""


class WorkerOptions(NamedTuple):
    """How a worker is started: the names of its backends, the threads of each (None: their default), and the most bytes
    that it holds on each (None: no bound of its own)."""

    backends: Sequence[str] = ("cpu",)
    threads: int | None = None
    memory: int | None = None


class Transport(Protocol):
    """Carries messages between a driver and named workers, and between these.

    It may lose, repeat and reorder messages: numbers in them let their receivers put that right.  `losses`: how often
    the transport has noticed that messages to living workers were lost; messages without an answer are then sent again.
    `patience`: the least number of seconds without an answer after which messages are sent again, because one may be
    lost unnoticed; None where the transport notices every loss.
    """

    losses: int
    patience: float | None

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        ...

    def post(self, worker: str, message: bytes, route: Sequence[str] = ()) -> None:
        """Send a message to a worker; `route`: all workers that it visits, this one first, where that is known, and
        the message and all that the workers read have at most RELAY_BYTES.  Does nothing for a worker that is lost."""
        ...

    def receive(self, timeout: float) -> bytes | bytearray | None:
        """The next message for the driver; None if none comes within `timeout` seconds."""
        ...

    def lost(self) -> Mapping[str, str]:
        """{worker that has died: how the transport noticed it}."""
        ...

    def abandon(self, worker: str) -> None:
        """Carry nothing to or from a worker any more: it has died, or does not answer."""
        ...

    def now(self) -> float:
        """Seconds, of which only differences have a meaning."""
        ...

    def close(self) -> None:
        """End the connection, and the workers that it has started; idempotent."""
        ...


@runtime_checkable
class StartingTransport(Transport, Protocol):
    """A transport that starts its workers."""

    def add(self, worker: str, how: WorkerOptions) -> None:
        """Start another worker, which the others reach as well.  BackendError if it does not start."""
        ...


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names of workers as a tuple; ValueError unless they differ, none is empty or the driver's, and each can be
    the name of a file."""
    if any(not isinstance(name, str) or "/" in name or "\0" in name or name in (".", "..") for name in names):
        raise ValueError(f"names of workers are {_shown(names)}: texts without slashes, and not '.' or '..'")
    if len(set(names)) != len(names) or "driver" in names or not all(names):
        raise ValueError(f"names of workers are {_shown(names)}: they differ, and none is 'driver' or empty")
    return tuple(names)


def _shown(names: Sequence[str]) -> str:
    said = repr([*names])
    return said if len(said) <= 200 else f"{said[:197]}..."


def checked_deadline(deadline: float) -> float:
    """`deadline`; TypeError if it is no number, ValueError unless it is above 0."""
    if not isinstance(deadline, SupportsFloat):
        raise TypeError(f"a deadline is a number of seconds, not {deadline!r}")
    if not deadline > 0:
        raise ValueError(f"a deadline of {deadline} s: more than 0")
    return deadline


@cache
def machine() -> str:
    """A name of the machine that this process runs on: equal for all of its processes until it starts anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return platform.node()
