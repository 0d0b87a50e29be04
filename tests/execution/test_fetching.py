"""Weights of stores are fetched while other nodes are computed: results have the bits of weights in memory."""

import random

import numpy as np
import pytest
from stored_weights import StoredGraph, deferred_devices

import ggml_sched as gs
from ggml_sched.planning.program import Fetch, Program, Run

TURNS = 4


def scheduler_of(stores, devices, windows=None, copies=1, budgets=None):
    return gs.Scheduler([*stores, *devices], windows=windows, copies=copies, budgets=budgets)


def results(case, scheduler, graph, inputs, output, queued, turns=TURNS):
    """The results of several computes; `queued`: they are issued one after another, and the last one is read."""
    found = []
    for turn in range(turns):
        case.set(inputs, turn)
        if queued:
            scheduler.compute_async(graph)
        else:
            scheduler.compute(graph)
            found.append(output.numpy().tobytes())
    if queued:
        scheduler.synchronize()
        found.append(output.numpy().tobytes())
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_on_deferred_devices_compute_what_the_cpu_does(seed):
    """Any window, margin and number of copy slots; weights on stores and on devices; queued computes and others."""
    rng, case = random.Random(seed), StoredGraph(seed)
    margin = rng.choice((0, 0, 64, 4096))
    _, stores, devices = deferred_devices(seed, margin)
    homes = {k: rng.choice([*stores, *stores, *devices]) for k in range(-1, len(case.weights))}
    graph, inputs, output, _ = case.build(homes.__getitem__)
    windows = {device: rng.choice((0, 5000, 20000, 10**6)) for device in devices} if rng.random() < 0.7 else None
    expected = case.expected(TURNS)
    with scheduler_of(stores, devices, windows, rng.choice((1, 1, 2))) as scheduler:
        scheduler.alloc(graph).verify()
        queued = rng.random() < 0.5
        found = results(case, scheduler, graph, inputs, output, queued)
        assert found == (expected[-1:] if queued else expected)


def chain(n=7, width=64, store=None, device=None):
    """A chain of products by weights of a store, in a window of two weights."""
    ctx, weights = gs.Context(), gs.Context("weights")
    x = ctx.tensor("f32", (width, 2), "x", input=True)
    tensors = [weights.tensor("f32", (width, width), f"w{k}") for k in range(n)]
    store.alloc_tensors(weights)
    rng = np.random.default_rng(1)
    for t in tensors:
        store.set_tensor(t, (rng.standard_normal((width, width)) / 8).astype(np.float32).tobytes())
    y = x
    for t in tensors:
        y = ctx.mul_mat(t, y)
    return gs.Graph(ctx.set_output(y)), x, y


def wrong_seeds(plant, n_seeds=12):
    """In how many orders of the devices' tasks a planted bug, which `verify` finds, gives another result or an error.
    """
    wrong = 0
    for seed in range(n_seeds):
        _, (store, *_), (*_, device) = deferred_devices(seed)
        graph, x, y = chain(store=store, device=device)
        with gs.Scheduler([store, device], windows={device: 3 * 64 * 64 * 4}) as scheduler:
            plan = scheduler.alloc(graph)
            x.set(np.ones((2, 64), np.float32))
            scheduler.compute(graph)
            expected = y.numpy().tobytes()
            scheduler.reset()
            sound, plan.data._program = plan.program, plant(plan.program)
            assert plan.program != sound
            with pytest.raises(gs.HazardError):
                plan.verify()
            scheduler._planner.adopt(plan, {})      # `Scheduler.adopt` would refuse it
            scheduler.alloc(graph)
            x.set(np.ones((2, 64), np.float32))
            try:
                for _ in range(3):
                    scheduler.compute_async(graph)
                scheduler.synchronize()
                wrong += y.numpy().tobytes() != expected
            except gs.Error:
                wrong += 1
    return wrong


def replaced(program, k, **fields):
    steps = list(program.steps)
    steps[k] = steps[k]._replace(**fields)
    return Program(tuple(steps), program.inputs, program.copy_slots)


def fetches(program):
    return [k for k, step in enumerate(program.steps) if isinstance(step, Fetch)]


def waiting_runs(program):
    return [k for k, step in enumerate(program.steps) if isinstance(step, Run)
            and any(isinstance(program.steps[w.step], Fetch) for w in step.waits)]


def without_waits(program, k, kind):
    """Step k without its waits for steps of a kind."""
    waits = tuple(w for w in program.steps[k].waits if not isinstance(program.steps[w.step], kind))
    return replaced(program, k, waits=waits)


def wrong_wait(program, k):
    """Step k waits for the fetch before the one it needs."""
    at = fetches(program)
    waits = tuple(w._replace(step=at[max(at.index(w.step) - 1, 0)]) if w.step in at else w
                  for w in program.steps[k].waits)
    return replaced(program, k, waits=waits)


PLANTED = {
    "a slot is read early": lambda program: without_waits(program, waiting_runs(program)[3], Fetch),
    "a slot is overwritten late": lambda program: without_waits(
        program, next(k for k in fetches(program) if any(w.back == 0 for w in program.steps[k].waits)), Run),
    "the wrong range": lambda program: replaced(program, fetches(program)[2], start=256, nbytes=64 * 64 * 4 - 256),
    "too few bytes": lambda program: replaced(program, fetches(program)[-1], nbytes=64),
    "the wrong wait": lambda program: wrong_wait(program, waiting_runs(program)[2]),
    "another weight": lambda program: replaced(program, fetches(program)[1],
                                               tensor=program.steps[fetches(program)[2]].tensor),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_of_fetches_are_found_by_verify_and_by_late_devices(bug):
    assert wrong_seeds(PLANTED[bug]) > 0
