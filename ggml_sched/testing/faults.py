"""Failures on demand: backends that fail the n-th allocation, copy or compute, for tests of recovery.

`FaultPoints` counts operations and raises; a backend asks it at the start of each one, so that a failed
operation has changed nothing.
"""

from __future__ import annotations

from ggml_sched.errors import BackendError, OutOfMemory

__all__ = ["KINDS", "FaultPoints"]

KINDS = ("alloc", "copy", "compute")


class FaultPoints:
    """A mixin for backends.  Operations: alloc_buffer; set, get and cpy_tensor calls; graph computes."""

    _due: dict[str, tuple[int, int]] | None = None

    def fail_at(self, kind: str, n: int, times: int = 1) -> None:
        """Let the n-th operation of a kind from now fail: OutOfMemory for "alloc", else BackendError.

        `times` operations fail, one after the other.  `n` = 0 takes back what has not happened.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is not one of {', '.join(KINDS)}")
        if n < 0:
            raise ValueError(f"operation {n} of a kind is not after now")
        if times < 1:
            raise ValueError(f"{times} failures")
        self._due = {**(self._due or {}), kind: (n, times if n else 0)}

    @property
    def pending_failures(self) -> dict[str, int]:
        """How many operations of each kind are left until one fails."""
        return {kind: n for kind, (n, times) in (self._due or {}).items() if times}

    def passes(self, kind: str, what: str, needed: int | None = None) -> None:
        """Called by the backend before an operation."""
        n, times = (self._due or {}).get(kind, (0, 0))
        if not times:
            return
        self._due[kind] = (n - 1, times) if n > 1 else (1, times - 1)
        if n == 1:
            message = f"backend {self.name!r}: {what} failed, as asked for"
            raise OutOfMemory(message, self.name, needed, 0) if kind == "alloc" else BackendError(message)
