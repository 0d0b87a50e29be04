"""A process that runs one model on one engine, with commands from speed.py, one per line.

    python speed_worker.py ENGINE FILE THREADS

ENGINE: llama.cpp (flash attention, f16 cache, logits of the last row, as fast as it goes), ggml or cpu (this package on
GgmlBackend or CpuBackend, the same settings).  It answers each line of input with a line of JSON:

    prefill N       seconds to evaluate N tokens of a fresh sequence
    decode N        seconds to evaluate N tokens, one after the other, after a prompt of 32
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

N_CTX = 1024
N_BATCH = 512
PROMPT = 32


class LlamaCpp:
    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp as api

        self.api = api
        self.quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.quiet, None)
        self.before, self.start = memory(), time.perf_counter()
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.type_k = params.type_v = 1
        params.no_perf = True
        self.ctx = api.llama_init_from_model(self.model, params)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def reset(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.ctx), False)

    def eval(self, tokens: list[int]):
        import numpy as np

        api = self.api
        array = (api.llama_token * len(tokens))(*tokens)
        if api.llama_decode(self.ctx, api.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama_decode failed")
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.ctx, -1), (self.n_vocab,))


class Ours:
    def __init__(self, path: str, threads: int, engine: str) -> None:
        import ggml_sched as gs
        from ggml_sched import llama

        kind = gs.GgmlBackend if engine == "ggml" else gs.CpuBackend
        _ = gs.Scheduler, gs.Graph      # imported when they are first used; imports are not counted
        self.before, self.start = memory(), time.perf_counter()
        self.model = llama.load(path, [kind(n_threads=threads)], n_ctx=N_CTX, n_batch=N_BATCH, kv_type="f16")

    def reset(self) -> None:
        self.model.reset()

    def eval(self, tokens: list[int]):
        return self.model.eval(tokens, last_only=True)[-1]


def prefill(engine, n: int) -> float:
    tokens = [1 + 7 * i % 31000 for i in range(n)]
    engine.reset()
    start = time.perf_counter()
    engine.eval(tokens)
    return time.perf_counter() - start


def decode(engine, n: int) -> float:
    engine.reset()
    token = int(engine.eval([1 + 11 * i % 31000 for i in range(PROMPT)]).argmax())
    start = time.perf_counter()
    for _ in range(n):
        token = int(engine.eval([token]).argmax())
    return time.perf_counter() - start


def memory() -> dict[str, int]:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    names = {"anonymous": "RssAnon", "mapped": "RssFile"}
    return {what: int(fields[name].split()[0]) << 10 for what, name in names.items()}


def main() -> None:
    name, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    engine = LlamaCpp(path, threads) if name == "llama.cpp" else Ours(path, threads, name)
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
            answer({what: {"prefill": prefill, "decode": decode}[what](engine, int(numbers[0]))})


def answer(values: dict) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
