"""The measured times of the steps of traced computes, beside the times that prices predict.

Owns the medians and the table.  All times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ggml_sched.execution.tracing import Trace, TracedCompute
from ggml_sched.placement.devices import Device, LinkLike
from ggml_sched.placement.pricing import price_steps
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import Run
from ggml_sched.planning.tables import seconds, table

__all__ = ["Measured", "MeasuredStep", "measured"]

_SHOWN = 24
"""The most steps in a table; these are the ones that take longest."""


class MeasuredStep(NamedTuple):
    """One step of a plan's program, over all computes of a trace."""

    number: int
    """Its number in the program."""
    what: str
    """The step in words, such as "run nodes 0 .. 31"."""
    backend: str
    computes: int
    """The number of computes in which it ran: an optional step is left out if its data has not changed."""
    seconds: float
    """The median of its times."""
    price: float | None
    """The seconds that `price_steps` predicts; None if no devices were given."""


@dataclass(frozen=True)
class Measured:
    """The steps of one plan over all of its computes in a trace."""

    plan: Plan
    computes: int
    """The number of computes that count: all but the first, if there are several."""
    seconds: float
    """The median of the times of the computes."""
    price: float | None
    """The sum of the prices of its steps; None if no devices were given."""
    is_exact: bool
    """Whether a step's time is the time that its backend took; otherwise it is the time of issuing the step."""
    steps: tuple[MeasuredStep, ...]

    def __str__(self) -> str:
        """A table of the steps that take longest, and of the whole compute."""
        names = ", ".join(backend.name for backend in self.plan.backends)
        head = f"{len(self.plan.graph):,} nodes on {names}: {self.computes} computes, {seconds(self.seconds)} each"
        if not self.is_exact:
            head += "; steps of asynchronous backends are timed until they are issued"
        titles = ["step", "backend", "what", "took", *(["price", "took / price"] if self.price is not None else [])]
        longest = sorted(self.steps, key=lambda step: -max(step.seconds, step.price or 0))
        shown = sorted(longest[:_SHOWN], key=lambda step: step.number)
        rows: list[Sequence[object]] = [titles]
        for step in shown:
            rows.append((str(step.number), step.backend, step.what, seconds(step.seconds),
                         *_beside(step.seconds, step.price)))
        rows.append(("", "", "all", seconds(self.seconds), *_beside(self.seconds, self.price)))
        rest = len(self.steps) - len(shown)
        more = [f"and {rest} steps that take less"] if rest else []
        return "\n".join([head, "", table(rows, "><<>", underlined=True), *more])


def _beside(took: float, price: float | None) -> tuple[str, ...]:
    """The cells of a row for the price, and for the measured time as a multiple of the price; none without a price."""
    if price is None:
        return ()
    return seconds(price), f"{took / price:.2f}" if price > 0 else ""


def measured(trace: Trace, devices: Sequence[Device] | None = None, link: LinkLike = None,
             fill: float = 1.0) -> tuple[Measured, ...]:
    """The result of `Trace.measured`."""
    by_plan: dict[int, list[TracedCompute]] = {}
    for compute in trace.computes:
        if not compute.failed:
            by_plan.setdefault(id(compute.plan), []).append(compute)
    return tuple(_of_plan(trace, computes, devices, link, fill) for computes in by_plan.values())


def _of_plan(trace: Trace, computes: Sequence[TracedCompute], devices: Sequence[Device] | None, link: LinkLike,
             fill: float) -> Measured:
    plan = computes[0].plan
    counted = computes[1:] or computes
    prices = None if devices is None else price_steps(plan, devices, link, fill)
    return Measured(plan, len(counted), median(c.stop - c.start for c in counted),
                    None if prices is None else sum(prices), trace.is_exact, tuple(_steps(plan, counted, prices)))


def _steps(plan: Plan, computes: Sequence[TracedCompute], prices: Sequence[float] | None) -> Iterator[MeasuredStep]:
    """The steps that ran in any of these computes."""
    took: dict[int, list[float]] = {}
    for compute in computes:
        for span in compute.steps:
            took.setdefault(span.number, []).append(span.stop - span.start)
    for number, step in enumerate(plan.program.steps):
        if number in took:
            what = step_words(plan, number)
            yield MeasuredStep(number, what, plan.backends[step.backend].name, len(took[number]), median(took[number]),
                               None if prices is None else prices[number])


def step_words(plan: Plan, number: int) -> str:
    """A step in a few words."""
    step = plan.program.steps[number]
    if isinstance(step, Run):
        nodes = [node for node in plan.graph.nodes[step.first : step.last + 1] if node.computes]
        ends = [node.name or node.op for node in (nodes[:1] + nodes[1:][-1:])]
        return f"run {len(nodes)} node{'s' if len(nodes) != 1 else ''}, {' .. '.join(ends)}"
    return f"{step.kind} {plan.graph.tensors[step.tensor].name or plan.label_of(step.tensor)}"
