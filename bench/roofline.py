"""What share of the machine's limits the CPU backend reaches, and where the rest of the time goes: a page of Markdown.

    python bench/roofline.py [--formats f32 q4_0 ...] [--larger q2_K ...] [--threads 1 2] [--depths 32 3500] \
        [--rounds N] [--interleave] > docs/roofline.md

Limits are measured before each turn, by compiled loops of this benchmark (roofline_limits.c; it needs a C compiler):
bytes that as many threads read from memory, and f32 products and sums.  A token reads each weight once, and its rows of
the cache; the least time for that is its limit (Williams, Waterman, Patterson: Roofline, 2009).  Each turn is compared
with its own bandwidth: a memory that other machines use, too, is faster in one minute than in the next.  The rate of
operations is the best of the run.

Where time goes is measured by `CpuBackend.node_times` in turns of their own, because that takes time, too.  With the
extra `peer`, llama.cpp computes the same in turns; so do other builds of it, and its forks, with

    --program "NAME=/path/to/llama-bench OPTIONS"       repeated: another engine, or other OPTIONS of the same NAME

of whose options the best counts.

With --interleave each model is measured with interleaved rows, too, where its type has such kernels; of tokens after
the least depth, since attention is the same.  --larger names formats of a model of 369 million weights, of 0.1 to 0.8
GB, of which tokens after the least depth alone are measured.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import speed
import speed_files
from llama_bench import Program
from report import processor

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backend import dense_bytes
from ggml_sched.errors import UnsupportedOp
from ggml_sched.placement.facts import facts, is_resident, is_weight
from ggml_sched.planning.tables import markdown

HERE = Path(__file__).resolve().parent
OPTIONS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
READ = 512 << 20
"""Bytes that are read to measure bandwidth: many times what caches hold."""
ROUNDS_OF_PRODUCTS = 1_000_000
DECODED = 16
PROMPT = 512
CONTEXT = 4096
SEQUENCES = (1, 2, 4, 8, 16)
AFTER = 32
"""Tokens of each sequence before those that are timed."""
WARM = 40
"""Tokens before those that are timed: by then mapped weights have moved to huge pages."""
PEER = "llama.cpp"
"""The engine of speed.py that llama-cpp-python is."""
PARTS = ("products", "attention", "small nodes", "waiting", "host")


class Limits(NamedTuple):
    """What a number of threads can do at most."""

    bandwidth: float
    """Bytes a second that are read from memory."""
    operations: float
    """f32 products and sums a second."""


class Loops:
    """The compiled loops, run by `threads` threads."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.threads = threads
        self._library = library
        memory = np.ones(READ + 64, np.uint8)
        self._memory = memory[-memory.ctypes.data % 64 :][:READ]

    def measure(self) -> Limits:
        reading = self._library.read_seconds(self._memory.ctypes.data, READ, self.threads)
        computing = self._library.multiply_seconds(ROUNDS_OF_PRODUCTS, self.threads)
        done = ROUNDS_OF_PRODUCTS * self.threads * self._library.operations_of_a_round()
        return Limits(READ / reading, done / computing)


@contextmanager
def compiled_limits() -> Iterator[ctypes.CDLL]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "limits.so"
        subprocess.run([os.environ.get("CC", "cc"), *OPTIONS, "-o", str(path), str(HERE / "roofline_limits.c")],
                       check=True)
        library = ctypes.CDLL(str(path))
        library.read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.multiply_seconds.argtypes = [ctypes.c_int64, ctypes.c_int]
        library.read_seconds.restype = library.multiply_seconds.restype = ctypes.c_double
        library.operations_of_a_round.restype = ctypes.c_int64
        yield library


@dataclass
class Row:
    """One model, number of threads, and kind of batch."""

    n_tokens: int
    nbytes: float
    """From memory for each batch: weights, and rows of the cache."""
    operations: float
    measured: list[Limits] = field(default_factory=list)
    """Before each turn."""
    seconds: list[float] = field(default_factory=list)
    """Of a batch, in each turn."""
    others: dict[str, list[float]] = field(default_factory=dict)
    """The same of other engines, with the best of their settings in each turn."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a batch in each of PARTS."""

    def least_seconds(self, rate: float) -> list[float]:
        """In each turn, with `rate` operations a second: those of reading, or of computing, where that takes longer.
        For one token reading alone counts."""
        computing = self.operations / rate if self.n_tokens > 1 else 0.0
        return [max(self.nbytes / limits.bandwidth, computing) for limits in self.measured]

    def share(self, rate: float) -> float:
        """The least seconds by those taken, turn by turn."""
        return median(least / taken for least, taken in zip(self.least_seconds(rate), self.seconds, strict=True))

    def ratio(self, name: str) -> str:
        """The time of another engine by ours, turn by turn."""
        taken = self.others.get(name)
        return f"{median(a / b for a, b in zip(taken, self.seconds, strict=True)):.2f}" if taken else "-"


def read_from_memory(graph: gs.Graph, fill: float) -> float:
    """Bytes of weights and of the used part of the cache that a graph reads."""
    total = 0.0
    for node in graph.nodes:
        for k, source in enumerate(node.src if node.computes else ()):
            if source is None or not is_resident(source.root) or node.op in ("SET_ROWS", "CPY"):
                continue
            if node.op == "GET_ROWS" and k == 0:
                total += node.n_elements / source.type.block_size * source.type.type_size
            else:
                total += dense_bytes(source) * (1.0 if is_weight(source.root) else fill)
    return total


def needs(model: llama.Model, n_tokens: int, depth: int, n_outputs: int) -> Row:
    """What a batch of n_tokens tokens after `depth` rows of the cache needs."""
    used = depth + n_tokens
    n_kv = -(-used // 32) * 32
    graph = model.batch_graph(n_tokens, min(n_kv, CONTEXT), n_outputs).graph
    fill = min(1.0, used / n_kv)
    return Row(n_tokens, read_from_memory(graph, fill), float(facts(graph, fill).flops.sum()))


def kind_of(node: gs.Tensor) -> str:
    """The part of the page that a node belongs to."""
    residents = [s.root for s in node.src if s is not None and is_resident(s.root)]
    if node.op == "FLASH_ATTN_EXT" or node.op == "MUL_MAT" and not any(map(is_weight, residents)):
        return "attention"
    return "products" if node.op in ("MUL_MAT", "MUL_MAT_ID") else "small nodes"


def split(backend: gs.CpuBackend, batch, n: int) -> dict[str, float]:
    """Seconds of PARTS for one batch, from n of them."""
    with backend.node_times() as times:
        start = perf_counter()
        for _ in range(n):
            batch()
        total = perf_counter() - start
    found = dict.fromkeys(PARTS, 0.0)
    for node in times.nodes:
        busy = node.busy / times.n_threads
        found[kind_of(node.node)] += busy
        found["waiting"] += node.seconds - busy
    found["host"] = total - sum(node.seconds for node in times.nodes)
    return {part: seconds / n for part, seconds in found.items()}


def prompt_rounds(rounds: int) -> int:
    return max(3, rounds // 2)


def tokens(n: int) -> list[int]:
    return [1 + 7 * i % 31000 for i in range(n)]


def timed(batch, n: int) -> float:
    start = perf_counter()
    for _ in range(n):
        batch()
    return (perf_counter() - start) / n


class Bench:
    """One model file on a number of threads."""

    def __init__(self, path: Path, loops: Loops, rounds: int, has_peer: bool, programs: Sequence[Program],
                 interleave: bool = False) -> None:
        self.path, self.loops, self.rounds, self.has_peer = path, loops, rounds, has_peer
        self.programs, self.interleave = programs, interleave

    def _peer(self, stack: ExitStack) -> speed.Worker | None:
        if not self.has_peer:
            return None
        return stack.enter_context(speed.Worker(PEER, self.path, self.loops.threads, CONTEXT))

    def _time_programs(self, row: Row, seconds: Callable[[Program], float]) -> None:
        """Add a turn of each engine among the programs to the row."""
        for name, programs in groupby(self.programs, lambda program: program.name):
            row.others.setdefault(name, []).append(min(map(seconds, programs)))

    def _model(self, stack: ExitStack, n_seq: int = 1) -> tuple[gs.CpuBackend, llama.Model]:
        backend = stack.enter_context(gs.CpuBackend(self.loops.threads))
        return backend, stack.enter_context(llama.load(self.path, [backend], n_ctx=CONTEXT, n_batch=PROMPT,
                                                       n_seq=n_seq, kv_type="f16", interleave=self.interleave))

    def decode(self, depth: int) -> Row:
        with ExitStack() as stack:
            peer, (backend, model) = self._peer(stack), self._model(stack)
            row = needs(model, 1, depth + DECODED // 2, 1)

            def token() -> None:
                model.eval([7], last_only=True)

            def again() -> None:
                model.truncate(depth)

            model.eval(tokens(depth), last_only=True)
            timed(token, WARM)
            again()
            row.parts = split(backend, token, DECODED)      # before other engines compute, whose threads wait busily
            again()
            for _ in range(self.rounds):
                row.measured.append(self.loops.measure())
                timed(token, 2)         # the other engines, too, have read their weights before their time begins
                again()
                row.seconds.append(timed(token, DECODED))
                again()
                if peer:
                    row.others.setdefault(PEER, []).append(peer.ask("decode", DECODED, depth)["decode"] / DECODED)
                self._time_programs(row, lambda each: each.decode(self.path, self.loops.threads, DECODED, depth))
            return row

    def prompt(self) -> Row:
        with ExitStack() as stack:
            peer, (backend, model) = self._peer(stack), self._model(stack)
            row = needs(model, PROMPT, 0, 1)

            def prompt() -> None:
                model.reset()
                model.eval(tokens(PROMPT), last_only=True)

            prompt()
            row.parts = split(backend, prompt, 2)
            for _ in range(prompt_rounds(self.rounds)):
                row.measured.append(self.loops.measure())
                row.seconds.append(timed(prompt, 1))
                if peer:
                    row.others.setdefault(PEER, []).append(peer.ask("prefill", PROMPT)["prefill"])
                self._time_programs(row, lambda each: each.prompt(self.path, self.loops.threads, PROMPT))
            return row

    def sequences(self, n: int) -> Row:
        """Tokens of n sequences in one batch, each after AFTER of its own."""
        with ExitStack() as stack:
            backend, model = self._model(stack, n)
            row = needs(model, n, n * (AFTER + DECODED // 2), n)

            def token() -> None:
                model.eval_batch([(i, [7]) for i in range(n)])

            def again() -> None:
                for i in range(n):
                    model.sequence(i).truncate(AFTER)

            for i in range(n):
                model.eval_batch([(i, tokens(AFTER))])
            timed(token, WARM)
            again()
            for _ in range(self.rounds):
                row.measured.append(self.loops.measure())
                row.seconds.append(timed(token, DECODED))
                again()
            row.parts = split(backend, token, DECODED)
            return row


def can_interleave(path: Path) -> bool:
    """Whether weights of a model have interleaved rows here."""
    try:
        llama.load(path, n_ctx=32, interleave=True).close()
    except UnsupportedOp:
        return False
    return True


def cells(row: Row) -> list[str]:
    """Shares of PARTS in percent."""
    total = sum(row.parts.values())
    return [f"{100 * row.parts[part] / total:.0f}" for part in PARTS]


def rows_of(found: dict[tuple, Row], rates: dict[int, float], unit: str, others: Sequence[str]) -> list[list[str]]:
    rows = []
    for (title, threads, what), row in found.items():
        bandwidth = median(limits.bandwidth for limits in row.measured)
        amount = f"{row.nbytes / 1e6:.0f}" if unit == "MB" else f"{row.operations / 1e9:.0f}"
        rows.append([title, str(threads), str(what), amount, f"{1e3 * median(row.seconds):.2f}",
                     f"{bandwidth / 1e9:.1f}", f"{1e3 * median(row.least_seconds(rates[threads])):.2f}",
                     f"{row.share(rates[threads]):.2f}", *map(row.ratio, others), *cells(row)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=list(speed_files.FORMATS),
                        choices=[*speed_files.FORMATS, *speed_files.OTHERS])
    parser.add_argument("--larger", nargs="*", default=[], choices=[*speed_files.FORMATS, *speed_files.OTHERS],
                        help="formats of a larger model")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--depths", nargs="+", type=int, default=[32, 3500])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "ggml-sched-speed")
    parser.add_argument("--interleave", action="store_true", help="each model with interleaved rows, too")
    parser.add_argument("--no-peer", action="store_true", help="do not compare with llama.cpp")
    parser.add_argument("--program", action="append", type=Program.parsed, default=[], metavar="NAME=COMMAND",
                        help="another engine's llama-bench with its options; repeated")
    args = parser.parse_args()
    programs = sorted(args.program, key=lambda program: program.name)
    has_peer = not args.no_peer and find_spec("llama_cpp") is not None
    files = {f"162M {name}": speed_files.make(args.files, name) for name in args.formats} | speed_files.real()
    larger = {f"369M {name}": speed_files.make(args.files, name, "369M") for name in args.larger}
    decode: dict[tuple, Row] = {}
    prompts: dict[tuple, Row] = {}
    batches: dict[tuple, Row] = {}
    with compiled_limits() as library:
        loops = {threads: Loops(library, threads) for threads in args.threads}
        models = [(name, path, interleave) for name, path in (files | larger).items()
                  for interleave in ((False, True) if args.interleave and can_interleave(path) else (False,))]
        for name, path, interleave in models:
            title = name + ", interleaved" * interleave
            for threads in args.threads:
                bench = Bench(path, loops[threads], args.rounds, has_peer, programs, interleave)
                for depth in [min(args.depths)] if interleave or name in larger else args.depths:
                    print(f"{title}, {threads} threads, {depth} tokens deep", file=sys.stderr)
                    decode[title, threads, depth] = bench.decode(depth)
                if name not in larger:
                    prompts[title, threads, PROMPT] = bench.prompt()
            for n in SEQUENCES if name not in larger else ():
                batches[title, threads, n] = bench.sequences(n)
    print(page(decode, prompts, batches, args.rounds))


def page(decode: dict[tuple, Row], prompts: dict[tuple, Row], batches: dict[tuple, Row], rounds: int) -> str:
    measured: dict[int, list[Limits]] = {}
    for (_, threads, _), row in chain(decode.items(), batches.items(), prompts.items()):
        measured.setdefault(threads, []).extend(row.measured)
    rates = {threads: max(limits.operations for limits in each) for threads, each in measured.items()}

    def spread(of: Iterable[float]) -> str:
        return " / ".join(f"{value / 1e9:.1f}" for value in np.percentile([*of], (0, 50, 100)))

    limits = markdown(["threads", "bandwidth, GB/s: least / median / most", "f32 products and sums, Gop/s: the same"],
                      [[str(threads), *map(spread, zip(*each, strict=True))] for threads, each in measured.items()])

    def table(found: dict[tuple, Row], what: str, amount: str, unit: str) -> str:
        others = list(dict.fromkeys(name for row in found.values() for name in row.others))
        head = ["model", "threads", what, amount, "ms", "bandwidth, GB/s", "limit, ms", "share",
                *(f"{name} / ours" for name in others), *(f"{part}, %" for part in PARTS)]
        return markdown(head, rows_of(found, rates, unit, others))

    return f"""# The limits of the CPU

Written by `python bench/roofline.py`: the limits of the machine, measured in the same run, and what share of them a
token, a prompt and a batch of several sequences reach.

Machine: {processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; ggml-sched {gs.__version__}.
Medians of {rounds} turns (of prompts {prompt_rounds(rounds)}).

{limits}

**Share**: the least time that reading the bytes needs (of several tokens also computing, where that takes longer),
divided by the time taken.  The bandwidth is measured before each turn, with the same number of threads, and each turn
is compared with its own, because it changes where other machines use the same memory; a token's share exceeds 1 where
memory is faster in the turn than it was just before, or caches keep weights.  The rate of products and sums is the best
of the run.  Quantised weights are multiplied in integers, whose limit is higher than that of f32, so that the share of
several tokens may exceed 1, too.  Percentages are of the time: *products* with weights, *attention*, *small nodes* (all
others), *waiting* (threads that have no part of a node while others have), *host* (Python, planning, and what starts
kernels).

## Tokens

{table(decode, "after tokens", "MB a token", "MB")}

## Several sequences

One token of each sequence in one batch, each after {AFTER} of its own.

{table(batches, "sequences", "MB a batch", "MB")}

## Prompts

{table(prompts, "tokens", "Gop", "Gop")}"""


if __name__ == "__main__":
    main()
