"""Byte-level BPE, as in GPT-2 and most later models: cut a text into words, then merge pairs of tokens by rank.

The `tokenizers` library cuts words; `_strings` merges, because making the library's tables of merges takes longer than
loading a model.  Invariant: ids are those of the vocabulary.  Corresponds to llama.cpp's llm_tokenizer_bpe.
"""

from __future__ import annotations

from ggml_sched.llama._strings import RankMerger
from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.gguf import Array
from ggml_sched.llama.metadata import shown
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS, of_unicode_15
from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary

__all__ = ["Bpe", "byte_letters"]


def byte_letters() -> dict[str, int]:
    """{letter: byte}: GPT-2 writes each byte of a token as a letter, printable bytes as themselves, others as letters
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


class Bpe:
    """`encode(text) -> ids` of a text without special tokens; `token_bytes(text) -> bytes`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            import tokenizers as library
        except ImportError as error:
            raise TokenizerError(
                f"BPE vocabularies need the 'tokenizers' library, which is not there ({error}): "
                "pip install 'ggml-sched[llama]'") from error
        pre = PRETOKENIZERS[vocabulary.pre]
        assert vocabulary.merges is not None
        self._merger = RankMerger(vocabulary.ids, *vocabulary.merges.strings, pre.whole_words)
        if self._merger.wrong >= 0:
            raise _wrong_merge(vocabulary, vocabulary.merges, self._merger.wrong)
        split, letters = library.pre_tokenizers.Split, library.pre_tokenizers.ByteLevel
        self._words = library.pre_tokenizers.Sequence([
            *(split(library.Regex(of_unicode_15(pattern)), "isolated") for pattern in pre.patterns),
            letters(add_prefix_space=False, use_regex=False)])
        self._bytes = byte_letters()

    def encode(self, text: str, after_special: bool) -> list[int]:
        return self._merger.encode(self._words.pre_tokenize_str(text))

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind != TokenType.NORMAL:
            return b""
        letters = self._bytes
        try:
            return bytes([letters[letter] for letter in text])
        except KeyError:  # a letter that stands for no byte stands for itself
            return b"".join(bytes((letters[c],)) if c in letters else c.encode() for c in text)


def _wrong_merge(vocabulary: Vocabulary, merges: Array, i: int) -> TokenizerError:
    field, line = f"tokenizer.ggml.merges[{i}]", str(merges[i])
    at = line.find(" ", 1)
    if at < 0 or at == len(line) - 1:
        return TokenizerError(f"{vocabulary.name}: {field}: is {shown(line)}, not two tokens with a space between",
                              field)
    left, right = line[:at], line[at + 1 :]
    missing = next((text for text in (left, right, left + right) if text not in vocabulary.ids), line)
    return TokenizerError(f"{vocabulary.name}: {field}: {left!r} and {right!r} do not fit the vocabulary: "
                          f"{missing!r} is no token", field)
