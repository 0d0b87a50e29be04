"""Arrays for tensors, flat or of the tensor's shape, of any type; another shape is refused and changes nothing."""

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.graph import quants


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(2, 6), (4, 3), (1, 12), (1, 4, 3), (13,), (2, 2, 3)])
def test_an_array_of_another_shape_is_refused(ctx, shape, dtype):
    t = ctx.tensor("f32", (4, 3), "t")
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        t.set(np.full((3, 4), 7))
        with pytest.raises(ValueError, match=r"'t'.*shape .* for a tensor of shape \(3, 4\)"):
            t.set(np.zeros(shape, dtype))
        assert (t.numpy() == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 4), (12,), (1, 3, 4), (1, 1, 3, 4)])
def test_extents_of_one_in_front_do_not_matter(ctx, shape, dtype):
    t = ctx.tensor("f32", (4, 3), "t")
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        t.set(np.arange(12, dtype=dtype).reshape(shape))
        assert t.numpy().tolist() == np.arange(12).reshape(3, 4).tolist()


def test_a_host_without_memory_for_the_array_is_an_error_with_the_tensor(ctx, monkeypatch):
    t = ctx.tensor("q8_0", (64, 3), "t")
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        monkeypatch.setattr(quants, "dequantize", lambda blocks, kind: np.empty(1 << 60, np.uint8))
        with pytest.raises(gs.OutOfMemory, match="'t'.*: the host gives no memory for an array of 192 elements"):
            t.numpy()
