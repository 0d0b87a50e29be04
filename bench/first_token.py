"""Time from a new process to the text of its first token, beside llama.cpp: pairs of fresh processes.

    python bench/first_token.py [--pairs N] [--threads N] [--files FOLDER] [--models NAME ...]

The models are those of speed_files.REAL that are installed, and small ones with large vocabularies, which are made at
the first run.  The file is in the page cache; each pair is one process of each engine, in turn; a ratio is the median
of the ratios of the pairs.  `speed.py` writes the table into its page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import speed_files
from new_process import environment

from ggml_sched.planning.tables import markdown

__all__ = ["Pair", "measure", "models", "section"]

WORKER = Path(__file__).resolve().with_name("first_token_worker.py")
ENGINES = ("llama.cpp", "cpu")
PAIRS = 7
TITLE = "First token: seconds from a new process to its text"


class Pair(NamedTuple):
    """Seconds of llama.cpp and of this package: of the whole process, and without starting Python and importing."""

    whole: tuple[float, float]
    loaded: tuple[float, float]


def one(engine: str, path: Path, threads: int) -> tuple[float, float]:
    command = [sys.executable, str(WORKER), engine, str(path), str(threads)]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True,
                          env=environment(OMP_NUM_THREADS=str(threads))) as process:
        line = process.stdout.readline()
        took = time.perf_counter() - start
    if not line:
        raise SystemExit(f"a worker died: {' '.join(command)}")
    return took, json.loads(line)["seconds"]


def measure(path: Path, threads: int, pairs: int = PAIRS) -> list[Pair]:
    """A first pair, which brings the file and the libraries into the page cache, goes uncounted."""
    found = []
    for i in range(pairs + 1):
        engines = ENGINES if i % 2 else ENGINES[::-1]
        times = {engine: one(engine, path, threads) for engine in engines}
        found.append(Pair(*zip(*(times[engine] for engine in ENGINES), strict=True)))
    return found[1:]


def models(folder: Path, names: list[str] | None = None) -> dict[str, Path]:
    """The models' files: real ones that are installed, and those with a vocabulary of a size and a kind."""
    real = {name: path for name, path in speed_files.real().items() if names is None or name in names}
    return real | {name: speed_files.make_vocabulary(folder, name) for name in speed_files.VOCABULARIES
                   if names is None or name in names}


def section(found: dict[str, list[Pair]], threads: int, machine: str = "") -> str:
    """The part of a page with these measurements; `machine` says where they were made, if not where the page was."""
    rows = []
    for name, pairs in found.items():
        cells: list[object] = [name]
        for seconds in ([pair.whole for pair in pairs], [pair.loaded for pair in pairs]):
            cells += [*(f"{median(column):.3f}" for column in zip(*seconds, strict=True)),
                      f"{median(ours / theirs for theirs, ours in seconds):.2f}"]
        rows.append(cells)
    n = max(map(len, found.values()), default=0)
    header = ["model", *(f"{what}{engine}" for what in ("", "loaded, ") for engine in (*ENGINES, "cpu / llama.cpp"))]
    return (f"## {TITLE}\n\n{machine}Threads: {threads}.  Medians of {n} pairs of fresh processes; the file is in the "
            "page cache; target ≤ 1.0.\n\"Loaded\" leaves out starting Python and importing.\n\n"
            + markdown(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "ggml-sched-speed")
    args = parser.parse_args()
    found = {name: measure(path, args.threads, args.pairs) for name, path in models(args.files, args.models).items()}
    print(section(found, args.threads))


if __name__ == "__main__":
    main()
