"""How BPE vocabularies cut a text into words before they merge: a table by the value of `tokenizer.ggml.pre`.

A text is cut by the patterns of a list in turn: each cuts the pieces that the patterns before it have left.  The pieces
are words, which never merge with each other.  Each pattern is the published one of its model, in the form that gives
llama.cpp's ids: where llama.cpp approximates a published pattern (capitals outside ASCII in `tekken` and `gpt-4o`), so
does this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["PRETOKENIZERS", "PreTokenizer", "of_unicode_15"]

UNICODE_16 = """
    897 1b4e-1b4f 1b7f 1c89-1c8a 2427-2429 31e4-31e5 a7cb-a7cd a7da-a7dc 105c0-105f3 10d40-10d65 10d69-10d85
    10d8e-10d8f 10ec2-10ec4 10efc 11380-11389 1138b 1138e 11390-113b5 113b7-113c0 113c2 113c5 113c7-113ca 113cc-113d5
    113d7-113d8 113e1-113e2 116d0-116e3 11bc0-11be1 11bf0-11bf9 11f5a 13460-143fa 16100-16139 16d40-16d79 18cff
    1cc00-1ccf9 1cd00-1ceb3 1e5d0-1e5fa 1e5ff 1f8b2-1f8bb 1f8c0-1f8c1 1fa89 1fa8f 1fabe 1fac6 1fadc 1fadf 1fae9
    1fbcb-1fbef"""
"""The characters that are assigned in Unicode 16.0 and not in 15.1, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a vocabulary cuts a text into words; `whole_words`: a word whose text is a token becomes this token without
    merging; `adds_bos`: BOS comes before a text unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False


def of_unicode_15(pattern: str) -> str:
    r"""The pattern with its categories (\p{L} and others) as Unicode 15.1 has them.

    llama.cpp has tables of that version, the `tokenizers` library those of a later one: a letter that Unicode 16 added
    has no category in llama.cpp.
    """
    later = "".join(re.sub("[0-9a-f]+", r"\\x{\g<0>}", UNICODE_16).split())
    return re.sub(r"\\p\{\w\}", lambda found: f"[{found[0]}&&[^{later}]]", pattern)


# Endings of English words: 's, 't, 're, ..., in either case.
ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
DIGIT, DIGITS3 = r"\p{N}", r"\p{N}{1,3}"
# The ranges of CJK_KOREAN contain wide spaces (U+3000 for one), which are excluded: they are spaces, not letters.
CJK_KOREAN = "(?:(?!\\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"
CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = "|".join((ENDINGS, WORD, DIGITS3, OTHER, SPACES))
QWEN2 = "|".join((ENDINGS, WORD, DIGIT, OTHER, SPACES))
QWEN35 = "|".join((ENDINGS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", SPACES))
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cased(letters: str, tail: str, digits: str) -> str:
    """The pattern of words: capitals, then lower-case letters; a letter outside ASCII counts as both.

    `letters` matches a letter, `tail` what may follow a word, `digits` a number.
    """
    capital, small = rf"(?:(?={letters})[^a-z])", rf"(?:(?={letters})[^A-Z])"
    before = r"[^\r\n\p{L}\p{N}]?"
    return "|".join((f"{before}{capital}*{small}+{tail}", f"{before}{capital}+{small}*{tail}", digits,
                     r" ?[^\s\p{L}\p{N}]+[\r\n/]*", SPACES))


TEKKEN = _cased(r"[\p{L}]", "", DIGIT)
GPT4O = _cased(r"[\p{L}]", ENDINGS + "?", DIGITS3)
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK3 = (r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
             r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES)

PLAIN = PreTokenizer((GPT2,))
SINGLE_DIGITS = PreTokenizer((DIGIT, GPT2))
SMALL_NUMBERS = PreTokenizer((LLAMA3,))
LLAMA = PreTokenizer((LLAMA3,), whole_words=True, adds_bos=True)
QWEN = PreTokenizer((QWEN2,))

PRETOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "roberta-bpe",
                     "modern-bert", "exaone4", "mellum", "a.x-4.0"), PLAIN),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b",
                     "mellum2"), SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
                    LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), SMALL_NUMBERS),
    **dict.fromkeys(("qwen2", "stablelm2", "hunyuan", "megrez", "deepseek-r1-qwen", "bailingmoe",
                     "bailingmoe2", "llada-moe", "grok-2", "kormo"), QWEN),
    "qwen35": PreTokenizer((QWEN35,)),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?[{DEEPSEEK_LETTERS}]+",
        rf"\s?(?:(?!\s)[{DEEPSEEK_PUNCTUATION}])+", r"\s+$", CJK_KOREAN,
        r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_KOREAN, DIGIT)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), PreTokenizer((DIGITS3, CJK_KANA, DEEPSEEK3))),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((BLOOM,))),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((GPT4O,))),
}
