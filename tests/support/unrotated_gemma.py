"""Gemma 2 and 3 in plain NumPy, on keys that are never rotated in place: a second implementation of shifted sequences.

A token keeps, for each layer, its key before rope and its value.  Attention rotates the keys that it reads by their
positions of that moment, so a context shift changes numbers of tokens alone.  Float64, one token at a time, no cache.
Formulas: "Gemma 2" (2024), "Gemma 3 Technical Report" (2025), "RoFormer" (2021); names of weights are GGUF's.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from ggml_sched.llama import open_gguf


@dataclass(frozen=True)
class Token:
    position: int
    keys: tuple[np.ndarray, ...]
    """A layer each: [heads of K, width], not rotated."""
    values: tuple[np.ndarray, ...]


class Gemma:
    """The model of a file, and one sequence: `tokens`."""

    def __init__(self, data: bytes) -> None:
        with open_gguf(data) as file:
            meta = file.metadata
            self.w = {t.name: file.data(t).view(np.float32).reshape(t.ne[::-1]).astype(np.float64)
                      for t in file.tensors.values()}
        arch = self.arch = meta["general.architecture"]
        self.n_layer, self.n_head = meta[f"{arch}.block_count"], meta[f"{arch}.attention.head_count"]
        self.n_head_kv, self.width = meta[f"{arch}.attention.head_count_kv"], meta[f"{arch}.attention.key_length"]
        self.eps = meta[f"{arch}.attention.layer_norm_rms_epsilon"]
        self.window, period = meta[f"{arch}.attention.sliding_window"], {"gemma2": 2, "gemma3": 6}[arch]
        base = meta.get(f"{arch}.rope.freq_base", 10000.0)
        self.layers = [(self.window, 10000.0) if i % period < period - 1 else (1 << 30, base)
                       for i in range(self.n_layer)]
        """(attention window in tokens, base of rope's frequencies) of each layer"""
        self.cap, self.final_cap = (meta.get(f"{arch}.{name}_logit_softcapping", 0.0) for name in ("attn", "final"))
        self.tokens: list[Token] = []

    def eval(self, ids: list[int]) -> np.ndarray:
        """The logits after the last of these tokens."""
        for id in ids:
            x = self.w["token_embd.weight"][id] * math.sqrt(self.w["token_embd.weight"].shape[1])
            self.tokens.append(Token(len(self.tokens), (), ()))
            for i in range(self.n_layer):
                x = self.layer(i, x)
        return capped(self.w["token_embd.weight"] @ self.norm(x, "output_norm"), self.final_cap)

    def layer(self, i: int, x: np.ndarray) -> np.ndarray:
        h = self.norm(x, f"blk.{i}.attn_norm")
        q, k, v = ((self.w[f"blk.{i}.attn_{name}.weight"] @ h).reshape(-1, self.width) for name in "qkv")
        if self.arch == "gemma3":
            q, k = self.norm(q, f"blk.{i}.attn_q_norm"), self.norm(k, f"blk.{i}.attn_k_norm")
        token = self.tokens[-1]
        self.tokens[-1] = replace(token, keys=(*token.keys, k), values=(*token.values, v))
        h = self.w[f"blk.{i}.attn_output.weight"] @ self.attention(i, q).reshape(-1)
        x = x + self.norm(h, f"blk.{i}.post_attention_norm")
        h = self.norm(x, f"blk.{i}.ffn_norm")
        h = gelu(self.w[f"blk.{i}.ffn_gate.weight"] @ h) * (self.w[f"blk.{i}.ffn_up.weight"] @ h)
        return x + self.norm(self.w[f"blk.{i}.ffn_down.weight"] @ h, f"blk.{i}.post_ffw_norm")

    def attention(self, i: int, q: np.ndarray) -> np.ndarray:
        """What the last token reads of all that layer i lets it see: [heads, width]."""
        window, base = self.layers[i]
        at = self.tokens[-1].position
        seen = [token for token in self.tokens if at - window < token.position <= at]
        groups = self.n_head // self.n_head_kv
        positions = np.array([t.position for t in seen])[:, None, None]
        keys = np.repeat(rotated(np.stack([t.keys[i] for t in seen]), positions, base), groups, 1)
        values = np.repeat(np.stack([t.values[i] for t in seen]), groups, 1)
        scores = np.einsum("hd,thd->ht", rotated(q, at, base), keys) / math.sqrt(self.width)
        weights = np.exp(capped(scores, self.cap))
        return np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w[f"{name}.weight"]

    def shift(self, n_keep: int, n_discard: int) -> None:
        self.tokens = [replace(token, position=n)
                       for n, token in enumerate(self.tokens[:n_keep] + self.tokens[n_keep + n_discard :])]

    def truncate(self, n: int) -> None:
        del self.tokens[n:]


def rotated(x: np.ndarray, positions: int | np.ndarray, base: float) -> np.ndarray:
    """Rope on pairs of elements of the two halves of a head."""
    half = x.shape[-1] // 2
    angles = positions * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)


def gelu(x: np.ndarray) -> np.ndarray:
    """By its tanh formula; argument and value are rounded to f16, as ggml's table of gelu is."""
    x = x.astype(np.float16).astype(np.float64)
    return (x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).astype(np.float16).astype(np.float64)


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x
