"""`python -m ggml_sched` is the command `ggml-sched`."""

from __future__ import annotations

import sys

from ggml_sched.cli import main

sys.exit(main())
