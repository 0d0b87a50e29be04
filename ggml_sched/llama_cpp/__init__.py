"""llama.cpp on our planner, unmodified: `import ggml_sched.llama_cpp` before `import llama_cpp`.

llama.cpp calls ggml's graph allocator and scheduler.  This loads a library that exports functions of the same names, to
which the dynamic linker binds those calls.  It must be loaded before ggml's libraries: HookError otherwise.

    GGML_SCHED=off          in the environment: import does nothing
    GGML_SCHED=alloc        the graph allocator (the default)
    GGML_SCHED=sched        that and the scheduler
    install(level="alloc")  the same from a program that imported this with GGML_SCHED=off
    memory()                bytes of the compute buffers that are held now
    plans()                 what was planned last for each allocator, as `Plan`s: print, explain, verify them
    counters(), served()    calls and time inside them, and how graphs were served
    check()                 HookError unless calls arrive; called once llama_cpp has been imported
    python -m ggml_sched.llama_cpp SCRIPT ...     a script, hooked

    ggml/                   the ggml that a client has loaded: functions, numbers of ops, buffers
    graph/                  its graphs: read, recognised by their signature, and what kernels compute as one
    hook/                   the plan cache (plan_cache.h), the graph allocator and the scheduler (scheduler.h)
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

__all__ = ["HookError", "check", "clear_counters", "counters", "install", "installed", "last_error", "memory", "plans",
           "served"]


def plans() -> tuple[Plan, ...]:
    """The last plan of each graph allocator, and of each scheduler, that llama.cpp has now, oldest first.

    The plans can be printed, explained, verified and drawn; their backends have no memory.  Any thread may call this.
    HookError if nothing is installed.
    """
    # Imported here, not above: a hooked process that never calls this takes less memory without the planner's modules.
    from ggml_sched.llama_cpp.last_plans import last_plans

    return last_plans()



def memory() -> dict[str, int]:
    """{buffer type: bytes} of the compute buffers that hold llama.cpp's graphs now, of all contexts that are open.

    These are the reserved bytes, which llama.cpp logs; the host has mapped only the pages that computes have touched.
    HookError if nothing is installed.
    """
    from ggml_sched.llama_cpp.last_plans import held_memory

    return held_memory()


install()
