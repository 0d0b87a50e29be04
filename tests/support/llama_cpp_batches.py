"""Random batches through llama.cpp under the hook: counts how many of their graphs needed a new plan.

A process of its own, which `check_batches` starts: python llama_cpp_batches.py LEVEL MODEL BATCHES SEQUENCES CACHE.
Prints as JSON served() after batches of each kind, small ones and ones of half of the sequences; served() of the random
batches alone; and how many of these the cache had no room for.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROWS, CONTEXT = 64, 48
"""The largest batch in tokens, and the length at which a sequence is cleared and restarted."""


class Client:
    def __init__(self, path: str, n_seq: int, unified: bool) -> None:
        import llama_cpp

        self.api, self.n_seq, self.rng = llama_cpp, n_seq, random.Random(7)
        self.log = llama_cpp.llama_log_callback(lambda level, text, user: None)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        params_of_model = llama_cpp.llama_model_default_params()
        # Where layers stay on the CPU, norms of fewer than 32 rows are assigned to a backend, those of more are not.
        params_of_model.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params_of_model)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 64 * max(n_seq, 4), ROWS, ROWS
        params.n_seq_max, params.n_threads, params.n_threads_batch, params.kv_unified = n_seq, 1, 1, unified
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context
        self.n_embd = llama_cpp.llama_model_n_embd(self.model)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.position = [0] * n_seq
        self.refused = 0

    def decode(self, embeddings: bool, rows: int, n_outputs: int, n_seq: int) -> None:
        batch = self.api.llama_batch_init(rows, self.n_embd if embeddings else 0, self.n_seq)
        batch.n_tokens = rows
        chosen = sorted(self.rng.sample(range(self.n_seq), n_seq))
        of = [chosen[i * n_seq // rows] for i in range(rows)]
        if embeddings and rows == ROWS or any(self.position[s] + of.count(s) > CONTEXT for s in set(of)):
            self.api.llama_memory_clear(self.memory, False)
            self.position = [0] * self.n_seq
        outputs = set(self.rng.sample(range(rows), n_outputs))
        for i, s in enumerate(of):
            if embeddings:
                for k in range(self.n_embd):
                    batch.embd[i * self.n_embd + k] = self.rng.uniform(-1, 1)
            else:
                batch.token[i] = self.rng.randrange(64)
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = self.position[s], 1, i in outputs
            batch.seq_id[i][0] = s
            self.position[s] += 1
        done = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        assert done in (0, 1), done    # 1: no room for a batch in the cache, and no graph
        self.refused += done

    def random_batch(self) -> None:
        rows = self.rng.randint(1, ROWS)
        self.decode(self.rng.random() < 0.5, rows, self.rng.randint(1, rows),
                    self.rng.randint(1, min(self.n_seq, rows)))


def check_batches(level: str, path: Path, batches: int, n_seq: int, cache: str) -> None:
    """Random batches make no plan, grow no buffer and wait for no device; `cache` is "unified", or one per sequence.

    Every batch has to arrive here: llama.cpp would compute a batch like the one before with that one's graph.
    """
    done = subprocess.run([sys.executable, __file__, level, str(path), str(batches), str(n_seq), cache], text=True,
                          capture_output=True, check=False,
                          env=os.environ | {"GGML_SCHED": "off", "OMP_WAIT_POLICY": "passive",
                                            "LLAMA_GRAPH_REUSE_DISABLE": "1"})
    assert done.returncode == 0, done.stderr
    _first, served, refused = json.loads(done.stdout)
    assert served["planned"] == served["grown"] == served["synchronised"] == served["failed"] == 0, served
    assert served["same"] + served["equal"] + served["replayed"] + refused >= batches > 100 * refused, served


def main(level: str, path: str, batches: str, n_seq: str, unified: str) -> None:
    import ggml_sched.llama_cpp as hooked

    hooked.install(level=level)
    client = Client(path, int(n_seq), unified == "unified")
    for embeddings in (False, True):
        for rows in (7, 1):
            client.decode(embeddings, rows, 1, 1)
            client.decode(embeddings, rows, 1, min(rows, int(n_seq)))
        # Some of all sequences: recurrent models move the states of the others, too.
        for _ in range(6):
            client.decode(embeddings, ROWS, 1, max(1, int(n_seq) // 2))
    first = hooked.served()
    hooked.clear_counters()
    client.refused = 0
    for _ in range(int(batches)):
        client.random_batch()
    print(json.dumps([first, hooked.served(), client.refused]))
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
