"""Running the programs of this folder: a crash ends them, not the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_program(name: str, *arguments: str, **environment: str) -> str:
    """What a program of this folder prints; an AssertionError with its last words unless it ends well."""
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run([sys.executable, "-X", "faulthandler", str(HERE / name), *arguments],
                          env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True,
                          timeout=600)
    said = f"{name} {' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    return done.stdout
