"""Memory, planning time, packing and computing, beside today's ggml and omnimalloc: a page of Markdown.

    python bench/report.py [--rounds N] [--graphs NAME ...] > docs/benchmarks.md

With the peer built (python bench/peer/build.py) ggml plans the same graphs in the same process.  Without it, bytes
are compared with what was recorded of it, and times are given alone; so is packing without omnimalloc.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

import numpy
import peer
import report_computing
import report_memory
import report_packing
import report_time
import samples
from peer import packer
from timing import BLOCK

import ggml_sched as gs
from ggml_sched.planning.tables import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="blocks of each measurement (20)")
    parser.add_argument("--graphs", nargs="+", default=samples.names(), metavar="NAME")
    args = parser.parse_args()
    if not peer.available():
        print("no peer: run python bench/peer/build.py to compare times with today's ggml", file=sys.stderr)
    if not packer.available():
        print("no omnimalloc: run pip install omnimalloc to compare packing with it", file=sys.stderr)
    parts = [report_memory.section(args.graphs), report_time.section(args.graphs, args.rounds),
             report_time.asked(args.graphs, args.rounds), report_time.built(args.rounds),
             report_time.large(args.rounds), report_packing.section(), report_computing.section(args.rounds)]
    summary = [line for _, lines in parts for line in lines]
    head = [f"{len(args.graphs)} graphs of well-known models, or as said", "target", "median", "worst"]
    print(heading(args.rounds))
    print(f"## Summary\n\n{markdown(head, summary)}\n")
    print("\n".join(text for text, _ in parts), end="")


def heading(rounds: int) -> str:
    ggml = (f"ggml {peer.version()} (from ggml-python's source distribution, -O3) in the same process"
            if peer.available() else "what was recorded of ggml, no peer being built here")
    return f"""# Benchmarks

Written by `python bench/report.py`; `pytest bench` times single operations.

Machine: {processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; Python \
{platform.python_version()}, NumPy {numpy.__version__}, ggml-sched {gs.__version__}.
Compared with {ggml}: devices without memory, alignment {samples.ALIGNMENT}.
The sides take turns in blocks of {BLOCK} runs, {rounds} times.  A time is the median of the blocks' medians; a ratio is
the median of the ratios of neighbouring blocks.

| configuration | backends, best first | where weights and caches live |
|---|---|---|
| c1 | CPU | CPU |
| c2half | GPU, CPU | half of the layers on each |
| c2full | GPU, CPU | all layers on the GPU, the embedding on the CPU |
| c4 | three GPUs, CPU | a third of the layers on each GPU, the embedding on the CPU |
"""


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(": ")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


if __name__ == "__main__":
    main()
