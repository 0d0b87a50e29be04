"""Plans of a CUDA backend: eager once, captured, replayed; what they hold, and what ends them."""

import threading

import cupy_devices as devices
import numpy as np
import pytest
from cuda_emulator import EmulatedDevice

import ggml_sched as gs
from ggml_sched.backends.cupy.device import DeviceError

RNG = np.random.default_rng(4)
KERNEL = "elementwise.binary"
STREAM = 4      # its place in the arguments of Function.launch


class Sums:
    """out = (a + b) * a, and each step of it, in resident memory."""

    def __init__(self, backend, n: int = 300) -> None:
        self.ctx = gs.Context("sums")
        self.a, self.b = (self.ctx.tensor("f32", n, name) for name in "ab")
        self.sum = self.ctx.set_name(self.ctx.add(self.a, self.b), "sum")
        self.out = self.ctx.set_name(self.ctx.mul(self.sum, self.a), "out")
        self.graph = gs.Graph(self.out)
        self.backend, self.buffer = backend, backend.alloc_tensors(self.ctx)
        self.plan = backend.graph_plan_create(self.graph)

    def set(self) -> np.ndarray:
        """New values; what `out` must be."""
        a, b = (RNG.standard_normal(self.a.ne[0]).astype(np.float32) for _ in "ab")
        self.a.set(a)
        self.b.set(b)
        return (a + b) * a

    def check(self, n_runs: int = 1) -> None:
        """Compute new values by the plan, outside of a capture afterwards."""
        for _ in range(n_runs):
            expected = self.set()
            self.backend.graph_plan_compute(self.plan)
            assert not self.backend.stream.is_capturing
            assert np.array_equal(self.out.numpy(), expected)


@pytest.fixture
def sums(cuda) -> Sums:
    return Sums(cuda)


def counted(backend) -> tuple[int, int, int]:
    counts = backend.device.counts
    return counts.launches, counts.captures, counts.graph_launches


def test_a_plan_runs_eagerly_then_is_captured_then_replayed(cuda, sums):
    seen = []
    for _ in range(4):
        before = counted(cuda)
        sums.check()
        seen.append(tuple(b - a for a, b in zip(before, counted(cuda), strict=True)))
    assert seen[0] == (2, 0, 0) and [step[1:] for step in seen[1:]] == [(1, 1), (0, 1), (0, 1)]
    for _ in range(2):
        cuda.graph_plan_free(sums.plan)
    with pytest.raises(gs.BackendError, match="was freed"):
        cuda.graph_plan_compute(sums.plan)


def test_kernels_of_a_plan_are_compiled_together_before_it_runs(cuda, ctx, monkeypatch):
    """Once; of another plan what it needs besides."""
    a, asked = ctx.tensor("f32", 64, "a"), []
    function = cuda.device.function
    monkeypatch.setattr(cuda.device, "load", lambda kernels, *, overlap: asked.append(set(kernels)))
    monkeypatch.setattr(cuda.device, "function", lambda kernel, **options: asked.append(kernel) or function(
        kernel, **options))
    first, second = gs.Graph(ctx.soft_max(ctx.add(a, a))), gs.Graph(ctx.rms_norm(ctx.add(a, a), 1e-5))
    cuda.alloc_tensors(ctx)
    plans = [cuda.graph_plan_create(graph) for graph in (first, second)]
    kernels = [{launch.kernel for launch in plan.launches} for plan in plans]
    assert [len(names) for names in kernels] == [2, 2]
    for plan, needed in zip(plans, (kernels[0], kernels[1] - kernels[0]), strict=True):
        for _ in range(3):
            cuda.graph_plan_compute(plan)
        together, *one_by_one = asked
        assert together == needed and set(one_by_one) == needed
        asked.clear()


def test_other_threads_may_wait_for_a_backend_that_captures(cuda, sums, monkeypatch):
    """As they do when they free memory or read a result: CUDA refuses to wait for a stream that is captured."""
    function = type(cuda.function(KERNEL))
    launch, waits = function.launch, []

    def launch_while_another_thread_waits(self, *args):
        launch(self, *args)
        if args[STREAM].is_capturing:
            waits.append(threading.Thread(target=cuda.settle))
            waits[-1].start()
            waits[-1].join()

    monkeypatch.setattr(function, "launch", launch_while_another_thread_waits)
    sums.check(3)
    assert waits and sums.plan.captures == 1 and cuda.device.counts.graph_launches == 2


def test_without_capture_every_kernel_is_launched():
    with devices.backend(capture=False) as cuda:
        Sums(cuda).check(3)
        assert counted(cuda) == (6, 0, 0)


def test_captured_plans_live_side_by_side(cuda):
    many = [Sums(cuda, n) for n in (5, 300, 1000)]
    for _ in range(4):
        expected = [sums.set() for sums in many]
        for sums in many:
            cuda.graph_plan_compute(sums.plan)
        assert all(np.array_equal(sums.out.numpy(), result) for sums, result in zip(many, expected, strict=True))
    cuda.graph_plan_free(many[1].plan)
    many[2].check()
    assert cuda.device.counts.captures == 3


@pytest.mark.parametrize("runs", [0, 1, 3])
def test_a_plan_whose_memory_is_gone_is_refused(cuda, sums, runs):
    sums.check(runs)
    sums.buffer.close()
    with pytest.raises(gs.PlacementError, match="uses a buffer of backend .* that is closed"):
        cuda.graph_plan_compute(sums.plan)
    cuda.synchronize()
    cuda.graph_plan_free(sums.plan)
    Sums(cuda).check()


def test_tensors_elsewhere_and_nodes_without_a_kernel_are_refused(cuda, cpu):
    here, there = gs.Context(), gs.Context()
    a, b = here.tensor("f32", 4, "a"), there.tensor("f32", 4, "b")
    node = here.set_name(here.add(a, b), "node")
    strange = here.set_name(here.add(a, here.tensor("i32", 4, "numbers")), "strange")
    cuda.alloc_tensors(here)
    with pytest.raises(gs.PlacementError, match="'node'.*'b' has no address"):
        cuda.graph_compute(gs.GraphView([node]))
    cpu.alloc_tensors(there)
    with pytest.raises(gs.PlacementError, match="'node'.*on backend 'CPU'"):
        cuda.graph_plan_create(gs.GraphView([node]))
    assert not cuda.supports_op(strange)
    with pytest.raises(gs.UnsupportedOp, match="'strange'"):
        cuda.graph_plan_create(gs.GraphView([strange]))


def test_a_callback_sees_each_node_and_may_stop(ctx):
    with devices.backend(seed=2) as cuda, gs.Scheduler([cuda]) as sched:
        x = ctx.tensor("f32", 8, "x", input=True)
        graph = gs.Graph(ctx.mul(ctx.add(x, x), x))
        sched.alloc(graph)
        x.set(np.arange(8, dtype=np.float32))
        for _ in range(3):
            seen = []
            assert sched.compute(graph, lambda node: seen.append(node.numpy()[3]))      # noqa: B023
            assert seen == [6, 18]
            assert not sched.compute(graph, lambda node: node.op == "MUL")
            assert sched.compute(graph, wait=False) and graph.nodes[-1].numpy()[2] == 8


# -- work memory ------------------------------------------------------------------------


class Overlapping:
    """A sum whose second source lies across its result: it needs a copy in work memory."""

    def __init__(self, backend, n: int) -> None:
        self.backend, self.n, ctx = backend, n, gs.Context("overlapping")
        self.memory = ctx.tensor("f32", n + 8, "memory")
        a, b = ctx.view_1d(self.memory, n, 0), ctx.view_1d(self.memory, n, 16)
        self.graph = gs.GraphView([ctx.set_name(ctx.add(a, b, inplace=True), "node")])
        backend.alloc_tensors(ctx)

    def make_plan(self):
        self.plan = self.backend.graph_plan_create(self.graph)
        return self.plan

    def check(self) -> None:
        x = RNG.standard_normal(self.n + 8).astype(np.float32)
        self.memory.set(x)
        self.backend.graph_plan_compute(self.plan)
        x[: self.n] += x[4 : self.n + 4].copy()
        assert np.array_equal(self.memory.numpy(), x)


def test_work_memory_grows_and_graphs_that_used_it_are_captured_anew(seed=0):
    with devices.backend(seed=seed, memory=1 << 20) as cuda:
        sums, small = Sums(cuda), Overlapping(cuda, 100)
        first = small.make_plan()
        assert cuda.work.size >= first.work_size > 0
        for _ in range(3):
            sums.check()
            small.check()
        assert cuda.device.counts.captures == 2
        used, held = cuda.used, cuda.work.size
        large = Overlapping(cuda, 5000)
        second = large.make_plan()
        assert cuda.work.size == second.work_size > held
        assert cuda.used == used + large.memory.buffer.size + second.work_size - held
        for _ in range(3):
            for case in (sums, small, large):
                case.check()
        assert cuda.device.counts.captures == 4
        assert first.captures == 2 and sums.plan.captures == 1


def test_work_memory_that_is_not_to_be_had_is_an_error_that_plans_survive():
    with devices.backend(memory=100_000) as cuda:
        small, large = Overlapping(cuda, 100), Overlapping(cuda, 15_000)
        small.make_plan()
        small.check()
        with pytest.raises(gs.OutOfMemory, match="work memory") as caught:
            large.make_plan()
        assert caught.value.backend == cuda.name and caught.value.needed >= 60_000
        for _ in range(2):
            small.check()
        large.memory.buffer.close()
        assert cuda.used <= 2000


# -- what goes wrong --------------------------------------------------------------------


class Rows:
    """rows of a table, picked by ids."""

    def __init__(self, backend, name: str) -> None:
        self.backend, self.ctx = backend, gs.Context(name)
        self.table, self.ids = self.ctx.tensor("f32", (4, 10), "table"), self.ctx.tensor("i32", 3, "ids")
        self.sum = self.ctx.set_name(self.ctx.add(self.table, self.table), f"{name} sum")
        self.out = self.ctx.set_name(self.ctx.get_rows(self.sum, self.ids), f"{name} rows")
        self.graph = gs.Graph(self.out)
        backend.alloc_tensors(self.ctx)
        self.table.set(np.arange(40, dtype=np.float32).reshape(10, 4))
        self.plan = backend.graph_plan_create(self.graph)

    def check(self, *ids: int) -> None:
        self.ids.set(np.int32(ids))
        self.backend.graph_plan_compute(self.plan)
        assert np.array_equal(self.out.numpy()[:, 0], 8 * np.float32(ids))


@pytest.mark.parametrize("runs", [0, 1, 2, 3])
def test_a_row_that_is_not_there_names_its_node(runs, seed=0):
    """The error text is the CPU backend's, whether the kernel was launched or replayed; the backend then works as
    before."""
    with devices.backend(seed=seed) as cuda:
        cases = [Rows(cuda, name) for name in ("first", "second", "third")]
        for case in cases:
            case.ids.set(np.int32([4, 4, 4]))
        for case in cases * runs:
            case.check(1, 9, 0)
        for wrong in (10, -1, 2**31 - 1):
            cases[1].ids.set(np.int32([3, wrong, wrong]))
            for case in cases:
                cuda.graph_plan_compute(case.plan)
            with pytest.raises(gs.BackendError) as caught:
                cuda.synchronize()
            assert str(caught.value) == (f"backend {cuda.name!r}: node 'second rows' (GET_ROWS): id {wrong} does not "
                                         "name one of 10 rows")
            cuda.synchronize()
            for case in cases:
                case.check(2, 2, 7)


def test_the_first_of_several_faults_is_the_one_that_is_raised_even_of_a_plan_that_is_freed(cuda):
    cases = [Rows(cuda, name) for name in ("first", "second")]
    for case in cases:
        case.ids.set(np.int32([0, 77, 0]))
    for case in cases:
        cuda.graph_compute(case.graph)
    with pytest.raises(gs.BackendError, match="'first rows'.*id 77"):
        cases[0].out.numpy()
    for case in cases:
        case.check(5, 6, 7)


def test_a_fault_is_raised_in_one_of_the_threads_that_wait(cuda, monkeypatch):
    """The other has fetched the word already, and sees it after the first one forgot it."""
    case, errors = Rows(cuda, "rows"), []
    case.ids.set(np.int32([0, 77, 0]))
    cuda.graph_compute(case.graph)
    has_fetched, may_look = threading.Event(), threading.Event()
    wait = cuda.stream.synchronize

    def wait_in_turns():
        if threading.current_thread() is second:
            has_fetched.set()
            assert may_look.wait(20)
            wait()
        else:
            wait()
            second.start()
            assert has_fetched.wait(20)

    def synchronize():
        try:
            cuda.synchronize()
        except gs.BackendError as error:
            errors.append(error)

    second = threading.Thread(target=synchronize)
    with monkeypatch.context() as patched:
        patched.setattr(cuda.stream, "synchronize", wait_in_turns)
        synchronize()
        may_look.set()
        second.join()
    assert [str(error) for error in errors] == [
        f"backend {cuda.name!r}: node 'rows rows' (GET_ROWS): id 77 does not name one of 10 rows"]
    cuda.synchronize()
    case.ids.set(np.int32([0, 78, 0]))
    cuda.graph_compute(case.graph)
    with pytest.raises(gs.BackendError, match="id 78"):
        cuda.synchronize()


class Lookup:
    """y = 2 * table[ids], scheduled on a device; `ids` is an input."""

    def __init__(self, cuda: gs.CupyBackend) -> None:
        home, self.ctx = gs.Context("home"), gs.Context("lookup")
        table = home.tensor("f32", (4, 10), "table")
        cuda.alloc_tensors(home)
        table.set(np.arange(40).reshape(10, 4))
        self.ids = self.ctx.tensor("i32", 3, "ids", input=True)
        rows = self.ctx.set_name(self.ctx.get_rows(table, self.ids), "rows")
        self.y = self.ctx.set_output(self.ctx.set_name(self.ctx.scale(rows, 2.0), "y"))
        self.graph = gs.Graph(self.y)

    def leave(self, sched: gs.Scheduler, *ids: int) -> None:
        self.ids.set(np.int32(ids))
        sched.compute(self.graph, wait=False)

    def check(self, ids: list[int]) -> None:
        assert self.y.numpy()[:, 0].tolist() == [8 * i for i in ids]

    def check_lost(self) -> None:
        with pytest.raises(gs.HazardError, match="'y'.*not been computed.*'rows' .GET_ROWS.: id 77"):
            self.y.numpy()


def get_tensor(cuda, sched, lookup, other):
    cuda.get_tensor(lookup.y, bytearray(lookup.y.nbytes))


WAITS = {
    "numpy": lambda cuda, sched, lookup, other: lookup.y.numpy(),
    "backend.get_tensor": get_tensor,
    "backend.synchronize": lambda cuda, sched, lookup, other: cuda.synchronize(),
    "scheduler.synchronize": lambda cuda, sched, lookup, other: sched.synchronize(),
    "compute": lambda cuda, sched, lookup, other: sched.compute(lookup.graph),
    "compute of another graph": lambda cuda, sched, lookup, other: sched.compute(other.graph),
}


@pytest.mark.parametrize("n_backends", [1, 2])
@pytest.mark.parametrize("wait", WAITS)
def test_a_bad_row_of_a_compute_that_was_left_is_raised_once_and_leaves_no_results(wait, n_backends):
    with devices.backend() as cuda, gs.CpuBackend(1) as cpu, gs.Scheduler([cuda, cpu][:n_backends]) as sched:
        lookup, other = Lookup(cuda), Lookup(cuda)
        sched.alloc(other.graph)
        other.ids.set(np.int32([0, 0, 0]))
        sched.alloc(lookup.graph)
        lookup.leave(sched, 1, 2, 3)
        lookup.check([1, 2, 3])
        lookup.leave(sched, 0, 77, 0)
        with pytest.raises(gs.BackendError, match=r"node 'rows' \(GET_ROWS\): id 77 does not name one of 10 rows"):
            WAITS[wait](cuda, sched, lookup, other)
        if wait == "compute of another graph":
            for one in (other, lookup):
                sched.alloc(one.graph)
                with pytest.raises(gs.HazardError, match="'y'.*not been computed"):
                    one.y.numpy()
        else:
            for _ in range(2):
                lookup.check_lost()
        sched.synchronize()
        cuda.synchronize()
        for again in ([4, 5, 6], [7, 8, 9]):
            lookup.leave(sched, *again)
            lookup.check(again)
        sched.compute(other.graph)
        other.check([0, 0, 0])


def test_results_that_are_there_outlive_what_goes_wrong_later(cuda, sched):
    lookup, rows = Lookup(cuda), Rows(cuda, "rows")
    sched.alloc(lookup.graph)
    rows.ids.set(np.int32([0, 77, 0]))
    for wait in (True, False):
        lookup.ids.set(np.int32([1, 2, 3]))
        sched.compute(lookup.graph, wait=wait)
        sched.synchronize()
        cuda.graph_compute(rows.graph)
        with pytest.raises(gs.BackendError, match="id 77"):
            cuda.synchronize()
        lookup.check([1, 2, 3])


def test_numbers_of_nodes_are_used_again(cuda):
    for _ in range(20):
        case = Rows(cuda, "rows")
        case.check(1, 2, 3)
        assert case.plan.numbers.first < 2 * len(case.graph)
        cuda.graph_plan_free(case.plan)


def refusing(monkeypatch, owner: type, method: str, is_refused) -> list[bool]:
    """Let a method of the device raise when `is_refused(*args)`; whether it did, for each call."""
    function, calls = getattr(owner, method), []

    def call(self, *args):
        calls.append(is_refused(*args))
        if calls[-1]:
            if method == "end_capture":
                function(self)      # over it is
            raise DeviceError("no")
        return function(self, *args)

    monkeypatch.setattr(owner, method, call)
    return calls


@pytest.mark.parametrize("method", ["begin_capture", "launch", "end_capture"])
def test_what_cannot_be_captured_runs_as_it_is_and_is_tried_again_later(cuda, sums, method, monkeypatch):
    owner, no_room, tried = type(cuda.function(KERNEL) if method == "launch" else cuda.stream), [True], []
    calls = refusing(monkeypatch, owner, method,
                     lambda *args: no_room[0] and (method != "launch" or args[STREAM].is_capturing))
    for run in range(40):
        no_room[0] = run < 8
        before = sum(calls) + sums.plan.captures
        sums.check()
        if sum(calls) + sums.plan.captures > before:
            tried.append(run)
    assert tried == [1, 4, 16] and sums.plan.captures == 1
    assert cuda.device.counts.graph_launches == 40 - 16


def test_a_graph_that_cannot_be_launched_is_left(sums, monkeypatch):
    sums.check(2)
    refused = [True]
    with monkeypatch.context() as patched:
        refusing(patched, type(sums.plan.graph), "launch", lambda *_: refused.pop() if refused else False)
        sums.check(20)
    assert sums.plan.captures == 2 and sums.plan.graph is not None


@pytest.mark.parametrize(("error", "n", "raised"), [
    (DeviceError("no"), 2, (gs.BackendError, "'CUDA0': no")), (KeyboardInterrupt(), 1, (KeyboardInterrupt, None))],
    ids=["errors", "an interrupt"])
def test_errors_of_launches_leave_a_stream_and_a_plan_that_work(cuda, sums, monkeypatch, error, n, raised):
    """The first launch that raises is one of a capture; after an error of that, kernels are launched as they are."""
    def launch(*args):
        raise error

    sums.check()
    with monkeypatch.context() as patched:
        patched.setattr(type(cuda.function(KERNEL)), "launch", launch)
        for _ in range(n):
            with pytest.raises(raised[0], match=raised[1]):
                cuda.graph_plan_compute(sums.plan)
            assert not cuda.stream.is_capturing
    sums.check(4)
    assert sums.plan.captures == 1


def test_an_interrupt_as_a_capture_begins_ends_the_capture(cuda, sums, monkeypatch):
    begin = type(cuda.stream).begin_capture

    def begin_and_raise(self):
        begin(self)
        raise KeyboardInterrupt

    sums.check()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(cuda.stream), "begin_capture", begin_and_raise)
        cuda.graph_plan_compute(sums.plan)
    cuda.alloc_buffer(64).close()       # refused while this thread captures
    sums.check(4)
    assert sums.plan.captures == 1


def test_inputs_that_a_graph_allocator_placed_are_brought_before_their_first_use(cuda):
    ctx = gs.Context("inputs")
    a, b = (ctx.tensor("f32", 16, name, input=True) for name in "ab")
    out = ctx.set_output(ctx.mul(ctx.add(a, b), ctx.add(b, b)))
    graph = gs.Graph(out)
    tallocr = gs.TensorAllocator.from_backend(cuda, 4096)
    allocator = gs.GraphAllocator()
    allocator.alloc_graph(tallocr, graph)
    x, y = (RNG.standard_normal(16).astype(np.float32) for _ in "ab")
    a.set(x)
    b.set(y)
    plan = cuda.graph_plan_create(graph)
    for _ in range(3):
        cuda.graph_plan_compute(plan)
        assert np.array_equal(out.numpy(), (x + y) * (y + y))
    assert cuda.device.counts.captures == 0
    cuda.graph_plan_free(plan)
    tallocr.close()


@pytest.mark.parametrize("seed", range(3))
def test_products_of_the_library_are_queued_with_the_kernels_and_never_captured(seed, monkeypatch):
    library, device = devices.Products(), devices.device(seed)
    monkeypatch.setattr(EmulatedDevice, "blas", lambda self: library)
    monkeypatch.setattr(EmulatedDevice, "has_tensor_cores", False)
    rng, home, ctx = np.random.default_rng(seed), gs.Context("weights"), gs.Context("prompt")
    w, v = home.tensor("q8_0", (64, 32)), home.tensor("f16", (32, 48))
    x = ctx.tensor("f32", (64, 40), "x", input=True)
    y = ctx.set_output(ctx.scale(ctx.mul_mat(v, ctx.sqr(ctx.mul_mat(w, x))), 0.5))
    with devices.new(device) as cuda, cuda.alloc_tensors(home), gs.Scheduler([cuda]) as sched:
        for tensor in (w, v):
            tensor.set(rng.standard_normal(tensor.ne[1::-1]).astype(np.float32))
        graph = gs.Graph(y)
        sched.alloc(graph)
        for run in range(4):
            given = rng.standard_normal((40, 64)).astype(np.float32)
            x.set(given)
            sched.compute(graph, wait=False)
            expected = (given @ w.numpy().T) ** 2 @ v.numpy().T / 2
            assert ((y.numpy() - expected) ** 2).sum() < 1e-5 * (expected**2).sum()
            assert library.n_calls == 2 * (run + 1)
        assert device.counts.captures == device.counts.graph_launches == 0


# -- what kernels need beside the arena -----------------------------------------------------------


def product_of_a_prompt(n: int = 40):
    ctx = gs.Context()
    w, x = ctx.tensor("q4_0", (64, 300), "w"), ctx.tensor("f32", (64, n), "x", input=True)
    return w, x, gs.Graph(ctx.set_name(ctx.mul_mat(w, x), "product"))


@pytest.mark.parametrize("library", [None, devices.Products()], ids=["own kernels", "a library"])
@pytest.mark.parametrize("n", [1, 40])
def test_plans_say_what_kernels_need_and_no_kernel_takes_more(n, library, monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "blas", lambda self: library)
    monkeypatch.setattr(EmulatedDevice, "has_tensor_cores", False)
    with devices.backend() as cuda, gs.CpuBackend(1) as cpu, gs.Scheduler([cuda, cpu]) as sched:
        w, x, graph = product_of_a_prompt(n)
        sched.set_tensor_backend(graph.nodes[0], cuda)
        plan = sched.alloc(graph)
        assert plan.work_sizes[1] == 0 and f"work memory in bytes: {plan.work_sizes[0]:,} on CUDA0" in str(plan)
        w.set(np.zeros((300, 64), np.float32))
        x.set(np.zeros((n, 64), np.float32))
        sched.compute(graph)
        assert 0 < cuda.work.size <= plan.work_sizes[0] <= 3 * cuda.work.size
        # Weights and columns in f16.
        assert cuda.work.size >= 2 * 64 * (300 + n) or library is None or n == 1


def test_budgets_count_what_kernels_need(cuda):
    _, _, graph = product_of_a_prompt()
    with gs.Scheduler([cuda]) as sched:
        plan = sched.plan(graph)
    arena, work = plan.buffer_sizes[0], plan.work_sizes[0]
    for budget, fits in ((arena + work, True), (arena + work - 1, False)):
        with gs.Scheduler([cuda], budgets={cuda: budget}) as sched:
            if fits:
                sched.alloc(graph)
                continue
            with pytest.raises(gs.OutOfMemory, match=f"'CUDA0': the arena needs {arena} bytes and the kernels "
                                                     f"{work}, {budget} are available, 1 are missing"):
                sched.alloc(graph)
    assert cuda.used == 0


def test_work_memory_that_is_there_is_not_asked_for_again(cuda, sched):
    w, x, graph = product_of_a_prompt()
    plan = sched.plan(graph)
    cuda.memory = plan.buffer_sizes[0] + plan.work_sizes[0] - 1
    with pytest.raises(gs.OutOfMemory, match="1 are missing"):
        sched.alloc(graph)
    assert cuda.used == 0
    cuda.memory += 1
    for _ in range(2):
        sched.alloc(graph)
        w.set(np.ones((300, 64), np.float32))
        x.set(np.ones((40, 64), np.float32))
        sched.compute(graph)
        assert cuda.work.size and np.allclose(graph.nodes[-1].numpy(), 64, rtol=1e-2)
        cuda.memory = cuda.used         # full; the same graph fits again
        sched.reset()


def test_a_subclass_that_overrides_compute_node_computes_by_it():
    class ByNode(gs.CupyBackend):
        def compute_node(self, node):
            seen.append(node.name)
            gs.CupyBackend.graph_plan_compute(self, plan := gs.CupyBackend.graph_plan_create(self, [node]))
            gs.CupyBackend.graph_plan_free(self, plan)

    seen = []
    with devices.backend(kind=ByNode) as backend, gs.Scheduler([backend]) as scheduler:
        sums = Sums(backend)
        expected = sums.set()
        scheduler.compute(sums.graph)
        assert seen == ["sum", "out"] and np.array_equal(sums.out.numpy(), expected)
