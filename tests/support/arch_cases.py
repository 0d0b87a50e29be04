"""The models with reference logits from llama.cpp (tests/data/make_logits.py): `random_model` arguments and context
size."""

N_PROMPT, N_TOKENS = 12, 28
"""Tokens of one batch, and tokens of the whole evaluation: more than the largest attention window."""

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
MLA = {"attention.head_count_kv": 1, "attention.key_length": 24, "attention.value_length": 16,
       "attention.key_length_mla": 16, "attention.value_length_mla": 8}

CASES: dict[str, dict] = {
    "llama": {"arch": "llama"},
    "llama-tied": {"arch": "llama", "tied": True},
    "llama-linear": {"arch": "llama", "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}},
    "llama-yarn": {"arch": "llama", "metadata": YARN},
    "llama-yarn-keys": {"arch": "llama", "metadata": {
        **YARN, "rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.yarn_attn_factor": 1.3, "rope.freq_base": 100.0,
        "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 0.9,
        "rope.scaling.yarn_log_multiplier": 0.7, "rope.scaling.original_context_length": 4096}},
    "llama-other-keys": {"arch": "llama", "metadata": {
        "attention.scale": 0.2, "attention.sliding_window": 8, "rope.scaling.attn_factor": 1.2}},
    "llama-llama3": {"arch": "llama", "optional": ("rope_freqs",), "metadata": {"rope.freq_base": 500000.0}},
    "llama-longrope-long": {"arch": "llama", "optional": ("rope_factors",), "metadata": {
        "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.2}},
    "llama-longrope-short": {"arch": "llama", "optional": ("rope_factors",), "metadata": {
        "rope.scaling.type": "longrope", "rope.scaling.original_context_length": 512}},
    "llama-biases": {"arch": "llama", "optional": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias",
                                                  "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")},
    "mixtral": {"arch": "llama", "metadata": {"expert_count": 4, "expert_used_count": 2}},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
    "qwen3moe": {"arch": "qwen3moe"},
    "gemma2": {"arch": "gemma2", "tied": True},
    "gemma2-pattern": {"arch": "gemma2", "tied": True, "metadata": {
        "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 100.0}},
    "gemma2-defaults": {"arch": "gemma2", "tied": True, "metadata": {
        "attention.sliding_window": None, "attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gemma2-46": {"arch": "gemma2", "tied": True, "metadata": {
        "block_count": 46, "embedding_length": 16, "attention.key_length": 8, "attention.value_length": 8,
        "feed_forward_length": 16}},
    "gemma3": {"arch": "gemma3", "tied": True},
    "gemma3-linear": {"arch": "gemma3", "metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}},
    "gemma3-pattern": {"arch": "gemma3", "metadata": {
        "attention.sliding_window_pattern": [True, False, True, True, False, False, True],
        "rope.freq_base_swa": 100.0, "final_logit_softcapping": 2.0}},
    "gemma3-global": {"arch": "gemma3", "metadata": {"attention.sliding_window": None}},
    "phi2": {"arch": "phi2"},
    "phi3-short": {"arch": "phi3", "metadata": {"rope.scaling.original_context_length": 512,
                                               "rope.scaling.attn_factor": 1.19}},
    "phi3-long": {"arch": "phi3", "metadata": {"rope.scaling.original_context_length": 16,
                                              "rope.scaling.attn_factor": 1.19, "rope.dimension_count": 6}},
    "gpt2": {"arch": "gpt2", "tied": True},
    "gpt-oss": {"arch": "gpt-oss"},
    "gpt-oss-pattern": {"arch": "gpt-oss", "metadata": {
        "attention.sliding_window_pattern": [False, True, True], "rope.freq_base_swa": 100.0}},
    "deepseek2": {"arch": "deepseek2"},
    "deepseek2-norm": {"arch": "deepseek2", "metadata": {"expert_weights_norm": True, "expert_gating_func": 2},
                       "optional": ("exp_probs_b",)},
    "deepseek2-yarn": {"arch": "deepseek2", "metadata": {**YARN, "rope.scaling.yarn_log_multiplier": 0.0707}},
    "deepseek2-absorbed": {"arch": "deepseek2", "metadata": {**MLA, **YARN,
                                                            "rope.scaling.yarn_log_multiplier": 0.1}},
    "deepseek2-lite": {"arch": "deepseek2", "metadata": {
        "block_count": 27, "attention.q_lora_rank": None, "embedding_length": 16, "expert_feed_forward_length": 8,
        "feed_forward_length": 16, "attention.kv_lora_rank": 8, "expert_weights_scale": 1.0}},
    "mamba": {"arch": "mamba"},
    "mamba-norm": {"arch": "mamba", "metadata": {"ssm.dt_b_c_rms": True}},
}
N_CTX = 64


def model(name: str, dtype=None) -> bytes:
    """The model file of a case.  The import is inside: the script that makes the logits can import this module only."""
    from ggml_sched.llama.synthetic import random_model

    case = CASES[name]
    rest = {key: value for key, value in case.items() if key != "arch"}
    if dtype is not None:
        rest["dtype"] = dtype
    return random_model(case["arch"], 1 + list(CASES).index(name), **rest)


def tokens(n_vocab: int = 64) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % n_vocab for i in range(N_TOKENS)]
