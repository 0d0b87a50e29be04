"""A vocabulary as GGUF metadata holds it: `tokenizer.ggml.*`, checked.

Owns which token is what: texts, types, scores, merges, special ids, end-of-generation ids.
Invariant: every id of a `Vocabulary` lies inside it, and every array has its length, so that
nothing behind it looks at metadata again.  Corresponds to llama.cpp's llama_vocab::impl::load.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.gguf import Array, GGUFFile, Kind
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS

__all__ = ["TokenType", "Vocabulary"]

PREFIX = "tokenizer.ggml."
MAX_TOKEN_CHARS = 512
"""No token is longer; the longest of real vocabularies are runs of 128 spaces."""
MAX_CHARS, CHARS_PER_TOKEN = 1 << 20, 32
"""All tokens together: at most this many characters, and this many more for each token."""


class TokenType(enum.IntEnum):
    """What a token is for, numbered as in GGUF."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that mean the same in every vocabulary that has them.  Files often mark them as normal tokens, and then a
# model never stops, so they are control tokens whatever the file says.
END_OF_GENERATION = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>"))
FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens between files and snippets: a model that writes one is done with the snippet."""
FILL_IN = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
    "<|code_prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
    "\u2581<SUF>", "<|code_suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
    "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>", "<|code_middle|>"))
SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
"""The frame of gpt-oss's answers: shown, or its channels run into each other."""


class Fields:
    """Typed, checked reads of metadata; every error names the field."""

    def __init__(self, metadata: Mapping, name: str) -> None:
        self.metadata, self.name = metadata, name

    def fail(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(f"{self.name}: {key}: {what}", key)

    def string(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.fail(key, "is missing: the file holds no tokenizer")
        if not isinstance(value, str):
            raise self.fail(key, f"is {shown(value)}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {shown(value)}, not a bool")
        return value

    def token_id(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        value = self.metadata.get(key)
        if value is None:
            return default if default is not None and default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"is {shown(value)}, not a token id")
        if value == 0xFFFFFFFF:  # how writers say "none" in an unsigned field
            return None
        if not 0 <= value < n_vocab:
            raise self.fail(key, f"is {value}, the vocabulary has {n_vocab} tokens")
        return value

    def strings(self, key: str, missing: str) -> list[str]:
        value = self.metadata.get(key)
        if value is None:
            raise self.fail(key, missing)
        if isinstance(value, Array):
            if value.kind is not Kind.STRING:
                raise self.fail(key, f"is an array of {value.kind.name}, not of strings")
            return value.tolist()
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.fail(key, f"is {shown(value)}, not an array of strings")
        for i, element in enumerate(value):
            if not isinstance(element, str):
                raise self.fail(f"{key}[{i}]", f"is {shown(element)}, not a string")
        return list(value)

    def numbers(self, key: str, n: int, kind: str) -> np.ndarray | None:
        """An array of n numbers, of integers ("iu") or floats ("f"), or None where there is none."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, Array):
            try:
                value = value.numpy()
            except TypeError:
                raise self.fail(key, f"is an array of {value.kind.name}, not of numbers") from None
        try:
            numbers = np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.fail(key, f"is not an array of numbers: {error}") from error
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in kind):
            raise self.fail(key, f"is {shown(value)}, not an array of {'floats' if 'f' in kind else 'integers'}")
        if len(numbers) != n:
            raise self.fail(key, f"has {len(numbers)} elements, the vocabulary has {n} tokens")
        return numbers


def shown(value) -> str:
    """A value in an error message: short, whatever it is."""
    if isinstance(value, Array):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, bool) or isinstance(value, int) and abs(value) < 1 << 64 or isinstance(value, float):
        return repr(value)
    return f"a {type(value).__name__}"


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and what is known of them.

    `model` is "spm" or "bpe"; `texts` are as in the file (U+2581 for a space in SPM, GPT-2's letters for bytes in
    BPE); `merges` are pairs of texts, likeliest first, of BPE only; `eos_ids` are all ids that end a generation.
    """

    name: str
    model: str
    pre: str
    texts: list[str] = field(repr=False)
    types: list[int] = field(repr=False)
    scores: np.ndarray = field(repr=False)
    merges: list[tuple[str, str]] = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unk_id: int | None
    pad_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    strips_right: frozenset[int] = field(repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping, name: str = "<metadata>") -> Vocabulary:
        """Raises TokenizerError naming the field for whatever is missing, wrong or not supported."""
        fields = Fields(metadata, name)
        model = _model(fields)
        texts = _texts(fields)
        n = len(texts)
        types = _types(fields, n)
        spm = model == "spm"
        pre = "spm" if spm else _pre(fields)
        known = PRETOKENIZERS.get(pre)
        special = {key: fields.token_id(PREFIX + key + "_token_id", n, default) for key, default in (
            ("bos", 1 if spm else None), ("eos", 2 if spm else None), ("eot", None), ("eom", None),
            ("unknown", 0 if spm else None), ("padding", None), ("fim_pad", None), ("fim_rep", None),
            ("fim_sep", None))}
        eos_ids = _mark_specials(texts, types, special)
        return cls(
            name=name, model=model, pre=pre, texts=texts, types=types,
            scores=_scores(fields, n, spm), merges=[] if spm else _merges(fields),
            bos_id=special["bos"], eos_id=special["eos"], eot_id=special["eot"], eom_id=special["eom"],
            unk_id=special["unknown"], pad_id=special["padding"], eos_ids=eos_ids,
            add_bos=fields.flag(PREFIX + "add_bos_token", spm or known.adds_bos),
            add_eos=fields.flag(PREFIX + "add_eos_token", False),
            add_space_prefix=spm and fields.flag(PREFIX + "add_space_prefix", True),
            strips_right=_strips_right(fields, texts, types))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Vocabulary:
        return cls.from_metadata(file.metadata, file.name)


def _model(fields: Fields) -> str:
    key = PREFIX + "model"
    value = fields.string(key)
    models = {"llama": "spm", "gpt2": "bpe"}
    if value in models:
        return models[value]
    if value in ("no_vocab", "none"):
        raise fields.fail(key, f"is {value!r}: the file holds no tokenizer")
    raise fields.fail(key, f"is {shown(value)}, which is not supported; 'llama' (SPM) and 'gpt2' (BPE) are")


def _pre(fields: Fields) -> str:
    key = PREFIX + "pre"
    value = fields.string(key, "default")
    if value not in PRETOKENIZERS:
        raise fields.fail(key, f"is {shown(value)}, an unknown pre-tokenizer; known are {', '.join(PRETOKENIZERS)}")
    return value


def _texts(fields: Fields) -> list[str]:
    key = PREFIX + "tokens"
    texts = fields.strings(key, "is missing: the file holds no vocabulary")
    if not texts:
        raise fields.fail(key, "is empty")
    longest = max(map(len, texts))
    if longest > MAX_TOKEN_CHARS:
        i = next(i for i, text in enumerate(texts) if len(text) == longest)
        raise fields.fail(f"{key}[{i}]", f"has {longest} characters, the limit is {MAX_TOKEN_CHARS}")
    chars, limit = sum(map(len, texts)), MAX_CHARS + CHARS_PER_TOKEN * len(texts)
    if chars > limit:
        raise fields.fail(key, f"has {len(texts)} tokens of {chars} characters together, the limit is {limit}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        i = next(i for i, text in enumerate(texts) if not is_utf8(text))
        raise fields.fail(f"{key}[{i}]", "is not UTF-8") from None
    if "" in texts:  # padding of some converters; named so that it is never matched
        texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    return texts


def is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _types(fields: Fields, n: int) -> list[int]:
    key = PREFIX + "token_type"
    types = fields.numbers(key, n, "iu")
    if types is None:
        return [int(TokenType.NORMAL)] * n
    wrong = (types < 0) | (types > max(TokenType))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise fields.fail(f"{key}[{i}]", f"is {types[i]}, not a token type of 0 to {int(max(TokenType))}")
    return types.tolist()


def _scores(fields: Fields, n: int, needed: bool) -> np.ndarray:
    key = PREFIX + "scores"
    scores = fields.numbers(key, n, "fiu")
    if scores is None:
        if needed:
            raise fields.fail(key, "is missing: SPM merges by scores")
        return np.zeros(n, np.float32)
    scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
        i = int(np.argmin(np.isfinite(scores)))
        raise fields.fail(f"{key}[{i}]", f"is {scores[i]}, not a finite number")
    return scores


def _merges(fields: Fields) -> list[tuple[str, str]]:
    key = PREFIX + "merges"
    lines = fields.strings(key, "is missing: BPE needs them")
    # The space that separates is never the first character: some vocabularies merge with a space.
    pairs = [(line[:at], line[at + 1 :]) for line in lines for at in (line.find(" ", 1),)]
    for i, (line, (_, right)) in enumerate(zip(lines, pairs, strict=True)):
        if not right or line.find(" ", 1) < 0:
            raise fields.fail(f"{key}[{i}]", f"is {shown(line)}, not two tokens with a space between")
    return list(dict.fromkeys(pairs))  # the first of two equal ones counts


def _mark_specials(texts: list[str], types: list[int], special: dict[str, int | None]) -> frozenset[int]:
    """Correct the types of tokens that are known by their text; the ids that end a generation."""
    ids = {text: i for i, text in enumerate(texts)}
    ends = {special[key] for key in ("eos", "eot", "eom")}
    for text in END_OF_GENERATION & ids.keys():
        ends.add(ids[text])
        types[ids[text]] = int(TokenType.CONTROL)
    # In vocabularies where it is a normal token, "</s>" is a closing tag of HTML.
    if "</s>" in ids and types[ids["</s>"]] == TokenType.CONTROL:
        ends.add(ids["</s>"])
    for key, names in FILL_IN_ENDS.items():
        found = [ids[text] for text in names if text in ids]
        for i in found:
            types[i] = int(TokenType.CONTROL)
        ends.add(special[key] if special[key] is not None else found[0] if found else None)
    for text in FILL_IN & ids.keys():
        types[ids[text]] = int(TokenType.CONTROL)
    for text in SHOWN & ids.keys():
        types[ids[text]] = int(TokenType.USER_DEFINED)
    # gpt-oss ends a message with <|end|> and an answer with one of the others.
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        ends.discard(ids.get("<|end|>"))
    return frozenset(ends - {None})


def _strips_right(fields: Fields, texts: list[str], types: list[int]) -> frozenset[int]:
    """Tokens that swallow the whitespace after them: what phi-3 files do not say and mean."""
    name = fields.metadata.get("general.name", "")
    if not isinstance(name, str) or not any(part in name.lower() for part in ("phi-3", "phi3")):
        return frozenset()
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return frozenset(i for i in special_ids(types) if texts[i] not in kept) | {
        i for i, text in enumerate(texts) if text == "</s>"}


def special_ids(types: Iterable[int]) -> list[int]:
    """Tokens that are found in a text as a whole, before anything else looks at it."""
    whole = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    return [i for i, kind in enumerate(types) if kind in whole]


