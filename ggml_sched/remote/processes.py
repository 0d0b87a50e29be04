"""Workers in processes of this machine: for several processes without Ray, and for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from ggml_sched.errors import BackendError
from ggml_sched.remote.envelope import DRIVER
from ggml_sched.remote.mesh import Mesh
from ggml_sched.remote.transport import WorkerOptions, check_names

__all__ = ["Processes"]

STARTS_WITHIN = 60.0
"""Seconds that a worker has to import the package and to open its backends."""
ENDS_WITHIN = 10.0
"""Seconds that a worker has to free its backends before it is killed."""


class Processes:
    """Starts a process for each worker: `workers` is {name: its options}.

    A `StartingTransport` that loses no message while the processes live.  A worker ends with the driver's process,
    however that ends.  BackendError if a worker does not start.
    """

    losses: int = 0
    patience: float | None = None

    def __init__(self, workers: Mapping[str, WorkerOptions]) -> None:
        check_names([*workers])
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = _folder()
        self._mesh = Mesh(DRIVER, self._folder)
        self._stop = weakref.finalize(self, _ended, self._mesh, self.processes, self._folder, os.getpid())
        try:
            with contextlib.ExitStack() as stack:
                reasons = {name: self._start(name, how, stack) for name, how in workers.items()}
                for name, reason in reasons.items():
                    self._connect(name, reason)
        except BaseException:
            for process in self.processes.values():
                process.kill()      # they hold nothing yet, and would wait for a connection
            self.close()
            raise

    def add(self, worker: str, how: WorkerOptions) -> None:
        check_names([*self.processes, worker])
        try:
            with contextlib.ExitStack() as stack:
                self._connect(worker, self._start(worker, how, stack))
        except BaseException:
            process = self.processes.pop(worker, None)      # so that a new worker may get the name
            if process is not None:
                process.kill()
                process.wait()
            (self._folder / worker).unlink(missing_ok=True)
            raise

    def _start(self, name: str, how: WorkerOptions, stack: contextlib.ExitStack) -> BinaryIO:
        """Start a worker; returns the file, which `stack` closes, where it writes why it does not start."""
        reason = stack.enter_context(tempfile.TemporaryFile())      # noqa: SIM115 - the stack closes it
        arguments = [f"--backend={backend}" for backend in how.backends]
        if how.threads is not None:
            arguments.append(f"--threads={how.threads}")
        if how.memory is not None:
            arguments.append(f"--memory={how.memory}")
        try:
            with _interrupted_after():
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-m", "ggml_sched.remote.serve", f"--name={name}", f"--folder={self._folder}",
                     f"--reason={reason.fileno()}", *arguments],
                    stdin=subprocess.DEVNULL, pass_fds=[reason.fileno()])
        except OSError as error:
            raise BackendError(f"no process for worker {name!r} can be started: {error}") from error
        return reason

    def _connect(self, name: str, reason: BinaryIO) -> None:
        end = time.monotonic() + STARTS_WITHIN
        while not self._mesh.connect(name):
            status = self.processes[name].poll()
            if status is not None:
                reason.seek(0)
                said = reason.read().decode(errors="replace").strip()
                if said:
                    raise BackendError(said)
                raise BackendError(f"worker {name!r} ended with status {status} before it was ready; what it said "
                                   "stands on standard error")
            if time.monotonic() > end:
                raise BackendError(f"worker {name!r} was not ready within {STARTS_WITHIN:g} s")
            time.sleep(0.005)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self.processes)

    def now(self) -> float:
        return time.monotonic()

    def post(self, worker: str, message: bytes, route: Sequence[str] = ()) -> None:
        self._mesh.send(worker, message)

    def abandon(self, worker: str) -> None:
        self.processes[worker].kill()       # a worker that hangs does not end by itself

    def receive(self, timeout: float) -> bytearray | None:
        return self._mesh.receive(timeout)

    def lost(self) -> dict[str, str]:
        found = {}
        for name, process in self.processes.items():
            if name in self._mesh.lost:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            if process.poll() is not None or name in self._mesh.lost:
                status = process.poll()
                found[name] = "its connection ended" if status is None else f"its process ended with status {status}"
        return found

    def close(self) -> None:
        self._stop()


@contextlib.contextmanager
def _interrupted_after() -> Iterator[None]:
    """While a worker is started: an interrupt is raised afterwards, when the worker is known and can be ended.  Ctrl-C
    goes to the workers, too, which ignore it once they have started; until then they inherit that it is blocked."""
    mask, handler = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), signal.getsignal(signal.SIGINT)
    came: list[tuple[int, FrameType | None]] = []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        handler = None
    else:       # another thread, of a library, may take the signal
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(handler) and came:
            handler(*came[0])


def _folder() -> Path:
    """A new folder that only this user can open.  Its path is short, because that of a socket has at most about 100
    bytes."""
    folder = tempfile.mkdtemp(prefix="ggml-sched-")
    if len(folder) > 60 and os.path.isdir("/tmp"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="ggml-sched-", dir="/tmp")
    return Path(folder)


def _ended(mesh: Mesh, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path, pid: int) -> None:
    """Close the connections, which makes the workers end, wait for them, and remove the folder of the sockets."""
    mesh.close()
    if os.getpid() != pid:
        return          # a child after a fork: the workers are its parent's
    end = time.monotonic() + ENDS_WITHIN
    for process in processes.values():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
