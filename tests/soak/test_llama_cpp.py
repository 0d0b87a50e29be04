"""llama.cpp itself on our planner under load: bits equal to stock, no leak, no crash.

Each case is processes of their own that do the same (llama_cpp_load.py): stock, either level, and one whose level
changes with each context.  GGML_SCHED_SOAK=5 makes them five times as long.
"""

import importlib.util
import os

import pytest
from hooked import build
from llama_cpp_batches import check_batches
from llama_cpp_cases import CASES, LEVELS, MANY, WALKED, Runner

from ggml_sched.llama.synthetic import random_model

TIMES = int(os.environ.get("GGML_SCHED_SOAK", "1"))
GROWTH = 1 << 20
"""Permitted growth of resident memory in bytes while 80 contexts are opened and closed."""
KEPT = 512 << 10
"""Permitted bytes that malloc still has allocated afterwards, beyond stock's: released contexts leave cached graphs of
their sizes.  The sanitizers find unreachable memory (test_llama_cpp_sanitized.py)."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler"),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    return Runner(tmp_path_factory.mktemp("llama_cpp"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reuse", [True, False], ids=["graphs reused", "every token planned"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_ten_thousand_tokens_have_the_bits_of_stock(runner, case, reuse, level):
    (pair,) = runner.compare(level, case, [["generated", {"count": 10_000 * TIMES,
                                                          "sizes": [256, 1024, 512, 256, 768]}]], reuse=reuse)
    assert pair[1]["tokens"] >= 10_000 and pair[1]["shifting"] == 5
    if not reuse:
        assert pair[1]["calls"] > 10_000


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_hundred_contexts_leave_nothing_behind(runner, case, level):
    ((stock, ours),) = runner.compare(level, case, [["opened", {"count": 200 * TIMES}]])
    (resident, given), usual = ours["growth"], stock["growth"][1]
    assert ours["contexts"] >= 200
    assert resident <= GROWTH * TIMES
    assert given - max(usual, 0) <= KEPT


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contexts_in_two_threads_compute_what_each_computes_alone(runner, case, level):
    ((_, ours),) = runner.compare(level, case, [["in_threads", {"count": 900 * TIMES}]])
    assert ours["failed"] == []
    assert ours["together"] == ours["digest"]
    assert ours["looked"] > 0 and ours["plans"] > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_and_switches_go_on_with_the_bits_of_stock(runner, case, level):
    """States saved and restored, adapters, embeddings, attention that is not causal, callbacks that look and cancel."""
    pairs = runner.compare(level, case, [["restored", {"rounds": 12 * TIMES}], ["switched", {"rounds": 12 * TIMES}],
                                         ["interrupted", {"rounds": 24 * TIMES}]])
    (_, restored), (_, switched), (_, interrupted) = pairs
    # Of a window llama.cpp saves what is in it: the cells come back in other places, and sums differ, as in stock.
    assert max(restored["apart"]) == 0.0 or case.has_window
    assert all(switched["differs"]) or case.model == "random mamba"
    assert interrupted["cancelled"] > 0 and min(interrupted["looked"]) > 0
    for stock, ours in pairs:
        assert stock.items() <= ours.items()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", [case for case in CASES if case.devices], ids=str)
def test_devices_that_refuse_leave_the_others_working(runner, case, level):
    ((stock, ours),) = runner.compare(level, case, [["refused", {"most": 12}]])
    assert ours["words"] == stock["words"]
    assert ours["named"] == sum("compute pp buffers" in words for words in ours["words"]) > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", WALKED, ids=str)
def test_whatever_contexts_are_asked_for_their_bits_are_those_of_stock(runner, case, level):
    ((_, ours),) = runner.compare(level, case, [["wandered", {"seeds": 40 * TIMES}]])
    assert ours["tokens"] > 100 * len(ours["digest"])


@pytest.mark.parametrize("level", ["alloc", "sched"])
@pytest.mark.parametrize(("model", "n_seq", "cache"), [("llama", 64, "split"), ("llama", 4, "unified"),
                                                       ("mamba", 64, "split"), ("gpt-oss", 16, "split")])
def test_ten_thousand_random_batches_plan_nothing(level, model, n_seq, cache, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(random_model(model))
    check_batches(level, path, 10_000 * TIMES, n_seq, cache)
