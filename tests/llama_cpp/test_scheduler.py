"""ggml's schedulers on our planner, beside ggml's own: on its libraries from ggml-python, a process for each case."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import ggml_here
import pytest
from hooked import build
from processes import run_case

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)
run = partial(run_case, HERE / "scheduler_cases.py")


@pytest.mark.parametrize("case", ["one_cpu", "threads", "several_cpus"])
def test_random_graphs_have_the_bits_of_ggmls_own_scheduler(case):
    run(case)


@pytest.mark.parametrize("case", ["devices", "devices_parallel"])
def test_copies_between_devices_change_no_bit(case, devices):
    run(case, devices)


def test_nodes_where_the_client_wants_them_read_and_write_through_copies(devices):
    run("devices_chosen", devices)


def test_callbacks_are_asked_as_ggml_asks():
    run("callbacks")


def test_answers_hold_over_computes_and_resets(devices):
    run("answers", devices)


def test_a_graph_that_differs_in_wiring_alone_is_noticed():
    run("wiring")


def test_reserved_plans_serve_equal_and_smaller_graphs(devices):
    run("replayed", devices)


def test_plans_of_schedulers_are_values_that_explain_themselves(devices):
    run("explained", devices)


def test_refused_memory_is_told_and_all_works_afterwards():
    run("refused")


def test_experts_that_are_used_travel(devices):
    run("experts", devices)


def test_schedulers_of_several_threads_do_not_meet():
    run("two_threads")


def test_schedulers_are_ggmls_own_where_only_allocators_are_ours(devices):
    run("passed_on", devices)


def test_who_calls_is_looked_up_once(tmp_path):
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "callers.so"
    subprocess.run([*build.compiler().split(), "-shared", "-fPIC", "-O1", str(HERE / "callers.cpp"),
                    "-o", str(library), "-ldl"], check=True)
    preloaded = filter(None, (os.environ.get("LD_PRELOAD"), str(library)))
    run("callers", str(library), LD_PRELOAD=" ".join(preloaded))


def test_graphs_of_nothing_and_schedulers_that_there_are_not():
    run("empty")
