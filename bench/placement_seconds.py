"""Predicted and measured seconds of a token: models that `gs.fit` placed on two CPU backends, one of them throttled.

    python bench/placement_seconds.py [--tokens 24] [--throttle 4]

Both backends are measured first, as `gs.fit` does; then each model is fitted with less and less memory on the fast
one, loaded there, and evaluates tokens at a context that is half full.  Predicted is `gs.price` of its own plan.
All is on one thread, and its processor time counts: other work on the machine then takes part of the bandwidth alone.
Weights are in the backends' own memory, as those that are measured: a mapped file has small pages, which take longer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_llama
from ggml_sched.placement.devices import Device, LinkLike
from ggml_sched.placement.measure import measure, measure_links
from ggml_sched.planning.tables import markdown

CONTEXT, BATCH = 512, 64
MODELS: dict[str, dict[str, Any]] = {
    "dense, q4_0": {"n_embd": 1024, "n_layer": 16, "n_head": 16, "n_head_kv": 4, "n_ff": 4096, "dtype": "q4_0"},
    "dense, f16": {"n_embd": 1024, "n_layer": 8, "n_head": 16, "n_head_kv": 4, "n_ff": 4096, "dtype": "f16"},
    "8 experts, q8_0": {"n_embd": 512, "n_layer": 12, "n_head": 8, "n_head_kv": 8, "n_ff": 1024, "n_expert": 8,
                        "dtype": "q8_0"},
}
SHARES = (1.0, 0.6, 0.3, 0.0)
"""Parts of the weights for which the fast backend has memory."""


class Throttled(gs.CpuBackend):
    """Takes `factor` times as long as a CpuBackend for every graph."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.factor = factor

    def supports_buffer(self, buffer: Any) -> bool:
        return buffer.backend is self

    def graph_compute(self, graph: Any) -> None:
        self._slowed(lambda: super(Throttled, self).graph_compute(graph))

    def graph_plan_compute(self, plan: Any) -> None:
        self._slowed(lambda: super(Throttled, self).graph_plan_compute(plan))

    def _slowed(self, call: Callable[[], object]) -> None:
        begin = time.thread_time()
        call()
        end = begin + self.factor * (time.thread_time() - begin)
        while time.thread_time() < end:
            pass


class Fast(gs.CpuBackend):
    """A CpuBackend that does not read the other's memory, so that copies are made."""

    def supports_buffer(self, buffer: Any) -> bool:
        return buffer.backend is self


def row(name: str, file: bytes, share: float, devices: tuple[Device, Device], link: LinkLike,
        n_tokens: int) -> tuple[object, ...]:
    """(Model, share, nodes on the fast backend, predicted ms, measured ms, predicted / measured)."""
    fast, slow = devices
    given = fast.replace(memory=int(share * len(file)) + (4 << 20))
    graphs = llama.model_graphs(file, CONTEXT, BATCH, kv_type="f32")
    found = gs.fit(graphs, [given, slow], link)
    with llama.load(file, place=found, n_ctx=CONTEXT, n_batch=BATCH, use_mmap=False) as model:
        model.eval(list(range(CONTEXT // 2)), last_only=True)
        taken = []
        for i in range(n_tokens):
            begin = time.thread_time()
            model.eval([i % 64], last_only=True)
            taken.append(time.thread_time() - begin)
        rows = CONTEXT // 2 + n_tokens // 2
        plan = model.scheduler.plan(model.batch_graph(1, -(-rows // 32) * 32).graph)
        predicted = gs.price(plan, devices, link).seconds
    here = sum(len(split) for split in plan.splits if split.backend.name == fast.name)
    spent = median(taken[2:])
    return (name, f"{share:.0%}", f"{here} of {len(plan.graph)}", f"{predicted * 1e3:.2f}", f"{spent * 1e3:.2f}",
            f"{predicted / spent:.3f}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--throttle", type=float, default=4.0)
    args = parser.parse_args(argv)
    rows = []
    for name, sizes in MODELS.items():
        file = random_llama(0, n_vocab=8192, n_ctx=CONTEXT, **sizes)
        with Fast(1, name="fast") as fast, Throttled(args.throttle, n_threads=1, name="slow") as slow:
            types = [sizes["dtype"], "f32"]
            devices = (measure(fast, types, clock=time.thread_time).replace(host=False),
                       measure(slow, types, clock=time.thread_time))
            link = measure_links([fast, slow], clock=time.thread_time)
            for share in SHARES:
                rows.append(row(name, file, share, devices, link, args.tokens))
                print(*rows[-1], file=sys.stderr)
    print(markdown(("model", "memory of the fast one", "its nodes", "predicted, ms", "measured, ms", "ratio"), rows))
    worst = max((float(str(r[-1])) for r in rows), key=lambda ratio: abs(ratio - 1))
    print(f"\nWorst ratio {worst:.3f}; within 10 % is wanted.")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
