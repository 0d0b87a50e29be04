"""Programs: every step of a compute, as plain values.

compiler.py makes them, an allocation only binds them to addresses, and `Plan.verify` executes exactly what a compute
does.

Steps stand in the order in which they are issued.  Each has a backend, in whose queue it stands: **the steps of one
queue run one after the other; between queues, only waits order them.**  Ids count as in a plan: graph tensors, copies,
further places of copies.  A copy with several places is a ring: compute number k uses place k % len(places) of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from ggml_sched.planning.waits import Wait

__all__ = ["Copy", "CopyExperts", "Load", "Place", "Program", "Read", "Run", "Step", "Wait", "WriteBack", "describe",
           "program_values"]


class Place(NamedTuple):
    """Where the bytes of an id are: `offset` bytes into buffer `chunk` of a backend's arena."""

    id: int
    backend: int
    chunk: int
    offset: int


class Load(NamedTuple):
    """Bring what the caller has set for a leaf to a place: its own, or that of a copy which other backends read.

    `keeps`: nothing else uses the place, so it is loaded again only after a new `set`.
    """

    backend: int
    tensor: int
    """The leaf."""
    start: int
    """First of its bytes that are brought (a copy may be of a view)."""
    nbytes: int
    places: tuple[Place, ...]
    keeps: bool
    waits: tuple[Wait, ...] = ()

    kind = "load"


class Copy(NamedTuple):
    """Copy a tensor to a place on another backend.

    Made by the queue of `backend`: the source's (pushed, while the destination may be computing) or the
    destination's.  `keeps`: nothing else uses the place, so an unchanged source is not copied again.
    """

    backend: int
    tensor: int
    places: tuple[Place, ...]
    keeps: bool
    waits: tuple[Wait, ...] = ()

    kind = "copy"


class CopyExperts(NamedTuple):
    """Copy only those experts of a weight that `ids` names; only the mixture with these ids reads the place."""

    backend: int
    tensor: int
    ids: int
    places: tuple[Place, ...]
    waits: tuple[Wait, ...] = ()

    kind = "copy experts"
    keeps = False


class Read(NamedTuple):
    """The node at this position reads a copy in this source slot."""

    position: int
    slot: int
    places: tuple[Place, ...]


class Run(NamedTuple):
    """Compute the nodes at positions first .. last of the graph's order (views among them compute nothing)."""

    backend: int
    first: int
    last: int
    reads: tuple[Read, ...]
    into: tuple[Place, ...] = ()
    """The copy that the last node computes into, because its own memory is another backend's."""
    waits: tuple[Wait, ...] = ()

    kind = "run"
    keeps = False


class WriteBack(NamedTuple):
    """Copy what node `tensor` computed into a copy to the node's own memory."""

    backend: int
    tensor: int
    places: tuple[Place, ...]
    waits: tuple[Wait, ...] = ()

    kind = "write back"
    keeps = False


Step = Load | Copy | CopyExperts | Run | WriteBack


class Program:
    """The steps of a compute, immutable; equal by value, picklable."""

    __slots__ = ("__dict__", "inputs", "steps", "turns")

    def __init__(self, steps: Sequence[Step], inputs: Sequence[int], turns: int) -> None:
        set_field = super().__setattr__
        set_field("steps", tuple(steps))
        set_field("inputs", tuple(inputs))
        set_field("turns", turns)

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    """Leafs whose data some step reads before anything has written it: the caller must have set them."""
    turns: int
    """How many computes use different places, one after the other; 1 without rings."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a program is a value: {name!r} cannot be changed")

    @cached_property
    def awaited(self) -> frozenset[int]:
        """Steps that others wait for.

        Who waits for a step that is left out of a compute waits for the one before it in its queue instead.
        """
        found: set[int] = set()
        for k in {wait.step for step in self.steps for wait in step.waits}:
            queue = self.queues[self.steps[k].backend]
            at = queue.index(k)
            for other in (*reversed(queue[: at + 1]), *reversed(queue[at + 1 :])):
                found.add(other)
                if not self.steps[other].keeps:
                    break
        return frozenset(found)

    @cached_property
    def queues(self) -> dict[int, list[int]]:
        """For each backend its steps, in order."""
        found: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            found.setdefault(step.backend, []).append(k)
        return found

    @cached_property
    def reach(self) -> int:
        """How many computes back a wait goes at most."""
        return max((wait.back for step in self.steps for wait in step.waits), default=0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (self.steps, self.inputs, self.turns) == (other.steps, other.inputs, other.turns)

    def __hash__(self) -> int:
        return hash((self.steps, self.inputs, self.turns))

    def __reduce__(self):
        return Program, (self.steps, self.inputs, self.turns)

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(f"{k:>4}  {describe(step)}" for k, step in enumerate(self.steps))

    def __repr__(self) -> str:
        counts = Counter(step.kind for step in self.steps)
        return f"<Program of {', '.join(f'{n} {kind}' for kind, n in counts.items()) or 'no steps'}>"


def describe(step: Step, name=lambda i: f"id {i}", backend=lambda b: f"backend {b}") -> str:
    """A step in words; `name` and `backend` say what ids and backends are called."""
    here = backend(step.backend)
    match step:
        case Load():
            what = f"load {name(step.tensor)} to {_where(step.places, name, backend)}"
        case Copy():
            what = f"copy {name(step.tensor)} to {_where(step.places, name, backend)}"
        case CopyExperts():
            what = (f"copy the experts of {name(step.tensor)} that {name(step.ids)} names to "
                    f"{_where(step.places, name, backend)}")
        case Run():
            nodes = f"nodes {step.first} .. {step.last}" if step.first < step.last else f"node {step.first}"
            into = f", the last one into {_where(step.into, name, backend)}" if step.into else ""
            what = f"run {nodes}{into}"
        case WriteBack():
            what = f"write {_where(step.places, name, backend)} back to {name(step.tensor)}"
    kept = ", unless unchanged" if step.keeps else ""
    waits = ", ".join(f"{w.step}" if not w.back else f"{w.step} of {w.back} before" for w in step.waits)
    return f"{here}: {what}{kept}{f', after {waits}' if waits else ''}"


def _where(places: tuple[Place, ...], name, backend) -> str:
    first = places[0]
    chunk = f" buffer {first.chunk}" if first.chunk else ""
    offsets = " or ".join(str(place.offset) for place in places)
    return f"{name(first.id)} at {offsets} of {backend(first.backend)}{chunk}"


# -- as plain values --------------------------------------------------------------------------------


def program_values(program: Program) -> dict:
    """A program as lists, numbers and words, as JSON holds them."""
    return {"turns": program.turns, "inputs": list(program.inputs),
            "steps": [{"kind": step.kind, **_values(step._asdict())} for step in program.steps]}


def _values(value):
    if isinstance(value, dict):
        return {key: _values(v) for key, v in value.items()}
    return [_values(v) for v in value] if isinstance(value, tuple) else value
