"""SentencePiece's BPE, as in Llama, Mistral, Gemma and Phi-3: merges by score, bytes for letters that are no token.

Files have a score for each token and no list of merges.  A text begins as parts of one letter; of all neighbouring
parts whose texts together are a token, the pair whose token has the highest score is merged first, the leftmost of
equal ones, until no such pair is left.  Corresponds to llama.cpp's llm_tokenizer_spm.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary

__all__ = ["Spm"]

SPACE = "\u2581"


class Spm:
    """`encode(text, after_special) -> ids` of a text without special tokens; `token_bytes(text) -> bytes`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._prefix, self._ids = vocabulary.add_space_prefix, vocabulary.ids
        scores = vocabulary.scores.tolist()
        self._costs = {text: -scores[i] for text, i in vocabulary.ids.items()}
        self._bytes = [vocabulary.ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._unknown = [] if vocabulary.unk_id is None else [vocabulary.unk_id]

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._prefix and after_special:
            text = " " + text
        text = text.replace(" ", SPACE)
        n, costs = len(text), self._costs
        # The text of the part that begins at each letter; "" for a letter that was merged to the part before.
        parts = list(text)
        after, before = [*range(1, n), -1], [*range(-1, n - 1)]
        queue = [(costs[pair], i, i + 1, 2) for i in range(n - 1) if (pair := text[i : i + 2]) in costs]
        heapify(queue)
        while queue:
            _, left, right, length = heappop(queue)
            # Skip a pair of which another merge has meanwhile changed either part.
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
                continue
            parts[left] = merged = parts[left] + parts[right]
            parts[right] = ""
            follower, leader = after[right], before[left]
            after[left] = follower
            if follower >= 0:
                before[follower] = left
                pair = merged + parts[follower]
                if pair in costs:
                    heappush(queue, (costs[pair], left, follower, len(pair)))
            if leader >= 0:
                pair = parts[leader] + merged
                if pair in costs:
                    heappush(queue, (costs[pair], leader, left, len(pair)))
        ids = self._ids
        return [i for part in parts if part for i in ((ids[part],) if part in ids else self._fallback(part))]

    def _fallback(self, text: str) -> list[int]:
        """The ids for a letter that is no token: those of its bytes in UTF-8, or the unknown token if one is missing.
        """
        letter = text.encode()
        ids = [i for byte in letter if (i := self._bytes[byte]) is not None]
        return ids if len(ids) == len(letter) else self._unknown

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
