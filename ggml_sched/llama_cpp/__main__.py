"""python -m ggml_sched.llama_cpp SCRIPT ...: runs a script whose llama.cpp uses this package's planner."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m ggml_sched.llama_cpp SCRIPT [ARGUMENT ...]\n       python -m ggml_sched.llama_cpp -m "
              "MODULE [ARGUMENT ...]\n\nruns a Python script or module with llama.cpp on our planner; GGML_SCHED=off "
              "leaves it alone")
        return 0 if len(sys.argv) > 1 else 2
    if sys.argv[1] == "-m":
        if len(sys.argv) < 3:
            print("python -m ggml_sched.llama_cpp: -m names no module", file=sys.stderr)
            return 2
        del sys.argv[:2]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return 0
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
