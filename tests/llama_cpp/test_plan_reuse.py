"""Repeated graphs, in the same allocator or scheduler and in the next one, reuse their plans, and differences between
graphs are detected.

Each test is a process that loads the hook and ggml's libraries; the files of cases document each.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ggml_here
import pytest
from llama_cpp_batches import check_batches
from processes import cases_of, run_case

from ggml_sched.llama.synthetic import random_model

HERE = Path(__file__).resolve().parent
ALLOCATOR = Path(__file__).with_name("allocator_reuse_cases.py")
SCHEDULER = Path(__file__).with_name("scheduler_reuse_cases.py")
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


@pytest.mark.parametrize("case", cases_of(ALLOCATOR))
def test_an_allocator_uses_plans_again_where_they_fit(case):
    run_case(ALLOCATOR, case)


@pytest.mark.parametrize("case", cases_of(SCHEDULER, "library: str"))
def test_a_scheduler_uses_plans_again_where_they_fit(case, devices):
    run_case(SCHEDULER, case, devices)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("level", ["alloc", "sched"])
@pytest.mark.parametrize(("model", "n_seq", "cache"), [("tiny-llama", 4, "split"), ("mamba", 16, "unified")])
def test_after_the_first_graph_of_each_wiring_random_batches_of_llama_cpp_plan_nothing(model, n_seq, cache, level,
                                                                                      tmp_path):
    path = HERE.parent / "data" / "models" / "tiny-llama-f16.gguf"
    if model != "tiny-llama":
        path = tmp_path / "model.gguf"
        path.write_bytes(random_model(model))
    check_batches(level, path, 150, n_seq, cache)
