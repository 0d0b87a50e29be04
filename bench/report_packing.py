"""The section on packing: hard problems, compared with omnimalloc's exact search, and a large one."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import process_time

import lifetimes
import numpy as np
from peer import packer
from summary import Line
from timing import timed

import ggml_sched as gs
from ggml_sched.planning.tables import markdown

PATIENCE = 5.0
"""Seconds for omnimalloc on each problem."""
RUNS = 5
"""Runs of our search, when they are short."""
SEEDS = (0, 1, 2)
N_TRAINING = 20_000
TARGET = 100
"""Milliseconds for each problem of the family."""

Problem = tuple[str, list[lifetimes.Row]]


def section() -> tuple[str, list[Line]]:
    hard: list[Problem] = [(name, lifetimes.read(name)) for name in lifetimes.HARD]
    hard += [(f"{name}, mirrored", lifetimes.mirrored(name)) for name in lifetimes.HARD]
    made = _made("tiling", lifetimes.guillotine, lifetimes.TILINGS)
    made += _made("loosened tiling", lifetimes.loosened, lifetimes.LOOSE)
    lines: list[Line] = []
    tables = [_against_peer("pack, hard instances / omnimalloc's time", hard, lines),
              _against_peer("pack, tilings / omnimalloc's time", made, lines),
              _family(lines),
              _training(lines)]
    peer = f"omnimalloc {packer.version()}" if packer.available() else "omnimalloc, which is not installed here"
    return f"""## Packing

`gs.pack`, on one processor and within the budget that it has by default, beside the exact search of
{peer}, on all processors.  Both get a capacity of {lifetimes.CAPACITY:,} bytes.  Ours is the median of
{RUNS} runs.  omnimalloc's time is the fastest of {packer.RUNS} runs with the smallest time limit that lets it solve
the problem; `> {PATIENCE:.0f} s` says that {PATIENCE:.0f} seconds were not enough, and the ratio is below what stands
there.  A bold arena is larger than the capacity: not solved.

MiniMalloc's hard files, and the same with time reversed and the buffers shuffled:

{tables[0]}

A rectangle cut into buffers, which leaves no slack, and such tilings without a random 15 % of their buffers.  All of
them fit the capacity; no seed was chosen for being solved:

{tables[1]}

{len(lifetimes.FAMILY)} more of each kind, those in the last row cut from {lifetimes.SMALL:,} bytes, where many
sizes are equal by chance; each as it is, with time reversed, shuffled, and both.  One run of each; ms are of this
process:

{tables[2]}

Buffers as training has them: results live until their backward step, gradients are short.  No capacity is given:

{tables[3]}
""", lines


def _made(kind: str, make: Callable[[int, int], list[lifetimes.Row]], of: tuple) -> list[Problem]:
    return [(f"{kind} of {n}, seed {seed}", make(n, seed)) for n, seed in of]


def _against_peer(what: str, problems: list[Problem], lines: list[Line]) -> str:
    """A table of problems with known capacity; adds to the summary."""
    rows, ratios, unsolved = [], [], 0
    for name, buffers in problems:
        found, took = _pack(buffers, lifetimes.CAPACITY)
        solved = found.arena <= lifetimes.CAPACITY
        unsolved += not solved
        theirs, ratio = "-", "-"
        if packer.available():
            other = packer.search(buffers, lifetimes.CAPACITY, PATIENCE)
            theirs = f"> {PATIENCE:.0f} s" if other.capped else f"{1e3 * other.seconds:,.2f}"
            if solved:
                ratios.append(took / 1e6 / other.seconds)
                ratio = f"{'< ' if other.capped else ''}{ratios[-1]:.4f}"
        rows.append([name, len(buffers), f"{found.arena:,}" if solved else f"**{found.arena:,}**", f"{found.tries:,}",
                     f"{took / 1e3:,.2f}", theirs, ratio])
    count = len(problems) - unsolved
    lines.append(Line(f"{what.partition(' /')[0]} solved", "all", f"{count} of {len(problems)}", "-"))
    if ratios:
        what += ", where solved" if unsolved else ""
        lines.append(Line(what, "≤ 0.1", f"{median(ratios):.3f}", f"{max(ratios):.2f}"))
    return markdown(["problem", "buffers", "arena", "tries", "ms", "omnimalloc, ms", "ratio"], rows)


def _family(lines: list[Line]) -> str:
    """How many problems of a family are solved, and their times."""
    kinds: list[tuple[str, int, Callable[..., list[lifetimes.Row]]]] = [
        ("tilings", lifetimes.CAPACITY, lifetimes.guillotine), ("loosened", lifetimes.CAPACITY, lifetimes.loosened),
        ("loosened, small sizes", lifetimes.SMALL, lifetimes.loosened)]
    rows, every, n_solved = [], [], 0
    for kind, capacity, make in kinds:
        times, solved = [], 0
        for n, seed in lifetimes.FAMILY:
            for buffers in lifetimes.variants(make(n, seed, capacity)):
                columns = [np.array(column, np.int64) for column in zip(*buffers, strict=True)]
                began = process_time()
                solved += gs.pack(*columns, capacity=capacity).arena <= capacity
                times.append(1e3 * (process_time() - began))
        rows.append([kind, len(times), solved, f"{median(times):.2f}", sum(t > TARGET for t in times),
                     f"{max(times):,.1f}"])
        every += times
        n_solved += solved
    lines.append(Line("pack, a family of tilings, solved", "all", f"{n_solved} of {len(every)}", "-"))
    lines.append(Line("pack, a family of tilings, time", f"≤ {TARGET} ms", f"{median(every):.2f} ms",
                      f"{max(every):,.1f} ms"))
    return markdown(["kind", "problems", "solved", "median, ms", f"above {TARGET} ms", "worst, ms"], rows)


def _training(lines: list[Line]) -> str:
    rows, above, times = [], [], []
    for seed in SEEDS:
        buffers = lifetimes.training(N_TRAINING, seed)
        found, took = _pack(buffers, None)
        above.append(found.arena / found.bound)
        times.append(took / 1e6)
        rows.append([f"seed {seed}", f"{len(buffers):,}", f"{found.bound:,}", f"{above[-1]:.6f}", f"{times[-1]:.2f}"])
    lines.append(Line(f"{N_TRAINING:,} training-like buffers, arena / most bytes alive", "≤ 1.01",
                      f"{median(above):.4f}", f"{max(above):.4f}"))
    lines.append(Line(f"{N_TRAINING:,} training-like buffers, time", "seconds", f"{median(times):.2f} s",
                      f"{max(times):.2f} s"))
    return markdown(["", "buffers", "most bytes alive", "arena / that", "s"], rows)


def _pack(buffers: list[lifetimes.Row], capacity: int | None) -> tuple[gs.Packing, float]:
    """The packing, and the median of microseconds."""
    columns = [np.array(column, np.int64) for column in zip(*buffers, strict=True)]
    found = gs.pack(*columns, capacity=capacity)
    first = timed(lambda: gs.pack(*columns, capacity=capacity))
    runs = 1 if first > 1e6 else RUNS
    return found, median([first, *(timed(lambda: gs.pack(*columns, capacity=capacity)) for _ in range(runs - 1))])
