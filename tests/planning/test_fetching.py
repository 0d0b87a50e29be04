"""Plans that fetch weights of stores: when a fetch begins, what a window holds, and what plan files say of it."""

import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest
from stored_weights import StoredGraph

import ggml_sched as gs
from ggml_sched._core import plan_values
from ggml_sched.planning.planner import planned_by
from ggml_sched.planning.program import Fetch
from ggml_sched.planning.verify import check

SIZE = 64 * 64 * 4


def is_stored(t):
    return t.backend is not None and t.backend.is_store


def chain(n=6, margin=0, embeds=False, home=None):
    """A chain of n products by weights of a store of SIZE bytes each: (graph, weights, store)."""
    store = home or gs.DryStore("disk", margin, supports_op=lambda node: node.op == "GET_ROWS")
    weights, ctx = gs.Context("weights"), gs.Context()
    tensors = [weights.tensor("f32", (64, 64), f"w{k}") for k in range(n)]
    table = weights.tensor("f32", (64, 500), "table")
    store.alloc_tensors(weights)
    x = ctx.tensor("f32", (64, 2), "x", input=True)
    if embeds:
        x = ctx.get_rows(table, ctx.tensor("i32", 2, "ids", input=True))
    for t in tensors:
        x = ctx.silu(ctx.mul_mat(t, x))
    return gs.Graph(ctx.set_output(x)), tensors, store


def begun(plan):
    """{weight: (split before which its fetch begins, split that reads it)}."""
    first = {copy.tensor.name: copy.split for copy in plan.copies if is_stored(copy.tensor)}
    reads = {}
    for k, split in enumerate(plan.splits):
        for node in split.nodes:
            for s in node.src:
                if s.root.name in first:
                    reads.setdefault(s.root.name, k)
    return {name: (k, reads[name]) for name, k in first.items()}


def alive(plan, b):
    """The most bytes that fetched copies have alive on backend number b while a split runs."""
    data, most = plan.data, 0
    copies = [data.n_tensors + c for c, (like, at) in enumerate(data.copies)
              if at == b and is_stored(plan.graph.tensors[like])]
    for position in range(len(data.sequence)):
        live = [i for i in copies if data.lifetime(i)[0] <= position <= data.lifetime(i)[1]]
        most = max(most, sum(data.size(i) for i in live))
    return most


def test_without_a_window_each_weight_is_fetched_just_before_its_reader():
    graph, _, store = chain()
    cpu = gs.DryBackend("CPU")
    plan = gs.Scheduler([store, cpu], windows={cpu: 0}).plan(graph)
    assert all(first == reader for first, reader in begun(plan).values())
    plan.verify()


def test_nodes_before_the_first_reader_do_not_wait_for_its_fetch():
    store, cpu, weights, ctx = gs.DryStore("disk"), gs.DryBackend("CPU"), gs.Context(), gs.Context()
    w = weights.tensor("f32", (64, 64), "w")
    store.alloc_tensors(weights)
    x = ctx.silu(ctx.silu(ctx.tensor("f32", 64, "x", input=True)))
    cpu.concurrent_copies = True
    with gs.Scheduler([store, cpu], windows={cpu: 2 * SIZE}) as scheduler:
        plan = scheduler.plan(gs.Graph(ctx.set_output(ctx.mul_mat(w, x))))
    assert [(split.start, split.stop) for split in plan.splits] == [(0, 2), (2, 3)]
    assert begun(plan) == {"w": (0, 1)}
    steps = plan.program.steps
    (fetch,) = (k for k, step in enumerate(steps) if isinstance(step, Fetch))
    assert [any(wait.step == fetch for wait in step.waits) for step in steps if step.kind == "run"] == [False, True]
    plan.verify()


@pytest.mark.parametrize("margin", [0, 100])
def test_a_window_of_n_weights_holds_n_weights(margin):
    cpu = gs.DryBackend("CPU")
    for n in (1, 2, 3, 6):
        graph, _, store = chain(margin=margin)
        size = -(-(SIZE + margin) // 32) * 32
        plan = gs.Scheduler([store, cpu], windows={cpu: n * size}).plan(graph)
        assert alive(plan, 1) == n * size
        assert begun(plan) == {f"w{k}": (max(k - n + 1, 0), k) for k in range(6)}
        # One byte less, and one weight less is ahead.
        plan = gs.Scheduler([store, cpu], windows={cpu: n * size - 1}).plan(graph)
        assert alive(plan, 1) == max(n - 1, 1) * size
        plan.verify()


def test_without_a_budget_one_weight_is_fetched_while_another_is_used():
    graph, _, store = chain()
    plan = gs.Scheduler([store, gs.DryBackend("CPU")]).plan(graph)
    assert alive(plan, 1) == 2 * SIZE


def test_the_widest_window_that_a_budget_allows_is_found():
    graph, _, store = chain(n=20)
    cpu = gs.DryBackend("CPU")
    least = sum(gs.Scheduler([store, cpu], windows={cpu: 0}).plan(graph).buffer_sizes)
    for n in range(1, 21):
        budget = least + (n - 1) * SIZE
        with gs.Scheduler([store, cpu], budgets={cpu: budget}) as scheduler:
            plan = scheduler.plan(graph)
            assert plan.buffer_sizes[1] <= budget and alive(plan, 1) == n * SIZE, n
            assert scheduler.plan(graph).data is plan.data          # the windows are searched once
    with pytest.raises(gs.OutOfMemory) as raised:
        gs.Scheduler([store, cpu], budgets={cpu: least - 1}).plan(graph)
    assert (raised.value.needed, raised.value.available) == (least, least - 1)


def test_a_backend_with_bounded_memory_bounds_the_window_too():
    graph, _, store = chain(n=20)
    plan = gs.Scheduler([store, gs.DryBackend("CPU", memory=5 * SIZE)]).plan(graph)
    assert 3 * SIZE <= alive(plan, 1) <= 5 * SIZE and plan.buffer_sizes[1] <= 5 * SIZE


def test_a_store_computes_rows_before_it_fetches_and_what_it_computed_is_copied_first():
    graph, _, store = chain(embeds=True)
    cpu = gs.DryBackend("CPU")
    cpu.concurrent_copies = True
    plan = gs.Scheduler([store, cpu], windows={cpu: 10 * SIZE}).plan(graph)
    plan.verify()
    assert [split.backend.name for split in plan.splits[:2]] == ["disk", "CPU"]
    in_queue = [step.kind for step in plan.program.steps if step.backend == 0]
    assert in_queue == ["load", "run", "copy", *["fetch"] * 6]
    assert not any(copy.tensor.name == "table" for copy in plan.copies)


def test_rows_of_a_store_that_does_not_compute_them_take_the_whole_weight():
    graph, _, store = chain(embeds=True, home=gs.DryStore("disk"))
    plan = gs.Scheduler([store, gs.DryBackend("CPU")]).plan(graph)
    plan.verify()
    assert "table" in begun(plan)


def test_a_weight_that_two_nodes_read_is_fetched_once_and_stays_in_between():
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    weights, ctx = gs.Context("weights"), gs.Context()
    w, v = (weights.tensor("f32", (64, 64), name) for name in "wv")
    store.alloc_tensors(weights)
    x = ctx.mul_mat(w, ctx.tensor("f32", (64, 2), "x", input=True))
    graph = gs.Graph(ctx.set_output(ctx.mul_mat(w, ctx.mul_mat(v, x))))
    plan = gs.Scheduler([store, cpu], windows={cpu: 0}).plan(graph)
    plan.verify()
    assert Counter(copy.tensor.name for copy in plan.copies) == {"w": 1, "v": 1} and alive(plan, 1) == 2 * SIZE


def test_fetches_for_a_later_device_begin_in_splits_of_another():
    store, gpu, cpu = gs.DryStore("disk"), gs.DryBackend("GPU"), gs.DryBackend("CPU")
    graph, tensors, _ = chain(home=store)
    scheduler = gs.Scheduler([store, gpu, cpu], windows={gpu: 10 * SIZE, cpu: 10 * SIZE})
    for k, node in enumerate(graph.nodes):
        scheduler.set_tensor_backend(node, gpu if k >= 6 else cpu)
    plan = scheduler.plan(graph)
    plan.verify()
    assert set(begun(plan).values()) == {(0, k) for k in range(6)}
    assert {copy.backend.name for copy in plan.copies if copy.split == 0 and copy.tensor.backend is store} == {
        "GPU", "CPU"}


def test_two_stores_fetch_each_in_its_own_order():
    one, other, cpu = gs.DryStore("one"), gs.DryStore("other"), gs.DryBackend("CPU")
    weights = {store: gs.Context(store.name) for store in (one, other)}
    tensors = [weights[(one, other)[k % 2]].tensor("f32", (64, 64), f"w{k}") for k in range(6)]
    for store, ctx in weights.items():
        store.alloc_tensors(ctx)
    ctx = gs.Context()
    x = ctx.tensor("f32", (64, 2), "x", input=True)
    for t in tensors:
        x = ctx.mul_mat(t, x)
    plan = gs.Scheduler([one, other, cpu], windows={cpu: 4 * SIZE}).plan(gs.Graph(ctx.set_output(x)))
    plan.verify()
    for b in (0, 1):
        queue = [plan.graph.tensors[step.tensor].name for step in plan.program.steps if step.backend == b]
        assert queue == [f"w{k}" for k in range(b, 6, 2)]
    assert alive(plan, 2) == 4 * SIZE


def test_copies_of_stored_weights_have_one_slot_and_are_never_kept():
    graph, _, store = chain()
    plan = gs.Scheduler([store, gs.DryBackend("CPU")], copies=3).plan(graph)
    plan.verify()
    steps = [step for step in plan.program.steps if isinstance(step, Fetch)]
    assert len(steps) == 6 and all(len(step.locations) == 1 and not step.if_changed for step in steps)
    assert not any(plan.data.kept)


def test_the_seed_policy_fetches_too():
    graph, _, store = chain(embeds=True)
    plan = gs.Scheduler([store, gs.DryBackend("CPU")], policy="seed").plan(graph)
    plan.verify()
    assert sum(isinstance(step, Fetch) for step in plan.program.steps) == 6


def test_reserved_plans_serve_smaller_graphs_of_stored_weights():
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    weights = gs.Context("weights")
    tensors = [weights.tensor("f32", (64, 64), f"w{k}") for k in range(6)]
    store.alloc_tensors(weights)

    def graph(n):
        ctx = gs.Context()
        x = ctx.tensor("f32", (64, n), "x", input=True)
        for t in tensors:
            x = ctx.mul_mat(t, x)
        return gs.Graph(ctx.set_output(x))

    with gs.Scheduler([store, cpu], budgets={cpu: 4 * SIZE}) as scheduler:
        large, small = graph(20), graph(3)
        scheduler.reserve(large)
        plan = scheduler.plan(small)
        plan.verify()
        assert plan.methods[1] == "replayed" and alive(plan, 1) == alive(scheduler.plan(large), 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_plans_with_stores_are_sound_and_keep_within_windows_and_budgets(seed):
    rng, case = random.Random(seed), StoredGraph(seed)
    stores = [gs.DryStore(f"disk{k}", rng.choice((0, 12, 4096))) for k in range(rng.choice((1, 2)))]
    devices = [gs.DryBackend(name) for name in rng.choice((["CPU"], ["GPU", "CPU"]))]
    for device in devices:
        device.concurrent_copies = rng.random() < 0.5
    backends = [*stores, *devices]
    homes = {k: rng.choice([*stores, *stores, *devices]) for k in range(-1, len(case.weights))}
    graph, *_ = case.build(homes.__getitem__)
    free = gs.Scheduler(backends, windows=dict.fromkeys(devices, 0)).plan(graph)
    free.verify()
    windows = {device: rng.choice((0, 5000, 20000, 10**6)) for device in devices}
    plan = gs.Scheduler(backends, windows=windows).plan(graph)
    plan.verify()
    for b, device in enumerate(devices, len(stores)):
        assert alive(plan, b) <= max(windows[device], alive(free, b))
    assert plan_values(planned_by(plan, "default").data) == plan_values(plan.data)
    budgets = {device: size + rng.randrange(0, 60000)
               for device, size in zip(devices, free.buffer_sizes[len(stores):], strict=True)}
    plan = gs.Scheduler(backends, budgets=budgets).plan(graph)
    plan.verify()
    assert all(size <= budgets[device] for device, size in zip(devices, plan.buffer_sizes[len(stores):], strict=True))
    assert pickle.loads(pickle.dumps(plan)).program == plan.program


# -- plans as files and texts ------------------------------------------------------------------------------------


def test_plan_files_keep_fetches_and_refuse_another_store(tmp_path):
    graph, _, store = chain(margin=100)
    cpu = gs.DryBackend("CPU")
    plan = gs.Scheduler([store, cpu], windows={cpu: 4 * SIZE}).plan(graph)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert '"version":3' in path.read_text()
    with gs.Scheduler([store, cpu]) as scheduler:
        scheduler.adopt(gs.load_plan(path, graph, [store, cpu]))
        assert scheduler.plan(graph).program == plan.program != gs.Scheduler([store, cpu]).plan(graph).program
    store.margin = 50
    with pytest.raises(gs.PlacementError, match="has margin 50; the plan was made for 100"):
        gs.load_plan(path, graph, [store, cpu])
    store.is_store = False
    with pytest.raises(gs.PlacementError, match="has margin None; the plan was made for 100"):
        gs.load_plan(path, graph, [store, cpu])


def test_pickled_plans_are_verified_without_the_store():
    graph, _, store = chain(margin=100)
    plan = pickle.loads(pickle.dumps(gs.Scheduler([store, gs.DryBackend("CPU")]).plan(graph)))
    plan.verify()
    assert plan.backends[0].is_store and plan.backends[0].margin == 100


def test_plans_without_stores_are_written_as_before(tmp_path):
    a = gs.DryBackend("A")
    ctx = gs.Context()
    plan = gs.Scheduler([a]).plan(gs.Graph(ctx.silu(ctx.tensor("f32", (4, 4), "x"))))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    assert '"version":1' in text and "margin" not in text


def test_the_traffic_and_the_text_of_a_plan_count_fetches():
    graph, _, store = chain()
    plan = gs.Scheduler([store, gs.DryBackend("CPU")]).plan(graph)
    assert plan.traffic() == {("disk", "CPU"): (6, 6 * SIZE)} and plan.copy_bytes == 6 * SIZE
    assert "disk: fetch w0 to CPU#w0 at" in str(plan)


# -- wrong programs and wrong calls -------------------------------------------------------------------------------


def corrupted(change):
    """The reason codes of a plan of six weights in a window of three, after a change of its facts."""
    graph, _, store = chain(margin=100)
    cpu = gs.DryBackend("CPU")
    cpu.concurrent_copies = True
    facts = gs.Scheduler([store, cpu], windows={cpu: 3 * (SIZE + 128)}).plan(graph).facts
    assert check(facts) == []
    steps = list(facts.program.steps)
    changed = change(facts, steps)
    program = gs.Program(tuple(steps), facts.program.inputs, facts.program.copy_slots)
    return {problem.reason for problem in check(replace(changed or facts, program=program))}


def fetch_numbers(steps):
    return [k for k, step in enumerate(steps) if isinstance(step, Fetch)]


def in_another_queue(facts, steps):
    k = fetch_numbers(steps)[1]
    steps[k] = steps[k]._replace(backend=1)


def in_a_slot_that_is_taken(facts, steps):
    """Two weights that are alive together get the same memory, in the plan and in its program."""
    a, b = (steps[k].locations[0].id for k in fetch_numbers(steps)[:2])
    offset = list(facts.offset)
    offset[b] = offset[a]
    moved = {b: offset[a]}
    for k, step in enumerate(steps):
        if step.kind == "run":
            reads = tuple(r._replace(locations=tuple(p._replace(offset=moved.get(p.id, p.offset)) for p in r.locations))
                          for r in step.reads)
            steps[k] = step._replace(reads=reads)
        else:
            steps[k] = step._replace(locations=tuple(p._replace(offset=moved.get(p.id, p.offset))
                                                     for p in step.locations))
    return replace(facts, offset=offset)


def read_where_the_margin_is_missing(facts, steps):
    return replace(facts, need=[n + (200 if facts.is_fetched(i) else 0) for i, n in enumerate(facts.need)])


def without(kind):
    def change(facts, steps):
        ks = [k for k, step in enumerate(steps) if step.waits and isinstance(step, Fetch) == (kind == "run")]
        for k in ks:
            steps[k] = steps[k]._replace(waits=tuple(w for w in steps[k].waits if steps[w.step].kind != kind))
    return change


def late(facts, steps):
    """A fetch behind the run that reads it."""
    k = fetch_numbers(steps)[0]
    steps.append(steps.pop(k))
    for i, step in enumerate(steps):
        steps[i] = step._replace(waits=())


def shifted(facts, steps):
    k = fetch_numbers(steps)[2]
    steps[k] = steps[k]._replace(start=64, nbytes=SIZE - 64)


def reversed_blocks(facts, steps):
    k = fetch_numbers(steps)[2]
    steps[k] = steps[k]._replace(start=64)


@pytest.mark.parametrize(("change", "reasons"), [
    (in_another_queue, {"bad-step"}),
    (in_a_slot_that_is_taken, {"overlap"}),
    (read_where_the_margin_is_missing, {"too-small"}),
    (without("fetch"), {"unordered"}),
    (without("run"), {"unordered"}),
    (late, {"overlap"}),
    (shifted, {"read-before-write"}),
    (reversed_blocks, {"read-before-write"}),
])
def test_each_bug_of_a_fetch_has_its_reason(change, reasons):
    assert corrupted(change) & reasons


def test_bytes_of_another_range_are_the_wrong_range():
    """Of a weight that the program fetches through a view: all bytes are there, and not the right ones."""
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    weights, ctx = gs.Context("weights"), gs.Context()
    w = weights.tensor("f32", (64, 128), "w")
    store.alloc_tensors(weights)
    part = ctx.view_2d(w, 64, 64, w.nb[1], 64 * w.nb[1])
    graph = gs.Graph(ctx.set_output(ctx.mul_mat(part, ctx.tensor("f32", (64, 2), "x", input=True))))
    plan = gs.Scheduler([store, cpu]).plan(graph)
    plan.verify()
    (k,) = fetch_numbers(plan.program.steps)
    assert (plan.program.steps[k].start, plan.program.steps[k].nbytes) == (SIZE, SIZE)
    steps = list(plan.program.steps)
    steps[k] = steps[k]._replace(start=0)
    plan.data._program = gs.Program(tuple(steps), plan.program.inputs, 1)
    with pytest.raises(gs.HazardError, match="other bytes") as raised:
        plan.verify()
    assert raised.value.reason == "wrong-range"


def test_a_store_is_not_the_last_backend_and_windows_are_checked():
    store, cpu = gs.DryStore("disk"), gs.DryBackend("CPU")
    with pytest.raises(ValueError, match="'disk' is a store, which computes nothing"):
        gs.Scheduler([cpu, store])
    with pytest.raises(ValueError, match="a window of -1 bytes"):
        gs.Scheduler([store, cpu], windows={cpu: -1})
    with pytest.raises(TypeError, match="windows are {backend: bytes}"):
        gs.Scheduler([store, cpu], windows=[5])
    with pytest.raises(ValueError, match="margin of -1 bytes is negative"):
        gs.DryStore("disk", -1)


def test_a_store_alone_computes_nothing():
    graph, _, store = chain()
    with gs.Scheduler([store, gs.DryBackend("CPU")]) as scheduler, pytest.raises(gs.BackendError, match="are dry"):
        scheduler.compute(graph, zero=True)


def test_windows_survive_a_lost_backend():
    graph, _, store = chain()
    gpu, cpu = gs.DryBackend("GPU"), gs.DryBackend("CPU")
    with gs.Scheduler([store, gpu, cpu], windows={cpu: 3 * SIZE}) as scheduler:
        assert alive(scheduler.without(gpu).plan(graph), 1) == 3 * SIZE


def test_explanations_say_when_a_weight_is_fetched_and_what_the_window_takes():
    graph, tensors, store = chain(margin=100)
    cpu = gs.DryBackend("CPU")
    plan = gs.Scheduler([store, cpu], windows={cpu: 3 * (SIZE + 128)}).plan(graph)
    text = plan.explain(tensors[4])
    assert "'w4' (NONE f32 64x64): on disk" in text
    offset = plan.data.offset(plan.data.n_tensors + 4)
    assert (f"fetched to CPU at offset {offset:,} in each compute: {SIZE:,} bytes of 16,512 taken; "
            "the fetch begins before split 2 and is awaited by split 4") in text
    assert plan.windows == (0, 3 * 16512) and len(plan.fetches) == 6
    assert f"fetched to CPU in each compute: 6 weights of {6 * SIZE:,} bytes, at most 49,536 at one time" in str(plan)
