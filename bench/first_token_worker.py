"""A process that continues a text by one token, as a program that has just been started does.

    python first_token_worker.py ENGINE FILE THREADS

ENGINE: llama.cpp (through llama-cpp-python's C functions), or cpu (this package on CpuBackend).  It prints a line of
JSON when the text of the first token is known: that text, and the seconds since the engine was imported.
first_token.py measures from the start of the process to this line.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

PROMPT = "The capital of France is"
N_CTX = N_BATCH = 512


def llama_cpp(path: str, threads: int) -> tuple[str, float]:
    import llama_cpp as api

    quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(quiet, None)
    start = time.perf_counter()
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = N_CTX, N_BATCH, N_BATCH
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.no_perf = True
    ctx = api.llama_init_from_model(model, params)
    vocab, text = api.llama_model_get_vocab(model), PROMPT.encode()
    ids = (api.llama_token * 256)()
    n = api.llama_tokenize(vocab, text, len(text), ids, len(ids), True, False)
    if api.llama_decode(ctx, api.llama_batch_get_one(ids, n)):
        raise SystemExit("llama_decode failed")
    token = api.llama_sampler_sample(api.llama_sampler_init_greedy(), ctx, -1)
    piece = ctypes.create_string_buffer(256)
    size = api.llama_token_to_piece(vocab, token, piece, len(piece), 0, True)
    return piece.raw[:size].decode("utf-8", "replace"), time.perf_counter() - start


def ours(path: str, threads: int) -> tuple[str, float]:
    from ggml_sched import llama

    start = time.perf_counter()
    model = llama.load(path, n_threads=threads, n_ctx=N_CTX, n_batch=N_BATCH, kv_type="f16")
    return model.generate(PROMPT, 1, ignore_eos=True).read(), time.perf_counter() - start


def main() -> None:
    engine, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    text, seconds = (llama_cpp if engine == "llama.cpp" else ours)(path, threads)
    print(json.dumps({"text": text, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
