"""Builds the libraries that the bench of llama.cpp loads; a C++ compiler is enough, ggml's headers are not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["NAMES", "build", "build_fit", "compiler"]

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


def build_fit(sources: Path, libraries: Path, folder: Path = HERE / "build") -> str:
    """The path of the library of fit.cpp, from the sources of llama.cpp and the folder of its installed libraries."""
    tool = compiler()
    if tool is None:
        raise SystemExit("a C++ compiler is needed (g++, or CXX names one)")
    folder.mkdir(parents=True, exist_ok=True)
    source, target = HERE / "fit.cpp", folder / "fit.so"
    parts = [sources / "common" / f"{name}.cpp" for name in ("fit", "log", "json")]
    missing = next((path for path in parts if not path.exists()), None)
    if missing is not None:
        raise SystemExit(f"{missing}: no such file; the sources are those of llama.cpp (llama-cpp-python has them in "
                         "vendor/llama.cpp of its source distribution)")
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        fresh = target.with_suffix(f".{os.getpid()}")
        includes = [f"-I{sources / path}" for path in ("common", "include", "ggml/include", "vendor", "src")]
        linked = [str(libraries / name) for name in ("libllama.so.0", "libggml.so.0", "libggml-base.so.0")]
        # Their sources have warnings.
        subprocess.run([*tool.split(), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *includes, str(source),
                        *map(str, parts), "-o", str(fresh), *linked, f"-Wl,-rpath,{libraries}"], check=True)
        fresh.replace(target)
    return str(target)
