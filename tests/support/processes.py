"""Runs each case of a file in a fresh process, because a loaded library stays loaded for the process's life."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent


def run_python(*arguments: str, status: int = 0, timeout: float = 120, cwd: Path | None = None,
               **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`; an unexpected exit status raises AssertionError with the end of its output."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env=os.environ | environment)
    assert done.returncode == status, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def cases_of(cases: Path, parameters: str = "") -> list[str]:
    """The cases of a file: its functions with exactly these parameters and the annotation `-> None`."""
    pattern = rf"^def ([a-z]\w*)\({re.escape(parameters)}\) -> None:$"
    found = re.findall(pattern, cases.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{cases} has no case of ({parameters})"
    return found


def run_case(cases: Path, case: str, *arguments: str, **environment: str) -> None:
    """Run one function of a file of cases, with the file's folder on the path; the process prints "done" last."""
    path = os.pathsep.join(filter(None, (str(cases.parent), str(SUPPORT), os.environ.get("PYTHONPATH"))))
    settings = {"GGML_SCHED": "off", "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"} | environment
    done = run_python(str(cases), case, *arguments, timeout=300, **settings)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
