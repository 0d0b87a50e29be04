"""Marks in messages that keep the texts of control tokens from becoming these tokens.

A user could write "<|im_end|>" in a message to end it early.  A mark is a noncharacter of Unicode that no message
contains.  `Marker` puts a mark inside each text of a control token, the template is rendered, and the tokenizer removes
the marks after its search for control tokens (`Tokenizer.encode_marked`).  Invariant: a text of a control token in the
prompt has a mark inside if some of its characters come from a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ggml_sched.llama.errors import ChatTemplateError

__all__ = ["Marker"]

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Marker:
    """`marked(value)` copies plain data with marks in its strings; `mark` is a noncharacter that is in no message."""

    def __init__(self, control_texts: Iterable[str], messages: object) -> None:
        texts = sorted(control_texts, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        letters = set().union(*_strings(messages))
        free = [mark for mark in NONCHARACTERS if mark not in letters]
        if not free:
            raise ChatTemplateError(f"messages contain all {len(NONCHARACTERS)} noncharacters from U+FDD0 on")
        self.mark: str = free[0]

    def marked(self, value: Any, key: str = "") -> Any:
        """A copy of `value`, messages or a part of them, with marks in its strings, keys included; `key`: its key in a
        dict."""
        if isinstance(value, dict):
            return {self._marked_key(name): self.marked(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, key) for item in value]
        if not isinstance(value, str):
            return value
        value = self._inside(value)
        # No marks at the ends of roles and types: templates compare these with their own strings.
        return value if key in ("role", "type") else self._at_ends(value)

    def _marked_key(self, key: Any) -> Any:
        """A key of a dict, with marks unless it is an identifier, which templates look up."""
        if not isinstance(key, str) or key.isidentifier():
            return key
        return self._at_ends(self._inside(key))

    def _inside(self, text: str) -> str:
        """The text, with a mark inside each text of a control token."""
        return self._whole.sub(lambda found: found[0][0] + self.mark + found[0][1:], text)

    def _at_ends(self, text: str) -> str:
        """The text, with a mark at an end that could form a control token together with the text before or after it.

        Templates may strip spaces, so the marks are next to the first and last characters that are no spaces.
        """
        body = text.rstrip()
        if any(body[-n:] in self._beginnings for n in range(1, min(self._longest, len(body) + 1))):
            text = body + self.mark + text[len(body):]
        body = text.lstrip()
        if any(body[:n] in self._endings for n in range(1, min(self._longest, len(body) + 1))):
            text = text[: len(text) - len(body)] + self.mark + body
        return text


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
