"""`cached_property`, without the lock that it has in CPython 3.11.

That lock is one for all objects of a class.  A child process that is forked while another thread computes such a
property would wait for it for ever, whatever object it asks.  Two threads that ask at once may both compute the value,
as from CPython 3.12 on: functions of such properties change nothing.
"""

import sys

__all__ = ["cached_property"]

if sys.version_info >= (3, 12):
    from functools import cached_property
else:
    import functools
    from collections.abc import Callable
    from contextlib import nullcontext
    from typing import Any, TypeVar

    T = TypeVar("T")

    class cached_property(functools.cached_property[T]):  # noqa: N801
        def __init__(self, func: Callable[[Any], T]) -> None:
            super().__init__(func)
            self.lock: nullcontext[None] = nullcontext()
