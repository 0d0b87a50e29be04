"""Trains the small model of the wheel and writes it as a GGUF file.

    pip install torch numpy tokenizers
    python tools/train_small_model.py --minutes 30 --out ggml_sched/llama/data/small.gguf

A llama of a few layers learns the sources of the running Python's standard library, on one core.  It
continues from its checkpoint when it is started again; the checkpoint is removed by hand.  The learning rate
follows the time spent, so that a run of any length ends with a model that has cooled down.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from small_corpus import END, encode, sources, train_tokenizer
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The package of this working tree.

from ggml_sched import Type  # noqa: E402
from ggml_sched.graph import quants  # noqa: E402
from ggml_sched.llama import write_gguf  # noqa: E402

SAVE_SECONDS = 60
WARM_UP = 0.02
COOL_DOWN = 0.5
"""The parts of the time in which the learning rate rises and falls."""
SHORT, LONG_FROM = 256, 0.75
"""Windows are this short until this part of the time: attention over whole contexts costs twice as much."""


@dataclass(frozen=True)
class Sizes:
    n_vocab: int = 2048
    n_ctx: int = 512
    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 3
    n_head_kv: int = 1
    n_ff: int = 384
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def head(self) -> int:
        return self.n_embd // self.n_head


class Block(nn.Module):
    """Attention over shared keys and values, then a swiglu unit: the weights under GGUF's names."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        n_kv = s.n_head_kv * s.head
        self.attn_norm, self.ffn_norm = nn.RMSNorm(s.n_embd, s.eps), nn.RMSNorm(s.n_embd, s.eps)
        self.attn_q, self.attn_output = matrix(s.n_embd, s.n_embd), matrix(s.n_embd, s.n_embd, zero=True)
        self.attn_k, self.attn_v = matrix(s.n_embd, n_kv), matrix(s.n_embd, n_kv)
        self.ffn_gate, self.ffn_up = matrix(s.n_embd, s.n_ff), matrix(s.n_embd, s.n_ff)
        self.ffn_down = matrix(s.n_ff, s.n_embd, zero=True)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        s, (batch, length, _) = self.sizes, x.shape
        h = self.attn_norm(x)
        q = turn(self.attn_q(h).view(batch, length, s.n_head, s.head), turns)
        k = turn(self.attn_k(h).view(batch, length, s.n_head_kv, s.head), turns)
        v = self.attn_v(h).view(batch, length, s.n_head_kv, s.head)
        shared = s.n_head // s.n_head_kv
        # The heads that share keys are rows of one product.  Written out because PyTorch's fused attention
        # takes three times as long on a CPU at these sizes.
        q = q.permute(0, 2, 1, 3).reshape(batch, s.n_head_kv, shared * length, s.head)
        scores = (q @ k.permute(0, 2, 3, 1)).float() * s.head**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(shared, 1)
        weights = scores.masked_fill(future, -1e9).softmax(-1).to(v.dtype)
        h = (weights @ v.transpose(1, 2)).view(batch, s.n_head, length, s.head)
        x = x + self.attn_output(h.transpose(1, 2).reshape(batch, length, s.n_embd))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.token_embd = nn.Embedding(s.n_vocab, s.n_embd)
        nn.init.normal_(self.token_embd.weight, std=0.05)
        self.blk = nn.ModuleList(Block(s) for _ in range(s.n_layer))
        self.output_norm = nn.RMSNorm(s.n_embd, s.eps)
        speeds = s.rope_base ** (-torch.arange(0, s.head, 2, dtype=torch.float64) / s.head)
        angles = torch.outer(torch.arange(s.n_ctx, dtype=torch.float64), speeds)
        self.register_buffer("turns", torch.stack((angles.cos(), angles.sin())).float(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embd(ids)
        for block in self.blk:
            x = block(x, self.turns[:, : ids.shape[1]])
        return F.linear(self.output_norm(x), self.token_embd.weight)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean nats a token over windows [n, length + 1]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def matrix(n_in: int, n_out: int, *, zero: bool = False) -> nn.Linear:
    linear = nn.Linear(n_in, n_out, bias=False)
    nn.init.zeros_(linear.weight) if zero else nn.init.normal_(linear.weight, std=n_in**-0.5)
    return linear


def turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rope on pairs side by side, as llama's GGUF files have it: no permutation when they are written."""
    cos, sin = turns[0, :, None], turns[1, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class Training:
    """A model, its optimisers and how far they are; saved to and continued from one file."""

    def __init__(self, sizes: Sizes, rate: float, seed: int, checkpoint: Path) -> None:
        torch.manual_seed(seed)
        self.model, self.checkpoint, self.seed = Llama(sizes), checkpoint, seed
        matrices = [p for p in self.model.blk.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim < 2] + [self.model.token_embd.weight]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        self.seconds, self.step = 0.0, 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            if state["sizes"] != asdict(sizes) or state["seed"] != seed:
                sys.exit(f"{checkpoint} is of another model; remove it or name another one")
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.seconds, self.step = state["seconds"], state["step"]

    def save(self) -> None:
        state = {"sizes": asdict(self.model.sizes), "seed": self.seed, "seconds": self.seconds, "step": self.step,
                 "model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        torch.save(state, part := self.checkpoint.with_suffix(".part"))
        os.replace(part, self.checkpoint)

    def run(self, ids: np.ndarray, seconds: float, batch: int) -> None:
        loss = torch.compile(self.model.loss, dynamic=False)
        lengths, smooth = set(), 0.0
        at, saved = time.perf_counter(), self.seconds
        while self.seconds < seconds:
            random = np.random.default_rng((self.seed, self.step))
            length = SHORT if self.seconds < LONG_FROM * seconds else self.model.sizes.n_ctx
            starts = random.integers(0, len(ids) - length, batch // length)
            windows = torch.from_numpy(np.stack([ids[i : i + length + 1] for i in starts]).astype(np.int64))
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * schedule(self.seconds / seconds)
            now = loss(windows)
            now.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.step += 1
            smooth = now.item() if not smooth else 0.95 * smooth + 0.05 * now.item()
            at, spent = time.perf_counter(), time.perf_counter() - at
            # Compiling is no training.
            self.seconds += spent if length in lengths else 0.0
            lengths.add(length)
            if self.step % 100 == 0:
                print(f"{self.seconds:6.0f} s  step {self.step:5}  loss {smooth:.3f}  {spent * 1e3:.0f} ms", flush=True)
            if self.seconds - saved > SAVE_SECONDS:
                self.save()
                saved = self.seconds
        self.save()
        print(f"{self.step} steps, {self.step * batch:,} tokens")


def schedule(progress: float) -> float:
    """The learning rate at a part of the time: up, level, down to nothing."""
    return min(progress / WARM_UP + 0.01, 1.0, max((1 - progress) / COOL_DOWN, 0.0))


@torch.no_grad()
def bits(model: Llama, ids: np.ndarray) -> float:
    """Bits that all of `ids` but the first cost, in windows that know nothing of each other."""
    total, length = 0.0, model.sizes.n_ctx
    for start in range(0, len(ids) - 1, length):
        window = torch.from_numpy(ids[start : start + length + 1].astype(np.int64))[None]
        total += F.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="sum").item()
    return total / math.log(2)


def quantized(values: np.ndarray, kind: Type) -> tuple:
    return kind, values.shape[::-1], quants.quantize(values, kind)


def write(model: Llama, tokenizer, path: Path) -> None:
    s, parts = model.sizes, json.loads(tokenizer.to_str())["model"]
    tensors = {name: quantized(p, Type.Q8_0) if p.ndim == 2 else p
               for name, p in ((name, p.numpy()) for name, p in model.state_dict().items())}
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)
    version = platform.python_version()
    end = tokens.index(END)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "ggml-sched small",
        "general.description": f"Continues Python. Trained by tools/train_small_model.py on the sources of Python "
                               f"{version}'s standard library, which are under the PSF license, version 2.",
        "general.license": "mit",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "llama.vocab_size": s.n_vocab,
        "llama.context_length": s.n_ctx,
        "llama.embedding_length": s.n_embd,
        "llama.block_count": s.n_layer,
        "llama.feed_forward_length": s.n_ff,
        "llama.attention.head_count": s.n_head,
        "llama.attention.head_count_kv": s.n_head_kv,
        "llama.attention.layer_norm_rms_epsilon": s.eps,
        "llama.rope.dimension_count": s.head,
        "llama.rope.freq_base": s.rope_base,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token == END else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in parts["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small model of the wheel.")
    parser.add_argument("--minutes", type=float, default=30.0, help="of training, those of earlier runs included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("ggml_sched/llama/data/small.gguf"))
    parser.add_argument("--checkpoint", type=Path, help="default: beside --out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4096, help="tokens a step")
    parser.add_argument("--rate", type=float, default=5e-3, help="the highest learning rate")
    for name, default in asdict(Sizes()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})

    learned, held_out = sources()
    tokenizer = train_tokenizer((text for _, text in learned), sizes.n_vocab)
    ids, held_out_ids = encode(tokenizer, learned), encode(tokenizer, held_out)
    n_bytes = [sum(len(text.encode()) for _, text in files) for files in (learned, held_out)]
    print(f"{len(learned)} files, {n_bytes[0]:,} bytes, {len(ids):,} tokens; "
          f"held out: {len(held_out)} files, {n_bytes[1]:,} bytes, {len(held_out_ids):,} tokens")

    args.out.parent.mkdir(parents=True, exist_ok=True)
    training = Training(sizes, args.rate, args.seed, args.checkpoint or args.out.with_suffix(".checkpoint"))
    print(f"{sum(p.numel() for p in training.model.parameters()):,} parameters", flush=True)
    training.run(ids, args.minutes * 60, args.batch)
    write(training.model, tokenizer, args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes, "
          f"{bits(training.model, held_out_ids) / n_bytes[1]:.3f} bits a byte held out")


if __name__ == "__main__":
    main()
