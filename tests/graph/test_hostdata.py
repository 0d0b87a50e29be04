"""Arrays for tensors, flat or of the tensor's shape, of any type; another shape is refused and changes nothing."""

import numpy as np
import pytest

import ggml_sched as gs


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
