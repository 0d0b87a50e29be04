"""The typed view of core.plan.make: other extensions alone use it."""

from typing import Any

__pyx_capi__: dict[str, Any]
