"""Fresh processes: Python code, programs, and the cases of a file, whose library stays loaded as long as a process."""

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


def preloading(library: str | Path) -> str:
    """LD_PRELOAD for a process: first the libraries of this one, such as a sanitizer's, then `library`."""
    return " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(library))))


def run_program(program: Path, *arguments: str, timeout: float = 600, **environment: str) -> str:
    """What a program prints; its folder and that of the test helpers are on its path."""
    path = os.pathsep.join(filter(None, (str(program.parent), str(SUPPORT), os.environ.get("PYTHONPATH"))))
    return run_python("-X", "faulthandler", str(program), *arguments, timeout=timeout,
                      **{"PYTHONPATH": path} | environment).stdout


def cases_of(cases: Path, parameters: str = "") -> list[str]:
    """The cases of a file: its functions with exactly these parameters and the annotation `-> None`."""
    pattern = rf"^def ([a-z]\w*)\({re.escape(parameters)}\) -> None:$"
    found = re.findall(pattern, cases.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{cases} has no case of ({parameters})"
    return found


def run_case(cases: Path, case: str, *arguments: str, **environment: str) -> None:
    """Run one function of a file of cases, with the file's folder on the path; the process prints "done" last."""
    settings = {"GGML_SCHED": "off", "OMP_WAIT_POLICY": "passive"} | environment
    printed = run_program(cases, case, *arguments, timeout=300, **settings)
    assert printed.endswith("done\n"), printed
