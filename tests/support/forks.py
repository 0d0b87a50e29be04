"""Forked children of a test."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

_seconds = 60


def limit() -> None:
    """End this process in a minute.  A program that it executes has the limit, too."""
    signal.alarm(_seconds)


@contextlib.contextmanager
def unlimited() -> Iterator[None]:
    """Children that are forked meanwhile may live longer: servers."""
    global _seconds
    before, _seconds = _seconds, 0
    try:
        yield
    finally:
        _seconds = before


def in_child(call: Callable[[], object]) -> int:
    """The status of a forked child that makes a call: 0, unless it raises, hangs or dies."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]
