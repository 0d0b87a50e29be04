"""A process in which llama.cpp opens one model in several ways, stock or on our planner: one line of JSON for each.

    python worker.py JOB

JOB is a file of JSON: `mode` ("stock", "off", "alloc", "sched"), `model`, `libraries` (of build.py), `ways` (see `Way`)
and `what`: "sizes", "memory", "tokens" or "batches".  Hook and number of devices are fixed for a process: all ways of a
job share them.  A way that llama.cpp refuses gives a line with `failed`, llama.cpp's last log.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import sys
from pathlib import Path

REPEATS = 3
DECODES = 32
"""Openings of a context, and decodes of a prompt and of a token in each, of which none is left half done: what
allocates has run when the graph's first node says that it is enough."""
SIZE = re.compile(r"~llama_context: +(\S+) compute buffer size (?:is|of) +([\d.]+) MiB, (?:matches|does not match) "
                  r"expectation of +([\d.]+) MiB")
GRAPH = re.compile(r"graph.*: nodes = ([\d/ ]+), splits = ([\d/ ]+),")
COPIES = re.compile(r"sched copies = (\d+)")


TOKEN = 0.0
MEMORY_STAGES = ([TOKEN] * 4, [0.625] + [TOKEN] * 32, [0.2, 0.06, 0.5, 0.9, 0.125, 1.0] + [TOKEN] * 8)
"""Lengths in batches of the prompts that are computed before memory is measured."""


def anonymous() -> int:
    """Bytes of the process's resident anonymous memory, without pages of files and libraries."""
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


class Way(dict):
    """n_ctx, n_batch, flash (0 or 1), n_seq; most outputs of a batch (0: all); layers on devices; with embeddings?"""

    def __getattr__(self, name: str):
        return self[name]


class Counters:
    """Calls and seconds by function, from the counting library in front of ggml or from the hook."""

    def __init__(self, read, clear) -> None:
        self.read, self.clear = read, clear

    @staticmethod
    def in_front(path: str, base: str) -> Counters:
        library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        if library.counters_open(os.fsencode(base)):
            raise SystemExit(f"{base} cannot be loaded")
        library.counters_read.restype = ctypes.c_char_p

        def read() -> dict:
            found, calls, spent = {}, ctypes.c_int64(), ctypes.c_int64()
            while name := library.counters_read(len(found), ctypes.byref(calls), ctypes.byref(spent)):
                found[name.decode()] = (calls.value, spent.value)
            return found

        return Counters(read, library.counters_clear)


class RandomBatches:
    """Batches for one context: ids or embeddings, rows, sequences and outputs by chance, the same in each process."""

    def __init__(self, api, ctx, n_vocab: int, n_embd: int, way: Way) -> None:
        self.api, self.ctx, self.way, self.n_vocab, self.n_embd = api, ctx, way, n_vocab, n_embd
        self.random = random.Random(7)
        self.batches = [api.llama_batch_init(way.n_batch, 0, 1), api.llama_batch_init(way.n_batch, n_embd, 1)]
        self.at = [0] * way.n_seq
        for i in range(way.n_batch * n_embd):
            self.batches[1].embd[i] = i % 7 / 7

    def decode_any(self) -> None:
        rows = self.random.randint(1, self.way.n_batch)
        sequences = self.random.randint(1, min(rows, self.way.n_seq))
        self.decode(self.random.random() < 0.5, rows, sequences, self.random.randint(1, rows))

    def decode(self, embedded: bool, rows: int, sequences: int, outputs: int) -> None:
        """`rows` rows spread over `sequences` sequences, logits of the last `outputs`; full caches are emptied."""
        if max(self.at) + rows > self.way.n_ctx // self.way.n_seq:
            self.api.llama_memory_clear(self.api.llama_get_memory(self.ctx), False)
            self.at = [0] * self.way.n_seq
        chosen = self.random.sample(range(self.way.n_seq), sequences)
        batch = self.batches[embedded]
        batch.n_tokens = rows
        for i, sequence in enumerate(sorted(chosen[k % sequences] for k in range(rows))):
            if not embedded:
                batch.token[i] = self.random.randrange(self.n_vocab)
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = self.at[sequence], 1, sequence
            batch.logits[i] = i >= rows - outputs
            self.at[sequence] += 1
        if self.api.llama_decode(self.ctx, batch):
            raise SystemExit(f"a batch of {rows} rows in {sequences} sequences was refused")


class Engine:
    """llama.cpp in this process with one model."""

    def __init__(self, job: dict) -> None:
        self.job, self.log = job, []
        self.counters = self._hook()
        import llama_cpp as api

        self.api = api
        self.callback = api.llama_log_callback(lambda level, text, data: self.log.append(text.decode(errors="replace")))
        api.llama_log_set(self.callback, None)
        api.llama_backend_init()
        self.devices = self._devices()
        self.enough = api.ggml_abort_callback(lambda data: True)
        self.models: dict[int, int] = {}

    def _hook(self) -> Counters:
        if self.job["mode"] == "stock":
            return Counters.in_front(self.job["libraries"]["counters"], self.folder() + "/libggml-base.so.0")
        import ggml_sched.llama_cpp as ours

        if self.job["mode"] != "off":
            ours.install(level=self.job["mode"])
        return Counters(ours.counters, ours.clear_counters)

    @staticmethod
    def folder() -> str:
        """Where llama.cpp's libraries are; found without importing it, which loads them."""
        from importlib.util import find_spec

        found = find_spec("llama_cpp")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("needs llama-cpp-python: pip install '.[peer]'")
        return found.submodule_search_locations[0] + "/lib"

    def _devices(self):
        count = self.job["devices"]
        handles = (ctypes.c_void_p * (count + 1))()
        if count:
            ggml = ctypes.CDLL(self.folder() + "/libggml.so.0")
            ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
            cpu = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(0)))
            hosts = ctypes.CDLL(self.job["libraries"]["devices"])
            if hosts.devices_open(os.fsencode(self.folder() + "/libggml-base.so.0"), cpu, count,
                                  int(self.job["what"] in ("sizes", "memory")), int(self.job["pipeline"]), handles):
                raise SystemExit("ggml lacks what devices need")
        return handles

    def model(self, layers: int):
        """The model with so many layers on devices."""
        if layers not in self.models:
            params = self.api.llama_model_default_params()
            params.use_extra_bufts = False          # repacking reads the weights
            params.n_gpu_layers = layers
            params.devices = ctypes.cast(self.devices, ctypes.c_void_p)
            model = self.api.llama_model_load_from_file(os.fsencode(self.job["model"]), params)
            if not model:
                raise SystemExit(f"{self.job['model']}: {self.last()}")
            self.models[layers] = model
        return self.models[layers]

    def last(self) -> str:
        return next((line.strip() for line in reversed(self.log) if line.strip()), "")

    def open(self, way: Way):
        """A context, or None where llama.cpp refuses."""
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = way.n_ctx, way.n_batch, way.n_batch
        params.n_seq_max, params.flash_attn_type, params.embeddings = way.n_seq, way.flash, way.embeddings
        params.n_outputs_max = way.outputs
        params.n_threads = params.n_threads_batch = 1
        params.no_perf = True
        if self.job["what"] == "sizes":
            params.abort_callback = self.enough
        return self.api.llama_init_from_model(self.model(way.layers), params)

    def decode(self, ctx, tokens: list[int], n_seq: int = 1, at: int = 0, outputs: int = 0) -> int:
        """Decode the same tokens from a position on in each sequence, with logits of the last `outputs`; 0: of all."""
        batch = self.api.llama_batch_init(len(tokens) * n_seq, 0, 1)
        batch.n_tokens = len(tokens) * n_seq
        for i in range(batch.n_tokens):
            batch.token[i], batch.pos[i] = tokens[i % len(tokens)], at + i % len(tokens)
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                1, i // len(tokens), not outputs or i >= batch.n_tokens - outputs)
        status = self.api.llama_decode(ctx, batch)
        self.api.llama_batch_free(batch)
        return status

    def sizes(self, way: Way) -> dict:
        """Reserved bytes, and the time inside the functions."""
        self.model(way.layers)
        reserving, allocating = {}, {}
        for _ in range(REPEATS):
            self.log.clear()
            self.counters.clear()
            ctx = self.open(way)
            if not ctx:
                return {"failed": self.last()}
            gather(reserving, self.counters.read())
            self.counters.clear()
            for _ in range(DECODES):
                for tokens in (list(range(1, min(way.n_batch, way.n_ctx // way.n_seq) + 1)), [1]):
                    self.api.llama_memory_clear(self.api.llama_get_memory(ctx), False)
                    self.decode(ctx, tokens, outputs=way.outputs)
            gather(allocating, self.counters.read())
            self.api.llama_free(ctx)
        text = "".join(self.log)
        graph, copies = GRAPH.search(text), COPIES.search(text)
        return {"buffers": [[name, float(reserved), float(end)] for name, end, reserved in SIZE.findall(text)],
                "nodes": graph and graph[1].strip(), "splits": graph and graph[2].strip(),
                "copies": copies and int(copies[1]), "reserving": reserving, "allocating": allocating}

    def memory(self, way: Way) -> dict:
        """Anonymous bytes of the process, once a context has computed a token, a prompt and tokens, other prompts."""
        self.log.clear()
        ctx = self.open(way)
        if not ctx:
            return {"failed": self.last()}
        most, found, at = min(way.n_batch, way.n_ctx // way.n_seq), [], 0
        for lengths in MEMORY_STAGES:
            for length in lengths:
                n = max(1, round(length * most))
                if at + n > way.n_ctx // way.n_seq:
                    self.api.llama_memory_clear(self.api.llama_get_memory(ctx), False)
                    at = 0
                if self.decode(ctx, [1 + i % 100 for i in range(n)], at=at, outputs=1):
                    return {"failed": self.last()}
                at += n
            found.append(anonymous())
        self.api.llama_free(ctx)
        return {"anonymous": found}

    def batches(self, way: Way) -> dict:
        """Random batches, after the largest batch of each kind: counts of new plans, new buffers, and waits for all
        devices."""
        ctx = self.open(way)
        if not ctx:
            return {"failed": self.last()}
        model = self.model(way.layers)
        drawn = RandomBatches(self.api, ctx, self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(model)),
                              self.api.llama_model_n_embd(model), way)
        for embedded in (False, True):
            for sequences in (1, way.n_seq // 2, way.n_seq):
                for rows in (way.n_batch, 1):
                    for outputs in (rows, 1):
                        drawn.decode(embedded, rows, min(rows, sequences), outputs)
        before = self.allocated()
        for _ in range(way.count):
            drawn.decode_any()
        after = self.allocated()
        self.api.llama_free(ctx)
        return {"count": way.count} | {what: after[what] - before[what] for what in after}

    def allocated(self) -> dict:
        """Numbers so far of plans made, buffers allocated, and waits for all devices.

        ggml's allocator plans again whenever it does not take a graph as it is: by itself where it has one buffer, and
        otherwise when the scheduler has waited for all devices.
        """
        if self.job["mode"] == "stock":
            calls = {name: calls for name, (calls, _) in self.counters.read().items()}
            waited = calls["ggml_gallocr_reserve_n"]
            return {"planned": calls["ggml_gallocr_reserve"] + waited, "grown": calls["ggml_backend_buft_alloc_buffer"],
                    "waited": waited}
        import ggml_sched.llama_cpp as ours

        served = ours.served()
        return {"planned": served["planned"], "grown": served["grown"], "waited": served["synchronised"]}

    def tokens(self, way: Way) -> dict:
        """Logits of a prompt in each sequence and of tokens behind it, as a file."""
        import numpy as np

        self.log.clear()
        ctx = self.open(way)
        if not ctx:
            return {"failed": self.last()}
        vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model(way.layers)))
        prompt, rows = [1 + 7 * i % (vocab - 1) for i in range(way.n_batch // way.n_seq)], []
        at = 0
        for tokens in (prompt, *([1 + 11 * i % (vocab - 1)] for i in range(6)), prompt[:5]):
            if self.decode(ctx, tokens, way.n_seq, at):
                return {"failed": self.last()}
            at += len(tokens)
            rows += [np.ctypeslib.as_array(self.api.llama_get_logits_ith(ctx, i), (vocab,)).copy()
                     for i in range(len(tokens) * way.n_seq)]
        self.api.llama_free(ctx)
        np.save(way.file, np.stack(rows))
        return {"rows": len(rows)}


def gather(into: dict, counted: dict) -> None:
    """For each function that was called: its calls, and their nanoseconds, of each repeat."""
    for name, (calls, spent) in counted.items():
        if calls:
            into.setdefault(name, []).append([calls, spent])


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(job)
    for way in job["ways"]:
        print(json.dumps(getattr(engine, job["what"])(Way(way))), flush=True)


if __name__ == "__main__":
    main()
