"""Bugs that a CUDA backend might have, planted one by one: each gives wrong data on an emulated device, or an error.

The scenarios are tests of other files.  Without a bug they pass for every seed; with a bug they fail for every seed, so
that no detection is luck.
"""

from inspect import signature
from types import SimpleNamespace

import cupy_devices as devices
import numpy as np
import pytest
from load_tests import load_tests

import ggml_sched as gs
from ggml_sched.backends.cupy import buffer, fault, plan, staging
from ggml_sched.backends.cupy.backend import CupyBackend, CupyEvent

SEEDS = range(12)


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


def scenario(file: str, name: str, **arguments):
    """A test of another file as a function of the seed of its devices."""
    test = getattr(load_tests(f"cupy/test_cupy_{file}"), f"test_{name}")

    def run(seed: int) -> None:
        with devices.backend(seed=seed) as cuda, gs.CpuBackend(1) as cpu:
            given = {"cuda": cuda, "cpu": cpu, "seed": seed, **arguments}
            test(**{name: given[name] for name in signature(test).parameters})

    return run


SCENARIOS = {
    "two devices take turns": two_devices_take_turns,
    "copies": scenario("data", "copies_between_devices_follow_events", peers=True),
    "a buffer closes": scenario("data", "a_buffer_closes_after_the_copies_that_use_it"),
    "much data": scenario("data", "more_than_the_staging_holds"),
    "an event": scenario("data", "an_event_brings_copies_to_host_memory"),
    "work memory": scenario("plans", "work_memory_grows_and_graphs_that_used_it_are_captured_anew"),
    "a bad row": scenario("plans", "a_row_that_is_not_there_names_its_node", runs=1),
    "readers of weights": scenario(
        "packed", "other_ops_get_the_order_that_they_know_and_plans_made_before_notice", kind=gs.Type.Q4_0),
    "bytes of weights": scenario("packed", "bytes_are_those_of_ggml_whatever_part_is_written_or_read",
                                 kind=gs.Type.Q4_0),
}


# -- bugs ---------------------------------------------------------------------------------


def put_without_copy(self, address, data):
    """The caller's bytes as if they were pinned: read when the copy runs."""
    part = self._memory[: len(data)]
    part[:] = data
    self._stream.copy_in(address, part)


def next_without_waiting(self):
    self._number = (self._number + 1) % len(self._events)
    self._at, self._end = self._number * self._slot, (self._number + 1) * self._slot


def get_over_what_waits(self, out, address):
    part = self._memory[: len(out)]
    self._stream.copy_out(part, address)
    self.number += 1
    self._waiting.append((self.number, part, out))


def release_at_once(self, memory, gone):
    self.buffer_sizes.drop(gone)
    memory.ptr and memory.device._release(memory)


def always(bug):
    """A bug that does not call the method that it replaces."""
    return lambda method: bug


nothing = always(lambda *args: None)


def pack_once(pack):
    def call(self, backend, generation):
        if self._ready:
            self._generation = generation
        else:
            pack(self, backend, generation)

    return call


def check_and_remember(check):
    def call(self, ran, name):
        stream, self._stream = self._stream, SimpleNamespace(fill=lambda *args: None)
        try:
            check(self, ran, name)
        finally:
            self._stream = stream

    return call


BUGS = {
    "an event for which no stream waits": ("two devices take turns", CupyBackend, "_follow", nothing),
    "an event that is recorded nowhere": ("two devices take turns", CupyBackend, "event_record", nothing),
    "a copy that follows nothing": ("copies", CupyBackend, "event_here", always(lambda self: CupyEvent(self))),
    "memory that goes while it is copied": ("a buffer closes", CupyBackend, "release", always(release_at_once)),
    "one place for all uploads": ("much data", staging.Uploads, "put", always(put_without_copy)),
    "a ring that never waits": ("much data", staging.Uploads, "_next_slot", always(next_without_waiting)),
    "one place for all downloads": ("much data", staging.Downloads, "get", always(get_over_what_waits)),
    "downloads that are taken too early": (
        "an event", CupyBackend, "event_synchronize", always(lambda self, event: self._arrived(event))),
    "downloads that an event forgets": ("an event", CupyBackend, "_arrived", nothing),
    "work memory whose address is kept": ("work memory", plan.DevicePlan, "_pack", pack_once),
    "a fault that is not forgotten": ("a bad row", fault.Faults, "check", check_and_remember),
    "numbers of nodes that are given twice": (
        "a bad row", fault.Faults, "number", always(lambda self, nodes: fault.Numbers(0, nodes))),
    "rearranged weights that other ops read": ("readers of weights", plan, "straighten_for", nothing),
    "plans that know an old order of weights": ("readers of weights", plan.DevicePlan, "refresh", nothing),
    "bytes written as ggml has them": (
        "bytes of weights", buffer.packed, "write", always(lambda part, start, data, get, put, pack: put(start, data))),
}
"""(Scenario, where the method is, its name, a function from the method to the bug)."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_a_bug_all_is_well(scenario):
    for seed in SEEDS:
        SCENARIOS[scenario](seed)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, monkeypatch):
    scenario, owner, method, bug = BUGS[name]
    devices.device()        # skips without a compiler
    monkeypatch.setattr(owner, method, bug(getattr(owner, method)))

    def found(seed: int) -> bool:
        try:
            SCENARIOS[scenario](seed)
        except (AssertionError, gs.Error, pytest.fail.Exception):
            return True
        return False

    missed = [seed for seed in SEEDS if not found(seed)]
    assert not missed, f"seeds {missed} miss it"
