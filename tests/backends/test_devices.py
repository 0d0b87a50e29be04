"""The configurable backend of the tests overrides the configured methods, and no others."""

import numpy as np
import pytest
from devices import POISON, device

import ggml_sched as gs
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues


def squared(backend):
    ctx = gs.Context()
    x = ctx.tensor("f32", (4,), "x")
    graph = gs.Graph(ctx.sqr(x))
    backend.alloc_tensors(ctx)
    x.set(np.arange(4))
    return graph


def test_nothing_is_overridden_that_is_not_configured():
    made = device(gs.DryBackend, "A", records={"alloc_size"})
    own = [name for cls in type(made).__mro__[:2] for name in vars(cls) if hasattr(gs.Backend, name)]
    assert {name for name in own if not name.startswith("__")} == {"alloc_size"}
    assert type(device(name="B")).supports_op is gs.CpuBackend.supports_op


@pytest.mark.parametrize("make", [lambda **o: device(name="A", **o),
                                  lambda **o: device(DeferredBackend, "A", queues=DeferredQueues(1), **o)])
def test_calls_are_recorded_held_up_changed_and_observed(make):
    order = []
    backend = make(records={"graph_compute", "set_tensor_async"}, fails={"synchronize"},
                   before={"graph_compute": lambda graph: order.append("before")},
                   after={"graph_compute": lambda graph: order.append("after")})
    graph = squared(backend)
    assert backend.count("set_tensor_async") == 1 and backend.take()[0].args[0] is graph.nodes[0].src[0]
    backend.graph_compute(graph)
    assert order == ["before", "after"] and [call.method for call in backend.calls] == ["graph_compute"]
    backend.answers["graph_compute"] = lambda inherited, graph: order.append("instead")
    backend.graph_compute(graph)
    assert order[2:] == ["before", "instead", "after"]
    backend.fail_next("synchronize", gs.BackendError("once"))
    with pytest.raises(gs.BackendError, match="once"):
        backend.synchronize()
    backend.synchronize()
    assert graph.nodes[0].numpy().tolist() == [0, 1, 4, 9]
    with pytest.raises(ValueError, match="does not override 'alloc_buffer'"):
        backend.fail_next("alloc_buffer", gs.BackendError("never"))


def test_poison_refusals_offloads_and_reads(ctx):
    other = gs.CpuBackend(1, "other")
    backend = device(name="A", poison=POISON, refuses={"SQR"}, offloads={"MUL_MAT"}, reads=[other, "third"],
                     attributes={"concurrent_copies": True})
    assert backend.concurrent_copies and backend.n_threads == 1
    out = bytearray(8)
    backend.alloc_buffer(8).read(0, memoryview(out))
    assert out == bytes([POISON]) * 8
    x = ctx.tensor("f32", (4, 4), "x")
    assert not backend.supports_op(ctx.sqr(x)) and backend.supports_op(ctx.neg(x))
    assert backend.offload_op(ctx.mul_mat(x, x)) and not backend.offload_op(ctx.neg(x))
    third = gs.DryBackend("third")
    assert all(backend.supports_buffer(b.alloc_buffer(8)) for b in (backend, other, third))
    assert not backend.supports_buffer(gs.DryBackend("fourth").alloc_buffer(8))
    backend.refuses.clear()
    assert backend.supports_op(ctx.sqr(x))


def test_wrong_configurations_are_refused():
    with pytest.raises(ValueError, match="no method 'nonsense'"):
        device(records={"nonsense"})
    with pytest.raises(ValueError, match="'supports_op' has an answer"):
        device(refuses={"ADD"}, answers={"supports_op": device})
