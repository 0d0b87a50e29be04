"""Set and computed data can be read as long as its memory is not reused; afterwards reading is an error."""

import numpy as np
import pytest

import ggml_sched as gs


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_result_whose_memory_was_reused_is_refused_and_an_output_is_not(policy):
    ctx = gs.Context()
    x = ctx.tensor("f32", (64,), "x", input=True)
    doubled = ctx.set_name(ctx.scale(x, 2.0), "doubled")
    kept = ctx.set_output(ctx.set_name(ctx.scale(x, 3.0), "kept"))
    out = ctx.set_output(ctx.relu(ctx.sqr(doubled)))
    sums = ctx.set_output(ctx.add(kept, kept))
    with gs.Scheduler([gs.CpuBackend()], policy=policy) as scheduler:
        graph = gs.Graph(out, sums)
        scheduler.alloc(graph)
        x.set(np.arange(64, dtype=np.float32))
        seen = {}
        scheduler.compute(graph, callback=lambda node: seen.update({node.name: node.numpy()}))
        np.testing.assert_array_equal(seen["doubled"], 2 * np.arange(64))
        with pytest.raises(gs.HazardError, match="'doubled'.*set_output"):
            doubled.numpy()
        with pytest.raises(gs.HazardError, match="'doubled'"):
            ctx.view_1d(doubled, 4).numpy()
        np.testing.assert_array_equal(kept.numpy(), 3 * np.arange(64))
        np.testing.assert_array_equal(out.numpy(), (2.0 * np.arange(64)) ** 2)
        np.testing.assert_array_equal(x.numpy(), np.arange(64))


def test_a_view_of_an_input_takes_data_before_the_compute():
    """The data of an input waits on the host, as a whole: what a view gets is put into it."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    row, column = ctx.view_1d(x, 4, 16), ctx.view_2d(x, 1, 2, 16, 4)
    out = ctx.set_output(ctx.add(x, ctx.repeat(ctx.cont(column), x)))
    graph = gs.Graph(out, ctx.sqr(row))
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.zeros((2, 4)))
        row.set(np.arange(4.0))
        column.set([[5.0], [6.0]])
        np.testing.assert_array_equal(x.numpy(), [[0, 5, 0, 0], [0, 6, 2, 3]])
        scheduler.compute(graph)
        np.testing.assert_array_equal(out.numpy(), [[5, 10, 5, 5], [6, 12, 8, 9]])
