"""The C API; see ggml_sched/api.h and docs/c-api.md."""

from typing import Any

api: Any
"""A capsule named "ggml_sched._capi.api" of a `const gs_api *`."""
