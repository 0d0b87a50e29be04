"""A failure inside a backend says which backend it was, and which nodes it was computing."""

import re

import pytest

import ggml_sched as gs


class Failing(gs.CpuBackend):
    def graph_compute(self, graph) -> None:
        raise ZeroDivisionError("division by zero")

    def graph_plan_create(self, graph):
        return None


@pytest.mark.parametrize("callback, which", [(None, r"the 2 nodes 'first' \(SQR\) .. 'last' \(SQRT\)"),
                                             (lambda node: True, r"'first' \(SQR\)")])
def test_the_exception_of_a_backend_has_a_note_with_its_nodes(callback, which):
    ctx = gs.Context()
    first = ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x", input=True)), "first")
    graph = gs.Graph(ctx.set_output(ctx.set_name(ctx.sqrt(first), "last")))
    with Failing(1, "broken") as backend, gs.Scheduler([backend], zero=True) as scheduler:
        with pytest.raises(ZeroDivisionError) as caught:
            scheduler.compute(graph, callback)
        (note,) = caught.value.__notes__
        assert re.fullmatch(f"backend 'broken' was computing {which}", note)
