"""The graph allocator under ggml: addresses, sizes and reuse are valid for ggml's kernels.

Each test is a process that loads the hook and ggml-python's libraries, and allocator_cases.py documents it.
"""

from __future__ import annotations

from pathlib import Path

import ggml_here
import pytest
from processes import cases_of, run_case

CASES = Path(__file__).with_name("allocator_cases.py")
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


@pytest.mark.parametrize("first", [0, 30])
def test_random_graphs_have_the_same_bits_in_less_memory(first):
    run_case(CASES, "random_graphs", str(first), str(first + 30))


@pytest.mark.parametrize("case", cases_of(CASES))
def test_ggmls_kernels_get_what_they_may_be_given(case):
    run_case(CASES, case)
