"""Programs: every step of a compute, as plain values.

compiler.py makes programs, an allocation binds their steps to addresses, and `Plan.verify` simulates the same steps.

Steps are issued in their order in the program, each to the queue of its backend: **the steps of one queue run one after
the other; steps of different queues are ordered by waits alone.**  Ids are those of the plan: graph tensors, then
copies, then further slots of copies.  Compute number k uses slot k % len(locations) of a copy with several slots.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from ggml_sched.planning.tables import preformatted
from ggml_sched.planning.waits import Wait
from ggml_sched.threads.cached import cached_property

__all__ = ["Copy", "CopyExperts", "Fetch", "FetchExperts", "Load", "Location", "Program", "Read", "Run", "Step", "Wait",
           "WriteBack", "bank_of", "describe", "program_values"]


class Location(NamedTuple):
    """The location of a tensor or a copy slot: `offset` bytes from the start of buffer `chunk` of a backend's arena."""

    id: int
    backend: int
    chunk: int
    offset: int


class Load(NamedTuple):
    """Write the data that the caller set for a leaf to the leaf's memory, or to a copy of it on another backend.

    `if_changed`: no other tensor uses that memory, so the step is left out of a compute if its data is there already.
    """

    backend: int
    tensor: int
    """The leaf."""
    start: int
    """The first byte of the leaf that is loaded; not 0 where a copy is of a view of the leaf."""
    nbytes: int
    locations: tuple[Location, ...]
    """The destinations of the data: one location, or one for each slot of a copy, which computes use in turn."""
    if_changed: bool
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["load"]:
        return "load"


class Copy(NamedTuple):
    """Copy a tensor to another backend.

    The step is in the queue of `backend`: the destination's backend, or the source's, if the destination takes data
    while it computes.  `if_changed`: no other tensor uses the copy's memory, so an unchanged source is not copied
    again.
    """

    backend: int
    tensor: int
    locations: tuple[Location, ...]
    if_changed: bool
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["copy"]:
        return "copy"


class Fetch(NamedTuple):
    """Read a weight from its store to the memory of a copy, which every compute does anew.

    The step is in the queue of the store.  It may write all bytes of the copy's memory: those beside the weight's, too.
    """

    backend: int
    """The store."""
    tensor: int
    start: int
    """The first byte that is read of the weight, the root of `tensor`; not 0 where a copy is of a view of it."""
    nbytes: int
    locations: tuple[Location, ...]
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["fetch"]:
        return "fetch"

    @property
    def if_changed(self) -> bool:
        return False


class CopyExperts(NamedTuple):
    """Copy only those experts of a weight whose numbers are in the tensor `ids`, which saves most of the bytes.

    The copy's only reader is a MUL_MAT_ID that reads the same expert numbers.
    """

    backend: int
    tensor: int
    ids: int
    locations: tuple[Location, ...]
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["copy experts"]:
        return "copy experts"

    @property
    def if_changed(self) -> bool:
        return False


def bank_of(buffer: object) -> Any:
    """The bank whose experts a buffer holds in slots (an `ExpertBank`, or what a plan file has recorded of one); None
    for any other buffer, and if `buffer` is None."""
    return getattr(buffer, "experts", None)


class FetchExperts(NamedTuple):
    """Read from a store those experts of a bank whose numbers are in the tensor `ids` and that are in no slot.

    A bank is the weights of a layer from which the same numbers choose.  Its experts stay in their slots until other
    experts, of this or another bank, need the slots, so the step may write to the memory of every bank of its store.
    The nodes that read the bank follow, before the next such step.
    """

    backend: int
    """The store."""
    tensor: int
    """The first of `weights`."""
    weights: tuple[int, ...]
    """The weights of the bank, each in a resident's memory."""
    ids: int
    locations: tuple[Location, ...]
    """Where the numbers are read: the location of `ids`, or of its copy."""
    nbytes: int
    """The most bytes that are read: each number in `ids` may name another expert, none of which is in a slot."""
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["fetch experts"]:
        return "fetch experts"

    @property
    def if_changed(self) -> bool:
        return False


class Read(NamedTuple):
    """The node at `position` reads a copy instead of its source number `slot`."""

    position: int
    slot: int
    locations: tuple[Location, ...]


class Run(NamedTuple):
    """Compute the nodes at positions first .. last of the graph's order (views among them compute nothing)."""

    backend: int
    first: int
    last: int
    reads: tuple[Read, ...]
    into: tuple[Location, ...] = ()
    """The locations of the copy into which the last node computes, because its own memory is on another backend; else
    empty."""
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["run"]:
        return "run"

    @property
    def if_changed(self) -> bool:
        return False


class WriteBack(NamedTuple):
    """Copy the result of node `tensor`, which was computed into a copy, to the node's own memory."""

    backend: int
    tensor: int
    locations: tuple[Location, ...]
    waits: tuple[Wait, ...] = ()

    @property
    def kind(self) -> Literal["write back"]:
        return "write back"

    @property
    def if_changed(self) -> bool:
        return False


Transfer: TypeAlias = Load | Copy | CopyExperts | Fetch | FetchExperts | WriteBack
"""A step that moves data: to `locations`; for a WriteBack from there; for FetchExperts to the memory of the bank."""
Step: TypeAlias = Transfer | Run
Named: TypeAlias = Callable[[int], str]
"""Gives the name of the tensor with an id, or of the backend with an index."""


@dataclass(frozen=True, repr=False)
class Program:
    """The steps of a compute: immutable, picklable, compared by value."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    """Ids of leafs that the caller must have set: their data is read before a node writes it."""
    copy_slots: int
    """The most slots that a copy has: that many consecutive computes use different slots of it.  1 without copies."""

    @cached_property
    def awaited(self) -> frozenset[int]:
        """Numbers of the steps at whose end an event must be recorded, because another step may wait for it.

        Where a step is left out of a compute (`if_changed`), a wait for it becomes a wait for the step before it in its
        queue.  So that step is awaited, too, and, if it may be left out itself, the step before it, back to one that
        always runs.
        """
        found: set[int] = set()
        for k in {wait.step for step in self.steps for wait in step.waits}:
            queue = self.queues[self.steps[k].backend]
            at = queue.index(k)
            for other in (*reversed(queue[: at + 1]), *reversed(queue[at + 1 :])):
                found.add(other)
                if not self.steps[other].if_changed:
                    break
        return frozenset(found)

    @cached_property
    def queues(self) -> dict[int, list[int]]:
        """{backend: the numbers of the steps in its queue, in order}."""
        found: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            found.setdefault(step.backend, []).append(k)
        return found

    @cached_property
    def reach(self) -> int:
        """The number of computes back to the earliest step for which a step waits: the largest `Wait.back`."""
        return max((wait.back for step in self.steps for wait in step.waits), default=0)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(f"{k:>4}  {describe(step)}" for k, step in enumerate(self.steps))

    def _repr_html_(self) -> str:
        """The steps in a notebook."""
        return preformatted(str(self))

    def __repr__(self) -> str:
        counts = Counter(step.kind for step in self.steps)
        return f"<Program of {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'no steps'}>"


def describe(step: Step, name: Named = lambda i: f"id {i}", backend: Named = lambda b: f"backend {b}") -> str:
    """A step in words; `name(id)` and `backend(index)` give the names in it."""
    here = backend(step.backend)
    match step:
        case Load():
            what = f"load {name(step.tensor)} to {_where(step.locations, name, backend)}"
        case Copy():
            what = f"copy {name(step.tensor)} to {_where(step.locations, name, backend)}"
        case Fetch():
            part = f"bytes {step.start} .. {step.start + step.nbytes} of " if step.start else ""
            what = f"fetch {part}{name(step.tensor)} to {_where(step.locations, name, backend)}"
        case CopyExperts():
            what = (f"copy the experts of {name(step.tensor)} that {name(step.ids)} names to "
                    f"{_where(step.locations, name, backend)}")
        case FetchExperts():
            what = f"fetch the experts of {', '.join(map(name, step.weights))} that {name(step.ids)} names"
        case Run():
            nodes = f"nodes {step.first} .. {step.last}" if step.first < step.last else f"node {step.first}"
            into = f", the last one into {_where(step.into, name, backend)}" if step.into else ""
            what = f"run {nodes}{into}"
        case WriteBack():
            what = f"write {_where(step.locations, name, backend)} back to {name(step.tensor)}"
    kept = ", unless unchanged" if step.if_changed else ""
    waits = ", ".join(f"{w.step}" if not w.back else f"{w.step} of {w.back} before" for w in step.waits)
    return f"{here}: {what}{kept}{f', after {waits}' if waits else ''}"


def _where(locations: tuple[Location, ...], name: Named, backend: Named) -> str:
    """In words: the locations of a tensor, or of the slots of a copy."""
    first = locations[0]
    chunk = f" buffer {first.chunk}" if first.chunk else ""
    offsets = " or ".join(str(location.offset) for location in locations)
    return f"{name(first.id)} at {offsets} of {backend(first.backend)}{chunk}"


# -- former names -----------------------------------------------------------------------------------


def _former(name: str, instead: str) -> property:
    """A property under its former name, for one more release."""
    def get(self: Any) -> Any:
        warnings.warn(f"{type(self).__name__}.{name}: use {instead}", DeprecationWarning, stacklevel=2)
        return getattr(self, instead)

    return property(get)


for _kind in (Load, Copy, CopyExperts, Read, Run, WriteBack):
    for _name, _instead in (("places", "locations"), ("keeps", "if_changed")):
        if hasattr(_kind, _instead):
            setattr(_kind, _name, _former(_name, _instead))
Program.turns = _former("turns", "copy_slots")      # type: ignore[attr-defined]


# -- as plain values --------------------------------------------------------------------------------

KEYS = {"locations": "places", "if_changed": "keeps"}
"""{field of a step: its key in a plan file}."""


def program_values(program: Program) -> dict[str, Any]:
    """A program as lists, numbers and strings, for JSON; some of a plan file's keys are former names of fields."""
    return {"turns": program.copy_slots, "inputs": list(program.inputs),
            "steps": [{"kind": step.kind, **{KEYS.get(field, field): _plain(value)
                                             for field, value in step._asdict().items()}} for step in program.steps]}


def _plain(value: object) -> object:
    """A tuple, and each tuple in it, as a list."""
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
