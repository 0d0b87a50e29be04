"""Former names of programs, of steps and of leases work for one release, with a DeprecationWarning that names the new
ones."""

import pytest

import ggml_sched as gs
from ggml_sched._graph import Lease


@pytest.fixture
def plan():
    ctx = gs.Context()
    x = ctx.tensor("f32", 64, "x", input=True)
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    h = ctx.silu(x)
    y = ctx.scale(h, 2.0)
    with gs.Scheduler([a, b]) as scheduler:
        scheduler.set_tensor_backend(h, a)
        scheduler.set_tensor_backend(y, b)
        yield scheduler.plan(gs.Graph(y))


@pytest.mark.parametrize(("former", "new", "count"), [("places", "locations", 2), ("keeps", "if_changed", 4)])
def test_steps_have_their_former_names(plan, former, new, count):
    steps = [step for step in plan.program.steps if hasattr(type(step), former)]
    assert len(steps) == count
    for step in steps:
        with pytest.warns(DeprecationWarning, match=f"{type(step).__name__}.{former}: use {new}"):
            assert getattr(step, former) == getattr(step, new)


def test_programs_reads_and_leases_have_their_former_names(plan):
    with pytest.warns(DeprecationWarning, match="Program.turns: use copy_slots"):
        assert plan.program.turns == plan.program.copy_slots == 1
    read, *_ = [read for step in plan.program.steps if step.kind == "run" for read in step.reads]
    with pytest.warns(DeprecationWarning, match="Read.places: use locations"):
        assert read.places == read.locations
    with pytest.warns(DeprecationWarning, match="Lease.displaced: use rebound"):
        assert Lease().displaced is Lease().rebound is False
