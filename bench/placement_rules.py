"""Baselines, the rules that programs place models by today: layers and experts in a fixed order, by bytes.

Every rule is given exact memory: its largest setting whose real plans keep the budgets, where programs estimate.  None
looks at speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from ggml_sched.cli.plan import layer_of
from ggml_sched.placement.trials import Trial, Trials

__all__ = ["RULES", "best_of"]

Placement = Mapping[str, int]
EXPERTS = re.compile(r"_exps\.(weight|bias)$")


def best_of(rule: Callable[[Trials, int], Iterator[Placement]], trials: Trials, margin: int = 0) -> Trial | None:
    """The first placement of a rule, the largest first, whose plans fit with `margin` bytes left beside the host."""
    host = len(trials.devices) - 1
    for placement in rule(trials, margin):
        trial = trials.run(placement)
        left = [device.budget - held - arena
                for device, held, arena in zip(trials.devices, trial.residents, trial.arenas, strict=True)]
        if all(free >= (margin if d != host and trial.residents[d] else 0) for d, free in enumerate(left)):
            return trial
    return None


def whole_layers(trials: Trials, margin: int) -> Iterator[Placement]:
    """The last n layers and the output beside the host, shared by memory; the largest n."""
    yield from _layers(trials, [device.budget for device in trials.devices[:-1]])


def even(trials: Trials, margin: int) -> Iterator[Placement]:
    """As many layers on each of the fewest devices, the fastest first; the largest number of layers."""
    gpus = len(trials.devices) - 1
    n_layer = _n_layers(trials)
    for few in range(1, gpus + 1):
        yield _split(trials, n_layer + 1, [1] * few + [0] * (gpus - few))
    for n in range(n_layer, -1, -1):
        yield _split(trials, n, [1] * gpus)


def fill(trials: Trials, margin: int) -> Iterator[Placement]:
    """All but the experts first, then experts from the front, device after device; dense models: whole layers."""
    experts = sorted({layer_of(name) or 0 for name in trials.sizes if EXPERTS.search(name)})
    if not experts:
        yield from whole_layers(trials, margin)
        return
    gpus = len(trials.devices) - 1
    for n in range(len(experts), -1, -1):
        base = _split(trials, _n_layers(trials) + 1, [device.budget for device in trials.devices[:-1]])
        there = set(experts[:n])
        yield {name: gpus if EXPERTS.search(name) and (layer_of(name) or 0) not in there else d
               for name, d in base.items()}
    yield from whole_layers(trials, margin)


def _layers(trials: Trials, shares: list[int]) -> Iterator[Placement]:
    for n in range(_n_layers(trials) + 1, -1, -1):
        yield _split(trials, n, shares)


def _n_layers(trials: Trials) -> int:
    return 1 + max((layer_of(name) or 0 for name in trials.sizes), default=0)


def _split(trials: Trials, n: int, shares: list[int]) -> Placement:
    """The last n of all layers and the output (which counts as one) beside the host, in parts in proportion to
    `shares`."""
    host, total = len(trials.devices) - 1, _n_layers(trials) + 1
    first = total - n
    ends, sum_ = [], 0
    for share in shares:
        sum_ += share
        ends.append(first + round(n * sum_ / max(1, sum(shares))))

    def device(layer: int) -> int:
        return host if layer < first else next(d for d, end in enumerate(ends) if layer < end)

    placed = {}
    for name in trials.sizes:
        layer = layer_of(name)
        if layer is not None:
            placed[name] = device(layer)
        else:
            untied = name.startswith("token_embd") and "output.weight" in trials.sizes
            placed[name] = host if untied else device(total - 1)
    return placed


RULES = {"whole layers": whole_layers, "fill": fill, "even": even}
