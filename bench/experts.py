"""Experts by the slot: replays of routings beside Belady's bound, and tokens with slots beside whole tensors.

    python bench/experts.py [--model FILE ...] [--tokens N] [--skip-speed] [--folder FOLDER]

Routings are those of models (FILE, and small ones with random weights) that continue a prompt, each token the likeliest
or drawn, and of synthetic routers: scores with a preference for each expert that stays (skew), a part that drifts from
token to token (locality), and noise; a token uses the experts with the highest.  Both are seeded.  No trained model of
experts is among them unless FILE is one.  Tables of Markdown; the second measures a model of experts with a limit of
half of its weights, in turns, the fastest run of each; FOLDER gets its file of about 400 MiB.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from ggml_sched import llama
from ggml_sched.experts import (
    Bank,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Mixture,
    Policy,
    Routing,
    Static,
    Visit,
    bound,
    replay,
)
from ggml_sched.llama.synthetic import random_llama
from ggml_sched.planning.tables import markdown

TARGET = 1.25
PARTS = (0.25, 0.5, 0.75)
ROUTERS = ((0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (0.0, 0.9), (1.0, 0.9), (1.0, 0.97))
"""(skew, locality) of the synthetic routers; (0, 0) draws experts at random."""
SHAPES = ((16, 32, 4), (8, 8, 2))
"""(layers, experts, experts that a token uses)."""
SPEED = {"n_vocab": 2048, "n_embd": 512, "n_layer": 4, "n_head": 8, "n_head_kv": 4, "n_ff": 1024, "n_expert": 16}


def synthetic(layers: int, n_experts: int, n_used: int, skew: float, locality: float, n_tokens: int,
              seed: int) -> Routing:
    """A routing with Gumbel's noise, so that without locality the preferences are those of a softmax."""
    rng = np.random.default_rng(seed)
    base = skew * rng.gumbel(size=(layers, n_experts))
    drift = np.zeros((layers, n_experts))
    made = Routing([Bank(f"blk.{b}", n_experts, 1) for b in range(layers)])
    for _ in range(n_tokens):
        drift = locality * drift + np.sqrt(1 - locality**2) * rng.standard_normal((layers, n_experts))
        scores = base + 2 * drift * (locality > 0) + rng.gumbel(size=(layers, n_experts))
        for b in range(layers):
            made.visits.append(Visit(b, (tuple(np.argsort(-scores[b])[:n_used].tolist()),)))
    return made


def of_model(source: str | bytes, n_tokens: int, temperature: float, seed: int = 0) -> Routing:
    """What the layers of a model use while it continues a short prompt."""
    rng = np.random.default_rng(seed)
    with llama.load(source, n_ctx=n_tokens + 16, n_batch=8) as model, model.record_experts() as recording:
        logits = model.eval(rng.integers(0, model.n_vocab, 4).tolist())[-1]
        for _ in range(n_tokens):
            noise = rng.gumbel(size=len(logits)) * temperature
            logits = model.eval([int(np.argmax(logits + noise))])[-1]
    return recording


def routings(args: argparse.Namespace) -> Iterator[tuple[str, str, Routing]]:
    """(kind, name, routing)."""
    for path in args.model:
        for temperature in (0.0, 1.0):
            yield "a file", f"{Path(path).name}, temperature {temperature:g}", of_model(path, args.tokens, temperature)
    for arch, n_expert in (("llama", 16), ("qwen3moe", 32)):
        extra = {"expert_used_count": 4, "expert_feed_forward_length": 32} if arch == "qwen3moe" else None
        data = random_llama(1, arch=arch, n_layer=6, n_embd=64, n_head=4, n_ff=32, n_expert=n_expert, extra=extra)
        yield ("a model with random weights", f"random {arch} of {n_expert} experts, temperature 1",
               of_model(data, args.tokens, 1.0))
    for seed, (layers, n_experts, n_used) in enumerate(SHAPES):
        for skew, locality in ROUTERS:
            kind = ("a drifting router" if locality else "a router with preferences" if skew else
                    "draws of equally likely experts")
            yield (kind, f"{n_used} of {n_experts}, skew {skew:g}, locality {locality:g}",
                   synthetic(layers, n_experts, n_used, skew, locality, args.tokens, seed))


def policies(recording: Routing) -> dict[str, Policy]:
    half = Routing(recording.banks, recording.visits[: len(recording.visits) // 2])
    return {"lru": LeastRecentlyUsed(), "lfu": LeastFrequentlyUsed(), "mixture": Mixture(),
            "static, from the first half": Static(half.profile)}


def replays(args: argparse.Namespace) -> str:
    """Bytes read / Belady's bound by routing, part of the experts in slots, and policy; then the medians by kind."""
    found: dict[str, dict[str, list[float]]] = {}
    rows: list[tuple[object, ...]] = []
    for kind, name, recording in routings(args):
        total = sum(bank.n_experts for bank in recording.banks)
        least = max(len(visit.used) for visit in recording.visits)
        for part in PARTS:
            n_slots = max(int(total * part), least)
            best, of = bound(recording, n_slots), policies(recording)
            ratios = {policy: replay(recording, value, n_slots).nbytes / best.nbytes for policy, value in of.items()}
            for policy, ratio in ratios.items():
                for of_kind in (kind, "all"):
                    found.setdefault(of_kind, {}).setdefault(policy, []).append(ratio)
            rows.append((name, f"{part:.0%}", f"{best.rate:.0%}", *(f"{ratio:.2f}" for ratio in ratios.values())))
    found["all"] = found.pop("all")         # the last row
    names = [*found["all"]]
    medians = [(kind, *(f"{median(ratios):.2f}" for ratios in of.values())) for kind, of in found.items()]
    medians.append((f"target {TARGET}", *("reached" if median(ratios) <= TARGET else "missed"
                                          for ratios in found["all"].values())))
    return (markdown(("routing", "experts in slots", "hits of the bound", *names), rows) + "\n\n"
            + markdown(("median of", *names), medians))


def speed(args: argparse.Namespace) -> str:
    """Milliseconds of a token with a limit of half of the weights."""
    data = random_llama(0, **SPEED)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = os.path.join(folder, "model.gguf")
        Path(path).write_bytes(data)
        limit = len(data) // 2
        del data
        options = {"n_ctx": 512, "n_batch": 64, "n_threads": args.threads}
        cases = {"no limit": {}, "whole tensors": {"memory": limit, "experts": "whole"},
                 **{f"slots, {name}": {"memory": limit, "experts": name} for name in ("lru", "lfu", "mixture")}}
        best: dict[str, float] = {}
        read: dict[str, float] = {}
        hits: dict[str, float] = {}
        said: dict[str, bytes] = {}
        for _ in range(args.rounds):
            for name, given in cases.items():
                with llama.load(path, **options, **given) as model:
                    logits = model.eval([1, 2, 3])[-1]
                    for _ in range(8):
                        logits = model.eval([int(np.argmax(logits))])[-1]
                    before = model.store.traffic.nbytes if model.store is not None else 0
                    start = time.perf_counter()
                    for _ in range(args.speed_tokens):
                        logits = model.eval([int(np.argmax(logits))])[-1]
                    took = (time.perf_counter() - start) / args.speed_tokens
                    best[name] = min(took, best.get(name, took))
                    after = model.store.traffic.nbytes if model.store is not None else 0
                    read[name] = (after - before) / args.speed_tokens / (1 << 20)
                    hits[name] = model.slots.traffic.rate if model.slots is not None else 0.0
                    assert said.setdefault(name, logits.tobytes()) == said["no limit"], "other logits"
        rows = [(name, f"{1e3 * took:.1f}", f"{1 / took:.1f}", f"{read[name]:.0f}",
                  f"{hits[name]:.0%}" if hits[name] else "-") for name, took in best.items()]
        return markdown(("experts", "ms a token", "tokens/s", "MiB read a token", "hits"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[], metavar="FILE", help="models of experts")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each routing (%(default)s)")
    parser.add_argument("--speed-tokens", type=int, default=32, metavar="N", help="of each timed run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each case (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--folder", metavar="FOLDER", help="for the file of the timed model, on a real disk")
    parser.add_argument("--skip-speed", action="store_true", help="only replays")
    args = parser.parse_args()
    print(replays(args))
    if not args.skip_speed:
        print("\n" + speed(args))


if __name__ == "__main__":
    main()
