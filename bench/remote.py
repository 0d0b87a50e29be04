"""Remote backends beside local ones: messages, the cost of a split, decode, pipelining.

    python bench/remote.py [--rounds N] [--model FILE] [--transports processes ray]

Prints a table.  Ratios are medians of blocks in turn (timing.py).  The bare call is one of a Ray actor, or of a process
over pipes, that returns as many bytes as it is given.  Under Ray a split takes the relay of actors, a compiled graph;
one more row has it as calls.  The model is a random one of 160M parameters unless a file is given.  Pipelining is
measured on a simulated network with a clock of its own, so its row is exact; the others need an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import timing

import ggml_sched as gs
from ggml_sched import llama, remote
from ggml_sched.planning.tables import markdown
from ggml_sched.remote.cluster import Cluster, cluster_of
from ggml_sched.remote.messages import unpacked
from ggml_sched.remote.worker import Worker

__all__ = ["decode_ratio", "messages_a_token", "overhead", "pipelining"]

ACTIVATIONS = 4096
"""f32 elements of the input and the output of a split: 16 KiB each."""
TOKENS = 32
LINK, COMPUTE = 1e-3, 5e-3
"""Seconds of a simulated link, and of a simulated split."""


def scaled(backends: tuple[gs.Backend, ...], n: int) -> tuple[gs.Graph, gs.Tensor, gs.Tensor, list[object]]:
    """A vector scaled on each backend in turn: (graph, input, output, what must stay alive)."""
    ctx, held = gs.Context(), []
    x = y = ctx.tensor("f32", (n, 1), "x", input=True)
    for k, backend in enumerate(backends):
        weights = gs.Context(f"weights {k}")
        w = weights.tensor("f32", (n,), f"w{k}")
        held.append((weights, backend.alloc_tensors(weights)))
        w.set(np.full(n, 2, np.float32))
        y = ctx.mul(y, w)
    return gs.Graph(ctx.set_output(y)), x, y, [ctx, *held]


def messages_a_token(n: int, tied: bool) -> tuple[int, int]:
    """Messages of a token of a llama over `n` workers, after the first token: their median, and the most; attention
    reads more rows of the cache with one of the tokens, which is a graph that workers have not computed before."""
    network = remote.SimulatedNetwork([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(n)])
    with remote.cluster_of(network) as cluster, \
            llama.load(llama.random_llama(tied=tied), cluster.backends, n_ctx=256) as model:
        model.eval([1, 2, 3])
        taken = []
        for k in range(TOKENS + 4):
            before = sum(network.carried.values())
            model.eval([5 + k])
            taken.append(sum(network.carried.values()) - before)
        return int(np.median(taken[1:])), max(taken[1:])


def pipelining(n: int = 4) -> float:
    """Simulated seconds of `n` computes over two workers, one after the other / queued."""

    def cost(worker: Worker, message: bytes) -> float:
        segments = unpacked(message)[0]["segments"]
        return COMPUTE * sum(command[0] == "run" for command in segments[0][3])

    def seconds(queued: bool) -> float:
        workers = [Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)]
        network = remote.SimulatedNetwork(workers, delay=LINK, cost=cost)
        with remote.cluster_of(network) as cluster:
            graph, x, _y, _held = scaled(cluster.backends, 64)
            with gs.Scheduler(cluster.backends, copies=n) as scheduler:
                scheduler.alloc(graph)
                for _ in range(n):      # splits are registered for each slot of a copy
                    x.set(np.ones((1, 64), np.float32))
                    scheduler.compute(graph)
                start = network.now()
                for _ in range(n):
                    x.set(np.ones((1, 64), np.float32))
                    if queued:
                        scheduler.compute_async(graph)
                    else:
                        scheduler.compute(graph)
                scheduler.synchronize()
                return network.now() - start

    return seconds(False) / seconds(True)


def bare_call(transport: str, stack: ExitStack) -> Callable[[], object]:
    """A call with 16 KiB there and back, without this package's worker."""
    data = bytes(4 * ACTIVATIONS)
    if transport == "ray":
        import ray

        class Echo:
            def call(self, given: bytes) -> bytes:
                return given

        actor = ray.remote(num_cpus=0)(Echo).remote()
        stack.callback(ray.kill, actor)
        return lambda: ray.get(actor.call.remote(data))
    code = (f"import sys\nread, write = sys.stdin.buffer, sys.stdout.buffer\nwhile data := read.read({len(data)}):\n"
            "    write.write(data)\n    write.flush()")
    echo = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                                                stdout=subprocess.PIPE, bufsize=0))
    stack.callback(echo.kill)

    def call() -> None:
        echo.stdin.write(data)
        got = 0
        while got < len(data):
            got += len(echo.stdout.read(len(data) - got))

    return call


def overhead(cluster: Cluster, transport: str, rounds: int) -> tuple[float, float]:
    """Microseconds of a remote split with 16 KiB in and out, and how it is to a bare call."""
    with ExitStack() as stack:
        graph, x, y, _held = scaled(cluster.backends[:1], ACTIVATIONS)
        scheduler = stack.enter_context(gs.Scheduler(cluster.backends[:1]))
        scheduler.alloc(graph)
        values = np.ones((1, ACTIVATIONS), np.float32)
        out = bytearray(4 * ACTIVATIONS)

        def split() -> None:
            x.set(values)
            scheduler.compute(graph, wait=False)
            cluster.backends[0].get_tensor(y, out)

        bare = bare_call(transport, stack)
        split()
        bare()
        seen = timing.in_turns({"split": lambda: timing.timed(split), "bare": lambda: timing.timed(bare)}, rounds)
        return float(np.median(seen["split"])), timing.ratio(seen["split"], seen["bare"])


def overhead_of_calls(rounds: int) -> tuple[float, float]:
    """`overhead` under Ray where no message takes the relay."""
    from ggml_sched.remote.rays import RayActors, initialized

    carrier = RayActors({"w0": remote.WorkerOptions(threads=1)}, ends_ray=initialized(None, 2), relayed=False)
    with cluster_of(carrier) as cluster:
        return overhead(cluster, "ray", rounds)


def decode_ratio(cluster: Cluster, path: Path, rounds: int) -> tuple[float, float]:
    """Tokens a second over two workers, and how many times those of the same split over two local backends."""

    def rate(model: llama.Model) -> float:
        model.reset()
        model.eval([1, 2, 3])
        start = time.perf_counter()
        for k in range(TOKENS):
            model.eval([5 + k])
        return TOKENS / (time.perf_counter() - start)

    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b, \
            llama.load(path, [a, b], n_ctx=256) as local, llama.load(path, cluster.backends, n_ctx=256) as far:
        rates = [(rate(far), rate(local)) for _ in range(rounds + 1)][1:]
    return float(np.median([r for r, _ in rates])), float(np.median([ours / theirs for ours, theirs in rates]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: a random model of 160M parameters)")
    parser.add_argument("--transports", nargs="+", default=["processes", "ray"], choices=["processes", "ray"])
    args = parser.parse_args()
    rows = []
    for n, tied in itertools.product((1, 2, 3), (False, True)):
        usual, most = messages_a_token(n, tied)
        rows.append([f"messages a token of a model{', tied weights,' if tied else ''} over {n} workers "
                     f"(the most: {most})", f"<= {n + 1}", str(usual)])
    rows.append(["4 prompts over 2 simulated workers, links of 1 ms: one by one / queued", ">= 1.6",
                 f"{pipelining():.2f}"])
    folder = tempfile.TemporaryDirectory()
    model = args.model or Path(folder.name) / "160m.gguf"
    if args.model is None:
        model.write_bytes(llama.random_llama(n_vocab=32000, n_embd=768, n_layer=12, n_head=12, n_head_kv=12, n_ff=3072,
                                             dtype="q4_0"))
    for transport in args.transports:
        with remote.connect(workers=2, threads=1, transport=transport) as cluster:
            took, to_bare = overhead(cluster, transport, args.rounds)
            rows.append([f"{transport}: a split with 16 KiB in and out / a bare call ({took:.0f} us)",
                         "<= 1.3" if transport == "ray" else "", f"{to_bare:.2f}"])
            rate, to_local = decode_ratio(cluster, model, args.rounds)
            rows.append([f"{transport}: decode over 2 workers / 2 local backends ({rate:.1f} tokens/s)", ">= 0.7",
                         f"{to_local:.2f}"])
        if transport == "ray":
            took, to_bare = overhead_of_calls(args.rounds)
            rows.append([f"ray: the same split, by calls alone ({took:.0f} us)", "", f"{to_bare:.2f}"])
    folder.cleanup()
    print(markdown(("what", "target", "measured"), rows))


if __name__ == "__main__":
    main()
