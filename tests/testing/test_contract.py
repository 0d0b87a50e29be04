"""The contract finds what is wrong with a backend, asks for nothing that a backend does not declare, and runs from one
command."""

import re
import textwrap
from pathlib import Path

import pytest
from processes import run_python

from ggml_sched.backends.cpu.oracle.registry import KERNELS
from ggml_sched.testing.contract import CASES

ROOT = Path(__file__).resolve().parents[2]

GOOD = '''
import numpy as np
import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes

class Memory(gs.Buffer):
    def __init__(self, backend, size, base=0):
        super().__init__(backend, size, base)
        self.bytes = np.zeros(size, np.uint8)

    def write(self, offset, data):
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        out[:] = self.bytes[offset : offset + len(out)]

class Good(gs.Backend):
    """Computes negations alone."""
    def supports_op(self, node):
        return node.op == "UNARY:NEG"

    def alloc_buffer(self, size):
        return Memory(self, size)

    def compute_node(self, node):
        if not self.supports_op(node):
            raise gs.UnsupportedOp(f"{self.name}: {node!r}")
        run_nodes([node], lambda buffer: getattr(buffer, 'bytes', None) if buffer.backend is self else buffer.memory)
'''
"""A module with a backend that has one op, which is none of those that other tests use."""

LATE = """
        late = ()

        def graph_compute(self, graph):
            self.late = (*self.late, graph)

        def synchronize(self):
            late, self.late = self.late, ()
            for graph in late:
                super().graph_compute(graph)
        """
"""Methods that compute no graph before `synchronize`."""

SCALED_NORM = """
        def supports_op(self, node):
            return node.op in ("RMS_NORM", "MUL")

        def fusion_groups(self, graph):
            return [(0, len(graph.nodes) - 1)] if {fuses} else []

        def graph_compute(self, graph):
            if not getattr(graph, "groups", ()):
                super().graph_compute(graph)
                return
            norm, product = graph.nodes[0], graph.nodes[-1]
            x = norm.src[0].numpy()
            y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5)
            if 0 in graph.needed:
                norm.set(y)
            product.set(y * product.src[1].numpy())
        """
"""Methods that compute a norm times any tensor as one, where `fuses` is true, and read that tensor from memory."""

WRONG = {
    "skips": ("""
        def compute_node(self, node):
            if self.supports_op(node):
                super().compute_node(node)
        """, "test_a_node_is_computed_as_the_numpy_kernels_do_or_refused"),
    "zeros": ("""
        def compute_node(self, node):
            super().compute_node(node)
            node.set(np.zeros(node.ne[::-1], np.float32))
        """, "test_a_node_is_computed_as_the_numpy_kernels_do_or_refused"),
    "spoils its source": ("""
        def compute_node(self, node):
            super().compute_node(node)
            if node.src[0].offset == node.offset:
                node.src[0].set(np.zeros(node.ne[::-1], np.float32))
        """, "test_nodes_in_place_have_the_same_bits"),
    "reads from the start": ("""
        def get_tensor_async(self, tensor, out, offset=0):
            super().get_tensor_async(tensor, out, 0)
        """, "test_parts_of_a_tensor_are_set_and_fetched"),
    "writes too much": ("""
        def set_tensor_async(self, tensor, data, offset=0):
            super().set_tensor_async(tensor, data, offset)
            tensor.buffer.bytes[tensor.offset + offset + len(data) :][:1] = 0
        """, "test_setting_a_tensor_leaves_the_bytes_around_it"),
    "is too small": ("""
        def alloc_size(self, tensor):
            return tensor.nbytes + (0 if tensor.buffer is None else 100)
        """, "test_alloc_size_is_an_integer_of_at_least_the_tensors_bytes"),
    "depends on names": ("""
        def supports_op(self, node):
            return super().supports_op(node) and node.name == "out"
        """, "test_answers_depend_on_the_kind_of_node_alone"),
    "is misaligned": ("""
        def alloc_buffer(self, size):
            return Memory(self, size, 8)
        """, "test_buffers_are_as_large_as_requested_and_aligned"),
    "clears what others have": ("""
        made = []

        def alloc_buffer(self, size):
            buffer = Memory(self, size)
            buffer.free = lambda: [other.bytes.fill(0) for other in self.made]
            self.made.append(buffer)
            return buffer
        """, "test_closing_a_buffer_leaves_the_others_as_they_are"),
    "counts below zero": ("""
        used = 0

        def memory_available(self):
            return -self.used

        def alloc_buffer(self, size):
            self.used += size
            return super().alloc_buffer(size)
        """, "test_memory_available_counts_buffers"),
    "closes once": ("""
        is_open = True

        def close(self):
            assert self.is_open
            self.is_open = False
        """, "test_closing_is_idempotent"),
    "sets the root of a view": ("""
        def set_tensor_async(self, tensor, data, offset=0):
            tensor.buffer.write(tensor.root.offset + offset, data)
        """, "test_views_read_and_write_a_part_of_their_root"),
    "has a stack instead of a queue": ("""
        stack = None

        def set_tensor_async(self, tensor, data, offset=0):
            self.stack = [*(self.stack or ()), (tensor, bytes(data), offset)]

        def synchronize(self):
            while self.stack:
                tensor, data, offset = self.stack.pop()
                tensor.buffer.write(tensor.offset + offset, data)

        def get_tensor_async(self, tensor, out, offset=0):
            self.synchronize()
            super().get_tensor_async(tensor, out, offset)
        """, "test_queued_sets_and_gets_are_done_in_order_after_synchronize"),
    "has another's address": ("""
        is_host = True
        other = np.zeros(4096, np.uint8)

        def alloc_buffer(self, size):
            return Memory(self, size, -(-self.other.ctypes.data // 64) * 64)
        """, "test_memory_of_a_host_backend_is_that_of_the_process"),
    "copies nothing": ("""
        def cpy_tensor_from(self, src, dst):
            return True
        """, "test_tensors_are_copied_from_and_to_other_backends"),
    "computes backwards": ("""
        def graph_compute(self, graph):
            for node in reversed(graph.nodes):
                self.compute_node(node)
        """, "test_nodes_are_computed_in_order"),
    "runs a plan once": ("""
        def graph_plan_create(self, graph):
            return [graph]

        def graph_plan_compute(self, plan):
            if plan:
                self.graph_compute(plan.pop())
        """, "test_a_graph_plan_computes_its_graph_again"),
    "computes the graph before": ("""
        first = None

        def graph_compute(self, graph):
            self.first = self.first or graph
            super().graph_compute(self.first)
        """, "test_a_part_of_a_graph_is_computed_alone"),
    "stays broken": ("""
        is_broken = False

        def graph_compute(self, graph):
            assert not self.is_broken
            self.is_broken = True
            super().graph_compute(graph)
            self.is_broken = False
        """, "test_after_a_failure_it_works"),
    "passes events early": ("""
        late = None

        def get_tensor_async(self, tensor, out, offset=0):
            self.late = tensor, out, offset

        def synchronize(self):
            if self.late:
                super().get_tensor_async(*self.late)
                self.late = None

        def event_record(self, event):
            pass
        """, "test_an_event_passes_after_what_was_queued_before_it"),
    "refuses events that were not recorded": ("""
        def event_record(self, event):
            event.is_recorded = True

        def event_synchronize(self, event):
            assert event.is_recorded
        """, "test_an_event_that_was_never_recorded_has_passed"),
    "loses nodes under a callback": ("""
        def graph_compute(self, graph):
            if len(graph.nodes) > 1:
                super().graph_compute(graph)
            elif isinstance(graph, gs.Graph):
                super().graph_compute(graph)
        """, "test_a_callback_sees_each_node"),
    "answers None": ("""
        def offload_op(self, node):
            return None
        """, "test_answers_about_nodes_have_the_types_that_the_planner_expects"),
    "reads what it does not own": ("""
        def supports_buffer(self, buffer):
            return buffer.backend is self or buffer.backend.is_host

        def compute_node(self, node):
            super().compute_node(node)
            if node.src[0].backend is not self:
                node.set(np.zeros(node.ne[::-1], np.float32))
        """, "test_buffers_that_it_reads_without_a_copy"),
    "copies the gaps": ("""
        def cpy_tensor_from(self, src, dst):
            data = bytearray(src.nbytes)
            src.backend.get_tensor(src, data)
            self.set_tensor(dst, data)
            return True
        """, "test_a_copy_leaves_the_bytes_between_the_elements"),
    "does not wait": ("""
        def event_wait(self, event):
            pass
        """, "test_it_waits_for_events_of_other_backends"),
    "is asynchronous without events": ("""
        asynchronous = True
        """, "test_an_asynchronous_backend_overrides_the_methods_of_queues"),
    "takes data late": ("""
        takes_at_once = True
        late = None

        def set_tensor_async(self, tensor, data, offset=0):
            self.synchronize()
            self.late = tensor, data, offset

        def synchronize(self):
            if self.late:
                tensor, data, offset = self.late
                self.late = None
                tensor.buffer.write(tensor.offset + offset, data)

        def get_tensor_async(self, tensor, out, offset=0):
            self.synchronize()
            super().get_tensor_async(tensor, out, offset)

        def compute_node(self, node):
            self.synchronize()
            super().compute_node(node)
        """, "test_data_that_it_takes_at_once_may_change_afterwards"),
    "keeps its memory": ("""
        used = 0

        def __init__(self, name="mine", memory=1 << 30):
            super().__init__(name)
            self.memory = memory

        def alloc_buffer(self, size):
            if self.used + size > self.memory:
                raise gs.OutOfMemory("no", self.name, size, self.memory - self.used)
            self.used += size
            return super().alloc_buffer(size)
        """, "test_memory_that_was_freed_is_available_again"),
    "fuses what is no node": ("""
        def supports_op(self, node):
            return node.op == "ADD"

        def fusion_groups(self, graph):
            return [(0, 1), (1, 2)]
        """, "test_groups_are_ascending_positions_of_nodes_that_compute"),
    "writes behind its result": ("""
        def compute_node(self, node):
            super().compute_node(node)
            node.buffer.bytes[node.offset + node.nbytes :][:4] = 0
        """, "test_a_node_is_computed_as_the_numpy_kernels_do_or_refused"),
    "rounds to zero": ("""
        def supports_op(self, node):
            return node.op == "CPY"

        def compute_node(self, node):
            super().compute_node(node)
            if node.type == gs.Type.F16:
                exact = node.src[0].numpy().astype(np.float32)
                node.set((exact.view(np.uint32) & 0xFFFFE000).view(np.float32))
        """, "test_a_node_is_computed_as_the_numpy_kernels_do_or_refused"),
    "keeps values of sources": ("""
        first = None

        def compute_node(self, node):
            super().compute_node(node)
            if self.first is None:
                self.first = node.numpy()
            node.set(self.first)
        """, "test_values_that_change_between_computes_are_read"),
    "keeps the results of a plan": ("""
        def graph_plan_create(self, graph):
            return [graph]

        def graph_plan_compute(self, plan):
            if len(plan) == 1:
                self.graph_compute(plan[0])
                plan.append([node.numpy() for node in plan[0].nodes])
            for node, result in zip(plan[0].nodes, plan[1]):
                node.set(result)
        """, "test_a_graph_plan_computes_its_graph_again"),
    "gives halves too little": ("""
        def alloc_size(self, tensor):
            return tensor.nbytes - (tensor.type == gs.Type.F16)
        """, "test_alloc_size_is_an_integer_of_at_least_the_tensors_bytes"),
    "shows another's memory": ("""
        is_host = True

        def alloc_buffer(self, size):
            buffer = super().alloc_buffer(size)
            buffer.memory = buffer.bytes.copy()
            return buffer
        """, "test_arrays_over_host_memory_have_the_data"),
    "queues copies to the start of a buffer": ("""
        def cpy_tensor_async(self, src, dst):
            data = bytearray(src.nbytes)
            src.backend.get_tensor(src, data)
            dst.buffer.write(0, data)
            return True
        """, "test_queued_copies_are_done_in_order"),
    "computes late": (LATE, "test_sets_computes_and_gets_are_in_one_order"),
    "forgets that queued work failed": (LATE, "test_a_failure_of_queued_work_reaches_the_next_wait_once"),
    "stops after a failure": ("""
        tasks = ()
        error = None

        def graph_compute(self, graph):
            self.tasks = (*self.tasks, graph)

        def event_record(self, event):
            event.n = len(self.tasks)

        def event_synchronize(self, event):
            for _ in range(getattr(event, "n", 0)):
                assert self.error is None, "would wait for ever"
                graph, *self.tasks = self.tasks
                try:
                    super().graph_compute(graph)
                except Exception as error:
                    self.error = error

        def synchronize(self):
            error, self.error, self.tasks = self.error, None, ()
            if error is not None:
                self.note_failure(error)
                raise error
        """, "test_a_failure_of_queued_work_reaches_the_next_wait_once"),
    "has all memory at all times": ("""
        used = 0

        def __init__(self, name="mine", memory=1 << 30):
            super().__init__(name)
            self.memory = memory

        def memory_available(self):
            return self.memory

        def alloc_buffer(self, size):
            if self.used + size > self.memory:
                raise gs.OutOfMemory("no", self.name, size, self.memory - self.used)
            self.used += size
            buffer = super().alloc_buffer(size)
            buffer.free = lambda: setattr(self, "used", self.used - size)
            return buffer
        """, "test_memory_that_was_freed_is_available_again"),
    "depends on being an output": ("""
        def supports_op(self, node):
            return super().supports_op(node) and not node.flags
        """, "test_answers_depend_on_the_kind_of_node_alone"),
    "loses the results of a group": ("""
        def supports_op(self, node):
            return node.op == "ADD"

        def fusion_groups(self, graph):
            return [(0, 1)] if len(graph.nodes) == 2 else []

        def graph_compute(self, graph):
            super().graph_compute(gs.GraphView(graph.nodes[1:]) if getattr(graph, "groups", ()) else graph)
        """, "test_a_group_computed_as_one_gives_what_its_members_give"),
    "reads a member that its group does not write": (
        SCALED_NORM.format(fuses="graph.nodes[-1].op == 'MUL' and len(graph.nodes) == 2"),
        "test_a_group_computed_as_one_gives_what_its_members_give"),
    "reads a view of a member that its group does not write": (
        SCALED_NORM.format(fuses="graph.nodes[-1].op == 'MUL' and graph.nodes[-1].src[1] is not graph.nodes[0]"),
        "test_a_group_computed_as_one_gives_what_its_members_give"),
    "plans a group that reads a view of its member": (
        SCALED_NORM.format(fuses="graph.nodes[-1].op == 'MUL' and graph.nodes[-1].src[1] is not graph.nodes[0]"),
        "test_a_scheduler_plans_its_groups"),
}
"""{what is wrong: (the body of a class over Good, the test that fails)}."""


@pytest.fixture
def run_suite(tmp_path):
    """Run the suite of a module's backend in a new process; what it prints."""
    def run(module: str, name: str, *options: str, status: int = 0, stream: str = "stdout") -> str:
        (tmp_path / "mine.py").write_text(module)
        done = run_python("-m", "pytest", "-p", "_ggml_sched_pytest", "-p", "no:cacheprovider", "--rootdir",
                          str(tmp_path), "--pyargs", "ggml_sched.testing", "--backend", f"mine:{name}", "--tb=short",
                          *options, cwd=tmp_path, status=status)
        return getattr(done, stream)

    return run


def test_a_backend_of_one_op_passes(run_suite):
    printed = run_suite(GOOD, "Good", "-W", "error")
    assert "supports: 2 of " in printed and "declares: has_memory, a second one" in printed
    assert " passed" in printed and "failed" not in printed


def test_inherited_graph_plans_that_a_scheduler_does_not_use_are_not_tested(run_suite):
    module = """
import ggml_sched as gs

class Own(gs.CpuBackend):
    def __init__(self, name="own", memory=None):
        super().__init__(1, name, memory)

    def graph_compute(self, graph):
        super().graph_compute(graph)
"""
    printed = run_suite(module, "Own", "-rs", "-k", "a_graph_plan_computes")
    assert "makes no graph plans" in printed and "1 skipped" in printed


def test_what_is_wrong_with_a_backend_fails_its_test(tmp_path):
    """All in one run, as one process takes a second to start."""
    classes, tests = "", ""
    for k, (body, _) in enumerate(WRONG.values()):
        classes += f"\nclass Wrong{k}(Good):\n{textwrap.indent(textwrap.dedent(body), '    ')}"
        tests += f"\nclass TestWrong{k}(Few):\n    def new_backend(self):\n        return Wrong{k}('mine')\n"
        if "memory" in body.partition("__init__")[2]:
            tests += f"\n    def limited_backend(self, memory):\n        return Wrong{k}('mine', memory)\n"
    module = f"""{GOOD}{classes}
from ggml_sched.testing.contract import CASES, BackendContract

class Few(BackendContract):
    cases = [case for case in CASES if case.name in ("ADD", "ADD of f16", "UNARY:NEG", "CPY to f16")]

    def new_backend(self):
        return Good("good")

class TestGood(Few):
    pass
{tests}"""
    (tmp_path / "test_wrong.py").write_text(module)
    chosen = [f"test_wrong.py::TestWrong{k}::{test}" for k, (_, test) in enumerate(WRONG.values())]
    done = run_python("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-q", "-rf", "--tb=no",
                      "test_wrong.py::TestGood", *chosen, status=1, cwd=tmp_path)
    failed = set(re.findall(r"^FAILED .*?::Test(Good|Wrong\d+)::(\w+)", done.stdout, re.M))
    assert [test for name, test in failed if name == "Good"] == []
    assert [what for k, (what, (_, test)) in enumerate(WRONG.items()) if (f"Wrong{k}", test) not in failed] == []


def test_wrong_results_of_a_node_that_is_not_supported_are_told_from_those_of_a_kernel(run_suite):
    module = f"""{GOOD}
class Open(Good):
    def compute_node(self, node):
        if node.op == "UNARY:NEG" or node.op == "SQR":
            node.set(np.zeros(node.ne[::-1], np.float32))
"""
    printed = run_suite(module, "Open", "-k", "refused and (UNARY:NEG or SQR)", status=1)
    said = r"AssertionError: <Open '\w+'> does not support <Tensor .* SQR .*>, and computes it without an exception: "
    assert re.search(said, printed) and "the error is" in printed and not re.search("does not support.*NEG", printed)


def test_parts_and_ops_are_selected(run_suite):
    printed = run_suite(GOOD, "Good", "-k", "TestOps and NEG")
    assert re.search(r" 2 passed, \d+ deselected", printed), printed


@pytest.mark.parametrize("name, said", [
    ("Missing", "has no attribute 'Missing'"), ("gs", "neither a class nor a function"),
    ("broken", "ValueError: no device"), ("broken", "line 3, in broken"),
    ("nothing", "returned None, which is no ggml_sched.Backend"), ("ends", "SystemExit: no driver")])
@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_backend_that_can_not_be_made_is_named(pytester, name, said, quiet):
    pytester.makepyfile(mine="import ggml_sched as gs\ndef nothing(): pass\n"
                             "def broken(): raise ValueError('no device')\n"
                             "def ends(): raise SystemExit('no driver')\n")
    done = pytester.runpytest_inprocess("-p", "ggml_sched.testing.plugin", "--pyargs", "ggml_sched.testing",
                                        "--backend", f"mine:{name}", *quiet)
    printed = done.stderr.str()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert said in printed and f"--backend mine:{name}" in printed and "INTERNALERROR" not in printed


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_a_function_that_skips_skips_the_suite(pytester, quiet):
    pytester.makepyfile(mine="import pytest\ndef absent(): pytest.skip('no device')\n")
    done = pytester.runpytest_inprocess("-p", "ggml_sched.testing.plugin", "--pyargs", "ggml_sched.testing",
                                        "--backend", "mine:absent", "-k", "TestMemory", *quiet)
    # Warnings: pytest warns of the plugin where a test before this one has imported it.
    assert done.ret == 0 and set(done.parseoutcomes()) - {"warnings"} == {"skipped", "deselected"}
    assert bool(quiet) != ("backend: none, no device" in done.stdout.str())


def test_an_error_in_the_module_of_a_backend_has_its_line(pytester):
    pytester.makepyfile(mine="import ggml_sched as gs\n1 / 0\n")
    done = pytester.runpytest_inprocess("-p", "ggml_sched.testing.plugin", "--pyargs", "ggml_sched.testing",
                                        "--backend", "mine:Backend")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--backend mine:Backend", "*mine.py*line 2*", "*ZeroDivisionError: *"])


def test_a_test_that_waits_for_ever_is_named_with_its_stack(run_suite):
    module = GOOD + """
import threading

class Stuck(Good):
    def get_tensor_async(self, tensor, out, offset=0):
        threading.Event().wait()
"""
    said = run_suite(module, "Stuck", "--time-limit", "1", "-k", "TestData", status=1, stream="stderr")
    assert 'mine.py", line ' in said and "in get_tensor_async" in said
    assert re.search(r"::test_\w+ has not ended after 1 s \(--time-limit\)", said)


def test_without_a_backend_nothing_passes(pytester):
    done = pytester.runpytest_inprocess("-p", "_ggml_sched_pytest", "--pyargs", "ggml_sched.testing")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "--backend MODULE:NAME" in done.stdout.str()


def test_the_suite_runs_where_files_of_tests_have_other_names(pytester):
    pytester.makeini("[pytest]\npython_files = check_*.py\naddopts = --strict-markers\n")
    # In a process of its own: pytest warns of a plugin that this process has imported.
    done = pytester.runpytest_subprocess("-p", "_ggml_sched_pytest", "--pyargs", "ggml_sched.testing", "-W", "error",
                                         "--backend", "ggml_sched:DryBackend", "-k", "TestMemory")
    assert done.ret == 0 and done.parseoutcomes()["passed"] > 5


def test_other_runs_of_pytest_load_nothing(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_nothing_is_loaded():\n    assert 'ggml_sched' not in sys.modules\n")
    run_python("-m", "pytest", "-p", "_ggml_sched_pytest", "-q", "test_other.py", cwd=tmp_path)
    conftest = "def pytest_addoption(parser):\n    parser.addoption('--backend')\n"
    (tmp_path / "conftest.py").write_text(conftest)
    run_python("-m", "pytest", "-p", "_ggml_sched_pytest", "-q", "--backend", "x", "test_other.py", cwd=tmp_path)


def test_every_op_of_the_numpy_kernels_has_a_case():
    """Each case begins with its op's name."""
    assert {case.op for case in CASES} == {case.made()[1].op for case in CASES}
    assert [case.name for case in CASES if case.made()[1].op != case.op] == []
    assert {*KERNELS} - {case.op for case in CASES} == set()


def test_cases_have_the_same_values_each_time():
    for case in CASES[::10]:
        (first, _), (second, _) = case.made(), case.made()
        assert [v.tobytes() for v in first.values.values()] == [v.tobytes() for v in second.values.values()]
