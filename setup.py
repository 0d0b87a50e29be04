"""Build the Cython core.

Everything else about the package stands in pyproject.toml.  The build fails
when Cython reports a "performance hint": such a line means that a hot C
function checks for Python exceptions or takes the GIL on every call.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

HERE = Path(__file__).parent
DIRECTIVES = {
    "language_level": 3,
    "embedsignature": True,
    "embedsignature.format": "python",
    "auto_pickle": False,
    "autotestdict": False,
    # Python objects are checked; the hot loops run on C arrays, which these do not touch.
    "boundscheck": True,
    "nonecheck": True,
    "cdivision": True,
}
CFLAGS = ["-O3", "-Wall", "-Wextra", "-Werror=implicit-function-declaration", "-Wno-unused-parameter",
          "-Wno-cast-function-type", "-Wno-missing-field-initializers"]


def extension(name: str) -> Extension:
    source = Path(*name.split(".")).with_suffix(".pyx")
    parts = sorted((HERE / source).parent.glob(f"{source.stem}_*.pxi"))
    headers = sorted((HERE / "include" / "ggml_sched").glob("*.h"))
    return Extension(
        name,
        [str(source)],
        include_dirs=["include"],
        depends=[str(p.relative_to(HERE)) for p in (*parts, *headers)],
        extra_compile_args=CFLAGS,
    )


def cythonize_strictly(extensions: list[Extension]) -> list[Extension]:
    """cythonize(), but a performance hint is an error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            built = cythonize(extensions, compiler_directives=DIRECTIVES, force=False)
    finally:
        sys.stderr.write(said.getvalue())
    if "performance hint" in said.getvalue().lower():
        raise SystemExit("setup.py: Cython gave performance hints; see above")
    return built


setup(ext_modules=cythonize_strictly([extension("ggml_sched._core")]))
