"""Interrupts a call by SIGINT before a chosen bytecode instruction of the package's Python code."""

import _thread
import signal
import sys
from collections.abc import Callable

HOME = "ggml_sched"


class _Tracer:
    """Makes SIGINT pending before the `at`-th instruction; the interpreter runs the handler at its next check."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.where = ""

    def enter(self, frame, event, arg):
        if HOME not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, event, arg):
        if event == "opcode":
            self.left -= 1
            if not self.left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                # Handlers run behind calls and where functions begin: here neither may follow, so no call but one by
                # unpacking, and no tracing.
                sys.settrace(None)
                _, = map(_thread.interrupt_main, (signal.SIGINT,))
        return self.step


def interrupted(call: Callable[[], object], at: int) -> str | None:
    """Make the call and interrupt it at its `at`-th instruction; returns the location, or None if the call ended
    before."""
    if at == 1 and sys.version_info[:2] == (3, 12):
        interrupted(call, 1 << 30)      # 3.12 reports the instructions of a function from its second traced call on
    tracer, before = _Tracer(at), sys.gettrace()
    try:
        sys.settrace(tracer.enter)
        call()
        sys.settrace(before)        # a call, so a signal still pending is handled here
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.where or None
