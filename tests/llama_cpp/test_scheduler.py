"""ggml's schedulers on our planner, beside ggml's own: on its libraries from ggml-python, a process for each case."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import ggml_here
import pytest
from hooked import build
from processes import cases_of, run_case

CASES = Path(__file__).with_name("scheduler_cases.py")
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


@pytest.mark.parametrize("case", cases_of(CASES))
def test_schedulers_do_what_ggmls_own_do(case):
    run_case(CASES, case)


@pytest.mark.parametrize("case", [case for case in cases_of(CASES, "library: str") if case != "callers"])
def test_schedulers_of_several_devices_do_what_ggmls_own_do(case, devices):
    run_case(CASES, case, devices)


def test_who_calls_is_looked_up_once(tmp_path):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "callers.so"
    subprocess.run([*build.compiler().split(), "-shared", "-fPIC", "-O1", str(CASES.with_name("callers.cpp")),
                    "-o", str(library), "-ldl"], check=True)
    preloaded = filter(None, (os.environ.get("LD_PRELOAD"), str(library)))
    run_case(CASES, "callers", str(library), LD_PRELOAD=" ".join(preloaded))
