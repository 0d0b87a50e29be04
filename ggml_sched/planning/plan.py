"""Plans: immutable values, returned by `Scheduler.plan`.

A Plan joins the planner's decisions (`PlanData`: arrays, shared by equal graphs) with one graph and the scheduler's
backends.  It holds no memory of any device.

The modules that print, draw, save and check plans (report, planfile, verify, the room `view`) import this one, so it
cannot import them: the package registers their functions behind `str(plan)`, `explain`, `to_svg`, `save`, `verify`, ...
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from ggml_sched._core import PlanData
from ggml_sched._graph import Graph, Tensor, label
from ggml_sched.backend import Backend
from ggml_sched.errors import GraphError
from ggml_sched.planning.compiler import program_of
from ggml_sched.planning.program import FetchExperts, Load, Program, Run, Transfer, WriteBack
from ggml_sched.threads.cached import cached_property

if TYPE_CHECKING:
    from ggml_sched.placement.devices import Device, LinkLike
    from ggml_sched.planning.envelopes import Messages
    from ggml_sched.planning.fallbacks import Fallback
    from ggml_sched.planning.peaks import ArenaPeaks
    from ggml_sched.planning.verify import Facts
    from ggml_sched.view.differences import Differences

__all__ = ["Copy", "Plan", "Split", "Traffic", "register_plan_methods"]


class _Methods(TypedDict, total=False):
    """The functions that do the work of methods of Plan, by the method's name."""
    facts: Callable[[Plan], Facts]
    save: Callable[[Plan, str | os.PathLike[str]], None]
    verify: Callable[[Plan], None]
    explain: Callable[[Plan, Tensor], str]
    to_dot: Callable[[Plan, Iterable[int | str] | bool | None], str]
    to_svg: Callable[[Plan, Plan | None, Sequence[str]], str]
    save_html: Callable[[Plan, str | os.PathLike[str], Plan | None, Sequence[str]], None]
    differences: Callable[[Plan, Plan, Sequence[str]], Differences]
    notebook: Callable[[Plan], str]
    reduce: Callable[[Plan], tuple[Callable[..., Plan], tuple[Any, ...]]]
    summary: Callable[[Plan], str]
    peaks: Callable[[Plan], tuple[ArenaPeaks, ...]]
    messages: Callable[[Plan], dict[tuple[str, str], Messages]]
    fallbacks: Callable[[Plan, Sequence[Device] | None, LinkLike], tuple[Fallback, ...]]


_METHODS: _Methods = {}
"""{method of Plan: the registered function that does its work}."""


def register_plan_methods(**functions: Unpack[_Methods]) -> None:
    """For each NAME=function: make `plan.NAME(...)` call `function(plan, ...)`."""
    _METHODS.update(functions)


@dataclass(frozen=True)
class Split:
    """Consecutive nodes that one backend computes in one go, after the copies of its inputs are made."""

    backend: Backend
    start: int
    """Position of the first node in `graph.nodes`."""
    stop: int
    """Position after the last node."""
    nodes: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    """Tensors of other backends whose copies begin before the split runs, in this order.  The first ones are weights
    that stores fetch, for this split or for later ones."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Copy:
    """One transfer of a compute: `tensor` goes to `backend` at the start of split number `split`."""

    tensor: Tensor
    backend: Backend
    nbytes: int
    split: int

    @property
    def name(self) -> str:
        """The copy's name, as in ggml: BACKEND#tensor."""
        return f"{self.backend.name}#{self.tensor.name}"


class Traffic(NamedTuple):
    """The number of copies of one compute from one backend to another, and their bytes."""

    copies: int
    nbytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Where every tensor of a graph lives and which backend computes it; see `Scheduler.plan`.

    All sizes and offsets are bytes, tuples are in the order of the scheduler's backends.  `given_graph` is the graph
    that the caller gave; `graph` is the same object, or has the same nodes in another order of execution
    (`reorder=True`).  `assigned_by`, for `explain`: what assigned tensors to backends, if not the caller of
    `Scheduler.set_tensor_backend`.
    """

    graph: Graph
    data: PlanData
    backends: tuple[Backend, ...]
    policy: str
    given_graph: Graph = None  # type: ignore[assignment]
    assigned_by: str | None = None

    def __post_init__(self) -> None:
        if self.given_graph is None:
            self.__dict__["given_graph"] = self.graph

    @property
    def asked(self) -> Graph:
        """The former name of `given_graph`."""
        warnings.warn("Plan.asked: use Plan.given_graph", DeprecationWarning, stacklevel=2)
        return self.given_graph

    @property
    def program(self) -> Program:
        """The steps of a compute, as plain values; `print(plan.program)` shows them."""
        return program_of(self.graph, self.data, self.backends)

    @property
    def fingerprint(self) -> int:
        """The fingerprint of the graph, 128 bits."""
        return self.graph.fingerprint

    @property
    def buffer_sizes(self) -> tuple[int, ...]:
        """Bytes of each backend's arena, which is one buffer or several."""
        return self.data.buffer_sizes

    @property
    def work_sizes(self) -> tuple[int, ...]:
        """Bytes of work memory that each backend needs outside its arena while it computes; see `Backend.work_size`."""
        if self.data._work_sizes is None:
            sizes = dict.fromkeys(self.backends, 0)
            for b, start, stop, _ in self.data.splits:
                backend = self.backends[b]
                sizes[backend] = max(sizes[backend], backend.work_size(self.graph.nodes[start:stop]))
            self.data._work_sizes = tuple(sizes.values())
        return self.data._work_sizes

    @property
    def host_work_sizes(self) -> tuple[int, ...]:
        """Bytes of host memory that each backend needs besides buffers while it computes; see `Backend.host_work`."""
        nodes: dict[Backend, list[Tensor]] = {backend: [] for backend in self.backends}
        for b, start, stop, _ in self.data.splits:
            nodes[self.backends[b]] += self.graph.nodes[start:stop]
        return tuple(backend.host_work(here) for backend, here in nodes.items())

    @property
    def chunk_sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each backend the bytes of each of its buffers; several only where `max_buffer_size` is too small for
        one."""
        return self.data.chunk_sizes

    @property
    def methods(self) -> tuple[str, ...]:
        """For each backend the name of the method that chose the offsets in its arena, such as "best fit"."""
        return self.data.methods

    @property
    def optimal(self) -> tuple[bool, ...]:
        """Whether each arena is as small as its lifetimes allow: no larger than the live bytes."""
        return tuple(size == live for size, live in zip(self.buffer_sizes, self.live_bytes, strict=True))

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """For each backend the most bytes alive at one position, aligned: no packing of these lifetimes is smaller."""
        return self.data.live_bytes

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The splits, in order; together they cover all nodes of the graph."""
        graph, like = self.graph, self.data.copies
        return tuple(
            Split(self.backends[backend], start, stop, graph.nodes[start:stop],
                  tuple(graph.tensors[like[c][0]] for c in inputs))
            for backend, start, stop, inputs in self.data.splits
        )

    @cached_property
    def groups(self) -> tuple[tuple[Tensor, ...], ...]:
        """The fusion groups: nodes that their backend computes as one kernel, where the last of them stands.

        A result that only members of the group read need not be written to memory.
        """
        return tuple(tuple(self.graph.nodes[k] for k in group) for group in self.data.groups)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Every copy of one compute, without write-backs, in order."""
        tensors, copies = self.graph.tensors, self.data.copies
        return tuple(
            Copy(tensors[copies[c][0]], self.backends[copies[c][1]], tensors[copies[c][0]].nbytes, i)
            for i, split in enumerate(self.data.splits) for c in split[3]
        )

    @property
    def copy_bytes(self) -> int:
        """Bytes that the copies of one compute move between backends."""
        return sum(copy.nbytes for copy in self.copies)

    @cached_property
    def fetches(self) -> tuple[Copy, ...]:
        """The copies that stores fetch; the `split` of a copy is the one before which its fetch begins."""
        return tuple(copy for copy in self.copies if _is_stored(copy.tensor))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """For each backend the most bytes that fetched weights take in its arena at one position."""
        data, found = self.data, []
        for b in range(len(self.backends)):
            changes = [0] * (len(data.sequence) + 2)
            for c, (like, at) in enumerate(data.copies):
                lifetime = data.lifetime(data.n_tensors + c)
                if at == b and lifetime is not None and _is_stored(self.graph.tensors[like]):
                    changes[lifetime[0]] += data.size(data.n_tensors + c)
                    changes[lifetime[1] + 1] -= data.size(data.n_tensors + c)
            found.append(max(accumulate(changes)))
        return tuple(found)

    def backend_of(self, t: Tensor) -> Backend | None:
        """The backend that computes a node or holds a leaf; None for a leaf that no node reads."""
        index = self.data.backend_index(self.index_of(t))
        return None if index < 0 else self.backends[index]

    def offset_of(self, t: Tensor) -> int | None:
        """Bytes from the start of the buffer that holds the tensor: the one with index `chunk_of` in the arena.

        For a view it is its root's offset plus `view_offs`.  None for a resident, and for a tensor without memory: the
        plan chose no address for them.
        """
        offset = self.data.offset(self.index_of(t))
        return None if offset < 0 else offset

    def chunk_of(self, t: Tensor) -> int:
        """The index of the buffer that holds a tensor, in its backend's arena; 0 unless the arena needs several."""
        return self.data.chunk(self.index_of(t))

    def name_of(self, i: int) -> str:
        """The name of id i: a graph tensor's own name, or BACKEND#tensor for a copy."""
        if i < self.data.n_tensors:
            return self.graph.tensors[i].name
        like, backend = self.data.copies[self.data.copy_of(i)]
        return f"{self.backends[backend].name}#{self.graph.tensors[like].name}"

    def label_of(self, i: int) -> str:
        """How messages call id i: 'NAME' or tensor ID, the same for a copy with BACKEND# before it."""
        if i < self.data.n_tensors:
            return label(self.graph.tensors[i])
        like, backend = self.data.copies[self.data.copy_of(i)]
        return f"{self.backends[backend].name}#{label(self.graph.tensors[like])}"

    @property
    def facts(self) -> Facts:
        """The plan as plain values: the argument of the checks in ggml_sched.planning.verify."""
        return _METHODS["facts"](self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON for `gs.load_plan(path, graph, backends)`; an existing file is replaced atomically."""
        _METHODS["save"](self, path)

    def verify(self) -> None:
        """Check the plan and its program, independently of the planner; HazardError with a reason code if unsound."""
        _METHODS["verify"](self)

    def explain(self, t: Tensor) -> str:
        """A text: why a tensor is on its backend, what it shares memory with, and where it is copied to.

        For a node also which backends do not support it, and why each better backend was not chosen.
        """
        return _METHODS["explain"](self, t)

    def peaks(self) -> tuple[ArenaPeaks, ...]:
        """For each backend's arena its peaks, and the sets of tensors that must shrink together to make it smaller.

        Each prints as tables.  With two independent peaks a set has tensors of both, because lowering one alone saves
        nothing.  Tensors whose names differ in numbers alone count as one series.
        """
        return _METHODS["peaks"](self)

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """{(from, to): copies and bytes of one compute}, by the names of backends.

        Data that stays in place between computes (copies of weights) does not count.  Where only chosen experts are
        copied, all experts of the weight count; where a store fetches chosen experts, as many as can be chosen.  Inputs
        that the caller sets come from no backend, and do not count.
        """
        found: dict[tuple[str, str], Traffic] = {}
        for step in self.program.steps:
            if isinstance(step, (Load, Run)) or step.if_changed:
                continue
            one, other = (self.backends[b].name for b in self.ends(step))
            copies, nbytes = found.get((one, other), (0, 0))
            size = step.nbytes if isinstance(step, FetchExperts) else self.graph.tensors[step.tensor].nbytes
            found[one, other] = Traffic(copies + 1, nbytes + size)
        return found

    def ends(self, step: Transfer) -> tuple[int, int]:
        """The backends, by index, from which and to which a step of the program copies its tensor."""
        # A view's memory is that of its root, wherever the view is computed.
        home = self.data.backend_index(self.index_of(self.graph.tensors[step.tensor].root))
        if isinstance(step, FetchExperts):
            return step.backend, home
        other = step.locations[0].backend
        return (other, home) if isinstance(step, WriteBack) else (home, other)

    def messages(self) -> dict[tuple[str, str], Messages]:
        """{(from, to): messages and bytes of one compute} between the processes of the backends: names of workers, and
        "driver" for this process; empty where all backends are of this process.

        What the host sets and the outputs that it reads are counted, on all links that they pass.  The messages of the
        first compute are larger than these: they also carry the splits to the workers.
        """
        return _METHODS["messages"](self)

    def fallbacks(self, devices: Sequence[Device] | None = None, link: LinkLike = None) -> tuple[Fallback, ...]:
        """Nodes that a later backend computes because a better one refused them: which, why, and what that costs.

        One entry for the nodes of an op that one backend refused for one reason; `print` shows it as a sentence.  With
        `devices` and `link`, as for `gs.price`, an entry's `seconds` is the time that one compute would save if the
        backend supported the nodes, by the price of the plan for that case; the most expensive entries are first.
        """
        return _METHODS["fallbacks"](self, devices, link)

    def differences(self, other: Plan, names: Sequence[str] = ()) -> Differences:
        """The differences of another plan, of the same graph or of one with the same names; prints as text.

        They are bytes, splits and copies, nodes on other backends and the rules that placed them, and tensors that
        share memory in one of the plans only.  `names`: what to call the two, such as ("before", "after").
        """
        return _METHODS["differences"](self, other, names)

    def to_svg(self, other: Plan | None = None, names: Sequence[str] = ()) -> str:
        """The plan as an SVG drawing: which backend computes when, and the memory map of each arena.

        Time goes to the right, addresses upwards; a block is the memory of one tensor, or of a chain of nodes that
        reuse it in place.  `other`: a second plan, drawn beside this one to the same scale.  `names`: their titles.
        """
        return _METHODS["to_svg"](self, other, names)

    def save_html(self, path: str | os.PathLike[str], other: Plan | None = None, names: Sequence[str] = ()) -> None:
        """Write a page that shows the plan in a browser, in one file that needs no network.

        Memory maps to pan, to zoom and to search, with the reason for each choice; what binds each arena; splits,
        copies, and nodes that fell back.  `other`: a second plan beside this one, with a list of differences; `names`:
        what to call the two.  An existing file is replaced atomically.  Error without the extra `view`.
        """
        _METHODS["save_html"](self, path, other, names)

    def to_dot(self, expand: Iterable[int | str] | bool | None = None) -> str:
        """The plan as a Graphviz graph: coloured by backend, a cluster for each split, copies dashed.

        Of a graph of more than 100 nodes each layer is one box; `expand` names the layers whose nodes are drawn, such
        as [0, 31], or is True for all.  ValueError for a layer that the graph does not have.
        """
        return _METHODS["to_dot"](self, expand)

    def _repr_svg_(self) -> str:
        """The drawing in a notebook."""
        return self.to_svg()

    def _repr_html_(self) -> str:
        """The plan in a notebook: the drawing, and the text of `print(plan)` to unfold."""
        return _METHODS["notebook"](self)

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[Any, ...]]:
        """A pickle also holds the caller's graph.  Its backends become RecordedBackends (recorded.py): they have no
        memory, and answer support queries as the real ones did."""
        return _METHODS["reduce"](self)

    def __copy__(self) -> Plan:
        """The plan itself, which is immutable: a pickle's backends would be others."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def index_of(self, t: Tensor) -> int:
        """The position of a tensor in `graph.tensors`; GraphError for a tensor of another graph."""
        if not isinstance(t, Tensor):
            raise TypeError(f"not a Tensor: {t!r}")
        index = self.graph.id_of(t)
        if index < 0:
            raise GraphError(f"{t!r} is not a tensor of the planned graph")
        return index

    def __str__(self) -> str:
        """A table of the backends and the splits."""
        return _METHODS["summary"](self)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{b.name} {n}" for b, n in zip(self.backends, self.buffer_sizes, strict=True))
        counts = f"{len(self.graph)} nodes: {self.data.n_splits} splits, {len(self.copies)} copies"
        return f"<Plan of {counts}, bytes {sizes}>"


def _is_stored(t: Tensor) -> bool:
    """Whether a tensor is a weight of a store, or a view of one."""
    owner = t.root.backend
    return owner is not None and owner.is_store and t.root.is_resident
