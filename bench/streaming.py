"""A model larger than the memory it gets, beside llama.cpp with a mapped file in the same memory: tables of Markdown.

    python bench/streaming.py [--parts 0.25 0.5 0.75] [--engine cpu|ggml] [--layers N] [--tokens N] [--rounds N]
                              [--folder FOLDER]

Each engine runs in a process of its own, in a control group for memory with the limit, where root can make one;
without groups llama.cpp is left out.  Each has a copy of the file, so that no pages are in memory on another's
account.  A limit counts all that a process holds.  The bound is what no schedule can beat: the greater of a token's
time with everything in memory and the time to read what the limit leaves no room for, W - M bytes and the window, to
memory of the window's size, which is measured between the tokens.  The engines and the disk take turns; medians of
tokens, prompts and readings count.
FOLDER, which must be on a real disk, gets three files of about 43 MiB a layer.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from memory_group import memory_group

from ggml_sched.llama.synthetic import random_llama
from ggml_sched.planning.tables import markdown

HERE = Path(__file__).resolve().parent
SHAPES = {"n_vocab": 8192, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 2816}
CHUNK = 4 << 20
HUGE = 2 << 20
MIB = 1 << 20
PROMPT = 512
FITS = 2.0
"""The part of the weights as a limit in which everything fits."""
TARGETS = {"bound": 1.15, "mapped": 4.0, "prompt": 3.0, "fits": 0.98}


class Refused(Exception):
    """A limit in which a model does not fit at all."""


class Killed(Exception):
    """A process was killed by the kernel, because it needs more than the limit of its group."""


class Worker:
    """A process of streaming_worker.py, and the seconds of each token and prompt."""

    def __init__(self, engine: str, path: Path, threads: int, limit: int, group: Path | None) -> None:
        command = [sys.executable, str(HERE / "streaming_worker.py"), str(group or "-"), engine, str(path),
                   str(threads), str(limit)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        self.seconds: dict[str, list[float]] = {}
        self.logits: dict[str, int] = {}
        first = self._read()
        if "refused" in first:
            self.close()
            raise Refused(first["refused"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.close()
            ended = f"a worker ended, with {code}: {' '.join(map(str, self.process.args))}"
            raise Killed(ended) if code == -signal.SIGKILL else RuntimeError(ended)
        return json.loads(line)

    def ask(self, what: str, *numbers: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, (what, *numbers))) + "\n")
        self.process.stdin.flush()
        return self._read()

    def measure(self, what: str, n: int) -> None:
        found = self.ask(what, n)
        self.seconds.setdefault(what, []).extend(found["seconds"])
        assert self.logits.setdefault(what, found["logits"]) == found["logits"], f"{what}: other logits than before"

    def medians(self) -> dict[str, float]:
        return {what: median(seconds) for what, seconds in self.seconds.items()}

    def close(self) -> int:
        """End the process; returns its exit code.  It may have ended before."""
        with suppress(BrokenPipeError):
            self.process.communicate()
        return self.process.wait()


def reading(path: Path, nbytes: int, together: int, window: int) -> float:
    """Seconds to read as many bytes of a file, in order and past the page cache, so many reads together, to `window`
    bytes of memory, over and over.

    The memory has huge pages: reads to small ones can take three times as long.  It is as large as the window of the
    model, because reads to memory that fits into a cache of the processor are faster by a third.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    n = max(together, window // CHUNK)
    memory = mmap.mmap(-1, n * CHUNK + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        first = -whole.ctypes.data % HUGE
        chunks = whole[first : first + n * CHUNK].reshape(n, CHUNK)
        chunks[:] = 0
        places = iter(range(0, nbytes, CHUNK))

        def read(_: int) -> None:
            for place in places:
                os.preadv(fd, [chunks[place // CHUNK % n].data], place)

        with ThreadPoolExecutor(together) as pool:
            start = time.perf_counter()
            list(pool.map(read, range(together)))
        return (time.perf_counter() - start) * nbytes / (-(-nbytes // CHUNK) * CHUNK)
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Drop the pages of a file that nothing maps from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Case:
    """One limit: ours and llama.cpp, each in a group with it, if there are groups."""

    def __init__(self, stack: ExitStack, args: argparse.Namespace, path: Path, mapped: Path, part: float) -> None:
        self.part, self.limit = part, int(path.stat().st_size * part)
        self.missing = self.window = 0
        self.readings: dict[int, list[float]] = {1: [], 2: [], 4: []}
        groups = [stack.enter_context(memory_group(self.limit)) for _ in range(2)]
        self.refused, self.ours = "", None
        self.theirs: Worker | None = None
        self.killed = False
        try:
            self.ours = Worker(args.engine, path, args.threads, self.limit, groups[0])
            stack.callback(self.ours.close)
            figures = self.ours.ask("figures")
            if figures["fetched"]:
                self.window = figures["window"]
                self.missing = figures["weights"] - figures["room"] + self.window
        except Refused as error:
            self.refused = str(error)
        if groups[1] is not None and not args.alone:
            try:
                forget(mapped)
                self.theirs = Worker("llama.cpp", mapped, args.threads, self.limit, groups[1])
                stack.callback(self.theirs.close)
            except Killed:
                self.killed = True

    def workers(self) -> Iterator[Worker]:
        yield from (worker for worker in (self.ours, self.theirs) if worker is not None)

    @property
    def reading(self) -> float:
        """Seconds to read what the limit leaves no room for, with 1, 2 or 4 reads at a time, whichever is faster."""
        return min(map(median, self.readings.values()))

    def bound(self, compute: float) -> float:
        """Seconds that a token takes at least, where `compute` are those with everything in memory."""
        return max(compute, self.reading if self.missing else 0.0)


def measured(args: argparse.Namespace, path: Path, mapped: Path, part: float,
             free: Worker) -> tuple[list[str], list[str]]:
    """The rows of a limit: of its tokens, and of its prompts.  What takes turns is compared."""
    free.seconds.clear()
    with ExitStack() as stack:
        case = Case(stack, args, path, mapped, part)
        for _ in range(args.rounds):
            for _ in range(args.tokens if case.missing else 0):
                for together, seconds in case.readings.items():
                    seconds.append(reading(path, case.missing, together, case.window))
            for worker in (free, *case.workers()):
                worker.measure("decode", args.tokens)
            for worker in (free, *case.workers()):
                worker.measure("prefill", PROMPT)
        head = [f"{part:.2f}", f"{case.limit / MIB:.0f}"]
        if case.ours is None:
            return [*head, case.refused], [*head, case.refused]
        assert case.ours.logits["decode"] == free.logits["decode"], "other bits of tokens than without a limit"
        figures, ours, unlimited = case.ours.ask("figures"), case.ours.medians(), free.medians()
        bound = case.bound(unlimited["decode"])
        rate = f"{case.missing / case.reading / 1e6:.0f}" if case.missing else "-"
        theirs = case.theirs.medians() if case.theirs is not None else {} if case.killed else None
        tokens = [*head, f"{figures['fetched'] / MIB:.0f}", f"{figures['window'] / MIB:.0f}", rate,
                  f"{ours['decode'] * 1e3:.0f}", f"{1 / ours['decode']:.2f}",
                  f"{unlimited['decode'] * 1e3:.0f}", f"{bound * 1e3:.0f}",
                  f"{ours['decode'] / bound:.2f}",
                  *beside(ours, theirs, "decode", 1000), f"{figures['peak'] / case.limit:.2f}"]
        prompts = [*head, f"{ours['prefill']:.2f}", f"{unlimited['prefill']:.2f}",
                   "yes" if case.ours.logits["prefill"] == free.logits["prefill"] else "no, in smaller batches",
                   *beside(ours, theirs, "prefill", 1)]
        return tokens, prompts


def beside(ours: dict[str, float], theirs: dict[str, float] | None, what: str, scale: int) -> list[str]:
    """llama.cpp's seconds times `scale`, and how many times as long that is as ours."""
    if not theirs:
        return ["-" if theirs is None else "killed", "-"]
    return [f"{theirs[what] * scale:.{0 if scale > 1 else 2}f}", f"{theirs[what] / ours[what]:.1f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="of the weights, as limits")
    parser.add_argument("--engine", choices=["cpu", "ggml"], default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4, help="of a round (4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, help="where the model's file is written")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    args = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        whole, path, mapped = (folder / name for name in ("whole.gguf", "fetched.gguf", "mapped.gguf"))
        whole.write_bytes(random_llama(1, n_layer=args.layers, n_ctx=1024, extra={"tokenizer.ggml.model": "no_vocab"},
                                       **SHAPES))
        for copy in (path, mapped):
            shutil.copyfile(whole, copy)
            forget(copy)
        with memory_group(1 << 40) as group:
            if group is None:
                print("no control groups here: llama.cpp runs under no limit, and is left out", file=sys.stderr)
        free = Worker(args.engine, whole, args.threads, 0, None)
        stack.callback(free.close)
        rows, prompts = zip(*(measured(args, path, mapped, part, free) for part in [*args.parts, FITS]), strict=True)
        print(f"{path.stat().st_size / MIB:.0f} MiB of weights in f32, {args.threads} threads, {args.engine}.\n")
        head = ["limit / weights", "MiB", "fetched a token, MiB", "window, MiB", "disk, MB/s", "ms a token", "tokens/s",
                "with everything in memory, ms", "bound, ms", f"/ bound (≤ {TARGETS['bound']})", "llama.cpp mapped, ms",
                f"times as fast (≥ {TARGETS['mapped']:.0f})", "peak / limit (≤ 1)"]
        print(markdown(head, rows) + "\n")
        head = ["limit / weights", "MiB", f"seconds a prompt of {PROMPT}", "without a limit", "same bits",
                "llama.cpp mapped", f"times as fast (≥ {TARGETS['prompt']:.0f})"]
        print(markdown(head, prompts))


if __name__ == "__main__":
    main()
