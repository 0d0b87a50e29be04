"""Lives of a sequence in llama.cpp: python llama_cpp_lives.py MODEL CONTEXT < lives.  Prints logits as JSON.

A life is a list of steps: "eval" of ids, "shift" by [n_keep, n_discard], "truncate" to [n], "save", "restore".  A state
that llama.cpp writes lacks rows outside the windows, so a second sequence keeps what was saved.
"""

import ctypes
import json
import sys

import llama_cpp as api
import numpy as np

F32 = 0
"""ggml's number of the type."""


class Sequence:
    def __init__(self, model: ctypes.c_void_p, n_ctx: int) -> None:
        params = api.llama_context_default_params()
        # Each sequence has a cache of its own, so that a copy shares no rows.
        params.n_ctx, params.n_seq_max, params.kv_unified, params.swa_full = 2 * n_ctx, 2, False, True
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = F32
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = api.llama_init_from_model(model, params)
        assert self.context
        self.memory, self.n, self.saved = api.llama_get_memory(self.context), 0, 0
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def eval(self, *ids: int) -> list[float]:
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = id, self.n + i, 1, i == len(ids) - 1
            batch.seq_id[i][0] = 0
        done = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        assert done == 0, done
        self.n += len(ids)
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).tolist()

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.truncate(n_keep, n_keep + n_discard)
        api.llama_memory_seq_add(self.memory, 0, n_keep + n_discard, -1, -n_discard)

    def truncate(self, n: int, end: int = -1) -> None:
        assert api.llama_memory_seq_rm(self.memory, 0, n, end)
        self.n = n if end < 0 else self.n - (end - n)

    def save(self) -> None:
        api.llama_memory_seq_rm(self.memory, 1, -1, -1)
        api.llama_memory_seq_cp(self.memory, 0, 1, -1, -1)
        self.saved = self.n

    def restore(self) -> None:
        api.llama_memory_seq_rm(self.memory, 0, -1, -1)
        api.llama_memory_seq_cp(self.memory, 1, 0, -1, -1)
        self.n = self.saved


def main(path: str, n_ctx: str) -> None:
    log = api.llama_log_callback(lambda level, text, user: None)
    api.llama_log_set(log, ctypes.c_void_p())
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    results = []
    for life in json.load(sys.stdin):
        sequence = Sequence(model, int(n_ctx))
        results.append([got for act, numbers in life if (got := getattr(sequence, act)(*numbers)) is not None])
        api.llama_free(sequence.context)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
