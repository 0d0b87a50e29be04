"""python -m ggml_sched.llama_cpp [--html FILE] SCRIPT ...: runs a script whose llama.cpp uses our planner."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from types import ModuleType

from ggml_sched._files import check_writable

USAGE = """usage: python -m ggml_sched.llama_cpp [--html FILE] SCRIPT [ARGUMENT ...]
       python -m ggml_sched.llama_cpp [--html FILE] -m MODULE [ARGUMENT ...]

runs a Python script or module with llama.cpp on our planner; GGML_SCHED=off leaves it alone

--html FILE: write a page that shows what was planned, beside what ggml's own rules make of it; needs the extra view"""


def main() -> int:
    del sys.argv[0]
    html = None
    if sys.argv[:1] == ["--html"]:
        if len(sys.argv) < 2:
            return _refused("--html names no file")
        html = os.path.abspath(sys.argv[1])
        try:
            check_writable(html)
        except OSError as error:
            return _refused(f"--html {sys.argv[1]}: {error.strerror}")
        del sys.argv[:2]
    if not sys.argv or sys.argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if sys.argv else 2
    if sys.argv[0] == "-m" and len(sys.argv) < 2:
        return _refused("-m names no module")
    if html is None:
        _run()
        return 0
    from ggml_sched.llama_cpp.shown import showing

    with showing(html):
        _run()
    return 0


def _refused(why: str) -> int:
    print(f"python -m ggml_sched.llama_cpp: {why}", file=sys.stderr)
    return 2


def _run() -> None:
    """Run the script or module that the command line names, and keep its global variables (`_LEFT`)."""
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path[0] = os.getcwd()
        _LEFT.append(runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True))
    else:
        path = sys.argv[0]
        sys.path[0] = os.path.dirname(os.path.abspath(path))
        if pkgutil.get_importer(path) is None and not path.endswith(".pyc"):
            _run_source(path)
        else:
            _LEFT.append(runpy.run_path(path, run_name="__main__"))


def _run_source(path: str) -> None:
    """Run a file of source code as the module `__main__`, which it stays: `runpy` puts the former module back, but
    threads and functions of `atexit` run after the last line of a script, and may pickle what it has defined."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    script = ModuleType("__main__")
    script.__file__ = path
    vars(script).update(__builtins__=builtins, __cached__=None)
    _LEFT.append(sys.modules["__main__"])
    sys.modules["__main__"] = script
    exec(code, vars(script))


_LEFT: list[object] = []
"""The global variables of what was run, which keep its contexts open until the page is written, and this module."""


if __name__ == "__main__":
    sys.exit(main())
