"""Small random models that many tests load, and the contents of model files."""

import io
from pathlib import Path

from ggml_sched.llama import open_gguf, random_llama, write_gguf
from ggml_sched.llama.gguf import Array, Kind
from ggml_sched.llama.synthetic import random_model

SHAPES = {"n_vocab": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 48}
SMALL = random_llama(1, **SHAPES)
MAMBA = random_model("mamba", 1)
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32]


def contents(data) -> tuple[dict, dict]:
    """The metadata and the tensors of a file, as `write_gguf` takes them."""
    with open_gguf(data) as file:
        metadata = {k: v.tolist() if isinstance(v, Array) else v for k, v in file.metadata.items()}
        return metadata, {t.name: (t.type, t.ne, file.data(t).tobytes()) for t in file.tensors.values()}


def written(metadata=None, tensors=None, **options) -> bytes:
    """A file of this metadata, without the keys whose value is None, and these tensors."""
    out = io.BytesIO()
    write_gguf(out, {k: v for k, v in (metadata or {}).items() if v is not None}, tensors or {}, **options)
    return out.getvalue()


def written_in_parts(folder: Path, n_parts: int, data: bytes, changes: dict | None = None, name: str = "m") -> Path:
    """Write a model in parts; `changes` are fields of part k that differ from what is right.  The path of the first."""
    metadata, tensors = contents(data)
    names = list(tensors)
    for k in range(n_parts):
        fields = {"split.no": (Kind.U16, k), "split.count": (Kind.U16, n_parts),
                  "split.tensors.count": (Kind.I32, len(tensors))} | (changes or {}).get(k, {})
        here = {key: tensors[key] for key in names[k::n_parts]}
        write_gguf(folder / f"{name}-{k + 1:05}-of-{n_parts:05}.gguf", (metadata if k == 0 else {}) | fields, here)
    return folder / f"{name}-00001-of-{n_parts:05}.gguf"
