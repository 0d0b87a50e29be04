"""Copies between backends move elements, and nothing that lies between them."""

import numpy as np
import pytest
from devices import device

import ggml_sched as gs
from ggml_sched._graph import bind_resident
from ggml_sched.backends.cpu.buffer import copy_on_host


def refuses(_inherited, _src, _dst) -> bool:
    return False


@pytest.mark.parametrize("answers", [{}, {"cpy_tensor_from": refuses, "cpy_tensor_to": refuses}], ids=["own", "host"])
def test_copying_into_a_strided_view_keeps_the_bytes_between_its_rows(answers):
    ctx_a, ctx_b = gs.Context("a"), gs.Context("b")
    a, b = ctx_a.tensor("f32", (4, 3), "a"), ctx_b.tensor("f32", (4, 3), "b")
    for name, ctx in (("A", ctx_a), ("B", ctx_b)):
        device(name=name, answers=answers).alloc_tensors(ctx)
    a.set(np.full((3, 4), 1.0, np.float32))
    b.set(np.full((3, 4), 2.0, np.float32))
    gs.tensor_copy(ctx_a.view_2d(a, 2, 3, 16, 4), ctx_b.view_2d(b, 2, 3, 16, 4))
    expected = np.full((3, 4), 2.0)
    expected[:, 1:3] = 1.0
    np.testing.assert_array_equal(b.numpy(), expected)


def test_a_copy_on_the_host_is_left_to_others_where_it_cannot_be():
    ctx, fixed, far = gs.Context("a"), gs.Context("fixed"), gs.Context("far")
    a, b, other = ctx.tensor("f32", (4, 3), "a"), ctx.tensor("f32", (4, 3), "b"), ctx.tensor("f32", (3, 4), "other")
    constant, elsewhere = fixed.tensor("f32", (4, 3), "constant"), far.tensor("f32", (4, 3), "elsewhere")
    backend = gs.CpuBackend()
    backend.alloc_tensors(ctx)
    memory = np.full(12, 7.0, np.float32)
    memory.flags.writeable = False
    bind_resident(constant, backend.buffer_from_ptr(memory), 0)
    gs.DryBackend("far").alloc_tensors(far)
    a.set(np.ones((3, 4), np.float32))
    assert copy_on_host(a, b) and (b.numpy() == 1).all()
    assert copy_on_host(constant, b) and (b.numpy() == 7).all()
    for src, dst in ((a, other), (other, a), (a, constant), (a, elsewhere), (elsewhere, a)):
        assert not copy_on_host(src, dst)
    assert (memory == 7).all() and (a.numpy() == 1).all()
