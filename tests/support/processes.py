"""Fresh processes for tests: a file of cases of which each runs alone, because what it loads stays for a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent


def cases_of(cases: Path, parameters: str = "") -> list[str]:
    """The cases of a file: its functions of these parameters that return nothing."""
    pattern = rf"^def ([a-z]\w*)\({re.escape(parameters)}\) -> None:$"
    found = re.findall(pattern, cases.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{cases} has no case of ({parameters})"
    return found


def run_case(cases: Path, case: str, *arguments: str, **environment: str) -> None:
    """One function of a file of cases, which prints "done" last; it may import what lies beside it."""
    path = os.pathsep.join(filter(None, (str(cases.parent), str(SUPPORT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, str(cases), case, *arguments], text=True, capture_output=True, timeout=300,
                          check=False, env=os.environ | {"GGML_SCHED": "off", "PYTHONPATH": path,
                                                         "OMP_WAIT_POLICY": "passive"} | environment)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
