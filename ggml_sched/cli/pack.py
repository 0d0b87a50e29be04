"""Pack the lifetimes of a CSV file into one arena.

The file has a header with the columns lower, upper and size (bytes; lifetimes are half-open, any
integers) and any others; this is MiniMalloc's format.  With --out, the offsets are written as the
same file with a column `offset` added.
"""

from __future__ import annotations

import argparse
import csv
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

COLUMNS = ("lower", "upper", "size")
MAX_SIZE = 2**63 - 1
MAX_DIGITS = 60     # the most digits of a number in the file: int() of a million digits would take very long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.csv", help="lower,upper,size for each buffer; - is stdin")
    parser.add_argument("--capacity", type=int, metavar="BYTES",
                        help="stop at an arena that fits this; exit code 3 if none was found")
    parser.add_argument("--budget", type=int, metavar="TRIES", help="tries of exact search, 0 for none")
    parser.add_argument("--out", metavar="FILE", help="write the offsets here; - is stdout")


def run(args: argparse.Namespace) -> int:
    """Pack and report; returns the exit code: 3 if the arena is larger than --capacity, else 0."""
    from ggml_sched import Error, FileFormatError, pack

    header, rows, columns = read(args.file)
    start = time.perf_counter()
    try:
        lower, upper, size = columns
        found = _interruptible(lambda: pack(lower, upper, size, capacity=args.capacity, budget=args.budget))
    except Error as error:
        raise FileFormatError(f"{args.file}: {error}") from None
    took = time.perf_counter() - start
    above = 100 * (found.arena / max(found.bound, 1) - 1) if found.arena else 0
    report = [
        f"{args.file}: {len(rows)} buffers",
        f"arena   {found.arena} bytes" + (f", {above:.2f} % above the bound" if above else ""),
        f"bound   {found.bound} bytes",
        f"method  {found.method}, {found.tries} tries, {1e3 * took:.2f} ms",
        f"optimal {'yes' if found.optimal else 'not proven'}",
    ]
    missed = args.capacity is not None and found.arena > args.capacity
    if missed:
        why = "more bytes are alive at once" if found.bound > args.capacity else "a larger --budget may find an arena"
        report.append(f"misses  the capacity of {args.capacity} bytes by {found.arena - args.capacity}: {why}")
    print("\n".join(report), file=sys.stderr if args.out == "-" else sys.stdout)
    if args.out is not None:
        write(args.out, header, rows, found.offsets.tolist())
    return 3 if missed else 0


def _interruptible(call: Callable[[], T]) -> T:
    """The result of a call that runs in C for long: on a thread that does not outlive the process, because a signal is
    handled between Python's instructions of the main thread alone."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="pack", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def read(path: str) -> tuple[list[str], list[list[str]], tuple[list[int], ...]]:
    """The header, the rows as text, and the columns lower, upper and size; FileFormatError for a bad file."""
    from ggml_sched import FileFormatError

    try:
        if path == "-":
            table = list(csv.reader(sys.stdin, strict=True))
        else:
            with open(path, encoding="utf-8", newline="") as file:
                table = list(csv.reader(file, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not a CSV file: {error}") from None
    if not table:
        raise FileFormatError(f"{path}: empty; expected a header with {', '.join(COLUMNS)}")
    header = [name.strip().lower() for name in table[0]]
    missing = [name for name in COLUMNS if header.count(name) != 1]
    if missing:
        raise FileFormatError(f"{path}: the header must have one column {missing[0]!r}, not {table[0][:8]}")
    at = [header.index(name) for name in COLUMNS]
    rows: list[list[str]] = []
    columns: tuple[list[int], ...] = tuple([] for _ in COLUMNS)
    for line, row in enumerate(table[1:], 2):
        if not row:
            continue
        if len(row) != len(header):
            raise FileFormatError(f"{path}: row {line} has {len(row)} fields, the header {len(header)}")
        for name, column, k in zip(COLUMNS, columns, at, strict=True):
            column.append(_integer(row[k], f"{path}: row {line}: {name}"))
        rows.append(row)
        lower, upper, size = (column[-1] for column in columns)
        if lower > upper or size < 0:
            raise FileFormatError(f"{path}: row {line}: {size} bytes over [{lower}, {upper}) make no sense")
        if size > MAX_SIZE:
            raise FileFormatError(f"{path}: row {line}: {size} bytes do not fit into 63 bits")
    return table[0], rows, columns


def _integer(text: str, where: str) -> int:
    from ggml_sched import FileFormatError

    text = text.strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS):
        raise FileFormatError(f"{where} is not an integer: {text[:40]!r}")
    return int(text)


def write(path: str, header: list[str], rows: list[list[str]], offsets: list[int]) -> None:
    table: list[list[object]] = [[*header, "offset"], *([*row, at] for row, at in zip(rows, offsets, strict=True))]
    if path == "-":
        csv.writer(sys.stdout, lineterminator="\n").writerows(table)
        return
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    from ggml_sched.cli import main

    sys.exit(main(["pack", *sys.argv[1:]]))
