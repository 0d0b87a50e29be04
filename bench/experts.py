"""Experts by the slot: replays of routings beside Belady's bound, and tokens with slots beside whole tensors.

    python bench/experts.py [--model FILE ...] [--recording FILE ...] [--tokens N] [--skip-speed] [--folder FOLDER]
    python bench/experts.py --ahead 0.25 0.5 1

Routings are those of models (FILE, and small ones with random weights) that continue a prompt, each token the likeliest
or drawn, and of synthetic routers: scores with a preference for each expert that stays (skew), a part that drifts from
token to token (locality), and noise; a token uses the experts with the highest.  Both are seeded.  No trained model of
experts is among them unless FILE is one.  bench/routings/trained.txt is a recording of one that is not here: the
small model with its units of 384 divided among 16 experts of 96, of which a token uses 4, trained for a
quarter of an hour on what the small model has learned; 400 tokens of the files that were held out.

Tables of Markdown; the second measures a model of experts with a limit of half of its weights, in turns, the fastest
run of each; FOLDER gets its file of about 400 MiB.  With --ahead there is one other table: what reading a likely expert
ahead would gain, where computing from one choice of experts to the next takes so many reads of an expert.
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
from ggml_sched._graph import Tensor
from ggml_sched.experts import (
    PREDICTIONS,
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
    replay_ahead,
)
from ggml_sched.llama.routing import Recorder
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


class Routers(Recorder):
    """Records also, for each visit, the experts that the router of the next layer would choose for the token if this
    layer changed nothing: the likeliest first."""

    def __init__(self, model: llama.Model) -> None:
        super().__init__(model.weights.tensors)
        self._weights = model.weights.tensors
        self._eps, self._n_used = model.hparams.norm_eps, model.hparams.experts.n_used
        self.chosen: dict[int, list[int]] = {}
        """{index of a visit: experts of the next layer}; not after the last layer, whose token is not known."""

    def ask(self, node: Tensor) -> bool:
        return node.name.startswith("ffn_inp-") or super().ask(node)

    def note(self, node: Tensor) -> None:
        if not node.name.startswith("ffn_inp-"):
            super().note(node)
            return
        prefix = f"blk.{int(node.name.split('-')[1]) + 1}.ffn_"
        if {prefix + "gate_inp.weight", prefix + "norm.weight"} <= self._weights.keys():
            x = np.array(node.numpy()).reshape(-1, node.ne[0])[-1]
            x = x / np.sqrt(np.mean(x * x) + self._eps) * self._weights[prefix + "norm.weight"].numpy()
            scores = self._weights[prefix + "gate_inp.weight"].numpy() @ x
            self.chosen[len(self.recording.visits)] = np.argsort(-scores)[: self._n_used].tolist()


class OfRouter:
    """The prediction that what the router of the next layer would choose is likely, from `Routers.chosen`."""

    def __init__(self, chosen: dict[int, list[int]]) -> None:
        self._chosen, self._now = chosen, -1

    def __call__(self, recording: Routing) -> OfRouter:
        made = OfRouter(self._chosen)
        made._n_experts = recording.n_experts
        return made

    def use(self, bank: int, used: list[int]) -> None:
        self._now += 1

    def likely(self, bank: int) -> np.ndarray:
        found = np.zeros(self._n_experts)
        chosen = self._chosen.get(self._now, [])
        found[chosen] = np.linspace(0.9, 0.8, len(chosen))
        return found


CHOSEN: dict[str, dict[int, list[int]]] = {}
"""{name of a routing of a model: `Routers.chosen`}."""


def of_model(source: str | bytes, n_tokens: int, temperature: float, name: str, seed: int = 0) -> Routing:
    """What the layers of a model use while it continues a short prompt."""
    rng = np.random.default_rng(seed)
    with llama.load(source, n_ctx=n_tokens + 16, n_batch=8) as model:
        recorder = model._runner.recorder = Routers(model)
        CHOSEN[name] = recorder.chosen
        logits = model.eval(rng.integers(0, model.n_vocab, 4).tolist())[-1]
        for _ in range(n_tokens):
            noise = rng.gumbel(size=len(logits)) * temperature
            logits = model.eval([int(np.argmax(logits + noise))])[-1]
        return recorder.recording


def routings(args: argparse.Namespace) -> Iterator[tuple[str, str, Routing]]:
    """(kind, name, routing)."""
    for path in args.model:
        for temperature in (0.0, 1.0):
            name = f"{Path(path).name}, temperature {temperature:g}"
            yield "a file", name, of_model(path, args.tokens, temperature, name)
    for path in args.recording:
        yield "a recording", Path(path).name, Routing.load(path)
    for arch, n_expert in (("llama", 16), ("qwen3moe", 32)):
        extra = {"expert_used_count": 4, "expert_feed_forward_length": 32} if arch == "qwen3moe" else None
        data = random_llama(1, arch=arch, n_layer=6, n_embd=64, n_head=4, n_ff=32, n_expert=n_expert, extra=extra)
        name = f"random {arch} of {n_expert} experts, temperature 1"
        yield "a model with random weights", name, of_model(data, args.tokens, 1.0, name)
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


def ahead(args: argparse.Namespace) -> str:
    """Experts read ahead that were used, and bytes and time / those without, by kind of routing: medians over parts."""
    found: dict[tuple[str, float, str], list[tuple[float, float, float]]] = {}
    for kind, name, recording in routings(args):
        predictions = {**PREDICTIONS, **({"router": OfRouter(CHOSEN[name])} if name in CHOSEN else {})}
        total = sum(bank.n_experts for bank in recording.banks)
        least = max(len(visit.used) for visit in recording.visits)
        for part in PARTS:
            n_slots = max(int(total * part), least + 1)
            for computing in args.ahead:
                policy = LeastFrequentlyUsed()
                without = replay_ahead(recording, policy, n_slots, None, computing)
                for prediction, value in predictions.items():
                    one = replay_ahead(recording, policy, n_slots, value, computing)
                    found.setdefault((f"{kind}, {part:.0%}", computing, prediction), []).append(
                        (one.precision, one.nbytes / without.nbytes, one.time / without.time))
    rows = [(kind, f"{computing:g}", prediction, *(f"{median(values):.2f}" for values in zip(*of, strict=True)))
            for (kind, computing, prediction), of in sorted(found.items())]
    return markdown(("routing, experts in slots", "computing", "prediction", "used", "bytes", "time"), rows)


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
    parser.add_argument("--recording", nargs="+", default=[], metavar="FILE", help="more routings")
    parser.add_argument("--ahead", type=float, nargs="+", metavar="X", help="what reading ahead would gain, alone")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="of each routing (%(default)s)")
    parser.add_argument("--speed-tokens", type=int, default=32, metavar="N", help="of each timed run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each case (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--folder", metavar="FOLDER", help="for the file of the timed model, on a real disk")
    parser.add_argument("--skip-speed", action="store_true", help="only replays")
    args = parser.parse_args()
    if args.ahead:
        print(ahead(args))
        return
    print(replays(args))
    if not args.skip_speed:
        print("\n" + speed(args))


if __name__ == "__main__":
    main()
