"""`cached_property`, without the lock that it has in CPython 3.11.

All objects of a class share that lock: a child process that is forked while another thread computes such a property
would wait for the lock for ever, for any object.  Without the lock, as in CPython 3.12, two threads may both compute
the value of a property, so the functions of such properties must have no side effects.
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
