"""Limits of memory: the argument `memory` of `load`, and the part of a limit of a whole process that is left for a
model.

A limit of a model counts all that the model allocates: the weights that stay, the window of the others, cache and
states, arenas, work memory of kernels and of the store.  A limit of a process also counts what the process holds
already, and what Python needs for the model's objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ggml_sched.backend import number_of_bytes
from ggml_sched.errors import OutOfMemory

if TYPE_CHECKING:
    from typing import TypeAlias

    from ggml_sched.backend import Backend

    Bytes: TypeAlias = int | str
    MemoryLike: TypeAlias = Bytes | Mapping[Backend, Bytes]
    """A limit in bytes, or as a text like "4GiB", for the only backend over host memory; or {backend: its limit}."""

__all__ = ["limits_of", "process_budget"]

OBJECTS = 9 << 20
"""Bytes that Python takes for a model of any size besides what its limit counts: modules that are imported later, and
arrays of inputs and logits."""
NODE = 12 << 10
"""Bytes that Python takes for each node of a graph besides: in the graphs that a runner keeps under a limit, their
plans and their bound steps, with a fetch for each weight."""
NODES = 1280
"""The nodes of the graphs of a model where the caller does not say how many: those of a Llama of 42 layers."""
VOCABULARY = 400
"""Bytes of a tokenizer for each token of the vocabulary."""
STEP = 1 << 20


def bytes_of(memory: Bytes, what: str = "memory") -> int:
    """The bytes that a number, or a text like "4GiB", means; TypeError and ValueError name the argument, `what`."""
    if isinstance(memory, str):
        from ggml_sched.placement.specs import read_bytes

        return read_bytes(memory, what)
    return number_of_bytes(memory, what, " or a text like '4GiB'")


def limits_of(memory: MemoryLike | None, backends: Sequence[Backend]) -> dict[Backend, int]:
    """{backend: bytes} of the argument `memory`; empty for None.

    TypeError and ValueError for anything else; ValueError also for a single limit if none or several of the backends
    are over host memory.
    """
    if memory is None:
        return {}
    if isinstance(memory, Mapping):
        for backend in memory:
            if not any(backend is known for known in backends):
                raise ValueError(f"memory names {backend!r}, which is not one of the model's backends")
        return {backend: bytes_of(nbytes, f"memory of {backend.name}") for backend, nbytes in memory.items()}
    hosts = [backend for backend in backends if backend.is_host]
    if len(hosts) != 1:
        raise ValueError(f"one limit of memory, and {len(hosts)} backends over the host's: give each its own, "
                         "memory={backend: bytes}")
    return {hosts[0]: bytes_of(memory)}


def process_budget(limit: Bytes, n_vocab: int = 0, n_nodes: int = NODES) -> int:
    """The argument `memory` of `load` with which this process holds no more than `limit` bytes, of anonymous memory and
    of pages of files together.

    Subtracted are what the process holds now, and what Python will need: for arrays of a model, for graphs and plans of
    `n_nodes` nodes (`len(model_graphs(path, n_batch=1)[0].nodes)`: a layer has 30 to 50), and for a vocabulary of
    `n_vocab` tokens.  Rounded down to whole MiB, so that it varies little from run to run.  OutOfMemory if nothing is
    left, OSError where the system does not say what a process holds.
    """
    limit = bytes_of(limit, "limit")
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    objects = OBJECTS + n_nodes * NODE + n_vocab * VOCABULARY
    left = (limit - held - objects) // STEP * STEP
    if left <= 0:
        raise OutOfMemory(f"a limit of {limit} bytes: the process holds {held} already, and Python needs "
                          f"{objects} more for a model", None, limit - left, limit)
    return left
