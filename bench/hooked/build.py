"""Builds the libraries that the bench of llama.cpp loads; a C++ compiler is enough, ggml's headers are not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["NAMES", "build", "compiler"]

HERE = Path(__file__).resolve().parent
NAMES = ("buffers", "counters", "devices", "holes", "touch")
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


def build(folder: Path = HERE / "build") -> dict[str, str]:
    """The libraries' paths by name; those older than their source are built."""
    tool = compiler()
    if tool is None:
        raise SystemExit("a C++ compiler is needed (g++, or CXX names one)")
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in NAMES:
        source, target = HERE / f"{name}.cpp", folder / f"{name}.so"
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            fresh = target.with_suffix(f".{os.getpid()}")
            subprocess.run([*tool.split(), *FLAGS, str(source), "-o", str(fresh), "-ldl"], check=True)
            fresh.replace(target)
        found[name] = str(target)
    return found
