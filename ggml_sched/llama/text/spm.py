"""SentencePiece's BPE, as in Llama, Mistral, Gemma and Phi-3: merges by score, bytes for letters that are no token.

Files have a score for each token and no list of merges.  A text begins as parts of one letter; of all neighbouring
parts whose texts together are a token, the pair whose token has the highest score is merged first, the leftmost of
equal ones, until no such pair is left.  Corresponds to llama.cpp's llm_tokenizer_spm.
"""

from __future__ import annotations

import numpy as np

from ggml_sched.llama._strings import ScoreMerger
from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary

__all__ = ["Spm"]

SPACE = "\u2581"


class Spm:
    """`encode(text, after_special) -> ids` of a text without special tokens; `token_bytes(text) -> bytes`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._prefix, ids = vocabulary.add_space_prefix, vocabulary.ids
        bytes_ = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._merger = ScoreMerger(ids, vocabulary.scores,
                                   np.array([-1 if i is None else i for i in bytes_], np.int32),
                                   -1 if vocabulary.unk_id is None else vocabulary.unk_id)

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._prefix and after_special:
            text = " " + text
        return self._merger.encode(text.replace(" ", SPACE))

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind == TokenType.NORMAL:
            return text.replace(SPACE, " ").encode()
        if kind == TokenType.BYTE:
            byte = byte_of(text)
            return text.encode() if byte is None else bytes((byte,))
        return b""


def byte_of(text: str) -> int | None:
    """The byte NN of a token text "<0xNN>", None for another text."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            return None
    return None
