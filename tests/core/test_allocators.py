"""The allocators' promises, row by row: constructors, hooks, reset, errors; and graph allocation's edges."""

import gc
import re

import numpy as np
import pytest
from devices import device

import ggml_sched as gs


class Watched(gs.DryBackend):
    """A backend whose buffers record the calls of their hooks, and may fail."""

    def __init__(self, name="watched", alignment=64, extra=0) -> None:
        super().__init__(name, alignment)
        self.said: list[tuple[str, str]] = []
        self.fails: set[str] = set()
        self.extra = extra

    def alloc_buffer(self, size):
        return WatchedBuffer(self, size)

    def alloc_size(self, tensor):
        return tensor.nbytes + self.extra


class WatchedBuffer(gs.Buffer):
    def init_tensor(self, tensor):
        assert tensor.buffer is self
        self.backend.said.append(("init", tensor.name))
        if tensor.name in self.backend.fails:
            raise RuntimeError(f"init {tensor.name}")

    def free_tensor(self, tensor):
        assert tensor.buffer is self
        self.backend.said.append(("free", tensor.name))

    def free(self):
        self.backend.said.append(("free_buffer", ""))


# -- constructors -------------------------------------------------------------------------------


def constructions(cls):
    backend = Watched(alignment=128)
    buffer = backend.alloc_buffer(1000)
    memory = np.zeros(4096, np.uint8)
    yield "buffer", cls(buffer), 128, False, buffer
    yield "from_backend", cls.from_backend(backend, 1000), 128, False, None
    yield "from_memory", cls.from_memory(memory, 32), 32, False, None
    yield "from_memory of bytes", cls.from_memory(bytearray(4096)), 64, False, None
    yield "measure", cls.measure(16), 16, True, None
    yield "measure_from_backend", cls.measure_from_backend(backend), 128, True, None


@pytest.mark.parametrize("cls", [gs.TensorAllocator, gs.Allocator])
def test_the_five_constructors(cls, ctx):
    for what, allocator, alignment, is_measure, buffer in constructions(cls):
        with allocator:
            assert (allocator.alignment, allocator.is_measure) == (alignment, is_measure), what
            assert buffer is None or allocator.buffer is buffer
            assert allocator.max_size == 0
            ((start, room),) = allocator.free_blocks
            assert start == 0 and (room > 1 << 61 if is_measure else 0 < room <= 4096)
            t = ctx.tensor("i8", 3, what)
            assert allocator.alloc(t) == 0
            assert t.buffer is allocator.buffer and (t.buffer.base + t.offset) % alignment == 0
            assert allocator.free_blocks == ((alignment, room - alignment),)
            allocator.free(t)
            assert t.buffer is None and allocator.free_blocks == ((0, room),)


def test_who_owns_the_buffer():
    backend = Watched()
    buffer = backend.alloc_buffer(256)
    with gs.TensorAllocator(buffer):
        pass
    assert not buffer.closed and backend.said == []
    with gs.TensorAllocator.from_backend(backend, 256) as tallocr:
        owned = tallocr.buffer
    assert owned.closed and backend.said == [("free_buffer", "")]
    tallocr.close()
    assert backend.said == [("free_buffer", "")]


def test_the_callers_memory_is_never_freed_and_really_used(ctx):
    memory = np.full(1024, 7, np.uint8)
    t = ctx.tensor("i8", 100, "t")
    with gs.TensorAllocator.from_memory(memory, 64) as tallocr:
        tallocr.alloc(t)
        t.set(np.full(100, 9, np.int8))
        start = t.buffer.base + t.offset - memory.__array_interface__["data"][0]
        assert memory[start:start + 100].tolist() == [9] * 100
    assert t.buffer is None
    assert (memory == 9).sum() == 100 and (memory == 7).sum() == 924


def test_lent_memory_is_kept_alive(ctx):
    tallocr = gs.TensorAllocator.from_memory(np.zeros(1024, np.uint8))
    gc.collect()
    t = ctx.tensor("i8", 100)
    tallocr.alloc(t)
    t.set(np.ones(100, np.int8))
    assert t.numpy().sum() == 100


@pytest.mark.parametrize("alignment", [1, 2, 16, 64, 4096])
@pytest.mark.parametrize("skip", [0, 1, 8, 63])
def test_misaligned_memory_starts_at_the_first_aligned_address(ctx, alignment, skip):
    block = np.zeros(1 << 14, np.uint8)
    with gs.TensorAllocator.from_memory(block[skip:], alignment) as tallocr:
        base = block.__array_interface__["data"][0] + skip
        lost = -base % alignment
        assert tallocr.free_blocks == ((0, block.size - skip - lost),)
        for i in range(2):
            t = ctx.tensor("i8", 5, f"t{i}")
            tallocr.alloc(t)
            assert (base + t.offset) % alignment == 0
            assert tallocr.max_size == t.offset + -(-5 // alignment) * alignment


def test_memory_smaller_than_its_first_aligned_address(ctx):
    block = np.zeros(256, np.uint8)
    skip = (1 - block.__array_interface__["data"][0]) % 64
    with gs.TensorAllocator.from_memory(block[skip:][:32], 64) as tallocr:
        assert tallocr.free_blocks == ()
        with pytest.raises(gs.OutOfMemory):
            tallocr.alloc(ctx.tensor("i8", 1))
    with gs.TensorAllocator.from_backend(gs.DryBackend("dry"), 0) as tallocr:
        assert tallocr.free_blocks == ()
        tallocr.alloc(ctx.tensor("i8", 0))


@pytest.mark.parametrize("wrong", [0, -64, 2**31, 1.5, "64", None])
def test_wrong_alignments(wrong):
    with pytest.raises((ValueError, TypeError)):
        gs.TensorAllocator.measure(wrong)


@pytest.mark.parametrize("make", [
    lambda: gs.TensorAllocator(None), lambda: gs.TensorAllocator("buffer"), lambda: gs.TensorAllocator(),
    lambda: gs.TensorAllocator.from_memory(5), lambda: gs.TensorAllocator.from_memory("text"),
    lambda: gs.TensorAllocator.from_backend(None, 4), lambda: gs.TensorAllocator.from_backend("CPU", 4),
    lambda: gs.TensorAllocator.measure_from_backend(3), lambda: gs.Allocator(None), lambda: gs.Allocator("x"),
])
def test_wrong_things_to_allocate_from(make):
    with pytest.raises(TypeError):
        make()


def test_a_closed_buffer():
    buffer = gs.DryBackend("dry").alloc_buffer(64)
    buffer.close()
    with pytest.raises(gs.PlacementError, match="closed"):
        gs.TensorAllocator(buffer)


# -- alloc, free, reset ---------------------------------------------------------------------------


def test_views_are_refused(ctx):
    a = ctx.tensor("f32", 8, "a")
    v = ctx.set_name(ctx.view_1d(a, 4), "v")
    with gs.TensorAllocator.measure(64) as tallocr:
        with pytest.raises(gs.PlacementError, match="'v'.*'a'"):
            tallocr.alloc(v)
        tallocr.alloc(a)
        assert v.buffer is tallocr.buffer
        tallocr.free(v)                     # not its to give
        assert a.buffer is not None
        for wrong in (None, "a", 3):
            with pytest.raises(TypeError):
                tallocr.alloc(wrong)
            with pytest.raises(TypeError):
                tallocr.free(wrong)


def test_a_tensor_with_an_address_is_refused(ctx):
    t, w = ctx.tensor("f32", 8, "t"), gs.Context().tensor("f32", 8, "w")
    home = gs.Context()
    w = home.tensor("f32", 8, "w")
    gs.DryBackend("elsewhere").alloc_tensors(home)
    with gs.TensorAllocator.measure(64) as one, gs.TensorAllocator.measure(64) as two:
        one.alloc(t)
        for tallocr in (one, two):
            with pytest.raises(gs.PlacementError, match="'t'.*already"):
                tallocr.alloc(t)
        with pytest.raises(gs.PlacementError, match="'w'.*'elsewhere'"):
            one.alloc(w)
        assert two.free_blocks[0][0] == 0
        two.free(t)
        two.free(w)                         # silently ignored
        assert t.buffer is one.buffer and w.buffer is not None
        one.free(t)
        one.free(t)                         # twice
        assert two.alloc(t) == 0


def test_an_address_that_a_scheduler_lent_does_not_count(ctx):
    t = ctx.sqr(ctx.tensor("f32", 8))
    with gs.Scheduler([gs.CpuBackend(1)]) as sched, gs.TensorAllocator.measure(64) as tallocr:
        sched.alloc(gs.Graph(t))
        assert tallocr.alloc(t) == 0 and t.buffer is tallocr.buffer


def test_hooks_run_outside_measuring_only(ctx):
    backend = Watched()
    a, b = ctx.tensor("f32", 8, "a"), ctx.tensor("f32", 8, "b")
    with gs.TensorAllocator.measure_from_backend(backend) as tallocr:
        tallocr.alloc(a)
        tallocr.free(a)
        gs.GraphAllocator().alloc_graph(tallocr, gs.Graph(ctx.sqr(b)))
    assert backend.said == []
    with gs.TensorAllocator.from_backend(backend, 1024) as tallocr:
        tallocr.alloc(a)
        tallocr.alloc(b)
        tallocr.free(a)
        assert backend.said == [("init", "a"), ("init", "b"), ("free", "a")]


def test_a_failing_hook_leaves_everything_as_it_was(ctx):
    backend = Watched()
    backend.fails.add("b")
    a, b = ctx.tensor("f32", 8, "a"), ctx.tensor("f32", 80, "b")
    with gs.TensorAllocator.from_backend(backend, 1024) as tallocr:
        tallocr.alloc(a)
        before = tallocr.free_blocks, tallocr.max_size
        with pytest.raises(RuntimeError, match="init b"):
            tallocr.alloc(b)
        assert b.buffer is None and (tallocr.free_blocks, tallocr.max_size) == before
        c = ctx.set_name(ctx.sqr(ctx.sqr(ctx.sqr(b))), "c")
        with pytest.raises(RuntimeError, match="init b"):
            gs.GraphAllocator().alloc_graph(tallocr, gs.Graph(c))
        assert (tallocr.free_blocks, tallocr.max_size) == before
        assert b.buffer is None and c.buffer is None and a.buffer is not None
        backend.fails.clear()
        gs.GraphAllocator().alloc_graph(tallocr, gs.Graph(c))
        assert b.buffer is tallocr.buffer


def test_sizes_come_from_the_backends_own_rule(ctx):
    backend = Watched(alignment=32, extra=100)
    t = ctx.tensor("i8", 20, "t")
    for make in (gs.TensorAllocator.measure_from_backend, lambda b: gs.TensorAllocator.from_backend(b, 4096)):
        with make(backend) as tallocr:
            tallocr.alloc(t)
            assert tallocr.max_size == 128
            tallocr.reset()
            gs.GraphAllocator().alloc_graph(tallocr, gs.Graph(ctx.dup(t)))
            assert tallocr.max_size == 256
    with gs.TensorAllocator.measure(32) as tallocr:
        tallocr.alloc(t)
        assert tallocr.max_size == 32
    with gs.Scheduler([backend], policy="seed") as sched:
        assert sched.plan(gs.Graph(ctx.dup(ctx.tensor("i8", 20)))).buffer_sizes == (256,)


@pytest.mark.parametrize("size, error", [
    (0, gs.PlacementError), (19, gs.PlacementError), (-1, gs.PlacementError), (2**63, gs.PlacementError),
    (-2**70, gs.PlacementError), (np.uint64(2**63), gs.PlacementError), (20.5, TypeError), (64.0, TypeError),
    (None, TypeError), ("x", TypeError), ("64", TypeError), ((64,), TypeError)])
def test_a_backend_whose_alloc_size_makes_no_sense(ctx, size, error):
    """The error names backend, tensor and value in every caller; the object that raised works afterwards."""
    answer = [size]

    t = ctx.tensor("i8", 20, "t")
    graph, said = gs.Graph(ctx.dup(t)), f"'strange'.*'t'.*takes {re.escape(str(size))}"
    if error is TypeError:
        said = f"'strange'.*'t'.*takes {re.escape(repr(size))} bytes, which is not an integer"
    backend = device(gs.DryBackend, "strange", answers={"alloc_size": lambda _inherited, _tensor: answer[0]},
                     attributes={"answers_version": None})      # answers may change
    scheduler = gs.Scheduler([backend], plan_cache=0)
    with scheduler, gs.TensorAllocator.from_backend(backend, 4096) as tallocr:
        for use in (lambda: tallocr.alloc(t), lambda: gs.GraphAllocator().alloc_graph(tallocr, graph),
                    lambda: scheduler.plan(graph), lambda: backend.alloc_tensors(ctx),
                    lambda: backend.alloc_tensors_size(ctx)):
            answer[0] = size
            with pytest.raises(error, match=said):
                use()
            answer[0] = np.int64(100)
            assert t.buffer is None and scheduler.plan(graph).buffer_sizes >= (100,)
        assert tallocr.alloc(t) == 0 and tallocr.max_size == 128


def test_reset_forgets_tensors_but_not_the_high_water_mark(ctx):
    a, b = ctx.tensor("i8", 200, "a"), ctx.tensor("i8", 10, "b")
    with gs.TensorAllocator.from_backend(gs.DryBackend("dry", 64), 1024) as tallocr:
        tallocr.alloc(a)
        tallocr.alloc(b)
        assert tallocr.max_size == 320
        tallocr.reset()
        assert tallocr.free_blocks == ((0, 1024),) and tallocr.max_size == 320
        assert a.buffer is None and b.buffer is None
        assert tallocr.alloc(b) == 0
        tallocr.free(a)                     # gone since the reset
        assert tallocr.free_blocks == ((64, 960),)


def test_a_closed_allocator(ctx):
    t = ctx.tensor("i8", 8, "t")
    tallocr = gs.TensorAllocator.measure(64)
    tallocr.alloc(t)
    tallocr.close()
    tallocr.close()
    assert tallocr.closed and t.buffer is None
    for call in (lambda: tallocr.alloc(t), tallocr.reset,
                 lambda: gs.GraphAllocator().alloc_graph(tallocr, gs.Graph(t))):
        with pytest.raises(gs.PlacementError, match="closed"):
            call()
    tallocr.free(t)
    assert repr(tallocr)


def test_a_buffer_closed_under_an_allocator(ctx):
    buffer = gs.CpuBackend(1).alloc_buffer(256)
    t = ctx.tensor("i8", 8, "t")
    with gs.TensorAllocator(buffer) as tallocr:
        tallocr.alloc(t)
        buffer.close()
        assert t.buffer is None
        with pytest.raises(gs.PlacementError, match="closed"):
            tallocr.alloc(ctx.tensor("i8", 8))
        with pytest.raises(gs.PlacementError, match="'t'"):
            t.numpy()


def test_sizes_near_the_end_of_the_address_space(ctx):
    with gs.TensorAllocator.measure(64) as tallocr:
        half = ctx.tensor("i8", 2**62, "half")
        tallocr.alloc(half)
        with pytest.raises(gs.OutOfMemory) as failed:
            tallocr.alloc(ctx.tensor("i8", 2**62, "another"))
        assert failed.value.needed == 2**62
        with pytest.raises(gs.OutOfMemory, match="'almost'"):
            tallocr.alloc(ctx.tensor("i8", 2**63 - 1, "almost"))
        tallocr.alloc(ctx.tensor("i8", 2**61))
        assert tallocr.max_size == 2**62 + 2**61
    huge = [ctx.dup(ctx.tensor("i8", 2**62)) for _ in range(3)]
    with gs.Scheduler([gs.DryBackend("A")]) as sched:
        for graph in (gs.Graph(*huge), gs.Graph(ctx.dup(ctx.tensor("i8", 2**63 - 1)))):
            with pytest.raises(gs.OutOfMemory):
                sched.plan(graph)


# -- graphs -----------------------------------------------------------------------------------------


def test_what_is_in_place_and_what_is_not(ctx):
    """A node of the 15 ops reuses a source of equal layout of which it is the last reader; no other node does."""
    def root_of(build):
        leaf = ctx.tensor("f32", (8, 4), "leaf")
        x = ctx.set_name(ctx.dup(leaf), "x")
        t = build(x)
        allocator = gs.GraphAllocator()
        with gs.TensorAllocator.measure(64) as tallocr:
            allocator.alloc_graph(tallocr, gs.Graph(t))
        root = allocator.inplace_root(t)
        assert (root is None) == (allocator.offset_of(t) != allocator.offset_of(x))
        return None if root is None else root.name

    row, positions = ctx.tensor("f32", 8, "row"), ctx.tensor("i32", 1)
    one = ctx.tensor("f32", 1)
    in_place = [lambda x: ctx.scale(x, 2.0), lambda x: ctx.diag_mask_zero(x, 0), lambda x: ctx.diag_mask_inf(x, 0),
                lambda x: ctx.add(x, row), lambda x: ctx.add1(x, one), lambda x: ctx.sub(x, row),
                lambda x: ctx.mul(x, row), lambda x: ctx.div(x, row), ctx.sqr, ctx.sqrt, ctx.log, ctx.silu, ctx.gelu,
                lambda x: ctx.rope(x, positions, 8), lambda x: ctx.rms_norm(x, 1e-5), ctx.soft_max]
    for build in in_place:
        assert root_of(build) == "x"
    not_in_place = [ctx.dup, ctx.cont, ctx.sum_rows, lambda x: ctx.norm(x, 1e-5), lambda x: ctx.clamp(x, 0, 1),
                    lambda x: ctx.l2_norm(x, 1e-5), lambda x: ctx.concat(x, row, 1), ctx.argsort, ctx.swiglu,
                    lambda x: ctx.mul_mat(row, x), lambda x: ctx.repeat(x, x), lambda x: ctx.get_rows(x, positions),
                    lambda x: ctx.add(x, x)]        # counted twice
    for build in not_in_place:
        assert root_of(build) is None


def test_in_place_needs_the_last_reader_and_an_equal_layout(ctx):
    x = ctx.dup(ctx.tensor("f32", (8, 4)))
    first = ctx.scale(x, 2.0)               # x is still needed
    second = ctx.add(first, x)              # takes `first`, the source that comes first
    wide = ctx.dup(ctx.tensor("f32", (8, 1)))
    third = ctx.mul(second, wide)           # `wide` is of another shape
    turned = ctx.sqr(ctx.transpose(third))  # a view with other strides than the result
    back = ctx.sqr(ctx.reshape(turned, 4, 8))
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure(64) as tallocr:
        allocator.alloc_graph(tallocr, gs.Graph(back))
    assert [allocator.inplace_root(t) for t in (first, second, third, turned)] == [None, first, first, None]
    assert allocator.inplace_root(back) is turned       # through a view that covers all of it


def test_a_backend_whose_kernels_tolerate_less(ctx):
    masks = {"ADD": 2, "SCALE": 0}      # ADD: only its second source

    def build():
        x, y = ctx.dup(ctx.tensor("f32", 8)), ctx.dup(ctx.tensor("f32", 8))
        return x, y, ctx.add(x, y)

    backend = device(gs.DryBackend, "careful", answers={"inplace_sources": lambda _inherited, op: masks.get(op, -1)})
    x, y, t = build()
    scaled = ctx.scale(t, 2.0)
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure_from_backend(backend) as tallocr:
        allocator.alloc_graph(tallocr, gs.Graph(scaled))
    assert allocator.inplace_root(t) is y and allocator.inplace_root(scaled) is None
    with gs.Scheduler([backend], policy="seed") as sched:
        plan = sched.plan(gs.Graph(scaled))
    assert plan.offset_of(t) == plan.offset_of(y) != plan.offset_of(x)
    assert plan.offset_of(scaled) != plan.offset_of(t)


def test_hand_placed_tensors_are_reused_and_freed(ctx):
    """An input placed in the allocator's own buffer may be reused in place and freed; one elsewhere may not."""
    x = ctx.tensor("f32", 16, "x")
    t = ctx.dup(ctx.scale(x, 2.0))
    with gs.TensorAllocator.from_backend(gs.DryBackend("dry", 64), 1024) as tallocr:
        tallocr.alloc(x)
        allocator = gs.GraphAllocator()
        allocator.alloc_graph(tallocr, gs.Graph(t))
        assert allocator.offset_of(x) == 0
        assert allocator.inplace_root(t.src[0]) is x
        assert tallocr.free_blocks == ((0, 64), (128, 896))
    y = ctx.tensor("f32", 16, "y")
    t = ctx.scale(y, 2.0)
    with (gs.TensorAllocator.from_backend(gs.DryBackend("dry", 64), 1024) as tallocr,
          gs.TensorAllocator.from_backend(gs.DryBackend("other", 64), 1024) as other):
        other.alloc(y)
        allocator.alloc_graph(tallocr, gs.Graph(t))
        assert allocator.offset_of(y) is None and allocator.inplace_root(t) is None
        assert y.buffer is other.buffer and other.free_blocks == ((64, 960),)


def test_results_before_any_allocation_and_of_strangers(ctx):
    x = ctx.tensor("f32", 8, "x")
    t = ctx.sqr(x)
    stranger = ctx.tensor("f32", 8, "stranger")
    allocator = gs.GraphAllocator()
    with pytest.raises(gs.GraphError, match="no graph"):
        allocator.offset_of(x)
    with gs.TensorAllocator.measure(64) as tallocr:
        allocator.alloc_graph(tallocr, gs.Graph(t))
        for ask in (allocator.offset_of, allocator.inplace_root):
            with pytest.raises(gs.GraphError, match="'stranger'"):
                ask(stranger)
            with pytest.raises(TypeError):
                ask("x")
        for wrong in (None, t, "graph"):
            with pytest.raises(TypeError):
                allocator.alloc_graph(tallocr, wrong)
        with pytest.raises(TypeError):
            allocator.alloc_graph(None, gs.Graph(t))


def test_tables_of_allocators(ctx):
    x, y = ctx.tensor("f32", 16, "x"), ctx.tensor("f32", 16, "y")
    t = ctx.set_name(ctx.add(x, y), "t")
    graph = gs.Graph(t)
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure(64) as one, gs.TensorAllocator.measure(32) as two:
        assert allocator.alloc_graph_n(graph, {x: one, y: two, t: one}) == (64, 64)
        one.reset()
        two.reset()
        with pytest.raises(gs.PlacementError, match="'y'"):
            allocator.alloc_graph_n(graph, {x: one, t: one})
        with pytest.raises(TypeError, match="'y'"):
            allocator.alloc_graph_n(graph, {x: one, y: "two", t: one})
        with pytest.raises(ValueError, match="2 allocators for 3"):
            allocator.alloc_graph_n(graph, [one, two])
        assert one.free_blocks[0][0] == two.free_blocks[0][0] == 0


@pytest.mark.parametrize("seq", [[0, 5], [-2], [2**40], [0.5], ["0"]])
def test_wrong_parse_sequences(ctx, seq):
    t = ctx.sqr(ctx.sqr(ctx.tensor("f32", 8)))
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure(64) as tallocr:
        with pytest.raises((ValueError, TypeError)):
            allocator.set_parse_seq(seq)
            allocator.alloc_graph(tallocr, gs.Graph(t))
        assert tallocr.max_size == 0
        allocator.set_parse_seq(None)
        assert allocator.alloc_graph(tallocr, gs.Graph(t)) == 64


def test_measured_offsets_are_kept_apart_by_parse_sequence_and_wiring(ctx):
    def graph_of(op):
        t = ctx.tensor("f32", 16)
        for _ in range(4):
            t = op(t)
        return gs.Graph(t)

    allocator = gs.GraphAllocator()
    seen = {}
    for _ in range(2):
        for op in (ctx.dup, ctx.relu, ctx.sum_rows):
            for seq in (None, [0, 1, 2, 3, -1]):
                allocator.set_parse_seq(seq)
                with gs.TensorAllocator.measure(64) as tallocr:
                    size = allocator.alloc_graph(tallocr, graph_of(op))
                assert seen.setdefault((op, str(seq)), size) == size


def test_an_input_that_is_there_from_the_start_has_its_data_at_once(ctx):
    """Code that reads the memory directly finds the data there."""
    memory = np.zeros(4096, np.uint8)
    x = ctx.tensor("f32", 4, "x")
    graph = gs.Graph(ctx.add(x, ctx.sqr(x)))
    with gs.TensorAllocator.from_memory(memory, 1) as tallocr:
        gs.GraphAllocator().alloc_graph(tallocr, graph)
        x.set(np.arange(4.0))
        assert memory[x.offset : x.offset + 16].view(np.float32).tolist() == [0, 1, 2, 3]


def test_measured_offsets_do_not_serve_where_tensors_were_placed_in_another_order():
    """A node that reuses a hand-placed tensor in place has that tensor's current address, not the measured one."""
    cases = []
    for order in ((0, 1), (1, 0)):
        ctx = gs.Context()
        given = [ctx.tensor("f32", 4, name) for name in "ab"]
        graph = gs.Graph(ctx.set_output(ctx.neg(given[0])), ctx.set_output(ctx.sqr(given[1])))
        cases.append((ctx, graph, given, order))
    allocator = gs.GraphAllocator()
    _, graph, given, order = cases[0]
    backend = gs.CpuBackend(1)
    with gs.TensorAllocator.measure_from_backend(backend) as measuring:
        for k in order:
            measuring.alloc(given[k])
        size = allocator.alloc_graph(measuring, graph)
    _, graph, given, order = cases[1]
    with gs.TensorAllocator.from_backend(backend, size) as tallocr:
        for k in order:
            tallocr.alloc(given[k])
            given[k].set(np.full(4, 2.0 + k))
        allocator.alloc_graph(tallocr, graph)
        for node, source in zip(graph.nodes, given, strict=True):
            assert allocator.inplace_root(node) is source and node.offset == source.offset
        backend.graph_compute(graph)
        assert [node.numpy()[0] for node in graph.nodes] == [-2, 9]
