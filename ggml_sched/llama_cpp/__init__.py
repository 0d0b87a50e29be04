"""llama.cpp on our planner, unmodified: `import ggml_sched.llama_cpp` before `import llama_cpp`.

What llama.cpp asks of ggml's graph allocator, or its scheduler, our planner answers, through ggml's own names: the
dynamic linker binds the calls of ggml's libraries to the library that this loads first.  So it must come before them:
HookError otherwise.

    GGML_SCHED=off          in the environment: import does nothing
    GGML_SCHED=alloc        the graph allocator (the default)
    GGML_SCHED=sched        that and the scheduler
    install(level="alloc")  the same from a program that imported this with GGML_SCHED=off
    plans()                 what was planned last for each allocator, as `Plan`s: print, explain, verify them
    counters(), served()    calls and time inside them, and how graphs were served
    check()                 HookError unless calls arrive; asked by itself once llama_cpp is imported
    python -m ggml_sched.llama_cpp SCRIPT ...     a script, hooked

    library, read           the ggml that a client has loaded, and its graphs as the planner's
    known, fused            graphs told apart, addresses given; what kernels compute as one
    arena, alloc            buffers, and the functions that ggml calls
    scheduler.h             the scheduler: what its files are for
    install, last_plans     loading it in time, and looking at it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggml_sched.llama_cpp.install import (
    HookError,
    check,
    clear_counters,
    counters,
    install,
    installed,
    last_error,
    served,
)

if TYPE_CHECKING:
    from ggml_sched.planning.plan import Plan

__all__ = ["HookError", "check", "clear_counters", "counters", "install", "installed", "last_error", "plans", "served"]


def plans() -> tuple[Plan, ...]:
    """The plan of each graph allocator, and of each scheduler, that llama.cpp has now, oldest first: of the graph that
    it was asked for last.

    Print, explain and verify them, draw pictures; there is no memory behind their backends.  Any thread may ask.
    HookError if nothing is installed.
    """
    # What makes plans of ours loads here: a hooked process that never looks at them is smaller without.
    from ggml_sched.llama_cpp.last_plans import last_plans

    return last_plans()


install()
