"""GGUF models with a few mistakes: each is refused with a gs.Error, or it runs."""

import io
import math
import random
from pathlib import Path

import numpy as np
from byte_attack import mutated_bytes

import ggml_sched as gs
from ggml_sched.llama import load, open_gguf, random_llama, write_gguf
from ggml_sched.llama.gguf import Array, Kind

SHAPES = {"n_vocab": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_head_kv": 2, "n_ff": 32, "n_ctx": 64}
LISTS = {"tokenizer.ggml.tokens": [f"tok_{i}" for i in range(32)], "tokenizer.ggml.scores": [0.0] * 32,
         "some.flags": [True, False], "some.numbers": list(range(9))}
MODELS = (random_llama(1, **SHAPES, extra=LISTS), random_llama(2, **SHAPES, n_expert=4),
          random_llama(3, **SHAPES, tied=True), random_llama(4, **SHAPES, arch="qwen3"),
          random_llama(5, **SHAPES, dtype=np.float16),
          # One of each family of block types: 32 elements with a scale, a table of levels, 256 with scales of scales.
          random_llama(6, **SHAPES, dtype="q5_1"), random_llama(7, **SHAPES, n_expert=4, dtype="mxfp4"),
          random_llama(8, **(SHAPES | {"n_embd": 256, "n_ff": 256, "n_layer": 1}), dtype="q4_K"))
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 64, 1 << 16, (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 64) - 1, -1,
           0.0, -0.5, 1e-30, 1e30, float("inf"), float("nan"), True, "llama", "", "yarn", "linear")
TYPES = tuple(gs.Type)


def head_of(data: bytes) -> int:
    """Where the weights begin."""
    with open_gguf(data) as f:
        return min(t.offset for t in f.tensors.values())


HEADS = {data: head_of(data) for data in MODELS}


def mutated_model(rng: random.Random) -> bytes:
    data = rng.choice(MODELS)
    return mutated_bytes(rng, data, HEADS[data]) if rng.random() < 0.5 else rewritten(rng, data)


def rewritten(rng: random.Random, data: bytes) -> bytes:
    """A well-formed file of a wrong model: changed hyperparameters or tensors."""
    with open_gguf(data) as f:
        metadata = {key: value.tolist() if isinstance(value, Array) else value for key, value in f.metadata.items()}
        tensors = {t.name: (t.type, t.ne, f.data(t).tobytes()) for t in f.tensors.values()}
    for _ in range(rng.choice((1, 1, 2, 3))):
        key, name = rng.choice(list(metadata) or ["k"]), rng.choice(list(tensors) or ["t"])
        match rng.randrange(9):
            case 0 | 1 | 2:
                value = rng.choice(NUMBERS)
                metadata[key] = (Kind.U64, value) if type(value) is int and value >= 0 and rng.random() < 0.2 else value
            case 3:
                metadata.pop(key, None)
            case 4:
                arch = metadata.get("general.architecture", "llama")
                metadata[f"{arch}.{rng.choice(EXTRA)}"] = rng.choice(NUMBERS)
            case 5:
                tensors.pop(name, None)
            case 6:
                kind, ne, raw = tensors.pop(name, (gs.Type.F32, (1,), bytes(4)))
                tensors[rng.choice((name, name + "2", "blk.7.attn_q.weight"))] = (kind, ne, raw)
            case 7 if name in tensors:
                *front, last = tensors[name][1]
                ne = (last, *front) if rng.random() < 0.4 else (*front, rng.choice((0, 1, last * 2)))
                tensors[name] = _filled(rng, gs.Type.F32, ne)
            case 8 if name in tensors:
                tensors[name] = _filled(rng, rng.choice(TYPES), tensors[name][1])
    out = io.BytesIO()
    write_gguf(out, metadata, tensors)
    return out.getvalue()


EXTRA = ("vocab_size", "attention.key_length", "attention.value_length", "attention.scale", "rope.freq_base",
         "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "expert_count",
         "expert_used_count", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scale_linear")


def _filled(rng: random.Random, kind: gs.Type, ne: tuple[int, ...]):
    """A tensor of a type and extents: random bytes, or zeros."""
    blocks = ne[0] // kind.block_size
    nbytes = blocks * kind.type_size * math.prod(ne[1:])
    ne = (blocks * kind.block_size, *ne[1:])
    return kind, ne, rng.randbytes(nbytes) if rng.random() < 0.5 else bytes(nbytes)


def mutated_parts(rng: random.Random, folder: Path) -> Path:
    """A model in two or three files, some of them mutated, exchanged, cut or lost; the path of the first."""
    n_parts = rng.randint(2, 3)
    with open_gguf(rng.choice(MODELS)) as f:
        metadata = {key: value.tolist() if isinstance(value, Array) else value for key, value in f.metadata.items()}
        tensors = {t.name: (t.type, t.ne, f.data(t).tobytes()) for t in f.tensors.values()}
    names = list(tensors)
    parts = []
    for k in range(n_parts):
        fields = {"split.no": (Kind.U16, k), "split.count": (Kind.U16, n_parts)}
        if rng.random() < 0.5:
            fields["split.tensors.count"] = (Kind.I32, len(names))
        if rng.random() < 0.15:
            fields[rng.choice(list(fields))] = rng.choice(NUMBERS)
        out = io.BytesIO()
        write_gguf(out, (metadata if k == 0 else {}) | fields, {name: tensors[name] for name in names[k::n_parts]})
        parts.append(out.getvalue())
    for _ in range(rng.choice((0, 1, 1, 2))):
        k = rng.randrange(n_parts)
        match rng.randrange(5):
            case 0 | 1:
                parts[k] = mutated_bytes(rng, parts[k], min(len(parts[k]), 2048))
            case 2:
                parts[k] = parts[rng.randrange(n_parts)]
            case 3:
                parts[k] = parts[k][: rng.randrange(len(parts[k]) + 1)]
            case 4:
                parts[k] = b""
    for old in folder.iterdir():
        old.unlink()
    for k, part in enumerate(parts):
        if part or rng.random() < 0.5:
            (folder / f"m-{k + 1:05}-of-{n_parts:05}.gguf").write_bytes(part)
    first = folder / f"m-00001-of-{n_parts:05}.gguf"
    if not first.exists():
        first.touch()
    return first


def attempt(data: bytes | Path, rng: random.Random) -> str:
    """Load and run: "refused" or "runs"."""
    backends = [gs.CpuBackend(1, name=f"CPU{k}") for k in range(rng.randint(1, 2))]
    try:
        with open_gguf(data) as f:
            for value in f.metadata.values():
                if isinstance(value, Array):
                    value.tolist()
        with load(data, backends, n_ctx=rng.choice((8, 40)), n_batch=4, use_mmap=rng.random() < 0.5) as model:
            for tokens in ([0, 1, 2, 3, 4, 5], [0]):
                logits = model.eval([t % model.n_vocab for t in tokens])
                assert logits.shape == (len(tokens), model.n_vocab) and logits.dtype == np.float32
            model.reset()
    except gs.Error:
        return "refused"
    finally:
        assert all(backend.used == 0 for backend in backends), "memory is still held"
    return "runs"
