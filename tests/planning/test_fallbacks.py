"""Fallbacks: nodes that went to the host because a device refused them, with the reason and the price."""

import pickle

import pytest
from small_graphs import dry_device

import ggml_sched as gs
from ggml_sched.planning import fallbacks

DEVICES = (gs.Device("GPU", 1 << 30, 1e12, 1e14), gs.Device("CPU", 1 << 30, 5e10, 1e12, host=True))
LINK = gs.Link(1e10, 5e-6)


def gpu(refuses):
    return gs.DryBackend("GPU", supports_op=lambda node: not refuses(node))


def weight(home, name, *ne, kind="f32"):
    with_name = gs.Context(f"weights {name}")
    tensor = with_name.tensor(kind, ne, name)
    home.alloc_tensors(with_name)
    return tensor


def planned(backends, graph, assigned=()):
    with gs.Scheduler(backends) as scheduler:
        for node, backend in assigned:
            scheduler.set_tensor_backend(node, backend)
        return scheduler.plan(graph)


@pytest.fixture
def ctx():
    with gs.Context("graph") as made:
        yield made


def two_products(ctx, backend, middle):
    """Two products with weights on `backend`, and `middle` of the first between them."""
    x = ctx.set_input(ctx.tensor("f32", (64, 3), "x"))
    first = ctx.set_name(ctx.mul_mat(weight(backend, "w1", 64, 64), x), "first")
    between = ctx.set_name(middle(first), "between")
    return gs.Graph(ctx.set_name(ctx.mul_mat(weight(backend, "w2", 64, 64), between), "second"))


def test_a_refused_op_between_two_others(ctx):
    device, host = gpu(lambda node: node.op == "SOFT_MAX"), gs.DryBackend("CPU")
    graph = two_products(ctx, device, ctx.soft_max)
    plan = planned([device, host], graph)
    (found,) = plan.fallbacks()
    assert (found.op, found.nodes, found.backend, found.refused_by) == ("SOFT_MAX", ("'between'",), "CPU", "GPU")
    assert found.why == "the op SOFT_MAX" and found.seconds is None
    assert str(found) == "SOFT_MAX on CPU: 'between', as GPU does not support the op SOFT_MAX"
    assert pickle.loads(pickle.dumps(found)) == found


def test_the_cost_is_the_difference_to_the_plan_without_the_refusal(ctx):
    refused = {"SOFT_MAX"}
    device, host = gpu(lambda node: node.op in refused), gs.DryBackend("CPU")
    device.answers_version = None
    graph = two_products(ctx, device, ctx.soft_max)
    plan = planned([device, host], graph)
    (found,) = plan.fallbacks(DEVICES, LINK)
    refused.clear()
    best = planned([device, host], graph)
    assert len(plan.splits) > len(best.splits)
    wanted = gs.price(plan, DEVICES, LINK).seconds - gs.price(best, DEVICES, LINK).seconds
    assert found.seconds == pytest.approx(wanted) and wanted > 2 * LINK.latency
    assert f"this costs {wanted * 1e3:.3f} ms" in str(found)


def test_the_cost_beside_a_store_is_the_difference_to_the_plan_without_the_refusal(ctx):
    def plan(device):
        host, disk = gs.DryBackend("CPU"), gs.DryStore("disk", margin=64)
        x = ctx.mul_mat(weight(device, "a", 256, 256), ctx.tensor("f32", (256, 64), "x", input=True))
        x = ctx.soft_max(x)
        for k in range(6):
            x = ctx.mul_mat(weight(disk, f"w{k}", 256, 256), x)
        return planned([device, disk, host], gs.Graph(ctx.mul_mat(weight(device, "b", 256, 256), x)))

    devices = (*DEVICES, gs.Device("disk", 1 << 40, 2e9, 1.0))
    refused, best = (plan(gpu(lambda node, ops=ops: node.op in ops)) for ops in (("SOFT_MAX",), ()))
    (found,) = refused.fallbacks(devices, LINK)
    wanted = gs.price(refused, devices, LINK).seconds - gs.price(best, devices, LINK).seconds
    assert found.seconds == pytest.approx(wanted) and wanted > 0


def test_the_cost_counts_fusion_groups_as_the_backend_offers_them(ctx):
    class Fusing(gs.DryBackend):
        def fusion_groups(self, graph):
            work = [k for k, node in enumerate(graph.nodes) if node.computes]
            return [tuple(work[:2])]

    device, host = Fusing("GPU", supports_op=lambda node: node.op != "SOFT_MAX"), gs.DryBackend("CPU")
    device.concurrent_copies = True
    x = ctx.sqr(ctx.mul_mat(weight(device, "w0", 64, 64), ctx.tensor("f32", (64, 3), "x", input=True)))
    x = ctx.mul_mat(weight(device, "w1", 64, 64), ctx.soft_max(x))
    plan = planned([device, host], gs.Graph(ctx.set_output(x)))
    nodes = [node for node in plan.graph.nodes if node.op == "SOFT_MAX"]
    other = fallbacks._as_if_supported(plan, 0, nodes)
    assert len(plan.groups) == len(other.groups) == 1 and other.backends[0].concurrent_copies


@pytest.mark.parametrize(("refuses", "make", "why"), [
    (lambda node: node.op == "MUL_MAT" and str(node.src[0].type) == "q4_0",
     lambda ctx, x: ctx.mul_mat(ctx.cast(x, "q4_0"), x),
     "the type q4_0 of source 0"),
    (lambda node: node.op == "SCALE" and not node.src[0].is_contiguous,
     lambda ctx, x: ctx.scale(ctx.view_2d(x, 32, 3, nb1=256), 2.0), "the strides (4, 256, 768, 768) of source 0"),
    (lambda node: node.op == "ADD" and "f16" in {str(s.type) for s in node.src},
     lambda ctx, x: ctx.add(ctx.cast(x, "f16"), ctx.cast(ctx.relu(x), "f16")), "the types f16, f16 together"),
    (lambda node: node.op == "SQR" and node.ne[0] == 64, lambda ctx, x: ctx.sqr(x),
     "its extents or parameters, with sources of 64x3x1x1"),
    (lambda node: node.op == "CPY" and str(node.src[0].type) == "f32",
     lambda ctx, x: ctx.cpy(x, ctx.cast(x, "f16")), "the op CPY"),
])
def test_the_reason_names_what_is_not_supported(ctx, refuses, make, why):
    device, host = gpu(refuses), gs.DryBackend("CPU")
    x = ctx.set_input(ctx.tensor("f32", (64, 3), "x"))
    first = ctx.mul_mat(weight(device, "w1", 64, 64), x)
    # Another node of the op with extents that are supported.
    other = ctx.sqr(ctx.view_2d(first, 32, 3, nb1=256))
    plan = planned([device, host], gs.Graph(make(ctx, first), other))
    reasons = [found.why for found in plan.fallbacks()]
    assert why in reasons


def test_nodes_of_one_reason_are_one_entry_and_the_most_expensive_is_first(ctx):
    device, host = gpu(lambda node: node.op in ("SOFT_MAX", "SQR")), gs.DryBackend("CPU")
    x = ctx.set_input(ctx.tensor("f32", (64, 3), "x"))
    for k in range(3):
        x = ctx.mul_mat(weight(device, f"w{k}", 64, 64), x)
        x = ctx.set_name(ctx.soft_max(x), f"soft {k}")
    x = ctx.sqr(ctx.mul_mat(weight(device, "v", 64, 64), x))
    x = ctx.mul_mat(weight(device, "w", 64, 64), x)
    found = planned([device, host], gs.Graph(x)).fallbacks(DEVICES, LINK)
    assert [(fell.op, len(fell.nodes)) for fell in found] == [("SOFT_MAX", 3), ("SQR", 1)]
    assert found[0].seconds > found[1].seconds > 0


def test_refused_nodes_in_a_row_fall_back_together(ctx):
    device, host = gpu(lambda node: node.op in ("SOFT_MAX", "SQR", "UNARY:RELU")), gs.DryBackend("CPU")
    graph = two_products(ctx, device, lambda x: ctx.relu(ctx.sqr(ctx.soft_max(x))))
    assert sorted(fell.op for fell in planned([device, host], graph).fallbacks()) == ["SOFT_MAX", "SQR", "UNARY:RELU"]


def test_nodes_at_home_on_the_host_did_not_fall_back(ctx):
    host = gs.DryBackend("CPU")
    device = gpu(lambda node: node.op == "MUL_MAT")
    graph = two_products(ctx, host, ctx.soft_max)
    assert planned([device, host], graph).fallbacks() == (), "their weights are on the host"
    free = gs.Graph(ctx.relu(ctx.set_input(ctx.tensor("f32", (4,), "y"))))
    assert planned([gpu(lambda node: True), host], free).fallbacks() == (), "nothing near is on the device"


def test_a_weight_that_the_device_reads_on_the_host_does_not_hold_a_node_there(ctx):
    host = gs.DryBackend("CPU")
    device = dry_device("GPU", reads=[host], supports_op=lambda node: node.op != "MUL_MAT")
    x = ctx.relu(ctx.mul(ctx.set_input(ctx.tensor("f32", (64, 3), "x")), weight(device, "scale", 64)))
    product = ctx.set_name(ctx.mul_mat(weight(host, "w", 64, 64), x), "product")
    found = planned([device, host], gs.Graph(product)).fallbacks()
    assert [fell.nodes for fell in found] == [("'product'",)]


def test_nodes_that_the_caller_assigned_did_not_fall_back(ctx):
    device, host = gpu(lambda node: node.op == "SOFT_MAX"), gs.DryBackend("CPU")
    graph = two_products(ctx, device, ctx.soft_max)
    between = next(node for node in graph.nodes if node.name == "between")
    plan = planned([device, host], graph, [(between, host)])
    assert plan.fallbacks() == ()


def test_a_plan_of_one_backend_has_none(ctx):
    host = gs.DryBackend("CPU")
    assert planned([host], two_products(ctx, host, ctx.sqr)).fallbacks(DEVICES, LINK) == ()


def test_of_two_devices_the_one_that_is_near_is_named(ctx):
    first, second = gs.DryBackend("A"), gs.DryBackend("B", supports_op=lambda node: node.op != "SOFT_MAX")
    first.supports_op = lambda node: node.op != "SOFT_MAX"
    graph = two_products(ctx, second, ctx.soft_max)
    (found,) = planned([first, second, gs.DryBackend("CPU")], graph).fallbacks()
    assert (found.refused_by, found.backend) == ("B", "CPU")


def test_a_view_between_nodes_does_not_hide_them_from_each_other(ctx):
    device, host = gpu(lambda node: node.op == "SOFT_MAX"), gs.DryBackend("CPU")
    graph = two_products(ctx, device, lambda x: ctx.soft_max(ctx.reshape(ctx.reshape(x, 192), 64, 3)))
    assert [fell.op for fell in planned([device, host], graph).fallbacks()] == ["SOFT_MAX"]


def test_a_store_computes_nothing_and_refuses_nothing(ctx):
    store, host = gs.DryStore("disk"), gs.DryBackend("CPU")
    plan = planned([store, host], two_products(ctx, store, ctx.relu))
    assert len(plan.copies) == 2 and plan.fallbacks() == ()


def test_a_chain_of_refused_nodes_is_walked_once(monkeypatch):
    """Falling spreads from the last node to the first one, against the order of the nodes."""
    n, asked, backend_of = 400, [], fallbacks._backend_of
    gpu, cpu = gs.DryBackend("GPU", supports_op=lambda node: node.op == "MUL_MAT"), gs.DryBackend("CPU")
    weights, ctx = gs.Context(), gs.Context()
    weight = weights.tensor("f32", (64, 64), "w")
    gpu.alloc_tensors(weights)
    t = ctx.tensor("f32", (64, 4), "x", input=True)
    for _ in range(n):
        t = ctx.relu(t)
    with gs.Scheduler([gpu, cpu]) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(ctx.mul_mat(weight, t))))
    monkeypatch.setattr(fallbacks, "_backend_of", lambda *given: asked.append(given) or backend_of(*given))
    (found,) = plan.fallbacks()
    assert len(found.nodes) == n and found.refused_by == "GPU"
    assert len(asked) < 10 * n
