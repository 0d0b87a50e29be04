"""The default backend of a model, and backends by name.

Owns the choice of the default: a backend with ggml's kernels if its library is installed and works, else CpuBackend.
"""

from __future__ import annotations

from collections.abc import Sequence

import ggml_sched as gs  # whose backends load when their names are first used
from ggml_sched.backend import Backend
from ggml_sched.errors import Error

__all__ = ["NAMES", "default_backend", "named_backends"]

NAMES = ("cpu", "cuda", "ggml")
"""Names that `named_backends` accepts; "cuda:N" means device N, "ggml:DEVICE" another device of ggml's."""


def default_backend(n_threads: int | None = None) -> Backend:
    """GgmlBackend where the extra `ggml` is installed and its library passes the probes, otherwise CpuBackend."""
    try:
        return named_backends(["ggml"], n_threads)[0]
    except Error:
        return named_backends(["cpu"], n_threads)[0]


def named_backends(names: Sequence[str], n_threads: int | None = None) -> list[Backend]:
    """A backend for each name.  A single CPU backend is named CPU, several CPU0, CPU1, ..., and so for other types;
    `cuda cuda` means devices 0 and 1.

    ValueError for an unknown name; the error of a backend that cannot be opened passes through.  Then none stays open.
    """
    made: list[Backend] = []
    try:
        for i, name in enumerate(names):
            family, _, device = name.partition(":")
            same = [k for k, other in enumerate(names) if other == name]
            title = (device or name).upper() + ("" if len(same) == 1 else str(same.index(i)))
            if family == "cpu" and not device:
                made.append(gs.CpuBackend(n_threads, name=title))
            elif name == "cuda" or family == "cuda" and device.isdecimal():
                made.append(gs.CupyBackend(int(device or same.index(i))))
            elif family == "ggml":
                made.append(gs.GgmlBackend(device or "CPU", n_threads, name=title))
            else:
                raise ValueError(f"backend {name!r}; known: {', '.join(NAMES)}, cuda:N, ggml:DEVICE")
    except BaseException:
        for backend in made:
            backend.close()
        raise
    return made
