"""The filters that chat templates may use: jinja2's harmless ones by name, and our own, which spend budget.

Invariant: a filter whose result can be much larger than its arguments spends budget first.  When a template is compiled
(environment.py), its expressions are wrapped in the filters whose names begin with an underscore.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ggml_sched.llama.errors import ChatTemplateError
from ggml_sched.llama.text.budget import CHARS_PER_TICK, Budget, check_format, check_replace

if TYPE_CHECKING:
    from ggml_sched.llama.text.environment import Context

__all__ = ["BOUNDED", "COMPARING", "HARMLESS", "steps"]

MAX_WIDTH = 1 << 10

HARMLESS = ("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
           "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
           "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper", "wordcount")
"""jinja2's filters that templates may use unchanged; `BOUNDED` has those that spend budget first."""

COMPARING = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
"""Filters that compare or hash their arguments and all values nested in these: budget is spent for all these values
before the filter runs."""


T = TypeVar("T")


def steps(context: Context, iterable: Iterable[T], n_written: int = 0) -> Iterable[T]:
    """The items of a `for` loop of a template: each step spends budget, also for the n_written characters of constant
    text in the loop's body."""
    budget, ticks = context.budget, 1 + n_written // CHARS_PER_TICK
    if hasattr(iterable, "__len__"):
        return _Steps(cast("Collection[T]", iterable), budget, ticks)
    return _steps(iterable, budget, ticks)


def _steps(items: Iterable[T], budget: Budget, ticks: int) -> Iterator[T]:
    """The items of a loop, each of which spends budget."""
    for item in items:
        budget.spend(ticks)
        yield item


class _Steps(Generic[T]):
    """The items of a loop, each of which spends budget, with their number, which `loop.last` and similar need."""

    def __init__(self, items: Collection[T], budget: Budget, ticks: int) -> None:
        self._items, self._budget, self._ticks = items, budget, ticks

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return _steps(self._items, self._budget, self._ticks)


def _weighed(context: Context, value: T) -> T:
    """`value`, which the template is about to compare, hash or copy, after spending budget for all of it."""
    context.budget.weigh(value)
    return value


def _touched(context: Context, value: T) -> T:
    """`value`, which the template has just made, after spending budget for its characters or items."""
    context.budget.touch(value)
    return value


def _text(context: Context, value: object) -> str:
    """str(value), after spending budget for reading all of the value."""
    context.budget.weigh(value)
    return value if isinstance(value, str) else str(value)


def _items(context: Context, values: Iterable[Any], attribute: str | int | None) -> list[Any]:
    """The values as a list; if `attribute` is not None, this attribute or item of each value instead."""
    items = list(values)
    return items if attribute is None else [context.environment.getitem(item, attribute) for item in items]


def _join(context: Context, value: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
    items = [_text(context, item) for item in _items(context, value, attribute)]
    between = _text(context, d)
    context.budget.text(sum(map(len, items)) + len(between) * len(items))
    return between.join(items)


def _replace(context: Context, s: object, old: object, new: object, count: int | None = None) -> str:
    text, before, after = (_text(context, value) for value in (s, old, new))
    check_replace(context.budget, text, before, after)
    return text.replace(before, after, -1 if count is None else count)


def _indent(context: Context, s: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(context, s)
    if isinstance(width, int) and width > MAX_WIDTH:
        raise ChatTemplateError(f"the chat template indents by {width}, the limit is {MAX_WIDTH}")
    by = width if isinstance(width, str) else " " * width
    lines = text.splitlines() or [""]
    context.budget.text(len(text) + len(by) * len(lines))
    lines[1:] = [by + line if line or blank else line for line in lines[1:]]
    return (by if first else "") + "\n".join(lines) + ("\n" if text.endswith("\n") and len(text) > 1 else "")


def _tojson(context: Context, x: object, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """The filter `tojson` as in Hugging Face's transformers: letters outside ASCII, and "<", are not escaped."""
    before = context.budget.left
    depth = context.budget.weigh(x)
    if isinstance(indent, str) or indent is not None and not 0 <= indent <= 16:
        raise ChatTemplateError("the chat template indents JSON by something else than 0 to 16 spaces")
    n_items = before - context.budget.left      # or more
    context.budget.spend(n_items * depth * (indent or 0) // 16)
    if separators is not None:
        context.budget.text(n_items * sum(map(len, separators)))
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sum(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> float:
    items = _items(context, iterable, attribute)
    for item in (start, *items):
        if not isinstance(item, (int, float)):
            raise ChatTemplateError("the chat template sums what are no numbers")
    return sum(items, start)


def _round(context: Context, value: float, precision: int = 0, method: str = "common") -> float:
    if not -99 <= precision <= 99:
        raise ChatTemplateError(f"the chat template rounds to {precision} digits")
    rounded: float = context.environment.jinja_filters["round"](value, precision, method)
    return rounded


def _format(context: Context, value: object, *args: object, **kwargs: object) -> str:
    text = _text(context, value)
    check_format(context.budget, text, kwargs or args)
    return text % (kwargs or args)


BOUNDED: dict[str, Callable[..., object]] = {
    "_loop": steps, "_weighed": _weighed, "_touched": _touched, "_text": _text,
    "format": _format, "indent": _indent, "join": _join,
    "replace": _replace, "round": _round, "string": _text, "sum": _sum, "tojson": _tojson}
