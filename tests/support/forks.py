"""Forked children of a test."""

import os
import signal
from collections.abc import Callable


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
