"""SentencePiece's BPE, as in Llama, Mistral, Gemma and Phi-3: merges by score, bytes for letters that are no token.

Owns the order of merges.  Files have a score for each token and no merges: of all neighbours whose
texts together are a token, the pair whose token has the highest score merges first, the leftmost of
equal ones.  Invariant: the library receives merges in an order that has exactly this effect, or it is not used:
where tokens that can be merged share a score, there may be no such order, and `Exact` merges instead.
Corresponds to llama.cpp's llm_tokenizer_spm.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from ggml_sched.llama.text.bpe import import_tokenizers
from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary

__all__ = ["Exact", "Spm"]

SPACE = "\u2581"


class Spm:
    """`encode(text, after_special) -> ids` of a text without special tokens; `token_bytes(text) -> bytes`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        library = import_tokenizers()
        self._prefix = vocabulary.add_space_prefix
        ids = vocabulary.ids
        self._n_vocab = len(vocabulary.texts)
        self._fallback = Fallback(vocabulary, ids)
        # The library merges tokens only; in SPM a letter that is no token may be a part of one.
        letters = sorted(set("".join(vocabulary.texts)) - ids.keys())
        self._letters = letters
        symbols = ids | {letter: self._n_vocab + i for i, letter in enumerate(letters)}
        merges, tied = merges_of(vocabulary, symbols)
        self._exact = Exact(vocabulary, ids, self._fallback) if tied else None
        self._library: Any = None
        if not tied:
            unknown = vocabulary.texts[vocabulary.unk_id] if vocabulary.unk_id is not None else None
            self._library = library.Tokenizer(library.models.BPE(
                vocab=symbols, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=False))

    def encode(self, text: str, after_special: bool) -> list[int]:
        if self._prefix and after_special:
            text = " " + text
        text = text.replace(" ", SPACE)
        if self._exact is not None:
            return self._exact.encode(text)
        ids = self._library.encode(text, add_special_tokens=False).ids
        if self._letters and max(ids, default=0) >= self._n_vocab:
            ids = [j for i in ids for j in (
                (i,) if i < self._n_vocab else self._fallback(self._letters[i - self._n_vocab]))]
        return ids

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


class Fallback:
    """Ids for a letter that is no token: those of its bytes, or the unknown token's."""

    def __init__(self, vocabulary: Vocabulary, ids: dict[str, int]) -> None:
        self._bytes = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
        self._unknown = [] if vocabulary.unk_id is None else [vocabulary.unk_id]

    def __call__(self, text: str) -> list[int]:
        ids = [i for byte in text.encode() if (i := self._bytes[byte]) is not None]
        return ids if len(ids) == len(text.encode()) else self._unknown


def merges_of(vocabulary: Vocabulary, symbols: dict[str, int]) -> tuple[list[tuple[str, str]], bool]:
    """All pairs of symbols that form a token, in the order of merging; and whether there is no such order."""
    texts, types = vocabulary.texts, vocabulary.types
    merges = Merges()
    order = np.argsort(-vocabulary.scores, kind="stable")
    scores = vocabulary.scores[order].tolist()
    group: dict[str, list[tuple[str, str]]] = {}
    last = None
    for score, i in zip(scores, order.tolist(), strict=True):
        text = texts[i]
        # A user-defined token is cut out of the text before merging; only one of spaces can still result from merges.
        if len(text) < 2 or symbols[text] != i or types[i] == TokenType.USER_DEFINED and SPACE not in text:
            continue
        ways = [(left, right) for k in range(1, len(text))
                if (left := text[:k]) in symbols and (right := text[k:]) in symbols]
        if not ways:
            continue
        if score != last:
            merges.add(group)
            group, last = {}, score
        group[text] = ways
    merges.add(group)
    return merges.ordered, merges.tied


class Merges:
    """Merges in order, by groups of tokens with equal scores; `tied` once no order has the effect "leftmost first"."""

    def __init__(self) -> None:
        self.ordered: list[tuple[str, str]] = []
        self.tied = False
        self._parts: set[str] = set()
        self._n_seen = 0

    def add(self, group: dict[str, list[tuple[str, str]]]) -> None:
        if len(group) > 1 and not self.tied:
            runs = self._runs(group)
            if runs:
                self.ordered += runs
                return
            self.tied = not self._apart(group)
        for ways in group.values():
            self.ordered += ways

    @staticmethod
    def _runs(group: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
        """The merges of a group whose tokens are runs of 2, 3, 4, ... of one letter; [] for another group.

        Llama's runs of spaces are such a group.  The leftmost run grows letter by letter until no longer run is a
        token; an order that prefers the longest left side has the same effect.
        """
        runs = sorted(group, key=len, reverse=True)
        letter = runs[0][0]
        if [len(text) for text in runs] != list(range(len(runs) + 1, 1, -1)) or set("".join(runs)) != {letter}:
            return []
        growing = [(text[1:], letter) for text in runs]
        return growing + [way for ways in group.values() for way in ways if way[1] != letter]

    def _apart(self, group: dict[str, list[tuple[str, str]]]) -> bool:
        """Whether the order in a group does not matter: no two of its merges can share a symbol, and none makes
        a symbol that a better merge waits for.  The control tokens of many vocabularies are such a group."""
        lefts = {left for ways in group.values() for left, _ in ways}
        rights = {right for ways in group.values() for _, right in ways}
        for left, right in self.ordered[self._n_seen :]:
            self._parts.add(left)
            self._parts.add(right)
        self._n_seen = len(self.ordered)
        return lefts.isdisjoint(rights) and self._parts.isdisjoint(group)


class Exact:
    """Merges by the scores themselves, in Python: slower, and exact for all scores."""

    def __init__(self, vocabulary: Vocabulary, ids: dict[str, int], fallback: Fallback) -> None:
        self._scores = vocabulary.scores.tolist()
        self._ids, self._fallback = ids, fallback

    def encode(self, text: str) -> list[int]:
        parts = list(text)
        after = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, int]] = []
        for i in range(len(parts) - 1):
            self._offer(queue, parts, i, i + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            # The entry is stale if another merge has used either side.
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            if before[left] >= 0:
                self._offer(queue, parts, before[left], left)
            if after[left] >= 0:
                self._offer(queue, parts, left, after[left])
        return [i for part in parts if part for i in self._ids_of(part)]

    def _offer(self, queue: list, parts: list[str], left: int, right: int) -> None:
        text = parts[left] + parts[right]
        token = self._ids.get(text)
        if token is not None:
            heapq.heappush(queue, (-self._scores[token], left, right, len(text)))

    def _ids_of(self, part: str) -> list[int]:
        token = self._ids.get(part)
        return self._fallback(part) if token is None else [token]
