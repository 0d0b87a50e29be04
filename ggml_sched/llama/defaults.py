"""Which backend runs a model when the caller names none, and which one a name means.

Owns the decision: ggml's kernels where its library is installed and works, otherwise our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_sched.backend import Backend
from ggml_sched.errors import Error

__all__ = ["NAMES", "default_backend", "named_backends"]

NAMES = ("cpu", "ggml")
"""What `named_backends` knows; "ggml:DEVICE" means another device of ggml's."""


def default_backend(n_threads: int | None = None) -> Backend:
    """GgmlBackend where the extra `ggml` is installed and its library passes the probes, otherwise CpuBackend."""
    try:
        return _ggml("CPU", n_threads, "ggml")
    except (Error, ImportError):
        return _cpu(n_threads, "CPU")


def named_backends(names: Sequence[str], n_threads: int | None = None) -> list[Backend]:
    """A backend for each name; CPU for one of a kind, CPU0, CPU1, ... for several.

    ValueError for an unknown name, what the backend raises where it is not there; then none stays open.
    """
    made: list[Backend] = []
    try:
        for i, name in enumerate(names):
            kind, _, device = name.partition(":")
            same = [k for k, other in enumerate(names) if other == name]
            mark = "" if len(same) == 1 else str(same.index(i))
            if kind == "cpu" and not device:
                made.append(_cpu(n_threads, f"CPU{mark}"))
            elif kind == "ggml":
                made.append(_ggml(device or "CPU", n_threads, f"{name}{mark}"))
            else:
                raise ValueError(f"backend {name!r}; known: {', '.join(NAMES)}, ggml:DEVICE")
    except BaseException:
        for backend in made:
            backend.close()
        raise
    return made


def _cpu(n_threads: int | None, name: str) -> Backend:
    from ggml_sched import CpuBackend

    return CpuBackend(n_threads, name=name)


def _ggml(device: str, n_threads: int | None, name: str) -> Backend:
    import ggml_sched

    if not hasattr(ggml_sched, "GgmlBackend"):
        raise Error("this package has no backend for ggml's kernels")
    return ggml_sched.GgmlBackend(device, n_threads)
