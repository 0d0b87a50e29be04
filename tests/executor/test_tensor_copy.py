"""Copies between backends move elements, and nothing that lies between them."""

import numpy as np
import pytest

import ggml_sched as gs


class HostOnly(gs.CpuBackend):
    """A CPU backend that leaves copies to the host path."""

    def cpy_tensor_from(self, src, dst):
        return False

    def cpy_tensor_to(self, src, dst):
        return False


@pytest.mark.parametrize("kind", [gs.CpuBackend, HostOnly])
def test_copying_into_a_strided_view_keeps_the_bytes_between_its_rows(kind):
    ctx_a, ctx_b = gs.Context("a"), gs.Context("b")
    a, b = ctx_a.tensor("f32", (4, 3), "a"), ctx_b.tensor("f32", (4, 3), "b")
    kind(name="A").alloc_tensors(ctx_a), kind(name="B").alloc_tensors(ctx_b)
    a.set(np.full((3, 4), 1.0, np.float32))
    b.set(np.full((3, 4), 2.0, np.float32))
    gs.tensor_copy(ctx_a.view_2d(a, 2, 3, 16, 4), ctx_b.view_2d(b, 2, 3, 16, 4))
    expected = np.full((3, 4), 2.0)
    expected[:, 1:3] = 1.0
    np.testing.assert_array_equal(b.numpy(), expected)
