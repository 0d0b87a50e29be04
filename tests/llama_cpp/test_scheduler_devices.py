"""Our scheduler's queries, copies and waits on devices in ctypes that check every access, a process for each case.  The
files of cases document each.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ggml_here
import pytest
from processes import cases_of, run_case

QUERIES, WAITS, EXPERTS = (Path(__file__).with_name(f"{name}_cases.py")
                           for name in ("device_query", "synchronization", "expert"))
OLDER = {"older_library": ("ggml_opt_prepare_alloc", "ggml_glu_op_name"),
         "library_without_a_function": ("ggml_backend_event_wait",)}
"""Functions that are missing in the libraries of a case."""
pytestmark = pytest.mark.skipif(not ggml_here.IS_HERE, reason=ggml_here.WHY_NOT)


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


@pytest.mark.parametrize("case", [case for case in cases_of(QUERIES) if case not in OLDER])
def test_devices_clients_and_graphs_are_queried_as_ggml_does(case):
    run_case(QUERIES, case)


@pytest.mark.parametrize("case", OLDER)
def test_a_library_without_functions_that_we_use_works_as_before(case, tmp_path):
    run_case(QUERIES, case, GGML_SCHED_TEST_GGML=without(tmp_path, *OLDER[case]))


@pytest.mark.parametrize("case", [*cases_of(WAITS), "fused_nodes_that_read_copies"])
def test_devices_that_work_late_are_waited_for(case):
    run_case(WAITS, case)


@pytest.mark.parametrize("case", cases_of(EXPERTS))
def test_only_used_experts_of_weights_on_the_host_travel(case):
    run_case(EXPERTS, case)
