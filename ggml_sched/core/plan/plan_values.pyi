"""The typed view of core.plan.plan_values: only other extension modules use it."""

from typing import Any

__pyx_capi__: dict[str, Any]
