"""A page with everything that was planned for llama.cpp while a script ran: `python -m ggml_sched.llama_cpp --html`.

Each allocator and each scheduler has a tab: the plan of its largest graph, for which its buffers are as large as they
are, and the bytes that llama.cpp's own buffers would have, which its own allocator measures beside ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ggml_sched._files import write_text
from ggml_sched.llama_cpp.install import HookError, compare, hook
from ggml_sched.llama_cpp.last_plans import plan_of
from ggml_sched.view.page import Shown, needs_bokeh, page

__all__ = ["showing"]

_MOST = 16
"""The most tabs of a page; of more allocators and schedulers the last ones are shown."""


@contextmanager
def showing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the page to the file `path` when the block ends, also by an exception.

    Raises at once: Error without the extra `view`, HookError if nothing is installed.  Raises HookError at the end of a
    block in which nothing was planned, if the block raised nothing.
    """
    needs_bokeh()
    compare()
    freed: list[dict[str, Any]] = []
    hook().watch_releases(freed.append)
    failed = True
    try:
        yield
        failed = False
    finally:
        hook().watch_releases(None)
        found = [*freed, *hook().largest_planned()][-_MOST:]
        if found:
            write_text(path, page([_shown(one, k, len(found)) for k, one in enumerate(found)]))
        elif not failed:
            raise HookError("nothing was planned for llama.cpp, so that there is nothing to show: the script opened no "
                            "context")


def _shown(found: dict[str, Any], k: int, count: int) -> Shown:
    """The tab of one allocator or scheduler."""
    plan = plan_of(found)
    number = f"{k + 1}: " if count > 1 else ""
    names = ", ".join(backend.name for backend in plan.backends)
    marks = {backend.name: ("llama.cpp's own buffer", nbytes)
             for backend, nbytes in zip(plan.backends, found["stock"], strict=True) if nbytes}
    return Shown(f"{number}{len(plan.graph):,} nodes on {names}", plan, marks=marks)
