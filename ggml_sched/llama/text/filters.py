"""The filters that chat templates may use: jinja2's harmless ones by name, and our own, which spend budget.

Invariant: a filter whose result can be much larger than its arguments spends budget first.  When a template is compiled
(sandbox.py), its expressions are wrapped in the filters whose names begin with an underscore.
"""

from __future__ import annotations

import json

from ggml_sched.llama.errors import ChatTemplateError
from ggml_sched.llama.text.budget import CHARS_PER_TICK, Budget, check_format, check_replace

__all__ = ["BOUNDED", "COMPARING", "HARMLESS"]

MAX_WIDTH = 1 << 10

HARMLESS = ("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
           "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
           "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper", "wordcount")
"""jinja2's filters that templates may use unchanged; `BOUNDED` has those that spend budget first."""

COMPARING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
"""Filters that compare or hash their arguments, nested values included: budget is spent for all of these before."""


def _loop(context, iterable, n_written: int = 0):
    """What a `for` of a template iterates over: spends budget for each step, and for the n_written characters of
    constant text in the loop's body."""
    budget, ticks = context.budget, 1 + n_written // CHARS_PER_TICK
    if hasattr(iterable, "__len__"):
        return _Steps(iterable, budget, ticks)
    return (item for item in iterable if not budget.spend(ticks))


class _Steps:
    """The items of a loop, each of which spends budget; has a length, which `loop.last` and similar need."""

    def __init__(self, items, budget: Budget, ticks: int) -> None:
        self._items, self._budget, self._ticks = items, budget, ticks

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self):
        for item in self._items:
            self._budget.spend(self._ticks)
            yield item


def _weighed(context, value):
    """`value`, which the template is about to compare, hash or copy, after spending budget for all of it."""
    context.budget.weigh(value)
    return value


def _touched(context, value):
    """`value`, which the template has just made, after spending budget for its characters or items."""
    context.budget.touch(value)
    return value


def _text(context, value) -> str:
    """str(value), after spending budget for it."""
    context.budget.weigh(value)
    return value if isinstance(value, str) else str(value)


def _join(context, value, d: str = "", attribute=None) -> str:
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    items = [_text(context, item) for item in items]
    d = _text(context, d)
    context.budget.text(sum(map(len, items)) + len(d) * len(items))
    return d.join(items)


def _replace(context, s, old, new, count=None) -> str:
    s, old, new = (_text(context, text) for text in (s, old, new))
    check_replace(context.budget, s, old, new)
    return s.replace(old, new, -1 if count is None else count)


def _indent(context, s, width=4, first: bool = False, blank: bool = False) -> str:
    s = _text(context, s)
    if isinstance(width, int) and width > MAX_WIDTH:
        raise ChatTemplateError(f"the chat template indents by {width}, the limit is {MAX_WIDTH}")
    by = width if isinstance(width, str) else " " * width
    lines = s.splitlines() or [""]
    context.budget.text(len(s) + len(by) * len(lines))
    lines[1:] = [by + line if line or blank else line for line in lines[1:]]
    return (by if first else "") + "\n".join(lines) + ("\n" if s.endswith("\n") and len(s) > 1 else "")


def _tojson(context, x, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """As Hugging Face's filter: letters outside ASCII, and "<", are not escaped."""
    before = context.budget.left
    depth = context.budget.weigh(x)
    if isinstance(indent, str) or indent is not None and not 0 <= indent <= 16:
        raise ChatTemplateError("the chat template indents JSON by something else than 0 to 16 spaces")
    context.budget.spend((before - context.budget.left) * depth * (indent or 0) // 16)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sum(context, iterable, attribute=None, start=0):
    items = list(iterable)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    for item in (start, *items):
        if not isinstance(item, (int, float)):
            raise ChatTemplateError("the chat template sums what are no numbers")
    return sum(items, start)


def _round(context, value, precision: int = 0, method: str = "common"):
    if not -99 <= precision <= 99:
        raise ChatTemplateError(f"the chat template rounds to {precision} digits")
    return context.environment.jinja_filters["round"](value, precision, method)


def _format(context, value, *args, **kwargs) -> str:
    value = _text(context, value)
    check_format(value)
    context.budget.weigh([args, kwargs])
    return value % (kwargs or args)


BOUNDED = {"_loop": _loop, "_weighed": _weighed, "_touched": _touched, "_text": _text,
           "format": _format, "indent": _indent, "join": _join,
           "replace": _replace, "round": _round, "string": _text, "sum": _sum, "tojson": _tojson}
