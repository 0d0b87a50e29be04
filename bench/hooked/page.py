"""Writes the measurements of bench/hooking.py as a page of Markdown: a summary with targets, then each way of each
model. Sizes are those that llama.cpp logs, times those inside the functions; each compared with stock's of the same
way.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median
from typing import NamedTuple

from ggml_sched.planning.tables import markdown

LEVELS = ("alloc", "sched")
CLOSE = 1e-5
"""The allowed difference of logits from stock's where placement differs."""
RESERVING = {"alloc": ("ggml_gallocr_reserve_n",), "sched": ("ggml_backend_sched_reserve",
                                                             "ggml_backend_sched_split_graph")}
ALLOCATING = {"alloc": ("ggml_gallocr_alloc_graph",), "sched": ("ggml_backend_sched_alloc_graph",)}
"""The functions whose time is compared; those of a scheduler call those of an allocator."""
TARGETS = {"size": (0.93, 1.0), "reserve": 0.5, "allocate": 0.3, "memory": 1.0}
"""Targets of ratios to stock's: sizes as mean and maximum, times as median; of memory in MiB above stock's."""


class Ratios(NamedTuple):
    """Ratios of a way of a model to stock's; None where nothing was timed."""

    size: float
    reserve: float | None
    allocate: float | None


class Tokens(NamedTuple):
    """Logits of one model: numbers of ways that stock computes and refuses; by mode, ways with equal bits, and the
    largest difference."""

    model: str
    count: int
    refused: int
    same: dict[str, int]
    furthest: dict[str, float]


class Found(NamedTuple):
    """Measurements: by model, way and mode a row for each process; of random batches by model and mode."""

    sizes: dict[str, dict]
    memory: dict[str, dict]
    batches: dict[str, dict]
    tokens: list[Tokens]


def size_of(row: dict) -> float:
    return sum(reserved for _, reserved, _ in row["buffers"])


def time_of(rows: list[dict], part: str, functions: tuple[str, ...], per_call: bool) -> float | None:
    """Microseconds, the median over contexts: of all calls of a context together, or of one call."""
    seen = []
    for row in rows:
        found = [row[part][name] for name in functions if name in row[part]]
        seen += [sum(spent for _, spent in each) / (sum(calls for calls, _ in each) if per_call else 1)
                 for each in zip(*found, strict=True)]
    return median(seen) / 1e3 if seen else None


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _text(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def failure(rows: Iterable[dict]) -> str | None:
    """The reason why a process refused a way, or None."""
    return next((row["failed"] for row in rows if "failed" in row), None)


def ratios_of(by_mode: dict[str, list[dict]], mode: str) -> Ratios | None:
    """Ratios of a way under a mode to stock; None where either failed or did not run."""
    stock, ours = by_mode["stock"], by_mode.get(mode, [{"failed": "not asked"}])
    if failure(stock) or failure(ours):
        return None
    reserve, allocate = (_ratio(time_of(ours, part, functions[mode], per_call),
                                time_of(stock, part, functions[mode], per_call))
                         for part, functions, per_call in (("reserving", RESERVING, False),
                                                           ("allocating", ALLOCATING, True)))
    return Ratios(size_of(ours[0]) / size_of(stock[0]), reserve, allocate)


def table_of_sizes(found: dict[str, dict], hooked: list[str]) -> str:
    """Each way of each model: stock's sizes and times, and ours by them."""
    head = ["model", "way", "splits", "buffers, MiB"]
    for level in LEVELS:
        head += [f"reserve, {level}, µs", f"allocate, {level}, µs"]
    head += [f"{what}, {mode} / stock" for mode in hooked for what in ("size", "reserve", "allocate")]
    rows = []
    for name, ways in found.items():
        for words, by_mode in ways.items():
            stock, bad = by_mode["stock"], failure(by_mode["stock"])
            if bad:
                rows.append([name, words, f"refused: {bad}"] + [""] * (len(head) - 3))
                continue
            row = [name, words, stock[0]["splits"], f"{size_of(stock[0]):.4f}"]
            for level in LEVELS:
                row += [_text(time_of(stock, "reserving", RESERVING[level], False), 1),
                        _text(time_of(stock, "allocating", ALLOCATING[level], True), 1)]
            for mode in hooked:
                ratios = ratios_of(by_mode, mode)
                row += ["failed", "", ""] if ratios is None else [
                    _text(ratios.size, 4), _text(ratios.reserve), _text(ratios.allocate)]
            rows.append(row)
    return markdown(head, rows)


MEMORY = """\
Anonymous bytes of the whole process, each way in its own: once a context has computed four tokens; a prompt of 5/8 of a
batch and 32 tokens; six more prompts.  Stock's at the end, and by how many MiB ours is above it (negative: below) at
each of the three.  Kernels are replaced by ones that write a byte to each page of their results (`hooked/touch.cpp`),
so that models of any size can be looked at; what hooking adds to stock's memory is the same with kernels that
compute."""
BATCHES = """\
Random batches of small models with 64 sequences: ids or embeddings, 1 to 64 rows, 1 to 64 sequences, outputs of 1 row
to all, once each kind was seen with 64 rows and with one, of one, half of and all sequences.  Counted: plans made
again, buffers allocated for them, and waits for all devices before that.  ggml's allocator plans again whenever it does
not take a graph as it is: by itself (`ggml_gallocr_reserve`) where it has one buffer, otherwise asked by the scheduler
(`ggml_gallocr_reserve_n`), which waits for all devices first."""


def table_of_batches(found: dict[str, dict], modes: list[str]) -> str:
    head = ["model", "batches", *(f"{mode}: {what}" for mode in modes for what in ("planned", "buffers", "waits"))]
    return markdown(head, [[name, by_mode["stock"].get("count", ""),
                            *(by_mode[mode].get(what, "failed") for mode in modes
                              for what in ("planned", "grown", "waited"))] for name, by_mode in found.items()])


def excess_of(by_mode: dict[str, list[dict]], mode: str) -> list[float] | None:
    """MiB of a process under a mode beyond those of stock's, at each stage; None where one of them failed."""
    stock, ours = by_mode["stock"], by_mode.get(mode, [{"failed": "not asked"}])
    if failure(stock) or failure(ours):
        return None
    return [(mine - theirs) / 2**20
            for mine, theirs in zip(ours[0]["anonymous"], stock[0]["anonymous"], strict=True)]


def table_of_memory(found: dict[str, dict], modes: list[str]) -> str:
    """Each way of each model: stock's memory, and our excess."""
    stages = [f"{stage}, {mode}" for mode in modes for stage in ("tokens", "prompt", "end")]
    head = ["model", "way", "stock, MiB", *stages]
    rows = []
    for name, ways in found.items():
        for words, by_mode in ways.items():
            bad = failure(by_mode["stock"])
            if bad:
                rows.append([name, words, f"refused: {bad}"] + [""] * (len(head) - 3))
                continue
            row = [name, words, f"{by_mode['stock'][0]['anonymous'][-1] / 2**20:.2f}"]
            for mode in modes:
                excess = excess_of(by_mode, mode)
                row += ["failed", "", ""] if excess is None else [f"{value:+.2f}" for value in excess]
            rows.append(row)
    return markdown(head, rows)


def table_of_tokens(found: list[Tokens], modes: list[str]) -> str:
    """Each model: in how many ways its logits are stock's, and the largest difference."""
    head = ["model", "ways", "refused by stock",
            *(text for mode in modes for text in (f"{mode}: same bits", "largest difference"))]
    return markdown(head, [[row.model, row.count, row.refused,
                            *(text for mode in modes for text in (row.same[mode], f"{row.furthest[mode]:.1e}"))]
                           for row in found])


def summary(found: Found, modes: list[str], groups: dict[str, list[str]]) -> str:
    """Each measure's target and, for each mode, its result. `groups`: models by the group's name; the target of sizes
    is for the group without a name.
    """
    sizes, memory, batches, tokens = found

    def of(names: Iterable[str], mode: str, what: str, some: str = "") -> list[float]:
        rows = (ratios_of(by_mode, mode) for name in names if name in sizes
                 for words, by_mode in sizes[name].items() if some in words)
        values = (getattr(ratios, what) for ratios in rows if ratios is not None)
        return [value for value in values if value is not None]

    def cells(values: dict[str, list[float]], digits: int, middle=median) -> list[str]:
        return [f"{middle(seen):.{digits}f} ({max(seen):.{digits}f})" if seen else "-" for seen in values.values()]

    rows = []
    if sizes:
        mean, most = TARGETS["size"]
        for group, names in groups.items():
            for some, words in (("", ""), ("1 output", ", one output")):
                values = {mode: of(names, mode, "size", some) for mode in modes}
                if any(values.values()):
                    count = max(map(len, values.values()))
                    target = f"(≤ {most:.2f})" if group else f"≤ {mean} (≤ {most:.2f})"
                    whose = f"{', ' * bool(group)}{group}{words}"
                    rows.append([f"compute buffers / stock's{whose}: mean (worst) of {count}", target,
                                 *cells(values, 3, fmean)])
        for what, words in (("reserve", "reserving"), ("allocate", "allocating a graph")):
            values = {mode: of(sizes, mode, what) for mode in modes}
            rows.append([f"{words} / stock's time inside the functions: median (worst)", f"≤ {TARGETS[what]}",
                         *cells(values, 2)])
    if memory:
        values = {mode: [max(excess) for ways in memory.values() for by_mode in ways.values()
                         if (excess := excess_of(by_mode, mode)) is not None] for mode in modes}
        rows.append(["anonymous memory above stock's, MiB: median (worst) of ways", f"≤ {TARGETS['memory']:+.2f}",
                     *(f"{median(seen):+.2f} ({max(seen):+.2f})" if seen else "-" for seen in values.values())])
    if batches:
        stock = sum(by_mode["stock"].get("planned", 0) for by_mode in batches.values())
        count = sum(by_mode["stock"].get("count", 0) for by_mode in batches.values())
        rows.append([f"random batches planned again: of {count} (stock: {stock})", "0",
                     *(sum(by_mode[mode].get("planned", 0) for by_mode in batches.values()) for mode in modes)])
    if tokens:
        count = sum(row.count for row in tokens)
        rows.append(["logits with the same bits as stock's, ways", f"all of {count}",
                     *(sum(row.same[mode] for row in tokens) for mode in modes)])
        rows.append(["largest difference of a logit", f"≤ {CLOSE:.0e}",
                     *(f"{max(row.furthest[mode] for row in tokens):.1e}" for mode in modes)])
    return markdown(["models and ways", "target", *modes], rows)
