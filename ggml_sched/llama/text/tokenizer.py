"""Text to token ids and back, for a vocabulary from a GGUF file.

Special tokens are cut out first, the text between them is merged by the vocabulary's model (SPM or BPE), and the ids
are joined.  Invariant: the ids equal llama.cpp's.  Corresponds to llama.cpp's llama_tokenize and llama_token_to_piece.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from ggml_sched.errors import shown
from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.gguf import GGUFFile, open_gguf
from ggml_sched.llama.text.bpe import Bpe
from ggml_sched.llama.text.spm import Spm
from ggml_sched.llama.text.stream import Stream
from ggml_sched.llama.text.vocabulary import TokenType, Vocabulary, special_ids

if TYPE_CHECKING:
    from ggml_sched.llama.gguf import Source

__all__ = ["Tokenizer"]

HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
# The characters of C's isspace: phi-3's special tokens remove these from the beginning of the text that follows.
ASCII_SPACE = " \t\n\v\f\r"


class Tokenizer:
    """Encodes and decodes as the model in the file expects.

        tokenizer = Tokenizer.from_gguf("model.gguf")
        ids = tokenizer.encode("Hello world")       # with BOS where the file says so
        text = tokenizer.decode(ids)                # without special tokens

    `n_vocab`; `bos_id`, `eos_id`, `eot_id`, `eom_id`, `unk_id`, `pad_id` (or None); `eos_ids`, a frozenset of all
    ids after which a generation is over.  Immutable and safe to use from several threads.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._model = Spm(vocabulary) if vocabulary.model == "spm" else Bpe(vocabulary)
        self.n_vocab: int = len(vocabulary.ids)
        self.model: str = vocabulary.model
        self.pre: str = vocabulary.pre
        self.bos_id: int | None = vocabulary.bos_id
        self.eos_id: int | None = vocabulary.eos_id
        self.eot_id: int | None = vocabulary.eot_id
        self.eom_id: int | None = vocabulary.eom_id
        self.unk_id: int | None = vocabulary.unk_id
        self.pad_id: int | None = vocabulary.pad_id
        self.eos_ids: frozenset[int] = vocabulary.eos_ids
        self.add_bos: bool = vocabulary.add_bos
        self.add_eos: bool = vocabulary.add_eos
        self.add_space_prefix: bool = vocabulary.add_space_prefix
        # Special tokens by their first letter, longest first: a text that has none of these letters, like most texts,
        # need not be searched for each token.
        types = vocabulary.types
        self._special: dict[str, list[tuple[str, int, bool]]] = {}
        specials = [(vocabulary.ids.text(i), i) for i in special_ids(types)]
        for text, i in sorted(specials, key=lambda token: -len(token[0])):
            self._special.setdefault(text[0], []).append((text, i, int(types[i]) in HIDDEN))
        self._first_letters = re.compile(
            "[" + "".join(map(re.escape, sorted(self._special))) + "]") if self._special else None

    @classmethod
    def from_gguf(cls, source: Source | GGUFFile) -> Tokenizer:
        """The tokenizer of a path, bytes, a binary file object, or an open GGUFFile (left open).

        Raises TokenizerError naming the metadata field for a vocabulary that is missing, wrong or not supported,
        FileFormatError for a file that is not GGUF.
        """
        if isinstance(source, GGUFFile):
            return cls(Vocabulary.from_gguf(source))
        with open_gguf(os.fspath(source) if isinstance(source, os.PathLike) else source) as file:
            return cls(Vocabulary.from_gguf(file))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], name: str = "<metadata>") -> Tokenizer:
        """The tokenizer of a file's metadata (keys `tokenizer.ggml.*`); `name`: the file's name in errors."""
        return cls(Vocabulary.from_metadata(metadata, name))

    # -- text to ids ---------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        `add_special`: put BOS before the text and EOS after it, where the file says so.  `parse_special`: "<|im_end|>"
        and other control tokens in the text become these tokens; left False, a user's text cannot fake them.
        User-defined tokens are always found.  Only str is taken (TypeError).  A lone surrogate is no character:
        TokenizerError.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text is a str, not {type(text).__name__}")
        _check_characters(text)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        ids += self._ids_of(self._cut(text, parse_special))
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of a prompt.  Names of control tokens become these tokens, except where the character `mark` is inside.

        The marks are then removed; no BOS and no EOS is added.  TokenizerError for a lone surrogate.
        """
        _check_characters(text.replace(mark, ""))
        parts: list[str | int] = []
        for part in self._cut(text, True):
            parts += self._cut(part.replace(mark, ""), False) if isinstance(part, str) and mark in part else [part]
        return self._ids_of(parts)

    @property
    def control_texts(self) -> list[str]:
        """The texts that `parse_special` turns into control tokens."""
        return [text for tokens in self._special.values() for text, _, hidden in tokens if hidden]

    def _ids_of(self, parts: list[str | int]) -> list[int]:
        """The ids of the pieces of text and of the special tokens, already ids, into which `_cut` has cut a text."""
        ids: list[int] = []
        after_special = True
        for part in parts:
            if isinstance(part, str):
                ids += self._model.encode(part, after_special)
                after_special = False
            else:
                ids.append(part)
                after_special = True
        return ids

    def _cut(self, text: str, parse_special: bool) -> list[str | int]:
        """The text cut at its special tokens: pieces of text, and ids of the special tokens between them."""
        if not text:
            return []
        parts: list[str | int] = [text]
        if self._first_letters is None:
            return parts
        tokens = [token for letter in set(self._first_letters.findall(text)) for token in self._special[letter]
                  if (parse_special or not token[2]) and token[0] in text]
        for token, i, _ in sorted(tokens, key=lambda token: (-len(token[0]), token[1])):
            strip = i in self._vocabulary.strips_right
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, str) and token in part:
                    first, *others = part.split(token)
                    cut.append(first)
                    for other in others:
                        cut += (i, other.lstrip(ASCII_SPACE) if strip else other)
                else:
                    cut.append(part)
            parts = [part for part in cut if part != ""]
        return parts

    # -- ids to text ---------------------------------------------------------------

    def check_id(self, token: SupportsIndex) -> int:
        """A token id as an int; TypeError for what is no integer, TokenizerError (a ValueError) out of range."""
        try:
            number = operator.index(token)
        except TypeError:
            raise TypeError(f"a token id is an int, not {type(token).__name__}") from None
        if not 0 <= number < self.n_vocab:
            raise TokenizerError(f"token id {shown(number)} is not one of 0 to {self.n_vocab - 1}")
        return number

    def token_bytes(self, token: int, skip_special: bool = False) -> bytes:
        """The bytes of a token, possibly a part of a character; none for a control token with `skip_special`."""
        token = self.check_id(token)
        kind, text = int(self._vocabulary.types[token]), self._vocabulary.ids.text(token)
        if kind in HIDDEN:
            return b"" if skip_special else text.encode()
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        return self._model.token_bytes(text, kind)

    def token_text(self, token: int) -> str:
        """The text of a token as in the file."""
        return self._vocabulary.ids.text(self.check_id(token))

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text in the file, or None."""
        return self._vocabulary.ids.get(text)

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark for the model rather than text: `decode` skips it."""
        return int(self._vocabulary.types[self.check_id(token)]) in HIDDEN

    def decode(self, ids: Iterable[int], skip_special: bool = True, continuing: bool = False) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        The space that SPM vocabularies put before a text is removed, except when the ids are `continuing` an earlier
        text.
        """
        # Items of bytes are ints, too, but are the letters of a text rather than ids.
        if isinstance(ids, (str, bytes, bytearray)) or not hasattr(ids, "__iter__") or getattr(ids, "ndim", 1) == 0:
            raise TypeError(f"token ids are a sequence of ints, not {shown(ids)}")
        stream = self.stream(skip_special, continuing)
        return stream.feed(*ids) + stream.flush()

    def stream(self, skip_special: bool = True, continuing: bool = False) -> Stream:
        """A decoder of ids one by one; `Stream.feed(id) -> str`, `Stream.flush() -> str`."""
        return Stream(self, skip_special, continuing)

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[Vocabulary]]:
        return Tokenizer, (self._vocabulary,)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.model} {self.pre!r}: {self.n_vocab} tokens>"


def _check_characters(text: str) -> None:
    """Raise TokenizerError if a text has a lone surrogate, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"character {error.start} of the text is the lone surrogate "
                             f"U+{ord(text[error.start]):04X}, which no bytes stand for") from None
