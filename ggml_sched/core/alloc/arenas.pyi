"""The typed view of core.alloc.arenas: other extensions alone use it."""

from typing import Any

__pyx_capi__: dict[str, Any]
