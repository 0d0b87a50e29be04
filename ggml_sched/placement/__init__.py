"""Where the weights and caches of a model should live: prices of plans, and placements with a proven bound."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ggml_sched.placement.answer import register_fit_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ggml_sched.placement.answer import Fit
    from ggml_sched.placement.stock import Stock


def _report(fit: Fit) -> str:
    text: str = import_module("ggml_sched.placement.report").report(fit)
    return text


def _explain(fit: Fit, name: str) -> str:
    text: str = import_module("ggml_sched.placement.explain").explain(fit, name)
    return text


def _stock(fit: Fit, names: Mapping[str, str] | None = None,
           compute: Callable[[Stock], Mapping[str, int]] | None = None, **settings: object) -> Stock:
    found: Stock = import_module("ggml_sched.placement.stock").stock(fit, names, compute, **settings)
    return found


def _to_svg(fit: Fit, before: object, names: object) -> str:
    text: str = import_module("ggml_sched.view.bars").svg(fit, before, names)
    return text


def _notebook(fit: Fit) -> str:
    text: str = import_module("ggml_sched.view.bars").notebook(fit)
    return text


# Registered here, so that every Fit has these methods, whichever module of this package is imported.
register_fit_methods(report=_report, explain=_explain, stock=_stock, to_svg=_to_svg, notebook=_notebook)
