"""A process that runs one model on one engine, with commands from speed.py, one per line.

    python speed_worker.py ENGINE FILE THREADS CONTEXT

ENGINE: llama.cpp (flash attention, f16 cache, logits of the last row, as fast as it goes), ggml or cpu (this package on
GgmlBackend or CpuBackend, the same settings), "ggml mapped" or "cpu mapped" (these without huge pages).  It answers
each line of input with a line of JSON:

    prefill N       seconds to evaluate N tokens of a fresh sequence
    decode N [M]    seconds to evaluate N tokens, one after the other, after a prompt of M (32), which is kept
    memory          bytes: anonymous, mapped from files
    quit

It first writes, without a command, the seconds from the start of loading to the logits of the first token, not counting
imports.  Memory is the growth since then.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

N_BATCH = 512
PROMPT = 32


class LlamaCpp:
    kept = 0

    def __init__(self, path: str, threads: int, n_ctx: int) -> None:
        import llama_cpp as api

        self.api = api
        self.quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.quiet, None)
        self.before, self.start = memory(), time.perf_counter()
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, N_BATCH, N_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.type_k = params.type_v = 1
        params.no_perf = True
        self.ctx = api.llama_init_from_model(self.model, params)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def reset(self) -> None:
        """Forget all tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.ctx), False)

    def eval(self, tokens: list[int]):
        import numpy as np

        api = self.api
        array = (api.llama_token * len(tokens))(*tokens)
        if api.llama_decode(self.ctx, api.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama_decode failed")
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.ctx, -1), (self.n_vocab,))

    def keep(self, n: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.ctx), 0, n, -1)


class Ours:
    kept = 0
    """Tokens of the prompt that `decode` has evaluated."""

    def __init__(self, path: str, threads: int, n_ctx: int, engine: str) -> None:
        import ggml_sched as gs
        from ggml_sched import llama

        kind = gs.GgmlBackend if engine.startswith("ggml") else gs.CpuBackend
        _ = gs.Scheduler, gs.Graph      # imported when they are first used; imports are not counted
        self.before, self.start = memory(), time.perf_counter()
        self.model = llama.load(path, [kind(n_threads=threads)], n_ctx=n_ctx, n_batch=N_BATCH, kv_type="f16",
                                huge_pages=not engine.endswith("mapped"))

    def reset(self) -> None:
        self.model.reset()

    def keep(self, n: int) -> None:
        """Forget all but the first n tokens."""
        self.model.truncate(n)

    def eval(self, tokens: list[int]):
        return self.model.eval(tokens, last_only=True)[-1]


def prefill(engine, n: int) -> float:
    tokens = [1 + 7 * i % 31000 for i in range(n)]
    engine.reset()
    engine.kept = 0
    start = time.perf_counter()
    engine.eval(tokens)
    return time.perf_counter() - start


def decode(engine, n: int, depth: int = PROMPT) -> float:
    if engine.kept == depth:
        engine.keep(depth)
    else:
        engine.reset()
        tokens = [1 + 11 * i % 31000 for i in range(depth)]
        for first in range(0, depth, N_BATCH):
            engine.eval(tokens[first : first + N_BATCH])
        engine.kept = depth
    token = 7
    start = time.perf_counter()
    for _ in range(n):
        token = int(engine.eval([token]).argmax())
    return time.perf_counter() - start


def memory() -> dict[str, int]:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    names = {"anonymous": "RssAnon", "mapped": "RssFile"}
    return {what: int(fields[name].split()[0]) << 10 for what, name in names.items()}


def main() -> None:
    name, path, threads, n_ctx = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    engine = LlamaCpp(path, threads, n_ctx) if name == "llama.cpp" else Ours(path, threads, n_ctx, name)
    engine.eval([1])
    answer({"load": time.perf_counter() - engine.start})
    for line in sys.stdin:
        what, *numbers = line.split()
        if what == "quit":
            return
        if what == "memory":
            now = memory()
            answer({key: now[key] - engine.before[key] for key in now})
        else:
            answer({what: {"prefill": prefill, "decode": decode}[what](engine, *map(int, numbers))})


def answer(values: dict) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
