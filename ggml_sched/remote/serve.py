"""A worker's process: `python -m ggml_sched.remote.serve`, which `Processes` starts."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ggml_sched.backend import Backend
from ggml_sched.errors import BackendError, Error
from ggml_sched.remote.envelope import DRIVER
from ggml_sched.remote.mesh import Mesh
from ggml_sched.remote.worker import Worker

__all__ = ["backends_of", "serve"]

CONNECTED_WITHIN = 120.0
"""Seconds that a worker waits for the driver's first message."""


def backends_of(names: Sequence[str], n_threads: int | None = None) -> list[Backend]:
    """Backends by name (cpu, ggml, cuda, cuda:N, ggml:DEVICE), or those that a function MODULE:FUNCTION returns."""
    module, _, function = names[0].partition(":")
    if len(names) == 1 and function and module not in ("ggml", "cuda"):
        return _returned(names[0], getattr(importlib.import_module(module), function)())
    from ggml_sched.llama.defaults import named_backends

    return named_backends(names, n_threads)


def _returned(factory: str, returned: Any) -> list[Backend]:
    """The backends that a function has returned; BackendError for anything else, and then none stays open."""
    is_list = isinstance(returned, Iterable) and not isinstance(returned, Backend | str)
    items = [*returned] if is_list else []
    backends = [item for item in items if isinstance(item, Backend)]
    if not items or len(backends) < len(items) or len({*map(id, items)}) < len(items):
        for backend in [returned] if isinstance(returned, Backend) else backends:
            backend.close()
        said = repr(items if is_list else returned)
        raise BackendError(f"{factory} returned {said if len(said) <= 200 else f'{said[:197]}...'}: it must be a list "
                           "of one backend or more, each of them once")
    return backends


def serve(worker: Worker, mesh: Mesh) -> None:
    """Handle messages until the driver's connection ends."""
    end = time.monotonic() + CONNECTED_WITHIN
    is_connected = False
    while DRIVER not in mesh.lost and (is_connected or time.monotonic() < end):
        message = mesh.receive(None if is_connected else CONNECTED_WITHIN)
        if message is None:
            continue
        is_connected = True
        for to, out in worker.answer(message):
            mesh.send(to, out)


def _remove(mesh: Mesh) -> None:
    """Remove the folder of the sockets if the driver was killed; a driver that ends by itself removes it.  Tries for
    0.1 s, because a killed driver's socket may close a moment after its connection to this process."""
    for _ in range(10):
        if not mesh.listens(DRIVER):
            shutil.rmtree(mesh.folder, ignore_errors=True)
            break
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory", type=int)
    parser.add_argument("--reason", type=int, default=2, help="a file descriptor: why the worker does not start")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # the driver ends the worker
    with os.fdopen(args.reason, "w", encoding="utf-8", errors="backslashreplace", closefd=args.reason != 2) as reason:
        try:
            worker = Worker(args.name, backends_of(args.backend or ["cpu"], args.threads), args.memory)
        except Exception as error:
            print(f"worker {args.name!r} does not start: {type(error).__name__}: {error}", file=reason)
            if isinstance(error, Error | ImportError | AttributeError | ValueError):
                raise SystemExit(1) from error
            raise       # with its traceback on standard error
    mesh = Mesh(args.name, args.folder)
    try:
        serve(worker, mesh)
        _remove(mesh)
    finally:
        mesh.close()
        worker.close()


if __name__ == "__main__":
    main()
