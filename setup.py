"""Build the compiled parts; everything else about the package stands in pyproject.toml.

    core.*                  a module for each .pyx in ggml_sched/core/, its .pxd, its parts (.pxi) beside it
    _core                   the door of those
    _capi                   the C API over the core
    planning._c_program     programs for the C API
    threads._locks, execution._steps   what every compute does
    llama._cells            what every token does
    llama._strings          vocabularies
    placement.solve.*       the loops of the solver of placements: _chain, _exchange
    graph._dlpack           arrays exchanged with other libraries
    llama_cpp._hook         what a client's ggml meets, a .pyx over the C files of llama_cpp/
    backends.cpu._kernels   a .pyx over the C files of backends/cpu/kernels/
    backends.ggml._ggml     ggml's kernels, which are found at run time

The build fails when Cython reports a "performance hint": such a line means that a hot C function checks for
Python exceptions or takes the GIL on every call.  `GGML_SCHED_JOBS` says how many files compile at once (default: one
for each processor).  `GGML_SCHED_BUILD` says how:

    (not set)   optimised and stripped
    debug       not optimised (the kernels a little), with warnings and debug information, for daily work; counts blocks
                of C memory, and tests/conftest.py fails where some, or objects, are left alive after the last test
    sanitize    warns and counts, too; with GCC's or Clang's address and undefined-behaviour sanitizers, whose runtimes
                must be preloaded:
                LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
                ASAN_OPTIONS=detect_leaks=0 (Python keeps much to its end); see tests/soak/test_sanitizers.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "tools"))
from incremental_build import IncrementalBuild, captured_output  # noqa: E402

BUILD = os.environ.get("GGML_SCHED_BUILD", "")
JOBS = int(os.environ.get("GGML_SCHED_JOBS") or os.cpu_count() or 1)
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
# Warnings are a twelfth of the time that Cython's C takes to compile: debug and sanitizer builds have them.
# Python's own flags have -Wall.
WARNINGS = ["-Wall", "-Wextra"] if BUILD else ["-Wno-all"]
# The errors are warnings to GCC before 14, and errors to later compilers.
CFLAGS = [*WARNINGS, "-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types",
          "-Werror=int-conversion", "-Wno-unused-parameter", "-Wno-cast-function-type",
          "-Wno-missing-field-initializers"]
# Python compiles with -fwrapv, which would hide overflows.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
              "-fno-wrapv"]
COUNTED = ["-include", "tools/counted_memory.h"]
match BUILD:
    case "":
        # -O3 gains nothing in modules of Python objects, and makes them a fifth larger.
        CFLAGS += ["-O2", "-g0"]
        LDFLAGS = [] if sys.platform == "darwin" else ["-Wl,-s"]
    case "debug":
        CFLAGS += ["-O0", "-g", *COUNTED]
        LDFLAGS = []
    case "sanitize":
        CFLAGS += ["-O1", "-g", *COUNTED, *SANITIZERS]
        LDFLAGS = SANITIZERS
    case _:
        raise SystemExit(f"setup.py: GGML_SCHED_BUILD={BUILD!r} is neither debug nor sanitize")

KERNEL_CFLAGS = ["-std=gnu11", "-pthread", "-ffp-contract=off",
                 *(["-O1"] if BUILD else ["-O3", "-funroll-loops", "-fno-wrapv"])]
"""CPython's -fwrapv costs loops over rows of blocks up to a tenth.  No integer of the kernels overflows: the sanitized
build checks that."""


def core_extensions() -> list[Extension]:
    """Every module of core/, the door, the C API, and what every compute and every token does."""
    found = [*sorted((HERE / "ggml_sched" / "core").glob("*/*.pyx")),
             *(HERE / "ggml_sched" / name for name in ("_core.pyx", "_capi.pyx", "graph/_dlpack.pyx",
                                                       "threads/_locks.pyx", "planning/_c_program.pyx",
                                                       "execution/_steps.pyx", "llama/_cells.pyx",
                                                       "llama/_strings.pyx", "placement/solve/_chain.pyx",
                                                       "placement/solve/_exchange.pyx"))]
    return [extension(path.relative_to(HERE)) for path in found]


PASSES = ("core/alloc/*", "core/pack/solve.pyx", "core/plan/make.pyx", "core/plan/placement.pyx",
          "core/plan/request.pyx", "core/graph/flat.pyx", "core/first_generation/seed.pyx")
"""Modules of loops over C arrays.  Those of placement/solve/ are no faster with -O3, and take longer to compile."""
GLUE = ("_capi.pyx", "core/pack/api.pyx", "core/plan/plan_values.pyx", "graph/_dlpack.pyx", "planning/_c_program.pyx")
"""Modules without loops that no plan and no compute waits for: they check arguments, call others and make Python
objects.  -O1 compiles them in 60 % of the time of -O2."""
QUICK = [] if BUILD else ["-O1"]
FLAGS_OF = {} if BUILD else {"ggml_sched/backends/cpu/_kernels.c": ["-O2", "-fno-unroll-loops"],
                             "ggml_sched/llama_cpp/_hook.c": QUICK}
"""More flags for modules beside C files whose flags are for loops."""


def extension(path: Path) -> Extension:
    def is_one_of(patterns: tuple[str, ...]) -> bool:
        return any(path.match(f"ggml_sched/{pattern}") for pattern in patterns)

    level = [] if BUILD else ["-O3"] if is_one_of(PASSES) else QUICK if is_one_of(GLUE) else []
    return Extension(
        ".".join(path.with_suffix("").parts),
        [str(path)],
        include_dirs=["include"],
        depends=sorted(str(path.relative_to(HERE)) for path in (HERE / "include" / "ggml_sched").glob("*.h")),
        define_macros=[("GS_CONST", "")],       # the core fills what users of plan.h only read
        extra_compile_args=[*CFLAGS, *level],
        extra_link_args=LDFLAGS,
    )


def kernels() -> Extension:
    """The compiled kernels of the CPU backend: they choose their instructions at run time, so no -march."""
    package = Path("ggml_sched/backends/cpu")
    depends = [HERE / package / "_kernels.pxd", *(HERE / package / "kernels").glob("*.h"),
               *(HERE / "include" / "ggml_sched").glob("*.h")]
    return Extension(
        "ggml_sched.backends.cpu._kernels",
        [str(package / "_kernels.pyx"), *(str(path.relative_to(HERE)) for path in
                                          sorted((HERE / package / "kernels").glob("*.c")))],
        include_dirs=["include", str(package)],
        depends=sorted(str(path.relative_to(HERE)) for path in depends),
        # The later -O counts; unrolling is what the small products are written for.
        extra_compile_args=[*CFLAGS, *KERNEL_CFLAGS],
        extra_link_args=[*LDFLAGS, "-lpthread", "-lm"],
    )


def cythonize_strictly(extensions: list[Extension]) -> list[Extension]:
    """cythonize(), but a performance hint is an error."""
    print(f"ggml-sched: translates {len(extensions)} modules to C, then compiles them, {JOBS} at a time; on two "
          "processors this takes a minute or two", file=sys.stderr, flush=True)
    with captured_output() as said:
        built = cythonize(extensions, compiler_directives=DIRECTIVES, nthreads=JOBS if JOBS > 1 else 0)
    if "performance hint" in said[0].lower():
        raise SystemExit("setup.py: Cython gave performance hints; see above")
    return built


def ggml_extension() -> Extension:
    """ggml_sched.backends.ggml._ggml: ggml itself is loaded at run time, nothing of it is needed to build."""
    here = "ggml_sched/backends/ggml"
    depends = [path for pattern in ("*.pxi", "*.h") for path in (HERE / here).glob(pattern)]
    cpu = "ggml_sched/backends/cpu"     # whose products it runs on ggml's threads
    depends += [HERE / cpu / "_kernels.pxd", *(HERE / cpu / "kernels").glob("*.h"),
                *(HERE / "ggml_sched").glob("_*.pxd"), *(HERE / "include" / "ggml_sched").glob("*.h")]
    return Extension(
        "ggml_sched.backends.ggml._ggml",
        [f"{here}/_ggml.pyx"],
        include_dirs=["include", here, cpu],
        depends=sorted(str(path.relative_to(HERE)) for path in depends),
        extra_compile_args=[*CFLAGS, *QUICK],
        extra_link_args=LDFLAGS,
    )


def hook_extension() -> Extension:
    """ggml_sched.llama_cpp._hook: the library that a client's ggml meets.  What it exports is ggml's names alone."""
    here = "ggml_sched/llama_cpp"
    rooms = [f"{here}/{name}" for name in ("ggml", "graph", "hook")]
    depends = [*(HERE / here).glob("**/*.h"), HERE / "ggml_sched/backends/ggml/abi.h",
               *(HERE / "ggml_sched").glob("_*.pxd"), *(HERE / "include" / "ggml_sched").glob("*.h")]
    return Extension(
        "ggml_sched.llama_cpp._hook",
        [f"{here}/_hook.pyx", *(str(path.relative_to(HERE)) for path in sorted((HERE / here).glob("**/*.c"))
                                if path.name != "_hook.c")],
        include_dirs=["include", here, *rooms, "ggml_sched/backends/ggml"],
        depends=sorted(str(path.relative_to(HERE)) for path in depends),
        extra_compile_args=[*CFLAGS, "-std=gnu11", "-pthread", "-fvisibility=hidden"],
        extra_link_args=[*LDFLAGS, "-lpthread", "-ldl"],
    )


def remove_stale_modules() -> None:
    """Modules compiled in place whose source is gone would hide a Python module of the same name."""
    for path in (HERE / "ggml_sched").rglob("*.so"):
        if not path.with_name(path.name.partition(".")[0] + ".pyx").exists():
            path.unlink()


# Processes that translate import this file again where they are not forked: by default from CPython 3.14 on.
if __name__ == "__main__":
    remove_stale_modules()
    # The kernels take longest and come first; the others follow by the size of their C.
    EXTENSIONS = [kernels(), ggml_extension(), *core_extensions()]
    if sys.platform != "darwin":
        EXTENSIONS.append(hook_extension())     # needs the dynamic linker of Linux
    setup(ext_modules=EXTENSIONS,
          cmdclass={"build_ext": type("Build", (IncrementalBuild,), {"translate": staticmethod(cythonize_strictly),
                                                                    "flags_of": FLAGS_OF})},
          options={"build_ext": {"parallel": JOBS}})
