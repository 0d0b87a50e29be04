"""Mamba: layers of a selective state space, without attention and feed-forward units.

For each sequence a layer keeps one row with the last inputs of its convolution and one with its state; a batch has the
tokens of one sequence.  Corresponds to llama.cpp's llm_build_mamba.
"""

from __future__ import annotations

from collections.abc import Iterator

from ggml_sched._graph import Tensor
from ggml_sched.llama.arch import common
from ggml_sched.llama.builder import Builder
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.hparams import Hparams, Layer, Metadata, Ssm, n_vocab
from ggml_sched.llama.metadata import MAX_POSITION
from ggml_sched.llama.weights import Spec

__all__ = ["build", "hparams", "weights"]


def hparams(file: GGUFFile) -> Hparams:
    meta = Metadata(file, "mamba")
    n_embd = meta.integer("embedding_length")
    ssm = Ssm(meta.integer("ssm.conv_kernel", low=2, high=1 << 10), meta.integer("ssm.inner_size"),
              meta.integer("ssm.state_size"), meta.integer("ssm.time_step_rank"), meta.boolean("ssm.dt_b_c_rms", False))
    if ssm.n_inner != 2 * n_embd:
        raise meta.error(f"an inner width of {ssm.n_inner} is not twice the embedding of {n_embd}")
    return Hparams(
        arch="mamba", n_vocab=n_vocab(meta), n_embd=n_embd,
        n_ctx_train=meta.integer("context_length", high=MAX_POSITION),
        n_embd_head_k=0, n_embd_head_v=0, norm_eps=meta.number("attention.layer_norm_rms_epsilon", high=1.0),
        attn_scale=1.0, ssm=ssm,
        layers=(Layer(recurrent=True),) * meta.integer("block_count", high=max(len(file.tensors), 1)))


def weights(h: Hparams) -> Iterator[Spec]:
    s = h.ssm
    assert s is not None
    yield from common.around_layers(h)
    for layer in range(h.n_layer):
        prefix = f"blk.{layer}."
        yield from common.norm_weights(h, prefix + "attn_norm", h.n_embd, layer)
        yield Spec(prefix + "ssm_in.weight", (h.n_embd, 2 * s.n_inner), layer)
        yield Spec(prefix + "ssm_conv1d.weight", (s.n_conv, s.n_inner), layer)
        yield Spec(prefix + "ssm_conv1d.bias", (s.n_inner,), layer)
        yield Spec(prefix + "ssm_x.weight", (s.n_inner, s.n_dt + 2 * s.n_state), layer)
        yield Spec(prefix + "ssm_dt.weight", (s.n_dt, s.n_inner), layer)
        yield Spec(prefix + "ssm_dt.bias", (s.n_inner,), layer)
        yield Spec(prefix + "ssm_a", (s.n_state, s.n_inner), layer)
        yield Spec(prefix + "ssm_d", (s.n_inner,), layer)
        yield Spec(prefix + "ssm_out.weight", (s.n_inner, h.n_embd), layer)


def mix(b: Builder, x: Tensor, layer: int) -> Tensor:
    """The mixing part of a layer, [n_embd, n_tokens] -> [n_embd, n_tokens]: convolution, scan of states, and gate."""
    ctx, s, n, prefix, row = b.ctx, b.hparams.ssm, b.n_tokens, f"blk.{layer}.ssm_", b.state_row()
    r, states = b.cache.r[layer], b.cache.s[layer]
    assert s is not None and r is not None and states is not None
    xz = b.linear(x, prefix + "in", "ssm_in", layer)
    # xz comes first, because the layer's weight that it reads decides its backend.  The nodes that read `r` read no
    # weight, and are placed by the nodes around them, which should be those of this layer.
    b.expand(xz)
    size = xz.nb[0]
    x = ctx.view_2d(xz, s.n_inner, n, xz.nb[1])
    gate = ctx.cont(ctx.view_2d(xz, s.n_inner, n, xz.nb[1], s.n_inner * size))
    # At the first tokens of a batch the convolution reads the last inputs of the batch before, which `r` keeps.
    before = ctx.reshape_2d(ctx.get_rows(r, row), s.n_conv - 1, s.n_inner)
    inputs = b.name(ctx.concat(before, ctx.transpose(x), 0), "conv_input", layer)
    last = ctx.cont(ctx.view_2d(inputs, s.n_conv - 1, s.n_inner, inputs.nb[1], n * size), (r.ne[0], 1))
    b.expand(ctx.set_rows(r, last, row))
    x = ctx.ssm_conv(inputs, b.weights[prefix + "conv1d.weight"])
    x = ctx.silu(b.name(ctx.add(x, b.weights[prefix + "conv1d.bias"]), "conv_output", layer))
    parts = b.linear(x, prefix + "x", "ssm_x", layer)
    dt = b.linear(normed(b, ctx.cont(ctx.view_2d(parts, s.n_dt, n, parts.nb[1]))), prefix + "dt", "ssm_dt", layer)
    scan_b, scan_c = (normed(b, ctx.view_4d(parts, s.n_state, 1, n, 1, s.n_state * size, parts.nb[1], n * parts.nb[1],
                                            (s.n_dt + i * s.n_state) * size)) for i in range(2))
    y = b.name(ctx.ssm_scan(ctx.reshape_4d(states, s.n_state, 1, s.n_inner, states.ne[1]),
                            ctx.reshape_4d(x, 1, s.n_inner, n, 1), ctx.reshape_3d(dt, s.n_inner, n, 1),
                            b.weights[prefix + "a"], scan_b, scan_c, row), "ssm_scan", layer)
    # The scan returns one tensor: the result of each token, then the sequence's new state, which is stored in `states`.
    b.expand(ctx.set_rows(states, ctx.view_2d(y, states.ne[0], 1, states.nb[1], s.n_inner * n * size), row))
    y = ctx.add(ctx.view_2d(y, s.n_inner, n, s.n_inner * size), ctx.mul(x, b.weights[prefix + "d"]))
    return b.linear(b.name(ctx.swiglu_split(gate, y), "ssm_gated", layer), prefix + "out", "ssm_out", layer)


def normed(b: Builder, x: Tensor) -> Tensor:
    """x, RMS-normed for FalconMamba, which norms dt, B and C before the scan."""
    ssm = b.hparams.ssm
    return b.ctx.rms_norm(x, b.hparams.norm_eps) if ssm is not None and ssm.norm else x


def build(b: Builder) -> Tensor:
    x = b.embed()
    for layer in range(b.hparams.n_layer):
        residual = x
        x = mix(b, b.norm(x, f"blk.{layer}.attn_norm", "attn_norm", layer), layer)
        x, residual = b.wanted(layer, x, residual)
        x = b.add(x, residual, "l_out", layer)
    return x
