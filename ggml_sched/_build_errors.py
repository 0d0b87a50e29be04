"""The errors for a compiled module that cannot be imported: it is missing, was built for another Python, or does not
load.

Owns nothing.  Invariant: any other ImportError, such as that of a missing requirement, is passed on as it is.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from ggml_sched.errors import BuildError

__all__ = ["raise_explained"]

HERE = Path(__file__).parent
SUFFIXES = (".so", ".pyd")


def raise_explained(error: ImportError) -> NoReturn:
    """Raise a BuildError from `error` if it is about a compiled module of this package; otherwise raise `error`
    itself."""
    name = missing_name(error)
    if name is None or isinstance(error, BuildError):
        raise error
    reason = reason_of(error, name)
    if reason is None:
        raise error
    this = f"Python {sys.version.partition(' ')[0]} ({sysconfig.get_config_var('SOABI')})"
    advice = ("in the source tree run `python setup.py build_ext --inplace`, which compiles what has changed, or `pip "
              "install .`, and then leave the tree before importing"
              if place_of(name).with_suffix(".pyx").exists() else
              f"install ggml-sched again: `{sys.executable} -m pip install --force-reinstall ggml-sched`")
    raise BuildError(f"{name} cannot be imported by {this}: {reason}; {advice}", name=name, path=error.path,
                     reason=reason) from error


def reason_of(error: ImportError, name: str) -> str | None:
    """The reason why a compiled module cannot be imported; None for any other module."""
    place = place_of(name)
    if error.path is not None and error.path.endswith(SUFFIXES):
        what = "is compiled from other sources" if str(error).startswith("cannot import") else "cannot be loaded"
        return f"{error.path} {what}: {error}"
    if built := sorted({tag_of(path) for path in place.parent.glob(f"{place.name}.*") if path.suffix in SUFFIXES}):
        return f"it is built for {', '.join(built)}"
    if place.with_suffix(".pyx").exists():
        return "it is not compiled"
    if place.with_suffix(".pyi").exists() or place.with_suffix(".pxd").exists():
        return "its file is missing from the installation"
    return None


def place_of(name: str) -> Path:
    """The path of a module, without a suffix."""
    return HERE.joinpath(*name.split(".")[1:])


def missing_name(error: ImportError) -> str | None:
    """The name of the module of this package that an ImportError is about; None if it is about another module."""
    name = error.name or ""
    # An error of the module loader has the file, and only the last word of the module's name.
    if error.path is not None and error.path.endswith(SUFFIXES) and Path(error.path).is_relative_to(HERE):
        place = Path(error.path).relative_to(HERE)
        return ".".join((__package__, *place.parent.parts, place.name.partition(".")[0]))
    # In an error "cannot import name", `name` is the package; in Python 3.11 only the message has the module's name.
    if found := re.match(r"cannot import name '(\w+)'", str(error)):
        name = f"{name}.{found[1]}"
    return name if name.startswith(f"{__package__}.") else None


def tag_of(path: Path) -> str:
    """The tag in a compiled module's file name: `cpython-311-x86_64-linux-gnu` of
    `types.cpython-311-x86_64-linux-gnu.so`."""
    return path.name.split(".", 1)[1].rpartition(".")[0] or "another Python"
