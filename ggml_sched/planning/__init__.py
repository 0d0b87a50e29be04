"""Plans and their programs: making, caching, checking, saving and printing them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ggml_sched.planning.plan import register_plan_methods


def _imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """A function that calls `name` of a module, which is imported then: a process that only runs plans needs none of
    these modules."""

    def call(*args: object) -> Any:
        return getattr(import_module(f"ggml_sched.{module}"), name)(*args)

    return call


# Registered here, so that a Plan has all of its methods, whichever module of this package is imported.
register_plan_methods(
    facts=_imported_when_called("planning.verify", "facts_of"),
    verify=_imported_when_called("planning.verify", "verify"),
    summary=_imported_when_called("planning.report", "summary"),
    explain=_imported_when_called("planning.report", "explain"),
    peaks=_imported_when_called("planning.peaks", "peaks_of"),
    fallbacks=_imported_when_called("planning.fallbacks", "fallbacks_of"),
    messages=_imported_when_called("planning.envelopes", "messages"),
    save=_imported_when_called("planning.planfile", "save_plan"),
    reduce=_imported_when_called("planning.planfile", "reduce_plan"),
    to_dot=_imported_when_called("view.dot", "dot"),
    to_svg=_imported_when_called("view.drawing", "svg"),
    save_html=_imported_when_called("view.page", "save"),
    differences=_imported_when_called("view.differences", "differences"),
    notebook=_imported_when_called("view.drawing", "notebook"))
