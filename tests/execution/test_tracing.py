"""Traces: which steps ran, in which order and how long; results and errors are as without one."""

import json
import threading
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
from devices import Chain, Gated, Stream, wait
from small_llama import SMALL, TOKENS
from stored_weights import StoredGraph, deferred_devices

import ggml_sched as gs
from ggml_sched.placement.pricing import price_steps
from ggml_sched.planning.program import Location, Program, Run
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues
from ggml_sched.view.timeline import events

DEVICES = [gs.Device(f"cpu{k}", memory=1 << 30, bandwidth=10e9 * (k + 1), flops=1e11, host=k == 1) for k in range(2)]


def cpus(n=2):
    return [gs.CpuBackend(1, name=f"cpu{k}") for k in range(n)]


def traced(chain, scheduler, n, **options):
    """The trace of computes 0 .. n - 1, whose results are right."""
    with scheduler.trace(**options) as trace:
        for k in range(n):
            chain.compute(scheduler, k)
    return trace


def check(compute, overlaps=False):
    """The spans lie within the compute; those of one queue follow one another."""
    program = compute.plan.program
    assert 0 <= compute.start <= compute.issued <= compute.returned <= compute.stop
    by_queue = {}
    for span in compute.steps:
        assert compute.start <= span.start <= span.stop <= compute.stop
        by_queue.setdefault(program.steps[span.number].backend if overlaps else 0, []).append(span)
    for spans in by_queue.values():
        assert [s.number for s in spans] == sorted(s.number for s in spans)
        assert all(one.stop <= other.start for one, other in zip(spans, spans[1:], strict=False))


def check_events(found):
    """Slices of one row are within one another or apart; arrows begin and end within slices; each has its bytes."""
    rows, ends = {}, {}
    for event in found:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        opened = []
        for start, stop in sorted(slices, key=lambda s: (s[0], -s[1])):
            while opened and opened[-1] <= start + 1e-6:
                opened.pop()
            assert not opened or stop <= opened[-1] + 1e-6
            opened.append(stop)
    for event in found:
        if event["ph"] in "sf":
            assert any(start - 1e-6 <= event["ts"] <= stop + 1e-6 for start, stop in rows[event["pid"], event["tid"]])
            ends.setdefault(event["id"], []).append(event)
    assert all([one["ph"], other["ph"]] == ["s", "f"] and one["args"] == other["args"] and one["args"]["bytes"] >= 0
               for one, other in ends.values())
    began = {}
    for event in found:
        if event["ph"] == "b":
            began[event["cat"], event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert began.pop((event["cat"], event["id"])) <= event["ts"]
    assert not began
    return ends


# -- what is recorded -----------------------------------------------------------------------------------


def test_each_compute_has_its_steps_in_order():
    backends = cpus()
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        trace = traced(chain, scheduler, 3)
        chain.compute(scheduler, 3)
    assert len(trace.computes) == 3, "what came after the block is not there"
    for compute in trace.computes:
        check(compute)
        assert [span.number for span in compute.steps] == [*range(len(compute.plan.program))]
        assert not compute.failed and not compute.nodes and compute.stop == compute.returned
    assert len({id(compute.plan) for compute in trace.computes}) == 1
    assert trace.is_exact and repr(trace) == "<Trace of 3 computes on cpu0, cpu1>"


@pytest.mark.parametrize("backends", [lambda: cpus(1), cpus, lambda: [Stream("cpu0"), gs.CpuBackend(1, name="cpu1")]],
                         ids=["one", "two", "stream"])
def test_a_step_that_is_left_out_is_not_there(backends):
    backends = backends()
    chain = Chain(backends, log=4)
    with chain.scheduler(backends) as scheduler, scheduler.trace() as trace:
        chain.set(0)
        for _ in range(2):
            scheduler.compute(chain.graph)
    for backend in backends:
        backend.close()
    first, second = trace.computes
    steps = first.plan.program.steps
    kept = {k for k, step in enumerate(steps) if step.if_changed}
    assert kept and {span.number for span in first.steps} == {*range(len(steps))}
    assert {span.number for span in second.steps} == {*range(len(steps))} - kept
    for backend in backends:
        backend.close()


def test_a_run_takes_as_long_as_its_backend():
    gate, backend = threading.Event(), Gated("cpu0")
    backend.before = lambda number: wait(gate)
    chain = Chain([backend])
    with chain.scheduler([backend]) as scheduler, scheduler.trace() as trace:
        threading.Timer(0.05, gate.set).start()
        chain.compute(scheduler, 1)
    (compute,) = trace.computes
    took = {compute.plan.program.steps[s.number].kind: s.stop - s.start for s in compute.steps}
    assert took["run"] > 0.02 > took["load"]


@pytest.mark.parametrize("make", [lambda k: gs.CpuBackend(1, name=f"cpu{k}"), lambda k: Stream(f"cpu{k}")],
                         ids=["cpu", "stream"])
def test_queued_computes_are_recorded_when_they_run(make):
    backends = [make(k) for k in range(2)]
    chain = Chain(backends, log=6)
    with chain.scheduler(backends, copies=2) as scheduler:
        with scheduler.trace() as trace:
            chain.queue_all(scheduler, 6)
        chain.check_log(6)
    for backend in backends:
        backend.close()
    assert len(trace.computes) == 6
    for compute in trace.computes:
        check(compute, overlaps=True)
        kinds = [compute.plan.program.steps[span.number].kind for span in compute.steps]
        assert kinds.count("run") == sum(step.kind == "run" for step in compute.plan.program.steps)
    check_events(list(events(trace)))
    for backend in backends:
        backend.close()


def test_saving_takes_no_more_memory_for_more_computes(tmp_path):
    backends = cpus()
    chain = Chain(backends)
    peaks = []
    with chain.scheduler(backends) as scheduler:
        for n in (2, 200):
            trace = traced(chain, scheduler, n)
            tracemalloc.start()
            trace.save(tmp_path / "t.json")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    for backend in backends:
        backend.close()
    assert (tmp_path / "t.json").stat().st_size > 200_000
    assert peaks[1] < peaks[0] + 50_000
    assert json.loads((tmp_path / "t.json").read_bytes())["otherData"] == {"exact": True, "computes": 200}


def test_on_asynchronous_backends_a_step_ends_when_issued_unless_the_trace_is_exact():
    queues = DeferredQueues()
    backends = [DeferredBackend(f"cpu{k}", queues) for k in range(2)]
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        before = queues.waits
        issued = traced(chain, scheduler, 1)
        waited = queues.waits - before
        assert not issued.is_exact and "until it was issued" in json.dumps(list(events(issued)))
        before = queues.waits
        exact = traced(chain, scheduler, 1, exact=True)
        assert exact.is_exact and queues.waits - before >= waited + len(exact.computes[0].steps)
        assert "until it was issued" not in json.dumps(list(events(exact)))
        with scheduler.trace(exact=True) as trace:
            chain.queue(scheduler, 2)
            chain.check(2)
        assert len(trace.computes) == 1, "a queued compute is computed at once"
    assert "timed until they are issued" in str(issued) and "issued" not in str(exact)


@pytest.mark.parametrize("make", [cpus, lambda: [DeferredBackend(f"cpu{k}", DeferredQueues(k)) for k in (3,)]],
                         ids=["cpu", "deferred"])
def test_nodes_are_recorded_one_by_one_within_their_run(make):
    backends = make()
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        trace = traced(chain, scheduler, 2, nodes=True)
    for compute in trace.computes:
        check(compute)
        graph = compute.plan.graph
        assert [span.number for span in compute.nodes] == [k for k, t in enumerate(graph.nodes) if t.computes]
        for span in compute.nodes:
            run = next(s for s in compute.steps if isinstance(step := compute.plan.program.steps[s.number], Run)
                       and step.first <= span.number <= step.last)
            assert run.start <= span.start <= span.stop <= run.stop
    found = list(events(trace))
    check_events(found)
    names = [event["name"] for event in found if event["ph"] == "X" and "op" in event["args"]]
    assert names == 2 * [t.name or t.op for t in graph.nodes if t.computes]


def test_a_callback_is_called_as_without_a_trace():
    backends = cpus()
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        seen = []
        with scheduler.trace(nodes=True) as trace:
            chain.set(1)
            assert scheduler.compute(chain.graph, callback=lambda node: seen.append(node.name))
            assert not scheduler.compute(chain.graph, callback=lambda node: False)
        assert [name for name in seen if name] == ["h0", "h1"]
        whole, stopped = trace.computes
        check(whole)
        assert not whole.nodes and not stopped.failed


def test_a_model_s_tokens_are_those_without_a_trace():
    with gs.llama.load(SMALL, n_ctx=64) as model:
        plain = [*model.generate(TOKENS[:3], 8, ignore_eos=True)]
        model.reset()
        with model.scheduler.trace() as trace:
            assert [*model.generate(TOKENS[:3], 8, ignore_eos=True)] == plain
    assert {compute.plan.graph.meta["n_tokens"] for compute in trace.computes} == {1, 3}
    assert len(trace.measured()) == len({id(compute.plan) for compute in trace.computes}) >= 2


# -- failures ---------------------------------------------------------------------------------------------


def break_step(number):
    raise RuntimeError("broken")


def test_a_compute_that_fails_has_the_steps_before_and_the_trace_goes_on():
    backends = [gs.CpuBackend(1, name="cpu0"), Gated("cpu1")]
    chain = Chain(backends)

    with chain.scheduler(backends) as scheduler:
        with scheduler.trace() as trace:
            chain.compute(scheduler, 0)
            backends[1].before = break_step
            with pytest.raises(RuntimeError, match="broken"):
                scheduler.compute(chain.graph)
            backends[1].before = lambda number: None
            chain.compute(scheduler, 2)
        good, failed, again = trace.computes
        assert [c.failed for c in trace.computes] == [False, True, False]
        assert len(failed.steps) < len(good.steps) == len(again.steps)
        check_events(list(events(trace)))
        assert trace.measured()[0].computes == 1, "the first and the failed one do not count"


def test_a_queued_compute_that_fails_has_failed_in_the_trace():
    backends = [gs.CpuBackend(1, name="cpu0"), Gated("cpu1")]
    chain = Chain(backends)

    with chain.scheduler(backends) as scheduler:
        chain.compute(scheduler, 0)
        with pytest.raises(RuntimeError, match="broken"), scheduler.trace() as trace:
            scheduler.compute_async(chain.graph)
            scheduler.synchronize()
            backends[1].before = break_step
            scheduler.compute_async(chain.graph)
            scheduler.compute_async(chain.graph)
        assert [compute.failed for compute in trace.computes] == [False, True, True]


def test_the_error_of_a_queued_compute_is_raised_at_the_end_of_the_block():
    backend = Gated("cpu0")
    chain = Chain([backend])
    with chain.scheduler([backend]) as scheduler:
        backend.before = lambda number: (_ for _ in ()).throw(RuntimeError("late"))
        with pytest.raises(RuntimeError, match="late"), scheduler.trace() as trace:
            chain.queue(scheduler, 1)
        backend.before = lambda number: None
        assert trace.computes[0].steps
        assert len(traced(chain, scheduler, 1).computes) == 1, "the scheduler can be traced again"


def test_one_trace_at_a_time_and_none_after_an_exception():
    chain = Chain(cpus(1))
    with chain.scheduler(chain.backends) as scheduler:
        with pytest.raises(ZeroDivisionError), scheduler.trace() as trace:
            with pytest.raises(gs.Error, match="traced already"), scheduler.trace():
                pass
            chain.compute(scheduler, 0)
            raise ZeroDivisionError
        chain.compute(scheduler, 1)
        assert len(trace.computes) == 1
        with scheduler.trace() as other:
            scheduler.close()
    assert not other.computes and str(other) == "no computes" and other.measured() == ()


def test_a_trace_keeps_what_it_names():
    chain = Chain(cpus())
    with chain.scheduler(chain.backends) as scheduler:
        trace = traced(chain, scheduler, 1)
    expected = [node.name for node in chain.graph.nodes]
    del chain, scheduler
    assert [node.name for node in trace.computes[0].plan.graph.nodes] == expected


# -- files and prices -------------------------------------------------------------------------------------


def test_the_file_has_rows_for_steps_arrows_for_copies_with_their_bytes_and_waits(tmp_path):
    backends = cpus()
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        trace = traced(chain, scheduler, 2)
    trace.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    found = content["traceEvents"]
    arrows = check_events(found)
    plan = trace.computes[0].plan
    moving = [step for step in plan.program.steps if not isinstance(step, Run)]
    copied = sum(sum(step.kind == "copy" for step in moving) for _ in trace.computes)
    assert len(arrows) == 2 * len(moving) and copied
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert set(processes.values()) == {"the caller", "cpu0", "cpu1"}
    assert len(rows) == len({tid for _, tid in rows}) and not {tid for _, tid in rows} & processes.keys()
    for one, other in arrows.values():
        if one["cat"] == "copy":
            assert {processes[one["pid"]], processes[other["pid"]]} == {"cpu0", "cpu1"}
            assert one["args"]["bytes"] == chain.x.nbytes
        else:
            assert (one["cat"], processes[one["pid"]]) == ("load", "the caller")
    slices = [e for e in found if e["ph"] == "X"]
    assert {rows[e["pid"], e["tid"]] for e in slices} >= {"runs", "waits", "computes", "sends to cpu1"}
    steps = [e for e in slices if "step" in e["args"] and e["cat"] != "wait"]
    assert sorted(e["args"]["step"] for e in steps) == sorted(
        2 * [k for k, step in enumerate(plan.program.steps) for _ in range(1 if isinstance(step, Run) else 2)])
    waits = [e for e in slices if e["cat"] == "wait" and "step" in e["args"]]
    assert waits and all(plan.program.steps[e["args"]["step"]].waits for e in waits)


@pytest.mark.parametrize("names", [("CPU", "CPU"), ("the caller", "sources")])
def test_backends_of_equal_names_have_processes_of_their_own(names):
    backends = [gs.CpuBackend(1, name=name) for name in names]
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        trace = traced(chain, scheduler, 2, nodes=True)
    found = list(events(trace))
    arrows = check_events(found).values()
    processes = {e["args"]["name"]: e["pid"] for e in found if e["name"] == "process_name"}
    second = f"{names[1]} (2)"
    assert [*processes] == ["the caller", "CPU" if names[0] == "CPU" else "the caller (2)", second]
    rows = {(e["pid"], e["args"]["name"]): e["tid"] for e in found if e["name"] == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in found if e["ph"] == "X"}
    assert {(pid, tid) for (pid, _), tid in rows.items()} == used, "no row is empty"
    between = {(one["pid"], other["pid"]) for one, other in arrows if one["cat"] == "copy"}
    assert between == {(1, 2)} and (1, f"sends to {second}") in rows
    for pid in (1, 2):
        assert any(e["pid"] == pid and e["cat"] == "run" for e in found if e["ph"] == "X")
        assert (pid, "nodes") in rows


def test_prices_stand_beside_what_was_measured(tmp_path):
    backends = cpus()
    chain = Chain(backends)
    with chain.scheduler(backends) as scheduler:
        trace = traced(chain, scheduler, 3)
        plan = scheduler.plan(chain.graph)
    link = gs.Link(5e9, 2e-6)
    prices = price_steps(plan, DEVICES, link)
    assert sum(prices) == pytest.approx(gs.price(plan, DEVICES, link).seconds)
    (found,) = trace.measured(DEVICES, link)
    assert [step.price for step in found.steps] == [*prices] and found.price == sum(prices)
    assert found.computes == 2 and [step.computes for step in found.steps] == [2] * len(prices)
    for step in found.steps:
        spans = [s.stop - s.start for c in trace.computes[1:] for s in c.steps if s.number == step.number]
        assert step.seconds == pytest.approx(np.median(spans))
    assert "took / price" in str(found) and "took / price" not in str(trace)
    trace.save(tmp_path / "t.json", DEVICES, link)
    events_found = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    check_events(events_found)
    priced = [e for e in events_found if e["ph"] == "b" and e["cat"] == "price"]
    assert len(priced) == 3 * sum(price > 0 for price in prices)
    run = next(e for e in events_found if e["ph"] == "X" and e["cat"] == "run")
    assert run["args"]["took / price"] == pytest.approx(run["dur"] / run["args"]["price in us"], rel=0.05, abs=0.01)


class Fetch(NamedTuple):
    """A kind of step that this package does not have: bytes of a weight come from a file."""

    backend: int
    tensor: int
    nbytes: int
    locations: tuple
    if_changed: bool = False
    waits: tuple = ()
    kind: str = "fetch"


def test_a_new_kind_of_step_with_a_destination_is_an_arrow_with_its_bytes():
    chain = Chain(cpus(1))
    with chain.scheduler(chain.backends) as scheduler:
        trace = traced(chain, scheduler, 1)
    (compute,) = trace.computes
    program = compute.plan.program
    weight = compute.plan.graph.id_of(chain.weights[0])
    fetch = Fetch(0, weight, 100, (Location(weight, 0, 0, 0),))
    steps = tuple(fetch if step.kind == "load" else step for step in program.steps)
    compute.plan.data._program = Program(steps, program.inputs, program.copy_slots)
    try:
        found = list(events(trace))
    finally:
        compute.plan.data._program = program
    (arrow,) = check_events(found).values()
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert [names[end["pid"]] for end in arrow] == ["sources", "cpu0"]
    assert arrow[0]["args"]["bytes"] == 100 and arrow[0]["name"] == "fetch of 100 B"
    assert any(e["name"] == "fetch w0, 100 B" for e in found)


def test_a_fetch_is_an_arrow_from_its_store_and_its_reader_waits_for_it(tmp_path):
    case = StoredGraph(3)
    _, (store, *_), (*_, cpu) = deferred_devices(3)
    graph, inputs, output, _ = case.build(lambda k: store if k >= 0 else cpu)
    with gs.Scheduler([store, cpu]) as scheduler:
        plan = scheduler.alloc(graph)
        with scheduler.trace(exact=True) as trace:
            case.set(inputs, 0)
            scheduler.compute(graph)
        assert output.numpy().tobytes() == case.expected(1)[0]
    fetches = [step for step in plan.program.steps if step.kind == "fetch"]
    trace.save(tmp_path / "t.json")
    found = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    arrows = [arrow for arrow in check_events(found).values() if arrow[0]["cat"] == "fetch"]
    assert fetches and [arrow[0]["args"]["bytes"] for arrow in arrows] == [step.nbytes for step in fetches]
    assert {tuple(names[end["pid"]] for end in arrow) for arrow in arrows} == {(store.name, "CPU")}
    assert any(e["name"].startswith("wait for step") and e["name"].endswith(store.name) for e in found)
    assert {step.what for step in trace.measured()[0].steps} >= {
        f"fetch {graph.tensors[step.tensor].name}" for step in fetches}


def test_an_existing_file_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    chain = Chain(cpus(1))
    with chain.scheduler(chain.backends) as scheduler:
        trace = traced(chain, scheduler, 1)
    (tmp_path / "t.json").write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        trace.save(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "before"
