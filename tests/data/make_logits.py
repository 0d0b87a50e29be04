"""Writes arch_logits.npz: llama.cpp's logits for the models of tests/support/arch_cases.py.

    PYTHONPATH=. python tests/data/make_logits.py [CASE ...]     (needs llama-cpp-python)

Each case: an f32 KV cache, explicit attention, the CPU; a prompt at once, then one token after another.  Stored are the
logits of the prompt's last token and of all later ones, and the embedding of the last token.
"""

import ctypes
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))

import arch_cases  # noqa: E402
import llama_cpp as lib  # noqa: E402


def evaluate(path: Path, tokens: list[int], n_prompt: int, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [len(tokens), n_vocab] and the embedding of the last token [n_embd]."""
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {path}")
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    width = lib.llama_model_n_embd(model)
    results = []
    for embeddings in (False, True):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = n_ctx, n_ctx, n_ctx, 1
        params.n_threads_batch, params.n_seq_max = 1, 1
        params.type_k = params.type_v = 0
        params.flash_attn_type = 0
        params.embeddings = embeddings
        if embeddings:
            params.pooling_type = 0
        ctx = lib.llama_init_from_model(model, params)
        if not ctx:
            raise RuntimeError(f"llama.cpp makes no context for {path}")
        rows = []
        batch = lib.llama_batch_init(n_ctx, 0, 1)
        for start, end in [(0, n_prompt), *((i, i + 1) for i in range(n_prompt, len(tokens)))]:
            batch.n_tokens = end - start
            for i in range(start, end):
                batch.token[i - start], batch.pos[i - start] = tokens[i], i
                batch.n_seq_id[i - start], batch.seq_id[i - start][0] = 1, 0
                batch.logits[i - start] = True
            if lib.llama_decode(ctx, batch):
                raise RuntimeError(f"llama.cpp does not evaluate {path}")
            for i in range(end - start):
                get = lib.llama_get_embeddings_ith if embeddings else lib.llama_get_logits_ith
                n = width if embeddings else n_vocab
                found = ctypes.cast(get(ctx, i), ctypes.POINTER(ctypes.c_float))
                rows.append(np.ctypeslib.as_array(found, (n,)).copy())
        lib.llama_batch_free(batch)
        lib.llama_free(ctx)
        results.append(np.stack(rows))
    lib.llama_model_free(model)
    return results[0], results[1][-1]


def main(names: list[str]) -> None:
    quiet = lib.llama_log_callback(lambda level, text, data: sys.stderr.write(text.decode()) if level == 4 else None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    path = HERE / "arch_logits.npz"
    stored = dict(np.load(path)) if names and path.exists() else {}
    for name in names or arch_cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model.gguf"
            model.write_bytes(arch_cases.model(name))
            try:
                logits, embedding = evaluate(model, arch_cases.tokens(), arch_cases.N_PROMPT, arch_cases.N_CTX)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
        stored[name] = logits[arch_cases.N_PROMPT - 1 :]
        stored[f"{name}.embedding"] = embedding
    np.savez_compressed(path, **stored)


if __name__ == "__main__":
    main(sys.argv[1:])
