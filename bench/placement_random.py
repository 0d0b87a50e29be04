"""Placements of seeded instances: no budget exceeded by a real plan, and the distribution of gaps and of CPU seconds.

    python bench/placement_random.py                        # 2,000 instances, for a token
    python bench/placement_random.py --count 100 --first 500 --goal prompt

Each answer is planned anew and allocated on dry backends whose memory is exactly the budget; its plans are verified.
The gap is that to the bound by the tables (`fit.gap`), beside it that to the bound of all placements.  Targets: at
most 1 % in 99 %, at most 5 % in all; after the graphs are made 0.5 s for one GPU and a host, 3 s for three devices.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import placement_instances as instances

import ggml_sched as gs
from ggml_sched.planning.tables import markdown

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from small_models import allocated  # noqa: E402

SHARES = (0.5, 0.9, 0.95, 0.99, 1.0)
LARGE = 0.01
"""A gap above this is named with its seed."""


def quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in SHARES]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--goal", choices=instances.GOALS, default="token")
    args = parser.parse_args(argv)
    found = Found()
    try:
        for seed in range(args.first, args.first + args.count):
            found.add(seed, args.goal)
    except KeyboardInterrupt:
        print(f"ended before seed {seed}", file=sys.stderr)
    if found.gaps:
        found.print(args.goal)
    return 1 if found.exceeded or found.refused else 0


class Found:
    """What the instances gave."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self.full: list[float] = []
        self.seconds: dict[int, list[float]] = {}
        self.refused = self.exceeded = 0

    def add(self, seed: int, goal: str) -> None:
        made = instances.instance(seed)
        begin = time.process_time()
        try:
            fit = made.fit(goal)
        except gs.OutOfMemory:
            self.refused += 1
            print(f"{seed}: {made.name}: refused", file=sys.stderr, flush=True)
            return
        taken = time.process_time() - begin
        try:
            allocated(fit, made.graphs)
        except gs.OutOfMemory as error:
            self.exceeded += 1
            print(f"{seed}: {made.name}: {error}", file=sys.stderr, flush=True)
        self.gaps.append(fit.gap)
        self.full.append(fit.full_gap)
        self.seconds.setdefault(len(made.devices), []).append(taken)
        if fit.gap > LARGE:
            print(f"{seed}: {made.name}, {len(made.devices)} devices: {fit.gap:.2%}", file=sys.stderr, flush=True)

    def print(self, goal: str) -> None:
        head = ("", *(f"{share:.0%}" for share in SHARES))
        rows = [("gap %", *(f"{100 * gap:.2f}" for gap in quantiles(self.gaps))),
                ("gap to the bound of all %", *(f"{100 * gap:.2f}" for gap in quantiles(self.full)))]
        rows += [(f"CPU s, {count} devices", *(f"{value:.2f}" for value in quantiles(values)))
                 for count, values in sorted(self.seconds.items())]
        small = sum(gap <= LARGE for gap in self.gaps) / len(self.gaps)
        print(f"\n{len(self.gaps)} instances, goal: {goal}; {self.exceeded} budgets exceeded, {self.refused} refused; "
              f"gap at most {LARGE:.0%} in {small:.1%}, mean {100 * statistics.fmean(self.gaps):.2f} %\n")
        print(markdown(head, rows))


if __name__ == "__main__":
    sys.exit(main())
