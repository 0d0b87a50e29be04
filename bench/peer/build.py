"""Build the peer: the planner of today's ggml and its CPU backend, from the source distribution of ggml-python.

    python bench/peer/build.py [ggml_python-VERSION.tar.gz]

Without a file, pip fetches one.  Needs a C and a C++ compiler; takes a minute or two and leaves
`libpeer.so` in bench/peer/build/.  Nothing is installed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE / "build" / "libpeer.so"
OURS = (HERE / "devices.h", HERE / "peer.cpp", HERE / "builder.cpp")
REQUIREMENT = "ggml-python==0.0.45"
SOURCES = ("ggml.c", "ggml.cpp", "ggml-alloc.c", "ggml-backend.cpp", "ggml-backend-meta.cpp", "ggml-opt.cpp",
           "ggml-threading.cpp", "ggml-quants.c", "gguf.cpp")
"""Sources of upstream's library ggml-base: everything but kernels."""
CPU_SOURCES = ("ggml-cpu.c", "ggml-cpu.cpp", "ops.cpp", "vec.cpp", "binary-ops.cpp", "unary-ops.cpp", "traits.cpp",
               "quants.c", "repack.cpp", "hbm.cpp", "amx/amx.cpp", "amx/mmq.cpp")
"""Sources of ggml-cpu, needed only for supports_op; they cannot be built without the kernels."""
FLAGS = ("-O3", "-DNDEBUG", "-D_GNU_SOURCE", "-fPIC", "-w")
"""Upstream's release flags."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        archive = Path(sys.argv[1]) if len(sys.argv) > 1 else fetch(work)
        with tarfile.open(archive) as tar:
            # Python before 3.11.4 has no filters.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(work)
        ggml = next(work.glob("*/vendor/ggml"))
        LIBRARY.parent.mkdir(exist_ok=True)
        build(ggml, work)
    print(LIBRARY.relative_to(Path.cwd()) if LIBRARY.is_relative_to(Path.cwd()) else LIBRARY)


def fetch(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "ggml-python",
                    "--dest", str(folder), REQUIREMENT], check=True)
    return next(folder.glob("*.tar.gz"))


def build(ggml: Path, work: Path) -> None:
    cc = os.environ.get("CC") or shutil.which("gcc") or sysconfig.get_config_var("CC")
    cxx = os.environ.get("CXX") or shutil.which("g++") or "c++"
    arch = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}.get(platform.machine().lower())
    cpu = ggml / "src" / "ggml-cpu"
    kernels = [*(cpu / name for name in CPU_SOURCES), *sorted((cpu / "arch" / str(arch)).glob("[qr]*.c*"))]
    includes = [f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", f"-I{cpu}", f"-I{HERE}"]
    version = version_of(ggml)
    defines = [f'-DGGML_VERSION="{version}"', '-DGGML_COMMIT="release"', "-DGGML_USE_CPU_REPACK"]
    objects = []
    ours = [path for path in OURS if path.suffix == ".cpp"]
    for number, source in enumerate([*(ggml / "src" / name for name in SOURCES), *kernels, *ours]):
        target = work / f"{number}.o"
        tool = [*cc.split(), "-std=gnu11"] if source.suffix == ".c" else [*cxx.split(), "-std=gnu++17"]
        print(f"ggml {version}: {source.name}", flush=True)
        subprocess.run([*tool, *FLAGS, *includes, *defines, "-c", str(source), "-o", str(target)], check=True)
        objects.append(str(target))
    libraries = ["-lpthread", "-ldl", "-lm"]
    subprocess.run([*cxx.split(), "-shared", "-o", str(LIBRARY), *objects, *libraries], check=True)


def version_of(ggml: Path) -> str:
    text = (ggml / "CMakeLists.txt").read_text()
    return ".".join(re.search(rf"set\(GGML_VERSION_{part} +(\d+)\)", text)[1]
                    for part in ("MAJOR", "MINOR", "PATCH"))


if __name__ == "__main__":
    main()
