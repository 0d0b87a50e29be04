"""From a graph to a plan and its program: choosing, keeping, checking, saving and showing plans."""

from __future__ import annotations

# They register what methods of Plan do, whichever module of this room is loaded first.
from ggml_sched.planning import planfile as _planfile  # noqa: F401
from ggml_sched.planning import report as _report  # noqa: F401
from ggml_sched.planning import verify as _verify  # noqa: F401
