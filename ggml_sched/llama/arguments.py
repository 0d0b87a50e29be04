"""Checks integer arguments, with errors of the same wording everywhere, which name the argument."""

from __future__ import annotations

import operator

from ggml_sched.errors import shown

__all__ = ["count"]


def count(name: str, value: int, low: int = 0, high: int | None = None) -> int:
    """`value` as an int; TypeError if it is no integer, ValueError if it is not in low .. high."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an int, not {type(value).__name__}") from None
    if number < low or high is not None and number > high:
        most = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} is {shown(number)}, not at least {low}{most}")
    return number
