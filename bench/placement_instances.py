"""Seeded instances of placement: a model of random sizes, and up to three GPUs of random speeds beside a host.

Every seed gives the same instance everywhere: architecture, layers (12 to 68), widths (512 to 8192), types of the
matrices, context, rows of a prompt, flash attention; memories, speeds and links.  The GPUs have room for a part of the
model, a tenth at least, or for all of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import ggml_sched as gs
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.synthetic import OPTIONAL, _hparams, is_matrix, outline
from ggml_sched.llama.weights import Weights

__all__ = ["GOALS", "Instance", "instance"]

KINDS = ("llama", "llama", "gemma3", "gpt2", "phi2", "qwen2", "llama of experts", "qwen3moe", "gpt-oss", "deepseek2",
         "mamba")
TYPES = ("q4_0", "q8_0", "q4_K", "q6_K", "f16")
GOALS = ("token", "prompt", "prompt, weights streamed", "512 in and 256 out, weights streamed")
MIB = 1 << 20


@dataclass(frozen=True)
class Instance:
    """What `gs.fit` takes."""

    seed: int
    name: str
    graphs: tuple[gs.Graph, gs.Graph]
    devices: tuple[gs.Device, ...]
    link: gs.Link

    def fit(self, goal: str = "token", **options: Any) -> gs.Fit:
        """`gs.fit` for one of GOALS."""
        weights = {"token": (1.0, 0.0), GOALS[3]: (256.0, 1.0)}.get(goal, (0.0, 1.0))
        return gs.fit(self.graphs, self.devices, self.link, goal=weights, stream="streamed" in goal, **options)


def instance(seed: int) -> Instance:
    """The instance of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    graphs, text = model(rng, kind)
    total = sum(t.nbytes for t in graphs[0].tensors if t.resident and t.view_src is None)
    return Instance(seed, text, graphs, devices(rng, total), gs.Link(rng.choice((6e9, 12e9, 25e9, 50e9)), 8e-6))


def devices(rng: random.Random, total: int) -> tuple[gs.Device, ...]:
    """A host with room for everything, and one to three unequal GPUs; `total`: bytes of the residents."""
    count = rng.choice((1, 1, 2, 3))
    room, parts = total * rng.uniform(0.1, 1.2), [rng.uniform(0.2, 1.0) for _ in range(count)]
    made = [gs.Device(f"GPU{k}", int(room * part / sum(parts)) + rng.randrange(256) * MIB // 4,
                      rng.uniform(150e9, 2e12), rng.uniform(5e12, 200e12)) for k, part in enumerate(parts)]
    host = gs.Device("CPU", 2 * total + (1 << 34), rng.uniform(20e9, 150e9), rng.uniform(2e11, 2e12), host=True)
    return (*made, host)


def model(rng: random.Random, kind: str) -> tuple[tuple[gs.Graph, gs.Graph], str]:
    """Graphs of one token and of a prompt, with a cache of f16, and words about them."""
    arch = "llama" if kind == "llama of experts" else kind
    layers = int(2 ** rng.uniform(3.6, 6.1))
    heads, head = rng.choice((8, 16, 32, 64)), rng.choice((64, 128))
    width = heads * head
    values: dict[str, Any] = {
        "vocab_size": rng.choice((8192, 32000, 128256)), "context_length": 8192, "embedding_length": width,
        "block_count": layers, "feed_forward_length": 256 * max(1, round(width * rng.uniform(1.5, 5) / 256)),
        "attention.head_count": heads, "attention.head_count_kv": rng.choice((heads, max(1, heads // 4))),
        "attention.layer_norm_rms_epsilon": 1e-5}
    experts = {"expert_count": rng.choice((8, 16, 64)), "expert_used_count": rng.choice((2, 4)),
               "expert_feed_forward_length": 256 * rng.randint(1, max(1, width // 512))}
    if arch in ("gpt2", "phi2"):
        values |= {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None,
                   "attention.head_count_kv": heads}
        values |= {"rope.dimension_count": head // 2} if arch == "phi2" else {}
    if arch == "mamba":
        values |= {"ssm.conv_kernel": 4, "ssm.inner_size": 2 * width, "ssm.state_size": 16,
                   "ssm.time_step_rank": width // 16, "feed_forward_length": 0, "attention.head_count": 0,
                   "attention.head_count_kv": None}
    if arch in ("gemma3", "gpt-oss"):
        values |= {"attention.key_length": head, "attention.value_length": head, "attention.sliding_window": 512}
    if arch == "gpt-oss":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0,
                   "rope.scaling.original_context_length": 4096}
    if arch == "qwen3moe":
        values |= {"attention.key_length": head, "attention.value_length": head}
    if arch == "deepseek2":
        values |= {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
                   "attention.key_length_mla": 192, "attention.value_length_mla": 128, "attention.kv_lora_rank": 512,
                   "rope.dimension_count": 64, "leading_dense_block_count": 1, "expert_shared_count": 2,
                   "expert_weights_scale": 1.0}
    if arch in ("gpt-oss", "qwen3moe", "deepseek2") or kind == "llama of experts":
        values |= experts
    flash = arch not in ("gpt-oss", "mamba") and rng.random() < 0.5
    n_ctx, rows = rng.choice((512, 1024, 2048, 4096, 8192)), rng.choice((32, 128, 512))
    tied = arch in ("gemma3", "gpt2") or rng.random() < 0.1
    made = built(arch, values, tied, {"attn": rng.choice(TYPES), "other": rng.choice(TYPES)}, n_ctx, rows, flash)
    return made, f"{kind}, {layers} layers of {width}, context {n_ctx}, {rows} rows{', flash' * flash}"


def built(arch: str, values: dict[str, Any], tied: bool, types: dict[str, str], n_ctx: int, rows: int,
          flash: bool) -> tuple[gs.Graph, gs.Graph]:
    """The graphs that the runner builds; `types`: those of the matrices of attention, and of all others."""
    metadata, specs = outline(arch, values, optional=OPTIONAL.get(arch, ()), tied=tied)
    hparams = _hparams(arch, metadata, ())
    dry, store, weights = gs.DryBackend("dry", alignment=64), gs.Context("weights"), Weights()
    for spec in specs:
        wanted = types["attn" if "attn" in spec.name else "other"] if is_matrix(spec) else "f32"
        with gs.Context() as scratch:
            block = gs.Type.__members__[wanted.upper()].block_size
            plain = scratch.tensor(wanted if spec.ne[0] % block == 0 else "f16" if is_matrix(spec) else "f32", spec.ne)
            weights.tensors[spec.name] = store.restore("NONE", plain.type, plain.ne, plain.nb, name=spec.name,
                                                      resident="weight")
    dry.alloc_tensors(store)
    kv = KVCache(hparams, n_ctx, lambda name, layer: dry, "f16", flash=flash)
    decode, prompt = (build_graph(ARCHITECTURES[arch], hparams, weights, kv, shape, flash).graph
                      for shape in (Shape(1, n_ctx, 1), Shape(rows, n_ctx, 1)))
    return decode, prompt
