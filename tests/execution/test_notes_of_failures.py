"""A failure inside a backend says which backend it was, and which nodes it was computing."""

import re

import pytest
from devices import device

import ggml_sched as gs


@pytest.mark.parametrize("callback, which", [(None, r"the 2 nodes 'first' \(SQR\) .. 'last' \(SQRT\)"),
                                             (lambda node: True, r"'first' \(SQR\)")])
def test_the_exception_of_a_backend_has_a_note_with_its_nodes(ctx, callback, which):
    first = ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x", input=True)), "first")
    graph = gs.Graph(ctx.set_output(ctx.set_name(ctx.sqrt(first), "last")))
    broken = device(name="broken", before={"graph_compute": lambda graph: 1 / 0},
                    answers={"graph_plan_create": lambda inherited, graph: None})
    with broken, gs.Scheduler([broken], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.compute(graph, callback)
        (note,) = caught.value.__notes__
        assert re.fullmatch(f"backend 'broken' was computing {which}", note)
