"""The text of the small model: the sources of the running Python's standard library, and its tokens.

Owns nothing.  Invariant: equal Python versions give equal files in equal order, and a file is either
trained on or held out, whatever the seed.  Corresponds to nothing in ggml.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END", "Source", "encode", "sources", "train_tokenizer"]

END = "<|endoftext|>"
"""Begins and ends a document: the model's bos and eos, id 0."""

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
TESTS = {"test", "tests", "idle_test"}
MOSTLY_DATA = {"encodings", "pydoc_data", "lib2to3", "entities.py", "html5.py"}
"""Tables and prose: long, and little to learn from."""

HELD_OUT_OF = 20
"""One file in so many is held out."""

Source = tuple[str, str]
"""A file's name below the library's folder, and its text."""


def sources() -> tuple[list[Source], list[Source]]:
    """The files to train on and those held out, each in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    kept: tuple[list[Source], list[Source]] = ([], [])
    left_out = NOT_LIBRARY | TESTS | MOSTLY_DATA
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("config-"))
        for name in sorted(files):
            # Files that the build generates about its machine are no sources.
            if not name.endswith(".py") or name in left_out or name.startswith("_sysconfigdata"):
                continue
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                kept[hashlib.sha256(relative.encode()).digest()[0] % HELD_OUT_OF == 0].append((relative, text))
    return kept


def train_tokenizer(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A byte-level BPE that splits text as GPT-2 does (`tokenizer.ggml.pre` "gpt-2")."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def encode(tokenizer: Tokenizer, files: Iterable[Source]) -> np.ndarray:
    """The files' ids [n] as uint16, an END before each and at the end."""
    end = tokenizer.token_to_id(END)
    ids = [end]
    for encoding in tokenizer.encode_batch([text for _, text in files]):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.array(ids, np.uint16)
