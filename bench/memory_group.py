"""A control group that holds its processes to a limit of memory: anonymous memory and pages of files together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """The folder of a new group with this limit, without swap; None where this process may not make one.

    A process joins by `join`.  At the end the group has to be empty.
    """
    is_unified = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if is_unified else ROOT / "memory") / f"ggml-sched-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        (folder / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit))
        with suppress(OSError):         # a system without swap may not have these files
            (folder / ("memory.swap.max" if is_unified else "memory.swappiness")).write_text("0")
    except OSError:                     # the controller is not there
        folder.rmdir()
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def join(folder: str | Path) -> None:
    """Move this process to a group."""
    (Path(folder) / "cgroup.procs").write_text(str(os.getpid()))
