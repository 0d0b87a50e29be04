"""Plans and their programs: making, caching, checking, saving and printing them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ggml_sched.planning.plan import register_plan_methods


def _imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that imports plan.py; a process that only runs plans does not need it."""

    def call(*args: object) -> Any:
        return getattr(import_module(f"ggml_sched.planning.{module}"), name)(*args)

    return call


# Registered here, so that a Plan has all of its methods, whichever module of this package is imported.
register_plan_methods(
    facts=_imported_when_called("verify", "facts_of"), verify=_imported_when_called("verify", "verify"),
    summary=_imported_when_called("report", "summary"), explain=_imported_when_called("report", "explain"),
    to_dot=_imported_when_called("report", "dot"), peaks=_imported_when_called("peaks", "peaks_of"),
    fallbacks=_imported_when_called("fallbacks", "fallbacks_of"),
    save=_imported_when_called("planfile", "save_plan"), reduce=_imported_when_called("planfile", "reduce_plan"))
