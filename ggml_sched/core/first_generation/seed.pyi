"""The typed view of core.first_generation.seed: other extensions alone use it."""

from typing import Any

__pyx_capi__: dict[str, Any]
