"""Timelines of traces in the trace event format, which Perfetto and Chrome open.

Each backend is a process with rows for what it runs, receives, sends and waits for, and for its nodes; the caller is a
process, too, from which inputs come.  A step that moves a tensor is a slice at both ends, in the row "sends to" of one
and in the row "receives from" of the other, joined by an arrow.  Steps are read by their fields, so that a new kind of
step with a destination is drawn without a change.  Slices of one row never overlap in part; computes that are queued,
and prices, may overlap, and are asynchronous events.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (times in microseconds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from ggml_sched._files import replace_file
from ggml_sched.execution.tracing import Span, Trace, TracedCompute
from ggml_sched.placement.devices import Device, LinkLike
from ggml_sched.placement.pricing import price_steps
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import Run, Step
from ggml_sched.planning.report import shape_text
from ggml_sched.planning.tables import distinct, memory_text
from ggml_sched.view.measured import step_words

__all__ = ["events", "save"]

Event = dict[str, Any]
CALLER, SOURCES = "the caller", "sources"
"""The two processes of a timeline that are no backends: the program that calls computes and sets inputs, and all other
memory that data is copied from, such as files."""
RUNS, WAITS, NODES = "runs", "waits", "nodes"


def save(trace: Trace, path: str | os.PathLike[str], devices: Sequence[Device] | None = None, link: LinkLike = None,
         fill: float = 1.0) -> None:
    """Write the timeline of a trace to a file; does the work of `Trace.save`."""
    replace_file(path, _parts(trace, devices, link, fill))


def _parts(trace: Trace, devices: Sequence[Device] | None, link: LinkLike, fill: float) -> Iterator[bytes]:
    """The bytes of the file of a timeline, an event at a time: all events together take many times its size."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    yield b'{"traceEvents":['
    for number, event in enumerate(events(trace, devices, link, fill)):
        yield (("," if number else "") + encode(event)).encode()
    other = {"displayTimeUnit": "ns", "otherData": {"exact": trace.is_exact, "computes": len(trace.recordings)}}
    yield ("]," + encode(other)[1:]).encode()


def events(trace: Trace, devices: Sequence[Device] | None = None, link: LinkLike = None,
           fill: float = 1.0) -> Iterator[Event]:
    """The events of a trace: the names of processes and rows first, then computes in order."""
    prices: dict[int, tuple[float, ...]] = {}
    if devices is not None:
        for recording in trace.recordings:
            if id(recording.plan) not in prices:
                prices[id(recording.plan)] = price_steps(recording.plan, devices, link, fill)
    yield from _named(trace, lambda: _events(trace, prices))


def _events(trace: Trace, prices: Mapping[int, tuple[float, ...]]) -> Iterator[Event]:
    """The events of all computes, with the names of processes and rows in place of numbers; `prices`: {id of a plan:
    the prices of its steps}."""
    numbers, names = count(1), _processes(trace)
    for number, compute in enumerate(trace.each_compute()):
        plan = compute.plan
        priced = prices.get(id(plan), ())
        yield from _compute(number, compute, numbers)
        for span in compute.steps:
            yield from _step(trace, plan, names, span, priced, numbers)
        yield from _waits(compute, names)
        yield from _nodes(compute, names)
        yield from _prices(compute, names, priced, numbers)


class _Ends(NamedTuple):
    """The processes between which a step moves a tensor, and its bytes."""

    source: str
    to: str
    nbytes: int


# -- events -----------------------------------------------------------------------------------------------


def _slice(process: str, row: str, name: str, start: float, stop: float, kind: str, **args: object) -> Event:
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": kind, "ts": start * 1e6,
            "dur": max(0.0, stop - start) * 1e6, "args": args}


def _asynchronous(process: str, name: str, start: float, stop: float, kind: str, number: int,
                  **args: object) -> Iterator[Event]:
    """The begin and the end of an event that may overlap others of its kind; viewers give it a row of its own."""
    one = {"pid": process, "tid": RUNS, "name": name, "cat": kind, "id": number}
    yield {"ph": "b", "ts": start * 1e6, "args": args, **one}
    yield {"ph": "e", "ts": stop * 1e6, "args": {}, **one}


def _compute(number: int, compute: TracedCompute, numbers: Iterator[int]) -> Iterator[Event]:
    """The events of a compute as a whole: the call; in the call, the wait for the backends; and, if queued work ended
    after the call returned, the compute until the end of this work."""
    plan, failed = compute.plan, {"failed": True} if compute.failed else {}
    tokens = plan.graph.meta.get("n_tokens")
    more = f", {tokens} token{'s' if tokens != 1 else ''}" if isinstance(tokens, int) else ""
    name = f"compute {number}: {len(plan.graph):,} nodes{more}"
    yield _slice(CALLER, RUNS, name, compute.start, compute.returned, "compute", splits=len(plan.splits), **failed)
    if compute.returned > compute.issued:
        yield _slice(CALLER, RUNS, "wait for the backends", compute.issued, compute.returned, "wait")
    if compute.stop > compute.returned:
        yield from _asynchronous(CALLER, f"{name}, queued", compute.start, compute.stop, "queued", next(numbers))


def _step(trace: Trace, plan: Plan, names: Sequence[str], span: Span, prices: Sequence[float],
          numbers: Iterator[int]) -> Iterator[Event]:
    """The events of one step: a slice for a run; for a step that moves a tensor a slice at both ends, and an arrow."""
    step = plan.program.steps[span.number]
    words = step_words(plan, span.number)
    args: dict[str, Any] = {"step": span.number}
    if not trace.is_exact and plan.backends[step.backend].asynchronous:
        args["time"] = "until it was issued"
    if prices and prices[span.number] > 0:
        args["price in us"] = round(prices[span.number] * 1e6, 3)
        args["took / price"] = round((span.stop - span.start) / prices[span.number], 3)
    if isinstance(step, Run):
        yield _slice(names[step.backend], RUNS, words, span.start, span.stop, step.kind, first=step.first,
                     last=step.last, **args)
        return
    ends = _ends(plan, names, step)
    name, args = f"{words}, {memory_text(ends.nbytes)}", {**args, "bytes": ends.nbytes, **_tensor(plan, step)}
    out, into = f"sends to {ends.to}", f"receives from {ends.source}"
    yield _slice(ends.source, out, name, span.start, span.stop, step.kind, **args)
    yield _slice(ends.to, into, name, span.start, span.stop, step.kind, **args)
    flow = {"cat": step.kind, "name": f"{step.kind} of {memory_text(ends.nbytes)}", "id": next(numbers),
            "args": {"bytes": ends.nbytes}}
    # Both points of the arrow are within their slices: a point at the end of a slice would belong to the next one.
    yield {"ph": "s", "pid": ends.source, "tid": out, "ts": span.start * 1e6, **flow}
    yield {"ph": "f", "bp": "e", "pid": ends.to, "tid": into, "ts": (span.start + span.stop) / 2 * 1e6, **flow}


def _ends(plan: Plan, names: Sequence[str], step: Step) -> _Ends:
    """The ends of a step that moves a tensor, from its fields; only for a load does its kind matter: the source is the
    caller."""
    t = plan.graph.tensors[step.tensor]  # type: ignore[union-attr]
    nbytes = int(getattr(step, "nbytes", t.nbytes))
    source, to = (names[b] if b >= 0 else SOURCES for b in plan.ends(step))  # type: ignore[arg-type]
    if step.kind == "load":
        source = CALLER
    return _Ends(SOURCES if source == to else source, to, nbytes)


def _tensor(plan: Plan, step: Step) -> dict[str, str]:
    t = plan.graph.tensors[step.tensor]  # type: ignore[union-attr]
    return {"tensor": t.name, "type": str(t.type), "shape": shape_text(t)}


def _waits(compute: TracedCompute, names: Sequence[str]) -> Iterator[Event]:
    """A slice for each step that waits for steps of other queues: from the end of the step before it in its own queue
    to its start."""
    program = compute.plan.program
    ended: dict[int, float] = {}
    for span in compute.steps:
        step = program.steps[span.number]
        since = ended.get(step.backend, compute.start)
        others = [w for w in step.waits if not w.back and program.steps[w.step].backend != step.backend]
        if others and span.start > since:
            those = ", ".join(f"step {w.step} of {names[program.steps[w.step].backend]}" for w in others)
            yield _slice(names[step.backend], WAITS, f"wait for {those}", since, span.start, "wait", step=span.number)
        ended[step.backend] = span.stop


def _nodes(compute: TracedCompute, names: Sequence[str]) -> Iterator[Event]:
    plan = compute.plan
    for span in compute.nodes:
        node = plan.graph.nodes[span.number]
        b = plan.data.backend_index(plan.graph.id_of(node))
        if b >= 0:
            yield _slice(names[b], NODES, node.name or node.op, span.start, span.stop, node.op, node=span.number,
                         op=node.op, type=str(node.type), shape=shape_text(node))


def _prices(compute: TracedCompute, names: Sequence[str], prices: Sequence[float],
            numbers: Iterator[int]) -> Iterator[Event]:
    """The predicted times of the steps that ran, one after the other from the start of the compute."""
    plan, at = compute.plan, compute.start
    ran = {span.number for span in compute.steps}
    for number, price in enumerate(prices):
        if number in ran and price > 0:
            backend = names[plan.program.steps[number].backend]
            yield from _asynchronous(backend, f"price: {step_words(plan, number)}", at, at + price, "price",
                                     next(numbers), step=number)
            at += price


# -- names ------------------------------------------------------------------------------------------------


def _processes(trace: Trace) -> list[str]:
    """The names of the processes of the backends, which differ from one another and from the other two."""
    return distinct((backend.name for backend in trace.backends), (CALLER, SOURCES))


def _named(trace: Trace, made: Callable[[], Iterable[Event]]) -> Iterator[Event]:
    """The names of the processes and their rows, then the events with numbers in place of these names.

    `made` makes the events, once for their names and once to be yielded, so that no more than one is in memory."""
    order = [CALLER, *_processes(trace), SOURCES]
    used: dict[tuple[str, str], None] = dict.fromkeys((event["pid"], event["tid"]) for event in made())
    rows: dict[str, dict[str, int]] = {name: {} for name in order}
    first = [(name, row) for row in (RUNS, WAITS, NODES) for name in order if (name, row) in used]
    for name, row in (*first, *used):
        rows[name].setdefault(row, len(rows[name]) + 1)
    for pid, name in enumerate(order):
        if rows[name]:
            yield _name("process_name", pid, name=name)
            yield _name("process_sort_index", pid, sort_index=pid)
        for row, k in rows[name].items():
            yield _name("thread_name", pid, _tid(pid, k), name="computes" if name == CALLER and row == RUNS else row)
            yield _name("thread_sort_index", pid, _tid(pid, k), sort_index=k)
    for event in made():
        pid = order.index(event["pid"])
        yield {**event, "pid": pid, "tid": _tid(pid, rows[event["pid"]][event["tid"]])}


def _tid(pid: int, row: int) -> int:
    """The number of a row: unique among all processes, and different from the numbers of processes, because viewers
    take a row with its process's number for the main thread."""
    return 100 * (pid + 1) + row


def _name(what: str, pid: int, tid: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
