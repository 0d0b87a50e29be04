"""Plans and their programs: making, caching, checking, saving and printing them."""

from __future__ import annotations

# plan.py does not import these modules, which import it: they register the functions behind methods of Plan.  Imported
# here, so that a Plan has all of its methods, whichever module of this package is imported.
from ggml_sched.planning import planfile as _planfile  # noqa: F401
from ggml_sched.planning import report as _report  # noqa: F401
from ggml_sched.planning import verify as _verify  # noqa: F401
