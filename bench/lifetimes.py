"""Buffers to pack, as rows (lower, upper, size): MiniMalloc's hard files, and made ones whose optimum is known."""

from __future__ import annotations

import csv
import random
from pathlib import Path

FILES = Path(__file__).resolve().parent.parent / "tests" / "data" / "packing"
CAPACITY = 1048576
"""The bytes into which each file, its mirror image, each tiling and each loosened tiling fits."""
HARD = ("A", "B", "C", "D")
TILINGS = tuple((n, 1000 * s + n) for n in (40, 80, 160, 320) for s in range(3))
LOOSE = tuple((n, 1000 * s + n) for n in (100, 200, 400) for s in range(3))
"""Sizes and seeds of tilings, chosen before any solver ran."""
FAMILY = tuple((n, 1000 * s + n) for n in (100, 200, 300, 400) for s in range(1000, 1030))
"""Many more, also chosen before any solver ran."""
SMALL = 4096
"""A capacity at which many sizes are equal by chance."""

Row = tuple[int, int, int]


def read(name: str) -> list[Row]:
    """One of HARD."""
    with open(FILES / f"{name}.{CAPACITY}.csv", newline="") as file:
        return [(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in csv.DictReader(file)]


def mirrored(name: str) -> list[Row]:
    """The same problem with time reversed and the rows shuffled: another search."""
    rows = [(-upper, -lower, size) for lower, upper, size in read(name)]
    random.Random(5).shuffle(rows)
    return rows


def guillotine(n: int, seed: int, capacity: int = CAPACITY) -> list[Row]:
    """A rectangle of `capacity` bytes cut into n; packs into it with nothing to spare."""
    rng = random.Random(seed)
    parts = [(0, n, capacity)]
    while len(parts) < n:
        parts.sort(key=lambda p: (p[1] - p[0]) / n * p[2] / capacity * rng.uniform(0.3, 1))
        lower, upper, size = parts.pop()
        if (rng.random() < 0.5 or size == 1) and upper - lower > 1:
            cut = rng.randrange(lower + 1, upper)
            parts += [(lower, cut, size), (cut, upper, size)]
        else:
            cut = rng.randrange(1, size)
            parts += [(lower, upper, cut), (lower, upper, size - cut)]
    rng.shuffle(parts)
    return parts


def loosened(n: int, seed: int, capacity: int = CAPACITY) -> list[Row]:
    """A guillotine tiling without a random 15 % of its parts: slack in places, the capacity still enough."""
    rng = random.Random(seed)
    return [row for row in guillotine(n, seed, capacity) if rng.random() < 0.85]


def variants(rows: list[Row]) -> list[list[Row]]:
    """A problem as it is, with time reversed, shuffled, and both."""
    shuffled = rows[:]
    random.Random(len(rows)).shuffle(shuffled)
    return [[(-upper, -lower, size) for lower, upper, size in way] if reverse else way
            for way in (rows, shuffled) for reverse in (False, True)]


def training(n: int, seed: int) -> list[Row]:
    """Forward results live until their backward step, in reverse; gradients and scratch are short."""
    rng = random.Random(seed)
    steps, rows = n * 2 // 5, []
    pattern = [(rng.choice([1, 2, 4, 8, 3]) * rng.choice([4096, 65536, 262144]), rng.random() < 0.6)
               for _ in range(12)]
    for i in range(steps):
        size, kept = pattern[i % 12]
        if rng.random() > 0.9:
            size = rng.randrange(32, 1 << 20) // 32 * 32
        back = 2 * steps - 1 - i
        rows.append((i, back + 1 if kept else i + rng.randint(1, 4), size))
        rows.append((back - rng.choice([1, 1, 2]), back + 1, size))
        if rng.random() < 0.5:
            rows.append((back, back + 1, rng.choice([4096, 65536, 1 << 20])))
    rng.shuffle(rows)
    return rows[:n]


def chain(n: int, seed: int) -> list[Row]:
    """An inference graph's kind: a few long lifetimes, the rest over within some nodes."""
    rng = random.Random(seed)
    rows = [(0, n, 64 * 2**k) for k in range(4)]
    return rows + [(i, min(n, i + rng.choice([1, 1, 2, 2, 3, 8])), rng.choice([1, 2, 3, 4, 8]) * 4096)
                   for i in range(n - 4)]
