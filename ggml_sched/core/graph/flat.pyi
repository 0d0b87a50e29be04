"""The typed view of core.graph.flat: only other extension modules use it."""

from typing import Any

__pyx_capi__: dict[str, Any]
