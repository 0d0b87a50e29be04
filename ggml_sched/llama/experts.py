"""The experts block: a router, and the feed-forward units (experts) that it chooses for each token.

Corresponds to llama.cpp's build_moe_ffn.
"""

from __future__ import annotations

from ggml_sched._graph import Tensor
from ggml_sched.llama.builder import Builder

__all__ = ["experts"]

MIN_EXPERT_WEIGHT = 6.103515625e-5
"""The chosen experts' weights are divided by their sum, or by this, the smallest normal f16, if the sum is smaller."""


def experts(b: Builder, x: Tensor, layer: int, function: str = "swiglu") -> Tensor:
    """For each token the weighted sum of the results of its n_used best experts; the router ranks and weights experts.

    x[n_embd, n_tokens] -> [n_embd, n_tokens].  `function`: how gate and up are joined, "swiglu", "geglu" or
    "swiglu_oai".
    """
    assert b.hparams.experts is not None
    ctx, e, n_embd, n, prefix = b.ctx, b.hparams.experts, x.ne[0], x.ne[1], f"blk.{layer}.ffn_"

    def name(t: Tensor, what: str) -> Tensor:
        return b.name(t, f"ffn_moe_{what}", layer)

    def product(what: str, x: Tensor) -> Tensor:
        y = name(ctx.mul_mat_id(b.weights[f"{prefix}{what}_exps.weight"], x, chosen), what)
        bias = b.weights.get(f"{prefix}{what}_exps.bias")
        return y if bias is None else name(ctx.add_id(y, bias, chosen), f"{what}_biased")

    scores = name(ctx.mul_mat(b.weights[prefix + "gate_inp.weight"], x), "logits")
    bias = b.weights.get(prefix + "gate_inp.bias")
    if bias is not None:
        scores = name(ctx.add(scores, bias), "logits_biased")
    if e.gating != "chosen":
        scores = name(ctx.soft_max(scores) if e.gating == "softmax" else ctx.sigmoid(scores), "probs")
    bias = b.weights.get(f"blk.{layer}.exp_probs_b.bias")
    # This bias changes which experts are chosen, not the weights of the chosen ones.
    ranked = scores if bias is None else name(ctx.add(scores, bias), "probs_biased")
    order = name(ctx.argsort(ranked, "desc"), "argsort")
    chosen = name(ctx.view_2d(order, e.n_used, n, order.nb[1]), "topk")
    weight = name(ctx.get_rows(ctx.reshape_3d(scores, 1, e.n, n), chosen), "weights")
    if e.gating == "chosen" or e.normalise:
        weight = ctx.reshape_2d(weight, e.n_used, n)
        if e.gating == "chosen":
            weight = name(ctx.soft_max(weight), "weights_softmax")
        if e.normalise:
            total = name(ctx.sum_rows(weight), "weights_sum")
            total = name(ctx.clamp(total, MIN_EXPERT_WEIGHT, float("inf")), "weights_sum_clamped")
            weight = name(ctx.div(weight, total), "weights_norm")
        weight = ctx.reshape_3d(weight, 1, e.n_used, n)
    if e.scale != 1:
        weight = name(ctx.scale(weight, e.scale), "weights_scaled")
    b.expand(weight)
    x = ctx.reshape_3d(x, n_embd, 1, n)
    up, gate = product("up", x), product("gate", x)
    x = name(ctx.swiglu_oai(gate, up) if function == "swiglu_oai" else ctx.glu_split(gate, up, function), function)
    x = name(ctx.mul(product("down", x), weight), "weighted")
    parts = [ctx.view_2d(x, n_embd, n, x.nb[2], i * x.nb[1]) for i in range(e.n_used)]
    b.expand(*parts)
    out = parts[0] if e.n_used > 1 else name(ctx.cont(parts[0]), "out")
    for part in parts[1:]:
        out = name(ctx.add(out, part), "out")
    return out
