"""llama.cpp in this process, stock or on our planner, and its contexts, for the acts of llama_cpp_load.py.

Owns the contexts that it opens, closed by `with`.  Invariant: all results of a context go into its digest, so that runs
with equal digests had equal bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence

import numpy as np
from hooked.worker import Engine

USUAL = {"n_ctx": 256, "n_batch": 256, "n_ubatch": 32, "n_seq_max": 1, "flash_attn_type": 0, "embeddings": False,
         "kv_unified": True, "n_threads": 1, "n_threads_batch": 1, "no_perf": True}


class Refused(Exception):
    """llama.cpp opened no context, or did not decode; the message is its last log."""


class Client(Engine):
    """llama.cpp with one model.  A job is an Engine's; with `turns` each context has the other level than the last."""

    def __init__(self, job: dict) -> None:
        super().__init__(job)
        self.turns, self.hosts = 0, None
        if job["devices"]:
            self.hosts = ctypes.CDLL(job["libraries"]["devices"])
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.loaded))
        self.width = self.api.llama_model_n_embd(self.loaded)

    @property
    def loaded(self) -> int:
        return self.model(self.job["layers"])

    @property
    def is_hooked(self) -> bool:
        return self.job["mode"] != "stock"

    def refuse_after(self, buffers: int) -> None:
        """Let devices allocate `n` more buffers and then fail; -1: no limit."""
        self.hosts.devices_refuse_after(buffers)

    def adapter(self):
        """The job's adapter, which its caller frees; None: it has none."""
        if not self.job["lora"]:
            return None
        found = self.api.llama_adapter_lora_init(self.loaded, os.fsencode(self.job["lora"]))
        assert found, self.last()
        return found

    def context(self, **asked) -> Context:
        """Open a context with USUAL's arguments, overridden by `asked`; raises Refused if llama.cpp opens none."""
        if self.job["turns"]:
            import ggml_sched.llama_cpp as ours

            self.turns += 1
            ours.install(level=("alloc", "sched")[self.turns % 2])
        self.log.clear()
        params = self.api.llama_context_default_params()
        for name, value in {**USUAL, **asked}.items():
            setattr(params, name, value)
        handle = self.api.llama_init_from_model(self.loaded, params)
        if not handle:
            raise Refused(self.last())
        return Context(self, handle, bool(params.embeddings))


class Context:
    """One context, and a digest of what it computed."""

    def __init__(self, client: Client, handle: int, embeds: bool) -> None:
        self.client, self.api, self.handle, self.embeds = client, client.api, handle, embeds
        self.hash, self.tokens = hashlib.blake2b(digest_size=16), 0
        self.memory = self.api.llama_get_memory(handle)
        self.size = self.api.llama_n_ctx(handle)
        self.shifts = self.api.llama_memory_can_shift(self.memory) and bool(self.size)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        if self.handle:
            self.api.llama_free(self.handle)
            self.handle = None

    @property
    def digest(self) -> str:
        return self.hash.hexdigest()

    def decode(self, tokens: Sequence[int], at: int, sequences: Sequence[int] = (0,), outputs: int = 1) -> np.ndarray:
        """The tokens from a position on in each sequence; rows of the last `outputs` of each, which are digested.

        Rows are logits [vocab], or embeddings [width] of a context that has them.
        """
        count = len(tokens)
        return self.compute([(tokens[i], at + i, sequence, i >= count - outputs) for sequence in sequences
                             for i in range(count)])

    def compute(self, entries: Sequence[tuple[int, int, int, bool]]) -> np.ndarray:
        """Compute a batch of (token, position, sequence, whether its row is an output); raises Refused if llama.cpp
        fails."""
        batch = self.api.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            for i, (token, position, sequence, asked) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, asked
            status = self.api.llama_decode(self.handle, batch)
        finally:
            self.api.llama_batch_free(batch)
        if status:
            raise Refused(f"llama_decode gave {status}: {self.client.last()}")
        self.tokens += len(entries)
        rows = np.stack([self._row(i) for i, entry in enumerate(entries) if entry[3]])
        self.hash.update(rows.tobytes())
        return rows

    def _row(self, index: int) -> np.ndarray:
        if self.embeds:
            found, width = self.api.llama_get_embeddings_ith(self.handle, index), self.client.width
        else:
            found, width = self.api.llama_get_logits_ith(self.handle, index), self.client.vocab
        return np.ctypeslib.as_array(found, (width,)).copy()

    def prompt(self, count: int, seed: int = 0) -> list[int]:
        return [(1 + seed + 7 * i) % self.client.vocab for i in range(count)]

    def generate(self, count: int, *, prompt: int = 11, seed: int = 0, at: int = 0) -> int:
        """A prompt and `count` tokens, each the likeliest; old tokens are shifted out or cleared. Returns the
        position."""
        row = self.decode(self.prompt(prompt, seed), at)[-1]
        at += prompt
        for step in range(count):
            if at >= self.size:
                at = self.shift(at)
            # Now and then another token, so that no sequence goes in circles.
            token = int(row.argmax()) if step % 13 else (seed + step) % self.client.vocab
            row = self.decode([token], at)[-1]
            at += 1
        return at

    def shift(self, at: int, kept: int = 4) -> int:
        """Room for more: half of what is cached leaves, the rest moves down; all of it leaves where nothing moves."""
        if not self.shifts:
            self.api.llama_memory_clear(self.memory, True)
            return 0
        gone = (at - kept) // 2
        if not self.api.llama_memory_seq_rm(self.memory, 0, kept, kept + gone):
            raise Refused("a part of a sequence stays")
        self.api.llama_memory_seq_add(self.memory, 0, kept + gone, -1, -gone)
        return at - gone

    def state(self, sequence: int | None = None) -> bytes:
        """All of its state, or that of a sequence."""
        if sequence is None:
            room = (ctypes.c_uint8 * self.api.llama_state_get_size(self.handle))()
            written = self.api.llama_state_get_data(self.handle, room, len(room))
        else:
            room = (ctypes.c_uint8 * self.api.llama_state_seq_get_size(self.handle, sequence))()
            written = self.api.llama_state_seq_get_data(self.handle, room, len(room), sequence)
        assert written, "no state was written"
        return bytes(room)[:written]

    def restore(self, state: bytes, sequence: int | None = None) -> None:
        """The state, or that of a sequence into a sequence."""
        room = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if sequence is None:
            read = self.api.llama_state_set_data(self.handle, room, len(room))
        else:
            read = self.api.llama_state_seq_set_data(self.handle, room, len(room), sequence)
        assert read, "the state was not taken"

    def lora(self, adapter, scale: float) -> None:
        """An adapter from now on; None: none."""
        kind = self.api.llama_adapter_lora_p_ctypes
        found = (kind * 1)(adapter)
        status = self.api.llama_set_adapters_lora(self.handle, found, 1 if adapter else 0, (ctypes.c_float * 1)(scale))
        assert status == 0, "the adapter does not fit"

    def set_embeddings(self, embeds: bool) -> None:
        self.api.llama_set_embeddings(self.handle, embeds)
        self.embeds = embeds


def resident() -> int:
    """Bytes of memory that the process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
