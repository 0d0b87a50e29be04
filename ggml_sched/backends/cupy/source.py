"""Where kernel sources are and what their text is, includes put in: one text is what a compiler and a cache see.

Only quoted includes are known, each taken once, relative to the file that names it; `#line` keeps errors at home.
"""

from __future__ import annotations

import re
from pathlib import Path

from ggml_sched.backends.cupy.device import DeviceError

__all__ = ["KERNELS", "kernel_source"]

KERNELS = Path(__file__).parent / "kernels"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.M)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.M)


def kernel_source(name: str, folder: Path = KERNELS) -> str:
    """The text of <folder>/<name>.cu; DeviceError when there is none."""
    return _expanded((Path(folder) / f"{name}.cu").resolve(), set())


def _expanded(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"no kernel source {path}: {error.strerror}") from None
    text = _ONCE.sub("", text)
    parts, end = [f'#line 1 "{path.name}"\n'], 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[end:found.start()])
        other = (path.parent / found[1]).resolve()
        if other not in seen:
            parts.append(_expanded(other, seen))
        line = text.count("\n", 0, found.end()) + 1
        parts.append(f'\n#line {line} "{path.name}"')
        end = found.end()
    parts.append(text[end:])
    return "".join(parts) + "\n"
