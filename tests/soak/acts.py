"""Acts, functions that use one part of the compiled core each; programs repeat them while allocations fail.

An act creates its objects, uses them, checks the result and frees everything; it may fail anywhere, and works when
repeated.
"""

from contextlib import ExitStack
from ctypes import CFUNCTYPE, POINTER, c_int, c_int64, c_void_p, cast

import numpy as np
from capi_calls import (
    NO_HOST_MEMORY,
    BackendTable,
    CArenas,
    CGraph,
    CPlan,
    CProgram,
    Refused,
    arrays_of,
    c_pack,
)
from capi_problems import problem_of
from devices import device

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, bind_plan, make_plan, new_lease, replay_plan
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict


def block(ctx: gs.Context) -> gs.Tensor:
    """Ops of every family, as in a small transformer block; the result."""
    x = ctx.tensor("f32", (8, 4), "x", input=True)
    w = ctx.tensor("f32", (8, 8), "w")
    ids = ctx.tensor("i32", (4,), "ids", input=True)
    q = ctx.rope(ctx.reshape(ctx.mul_mat(w, ctx.rms_norm(x, 1e-5)), 4, 2, 4), ids, 4)
    scores = ctx.soft_max(ctx.mul_mat(ctx.permute(q, 0, 2, 1, 3), ctx.permute(q, 0, 2, 1, 3)), scale=0.5)
    rows = ctx.set_rows(ctx.tensor("f32", (8, 16), "cache"), x, ids)
    both = ctx.concat(ctx.view_2d(rows, 8, 4, 32, 64), x, 0)
    out = ctx.add(ctx.swiglu(both), ctx.scale(ctx.sum(scores), 2.0, 1.0))
    ctx.keep_until(scores, out)
    ctx.set_name(out, "out")
    return ctx.set_output(ctx.clamp(ctx.set(out, out, *out.nb[1:], 0), -1.0, 1.0))


def ops() -> None:
    ctx = gs.Context("ops")
    block(ctx)
    repr(ctx)


CTX = gs.Context("kept")
OUT = block(CTX)
GRAPH = gs.Graph(OUT)
FILE = graph_to_dict(GRAPH)


BACKENDS = (gs.DryBackend("a"), gs.DryBackend("b", supports_op=lambda t: t.op != "SOFT_MAX"))
DEVICES = Devices(BACKENDS)
QUERIED = Devices(tuple(
    device(gs.DryBackend, name, refuses=refuses, offloads={"MUL_MAT"}, reads=("a", "b"), alignment=16,
           max_buffer_size=640, answers={"alloc_size": lambda inherited, tensor: inherited(tensor) + 8})
    for name, refuses in (("a", ()), ("b", ("SOFT_MAX", "ROPE")))))
"""Of backends that override every query, and allocate memory in small buffers."""
POLICIES = (Policy(), Policy(placement="seed", offsets="best fit", reuse="first", leafs_first=False),
            Policy(n_copies=3))
PLANS = [make_plan(Request(GRAPH, DEVICES, {OUT: BACKENDS[1]}), policy) for policy in POLICIES]


def graph() -> None:
    made = gs.Graph(OUT)
    assert made.fingerprint == GRAPH.fingerprint
    again = made.with_order(made.nodes)
    other = gs.Graph(OUT.src[0])
    assert made.id_of(OUT) == again.id_of(OUT) >= 0 > other.id_of(OUT)
    made.deps, repr(made), made.flags_of(OUT)


def graph_file() -> None:
    assert graph_from_dict(FILE).fingerprint == GRAPH.fingerprint


def devices() -> None:
    Devices(BACKENDS)


def planning() -> None:
    assert max(map(len, make_plan(Request(GRAPH, QUERIED, None), POLICIES[0]).chunk_sizes)) > 1
    for policy, known in zip(POLICIES, PLANS, strict=True):
        request = Request(GRAPH, DEVICES, {OUT: BACKENDS[1]})
        data = make_plan(request, policy)
        assert data.buffer_sizes == known.buffer_sizes and data.splits == known.splits


def plan_data() -> None:
    for data in PLANS:
        for name in ("splits", "copies", "kept", "slot_copies", "write_backs", "sequence", "chunk_sizes", "live_bytes",
                     "methods"):
            getattr(data, name)
        for i in range(data.n_tensors):
            data.sources(i), data.lifetime(i), data.reason(i), data.rule(i), data.trimmed(i), data.is_exclusive(i)
        for b in range(2):
            data.live_at_peak(b)


def replaying() -> None:
    for policy, known in zip(POLICIES, PLANS, strict=True):
        request = Request(GRAPH, DEVICES, {OUT: BACKENDS[1]})
        assert replay_plan(request, known, policy).buffer_sizes == known.buffer_sizes


def binding() -> None:
    data, lease = PLANS[0], new_lease()
    buffers = tuple(tuple(b.alloc_buffer(n) for n in sizes) for b, sizes in zip(BACKENDS, data.chunk_sizes,
                                                                                strict=True))
    bind_plan(GRAPH, data, buffers, lease)
    assert OUT.offset is not None
    lease.end()


def tensor_allocator() -> None:
    ctx = gs.Context()
    tensors = [ctx.tensor("f32", 16 * k) for k in range(1, 9)]
    with gs.TensorAllocator.from_backend(BACKENDS[0], 4096) as allocator:
        for t in tensors:
            allocator.alloc(t)
        for t in tensors[::2]:
            allocator.free(t)
        assert len(allocator.free_blocks) > 2
        allocator.reset()


def graph_allocator() -> None:
    allocator = gs.GraphAllocator()
    with gs.TensorAllocator.measure(32) as measuring:
        size = allocator.alloc_graph(measuring, GRAPH)
    with gs.TensorAllocator.from_backend(BACKENDS[0], size) as allocating:
        allocator.alloc_graph(allocating, GRAPH)
        assert allocator.offset_of(OUT) is not None
        allocator.alloc_graph_n(GRAPH, dict.fromkeys(GRAPH.tensors, allocating))


def packing() -> None:
    assert gs.pack([0, 1, 2, 3], [2, 3, 4, 5], [8, 16, 8, 24]).arena == 32
    gs.pack(range(40), range(5, 45), [1 + 7 * k % 13 for k in range(40)], budget=100)


def errors() -> None:
    """Invalid calls raise, also without memory for the error's message."""
    for call in (lambda: CTX.mul_mat(OUT, CTX.tensor("f32", 3)), lambda: CTX.tensor("q9", 4), lambda: CTX.pad(OUT, -1),
                 lambda: CTX.unary(OUT, "nothing"), lambda: CTX.restore("VIEW", "f32", (4,), (4, 4, 4, 4)),
                 lambda: gs.Graph.from_order([OUT], [OUT], []), lambda: Policy(offsets="no"),
                 lambda: gs.GraphAllocator().offset_of(OUT)):
        try:
            call()
        except (gs.Error, ValueError) as error:
            str(error)
        else:
            raise AssertionError(call)


def scheduling() -> None:
    """Up to the addresses: NumPy, by which computes are prepared, crashes without memory by itself (`array[array]`)."""
    with gs.Scheduler(BACKENDS, copies=2) as scheduler:
        plan = scheduler.alloc(GRAPH)
        plan.offset_of(OUT), plan.splits, plan.copies, plan.explain(OUT)


ARRAYS, EMPTY = arrays_of(GRAPH), arrays_of(gs.Graph())
PROBLEM = problem_of(GRAPH, BACKENDS, Policy())
ADDRESSES = {i: 1 << 20 for i, t in enumerate(GRAPH.tensors) if t.buffer is not None}
"""Of residents, whose memory nothing uses."""


def c_api() -> None:
    """A failing C function returns a code, which this act raises as the core's error."""
    try:
        with ExitStack() as free:
            graph = free.enter_context(CGraph(ARRAYS)).finish()
            again = free.enter_context(CGraph(EMPTY)).refill(ARRAYS).finish()
            plan = CPlan.made(graph, PROBLEM)
            free.callback(plan.free)
            served = plan.replay(graph, again, PROBLEM)
            assert served is not None
            free.callback(served.free)
            offsets, result = c_pack([(0, 2, 8), (1 << 60, 1 << 61, 16), (1, 1 << 62, 8)])
            assert result.arena == 24 and len(offsets) == 3
    except Refused as refused:
        if refused.status != NO_HOST_MEMORY:
            raise
        raise gs.OutOfMemory(f"the host gives no memory for {refused.error.message}", None, 0, None) from None


ROOM = np.zeros(1 << 20, np.uint8)
ALLOC = CFUNCTYPE(c_int, c_void_p, c_int64, POINTER(c_void_p), c_void_p)
MOVE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
KEPT = [ALLOC(lambda context, nbytes, memory, error: memory.__setitem__(0, ROOM.ctypes.data // 256 * 256 + 256) or 0),
        CFUNCTYPE(None, c_void_p, c_void_p, c_int64)(lambda *_: None), MOVE(lambda *_: 0),
        CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)(lambda *_: 0)]
"""The functions of a backend that computes nothing; one program at a time has the memory."""
TABLES = (BackendTable * len(BACKENDS))()
for table in TABLES:
    for name, function in zip(("alloc", "free", "write", "run"), KEPT, strict=True):
        setattr(table, name, cast(function, c_void_p))
    table.read = table.write


def c_programs() -> None:
    """Programs from C, in arenas that they share."""
    try:
        with ExitStack() as free:
            graph = free.enter_context(CGraph(ARRAYS)).finish()
            plan = CPlan.made(graph, PROBLEM)
            free.callback(plan.free)
            arenas = CArenas([plan], TABLES)
            free.callback(arenas.free)
            for _ in range(2):
                program = CProgram(graph, plan, arenas, ADDRESSES)
                free.callback(program.free)
                for k in range(program.view().n_steps):
                    step = program.view().steps[k]
                    if step.kind == 0:
                        program.set(step.tensor, bytes(GRAPH.tensors[step.tensor].nbytes))
                program.run()
                program.synchronize()
    except Refused as refused:
        if refused.status != NO_HOST_MEMORY:
            raise
        raise gs.OutOfMemory(f"the host gives no memory for {refused.error.message}", None, 0, None) from None


CPU, COMPUTED = gs.CpuBackend(1), gs.Context("computed")
RESULT = block(COMPUTED)
HELD = CPU.alloc_tensors(COMPUTED)
for t in COMPUTED.tensors:
    if t.op == "NONE":
        t.set(np.arange(t.n_elements).reshape(t.ne[::-1]) % 7)
TO_COMPUTE = gs.Graph(RESULT)
MADE = [t for t in TO_COMPUTE.nodes if t.view_src is None]
"""The nodes that have memory of their own."""
CPU.graph_compute(TO_COMPUTE)
WANT = [t.numpy().tobytes() for t in MADE]
FOUND = [bytearray(t.nbytes) for t in MADE]
ZEROS = bytes(max(t.nbytes for t in MADE))


def kernels() -> None:
    """A plan of compiled kernels lacks none of them."""
    plan = CPU.graph_plan_create(TO_COMPUTE)
    try:
        for t in MADE:
            CPU.set_tensor(t, ZEROS[:t.nbytes])
        CPU.graph_plan_compute(plan)
        for t, found in zip(MADE, FOUND, strict=True):
            CPU.get_tensor(t, found)
        assert FOUND == WANT
    finally:
        CPU.graph_plan_free(plan)


ACTS = {act.__name__: act for act in (ops, graph, graph_file, devices, planning, plan_data, replaying, binding,
                                      tensor_allocator, graph_allocator, packing, errors, scheduling, c_api,
                                      c_programs, kernels)}
