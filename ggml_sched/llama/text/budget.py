"""The limits of rendering an untrusted chat template, in ticks (steps of work), time and characters.

Invariant: code that is about to read or make data first spends budget, in ticks, in proportion to its size.
"""

from __future__ import annotations

import re
import time

from ggml_sched.llama.errors import ChatTemplateError

__all__ = ["MAX_BITS", "MAX_CHARS", "MAX_ITEMS", "Budget", "check_format", "check_number", "check_replace"]

MAX_TICKS = 1 << 20
MAX_SECONDS = 0.3
"""The most processor time, in seconds, that the rendering thread may spend."""
MAX_CHARS = 1 << 24     # the most characters of a text that a template makes
MAX_ITEMS = 1 << 20     # the most items of a list, dict or set
MAX_BITS = 1 << 12      # the most bits of a number that a template computes
CHARS_PER_TICK = 256    # characters that are read or made for one tick
ITEMS_PER_TICK = 16     # items of lists, dicts and the like that are read or made for one tick
TICKS_PER_LOOK = 512
"""Ticks that are spent between two reads of the clock: reading it for each tick would cost more than the work."""


class Budget:
    """The ticks and the time that one rendering may still spend; ChatTemplateError when either is used up."""

    def __init__(self) -> None:
        self.left: int = MAX_TICKS
        self.deadline: float = time.thread_time() + MAX_SECONDS
        self.next_look: int = self.left - TICKS_PER_LOOK

    def spend(self, ticks: int = 1) -> None:
        self.left -= ticks
        if self.left < self.next_look:
            self.next_look = self.left - TICKS_PER_LOOK
            if self.left < 0:
                raise ChatTemplateError(f"the chat template does too much: more than {MAX_TICKS} steps")
            if time.thread_time() > self.deadline:
                raise ChatTemplateError(f"the chat template runs longer than {MAX_SECONDS} s")

    def weigh(self, value: object) -> int:
        """Spend budget for reading all of a value, with the values nested in it; returns the depth of nesting."""
        depth, level = 0, [value]
        while level:
            inner: list[object] = []
            for item in level:
                self.spend(1)
                if isinstance(item, str):
                    self.text(len(item))
                elif isinstance(item, int):
                    check_number(item)
                elif isinstance(item, dict):
                    inner += item.keys()
                    inner += item.values()
                elif isinstance(item, (list, tuple, set, frozenset)):
                    inner += item
                if len(inner) > MAX_ITEMS:
                    raise ChatTemplateError(f"the chat template makes a value of more than {MAX_ITEMS} items")
            depth, level = depth + 1, inner
        return depth

    def touch(self, value: object) -> None:
        """Spend budget for a shallow copy of a value: for its characters or items, not for values nested in these."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, (list, tuple, dict)):
            if len(value) > MAX_ITEMS:
                raise ChatTemplateError(f"the chat template makes a value of more than {MAX_ITEMS} items")
            self.spend(1 + len(value) // ITEMS_PER_TICK)
        else:
            self.spend(1)
            check_number(value)

    def text(self, n_chars: int) -> None:
        """Spend budget for a text of n_chars characters; called before the text is made, where that is possible."""
        if n_chars > MAX_CHARS:
            raise ChatTemplateError(f"the chat template makes a text of {n_chars} characters, the limit is {MAX_CHARS}")
        self.spend(n_chars // CHARS_PER_TICK)


def check_number(value: object) -> None:
    """ChatTemplateError for an int of more than MAX_BITS bits: the time of a division is the square of its bits."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ChatTemplateError(f"the chat template computes a number of {value.bit_length()} bits")


def check_format(budget: Budget, text: str, values: object) -> None:
    """Spend budget for the result of `text % values`, before it is made; ChatTemplateError for a large width, such as
    that of "%1000000000d" or "%(key)1000000000d": the result would be that long."""
    if re.search(r"%(\([^()]*\))?[^a-zA-Z%]*(\*|\d{4})", text):
        raise ChatTemplateError("the chat template formats wider than 999 characters")
    if re.search(r"%\([^()]*\(", text):     # where such a key ends depends on what it nests
        raise ChatTemplateError("the chat template formats by a key that has parentheses")
    budget.weigh([*values] if isinstance(values, dict) else values)
    if isinstance(values, dict):            # a format may name one value many times
        longest = 0
        for value in values.values():
            before = budget.left
            budget.weigh(value)
            longest = max(longest, before - budget.left)
        budget.text(len(text) + text.count("%(") * longest * CHARS_PER_TICK)


def check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    """Spend budget for the result of `text.replace(old, new)`, before it is made."""
    budget.text(len(text) + text.count(old) * len(new))
