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
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.tables import memory_text, seconds

if TYPE_CHECKING:
    from ggml_sched.placement.fetching import FetchingTrials

__all__ = ["explain"]

MOST_TRIES = 3
"""How often more is pushed out where a larger arena takes a part of what was freed."""

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
    if not fit.assigned:
        nodes = [_nodes_of(plan) for plan in base.plans]
    here = fit.devices[entry.device].name
    taken = seconds(_own_seconds(trials, entry.name, entry.device))
    lines = [f"{entry.name}: {memory_text(entry.nbytes)} on {here}, where the nodes that read it take {taken}"]
    if fit.fetching is not None and fit.devices[entry.device].host:
        lines = list(_fetched(fit.fetching, entry, here, taken))
    for d in range(len(fit.devices)):
        if d != entry.device:
            lines.append(_elsewhere(fit, trials, base, device_of, nodes, entry, d))
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


def _nodes_of(plan: Plan) -> dict[Tensor, int]:
    """{node: its device} in a plan, of whose backends stores are no devices."""
    number = {backend: d for d, backend in enumerate(b for b in plan.backends if not b.is_store)}
    return {node: number[backend] for node in plan.graph.nodes if node.computes
            and (backend := plan.backend_of(node)) is not None and backend in number}


def _elsewhere(fit: Fit, trials: _Trials, base: Trial, device_of: Mapping[str, int],
               nodes: Sequence[Mapping[Tensor, int]], entry: Placed, d: int) -> str:
    """The line that says what the resident would cost on another device, d; `base`: the trial of the answer;
    `device_of`, `nodes`: {resident: its device} and, for each graph, {node: its device} in the answer."""
    trial = _moved(trials, device_of, nodes, {entry.name: d})
    begin = f"  on {fit.devices[d].name} all together would take {_change(trial.seconds - base.seconds)}"
    if not any(trial.missing):
        return f"{begin}, and it fits there"
    begin += ", but " + ", ".join(
        f"{memory_text(missing)} are missing" + (f" on {fit.devices[k].name}" if k != d else "")
        for k, missing in enumerate(trial.missing) if missing)
    found = []
    for to in range(len(fit.devices)):
        missing = trial.missing[d]
        for _ in range(MOST_TRIES if to != d and missing else 0):
            pushed = _pushed_out(fit, trials, device_of, entry, d, to, missing)
            if not pushed:
                break
            after = _moved(trials, device_of, nodes, {entry.name: d, **dict.fromkeys(pushed, to)})
            if not any(after.missing):
                found.append((after.seconds, to, pushed))
            if not after.missing[d]:
                break
            missing += after.missing[d]     # the arena has grown
    if not found:
        return f"{begin}, and no move of what is there was found that makes room"
    taken, to, pushed = min(found)
    names = ", ".join(pushed[:3]) + (f" and {len(pushed) - 3} more" if len(pushed) > 3 else "")
    return (f"{begin}: it would push out {names} to {fit.devices[to].name}, and then all would take "
            f"{_change(taken - base.seconds)}")


def _change(difference: float) -> str:
    return f"{seconds(abs(difference))} {'more' if difference >= 0 else 'less'}"


def _moved(trials: _Trials, device_of: Mapping[str, int], nodes: Sequence[Mapping[Tensor, int]],
           moves: Mapping[str, int]) -> Trial:
    """The better of two trials of residents on the devices `device_of`, but of those in `moves`, {name: device}: one
    with nodes where the scheduler's rules place them, one with nodes on the devices `nodes`, but of those whose largest
    resident is moved, on its new device."""
    changed = []
    for facts, assigned in zip(trials.facts, nodes, strict=True):
        now = dict(assigned)
        for node, reads in zip(facts.nodes, facts.residents, strict=True):
            largest = max(reads, key=lambda t: t.nbytes, default=None)
            if largest is not None and largest.name in moves and node in now:
                now[node] = moves[largest.name]
        changed.append(now)
    return trials.cheapest({**device_of, **moves}, changed)


def _own_seconds(trials: _Trials, name: str, d: int) -> float:
    """Seconds, weighted by the goal, that the nodes which read a resident would take on device d."""
    total = 0.0
    for facts, weight in zip(trials.facts, trials.weights, strict=True):
        if weight:
            taken = facts.seconds(trials.devices[d])
            total += weight * sum(float(taken[i]) for i, reads in enumerate(facts.residents)
                                  if any(t.name == name for t in reads))
    return total


def _pushed_out(fit: Fit, trials: _Trials, device_of: Mapping[str, int], entry: Placed, d: int, to: int,
                missing: int) -> list[str]:
    """The names of residents of device d that are not pinned and whose move to device `to` frees `missing` bytes for
    about the fewest seconds; empty if all of them together are too small."""
    lost: dict[str, float] = {}
    for facts, weight in zip(trials.facts, trials.weights, strict=True):
        if weight:
            there, then = facts.seconds(trials.devices[d]), facts.seconds(trials.devices[to])
            for i, reads in enumerate(facts.residents):
                for t in reads:
                    lost[t.name] = lost.get(t.name, 0.0) + weight * float(then[i] - there[i])
    stays = {other.name for other in fit.placed if other.pinned} | {entry.name}
    there_now = [name for name, at in device_of.items() if at == d and name not in stays]
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
