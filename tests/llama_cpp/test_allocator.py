"""The graph allocator under ggml: what it gives tensors is what ggml's kernels may be given.

Each test is a process that loads the hook and ggml-python's libraries (allocator_cases.py).
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
from processes import run_case

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="needs ggml-python")
scenario = partial(run_case, HERE / "allocator_cases.py")


@pytest.mark.parametrize("first", [0, 30])
def test_random_graphs_have_the_same_bits_in_less_memory(first):
    scenario("random_graphs", str(first), str(first + 30))


def test_alignments_sizes_and_bounds_are_those_of_the_buffer_type():
    scenario("fake_types")


def test_a_tensor_that_is_larger_than_a_buffer_may_be_has_its_own():
    scenario("too_large_for_a_buffer")


def test_a_tensor_may_fill_the_largest_buffer_to_its_end():
    scenario("a_buffer_that_is_just_large_enough")


def test_views_of_computed_inputs_and_of_nothing_are_placed():
    scenario("views_at_the_edge")


def test_buffer_ids_of_one_type_share_an_arena():
    scenario("two_types")


def test_tensors_with_memory_are_left_alone():
    scenario("external_tensors_are_left_alone")


def test_leafs_outputs_and_views_have_what_they_are_promised():
    scenario("leafs_outputs_and_views")


def test_views_of_nothing_may_begin_past_the_end():
    scenario("views_of_nothing")


def test_an_output_that_is_a_view_keeps_its_memory():
    scenario("outputs_that_are_views")


def test_nodes_without_an_op_are_what_a_scheduler_means_by_them():
    scenario("a_scheduler_s_own_nodes")


def test_a_graph_that_grows_shrinks_or_is_rewired_is_another():
    scenario("growing_shrinking_and_rewiring")


def test_a_known_graph_is_not_planned_again():
    scenario("the_same_graph_is_not_planned_twice")


def test_graphs_wired_alike_share_a_plan_and_others_do_not():
    scenario("wired_alike")


def test_refused_memory_is_no_more_than_false():
    scenario("refused_memory_is_false")


def test_graphs_that_are_none_do_no_harm():
    scenario("graphs_that_are_none")


def test_what_a_fused_kernel_reads_is_not_written_over():
    scenario("fused_products_read_their_sources")


@pytest.mark.parametrize("case", ["fused_products_of_what_has_memory", "replayed_plans_let_nothing_fused_overlap",
                                  "shown_plans_let_nothing_fused_overlap"])
def test_what_may_be_fused_does_not_overlap_whoever_planned_it(case):
    scenario(case)


def test_threads_have_allocators_of_their_own():
    scenario("two_threads")


def test_plans_are_values_that_explain_themselves():
    scenario("plans_explain_themselves")


def test_ggml_s_scheduler_calls_us():
    scenario("ggml_s_own_scheduler_calls_us")


def test_ggml_s_own_allocator_can_be_called_through_us():
    scenario("passed_through")
