"""The interface between a driver and what carries its messages: Ray's actors, processes, or a simulated network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Transport"]


class Transport(Protocol):
    """Carries messages between a driver and named workers, and between these.

    It may lose, repeat and reorder messages: numbers in them let their receivers put that right.
    """

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers."""
        ...

    def post(self, worker: str, message: bytes) -> None:
        """Send a message to a worker.  Does nothing for a worker that is lost."""
        ...

    def receive(self, timeout: float) -> bytes | bytearray | None:
        """The next message for the driver; None if none comes within `timeout` seconds."""
        ...

    def lost(self) -> Mapping[str, str]:
        """{worker that is known to have died: how that was seen}."""
        ...

    def now(self) -> float:
        """Seconds, of which only differences have a meaning."""
        ...

    def close(self) -> None:
        """End the connection, and the workers that it has started; idempotent."""
        ...
