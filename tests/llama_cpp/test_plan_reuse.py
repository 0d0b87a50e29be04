"""Graphs that come again, for the same allocator or scheduler and for the next one: their plans serve, and a difference
between graphs is noticed.

Each test is a process that loads the hook and ggml's libraries; the files of cases say what each proves.
"""

from __future__ import annotations

from pathlib import Path

import ggml_here
import pytest
from processes import cases_of, run_case

ALLOCATOR = Path(__file__).with_name("allocator_reuse_cases.py")
SCHEDULER = Path(__file__).with_name("scheduler_reuse_cases.py")
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


@pytest.mark.parametrize("case", cases_of(ALLOCATOR))
def test_an_allocator_uses_plans_again_where_they_fit(case):
    run_case(ALLOCATOR, case)


@pytest.mark.parametrize("case", cases_of(SCHEDULER, "library: str"))
def test_a_scheduler_uses_plans_again_where_they_fit(case, devices):
    run_case(SCHEDULER, case, devices)
