"""The time that importing the package takes beyond Python's start, and beyond NumPy's import.

    python bench/importing.py [--runs N] [--limit MS]

CPU seconds of new processes that read bytecode, which other work on the machine changes less than the time that passes:
the least of some runs, in milliseconds.  Exit code 1 if something takes more than the limit (100 ms) beyond NumPy.
"""

import argparse
import resource
import subprocess
import sys

from new_process import environment

IMPORTS = {
    "import ggml_sched": "import ggml_sched",
    "a scheduler and a backend": "import ggml_sched; ggml_sched.Scheduler, ggml_sched.CpuBackend",
    "import ggml_sched.llama": "import ggml_sched.llama",
    "import ggml_sched.llama_cpp": "import ggml_sched.llama_cpp",
}


def seconds(code: str, runs: int) -> float:
    """The least CPU seconds of a new process that runs the code, without the working directory on its path: that may
    have the package's sources, not compiled."""
    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    found = []
    for _ in range(runs + 1):       # the first may compile
        before = used()
        subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment())
        found.append(used() - before)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=100, metavar="MS")
    given = parser.parse_args()
    start, with_numpy = seconds("pass", given.runs), seconds("import numpy", given.runs)
    print(f"{'NumPy':28} {(with_numpy - start) * 1e3:6.0f} ms beyond Python's start")
    worst = 0.0
    for title, code in IMPORTS.items():
        alone, both = seconds(code, given.runs), seconds(f"import numpy; {code}", given.runs)
        beyond = (both - with_numpy) * 1e3
        worst = max(worst, beyond)
        print(f"{title:28} {(alone - start) * 1e3:6.0f} ms, {beyond:6.0f} ms beyond NumPy")
    sys.exit(worst > given.limit)


if __name__ == "__main__":
    main()
