"""The blocks that transformer graphs are made of: norm, attention over the KV cache, feed-forward, experts.

Owns the graph of one batch while it is built.  Invariant: whatever is `expand`ed is computed in
that order, as by ggml_build_forward_expand, and a cache is read through the node that wrote it, so
the order also follows from the data.  Nodes are named as llama.cpp names them.
Corresponds to llama.cpp's llm_graph_context.

An architecture (`arch/`) is a list of weights and a function that puts these blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_sched._graph import Context, Graph, Tensor
from ggml_sched.llama.hparams import Hparams
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

__all__ = ["BatchGraph", "Builder"]

MIN_EXPERT_WEIGHT = 6.103515625e-5
"""The sum of the chosen experts' weights is kept above the smallest normal f16."""


@dataclass(frozen=True, slots=True)
class BatchGraph:
    """A graph for n_tokens tokens that attend to n_kv rows: its inputs and its result."""

    graph: Graph
    tokens: Tensor
    positions: Tensor
    k_rows: Tensor
    v_rows: Tensor
    mask: Tensor
    logits: Tensor

    @property
    def n_tokens(self) -> int:
        return self.mask.ne[1]

    @property
    def n_kv(self) -> int:
        return self.mask.ne[0]

    def set_inputs(self, tokens: np.ndarray, n_past: int, n_ctx: int) -> None:
        """Give the inputs, which have addresses by now, the values for `tokens` after n_past others."""
        n, n_kv = self.n_tokens, self.n_kv
        rows = np.arange(n_past, n_past + n)
        self.tokens.set(tokens.astype(np.int32))
        self.positions.set(rows.astype(np.int32))
        self.k_rows.set(rows.astype(np.int64))
        # V is transposed: element j of token i belongs at j * n_ctx + row.
        width = self.v_rows.ne[0] // n
        self.v_rows.set((rows[:, None] + np.arange(width) * n_ctx).astype(np.int64).reshape(-1))
        mask = np.where(np.arange(n_kv) <= rows[:, None], np.float32(0), np.float32(-np.inf))
        self.mask.set(mask)


class Builder:
    """Builds the graph of n_tokens tokens that attend to n_kv rows of the cache."""

    def __init__(self, hparams: Hparams, weights: Weights, cache: KVCache, n_tokens: int, n_kv: int) -> None:
        self.hparams, self.weights, self.cache = hparams, weights, cache
        self.n_tokens, self.n_kv = n_tokens, n_kv
        self.ctx = ctx = Context(f"{hparams.arch} {n_tokens} tokens {n_kv} rows")
        self.order: list[Tensor] = []
        self.tokens = ctx.tensor("i32", n_tokens, "inp_tokens", input=True)
        self.positions = ctx.tensor("i32", n_tokens, "inp_pos", input=True)
        self.k_rows = ctx.tensor("i64", n_tokens, "attn_inp_k_idxs", input=True)
        self.v_rows = ctx.tensor("i64", n_tokens * hparams.n_embd_v, "attn_inp_v_idxs", input=True)
        self.mask = ctx.tensor("f32", (n_kv, n_tokens), "attn_inp_kq_mask", input=True)

    def name(self, t: Tensor, name: str, layer: int | None = None) -> Tensor:
        return self.ctx.set_name(t, name if layer is None else f"{name}-{layer}")

    def expand(self, *tensors: Tensor) -> None:
        """Compute these, in this order, before whatever comes later."""
        self.order.extend(tensors)

    def finish(self, logits: Tensor) -> BatchGraph:
        self.ctx.set_output(logits)
        graph = Graph(*self.order, logits)
        graph.meta = {"model": self.hparams.arch, "n_layer": self.hparams.n_layer, "n_tokens": self.n_tokens,
                      "n_kv": self.n_kv, "n_ctx": self.cache.n_ctx}
        return BatchGraph(graph, self.tokens, self.positions, self.k_rows, self.v_rows, self.mask, logits)

    # -- blocks -------------------------------------------------------------------

    def embed(self) -> Tensor:
        return self.name(self.ctx.get_rows(self.weights["token_embd.weight"], self.tokens), "embd")

    def linear(self, x: Tensor, prefix: str, name: str, layer: int | None = None) -> Tensor:
        """x times `{prefix}.weight`, plus `{prefix}.bias` if the model has it."""
        y = self.name(self.ctx.mul_mat(self.weights[f"{prefix}.weight"], x), name, layer)
        bias = self.weights.get(f"{prefix}.bias")
        return y if bias is None else self.name(self.ctx.add(y, bias), f"{name}_b", layer)

    def rms_norm(self, x: Tensor, weight: str, name: str, layer: int | None = None) -> Tensor:
        x = self.name(self.ctx.rms_norm(x, self.hparams.norm_eps), "norm", layer)
        return self.name(self.ctx.mul(x, self.weights[weight]), name, layer)

    def query_key_value(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Three products of x, split into heads: [n_embd_head, n_head or n_head_kv, n_tokens]."""
        h, heads = self.hparams, []
        for kind, width, n_head in (("q", h.n_embd_head_k, h.n_head), ("k", h.n_embd_head_k, h.n_head_kv),
                                    ("v", h.n_embd_head_v, h.n_head_kv)):
            name = f"{kind.upper()}cur"
            y = self.linear(x, f"blk.{layer}.attn_{kind}", name, layer)
            heads.append(self.name(self.ctx.reshape_3d(y, width, n_head, self.n_tokens), name, layer))
        return tuple(heads)

    def rope(self, x: Tensor, mode: str, name: str, layer: int) -> Tensor:
        r = self.hparams.rope
        factors = self.weights.get("rope_freqs.weight")
        x = self.ctx.rope(x, self.positions, r.n_dims, mode, factors, r.n_ctx_orig, r.freq_base, r.freq_scale,
                          r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow)
        return self.name(x, name, layer)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store k and v, attend with q to all rows so far -> [n_embd_head_v * n_head, n_tokens].

        q[n_embd_head_k, n_head, n_tokens], k[n_embd_head_k, n_head_kv, n_tokens], v alike.
        """
        ctx, h, n_kv = self.ctx, self.hparams, self.n_kv
        self.expand(q, v, k)
        k_all, v_all = self.store(k, v, layer)
        head, row = h.n_embd_head_k * k_all.nb[0], k_all.nb[1]
        k_all = ctx.permute(ctx.view_3d(k_all, h.n_embd_head_k, h.n_head_kv, n_kv, head, row), 0, 2, 1, 3)
        column = self.cache.n_ctx * v_all.nb[0]
        v_all = ctx.view_3d(v_all, n_kv, h.n_embd_head_v, h.n_head_kv, column, column * h.n_embd_head_v)
        kq = self.name(ctx.mul_mat(k_all, ctx.permute(q, 0, 2, 1, 3)), "kq", layer)
        kq = self.name(ctx.soft_max(kq, self.mask, h.attn_scale), "kq_soft_max", layer)
        kqv = self.name(ctx.mul_mat(v_all, kq), "kqv", layer)
        out = ctx.cont(ctx.permute(kqv, 0, 2, 1, 3), (h.n_embd_head_v * h.n_head, self.n_tokens))
        return self.name(out, "kqv_out", layer)

    def store(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The caches with this batch's rows written: [n_embd_k, n_ctx] and [1, n_ctx * n_embd_v]."""
        ctx, h, n = self.ctx, self.hparams, self.n_tokens
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        k_all = ctx.set_rows(k_cache, ctx.reshape_2d(k, h.n_embd_k, n), self.k_rows)
        flat = ctx.reshape_2d(v_cache, 1, v_cache.n_elements)
        v_all = ctx.set_rows(flat, ctx.reshape_2d(v, 1, h.n_embd_v * n), self.v_rows)
        self.expand(k_all, v_all)
        return k_all, v_all

    def feed_forward(self, x: Tensor, layer: int) -> Tensor:
        """What `common.feed_forward` lists the weights of."""
        return self.experts(x, layer) if self.hparams.n_expert else self.swiglu(x, layer)

    def swiglu(self, x: Tensor, layer: int) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        prefix = f"blk.{layer}.ffn_"
        gate = self.linear(x, prefix + "gate", "ffn_gate", layer)
        up = self.linear(x, prefix + "up", "ffn_up", layer)
        x = self.name(self.ctx.swiglu_split(gate, up), "ffn_swiglu", layer)
        return self.linear(x, prefix + "down", "ffn_out", layer)

    def experts(self, x: Tensor, layer: int) -> Tensor:
        """The n_expert_used best experts of each token, weighted by their normalised probabilities."""
        ctx, h, n, used = self.ctx, self.hparams, self.n_tokens, self.hparams.n_expert_used

        def name(t: Tensor, what: str) -> Tensor:
            return self.name(t, f"ffn_moe_{what}", layer)

        def of(what: str) -> Tensor:
            return self.weights[f"blk.{layer}.ffn_{what}.weight"]

        probs = name(ctx.soft_max(name(ctx.mul_mat(of("gate_inp"), x), "logits")), "probs")
        order = name(ctx.argsort(probs, "desc"), "argsort")
        chosen = name(ctx.view_2d(order, used, n, order.nb[1]), "topk")
        weight = name(ctx.get_rows(ctx.reshape_3d(probs, 1, h.n_expert, n), chosen), "weights")
        weight = ctx.reshape_2d(weight, used, n)
        total = name(ctx.sum_rows(weight), "weights_sum")
        total = name(ctx.clamp(total, MIN_EXPERT_WEIGHT, float("inf")), "weights_sum_clamped")
        weight = ctx.reshape_3d(name(ctx.div(weight, total), "weights_norm"), 1, used, n)
        self.expand(weight)
        x = ctx.reshape_3d(x, h.n_embd, 1, n)
        up = name(ctx.mul_mat_id(of("up_exps"), x, chosen), "up")
        gate = name(ctx.mul_mat_id(of("gate_exps"), x, chosen), "gate")
        x = name(ctx.swiglu_split(gate, up), "swiglu")
        x = name(ctx.mul_mat_id(of("down_exps"), x, chosen), "down")
        x = name(ctx.mul(x, weight), "weighted")
        parts = [ctx.view_2d(x, h.n_embd, n, x.nb[2], i * x.nb[1]) for i in range(used)]
        self.expand(*parts)
        out = parts[0] if used > 1 else name(ctx.cont(parts[0]), "out")
        for part in parts[1:]:
            out = name(ctx.add(out, part), "out")
        return out

    def output(self, x: Tensor) -> Tensor:
        """Logits of every token; the embedding stands in for a missing output matrix."""
        tied = self.weights.get("output.weight") is None
        x = self.ctx.mul_mat(self.weights["token_embd.weight" if tied else "output.weight"], x)
        bias = self.weights.get("output.bias")
        return self.name(x if bias is None else self.ctx.add(x, bias), "result_output")
