"""Fault injection: makes the n-th allocation, copy or compute of a backend fail, for tests of recovery.

`FaultPoints` counts operations, and raises when the count is reached.  A backend calls `check_fault` at the start of
each operation, so that a failed operation has changed nothing.
"""

from __future__ import annotations

import warnings

from ggml_sched.errors import BackendError, OutOfMemory

__all__ = ["KINDS", "FaultPoints"]

KINDS = ("alloc", "copy", "compute")


class FaultPoints:
    """A mixin for backends that call `check_fault`: "alloc" is a call of alloc_buffer, "copy" one that sets, gets or
    copies a tensor, "compute" a call that computes nodes."""

    name: str
    _due: dict[str, tuple[int, int]] | None = None

    def fail_at(self, kind: str, n: int, times: int = 1) -> None:
        """Make the n-th operation of a kind from now on fail: OutOfMemory for "alloc", else BackendError.

        From the n-th on, `times` operations fail in a row.  `n` = 0 cancels the remaining failures.
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
        """{kind: n}: the n-th operation of that kind from now on will fail."""
        return {kind: n for kind, (n, times) in (self._due or {}).items() if times}

    def check_fault(self, kind: str, what: str, needed: int | None = None) -> None:
        """Count an operation that is about to begin, and raise if it is the one to fail."""
        due = self._due or {}
        n, times = due.get(kind, (0, 0))
        if not times:
            return
        due[kind] = (n - 1, times) if n > 1 else (1, times - 1)
        if n == 1:
            message = f"backend {self.name!r}: {what} failed, as asked for"
            raise OutOfMemory(message, self.name, needed, 0) if kind == "alloc" else BackendError(message)

    def passes(self, kind: str, what: str, needed: int | None = None) -> None:
        """The former name of `check_fault`, for one release."""
        warnings.warn("FaultPoints.passes: use check_fault", DeprecationWarning, stacklevel=2)
        self.check_fault(kind, what, needed)
