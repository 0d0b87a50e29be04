"""Makes tests/data/vocab/samples.json: two small vocabularies, texts, and the ids that llama.cpp gives for them.

    python tests/llama/make_tokenizer_samples.py ggml-vocab-gpt-2.gguf ggml-vocab-llama-spm.gguf

Needs llama-cpp-python, and the vocabularies that llama.cpp comes with.  The small ones keep the tokens that were
merged first; the BPE one is read once with each pre-tokenizer that we know.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from ggml_sched.llama import open_gguf, write_gguf
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS

OUT = Path(__file__).parents[1] / "data" / "vocab" / "samples.json"
N_MERGED = 700
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
TEXTS = [
    "", " ", "  ", "\t", "\n", " \n\n  \n", "Hello world", " Hello World!", "I'm sure they'LL say 'don't'S",
    "3 33 333 3333 33333", "w048 7tuijk dsdfhu", "\u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b",
    "\u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74", "\U0001f680 (normal) \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "a" + " " * 20 + "b", "def f(x):\n    return x\n\n\n", "e\u0301\u0301 \u0915\u094d\u0937 \u0e01\u0e31",
    "Caf\u00c9 \u00fcber na\u00efve \u00c4pfel", "http://www.example.com/?a=1&b=2#c", "!!!??? ... \u2014 \u00abx\u00bb",
    "\u2003\u3000\u00a0\u200b wide", "<|im_start|>user\nHi<|im_end|>", "ab c  ab c", "<0x41><s></s>",
    "x\u2581y \u0120", "\u0664\u096a \u00bd \u00b2 \u2167", "\u3042\u3044\u30a2 \ud55c\uad6d\uc5b4",
    "HELLO Hello hELLO", "\r\n\r\n a\r b", "=" * 17 + "-" * 9, "\x01\x7f\x85\x1c",
]


def random_texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)
    alphabet = ["a", "b", "A", "E", " ", " ", "\n", "'s", "'T", "1", "23", ".", "\u00e9", "\u4e2d", "\U0001f600", "  "]
    return ["".join(rng.choices(alphabet, k=rng.randint(3, 14))) for _ in range(n)]


def small_bpe(path: str) -> dict:
    metadata = open_gguf(path).metadata
    merges = metadata["tokenizer.ggml.merges"].tolist()[:N_MERGED]
    tokens = [text for text in metadata["tokenizer.ggml.tokens"] if len(text) == 1]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys(tokens)) + [*SPECIAL, "ab c"]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - 4) + [CONTROL] * 3 + [USER_DEFINED],
            "tokenizer.ggml.bos_token_id": tokens.index(SPECIAL[0]),
            "tokenizer.ggml.eos_token_id": tokens.index(SPECIAL[0])}


def small_spm(path: str) -> dict:
    metadata = open_gguf(path).metadata
    rows = list(zip(*(metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")), strict=True))
    kept = rows[: 259 + N_MERGED] + [
        row for row in rows[259 + N_MERGED :] if set(row[0]) == {"\u2581"} or len(row[0]) == 1 and ord(row[0]) < 0x250]
    kept += [*((text, -1000.0, CONTROL) for text in SPECIAL), ("ab c", -1000.0, USER_DEFINED)]
    tokens, scores, types = map(list, zip(*kept, strict=True))
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types}


def ids_of(metadata: dict, texts: list[str], **options) -> list[list[int]]:
    metadata = {"general.architecture": "llama", **metadata}
    metadata["tokenizer.ggml.token_type"] = np.array(metadata["tokenizer.ggml.token_type"], np.int32)
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(file.name, metadata, {})
        model = Llama(file.name, vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), **options) for text in texts]


def main() -> None:
    bpe, spm = small_bpe(sys.argv[1]), small_spm(sys.argv[2])
    texts = TEXTS + random_texts(1, 9)
    cases = []

    def add(vocabulary: str, metadata: dict, changed: dict, add_special: bool, parse_special: bool) -> None:
        ids = ids_of(metadata | changed, texts, add_bos=add_special, special=parse_special)
        cases.append({"vocabulary": vocabulary, "changed": changed, "add_special": add_special,
                      "parse_special": parse_special, "ids": ids})

    seen = set()
    for name, pre in PRETOKENIZERS.items():
        if pre not in seen:
            seen.add(pre)
            add("bpe", bpe, {"tokenizer.ggml.pre": name}, False, False)
    add("bpe", bpe, {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_eos_token": True}, True, True)
    add("spm", spm, {}, False, False)
    add("spm", spm, {}, True, True)
    add("spm", spm, {"tokenizer.ggml.add_space_prefix": False}, True, False)
    add("spm", spm, {"general.name": "Phi-3 mini"}, False, True)
    rng = random.Random(2)
    add("spm", spm, {"tokenizer.ggml.scores": [float(rng.randrange(9)) for _ in spm["tokenizer.ggml.scores"]]},
        False, False)
    OUT.write_text(json.dumps({"texts": texts, "bpe": bpe, "spm": spm, "cases": cases}, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size} bytes, {len(cases)} cases of {len(texts)} texts")


if __name__ == "__main__":
    main()
