"""The default backend of a model, backends by name, and the default placement of weights and caches.

Owns the choice of the default backend, the one that was measured to be faster (see `default_backend`).
Invariant: layers are spread in order and as evenly as possible, so that activations pass from one backend to the next
only once; tensors outside the layers are on the first or the last backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import ggml_sched as gs  # its backends are imported when their names are first used
from ggml_sched.backend import Backend
from ggml_sched.backends.cpu._kernels import isa
from ggml_sched.errors import Error, PlacementError

if TYPE_CHECKING:
    from ggml_sched.placement.answer import Fit
    from ggml_sched.placement.devices import Device

__all__ = ["NAMES", "PlaceFunction", "PlaceLike", "are_apart", "as_fit", "checked_place", "default_backend",
           "named_backends", "spread_layers"]

MEASURED = ("avx2", "avxvnni", "avx512")
"""Instruction sets with which CpuBackend's kernels were measured to be faster than ggml's."""
NAMES = ("cpu", "cuda", "ggml")
"""Names that `named_backends` accepts; "cuda:N" means device N, "ggml:DEVICE" another device of ggml's."""
PlaceFunction = Callable[[str, int | None], Backend]
"""`place(name, layer)`: the backend of a weight or KV tensor; `layer` is None outside the layers."""
PlaceLike = Callable[[str, int | None], "Backend | Device"]
"""A `PlaceFunction` as callers may pass it: it may also return a device, which stands for the backend of its name."""


def default_backend(n_threads: int | None = None) -> Backend:
    """CpuBackend where its kernels were measured to be faster than ggml's: on x86 with AVX2 or AVX-512.

    On other hosts GgmlBackend if the extra `ggml` is installed and its library passes the probes.  docs/speed.md has
    the measurements.
    """
    if isa() not in MEASURED:
        with suppress(Error):
            return named_backends(["ggml"], n_threads)[0]
    return named_backends(["cpu"], n_threads)[0]


def named_backends(names: Sequence[str], n_threads: int | None = None) -> list[Backend]:
    """A new backend for each name.  A single CPU backend is named CPU, several are CPU0, CPU1, ..., and so for ggml;
    `cuda cuda` means devices 0 and 1.

    Raises ValueError for an unknown name, or the error of a backend that cannot be opened; then none stays open.
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


def spread_layers(backends: Sequence[Backend], n_layer: int, is_tied: bool = True) -> PlaceFunction:
    """Places layer l of n on backend l * len(backends) // n.

    The tensors after the last layer are on the last backend, and those that all layers share on the first.  The
    embedding is on the last backend, too, if it is also the output matrix (`is_tied`), or if the last backend is a
    host, which reads single rows of it in place.  Otherwise the embedding is on the first backend.
    """
    first = backends[0] if not is_tied and not backends[-1].is_host else backends[-1]

    def place(name: str, layer: int | None) -> Backend:
        if layer is not None:
            return backends[layer * len(backends) // n_layer]
        if name.startswith("token_embd"):
            return first
        return backends[-1] if name.startswith("output") else backends[0]

    return place


def are_apart(backends: Sequence[Backend]) -> bool:
    """Whether the first and the last backend are on different workers, and the last one is no host: then an embedding
    on the last worker would cost each token one more message."""
    return backends[0].worker != backends[-1].worker and not backends[-1].is_host


def checked_place(place: PlaceLike, backends: Sequence[Backend]) -> PlaceFunction:
    """A function that calls the caller's `place` and returns one of `backends`: what `place` returned, or the backend
    named like the device that `place` returned.  PlacementError if there is none."""

    named = {backend.name: backend for backend in backends}

    def answer(name: str, layer: int | None) -> Backend:
        chosen = place(name, layer)
        backend = chosen if isinstance(chosen, Backend) else named.get(getattr(chosen, "name", ""))
        if backend is None or not any(backend is known for known in backends):
            names = [known.name for known in backends]
            raise PlacementError(f"place({name!r}, {layer}) returned {chosen!r}, not one of {names}")
        return backend

    return answer


def as_fit(place: PlaceLike | Fit | None) -> Fit | None:
    """`place` if it is a Fit, None if it is a function or None; PlacementError for a Fit of several models."""
    if place is None or callable(place):
        return None
    from ggml_sched.placement.answer import Fit

    if not isinstance(place, Fit):
        return None
    if max(place.models) > 0:
        raise PlacementError(f"{1 + max(place.models)} models were placed together: pass fit.model(k) for one of them")
    return place
