"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

__all__ = ["homes_of", "late"]


def homes_of(names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """{name: its module}, from {module: the names that it has}."""
    return {name: module for module, found in names.items() for name in found}


def late(package: str, homes: Mapping[str, str], name: str) -> object:
    """What the module of a name has under it, for `__getattr__` of a package, which keeps it; AttributeError for a name
    without a module."""
    here = sys.modules[package]
    if name not in homes:
        # With a name and an object Python suggests similar names.
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=here)
    value: object = getattr(import_module(homes[name]), name)
    setattr(here, name, value)
    return value
