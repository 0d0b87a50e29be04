"""Fresh processes for tests: a file of cases of which each runs alone, because what it loads stays for a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent


def run_python(*arguments: str, status: int = 0, timeout: float = 120, cwd: Path | None = None,
               **environment: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, ended with a status: otherwise an AssertionError with what it said last."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env=os.environ | environment)
    assert done.returncode == status, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def cases_of(cases: Path, parameters: str = "") -> list[str]:
    """The cases of a file: its functions of these parameters that return nothing."""
    pattern = rf"^def ([a-z]\w*)\({re.escape(parameters)}\) -> None:$"
    found = re.findall(pattern, cases.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{cases} has no case of ({parameters})"
    return found


def run_case(cases: Path, case: str, *arguments: str, **environment: str) -> None:
    """One function of a file of cases, which prints "done" last; it may import what lies beside it."""
    path = os.pathsep.join(filter(None, (str(cases.parent), str(SUPPORT), os.environ.get("PYTHONPATH"))))
    settings = {"GGML_SCHED": "off", "PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"} | environment
    done = run_python(str(cases), case, *arguments, timeout=300, **settings)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
