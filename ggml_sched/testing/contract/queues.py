"""Queues and events: work that returns before it is done, and order between backends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backend import overrides
from ggml_sched.testing.contract.base import (
    NBYTES,
    Contract,
    build,
    expected,
    same,
    simple_op,
    small,
    values,
)
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

__all__ = ["QueuesContract"]

EVENT_METHODS = ("event_new", "event_record", "event_wait", "event_synchronize")


class QueuesContract(Contract):
    """Tests of events and queued computes, and of what `asynchronous` and `concurrent_copies` promise."""

    def test_an_asynchronous_backend_overrides_the_methods_of_queues(self, backend: gs.Backend) -> None:
        if not backend.asynchronous and not overrides(backend, *EVENT_METHODS):
            pytest.skip(f"{backend!r} declares neither asynchronous nor events of its own")
        missing = [method for method in ("synchronize", *EVENT_METHODS) if not overrides(backend, method)]
        assert missing == [], "the defaults are those of a backend that is done when a call returns"

    def test_an_event_passes_after_what_was_queued_before_it(self, device: gs.Backend) -> None:
        ctx, x, y = small()
        device.alloc_tensors(ctx)
        given, got = values(1).tobytes(), bytearray(NBYTES)
        event = device.event_new()
        assert isinstance(event, gs.Event) and event.backend is device
        device.set_tensor_async(x, memoryview(given))
        device.get_tensor_async(x, memoryview(got))
        device.event_record(event)
        device.event_synchronize(event)
        assert bytes(got) == given
        device.event_wait(event)
        device.set_tensor(y, values(1))
        same(y, values(1))

    def test_an_event_is_recorded_again(self, device: gs.Backend) -> None:
        ctx, x, _ = small()
        device.alloc_tensors(ctx)
        event, got = device.event_new(), bytearray(NBYTES)
        for k in range(3):
            given = values(k).tobytes()
            device.set_tensor_async(x, memoryview(given))
            device.get_tensor_async(x, memoryview(got))
            device.event_record(event)
            device.event_synchronize(event)
            assert bytes(got) == given

    def test_an_event_that_was_never_recorded_has_passed(self, device: gs.Backend) -> None:
        event = device.event_new()
        device.event_synchronize(event)
        device.event_wait(event)
        device.synchronize()

    def test_it_waits_for_events_of_other_backends(self, device: gs.Backend) -> None:
        """The other device runs its queued work only when the host waits for it."""
        with DeferredBackend("deferred", DeferredQueues(0)) as other:
            ctx, x, y = small()
            gs.bind_resident(x, other.alloc_buffer(NBYTES), 0)
            gs.bind_resident(y, device.alloc_buffer(NBYTES), 0)
            got, given = bytearray(NBYTES), values(1).tobytes()
            other.set_tensor_async(x, memoryview(given))
            other.get_tensor_async(x, memoryview(got))
            event = other.event_new()
            other.event_record(event)
            device.event_wait(event)
            device.set_tensor_async(y, memoryview(got))
            device.synchronize()
            same(y, values(1))

    def test_sets_computes_and_gets_are_in_one_order(self, device: gs.Backend) -> None:
        """Two rounds of set, compute and get are queued without waits.  The second set must not change the first
        compute's source, nor the second compute the result that the first get reads."""
        op = simple_op(device)
        ctx, x, y = small()
        out = build(ctx, op, x, y)
        device.alloc_tensors(ctx)
        y.set(values(0))
        given = [memoryview(values(k).tobytes()) for k in (1, 2)]
        got = [np.zeros(out.ne[1::-1], np.float32) for _ in given]
        graph, event = gs.Graph(out), device.event_new()
        for data, result in zip(given, got, strict=True):
            device.set_tensor_async(x, data)
            device.graph_compute(graph)
            device.get_tensor_async(out, result.data.cast("B"))
        device.event_record(event)
        device.event_synchronize(event)
        for k, result in zip((1, 2), got, strict=True):
            self.check_values(result, expected(op, values(k), values(0)), f"get {k} of 2")

    def test_a_failure_of_queued_work_reaches_the_next_wait_once(self, device: gs.Backend) -> None:
        """Work queued after the failed work is dropped.  An event that is recorded later still passes, because other
        queues may wait for it."""
        op = simple_op(device)
        ctx, x, y = small()
        out = build(ctx, op, x, y)
        failures, event = device.failed[0], device.event_new()
        try:
            for _ in range(2):
                device.graph_compute(gs.Graph(out))     # fails: the nodes have no addresses
        except Exception:
            pytest.skip(f"{device!r} refuses what can not be computed before it is queued")
        device.event_record(event)
        device.event_synchronize(event)
        with pytest.raises(Exception):  # noqa: B017 - the backend chooses the type
            device.synchronize()
        assert device.failed[0] > failures, "synchronize calls note_failure before it raises"
        device.synchronize()
        device.alloc_tensors(ctx)
        x.set(values(1))
        y.set(values(2))
        device.graph_compute(gs.Graph(out))
        device.synchronize()
        self.check(out, expected(op, values(1), values(2)))

    @pytest.mark.parametrize("seed", range(4))
    def test_queued_computes_beside_a_device_that_runs_late(self, device: gs.Backend, seed: int) -> None:
        """The other device adds up the results of all computes, so that a lost compute is noticed."""
        with DeferredBackend("deferred", DeferredQueues(seed)) as other:
            self._add_up([device, other], 1 + seed % 2)

    def test_queued_computes_beside_the_cpu(self, device: gs.Backend) -> None:
        with gs.CpuBackend(1, f"beside {device.name}") as cpu:
            self._add_up([device, cpu], 2)

    def test_two_of_it_in_one_scheduler(self, device: gs.Backend) -> None:
        second = self.second_backend()
        if second is None:
            pytest.skip("there is no second backend: see second_backend")
        with second:
            assert second.name != device.name, "names are unique within a scheduler"
            with gs.CpuBackend(1, f"beside {device.name}") as cpu:
                self._add_up([device, second, cpu], 1)

    def test_another_thread_copies_while_it_computes(self, device: gs.Backend) -> None:
        if not device.concurrent_copies:
            pytest.skip(f"{device!r} does not declare concurrent_copies")
        op = simple_op(device)
        ctx, x, y = small()
        out = build(ctx, op, x, y)
        device.alloc_tensors(ctx)
        other_ctx, other, _ = small()
        device.alloc_tensors(other_ctx)
        x.set(values(1))
        y.set(values(2))
        graph, failures = gs.Graph(out), []

        def copy() -> None:
            try:
                for k in range(50):
                    device.set_tensor(other, values(k))
                    got = bytearray(NBYTES)
                    device.get_tensor(other, got)
                    assert bytes(got) == values(k).tobytes()
            except BaseException as error:
                failures.append(error)

        copying = threading.Thread(target=copy)
        copying.start()
        try:
            for _ in range(50):
                device.graph_compute(graph)
            device.synchronize()
        finally:
            copying.join()
        assert failures == []
        self.check(out, expected(op, values(1), values(2)))

    # -- helpers ----------------------------------------------------------------------------------

    def _add_up(self, backends: list[gs.Backend], copies: int) -> None:
        """Queue computes whose nodes alternate between the backends; the last backend adds up the results."""
        device, last = backends[0], backends[-1]
        op = simple_op(device)
        ctx = gs.Context("sum")
        total = ctx.tensor("f32", expected(op, values(0), values(0)).shape[::-1], "total")
        last.alloc_tensors(ctx, usage="any").clear()
        ctx = gs.Context()
        x, y = ctx.tensor("f32", (8, 4), "x", input=True), ctx.tensor("f32", (8, 4), "y", input=True)
        before = ctx.set_name(ctx.scale(x, 2.0), "before")
        here = ctx.set_name(build(ctx, op, before, y), "here")
        steps = [here]
        for _ in backends[1:-1]:
            steps.append(ctx.set_name(build(ctx, op, before, y), "second"))
        result = here
        for step in steps[1:]:
            result = ctx.add(result, step)
        out = ctx.cpy(ctx.add(total, result), total)
        graph = gs.Graph(ctx.set_output(out))
        with gs.Scheduler(backends, copies=copies) as scheduler:
            on = dict(zip(steps, backends, strict=False))
            for node in graph.nodes:
                scheduler.set_tensor_backend(node, on.get(node, last))
            plan = scheduler.alloc(graph)
            plan.verify()
            assert plan.backend_of(here) is device
            want = np.zeros(total.ne[1::-1], np.float32)
            for k in range(6):
                x.set(values(k))
                if y in graph.tensors:
                    y.set(values(k + 7))
                scheduler.compute_async(graph)
                want += len(steps) * expected(op, np.float32(2) * values(k), values(k + 7))
            scheduler.synchronize()
            self.check(total, want)
