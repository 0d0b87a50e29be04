"""The default placement: which backend holds each weight and each layer's KV cache.

Invariant: layers are spread in order and as evenly as possible, so that activations pass from one backend to the next
only once; tensors outside the layers are on the first or the last backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggml_sched.backend import Backend
from ggml_sched.errors import PlacementError

__all__ = ["Place", "checked", "spread_layers"]

Place = Callable[[str, int | None], Backend]
"""`place(name, layer)`: the backend of a weight or KV tensor; `layer` is None outside the layers."""


def spread_layers(backends: Sequence[Backend], n_layer: int) -> Place:
    """Layer l of n on backend l * len(backends) // n.

    The embedding and the tensors after the last layer are on the last backend (a tied output matrix is the
    embedding); tensors that all layers share are on the first.
    """

    def place(name: str, layer: int | None) -> Backend:
        if layer is not None:
            return backends[layer * len(backends) // n_layer]
        return backends[-1] if name.startswith(("token_embd", "output")) else backends[0]

    return place


def checked(place: Place, backends: Sequence[Backend]) -> Place:
    """`place`, which the caller gave, as a function that raises PlacementError if it returns none of `backends`."""

    def answer(name: str, layer: int | None) -> Backend:
        backend = place(name, layer)
        if not any(backend is known for known in backends):
            names = [known.name for known in backends]
            raise PlacementError(f"place({name!r}, {layer}) returned {backend!r}, not one of {names}")
        return backend

    return answer
