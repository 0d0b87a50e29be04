"""Weights whose experts are in slots: the bits of weights in memory, pages counted, and errors that leave it usable."""

import errno
import mmap
import os
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
from expert_graphs import ExpertGraph

import ggml_sched as gs
from ggml_sched.backends.store import ExpertSlots, Stored, has_slots, slot_nbytes
from ggml_sched.experts import LeastFrequentlyUsed, LeastRecentlyUsed, Mixture
from ggml_sched.planning.program import FetchExperts, Run
from ggml_sched.planning.verify import check

pytestmark = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")

PAGE = mmap.PAGESIZE


def expected(choices, **shape):
    with ExpertGraph(None, **shape) as free:
        return [free.compute(chosen) for chosen in choices]


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_plan_of_weights_in_memory_does_not_serve_the_same_graph_with_weights_in_slots(plain_first):
    cpu = gs.CpuBackend(1)
    plain, slots = ExpertGraph(None, cpu=cpu), ExpertGraph(4, cpu=cpu)
    assert plain.graph.fingerprint == slots.graph.fingerprint
    choices = plain.choices(3)
    wanted = expected(choices)
    with gs.Scheduler([slots.store, cpu]) as scheduler:
        plain.scheduler = slots.scheduler = scheduler
        for graph in (plain, slots) if plain_first else (slots, plain):
            scheduler.plan(graph.graph).verify()
            assert [graph.compute(chosen) for chosen in choices] == wanted


# -- bits and bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_slots", "policy", "routed"), [
    (4, LeastRecentlyUsed(), False), (7, LeastFrequentlyUsed(), True), (7, Mixture(), False),
    (18, LeastRecentlyUsed(), True)])
def test_results_have_the_bits_of_weights_in_memory(n_slots, policy, routed):
    with ExpertGraph(n_slots, policy=policy, routed=routed) as graph:
        choices = graph.choices(12)
        graph.scheduler.alloc(graph.graph).verify()
        assert [graph.compute(chosen) for chosen in choices] == expected(choices, routed=routed)
        counted = graph.slots.traffic
        uses = sum(len({e for token in layer for e in token}) for chosen in choices for layer in chosen)
        assert counted.hits + counted.misses == uses
        assert counted.nbytes == counted.misses * 2 * 64 * 64 * 4 == graph.store.traffic.nbytes
        assert counted.misses - counted.evictions == int(graph.slots._table.held.sum()) <= n_slots
        if n_slots == 18:
            assert counted.evictions == 0 and counted.misses <= 18


@pytest.mark.parametrize(("width", "offset", "direct"), [
    (64, 0, None), (64, 5000, None), (24, 32, None), (24, 4096, False), (8, 5000, None), (8, 32, False)])
def test_experts_of_a_file_may_begin_anywhere_and_share_pages(tmp_path, width, offset, direct):
    with ExpertGraph(5, width=width, path=tmp_path / "w", offset=offset, direct=direct) as graph:
        choices = graph.choices(10, seed=offset)
        assert [graph.compute(chosen) for chosen in choices] == expected(choices, width=width)


def resident_bytes(slots):
    """The bytes of memory that the pages of all banks have, as the system counts them."""
    total = 0
    with open("/proc/self/pagemap", "rb") as file:
        for bank in slots.banks:
            file.seek(bank.buffer.base // PAGE * 8)
            entries = np.frombuffer(file.read(bank.buffer.size // PAGE * 8), np.uint64)
            total += int(np.count_nonzero(entries >> np.uint64(62))) * PAGE       # present, or swapped out
    return total


@pytest.mark.parametrize("width", [24, 64])
def test_the_memory_of_slots_is_what_the_system_counts_and_within_what_was_planned(tmp_path, width):
    with ExpertGraph(5, n_layers=1, n_experts=40, width=width, path=tmp_path / "w") as graph:
        assert graph.slots.nbytes == 5 * slot_nbytes([width * width * 4] * 2)
        for chosen in graph.choices(30):
            graph.compute(chosen)
            assert graph.slots.held_nbytes <= graph.slots.nbytes
            # Whole blocks that a direct read writes lie in pages that are counted.
            assert resident_bytes(graph.slots) <= graph.slots.held_nbytes
        assert resident_bytes(graph.slots) > 0
        assert graph.slots.traffic.evictions > 20


def test_an_expert_that_stays_is_not_read_again():
    with ExpertGraph(6, n_tokens=1) as graph:
        same = [[[0, 1]]] * 3
        graph.compute(same)
        before = graph.store.traffic.nbytes
        graph.compute(same)
        assert graph.store.traffic.nbytes == before and graph.slots.traffic[:2] == (6, 6)
        assert graph.slots.holds(0, 1) and not graph.slots.holds(0, 2)


def test_queued_computes_read_in_order():
    with ExpertGraph(4) as graph:
        choices = graph.choices(6)
        right = expected(choices)
        plan = graph.scheduler.alloc(graph.graph)
        plan.verify()
        for chosen in choices:
            graph.x.set(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64))
            for ids, experts in zip(graph.ids, chosen, strict=True):
                ids.set(np.array(experts, np.int32))
            graph.scheduler.compute_async(graph.graph)
        graph.scheduler.synchronize()
        assert graph.y.numpy().tobytes() == right[-1]


def test_more_experts_than_slots_are_an_error_that_says_how_many():
    with ExpertGraph(3) as graph:
        few, many = [[[0, 1], [1, 0]]] * 3, [[[0, 1], [2, 3]]] * 3
        with pytest.raises(gs.OutOfMemory, match="4 experts of bank 0 are used together, and there are 3 slots"):
            graph.compute(many)
        assert graph.compute(few) == expected([few])[0]


def test_a_number_that_names_no_expert_is_refused_as_without_slots():
    with ExpertGraph(6) as graph:
        with pytest.raises(gs.Error, match="9"):
            graph.compute([[[0, 9], [1, 2]]] * 3)
        good = [[[0, 1], [2, 3]]] * 3
        assert graph.compute(good) == expected([good])[0]


# -- errors of the disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [None, False])
def test_an_expert_that_could_not_be_read_is_read_again(tmp_path, monkeypatch, direct):
    with ExpertGraph(5, path=tmp_path / "w", direct=direct) as graph:
        choices = graph.choices(20)
        right, failed = expected(choices), 0
        real, calls = type(graph.source.file).preadv, iter(range(1 << 30))

        def preadv(self, fd, out, offset):
            if next(calls) % 7 == 3:
                raise OSError(errno.EIO, "bad block")
            return real(self, fd, out, offset)

        monkeypatch.setattr(type(graph.source.file), "preadv", preadv)
        for chosen, bits in zip(choices, right, strict=True):
            for _ in range(50):
                try:
                    assert graph.compute(chosen) == bits
                    break
                except gs.FetchError as error:
                    failed += 1
                    layer = int(error.tensor.removeprefix("layer")[0])
                    assert error.code == errno.EIO and error.path == str(tmp_path / "w")
                    assert error.stop - error.start == 64 * 64 * 4
                    number = int(str(error).split("expert ")[1].split(":")[0])
                    assert not graph.slots.holds(layer, number)
                    assert (error.start // (64 * 64 * 4)) % 6 == number
            assert graph.slots.held_nbytes <= graph.slots.nbytes
        assert failed > 5


def test_what_is_in_slots_needs_no_file_after_one_that_was_shortened(tmp_path):
    with ExpertGraph(18, path=tmp_path / "w", n_tokens=1) as graph:
        early, late = [[[0, 1]]] * 3, [[[0, 1]], [[0, 1]], [[4, 5]]]
        right = graph.compute(early)
        os.truncate(tmp_path / "w", graph.data.nbytes - 4096)
        with pytest.raises(gs.FetchError, match="layer2"):
            graph.compute(late)
        assert not graph.slots.holds(2, 5)
        assert graph.compute(early) == right


def test_a_closed_store_is_an_error():
    graph = ExpertGraph(6)
    graph.compute(graph.choices(1)[0])
    graph.store.close()
    with pytest.raises(gs.BackendError, match="closed"):
        graph.compute(graph.choices(1)[0])
    graph.close()


def test_slots_have_one_owner_and_are_closed_with_it():
    with ExpertGraph(4) as graph:
        with pytest.raises(gs.BackendError, match="has slots for experts already"):
            ExpertSlots(graph.store, graph.cpu, 4, LeastRecentlyUsed(), [])
        graph.slots.close()
        assert graph.store.slots is None
        graph.slots.close()


def test_a_system_without_slots_says_so(monkeypatch):
    monkeypatch.setattr("sys.platform", "plan9")
    assert not has_slots()
    with pytest.raises(gs.BackendError, match="no slots for experts"):
        ExpertGraph(4)


# -- plans ---------------------------------------------------------------------------------------------------------


def fetches(steps):
    return [k for k, step in enumerate(steps) if isinstance(step, FetchExperts)]


def test_a_plan_fetches_the_experts_of_each_layer_once_before_they_are_read():
    with ExpertGraph(4) as graph:
        plan = graph.scheduler.plan(graph.graph)
        steps = plan.program.steps
        assert len(fetches(steps)) == 3
        assert [isinstance(steps[k + 1], Run) for k in fetches(steps)] == [True] * 3
        assert plan.traffic() == {("memory", "CPU"): (3, 3 * 4 * 2 * 64 * 64 * 4)}
        assert "that ids0 names" in str(plan) and str(plan).count("memory: fetch the experts of layer") == 3
        again = pickle.loads(pickle.dumps(plan))
        again.verify()
        assert again.program == plan.program and "fetch the experts" in str(again)
        price = gs.price(plan, [gs.Device("memory", 1 << 30, bandwidth=1e9, flops=1e9, launch=0),
                                gs.Device("CPU", 1 << 30, bandwidth=1e10, flops=1e11, host=True)])
        used = 6 * (1 - (4 / 6) ** 2)       # of 6 experts, by two tokens that choose two each
        missing = used * (18 - 4) / (18 - used)
        assert price.fetches == pytest.approx(3 * 2 * missing * 64 * 64 * 4 / 1e9) and price.stalled > 0


def test_plan_files_refuse_weights_that_are_not_in_slots(tmp_path):
    with ExpertGraph(4) as graph, ExpertGraph(None) as free:
        graph.scheduler.plan(graph.graph).save(tmp_path / "plan")
        again = gs.load_plan(tmp_path / "plan", graph.graph, [graph.store, graph.cpu])
        assert again.program == graph.scheduler.plan(graph.graph).program
        with pytest.raises(gs.Error, match="in slots"):
            gs.load_plan(tmp_path / "plan", free.graph, [graph.store, free.cpu])


def test_only_products_by_expert_read_weights_in_slots():
    with ExpertGraph(4) as graph:
        weight, ctx = graph.slots.banks[0].weights[0].tensor, gs.Context()
        view = ctx.view_2d(weight, 64, 64, weight.nb[1])
        y = ctx.mul_mat(view, ctx.tensor("f32", (64, 2), "x", input=True))
        with gs.Scheduler([graph.store, graph.cpu]) as scheduler, pytest.raises(gs.PlacementError, match="MUL_MAT_ID"):
            scheduler.plan(gs.Graph(ctx.set_output(y))).program  # noqa: B018


def test_a_scheduler_without_the_store_of_the_slots_is_refused():
    with ExpertGraph(4) as graph, gs.Scheduler([graph.cpu]) as scheduler, \
            pytest.raises(gs.PlacementError, match="slots of backend 'memory', which is none of the scheduler's"):
        scheduler.compute(graph.graph, zero=True)


def test_other_backends_do_not_read_weights_in_slots():
    with ExpertGraph(4, n_layers=1) as graph, gs.CpuBackend(1, "other") as other:
        other.supports_buffer = lambda buffer: buffer.backend is other
        with gs.Scheduler([graph.store, other, graph.cpu]) as scheduler:
            for node in graph.graph.nodes:
                if node.op == "MUL_MAT_ID":
                    scheduler.set_tensor_backend(node, other)
            with pytest.raises(gs.PlacementError, match="other backends than that of the slots"):
                scheduler.plan(graph.graph).program  # noqa: B018


def test_another_choice_between_two_readers_of_a_layer_is_fetched_again():
    with ExpertGraph(4, n_layers=1) as graph:
        (up, down), ctx = (weight.tensor for weight in graph.slots.banks[0].weights), gs.Context()
        x = ctx.tensor("f32", (64, 1, 1), "x", input=True)
        a, b = (ctx.tensor("i32", (2, 1), name, input=True) for name in "ab")
        parts = [ctx.mul_mat_id(up, x, a), ctx.mul_mat_id(up, x, b), ctx.mul_mat_id(down, x, a)]
        y = ctx.add(ctx.add(parts[0], parts[1]), parts[2])
        with gs.Scheduler([graph.store, graph.cpu]) as scheduler:
            plan = scheduler.plan(gs.Graph(ctx.set_output(y)))
            plan.verify()
            assert len(fetches(plan.program.steps)) == 3


def reasons(change):
    """The reason codes of a plan of three layers after a change of its steps."""
    with ExpertGraph(4) as graph:
        facts = graph.scheduler.plan(graph.graph).facts
        assert check(facts) == []
        steps = list(facts.program.steps)
        change(steps)
        program = gs.Program(tuple(steps), facts.program.inputs, facts.program.copy_slots)
        return {problem.reason for problem in check(replace(facts, program=program))}


def swapped(steps):
    a, b = fetches(steps)[:2]
    steps[a], steps[b] = steps[b]._replace(waits=steps[a].waits), steps[a]._replace(waits=steps[b].waits)


def of_other_numbers(steps):
    a, b = fetches(steps)[:2]
    steps[a] = steps[a]._replace(ids=steps[b].ids, locations=steps[b].locations)


def without(kind):
    def change(steps):
        for k, step in enumerate(steps):
            steps[k] = step._replace(waits=tuple(w for w in step.waits if not isinstance(steps[w.step], kind)))
    return change


def left_out(steps):
    k = fetches(steps)[1]
    steps[k] = steps[k]._replace(weights=steps[k].weights[:1])


def in_another_queue(steps):
    k = fetches(steps)[1]
    steps[k] = steps[k]._replace(backend=1)


@pytest.mark.parametrize(("change", "found"), [
    (swapped, "read-before-write"),
    (of_other_numbers, "partial-read"),
    (without(FetchExperts), "unordered"),
    (without(Run), "unordered"),
    (left_out, "read-before-write"),
    (in_another_queue, "bad-step"),
], ids=["early", "other numbers", "not awaited", "evicts too early", "a weight left out", "wrong queue"])
def test_each_bug_of_a_fetch_of_experts_has_its_reason(change, found):
    assert found in reasons(change)


def test_a_run_that_does_not_wait_for_its_experts_is_wrong():
    """What `verify` refuses as unordered does happen where the store is slow."""
    with ExpertGraph(4) as graph:
        chosen = graph.choices(1)[0]
        right = expected([chosen])[0]
        real = graph.store.read

        def slow(*given):
            time.sleep(0.02)
            real(*given)

        graph.store.read = slow
        plan = graph.scheduler.alloc(graph.graph)
        assert graph.compute(chosen) == right
        graph.scheduler.reset()
        steps = list(plan.program.steps)
        for k in fetches(steps):
            steps[k + 1] = steps[k + 1]._replace(waits=())
        plan.data._program = gs.Program(tuple(steps), plan.program.inputs, 1)
        with pytest.raises(gs.HazardError):
            plan.verify()
        graph.slots._table.clear()
        for bank in graph.slots.banks:
            for expert in np.unique(np.array(chosen[bank.number])).tolist():
                bank.drop(expert)
        graph.scheduler._planner.adopt(plan, {})
        assert graph.compute(chosen) != right


def test_banks_give_tensors_addresses_that_their_store_can_read_to_directly(tmp_path):
    with ExpertGraph(4, path=tmp_path / "w", offset=4096 + 96) as graph:
        for bank in graph.slots.banks:
            for weight in bank.weights:
                assert isinstance(weight, Stored)
                if graph.source.file.is_direct:
                    assert (bank.buffer.base + weight.tensor.offset - weight.start) % 4096 == 0
