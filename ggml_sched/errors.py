"""The exceptions of ggml-sched: typed, picklable, and carrying their numbers.

Everything that can go wrong with a graph, a plan, a file or a backend raises a
subclass of `Error`.  Arguments of the wrong Python type or range raise the
built-in `TypeError` and `ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = [
    "BackendError",
    "BackendLost",
    "BuildError",
    "Error",
    "FetchError",
    "FileFormatError",
    "GraphError",
    "HazardError",
    "OutOfMemory",
    "PlacementError",
    "UnsupportedOp",
]


class Error(Exception):
    """Base of every exception that ggml-sched raises on purpose."""


class BuildError(Error, ImportError):
    """A compiled module of this package is missing, was built for another Python, or cannot be loaded.

    `name` is the module, `path` its file if it has one, and `reason` what is wrong with it.
    """

    def __init__(self, message: str, *, name: str | None = None, path: str | None = None, reason: str = "") -> None:
        super().__init__(message, name=name, path=path)
        self.reason = reason


class GraphError(Error):
    """A tensor or graph that makes no sense: shapes, types, wiring, ownership."""


class FileFormatError(Error):
    """A file that is truncated, mutated, or not what it says it is."""


class PlacementError(Error):
    """A tensor is in memory, or assigned to a backend, where the scheduler cannot use it."""


class UnsupportedOp(Error):
    """No backend that may run this node supports its op."""


class HazardError(Error):
    """A plan or a compute that would read or overwrite the wrong data.

    `reason` is a code of `ggml_sched.planning.verify.REASONS`, or None.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class BackendError(Error):
    """A backend failed while it copied or computed."""


class BackendLost(BackendError):
    """A worker of a remote backend has died or does not answer, and what its backends held is gone.

    `worker` is the worker's name.  `computing` names the nodes that it was computing, or the tensor that was sent to it
    or that it was to read from a file; it is empty if there were none.  Computing can go on with the other backends:
    `scheduler.without(backend)`.
    """

    def __init__(self, message: str, worker: str = "", computing: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.computing = computing


class FetchError(BackendError):
    """A store could not read bytes of a weight: the disk failed, or the file was shortened or changed meanwhile.

    `tensor` is the weight's name (or empty), `path` the file; `start` .. `stop` are bytes of the file (or None), `code`
    is the system's errno (or None).  Nothing else is lost: a later compute reads the weight again.
    """

    def __init__(self, message: str, tensor: str = "", path: str = "", start: int | None = None,
                 stop: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.path = path
        self.start = start
        self.stop = stop
        self.code = code


class OutOfMemory(Error, MemoryError):
    """Something does not fit.

    `backend` is the backend's name (or None), `needed` and `available` are bytes
    (or None where the backend does not know).
    """

    def __init__(
        self,
        message: str,
        backend: str | None = None,
        needed: int | None = None,
        available: int | None = None,
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.needed = needed
        self.available = available


def each(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever raises; then raise the first error."""
    first = None
    for call in calls:
        try:
            call()
        except BaseException as error:     # an interrupt, too: the other calls are still made
            first = first or error
    if first is not None:
        raise first


def no_host_memory(what: str) -> OutOfMemory:
    """The error to raise where the host gives no memory for what the package itself keeps."""
    return OutOfMemory(f"the host gives no memory for {what}")


def shown(value: object) -> str:
    """An argument for a message, in few characters: an int may have more digits than Python converts to text."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:      # such an int in a list
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
