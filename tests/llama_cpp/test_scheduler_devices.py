"""What our scheduler asks of devices and gives them: on devices by ctypes that watch it, a process for each case."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ggml_here
import pytest
from processes import run_case

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


def run(cases: str, case: str, **environment: str) -> None:
    run_case(HERE / f"{cases}_cases.py", case, **environment)


def without(folder: Path, *names: str) -> str:
    """A folder with ggml's libraries, in which functions of libggml-base have other names: the same length, so that
    nothing else moves."""
    here = ggml_here.LIBRARY or f"{importlib.util.find_spec('ggml').submodule_search_locations[0]}/lib"
    for path in Path(here).glob("libggml*"):
        text = path.read_bytes()
        for name in names if path.name.startswith("libggml-base") else ():
            word = b"\0" + name.encode() + b"\0"
            assert word in text
            text = text.replace(word, word[:-2] + b"_\0")
        (folder / path.name).write_bytes(text)
    return str(folder)


@pytest.mark.parametrize("case", ["random_graphs", "one_device_asks_for_more"])
def test_random_graphs_have_the_bits_of_the_cpu_on_devices_that_watch(case):
    run("device_query", case)


def test_nodes_go_where_their_weights_are():
    run("device_query", "weights_draw_their_readers")


def test_weights_on_the_host_are_offloaded_where_client_and_device_want_it():
    run("device_query", "offloading")


def test_clients_of_before_there_was_a_choice_offload(tmp_path):
    library = without(tmp_path, "ggml_opt_prepare_alloc", "ggml_glu_op_name")
    run("device_query", "older_library", GGML_SCHED_TEST_GGML=library)


def test_a_library_without_a_function_that_we_need_has_its_own_schedulers(tmp_path):
    run("device_query", "library_without_a_function", GGML_SCHED_TEST_GGML=without(tmp_path, "ggml_backend_event_wait"))


def test_schedulers_that_cannot_be_are_none():
    run("device_query", "schedulers_that_cannot_be")


def test_ops_that_a_device_refuses_are_computed_by_another():
    run("device_query", "ops_that_are_refused")


def test_choices_between_backends_of_one_type_are_joined():
    run("device_query", "choices_of_one_place")


def test_many_choices_are_all_remembered_until_a_reset():
    run("device_query", "many_choices")


def test_memory_that_another_device_reads_is_not_copied_but_waited_for():
    run("synchronization", "memory_that_others_read")


def test_memory_that_two_backends_share_is_one_queues_at_a_time():
    run("synchronization", "memory_that_two_share")


def test_what_one_writes_to_a_clients_memory_is_waited_for_by_who_reads_it():
    run("synchronization", "writes_that_others_read")


def test_memory_without_a_buffer_is_the_hosts():
    run("device_query", "memory_without_a_buffer")


def test_buffers_are_told_of_the_tensors_that_a_scheduler_gives_them():
    run("device_query", "buffers_are_told")


def test_a_tensor_above_the_largest_buffer_has_one_of_its_own():
    run("device_query", "too_large_for_a_buffer")


def test_a_graph_of_too_many_buffer_types_is_an_error_that_says_so():
    run("device_query", "too_many_types")


def test_a_graph_that_is_none_is_an_error_that_says_so():
    run("device_query", "graphs_that_are_circles")


def test_devices_are_waited_for_before_what_they_read_is_written():
    run("synchronization", "waiting_before_writing")


def test_copies_take_turns_so_that_computes_overlap():
    run("synchronization", "pipeline")


def test_views_of_what_is_copied_are_views_of_the_copy():
    run("synchronization", "views_of_copies")


def test_copies_that_fused_nodes_read_are_not_written_over():
    run("synchronization", "fused_nodes_that_read_copies")
    run("synchronization", "fused_nodes_that_read_copies_in_small_buffers")


def test_graphs_that_take_turns_read_their_own_copies():
    run("synchronization", "copies_of_graphs_that_take_turns")


def test_a_part_is_computed_in_place_on_another_device():
    run("synchronization", "in_place_through_a_copy")


def test_errors_of_devices_are_the_answer_and_end_the_compute():
    run("synchronization", "errors_of_devices")


def test_runs_of_used_experts_travel():
    run("expert", "used_experts_travel")


def test_ids_that_name_no_expert_copy_everything():
    run("expert", "ids_of_no_expert")


def test_experts_that_others_read_travel_whole():
    run("expert", "experts_that_others_read")


@pytest.mark.parametrize("case", ["experts_that_are_no_weights", "experts_of_no_mixture"])
def test_only_weights_of_the_host_travel_in_parts(case):
    run("expert", case)


@pytest.mark.parametrize("case", ["computed_ids", "ids_seen_through_a_view"])
def test_ids_are_read_back_from_who_has_them(case):
    run("expert", case)


def test_ops_that_nobody_supports_are_an_error_and_no_sound_plan():
    run("device_query", "ops_that_nobody_supports")
