"""Plans and their programs: making, caching, checking, saving and printing them."""

from __future__ import annotations

# These modules register methods of Plan: importing any module of this package must make all methods available.
from ggml_sched.planning import planfile as _planfile  # noqa: F401
from ggml_sched.planning import report as _report  # noqa: F401
from ggml_sched.planning import verify as _verify  # noqa: F401
