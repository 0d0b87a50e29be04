"""Evaluate a GGUF model and generate tokens.

Prints what the scheduler made of its graphs: splits, copies, memory and time.  Without MODEL a
small random one is built in memory.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack

from ggml_sched.tables import seconds, table

BACKENDS = ("cpu",)
DEFAULT_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="a GGUF file (default: a small random model)")
    parser.add_argument("--tokens", type=_ids, default=DEFAULT_TOKENS, metavar="IDS",
                        help="the prompt, as token ids: 1,2,3")
    parser.add_argument("-n", "--predict", type=int, default=16, metavar="N",
                        help="tokens to generate (%(default)s)")
    parser.add_argument("--backend", nargs="+", action="extend", choices=BACKENDS,
                        help="backends to spread the layers over, best first; `cpu cpu` makes CPU0 and CPU1")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of each CPU backend")
    parser.add_argument("--n-ctx", type=int, default=512, metavar="N",
                        help="room for tokens (%(default)s)")
    parser.add_argument("--n-batch", type=int, default=512, metavar="N",
                        help="prompt tokens to evaluate together (%(default)s)")
    parser.add_argument("--policy", choices=("default", "seed"), default="default",
                        help="the scheduler's policy")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T",
                        help="0 takes the likeliest token (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="for sampling, and for the weights of the random model (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ggml_sched import llama

    if args.predict < 0:
        raise ValueError(f"-n {args.predict}: not a number of tokens")
    sampler = llama.Sampler(temperature=args.temperature, seed=args.seed)
    with ExitStack() as stack:
        backends = _backends(args.backend or ["cpu"], args.threads)
        for backend in backends:
            stack.enter_context(backend)
        source = llama.random_llama(args.seed) if args.model is None else args.model
        start = time.perf_counter()
        model = stack.enter_context(
            llama.load(source, backends, n_ctx=args.n_ctx, n_batch=args.n_batch, policy=args.policy))
        loaded = time.perf_counter() - start
        ids, times = _generate(model, list(args.tokens), args.predict, sampler)
        _report(args, model, loaded, ids, times)


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None


def _backends(names: list[str], threads: int | None) -> list:
    """CPU for one backend of a kind, CPU0, CPU1, ... for several."""
    from ggml_sched import CpuBackend

    many = len(names) > 1
    return [CpuBackend(threads, name=f"CPU{i}" if many else "CPU") for i, _ in enumerate(names)]


def _generate(model, tokens: list[int], n: int, sampler) -> tuple[list[int], list[float]]:
    """The generated ids, and the seconds of each evaluation: the prompt's, then each token's."""
    ids: list[int] = []
    times = []
    while True:
        start = time.perf_counter()
        logits = model.eval(ids[-1:] if ids else tokens)
        times.append(time.perf_counter() - start)
        if len(ids) == n:
            return ids, times
        ids.append(sampler(logits[-1]))


def _report(args: argparse.Namespace, model, loaded: float, ids: list[int], times: list[float]) -> None:
    n_prompt = len(args.tokens)
    name = "a random model" if args.model is None else os.path.basename(args.model)
    h = model.hparams
    print(f"{name}: {h.arch}, {h.n_layer} layers of {h.n_embd}, vocabulary of {h.n_vocab}, "
          f"context of {model.n_ctx}; policy {args.policy}; loaded in {seconds(loaded)}\n")

    batch = min(n_prompt, model.n_batch)
    graphs = {f"prompt ({batch} tokens)": (batch, model.cache.padded(batch)),
              "generation (1 token)": (1, model.cache.padded(n_prompt + max(len(ids), 1)))}
    rows = [("graph", "nodes", "splits", "copies", "copied bytes", "time to plan")]
    for what, shape in graphs.items():
        graph = model.batch_graph(*shape).graph
        plan, took = _timed_plan(model, graph, args.policy)
        rows.append((what, len(graph.nodes), len(plan.splits), len(plan.copies), plan.copy_bytes,
                     seconds(took)))
    print(table(rows), end="\n\n")

    rows = [("backend", "weights", "KV cache", "arena bytes")]
    for backend in model.backends:
        rows.append((backend.name, _size(model.weights.buffers, backend), _size(model.cache.buffers, backend),
                     model.scheduler.buffer_size(backend)))
    print(table(rows), end="\n\n")

    rows = [("", "tokens", "time", "tokens/s")]
    parts = ("prompt", n_prompt, times[0]), ("generation", len(times) - 1, sum(times[1:]))
    for what, count, took in parts:
        if count:
            rows.append((what, count, seconds(took), f"{count / took:.1f}"))
    print(table(rows), end="\n\n")
    print("generated:", ",".join(map(str, ids)) or "nothing")


def _size(buffers: dict, backend) -> int:
    return buffers[backend].size if backend in buffers else 0


def _timed_plan(model, graph, policy: str):
    """A plan made afresh, and the least time of three."""
    from ggml_sched import Scheduler

    best = float("inf")
    with Scheduler(model.backends, policy=policy, plan_cache=0) as scheduler:
        for _ in range(3):
            start = time.perf_counter()
            plan = scheduler.plan(graph)
            best = min(best, time.perf_counter() - start)
    return plan, best
