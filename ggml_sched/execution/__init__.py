"""Running plans: buffers, addresses, bound steps, queued computes, and traces of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ggml_sched.execution.tracing import register_trace_methods


def _imported_when_called(module: str, name: str) -> Callable[..., Any]:
    """A function that calls `name` of a module, which is imported then: a process that traces nothing needs none of
    these modules."""

    def call(*args: object) -> Any:
        return getattr(import_module(f"ggml_sched.view.{module}"), name)(*args)

    return call


register_trace_methods(save=_imported_when_called("timeline", "save"),
                       measured=_imported_when_called("measured", "measured"))
