"""Builds graphs of language models from blocks of nodes: norms, attention over the KV cache, feed-forward units.

Owns the graph of one batch while it is built.  Invariant: nodes are computed in the order of the `expand` calls, as by
ggml_build_forward_expand; attention reads a cache through the node that writes the batch's rows to it, so that the
write comes first even in another order of the nodes.  Nodes have llama.cpp's names.
Corresponds to llama.cpp's llm_graph_context.

An architecture (`arch/`) is a list of weights and a function that puts these blocks together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggml_sched._graph import Context, Graph, Tensor
from ggml_sched.llama.batch import Batch
from ggml_sched.llama.batchgraph import BatchGraph, Inputs, Shape
from ggml_sched.llama.hparams import Hparams, Layer, Rope
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.weights import Weights

if TYPE_CHECKING:
    from ggml_sched.llama.arch import Architecture

__all__ = ["Batch", "BatchGraph", "Builder", "Shape", "build_graph"]


def build_graph(arch: Architecture, hparams: Hparams, weights: Weights, cache: KVCache, shape: Shape,
                flash: bool) -> BatchGraph:
    """The graph of a shape, built by an architecture of `arch/`; ValueError unless `flash` equals `cache.flash`."""
    if flash != cache.flash:
        raise ValueError(f"flash = {flash} for a KV cache that was made with flash = {cache.flash}")
    builder = Builder(hparams, weights, cache, shape)
    return builder.finish(arch.build(builder))


class Builder:
    """Builds the graph of a shape.  An architecture's `build(builder)` calls the builder's methods, and returns the
    hidden state of the output tokens after the last layer, which `finish` takes."""

    def __init__(self, hparams: Hparams, weights: Weights, cache: KVCache, shape: Shape) -> None:
        self.hparams = hparams
        self.weights = weights
        self.cache = cache
        self.shape = shape
        self.n_tokens: int = shape.n_tokens
        self.n_kv: int = shape.n_kv
        self.flash: bool = cache.flash
        self.ctx: Context = Context(f"{hparams.arch} {shape.n_tokens} tokens {shape.n_kv} rows")
        self.order: list[Tensor] = []
        self.done: bool = False
        """Whether `expand` ignores further nodes: True once a graph without outputs has the nodes that store the last
        layer's keys and values."""
        self.inputs: Inputs = Inputs(self.ctx.tensor("i32", shape.n_tokens, "inp_tokens", input=True))
        if 0 < shape.n_outputs < shape.n_tokens:    # the last layer selects the rows of the outputs
            self.inputs.outputs = self.ctx.tensor("i32", shape.n_outputs, "inp_out_ids", input=True)

    # -- names, inputs and outputs --------------------------------------------------

    def name(self, t: Tensor, name: str, layer: int | None = None) -> Tensor:
        return self.ctx.set_name(t, name if layer is None else f"{name}-{layer}")

    def expand(self, *tensors: Tensor) -> None:
        """Add these tensors and their sources to the graph, in this order, before nodes that are added later."""
        if not self.done:
            self.order.extend(tensors)

    def positions(self) -> Tensor:
        """The input with the positions of the tokens, i32 [n_tokens]; made on the first call."""
        inputs = self.inputs
        if inputs.positions is None:
            inputs.positions = self.ctx.tensor("i32", self.n_tokens, "inp_pos", input=True)
        return inputs.positions

    def mask(self, window: int) -> Tensor:
        """The mask input that all layers with this window (0: none) share: f16 for flash attention, else f32."""
        masks = self.inputs.masks
        if window not in masks:
            name = f"attn_inp_kq_mask{'_swa' if window else ''}"
            kind = "f16" if self.flash else "f32"
            masks[window] = self.ctx.tensor(kind, (self.n_kv, self.n_tokens), name, input=True)
        return masks[window]

    def state_row(self) -> Tensor:
        """The input with the row of the sequence's recurrent state, i32 [1]; made on the first call."""
        inputs = self.inputs
        if inputs.state_row is None:
            inputs.state_row = self.ctx.tensor("i32", 1, "rs_s_copy", input=True)
        return inputs.state_row

    def wanted(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`; in the last layer only their rows for the output tokens, as no later node needs the other rows."""
        outputs = self.inputs.outputs
        if outputs is None or layer != self.hparams.n_layer - 1:
            return tensors
        return tuple(self.ctx.get_rows(t, outputs) for t in tensors)

    def finish(self, x: Tensor) -> BatchGraph:
        """The finished graph: adds the last norm of x, then the logits unless the shape has embeddings as outputs."""
        h, shape = self.hparams, self.shape
        output = None
        if shape.n_outputs:
            output = self.norm(x, "output_norm", "result_norm")
            if not shape.embeddings:
                output = self.logits(output)
            self.order.append(self.ctx.set_output(output))
        graph = Graph(*self.order)
        graph.meta = {"model": h.arch, "n_layer": h.n_layer, "n_tokens": shape.n_tokens, "n_kv": shape.n_kv,
                      "n_ctx": self.cache.n_ctx, "kv_type": str(self.cache.kv_type), "flash_attn": self.flash}
        return BatchGraph(graph, output, shape, self.inputs, self.cache.n_ctx, h.n_positions)

    # -- blocks of nodes ----------------------------------------------------------

    def embed(self) -> Tensor:
        x = self.ctx.get_rows(self.weights["token_embd.weight"], self.inputs.tokens)
        x = self.name(x, "embd")
        scale = self.hparams.embd_scale
        return x if scale == 1 else self.name(self.ctx.scale(x, scale), "inp_scaled")

    def linear(self, x: Tensor, prefix: str, name: str, layer: int | None = None) -> Tensor:
        """x times `{prefix}.weight`, plus `{prefix}.bias` if the model has it."""
        y = self.name(self.ctx.mul_mat(self.weights[f"{prefix}.weight"], x), name, layer)
        bias = self.weights.get(f"{prefix}.bias")
        return y if bias is None else self.name(self.ctx.add(y, bias), f"{name}_b", layer)

    def norm(self, x: Tensor, prefix: str, name: str, layer: int | None = None) -> Tensor:
        """The model's RMS or layer norm of x, times a weight, plus a bias if the model has it."""
        h, ctx = self.hparams, self.ctx
        x = ctx.rms_norm(x, h.norm_eps) if h.norm == "rms" else ctx.norm(x, h.norm_eps)
        x = ctx.mul(self.name(x, "norm", layer), self.weights[f"{prefix}.weight"])
        bias = self.weights.get(f"{prefix}.bias")
        return self.name(x if bias is None else ctx.add(self.name(x, "norm_w", layer), bias), name, layer)

    def query_key_value(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x[n_embd, n_tokens]: three tensors [width of a head, number of heads, n_tokens].

        They are three matrix products, or three views of one product where the model has one matrix for all three.
        """
        h, at, ctx, heads = self.hparams, self.hparams.layers[layer], self.ctx, []
        parts = (("Qcur", "q", h.n_embd_head_k, at.n_head), ("Kcur", "k", h.n_embd_head_k, at.n_head_kv),
                 ("Vcur", "v", h.n_embd_head_v, at.n_head_kv))
        if self.weights.get(f"blk.{layer}.attn_qkv.weight") is None:
            for name, letter, width, n_head in parts:
                y = self.linear(x, f"blk.{layer}.attn_{letter}", name, layer)
                heads.append(self.name(ctx.reshape_3d(y, width, n_head, self.n_tokens), name, layer))
            q, k, v = heads
            return q, k, v
        y, first = self.linear(x, f"blk.{layer}.attn_qkv", "wqkv", layer), 0
        size = y.nb[0]
        for name, _, width, n_head in parts:
            part = ctx.view_3d(y, width, n_head, self.n_tokens, width * size, y.nb[1], first * size)
            heads.append(self.name(part, name, layer))
            first += width * n_head
        q, k, v = heads
        return q, k, v

    def rope(self, x: Tensor, name: str, layer: int) -> Tensor:
        r = self.hparams.layers[layer].rope
        assert r is not None
        x = self.turned(x, self.positions(), r, r.attn_factor)
        return self.name(x, name, layer)

    def turned(self, x: Tensor, positions: Tensor, r: Rope, attn_factor: float) -> Tensor:
        """x[width of a head, number of heads, n_tokens], rotated by rope to these positions."""
        return self.ctx.rope(x, positions, r.n_dims, r.mode, rope_factors(self.hparams, self.weights, self.cache),
                             r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, attn_factor, r.beta_fast,
                             r.beta_slow)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, scale: float | None = None,
                  sinks: Tensor | None = None, unpack: Tensor | None = None) -> Tensor:
        """Store k and v in the cache, attend with q to all cache rows that the mask admits.

        q[n_embd_head_k, n_head, n_tokens], k[n_embd_head_k, n_head_kv, n_tokens], v[n_embd_head_v, n_head_kv, n_tokens]
        -> [width of a head's result * n_head, n_tokens].  `unpack` [n_embd_head_v, width, n_head]: a matrix for each
        head, by which its weighted sum of values is multiplied (latent attention); None: width is n_embd_head_v.
        """
        ctx, h, at, n_kv = self.ctx, self.hparams, self.hparams.layers[layer], self.n_kv
        last = not self.shape.n_outputs and layer == h.n_layer - 1
        # A graph without outputs ends where the last layer's keys and values are stored: no node reads q there.
        self.expand(*((v, k) if last else (q, v, k)))
        k_all, v_all = self.store(k, v, layer)
        if last:
            self.done = True
            return self.unreached(layer)
        scale, mask = h.attn_scale if scale is None else scale, self.mask(at.window)
        k_all = heads_of(ctx, k_all, at.n_head_kv, n_kv)
        q = ctx.permute(q, 0, 2, 1, 3)
        if self.flash:
            v_all = heads_of(ctx, v_all, at.n_head_kv, n_kv)
            out = self.name(ctx.flash_attn_ext(q, k_all, v_all, mask, scale, 0.0, h.attn_softcap, sinks), "__fattn__",
                            layer)
            if unpack is None:
                return self.name(ctx.reshape_2d(out, out.ne[0] * at.n_head, self.n_tokens), "kqv_out", layer)
            kqv = ctx.mul_mat(unpack, ctx.permute(out, 0, 2, 1, 3))
        else:
            kq = self.name(ctx.mul_mat(k_all, q), "kq", layer)
            if h.attn_softcap:
                kq, scale = self.capped(kq, h.attn_softcap, scale), 1.0
            kq = self.name(ctx.soft_max(kq, mask, scale, 0.0, sinks), "kq_soft_max", layer)
            kqv = ctx.mul_mat(self.columns(v_all, at), kq)
            if unpack is not None:
                kqv = ctx.mul_mat(unpack, self.name(kqv, "kqv", layer))
        kqv = self.name(kqv, "kqv", layer)
        out = ctx.cont(ctx.permute(kqv, 0, 2, 1, 3), (kqv.ne[0] * at.n_head, self.n_tokens))
        return self.name(out, "kqv_out", layer)

    def unreached(self, layer: int) -> Tensor:
        """A stand-in for the result of the last layer's attention, in a graph without outputs.

        Architectures build the nodes after attention from it as always; these nodes do not become part of the graph.
        """
        h, at = self.hparams, self.hparams.layers[layer]
        width = h.latent.head_v if h.latent else h.n_embd_head_v
        return self.ctx.tensor("f32", (width * at.n_head, self.n_tokens), f"kqv_out-{layer}")

    def capped(self, x: Tensor, cap: float, scale: float = 1.0) -> Tensor:
        """scale * x, softly limited to -cap .. cap: cap * tanh(scale * x / cap)."""
        ctx = self.ctx
        return ctx.scale(ctx.tanh(ctx.scale(x, scale / cap)), cap)

    def store(self, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write this batch's k and v to the layer's caches; returns the nodes that write, whose results are the caches.

        K is [n_embd_k, n_ctx]; V is [n_embd_v, n_ctx], or [1, n_embd_v * n_ctx] where it is transposed (no `flash`).
        """
        ctx, n, inputs, at = self.ctx, self.n_tokens, self.inputs, self.hparams.layers[layer]
        if inputs.k_rows is None:
            inputs.k_rows = ctx.tensor("i64", n, "attn_inp_k_idxs", input=True)
        k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
        assert k_cache is not None and v_cache is not None      # for a layer with attention
        k_all = ctx.set_rows(k_cache, self.rows_of(k), inputs.k_rows)
        v = self.rows_of(v)
        if self.flash:
            v_all = ctx.set_rows(v_cache, v, inputs.k_rows)
        else:
            v = v if v.is_contiguous else ctx.cont(v)
            flat = ctx.reshape_2d(v_cache, 1, v_cache.n_elements)
            v_all = ctx.set_rows(flat, ctx.reshape_2d(v, 1, at.n_embd_v * n), self.v_places(at.n_embd_v))
        self.expand(k_all, v_all)
        return k_all, v_all

    def v_places(self, width: int) -> Tensor:
        """The input with the indices, i64 [width * n_tokens], of a batch's values in a transposed V cache.

        `width` is the number of values of a token; layers of equal width share the input.
        """
        places = self.inputs.v_rows
        if width not in places:
            places[width] = self.ctx.tensor("i64", width * self.n_tokens, "attn_inp_v_idxs", input=True)
        return places[width]

    def rows_of(self, heads: Tensor) -> Tensor:
        """Heads [width, n_head, n_tokens] as rows [width * n_head, n_tokens]."""
        ctx, (width, n_head, n, _) = self.ctx, heads.ne
        if heads.is_contiguous:
            return ctx.reshape_2d(heads, width * n_head, n)
        if heads.nb[1] == width * heads.nb[0]:
            return ctx.view_2d(heads, width * n_head, n, heads.nb[2])
        return ctx.cont(heads, (width * n_head, n))

    def columns(self, v: Tensor, at: Layer) -> Tensor:
        """The first n_kv tokens of a transposed V cache, as a view [n_kv, n_embd_head_v, n_head_kv]."""
        width, column = at.n_embd_v // at.n_head_kv, self.cache.n_ctx * v.nb[0]
        return self.ctx.view_3d(v, self.n_kv, width, at.n_head_kv, column, column * width)

    def gated(self, x: Tensor, layer: int, function: str = "swiglu", suffix: str = "") -> Tensor:
        """The gated feed-forward unit down(f(gate(x)) * up(x)); `function` names f.

        Some models have gate and up as one matrix named up, with the rows of gate first.
        """
        prefix, ctx = f"blk.{layer}.ffn_", self.ctx
        up_name = f"ffn_up{suffix}"
        if self.weights.get(f"{prefix}gate{suffix}.weight") is None:
            x = ctx.glu(self.linear(x, prefix + "up" + suffix, up_name, layer), function)
        else:
            gate = self.linear(x, prefix + "gate" + suffix, f"ffn_gate{suffix}", layer)
            up = self.linear(x, prefix + "up" + suffix, up_name, layer)
            x = ctx.glu_split(gate, up, function)
        x = self.name(x, f"ffn_{function}{suffix}", layer)
        return self.linear(x, prefix + "down" + suffix, f"ffn_out{suffix}", layer)

    def plain(self, x: Tensor, layer: int, function: str = "gelu") -> Tensor:
        """The feed-forward unit without a gate, down(f(up(x))); `function` names f."""
        prefix = f"blk.{layer}.ffn_"
        x = self.linear(x, prefix + "up", "ffn_up", layer)
        x = self.name(self.ctx.unary(x, function), f"ffn_{function}", layer)
        return self.linear(x, prefix + "down", "ffn_out", layer)

    def add(self, x: Tensor, y: Tensor, name: str, layer: int) -> Tensor:
        return self.name(self.ctx.add(x, y), name, layer)

    def logits(self, x: Tensor) -> Tensor:
        """The logits of x; a model without an output matrix uses the embedding's (tied weights)."""
        h = self.hparams
        tied = self.weights.get("output.weight") is None
        x = self.ctx.mul_mat(self.weights["token_embd.weight" if tied else "output.weight"], x)
        bias = self.weights.get("output.bias")
        if bias is not None:
            x = self.ctx.add(x, bias)
        return self.name(self.capped(x, h.final_softcap) if h.final_softcap else x, "result_output")


def heads_of(ctx: Context, cache: Tensor, n_head: int, n_rows: int) -> Tensor:
    """The first n_rows of a cache [width * n_head, n_ctx], as a view [width of a head, n_rows, n_head]."""
    row = cache.nb[1]
    width = cache.ne[0] // n_head
    return ctx.permute(ctx.view_3d(cache, width, n_head, n_rows, row // n_head, row), 0, 2, 1, 3)


def rope_factors(h: Hparams, weights: Weights, cache: KVCache) -> Tensor | None:
    """The tensor by which rope divides its angles; None for a model without.

    Models with longrope have two: one for contexts of up to `rope.n_ctx_orig` tokens, another for longer ones.
    """
    factors = weights.get("rope_freqs.weight")
    if factors is None and h.longrope and h.rope is not None:
        factors = weights.get(f"rope_factors_{'long' if cache.n_ctx > h.rope.n_ctx_orig else 'short'}.weight")
    return factors
