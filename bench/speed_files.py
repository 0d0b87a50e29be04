"""The models that speed.py runs: 162 million random weights laid out as a small Llama, in every format of the table.

The f32 file is made by this package; llama.cpp's own quantiser makes the others from it, so that both engines read the
files that users have.  Files are kept in a folder and made once.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ggml_sched.llama import random_llama

__all__ = ["FORMATS", "N_VOCAB", "make"]

N_VOCAB = 32000
FORMATS = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2, "q4_K": 14}
"""llama.cpp's number (llama_ftype) for each format."""


def make(folder: Path, name: str) -> Path:
    """The path of the model in a format; made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llama-162m-{name}.gguf"
    if not path.exists():
        if name == "f32":
            path.write_bytes(random_llama(n_vocab=N_VOCAB, n_embd=768, n_layer=12, n_head=12, n_head_kv=12, n_ff=2048,
                                          n_ctx=2048, extra={"tokenizer.ggml.model": "no_vocab"}))
        else:
            quantise(make(folder, "f32"), path, FORMATS[name])
    return path


def quantise(source: Path, path: Path, number: int) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure = number, True
    partial = path.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not make {path.name}")
    partial.rename(path)
