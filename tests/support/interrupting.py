"""Interrupts a call by SIGINT before a chosen bytecode instruction of the package's Python code."""

import _thread
import gc
import signal
import sys
from collections.abc import Callable

HOME = "ggml_sched"
TOOL = 4
"""Of the tools of `sys.monitoring` one that neither debuggers, coverage nor profilers take."""


class _Count:
    """Makes SIGINT pending before the `at`-th instruction; the interpreter runs the handler at its next check.

    Handlers run behind calls and where functions begin: behind the signal neither may follow, so no call but one by
    unpacking, and no tracing.
    """

    def __init__(self, at: int, home: str) -> None:
        self.left, self.home, self.thread = at, home, _thread.get_ident()
        self.where = ""


class _Tracer(_Count):
    """Counts by `sys.settrace`, which before CPython 3.12 reports every instruction."""

    def start(self) -> None:
        self.before = sys.gettrace()
        sys.settrace(self.enter)

    def stop(self) -> None:
        sys.settrace(self.before)

    def enter(self, frame, event, arg):
        if self.home not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, arg):
        if event == "opcode":
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                _, = map(_thread.interrupt_main, (signal.SIGINT,))
        return self.step


class _Monitor(_Count):
    """Counts by `sys.monitoring`: from CPython 3.12 on `sys.settrace` leaves out instructions, 3.13.0 most of them."""

    def start(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(TOOL, "interrupting")
        monitoring.restart_events()     # those that another home has left out
        monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, self.step)
        monitoring.set_events(TOOL, monitoring.events.INSTRUCTION)

    def stop(self) -> None:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.INSTRUCTION, None)
        sys.monitoring.free_tool_id(TOOL)

    def step(self, code, offset):
        if self.home not in code.co_filename:
            return sys.monitoring.DISABLE
        if _thread.get_ident() != self.thread:
            return None
        self.left -= 1
        if not self.left:
            line = max((start for start in code.co_lines() if start[0] <= offset), default=(0, 0, 0))[2]
            self.where = f"{code.co_filename}:{line}"
            sys.monitoring.set_events(TOOL, 0)
            _, = map(_thread.interrupt_main, (signal.SIGINT,))
        return None


_COUNT = _Monitor if sys.version_info >= (3, 12) else _Tracer


def interrupted(call: Callable[[], object], at: int, home: str = HOME) -> str | None:
    """Make the call and interrupt it at its `at`-th instruction in files with `home` in their name; returns the
    location, or None if the call ended before.  Garbage is not collected meanwhile: in a finalizer of an object of
    another test the interrupt would be lost."""
    count, collects = _COUNT(at, home), gc.isenabled()
    try:
        gc.disable()
        count.start()
        call()
        _thread.get_ident()     # a call, so a signal still pending is handled here
    except KeyboardInterrupt:
        pass
    finally:
        count.stop()
        if collects:
            gc.enable()
    return count.where or None
