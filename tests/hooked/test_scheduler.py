"""ggml's schedulers on our planner, beside ggml's own: on its libraries from ggml-python, a process for each case."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ggml_here
import pytest
from hooked import build

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)
with_compiler = pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def devices(tmp_path_factory) -> str:
    """A library of devices whose memory nobody else reads."""
    return build.build(tmp_path_factory.mktemp("libraries"))["devices"]


def run(case: str, library: str = "") -> None:
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, str(TESTS / "hooked_sched_cases.py"), case, library], text=True,
                          capture_output=True, timeout=120, check=False,
                          env={**os.environ, "GGML_SCHED": "off", "PYTHONPATH": path})
    assert done.returncode == 0 and done.stdout.endswith("done\n"), f"{done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("case", ["one_cpu", "threads", "several_cpus"])
def test_random_graphs_have_the_bits_of_ggmls_own_scheduler(case):
    run(case)


@with_compiler
@pytest.mark.parametrize("case", ["devices", "devices_parallel"])
def test_copies_between_devices_change_no_bit(case, devices):
    run(case, devices)


@with_compiler
def test_nodes_where_the_client_wants_them_read_and_write_through_copies(devices):
    run("devices_chosen", devices)


def test_callbacks_are_asked_as_ggml_asks():
    run("callbacks")


@with_compiler
def test_answers_hold_over_computes_and_resets(devices):
    run("answers", devices)


def test_a_graph_that_differs_in_wiring_alone_is_noticed():
    run("wiring")


@with_compiler
def test_reserved_plans_serve_equal_and_smaller_graphs(devices):
    run("replayed", devices)


@with_compiler
def test_plans_of_schedulers_are_values_that_explain_themselves(devices):
    run("explained", devices)


def test_refused_memory_is_told_and_all_works_afterwards():
    run("refused")


@with_compiler
def test_experts_that_are_used_travel(devices):
    run("experts", devices)


def test_schedulers_of_several_threads_do_not_meet():
    run("two_threads")


@with_compiler
def test_schedulers_are_ggmls_own_where_only_allocators_are_ours(devices):
    run("passed_on", devices)


def test_graphs_of_nothing_and_schedulers_that_there_are_not():
    run("empty")
