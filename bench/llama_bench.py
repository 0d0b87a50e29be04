"""Other builds of llama.cpp, timed by the program `llama-bench` that each of them has.

    Program.parsed("ik=/path/to/llama-bench -rtr 1")

Both spellings of a depth are known: `-d N` of llama.cpp, and `-gp N,M` of its fork ik_llama.cpp.  Each measurement is a
new process, which evaluates something once before it measures.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """A `llama-bench` with its options.

    Several of one name are settings of one engine, of which the best counts.
    """

    name: str
    command: tuple[str, ...]

    @classmethod
    def parsed(cls, text: str) -> Program:
        """Of "NAME=COMMAND".  Raises ValueError."""
        name, separator, command = text.partition("=")
        if not name or not separator or not command.strip():
            raise ValueError(f"{text!r} is not NAME=COMMAND")
        return cls(name, tuple(shlex.split(command)))

    @cached_property
    def _has_depth(self) -> bool:
        """Whether the program knows `-d`; if not, `-gp`."""
        text = subprocess.run([self.command[0], "--help"], capture_output=True, text=True, check=False).stdout
        return "--n-depth" in text

    def decode(self, path: Path, threads: int, n: int, depth: int) -> float:
        """Seconds a token, of n tokens after `depth`."""
        after = ["-n", str(n), "-d", str(depth)] if self._has_depth else ["-n", "0", "-gp", f"{depth},{n}"]
        return self._seconds(path, threads, "-p", "0", *after) / n

    def prompt(self, path: Path, threads: int, n: int) -> float:
        """Seconds to evaluate n tokens."""
        return self._seconds(path, threads, "-p", str(n), "-n", "0")

    def _seconds(self, path: Path, threads: int, *what: str) -> float:
        command = [*self.command, "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json", *what]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        (run,) = json.loads(done.stdout)
        return run["samples_ns"][0] / 1e9
