"""The subcommands of `ggml-sched`: modules with a docstring, `add_arguments(parser)` and `run(args)`.

`run` prints to stdout and raises what went wrong.  What a command needs is imported when it runs.
"""

from __future__ import annotations

from types import ModuleType

from ggml_sched.commands import pack, plan, run

__all__ = ["ALL"]

ALL: dict[str, ModuleType] = {"run": run, "plan": plan, "pack": pack}
