"""The models that speed.py and first_token.py run.

162 and 369 million random weights laid out as small Llamas, in every format of the table; trained models that are
installed; and small models with large vocabularies.  The f32 file is made by this package; llama.cpp's own quantiser
makes the other formats from it, so that both engines read the files that users have.  Files are kept in a folder and
made once.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from pathlib import Path

import numpy as np

from ggml_sched.llama import ModelNotInstalled, installed_model, random_llama
from ggml_sched.llama.text.bpe import byte_letters

__all__ = ["FORMATS", "N_VOCAB", "OTHERS", "SIZES", "VOCABULARIES", "make", "make_vocabulary", "real"]

N_VOCAB = 32000
FORMATS = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2, "q4_K": 14}
"""llama.cpp's number (llama_ftype) for each format of the tables."""
OTHERS = {"q4_1": 3, "q5_0": 8, "q5_1": 9, "q2_K": 10, "q3_K": 11, "q5_K": 16, "q6_K": 18, "iq4_nl": 25, "iq4_xs": 30}
"""The same for further formats that can be asked for."""


SIZES = {
    "162M": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_head_kv": 12, "n_ff": 2048},
    "369M": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_head_kv": 8, "n_ff": 2816},
}
"""{number of weights: arguments of `random_llama`}."""


def make(folder: Path, name: str, size: str = "162M") -> Path:
    """The path of the model of a size in a format; made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"llama-{size.lower()}-{name}.gguf"
    if not path.exists():
        if name == "f32":
            path.write_bytes(random_llama(n_vocab=N_VOCAB, n_ctx=2048, extra={"tokenizer.ggml.model": "no_vocab"},
                                          **SIZES[size]))
        else:
            quantise(make(folder, "f32", size), path, (FORMATS | OTHERS)[name])
    return path


REAL = {"SmolLM2-135M-Instruct q4_1": "smollm2"}
"""{title: name for `installed_model`}."""


def real() -> dict[str, Path]:
    """The files of the trained models that are installed, by title."""
    found = {}
    for title, name in REAL.items():
        with contextlib.suppress(ModelNotInstalled):
            found[title] = installed_model(name)
    return found


VOCABULARIES = {"SPM of 262,144": ("llama", 262144), "BPE of 151,936": ("gpt2", 151936),
                "BPE of 262,144": ("gpt2", 262144)}
"""{title: (tokenizer.ggml.model, tokens)}, each in a model of six layers, 256 wide."""


def make_vocabulary(folder: Path, title: str) -> Path:
    """The path of a model with a large vocabulary; made if it is not there."""
    model, n = VOCABULARIES[title]
    path = folder / f"vocabulary-{model}-{n}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = random_llama(n_vocab=n, n_embd=256, n_layer=6, n_head=4, n_head_kv=4, n_ff=512, n_ctx=2048, tied=True,
                            dtype="q8_0", extra={f"tokenizer.ggml.{key}": value
                                                 for key, value in vocabulary(model, n).items()})
        partial = path.with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(path)
    return path


def vocabulary(model: str, n: int) -> dict:
    """Metadata of n tokens: letters, and words that grow from two shorter tokens each, as trained vocabularies do."""
    rng = random.Random(1)
    if model == "llama":
        marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        types = [2, 3, 3] + [6] * 256
        letters = [*map(chr, (*range(97, 123), 0x2581, *range(0x430, 0x450)))]
        others = [*map(chr, range(0x4E00, 0x4E00 + 4000))]
    else:
        marks, types = ["<|endoftext|>", "<|im_end|>"], [3, 3]
        letters, others = list(byte_letters()), []
    words, seen, merges = letters.copy(), {*letters}, []
    while len(marks) + len(words) + len(others) < n:
        left, right = rng.choice(words), rng.choice(words if rng.random() < 0.5 else letters)
        word = left + right
        if len(word) <= 12 and word not in seen and not (model == "llama" and right.startswith("\u2581")):
            seen.add(word)
            words.append(word)
            merges.append(f"{left} {right}")
    tokens = [*marks, *words, *others]
    found = {"model": model, "tokens": tokens,
             "token_type": np.array(types + [1] * (n - len(types)), np.int32)}
    if model == "llama":
        rest = np.arange(n - len(marks), dtype=np.float32)
        return found | {"scores": np.concatenate([np.zeros(len(marks), np.float32), -rest])}
    return found | {"pre": "qwen2", "merges": merges, "bos_token_id": 0, "eos_token_id": 1}


def quantise(source: Path, path: Path, number: int) -> None:
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure = number, True
    partial = path.with_suffix(".partial")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not make {path.name}")
    partial.rename(path)
