"""A worker's process: `python -m ggml_sched.remote.serve`, which `Processes` starts."""

from __future__ import annotations

import argparse
import importlib
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ggml_sched.backend import Backend
from ggml_sched.errors import Error
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
        return [*getattr(importlib.import_module(module), function)()]
    from ggml_sched.llama.defaults import named_backends

    return named_backends(names, n_threads)


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
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # the driver ends the worker
    try:
        worker = Worker(args.name, backends_of(args.backend or ["cpu"], args.threads), args.memory)
    except (Error, ImportError, AttributeError, ValueError) as error:
        raise SystemExit(f"worker {args.name!r}: {error}") from error
    mesh = Mesh(args.name, args.folder)
    try:
        serve(worker, mesh)
        _remove(mesh)
    finally:
        mesh.close()
        worker.close()


if __name__ == "__main__":
    main()
