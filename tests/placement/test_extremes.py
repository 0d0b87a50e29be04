"""`fit` of graphs and devices at the edge of what it takes: an answer that keeps the budgets, or a typed error."""

from __future__ import annotations

import random

import pytest
from small_models import allocated, devices, layered, sized

import ggml_sched as gs

LINK = gs.Link(5e8, 1e-6)


def wide(count: int) -> gs.Graph:
    """A stage of `count` matrices that read the same activation, whose results are added."""
    ctx = gs.Context("wide")

    def resident(name: str, *ne: int) -> gs.Tensor:
        with gs.Context() as scratch:
            plain = scratch.tensor("f32", ne)
            return ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=name, resident="weight")

    x = ctx.get_rows(resident("embedding", 64, 128), ctx.tensor("i32", 1, "ids", input=True))
    total = x
    for k in range(count):
        total = ctx.add(total, ctx.mul_mat(resident(f"w{k}", 64, 64), x))
    return gs.Graph(ctx.mul_mat(resident("output", 64, 128), total))


def test_a_stage_of_two_hundred_matrices() -> None:
    graph = wide(200)
    fit = gs.fit([graph], devices(random.Random(1), 3, sum(sized(graph).values())), LINK)
    assert set(fit.residents) == set(sized(graph))
    assert all(use.left >= 0 for use in fit.memory)
    assert fit.bound <= fit.rules_bound <= fit.seconds
    assert len({device.name for device in fit.residents.values()}) > 1      # the GPUs have room for a part of them
    fit.verify()


def test_sixteen_devices_are_an_answer_and_seventeen_an_error() -> None:
    graph = layered(random.Random(2), 1)
    cpu, gpu = devices(random.Random(2), 2, sum(sized(graph).values()))
    gpus = [gpu.replace(name=f"GPU{k}") for k in range(16)]
    with pytest.raises(ValueError, match="17 devices"):
        gs.fit([graph], [cpu, *gpus], LINK)
    fit = gs.fit([graph], [cpu, *gpus[1:]], LINK)
    assert all(use.left >= 0 for use in fit.memory)
    assert fit.bound <= fit.seconds <= gs.fit([graph], [cpu, gpu], LINK).seconds * (1 + fit.within)
    fit.verify()


@pytest.mark.parametrize("rate", ["bandwidth", "flops"])
def test_a_device_that_does_nothing_is_an_error(rate: str) -> None:
    with pytest.raises(ValueError, match=rate):
        gs.fit([layered(random.Random(0), 1)], [gs.Device(**{"name": "CPU", "memory": 1 << 20, "bandwidth": 1e9,
                                                             "flops": 1e9, "host": True, rate: 0.0})])


def test_a_device_that_is_very_slow_holds_nothing() -> None:
    graph = layered(random.Random(3), 2)
    cpu, gpu = devices(random.Random(3), 2, sum(sized(graph).values()))
    fit = gs.fit([graph], [cpu, gpu.replace(bandwidth=1.0, memory=cpu.memory)], LINK)
    assert {device.name for device in fit.residents.values()} == {"CPU"}


def test_a_node_that_computes_into_an_input_is_placed() -> None:
    ctx = gs.Context("in place")
    scaled = ctx.scale(ctx.tensor("f32", 64, "x", input=True), 2.0, inplace=True)
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", (64, 64))
        weight = ctx.restore("NONE", plain.type, plain.ne, plain.nb, name="w", resident="weight")
    graph = gs.Graph(ctx.mul_mat(weight, scaled))
    fit = gs.fit([graph], devices(random.Random(6), 2, 1 << 20), LINK)
    assert set(fit.residents) == {"w"}
    allocated(fit, [graph])
    fit.verify()


def test_a_leaf_of_which_the_caller_alone_reads_a_view_needs_no_room_on_another_device() -> None:
    ctx = gs.Context("model")
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", (64, 64))
        weight = ctx.restore("NONE", plain.type, plain.ne, plain.nb, name="w", resident="weight")
    out = ctx.mul_mat(weight, ctx.tensor("f32", 64, "x", input=True))
    kept = ctx.tensor("f32", 64, "kept")
    graph = gs.Graph(out, ctx.view_1d(kept, 32, 0))
    cpu = gs.Device("CPU", 1 << 20, 1e9, 1e10, host=True)
    fit = gs.fit([graph], [gs.Device("GPU", 0, 1e12, 1e13), cpu], LINK)
    fit.verify()
    assert fit.arenas[0] == 0
    [plan] = fit.plans
    assert plan.backend_of(plan.graph.tensors[graph.id_of(kept)]) is fit.devices[1].backend


def test_a_resident_that_no_node_reads_is_on_the_host_and_counts_there() -> None:
    ctx = gs.Context("unread")
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", (64, 64))
        read, unread = (ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=name, resident="weight")
                        for name in ("read", "unread"))
    out = ctx.mul_mat(read, ctx.tensor("f32", 64, "x", input=True))
    graph = gs.Graph(out, ctx.view_1d(unread, 64))
    cpu, gpu = devices(random.Random(7), 2, 1 << 20)
    fit = gs.fit([graph], [cpu, gpu], LINK)
    assert fit.place("unread") == cpu
    assert sum(use.weights for use in fit.memory) == 2 * 64 * 64 * 4
    assert gs.fit([graph], [cpu, gpu], LINK, pins={"unread": gpu}).place("unread") == gpu
    few = cpu.replace(memory=fit.memory[-1].weights + fit.memory[-1].arena)
    assert all(use.left >= 0 for use in gs.fit([graph], [few, gpu], LINK).memory)
    with pytest.raises(gs.OutOfMemory):
        gs.fit([graph], [few.replace(memory=64 * 64 * 4 - 1), gpu], LINK, pins={"unread": few})


def test_a_link_that_hardly_carries_anything_is_not_used_for_activations() -> None:
    graph = layered(random.Random(4), 2)
    given = devices(random.Random(4), 2, sum(sized(graph).values()))
    fit = gs.fit([graph], given, gs.Link(1.0, 10.0))
    assert {device.name for device in fit.residents.values()} == {"CPU"}    # one copy takes longer than all nodes


def test_no_room_for_a_byte_is_an_error() -> None:
    graph = layered(random.Random(5), 1)
    with pytest.raises(gs.OutOfMemory):
        gs.fit([graph], [gs.Device("CPU", 1, 1e9, 1e9, host=True), gs.Device("GPU", 0, 1e9, 1e9)], LINK)
