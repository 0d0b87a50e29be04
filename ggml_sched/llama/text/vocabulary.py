"""A vocabulary as GGUF metadata holds it: `tokenizer.ggml.*`, checked.

Invariant: every id of a `Vocabulary` lies inside it, and every array has an element for each token, so that tokenizers
need no checks of their own.  Corresponds to llama.cpp's llama_vocab::impl::load.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ggml_sched.llama._strings import StringTable
from ggml_sched.llama.errors import TokenizerError
from ggml_sched.llama.gguf import Array, GGUFFile, Kind
from ggml_sched.llama.metadata import Fields, shown
from ggml_sched.llama.text.pretokenizers import PRETOKENIZERS

__all__ = ["TokenType", "Vocabulary"]

MAX_TOKEN_CHARS = 512
"""The largest length of a token; the longest tokens of real vocabularies are runs of 128 spaces."""
MAX_CHARS, CHARS_PER_TOKEN = 1 << 20, 32
"""All tokens together have at most MAX_CHARS characters, plus CHARS_PER_TOKEN for each token."""


class TokenType(enum.IntEnum):
    """Types of tokens, numbered as in GGUF."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


END_OF_GENERATION = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[e~["))
"""Texts of tokens that end a generation in every vocabulary that has them.  Many files give these tokens another type;
here they are always control tokens, because otherwise a generation would not end."""
FILL_IN: dict[str, tuple[str, ...]] = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>",
                "\u2581<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>",
                "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>",
                "\u2581<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""{metadata key of a token's id, without _token_id: texts that this token may have}, for control tokens that fill in
code.  The texts are searched only in files without the key."""
FILL_IN_ENDS = ("fim_pad", "fim_rep", "fim_sep")
"""Those keys of FILL_IN whose tokens stand between files or snippets: these tokens end a generation, too."""
OLD_FILL_IN_KEYS = {"prefix": "fim_pre", "suffix": "fim_suf", "middle": "fim_mid"}
SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
"""Tokens that separate the channels of gpt-oss's answers: made user-defined, so that decoded text shows them."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model by id, with their types, scores and roles.

    `model` is "spm" or "bpe"; `ids` maps texts, as in the file (U+2581 for a space in SPM, GPT-2's letters for bytes in
    BPE), to ids, the last one of equal texts, and `ids.text(i)` is the text of token i; `types` i32 [n] are TokenTypes,
    `scores` f32 [n]; `merges` are the lines "left right" of BPE, the pair that is merged first in the first line, None
    in SPM; `eos_ids` are all ids that end a generation.
    """

    name: str
    model: str
    pre: str
    ids: StringTable = field(repr=False)
    types: np.ndarray = field(repr=False)
    scores: np.ndarray = field(repr=False)
    merges: Array | None = field(repr=False)
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
    def from_metadata(cls, metadata: Mapping[str, object], name: str = "<metadata>") -> Vocabulary:
        """The vocabulary in a file's metadata; TokenizerError, with the field's name, for a missing or wrong value."""
        fields = VocabularyFields(metadata, name)
        model = _model(fields)
        ids = _ids(fields)
        n = len(ids)
        types = _types(fields, n)
        spm = model == "spm"
        pre = "spm" if spm else _pre(fields)
        special = {key: fields.token_id(key + "_token_id", n, default) for key, default in (
            ("bos", 1 if spm else None), ("eos", 2 if spm else None), ("eot", None), ("eom", None),
            ("unknown", 0 if spm else None), ("padding", None),
            *((key, None) for key in (*FILL_IN, *OLD_FILL_IN_KEYS)))}
        for old, key in OLD_FILL_IN_KEYS.items():
            special[key] = special[key] if special[old] is None else special[old]
        eos_ids = _mark_specials(ids, types, special)
        return cls(
            name=name, model=model, pre=pre, ids=ids, types=types,
            scores=_scores(fields, n, spm),
            merges=None if spm else fields.strings("merges", "is missing: BPE needs them"),
            bos_id=special["bos"], eos_id=special["eos"], eot_id=special["eot"], eom_id=special["eom"],
            unk_id=special["unknown"], pad_id=special["padding"], eos_ids=eos_ids,
            add_bos=fields.boolean("add_bos_token", spm or PRETOKENIZERS[pre].adds_bos),
            add_eos=fields.boolean("add_eos_token", False),
            add_space_prefix=spm and fields.boolean("add_space_prefix", True),
            strips_right=_strips_right(fields, ids, types))

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Vocabulary:
        return cls.from_metadata(file.metadata, file.name)


class VocabularyFields(Fields):
    """The metadata fields `tokenizer.ggml.*`; their errors are TokenizerErrors."""

    def __init__(self, metadata: Mapping[str, object], name: str) -> None:
        super().__init__(metadata, name, "tokenizer.ggml.")

    def fail(self, key: str, what: str) -> TokenizerError:
        return TokenizerError(str(super().fail(key, what)), self.prefix + key)

    def token_id(self, key: str, n_vocab: int, default: int | None = None) -> int | None:
        value = self.metadata.get(self.prefix + key)
        if value is None:
            return default if default is not None and default < n_vocab else None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"is {shown(value)}, not a token id")
        if value == 0xFFFFFFFF:  # -1 in an unsigned field: the vocabulary has no such token
            return None
        if not 0 <= value < n_vocab:
            raise self.fail(key, f"is {value}, the vocabulary has {n_vocab} tokens")
        return value

    def strings(self, key: str, missing: str) -> Array:
        value = self.get(key, None, missing)
        if isinstance(value, Array):
            if value.kind is not Kind.STRING:
                raise self.fail(key, f"is an array of {value.kind.name}, not of strings")
            return value
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.fail(key, f"is {shown(value)}, not an array of strings")
        for i, element in enumerate(value):
            if not isinstance(element, str):
                raise self.fail(f"{key}[{i}]", f"is {shown(element)}, not a string")
        return Array.of_strings(value)

    def numbers(self, key: str, n: int, kind: str) -> np.ndarray | None:
        """An array of n numbers, or None where the file has none; `kind`: NumPy's letters of the types that it may have
        ("iu" integers, "f" floats)."""
        value = self.metadata.get(self.prefix + key)
        if value is None:
            return None
        if isinstance(value, Array):
            kind_of_elements = value.kind.name
            try:
                value = value.numpy()
            except TypeError:
                raise self.fail(key, f"is an array of {kind_of_elements}, not of numbers") from None
        try:
            numbers = np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.fail(key, f"is not an array of numbers: {error}") from error
        if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in kind):
            raise self.fail(key, f"is {shown(value)}, not an array of {'floats' if 'f' in kind else 'integers'}")
        if len(numbers) != n:
            raise self.fail(key, f"has {len(numbers)} elements, the vocabulary has {n} tokens")
        return numbers


def _model(fields: VocabularyFields) -> str:
    value = fields.string("model", missing="is missing: the file holds no tokenizer")
    models = {"llama": "spm", "gpt2": "bpe"}
    if value in models:
        return models[value]
    if value in ("no_vocab", "none"):
        raise fields.fail("model", f"is {value!r}: the file holds no tokenizer")
    raise fields.fail("model", f"is {shown(value)}, which is not supported; 'llama' (SPM) and 'gpt2' (BPE) are")


def _pre(fields: VocabularyFields) -> str:
    value = fields.string("pre", "default")
    if value not in PRETOKENIZERS:
        raise fields.fail("pre", f"is {shown(value)}, an unknown pre-tokenizer; known are {', '.join(PRETOKENIZERS)}")
    return value


def _ids(fields: VocabularyFields) -> StringTable:
    ids = StringTable(*fields.strings("tokens", "is missing: the file holds no vocabulary").strings)
    if not len(ids):
        raise fields.fail("tokens", "is empty")
    chars, longest, i, wrong = ids.measure()
    if wrong >= 0:
        raise fields.fail(f"tokens[{wrong}]", "is not UTF-8")
    if longest > MAX_TOKEN_CHARS:
        raise fields.fail(f"tokens[{i}]", f"has {longest} characters, the limit is {MAX_TOKEN_CHARS}")
    limit = MAX_CHARS + CHARS_PER_TOKEN * len(ids)
    if chars > limit:
        raise fields.fail("tokens", f"has {len(ids)} tokens of {chars} characters together, the limit is {limit}")
    return ids


def _types(fields: VocabularyFields, n: int) -> np.ndarray:
    types = fields.numbers("token_type", n, "iu")
    if types is None:
        return np.full(n, TokenType.NORMAL, np.int32)
    wrong = (types < 0) | (types > max(TokenType))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise fields.fail(f"token_type[{i}]", f"is {types[i]}, not a token type of 0 to {int(max(TokenType))}")
    return types.astype(np.int32)


def _scores(fields: VocabularyFields, n: int, needed: bool) -> np.ndarray:
    scores = fields.numbers("scores", n, "fiu")
    if scores is None:
        if needed:
            raise fields.fail("scores", "is missing: SPM merges by scores")
        return np.zeros(n, np.float32)
    scores = scores.astype(np.float32)
    if not np.isfinite(scores).all():
        i = int(np.argmin(np.isfinite(scores)))
        raise fields.fail(f"scores[{i}]", f"is {scores[i]}, not a finite number")
    return scores


def _mark_specials(ids: StringTable, types: np.ndarray, special: dict[str, int | None]) -> frozenset[int]:
    """Correct `types` for tokens with well-known texts, such as those that end a turn.  `special`: {metadata key
    without _token_id: the id in the file, or None}.  Returns the ids that end a generation."""
    ends = {i for key in ("eos", "eot", "eom", *FILL_IN_ENDS) if (i := special[key]) is not None}
    marked = {text for text in END_OF_GENERATION if text in ids}
    ends |= {ids[text] for text in marked}
    for key, texts in FILL_IN.items():
        found = [text for text in texts if text in ids] if special[key] is None else []
        marked |= {*found}
        if found and key in FILL_IN_ENDS:
            ends.add(ids[found[0]])
    for text in marked:
        types[ids[text]] = int(TokenType.CONTROL)
    for text in SHOWN:
        if (i := ids.get(text)) is not None:
            types[i] = int(TokenType.USER_DEFINED)
    # gpt-oss and Solar end an answer with <|return|> or similar; <|end|> only ends one of its messages.
    answered, called = ("<|return|>", "<|flush|>"), ("<|call|>", "<|calls|>")
    if "<|end|>" in ids and all(any(text in ids for text in texts) for texts in (answered, called)):
        ends.discard(ids["<|end|>"])
        types[ids["<|end|>"]] = int(TokenType.USER_DEFINED)
    # In Gemma 4's vocabulary "</s>" is an HTML tag, and ends no generation.
    if "<|tool_response>" in ids and "</s>" in ids:
        ends.discard(ids["</s>"])
        types[ids["</s>"]] = int(TokenType.NORMAL)
    return frozenset(ends)


def _strips_right(fields: VocabularyFields, ids: StringTable, types: np.ndarray) -> frozenset[int]:
    """Ids of the tokens that remove the whitespace after them: those of phi-3, whose files do not say so."""
    name = fields.metadata.get("general.name", "")
    if not isinstance(name, str) or not any(part in name.lower() for part in ("phi-3", "phi3")):
        return frozenset()
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    return frozenset(i for i in special_ids(types) if ids.text(i) not in kept) | {
        i for i in range(len(ids)) if ids.text(i) == "</s>"}


def special_ids(types: np.ndarray) -> list[int]:
    """Ids of the tokens that are cut out of a text as a whole, before pre-tokenizing and merging."""
    return np.flatnonzero(np.isin(types, (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN))).tolist()
