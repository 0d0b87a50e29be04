"""Byte-level BPE, as in GPT-2 and most later models: cut a text into words, then merge pairs of tokens by rank.

The `tokenizers` library does it.  Invariant: ids are those of the vocabulary.  Corresponds to llama.cpp's
llm_tokenizer_bpe.
"""

from __future__ import annotations

from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS, of_unicode_15
from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary

__all__ = ["Bpe", "byte_letters"]


def byte_letters() -> dict[str, int]:
    """{letter: byte}: GPT-2 writes each byte of a token as a letter, printable ones as themselves, others from U+0100.
    """
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
                f"BPE is computed by the 'tokenizers' library, which is not there ({error}): "
                "pip install 'ggml-sched[llama]'") from error
        pre = PRETOKENIZERS[vocabulary.pre]
        try:
            model = library.models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges, ignore_merges=pre.whole_words)
        except Exception as error:
            raise _wrong_merge(vocabulary, error) from error
        self._library = library.Tokenizer(model)
        split, letters = library.pre_tokenizers.Split, library.pre_tokenizers.ByteLevel
        self._library.pre_tokenizer = library.pre_tokenizers.Sequence([
            *(split(library.Regex(of_unicode_15(pattern)), "isolated") for pattern in pre.patterns),
            letters(add_prefix_space=False, use_regex=False)])
        self._bytes = byte_letters()

    def encode(self, text: str, after_special: bool) -> list[int]:
        return self._library.encode(text, add_special_tokens=False).ids

    def token_bytes(self, text: str, kind: int) -> bytes:
        if kind != TokenType.NORMAL:
            return b""
        letters = self._bytes
        try:
            return bytes([letters[letter] for letter in text])
        except KeyError:  # a letter that stands for no byte stands for itself
            return b"".join(bytes((letters[c],)) if c in letters else c.encode() for c in text)


def _wrong_merge(vocabulary: Vocabulary, error: Exception) -> TokenizerError:
    field = "tokenizer.ggml.merges"
    for i, (left, right) in enumerate(vocabulary.merges):
        for text in (left, right, left + right):
            if text not in vocabulary.ids:
                field = f"{field}[{i}]"
                return TokenizerError(f"{vocabulary.name}: {field}: {left!r} and {right!r} do not fit the "
                                      f"vocabulary: {text!r} is no token", field)
    return TokenizerError(f"{vocabulary.name}: {field}: {error}", field)
