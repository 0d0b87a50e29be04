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
    """For `__getattr__` of a package: import the module that has a name, and return what it has under this name, which
    the package also keeps as an attribute.  AttributeError for a name that is not in `homes`."""
    here = sys.modules[package]
    if name not in homes:
        # With the arguments `name` and `obj`, Python's error message suggests similar names.
        raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=here)
    value: object = getattr(import_module(homes[name]), name)
    setattr(here, name, value)
    return value
