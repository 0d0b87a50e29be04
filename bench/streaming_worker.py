"""A process of streaming.py: one model on one engine under a limit, with commands one per line, as in speed_worker.py.

    python streaming_worker.py GROUP ENGINE FILE THREADS LIMIT

GROUP: the control group to join, or "-".  ENGINE: llama.cpp, ggml or cpu.  LIMIT: what the process may hold, in bytes;
0: no limit.  It answers each line of input with a line of JSON:

    prefill N       {"seconds": [to evaluate N tokens of a fresh sequence], "logits": a checksum}
    decode N        {"seconds": [of each of N tokens after a prompt of 8], "logits": a checksum of all}
    figures         {"peak": bytes that the process has held, and of weights: "weights", "fetched", "room", "window"}
    quit
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from zlib import crc32

import memory_group
from speed_worker import LlamaCpp, answer

N_CTX = 1024
PROMPT = 8


class Ours:
    def __init__(self, path: str, threads: int, engine: str, limit: int) -> None:
        import ggml_sched as gs
        from ggml_sched import llama

        kind = gs.GgmlBackend if engine == "ggml" else gs.CpuBackend
        _ = gs.Scheduler, gs.Graph, gs.FileStore        # imported when they are first used: the limit counts them
        memory = llama.process_budget(limit) if limit else None
        try:
            self.model = llama.load(path, [kind(n_threads=threads)], n_ctx=N_CTX, kv_type="f16", memory=memory)
        except gs.OutOfMemory as error:
            answer({"refused": str(error)})
            raise SystemExit from None

    def reset(self) -> None:
        self.model.reset()

    def eval(self, tokens: list[int]):
        return self.model.eval(tokens, last_only=True)[-1]

    def figures(self) -> dict[str, int]:
        held = self.model.residency
        if held is None:
            return {}
        uses = [use for uses in held.uses.values() for use in uses]
        return {"weights": sum(use.nbytes for use in uses), "fetched": held.nbytes, "room": sum(held.rooms.values()),
                "window": sum(choice.window for choice in held.choices.values())}


def prefill(engine, n: int) -> dict[str, object]:
    engine.reset()
    start = time.perf_counter()
    logits = engine.eval([1 + 7 * i % 4000 for i in range(n)])
    return {"seconds": [time.perf_counter() - start], "logits": crc32(logits.tobytes())}


def decode(engine, n: int) -> dict[str, object]:
    engine.reset()
    token = int(engine.eval([1 + 11 * i % 4000 for i in range(PROMPT)]).argmax())
    checksum, seconds = 0, []
    for _ in range(n):
        start = time.perf_counter()
        logits = engine.eval([token])
        seconds.append(time.perf_counter() - start)
        token, checksum = int(logits.argmax()), crc32(logits.tobytes(), checksum)
    return {"seconds": seconds, "logits": checksum}


def peak() -> int:
    """The most bytes that this process has held at once, of its own and of files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    group, name, path = sys.argv[1:4]
    threads, limit = map(int, sys.argv[4:6])
    if group != "-":
        memory_group.join(group)
    engine = LlamaCpp(path, threads, N_CTX) if name == "llama.cpp" else Ours(path, threads, name, limit)
    engine.eval([1])
    answer({"ready": True})
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "quit":
            return
        if what == "figures":
            answer({"peak": peak(), **(engine.figures() if isinstance(engine, Ours) else {})})
        else:
            answer({"prefill": prefill, "decode": decode}[what](engine, int(numbers[0])))


if __name__ == "__main__":
    main()
