"""llama.cpp on our planner, unmodified: `import ggml_sched.llama_cpp` before `import llama_cpp`.

llama.cpp calls ggml's graph allocator and scheduler.  Importing this package loads a library that exports functions of
the same names, to which the dynamic linker then binds those calls.  It must be loaded before ggml's libraries:
HookError otherwise.

    GGML_SCHED=off          in the environment: import does nothing
    GGML_SCHED=alloc        ours replaces the graph allocator (the default)
    GGML_SCHED=sched        ours replaces the graph allocator and the scheduler
    install(level="alloc")  the same from a program that imported this with GGML_SCHED=off
    memory()                bytes of what is open now, by device: weights, caches, compute buffers, what is free
    compute_buffers()       bytes of the compute buffers alone, by buffer type
    compare(), saved()      bytes by which compute buffers are smaller than ggml's own: contexts made after compare()
    plans()                 what was planned last for each allocator, as `Plan`s: print, explain, verify them
    counters(), served()    how often ggml's functions were called and the time inside them; how graphs got their plans
    check()                 HookError unless ggml's calls reach this library; called once llama_cpp has been imported
    dry_run(path, ...)      the graphs, weights, caches and bytes of a model that llama.cpp opens without allocating
    python -m ggml_sched.llama_cpp SCRIPT ...     runs a script whose llama.cpp uses this library

    ggml/                   the ggml that a client has loaded: functions, numbers of ops, buffers
    graph/                  ggml's graphs: reading them, recognising them by signatures, nodes that one kernel computes
    hook/                   the plan cache (plan_cache.h), the graph allocator and the scheduler (scheduler.h)
    install, last_plans     loading the library before ggml's; what it planned last, as values
    dryrun, dryrun_child    a dry run, and its process: `parameters` by name, `imitated` devices
    open_memory, held       what is open now, and bytes by what they are for
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggml_sched._late import homes_of as _homes_of
from ggml_sched._late import late as _late
from ggml_sched.llama_cpp.install import (
    HookError,
    check,
    clear_counters,
    compare,
    compute_buffers,
    counters,
    install,
    installed,
    last_error,
    saved,
    served,
)

if TYPE_CHECKING:
    from ggml_sched.llama_cpp.dryrun import DryRun, DryRunError, Piece, Resident, compute_of, dry_run
    from ggml_sched.llama_cpp.held import Held
    from ggml_sched.llama_cpp.open_memory import DeviceMemory, Memory, memory
    from ggml_sched.llama_cpp.overrides import overriding
    from ggml_sched.planning.plan import Plan

__all__ = ["DeviceMemory", "DryRun", "DryRunError", "Held", "HookError", "Memory", "Piece", "Resident", "check",
           "clear_counters", "compare", "compute_buffers", "compute_of", "counters", "dry_run", "install", "installed",
           "last_error", "memory", "overriding", "plans", "saved", "served"]
_HOMES = _homes_of({
    "ggml_sched.llama_cpp.open_memory": ("DeviceMemory", "Memory", "memory"),
    "ggml_sched.llama_cpp.held": ("Held",),
    "ggml_sched.llama_cpp.dryrun": ("DryRun", "DryRunError", "Piece", "Resident", "compute_of", "dry_run"),
    "ggml_sched.llama_cpp.overrides": ("overriding",),
})
"""{name: its module}.  A module is imported when a name of it is first used, to save memory in hooked processes."""


def __getattr__(name: str) -> object:
    return _late(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return __all__.copy()


def plans() -> tuple[Plan, ...]:
    """The last plan of each graph allocator, and of each scheduler, that llama.cpp has now, oldest first.

    The plans can be printed, explained, verified and drawn; their backends have no memory.  Any thread may call this.
    HookError if nothing is installed.
    """
    # Imported here, not above: a hooked process that never calls this takes less memory without the planner's modules.
    from ggml_sched.llama_cpp.last_plans import last_plans

    return last_plans()


install()
