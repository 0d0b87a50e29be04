"""Random walks over all operations of a context, for llama_cpp_load.py.

Owns nothing.  Invariant: a walk depends only on its seed and on llama.cpp's results, so that two processes with the
same bits take the same steps.
"""

import random

from llama_cpp_contexts import Client, Context, Refused

__all__ = ["wandered"]

STEPS = 25
F32, F16 = 0, 1


def wandered(client: Client, seeds: int, first: int = 0) -> dict:
    """One walk for each seed; a digest of each, and how often llama.cpp refused a step."""
    digests, tokens, refusals = [], 0, 0
    adapter = client.adapter()
    for seed in range(first, first + seeds):
        walk = Walk(client, random.Random(seed), adapter)
        with walk.context:
            for _ in range(STEPS):
                try:
                    walk.step()
                except Refused as error:
                    refusals += 1
                    walk.context.hash.update(str(error).encode())
                    walk.forget()
            digests.append(walk.context.digest)
            tokens += walk.context.tokens
    if adapter:
        client.api.llama_adapter_lora_free(adapter)
    return {"digest": digests, "tokens": tokens, "refusals": refusals}


class Walk:
    """A context, and how long each of its sequences is."""

    def __init__(self, client: Client, rng: random.Random, adapter) -> None:
        self.client, self.api, self.rng, self.adapter = client, client.api, rng, adapter
        self.sequences = rng.choice((1, 1, 2, 4))
        kind, offloaded = rng.choice((F16, F16, F32)), rng.random() < 0.7
        self.ubatch = rng.choice((8, 16, 32, 64))
        self.context: Context = client.context(
            n_ctx=rng.choice((256, 512, 1024)), n_ubatch=self.ubatch, n_batch=256, n_seq_max=self.sequences,
            # "auto" depends on where attention runs, which is another place with our scheduler if caches stay behind.
            flash_attn_type=rng.choice((0, 1, -1) if offloaded else (0, 1)), kv_unified=rng.random() < 0.5,
            type_k=kind, type_v=kind, embeddings=rng.random() < 0.2, offload_kqv=offloaded,
            op_offload=rng.random() < 0.7, swa_full=rng.random() < 0.5, n_threads=rng.choice((1, 2)))
        self.room = self.context.size // self.sequences
        self.lengths = [0] * self.sequences

    def step(self) -> None:
        what = self.rng.choice(("prompt", "prompt", "token", "token", "token", "together", "clear", "copy", "shift",
                                "save", "lora", "embeddings", "causal", "all"))
        getattr(self, what)()

    def one(self) -> int:
        return self.rng.randrange(self.sequences)

    def feed(self, sequence: int, count: int, asked: int = 1) -> None:
        """Tokens by chance behind a sequence, emptied first if it is full."""
        self.make_room(sequence, count)
        tokens = [self.rng.randrange(self.client.vocab) for _ in range(count)]
        self.context.decode(tokens, self.lengths[sequence], (sequence,), count if self.context.embeds else asked)
        self.lengths[sequence] += count

    def make_room(self, sequence: int, count: int) -> None:
        if self.lengths[sequence] + count > self.room:
            self.remove(sequence)

    def remove(self, sequence: int) -> None:
        self.api.llama_memory_seq_rm(self.context.memory, sequence, -1, -1)
        self.lengths[sequence] = 0

    def forget(self) -> None:
        """Start over, after a step that was refused half way."""
        self.api.llama_memory_clear(self.context.memory, True)
        self.lengths = [0] * self.sequences

    def prompt(self) -> None:
        count = self.rng.randrange(1, min(self.room, 200))
        self.feed(self.one(), count, self.rng.randrange(1, count + 1))

    def token(self) -> None:
        sequence = self.one()
        for _ in range(self.rng.randrange(1, 9)):
            self.feed(sequence, 1)

    def together(self) -> None:
        """One batch with a few tokens of each sequence."""
        entries = []
        for sequence in range(self.sequences):
            count = self.rng.randrange(1, 9)
            self.make_room(sequence, count)
            at = self.lengths[sequence]
            entries += [(self.rng.randrange(self.client.vocab), at + i, sequence, True) for i in range(count)]
            self.lengths[sequence] += count
        self.context.compute(entries)

    def clear(self) -> None:
        if self.rng.random() < 0.3:
            self.forget()
        else:
            self.remove(self.one())

    def copy(self) -> None:
        source, target = self.one(), self.one()
        if source != target:
            self.remove(target)
            self.api.llama_memory_seq_cp(self.context.memory, source, target, -1, -1)
            self.lengths[target] = self.lengths[source]

    def shift(self) -> None:
        sequence = self.one()
        gone = self.lengths[sequence] // 2
        if gone and self.context.shifts and self.api.llama_memory_seq_rm(self.context.memory, sequence, 0, gone):
            self.api.llama_memory_seq_add(self.context.memory, sequence, gone, -1, -gone)
            self.lengths[sequence] -= gone

    def save(self) -> None:
        """A sequence's state into another one."""
        source, target = self.one(), self.one()
        if self.lengths[source]:
            state = self.context.state(source)
            self.remove(target)
            self.context.restore(state, target)
            self.lengths[target] = self.api.llama_memory_seq_pos_max(self.context.memory, target) + 1

    def all(self) -> None:
        """Save the whole state, compute something else, and restore it."""
        state, lengths = self.context.state(), list(self.lengths)
        self.feed(self.one(), 3)
        self.context.restore(state)
        self.lengths = lengths

    def lora(self) -> None:
        if self.adapter:
            self.context.lora(self.rng.choice((None, self.adapter)), self.rng.choice((0.5, 2.0)))

    def embeddings(self) -> None:
        self.context.set_embeddings(not self.context.embeds)

    def causal(self) -> None:
        """Without causal attention a batch is computed at once."""
        self.api.llama_set_causal_attn(self.context.handle, False)
        try:
            self.feed(self.one(), self.rng.randrange(1, self.ubatch))
        finally:
            self.api.llama_set_causal_attn(self.context.handle, True)
