"""Graphs that come again, for the same allocator or scheduler and for the next one: what is known of them serves, and
whatever differs is noticed.

Each test is a process that loads the hook and ggml's libraries: allocator_reuse_cases.py, scheduler_reuse_cases.py.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
from processes import run_case

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="needs ggml-python")
run = partial(run_case, HERE / "allocator_reuse_cases.py")
run_scheduler = partial(run_case, HERE / "scheduler_reuse_cases.py")


def test_an_allocator_that_was_put_back_serves_the_next():
    run("allocator_after_allocator")


def test_another_type_at_the_address_of_one_that_is_gone_is_another():
    run("other_type_at_the_same_address")


def test_tensors_may_get_memory_lose_it_or_become_views():
    run("memory_that_came_and_went")


def test_tensors_may_have_other_shapes_where_they_were():
    run("shapes_that_changed")


def test_sources_behind_the_first_count():
    run("sources_behind_the_first")


def test_what_a_graph_lists_counts():
    run("lists_that_differ")


def test_a_graph_goes_where_it_is_wanted_now():
    run("wanted_elsewhere")


def test_types_are_asked_again_for_the_next_allocator():
    run("asked_again")


def test_few_allocators_are_kept():
    run("few_are_kept")


def test_a_graph_that_is_built_in_two_places_is_known_in_both():
    run("two_places_in_turn")


def test_nodes_without_op_are_known_by_what_they_name():
    run("nodes_without_op")


def test_other_weights_make_another_graph():
    run("other_weights")


def test_buffers_are_told_of_the_tensors_that_they_get():
    run("buffers_are_told")


def test_one_tensor_in_the_place_of_two_is_noticed():
    run("one_tensor_for_two")


def test_views_of_views_are_read_each_time():
    run("views_of_views")


def test_what_only_a_view_names_is_named_elsewhere_too():
    run("roots_that_nobody_lists")


def test_ever_new_shapes_leave_nothing_behind():
    run("looks_without_end")


def test_graphs_of_ggml_s_scheduler_are_known_again(devices):
    run_scheduler("under_ggml_s_scheduler", devices)


def test_a_scheduler_s_graphs_come_again_elsewhere(devices):
    run_scheduler("graphs_elsewhere", devices)


def test_a_scheduler_s_graphs_serve_the_next_one(devices):
    run_scheduler("next_scheduler", devices)
