"""Why a weight or cache is where it is: its price there, its price elsewhere, and what it would push out.

Prices are differences between real plans: the answer's, and one with the tensor moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ggml_sched._graph import Tensor
from ggml_sched.placement.answer import Fetching, Fit, Placed
from ggml_sched.placement.devices import Links
from ggml_sched.placement.report import more_memory
from ggml_sched.placement.trials import Trial, Trials
from ggml_sched.planning.tables import memory_text, seconds

if TYPE_CHECKING:
    from ggml_sched.placement.fetching import FetchingTrials

__all__ = ["explain"]

_Trials: TypeAlias = "Trials | FetchingTrials"


def explain(fit: Fit, name: str) -> str:
    """The text of `Fit.explain`: a line for the device of the weight or cache, one for each other device, and one for
    each device with a multiplier; where several models have the name, these lines for each."""
    entries = fit.entries(name)
    if max(fit.models) == 0:
        return _explained(fit, entries[0])
    texts = []
    for entry in entries:
        part = fit.model(entry.model)
        texts.append(f"model {entry.model}, {_explained(part, part.entry(name))}")
    return "\n".join(texts)


def _explained(fit: Fit, entry: Placed) -> str:
    """The text for the answer of one model."""
    graphs = [plan.graph for plan in fit.plans]
    device_of = {other.name: other.device for other in fit.placed}
    made = Trials(graphs, fit.devices, Links(fit.devices, fit.link), fit.goal, fit.fill)
    trials: _Trials = made
    if fit.fetching is not None:
        from ggml_sched.placement.fetching import FetchingTrials

        slots = fit.fetching.slots
        trials = FetchingTrials(made, fit.link, device_of, fit.fetching.names, () if slots is None else slots.names)
    nodes = [{t: _index(fit, device.name) for t, device in fit.nodes(graph).items()} for graph in trials.graphs]
    base = trials.run(device_of, nodes if fit.assigned else None)
    here = fit.devices[entry.device].name
    taken = seconds(_own_seconds(trials, entry.name, entry.device))
    lines = [f"{entry.name}: {memory_text(entry.nbytes)} on {here}, where the nodes that read it take {taken}"]
    if fit.fetching is not None and fit.devices[entry.device].host:
        lines = list(_fetched(fit.fetching, entry, here, taken))
    for d in range(len(fit.devices)):
        if d != entry.device:
            lines.append(_elsewhere(fit, trials, base, device_of, nodes if fit.assigned else None, entry, d))
    lines += [f"  {line}" for line in more_memory(fit)]
    return "\n".join(lines)


def _fetched(fetching: Fetching, entry: Placed, host: str, taken: str) -> Iterator[str]:
    """The lines for a weight or cache of a host that fetches weights; `taken`: what the nodes that read it take."""
    disk = fetching.disk
    if entry.name in fetching.names:
        reading = seconds(disk.launch + entry.nbytes / disk.bandwidth)
        yield (f"{entry.name}: {memory_text(entry.nbytes)} in {disk.name}, from which {host} fetches it in each "
               f"evaluation in {reading}, while other nodes are computed; the nodes that read it take {taken}")
    elif fetching.slots is not None and entry.name in fetching.slots.names:
        slots = fetching.slots
        yield (f"{entry.name}: {memory_text(entry.nbytes)} in {disk.name}, from which {host} reads the experts that a "
               f"node has chosen and that are in none of {slots.n_slots} slots, which are for {slots.n_experts} "
               f"experts; the nodes that read it take {taken}")
        yield f"  with 1 GiB more on {host} there would be {slots.n_slots_with_more} slots"
        return
    elif entry.fetched:
        yield (f"{entry.name}: {memory_text(entry.nbytes)} in {disk.name}, from which each evaluation reads the rows "
               "that it needs")
        return
    else:
        yield f"{entry.name}: {memory_text(entry.nbytes)} stay on {host}, where the nodes that read it take {taken}"
    if entry.kind == "weight" and fetching.names:
        fate = "it would still be fetched" if entry.name in fetching.still else "it would stay" + (
            ", too" if entry.name in fetching.names else "")
        yield (f"  with 1 GiB more on {host} {fate}, and an evaluation would fetch {memory_text(fetching.with_more)} "
               f"instead of {memory_text(fetching.nbytes)}")


def _index(fit: Fit, name: str) -> int:
    return next(d for d, device in enumerate(fit.devices) if device.name == name)


def _elsewhere(fit: Fit, trials: _Trials, base: Trial, device_of: Mapping[str, int],
               nodes: Sequence[Mapping[Tensor, int]] | None, entry: Placed, d: int) -> str:
    """The line that says what the resident would cost on another device, d; `base`: the trial of the answer;
    `device_of`: {resident: its device in the answer}."""
    there = fit.devices[d].name
    moved = {**device_of, entry.name: d}
    trial = _moved(trials, moved, nodes, entry.name, d)
    change = _change(trial.seconds - base.seconds)
    if not trial.missing[d]:
        return f"  on {there} all together would take {change}, and it fits there"
    pushed = _pushed_out(trials, device_of, entry, d, trial.missing[d])
    if not pushed:
        return (f"  on {there} all together would take {change}, but {memory_text(trial.missing[d])} are missing, and "
                "nothing there is large enough to make room")
    names = ", ".join(pushed[:3]) + (f" and {len(pushed) - 3} more" if len(pushed) > 3 else "")
    for name in pushed:
        moved[name] = entry.device
    after = _moved(trials, moved, nodes, entry.name, d, dict.fromkeys(pushed, entry.device))
    return (f"  on {there} all together would take {change}, but {memory_text(trial.missing[d])} are missing: it would "
            f"push out {names} to {fit.devices[entry.device].name}, and then all would take "
            f"{_change(after.seconds - base.seconds)}")


def _change(difference: float) -> str:
    return f"{seconds(abs(difference))} {'more' if difference >= 0 else 'less'}"


def _moved(trials: _Trials, residents: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]] | None, name: str,
           d: int, pushed: Mapping[str, int] | None = None) -> Trial:
    """The trial of these residents, with each node whose largest resident is moved assigned to its new device.

    Moved are the resident `name`, to device d, and `pushed`, {name: device}; `nodes`: the devices of nodes before the
    move, None if the scheduler's rules place them.
    """
    if nodes is None:
        return trials.run(residents)
    where = {name: d, **(pushed or {})}
    changed = []
    for facts, assigned in zip(trials.facts, nodes, strict=True):
        now = dict(assigned)
        for node, reads in zip(facts.nodes, facts.residents, strict=True):
            largest = max(reads, key=lambda t: t.nbytes, default=None)
            if largest is not None and largest.name in where and node in now:
                now[node] = where[largest.name]
        changed.append(now)
    return trials.cheapest(residents, changed)


def _own_seconds(trials: _Trials, name: str, d: int) -> float:
    """Seconds, weighted by the goal, that the nodes which read a resident would take on device d."""
    total = 0.0
    for facts, weight in zip(trials.facts, trials.weights, strict=True):
        if weight:
            taken = facts.seconds(trials.devices[d])
            total += weight * sum(float(taken[i]) for i, reads in enumerate(facts.residents)
                                  if any(t.name == name for t in reads))
    return total


def _pushed_out(trials: _Trials, device_of: Mapping[str, int], entry: Placed, d: int, missing: int) -> list[str]:
    """The names of residents of device d whose move to the entry's present device frees `missing` bytes for about the
    fewest seconds; empty if all of them together are too small."""
    lost: dict[str, float] = {}
    for facts, weight in zip(trials.facts, trials.weights, strict=True):
        if weight:
            there, here = facts.seconds(trials.devices[d]), facts.seconds(trials.devices[entry.device])
            for i, reads in enumerate(facts.residents):
                for t in reads:
                    lost[t.name] = lost.get(t.name, 0.0) + weight * float(here[i] - there[i])
    there_now = [name for name, at in device_of.items() if at == d and name != entry.name]
    enough = [name for name in there_now if trials.bytes_on(d, name) >= missing]
    single = min(enough, key=lambda name: (lost.get(name, 0.0), name), default=None)
    several: list[str] = []
    freed = 0
    for name in sorted(there_now, key=lambda name: (lost.get(name, 0.0) / max(1, trials.bytes_on(d, name)), name)):
        if freed >= missing:
            break
        several.append(name)
        freed += trials.bytes_on(d, name)
    if single is not None and (freed < missing or lost.get(single, 0.0) <= sum(lost.get(n, 0.0) for n in several)):
        return [single]
    return several if freed >= missing else []
