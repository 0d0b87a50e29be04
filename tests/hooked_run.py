"""Cases of the hook, each in a process of its own: hooking is for a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(cases: str, case: str, *arguments: str, **environment: str) -> None:
    """Case by name of a file of cases in this folder."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, str(HERE / f"{cases}.py"), case, *arguments], text=True, capture_output=True,
                          timeout=300, check=False, env=os.environ | {"GGML_SCHED": "off", "PYTHONPATH": path,
                                                                      "OMP_WAIT_POLICY": "passive"} | environment)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), f"{done.returncode}\n{done.stdout}\n{done.stderr}"
