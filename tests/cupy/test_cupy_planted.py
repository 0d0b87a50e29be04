"""Bugs that a CUDA backend might have, planted one by one: each gives wrong data on an emulated device, or an error.

The scenarios are those of the other tests, small.  Without a bug they pass for every seed; with a bug they fail for
every seed, so that no detection is luck.
"""

from __future__ import annotations

from types import SimpleNamespace

import cupy_devices as devices
import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import buffer, fault, plan, staging
from ggml_sched.backends.cupy.backend import CupyBackend, CupyEvent

SEEDS = range(12)


def vector(backend, n: int = 64):
    ctx = gs.Context("vector")
    tensor = ctx.tensor("f32", n, "v")
    backend.alloc_tensors(ctx, usage="any")
    return tensor


def queue_set(tensor, array) -> None:
    tensor.backend.set_tensor_async(tensor, memoryview(array).cast("B"))


def two_devices_take_turns(seed: int) -> None:
    """x goes through both devices and the CPU, and back, queued several times over."""
    first, second = devices.devices(2, seed)
    with devices.new(first, "CUDA0") as a, devices.new(second, "CUDA1") as b, gs.CpuBackend(1) as cpu:
        for backends in ((a, b, cpu), (a, b)):
            with gs.Scheduler(backends, copies=2) as sched:
                ctx = gs.Context("turns")
                x = ctx.tensor("f32", 64, "x", input=True)
                node = x
                for i in range(6):
                    node = ctx.add(node, x) if i % 2 else ctx.mul(node, x)
                    sched.set_tensor_backend(node, backends[i % len(backends)])
                graph = gs.Graph(ctx.set_output(node))
                sched.alloc(graph)
                for turn in range(4):
                    value = np.float32(1 + turn / 4)
                    x.set(np.full(64, value))
                    sched.compute_async(graph)
                sched.synchronize()
                expected = value
                for i in range(6):
                    expected = expected + value if i % 2 else expected * value
                assert np.array_equal(node.numpy(), np.full(64, expected))


def copies_without_events(seed: int) -> None:
    """Copies in both directions: in one of them the source device is late."""
    with devices.pair(seed) as (first, second):
        a, b, x = vector(first), vector(second), np.arange(64, dtype=np.float32)
        for turn in range(8):
            queue_set(a, x + turn)
            gs.tensor_copy(a, b)
            assert np.array_equal(b.numpy(), x + turn)
        queue_set(a, x)
        c = vector(second)
        assert second.cpy_tensor_from(a, c)
        a.buffer.close()
        assert np.array_equal(c.numpy(), x)


def much_data(seed: int) -> None:
    """More than the staging holds, queued at once."""
    with devices.backend(seed=seed, staging=4096) as cuda:
        vectors = [vector(cuda, 200) for _ in range(40)]
        for i, t in enumerate(vectors):
            given = np.full(200, i, np.float32)
            queue_set(t, given)
            given[:] = -1
        outs = [np.empty(200, np.float32) for _ in vectors]
        for t, out in zip(vectors, outs, strict=True):
            cuda.get_tensor_async(t, memoryview(out).cast("B"))
        cuda.synchronize()
        assert [out[0] for out in outs] == [out[-1] for out in outs] == list(range(40))


def fetched_by_an_event(seed: int) -> None:
    with devices.backend(seed=seed) as cuda, gs.CpuBackend(1) as cpu:
        a, b, x = vector(cuda), vector(cpu), np.arange(64, dtype=np.float32)
        b.set(0 * x)
        queue_set(a, x)
        assert cuda.cpy_tensor_async(a, b)
        event = cuda.event_new()
        cuda.event_record(event)
        cpu.event_wait(event)
        assert np.array_equal(b.numpy(), x)


def work_memory_moves(seed: int) -> None:
    with devices.backend(seed=seed) as cuda:
        made = []
        for n in (100, 3000):
            ctx = gs.Context("overlapping")
            memory = ctx.tensor("f32", n + 8, "memory")
            node = ctx.add(ctx.view_1d(memory, n, 0), ctx.view_1d(memory, n, 16), inplace=True)
            cuda.alloc_tensors(ctx)
            made.append((memory, n, cuda.graph_plan_create(gs.GraphView([node]))))
            for _ in range(3):
                for memory, n, ready in made:
                    x = np.arange(n + 8, dtype=np.float32)
                    memory.set(x)
                    cuda.graph_plan_compute(ready)
                    assert np.array_equal(memory.numpy()[:n], x[:n] + x[4 : n + 4])


def a_bad_row(seed: int) -> None:
    with devices.backend(seed=seed) as cuda:
        plans = []
        for name in ("first", "second"):
            ctx = gs.Context(name)
            table, ids = ctx.tensor("f32", (4, 10)), ctx.tensor("i32", 2)
            node = ctx.set_name(ctx.get_rows(table, ids), name)
            cuda.alloc_tensors(ctx)
            table.set(np.zeros((10, 4), np.float32))
            ids.set(np.int32([0, 0]))
            plans.append((ids, cuda.graph_plan_create(gs.GraphView([node]))))
        for name, (ids, _) in zip(("first", "second"), plans, strict=True):
            ids.set(np.int32([3, 10]))
            for _, ready in plans:
                cuda.graph_plan_compute(ready)
            with pytest.raises(gs.BackendError, match=f"'{name}'.*id 10 does not name one of 10 rows"):
                cuda.synchronize()
            ids.set(np.int32([3, 4]))
            for _, ready in plans:
                cuda.graph_plan_compute(ready)
            cuda.synchronize()


def weights_of_two_kinds_of_readers(seed: int) -> None:
    with devices.backend(seed=seed, exact=True) as cuda:
        ctx = gs.Context("weights")
        w, x = ctx.tensor("q4_0", (256, 3)), ctx.tensor("f32", 256)
        out, copy = ctx.mul_mat(w, x), ctx.dup(w)
        cuda.alloc_tensors(ctx)
        values = np.arange(768, dtype=np.float32).reshape(3, 256) % 16 - 8      # as q4_0 has them, to the last bit
        w.set(values)
        x.set(np.ones(256, np.float32))
        ready = cuda.graph_plan_create(gs.GraphView([out]))
        for _ in range(2):
            for _ in range(3):
                cuda.graph_plan_compute(ready)
                assert np.allclose(out.numpy(), values.sum(1), rtol=1e-4)
            cuda.graph_compute(gs.GraphView([copy]))
            assert np.array_equal(copy.numpy(), values) and np.array_equal(w.numpy(), values)
        cuda.set_tensor(w, bytes(100), 7)
        expected = bytearray(432)
        cuda.get_tensor(w, expected)
        assert expected[7:107] == bytes(100)


# -- bugs ---------------------------------------------------------------------------------


def put_without_copy(self, address, data):
    """The caller's bytes as if they were pinned: read when the copy runs."""
    part = self._memory[: len(data)]
    part[:] = data
    self._stream.copy_in(address, part)


def next_without_waiting(self):
    self._number = (self._number + 1) % len(self._events)
    self._at, self._end = self._number * self._segment, (self._number + 1) * self._segment


def take_without_waiting(self, event):
    self._arrived(event)


def record_nothing(self):
    return CupyEvent(self)


def get_over_what_waits(self, out, address):
    part = self._memory[: len(out)]
    self._stream.copy_out(part, address)
    self.number += 1
    self._waiting.append((self.number, part, out))


def release_at_once(self, memory, gone):
    self.used -= gone.size
    memory.ptr and memory.device._release(memory)


def nothing(*args):
    return None


BUGS = {
    "an event for which no stream waits": (two_devices_take_turns, CupyBackend, "_follow", nothing),
    "an event that is recorded nowhere": (two_devices_take_turns, CupyBackend, "event_record", nothing),
    "a copy that follows nothing": (copies_without_events, CupyBackend, "event_here", record_nothing),
    "memory that goes while it is copied": (copies_without_events, CupyBackend, "release", release_at_once),
    "one place for all uploads": (much_data, staging.Uploads, "put", put_without_copy),
    "a ring that never waits": (much_data, staging.Uploads, "_next_segment", next_without_waiting),
    "one place for all downloads": (much_data, staging.Downloads, "get", get_over_what_waits),
    "downloads that are taken too early": (fetched_by_an_event, CupyBackend, "event_synchronize",
                                           take_without_waiting),
    "downloads that an event forgets": (fetched_by_an_event, CupyBackend, "_arrived", nothing),
    "work memory whose address is kept": (work_memory_moves, plan.DevicePlan, "_pack", None),
    "a fault that is not forgotten": (a_bad_row, fault.Faults, "check", None),
    "numbers of nodes that are given twice": (a_bad_row, fault.Faults, "number", None),
    "rearranged weights that other ops read": (weights_of_two_kinds_of_readers, plan, "straighten_for", None),
    "plans that know an old order of weights": (weights_of_two_kinds_of_readers, plan.DevicePlan, "refresh", nothing),
    "bytes written as ggml has them": (weights_of_two_kinds_of_readers, buffer.packed, "write", None),
}


def pack_once(pack):
    def call(self, backend, generation):
        if self._ready:
            self._generation = generation
        else:
            pack(self, backend, generation)

    return call


def check_and_remember(check):
    def call(self, ran, name):
        stream, self._stream = self._stream, SimpleNamespace(fill=nothing)
        try:
            check(self, ran, name)
        finally:
            self._stream = stream

    return call


def number_from_zero(number):
    return lambda self, nodes: fault.Numbers(0, nodes)


def write_plainly(write):
    return lambda part, start, data, get, put: put(start, data)


WRAPPED = {"_pack": pack_once, "check": check_and_remember, "number": number_from_zero,
           "straighten_for": lambda _: lambda backend, nodes: None, "write": write_plainly}


@pytest.mark.parametrize("scenario", sorted({bug[0] for bug in BUGS.values()}, key=lambda f: f.__name__),
                         ids=lambda f: f.__name__)
def test_without_a_bug_all_is_well(scenario):
    for seed in SEEDS:
        scenario(seed)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, monkeypatch):
    scenario, owner, method, bug = BUGS[name]
    devices.device()        # skips without a compiler
    monkeypatch.setattr(owner, method, WRAPPED[method](getattr(owner, method)) if bug is None else bug)

    def found(seed: int) -> bool:
        try:
            scenario(seed)
        except (AssertionError, gs.Error, pytest.fail.Exception):
            return True
        return False

    missed = [seed for seed in SEEDS if not found(seed)]
    assert not missed, f"seeds {missed} miss it"
