"""Plans as files and pickles: loading gives the same, sound, usable plan, or an error with the reason."""

import copy
import json
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from configs import sample_paths, sample_plan
from devices import Chain, device, weights_on
from random_problems import plan_of, random_case
from small_graphs import dry_device, two_layers

import ggml_sched as gs
from ggml_sched._core import plan_values
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.planfile import plan_from_dict, plan_to_dict
from ggml_sched.planning.program import Program, program_values


def saved(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def same(a: Plan, b: Plan) -> bool:
    return (plan_values(a.data) == plan_values(b.data) and a.program == b.program and str(a) == str(b)
            and a.buffer_sizes == b.buffer_sizes and a.methods == b.methods and a.policy == b.policy)


def two_devices(**options):
    backends = [gs.DryBackend("A", **options), gs.DryBackend("B")]
    graph, ctx = two_layers(*backends)
    return backends, graph, ctx


@pytest.mark.parametrize("policy", ["seed", "default"])
@pytest.mark.parametrize("block", range(2))
def test_random_plans_come_back_the_same(block, policy, tmp_path):
    for seed in range(block * 40, block * 40 + 40):
        case = random_case(random.Random(seed))
        plan = plan_of(case, policy)
        loaded = gs.load_plan(saved(plan, tmp_path), case[0], case[1])
        assert same(plan, loaded), f"random_case({seed})"
        pickled = pickle.loads(pickle.dumps(plan))
        pickled.verify()
        assert same(plan, pickled), f"random_case({seed})"


def test_backends_of_a_pickled_plan_answer_with_the_sizes_that_it_was_planned_with(ctx):
    x = ctx.tensor("f32", 4, "x", input=True)
    squared = ctx.sqr(x)
    graph = gs.Graph(ctx.set_output(ctx.neg(squared)))
    backends = [dry_device("A", alloc_size=lambda t: t.nbytes + 100 * (t.op == "SQR")),
                dry_device("B", supports_op=lambda t: t.op != "SQR")]
    plan = pickle.loads(pickle.dumps(gs.Scheduler(backends).plan(graph)))
    first, _ = plan.backends
    assert {t.op: first.alloc_size(t) for t in plan.graph.tensors} == {"NONE": 16, "SQR": 116, "UNARY:NEG": 16}


def test_plans_over_a_backend_that_returns_numpy_integers_are_saved(ctx, tmp_path):
    class Numpy(gs.DryBackend):
        def alloc_size(self, tensor):
            return np.int64(tensor.nbytes)

        def inplace_sources(self, op):
            return np.int64(super().inplace_sources(op))

    graph = gs.Graph(ctx.set_output(ctx.neg(ctx.tensor("f32", 4, "x", input=True))))
    backend = Numpy("A")
    backend.max_buffer_size = np.int64(1 << 20)
    plan = gs.Scheduler([backend]).plan(graph)
    assert same(plan, gs.load_plan(saved(plan, tmp_path), graph, [backend]))
    assert same(plan, pickle.loads(pickle.dumps(plan)))


def test_a_copy_of_a_plan_is_the_plan():
    backends, graph, _ = two_devices()
    plan = gs.Scheduler(backends).plan(graph)
    assert copy.copy(plan) is plan and copy.deepcopy([plan])[0] is plan


def test_a_pickled_plan_says_what_each_backend_refused_and_why(ctx):
    gpu = gs.DryBackend("GPU", supports_op=lambda node: node.op != "SOFT_MAX" and str(node.src[0].type) != "q4_0")
    cpu = gs.DryBackend("CPU", supports_op=lambda node: node.op != "NORM")
    with gs.Context("weights") as weights:
        w, q = weights.tensor("f32", (64, 64), "w"), weights.tensor("q4_0", (64, 64), "q")
        gpu.alloc_tensors(weights)
        x = ctx.mul_mat(w, ctx.norm(ctx.tensor("f32", (64, 8), "x", input=True), 1e-5))
        x = ctx.mul_mat(q, ctx.soft_max(ctx.mul_mat(w, x)))
        graph = gs.Graph(ctx.set_output(ctx.mul_mat(w, ctx.transpose(ctx.cont(ctx.transpose(x))))))
        plan = gs.Scheduler([gpu, cpu]).plan(graph)
        found = plan.fallbacks()
        assert {fell.why for fell in found} == {"the op SOFT_MAX", "the type q4_0 of source 0"}
        again = pickle.loads(pickle.dumps(plan))
        for restored in (again, pickle.loads(pickle.dumps(again))):
            assert restored.fallbacks() == found
            assert [restored.explain(t) for t in restored.graph.tensors] == [plan.explain(t) for t in graph.tensors]


def test_a_pickled_plan_has_the_work_memory_and_the_messages_that_it_had(ctx):
    class OnWorker(gs.DryBackend):
        def __init__(self, name, work, host_work):
            super().__init__(name)
            self.worker, self.work, self.host = f"worker of {name}", work, host_work

        def work_size(self, nodes):
            return self.work

        def host_work(self, nodes):
            return self.host

    backends = [OnWorker("A", 4096, 64), OnWorker("B", 100, 5), gs.DryBackend("C")]
    graph, _ = two_layers(*backends[:2])
    plan = gs.Scheduler(backends).plan(graph)
    again = pickle.loads(pickle.dumps(plan))
    for restored in (again, pickle.loads(pickle.dumps(again))):
        assert restored.work_sizes == plan.work_sizes == (4096, 100, 0)
        assert restored.host_work_sizes == plan.host_work_sizes == (64, 5, 0)
        assert restored.messages() == plan.messages() != {}
        assert [backend.worker for backend in restored.backends] == ["worker of A", "worker of B", None]
        assert str(restored) == str(plan) and "4,096 on A" in str(plan)


def test_a_pickled_plan_knows_who_owns_a_resident(ctx):
    cpu, elsewhere = gs.DryBackend("CPU"), gs.DryBackend("elsewhere")
    gpu = dry_device("GPU", reads=[cpu])
    host = dry_device("host", reads=[elsewhere])
    with gs.Context() as on_cpu, gs.Context() as beside:
        table, w = on_cpu.tensor("f32", (64, 64), "table"), beside.tensor("f32", (64, 64), "w")
        cpu.alloc_tensors(on_cpu, "any")
        elsewhere.alloc_tensors(beside)
        product = ctx.mul_mat(w, ctx.mul_mat(table, ctx.tensor("f32", (64, 8), "x", input=True)))
        graph = gs.Graph(ctx.set_output(product))
        plan = gs.Scheduler([gpu, cpu, host]).plan(graph)
        again = pickle.loads(pickle.dumps(plan))
        for restored in (again, pickle.loads(pickle.dumps(again))):
            here, outside = (restored.graph.tensors[graph.id_of(t)].backend for t in (table, w))
            assert here is restored.backends[1]
            assert outside.name == "elsewhere" and outside not in restored.backends
            assert [restored.explain(t) for t in restored.graph.tensors] == [plan.explain(t) for t in graph.tensors]


def test_a_pickled_plan_with_a_written_table_on_a_backend_that_another_reads_is_sound(ctx):
    cpu = gs.DryBackend("CPU")
    gpu, npu = dry_device("GPU", reads=[cpu]), gs.DryBackend("NPU")
    cpu.concurrent_copies = npu.concurrent_copies = True
    with gs.Context() as on_cpu, gs.Context() as on_npu:
        table, w = on_cpu.tensor("f32", (64, 64), "table"), on_npu.tensor("f32", (64, 64), "w")
        cpu.alloc_tensors(on_cpu, "any")
        npu.alloc_tensors(on_npu)
        x = ctx.tensor("f32", (64, 64), "x", input=True)
        written = ctx.cpy(ctx.repeat(x, table), table)
        product = ctx.mul_mat(w, ctx.mul_mat(table, x))
        total = ctx.add(w, written)
        with gs.Scheduler([gpu, npu, cpu], copies=2) as scheduler:
            scheduler.set_tensor_backend(total, npu)
            plan = scheduler.plan(gs.Graph(ctx.set_output(total), ctx.set_output(product)))
        restored = pickle.loads(pickle.dumps(plan))
        restored.verify()
        assert same(plan, restored)


def test_a_pickle_of_an_earlier_release_is_read(ctx):
    """It has only the answers of the backends that compute a node, and nothing of work memory and workers."""
    graph = gs.Graph(ctx.set_output(ctx.sqr(ctx.tensor("f32", 4, "x", input=True))))
    plan = gs.Scheduler([dry_device("A", supports_op=lambda t: False), dry_device("B")]).plan(graph)
    make, (graph_dict, plan_dict) = plan.__reduce__()
    assert plan_dict["refused"] == [{1: None}, {}]
    for field in ("refused", "work_sizes", "host_work_sizes", "workers", "outside", "owners"):
        del plan_dict[field]
    restored = make(graph_dict, plan_dict)
    assert restored.backends[1].supports_op(restored.graph.nodes[0]) and same(plan, restored)


def test_backends_of_a_loaded_plan_may_be_any_iterable(tmp_path):
    backends, graph, _ = two_devices()
    plan = gs.Scheduler(backends).plan(graph)
    loaded = gs.load_plan(saved(plan, tmp_path), graph, (backend for backend in backends))
    assert same(plan, loaded) and loaded.backends == tuple(backends)


def test_what_is_no_graph_or_no_sequence_of_backends_is_named(tmp_path):
    backends, graph, _ = two_devices()
    path = saved(gs.Scheduler(backends).plan(graph), tmp_path)
    for wrong in (None, graph.nodes):
        with pytest.raises(TypeError, match="not a Graph: "):
            gs.load_plan(path, wrong, backends)
    with pytest.raises(TypeError, match=r"load_plan\(path, graph, \[backend\]\), not <DryBackend"):
        gs.load_plan(path, graph, backends[0])
    with pytest.raises(TypeError, match=r"not a Backend: 'GPU'; .* load_plan\(path, graph, \[backend\]\)"):
        gs.load_plan(path, graph, ["GPU"])
    for wrong in ("GPU", None, 3):
        with pytest.raises(TypeError, match=rf"\[backend\]\), not {wrong!r}$"):
            gs.load_plan(path, graph, wrong)
        with pytest.raises(TypeError, match=rf"Scheduler\(\[backend\]\), not {wrong!r}$"):
            gs.Scheduler(wrong)


@pytest.mark.parametrize("config", ["c1", "c4"])
def test_plans_of_real_graphs_come_back_the_same(config, tmp_path):
    for path in sample_paths()[:4]:
        plan = sample_plan(path, config, "default")
        loaded = gs.load_plan(saved(plan, tmp_path), plan.graph, plan.backends)
        assert same(plan, loaded)
        for t in plan.graph.tensors:
            assert plan.offset_of(t) == loaded.offset_of(t) and plan.backend_of(t) is loaded.backend_of(t)


def test_plans_in_chunks_and_rings_come_back_the_same(tmp_path):
    backends = [gs.DryBackend(name, max_buffer_size=256) for name in "abc"]
    chain = Chain(backends)
    scheduler = gs.Scheduler(backends, copies=3)
    chain.pin(scheduler)
    plan = scheduler.plan(chain.graph)
    assert any(len(sizes) > 1 for sizes in plan.chunk_sizes) and plan.data.slot_copies
    assert same(plan, gs.load_plan(saved(plan, tmp_path), chain.graph, backends))
    assert same(plan, pickle.loads(pickle.dumps(plan)))


def test_a_plan_that_reuses_a_view_in_place_comes_back_the_same(tmp_path):
    ctx, backends = gs.Context(), [gs.DryBackend("A")]
    large = ctx.repeat(ctx.tensor("f32", (64, 1), "x", input=True), ctx.tensor("f32", (64, 16), "like"))
    part = ctx.set_name(ctx.relu(ctx.view_2d(large, 64, 4, large.nb[1], 5 * large.nb[1])), "part")
    graph = gs.Graph(ctx.set_output(part))
    plan = gs.Scheduler(backends).plan(graph)
    i = graph.id_of(part)
    assert plan.data.is_inplace(i) and plan_values(plan.data)["view_offs"][i] == 5 * 256
    assert same(plan, gs.load_plan(saved(plan, tmp_path), graph, backends))
    data = json.loads(json.dumps(plan_to_dict(plan)))
    data["plan"]["view_offs"][i] = 0
    with pytest.raises(gs.FileFormatError, match="'part' has view_offs 0, the graph 1280"):
        plan_from_dict(data, graph, backends)


def test_files_and_pickles_say_what_assigned_tensors(tmp_path):
    backends, graph, _ = two_devices()
    with gs.Scheduler(backends) as scheduler:
        scheduler.set_tensor_backend(graph.nodes[0], backends[1])
        plan = replace(scheduler.plan(graph), assigned_by="llama.cpp")
    text = plan.explain(graph.nodes[0])
    assert "because llama.cpp assigned it" in text
    assert gs.load_plan(saved(plan, tmp_path), graph, backends).explain(graph.nodes[0]) == text
    pickled = pickle.loads(pickle.dumps(plan))
    assert pickled.explain(pickled.graph.nodes[0]) == text
    data = plan_to_dict(plan)
    del data["assigned_by"]  # as in files of earlier releases
    assert plan_from_dict(data, graph, backends).assigned_by is None
    with pytest.raises(gs.FileFormatError, match="assigned_by is not a text"):
        plan_from_dict({**data, "assigned_by": 3}, graph, backends)


def test_programs_and_plan_data_are_values():
    backends, graph, _ = two_devices()
    plan = gs.Scheduler(backends).plan(graph)
    again = pickle.loads(pickle.dumps(plan.program))
    assert again == plan.program and hash(again) == hash(plan.program) and isinstance(again, Program)
    assert json.loads(json.dumps(program_values(again))) == program_values(plan.program)
    assert plan_values(pickle.loads(pickle.dumps(plan.data))) == plan_values(plan.data)
    with pytest.raises(AttributeError, match="cannot assign to field .steps"):
        again.steps = ()
    assert gs.Scheduler(backends).plan(graph).program == plan.program


def test_a_loaded_plan_computes(tmp_path):
    """Made by one scheduler, used by another one that never plans."""
    a, b = gs.CpuBackend(1, "a"), gs.CpuBackend(1, "b")
    w = weights_on(b, w=np.arange(16, dtype=np.float32).reshape(4, 4))["w"]

    def build():
        ctx = gs.Context()
        x = ctx.tensor("f32", (4, 2), "x", input=True)
        hidden = ctx.set_name(ctx.sqr(x), "hidden")
        return x, hidden, gs.Graph(ctx.set_output(ctx.mul_mat(w, hidden)))

    x, hidden, graph = build()
    with gs.Scheduler([a, b]) as scheduler:
        scheduler.set_tensor_backend(hidden, a)
        path = saved(scheduler.plan(graph), tmp_path)
    x, hidden, graph = build()
    plan = gs.load_plan(path, graph, [a, b])
    assert plan.backend_of(hidden) is a
    with gs.Scheduler([a, b]) as scheduler:
        assert scheduler.plan(graph).backend_of(hidden) is not a
        scheduler.adopt(plan)
        assert scheduler.alloc(graph).backend_of(hidden) is a
        x.set(np.full((2, 4), 3.0))
        scheduler.compute(graph)
        assert np.array_equal(graph.nodes[-1].numpy(), np.full((2, 4), 9.0) @ np.arange(16).reshape(4, 4).T)
        scheduler.reset()
        assert scheduler.alloc(graph).backend_of(hidden) is not a


def test_an_adopted_plan_is_used_though_the_graph_was_allocated_before(ctx):
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", 8, "x", input=True)))
    (node,) = graph.nodes
    with gs.Scheduler([a, b]) as wished:
        wished.set_tensor_backend(node, a)
        plan = wished.plan(graph)
    with gs.Scheduler([a, b]) as scheduler:
        assert scheduler.alloc(graph).backend_of(node) is b
        scheduler.adopt(plan)
        assert scheduler.alloc(graph).backend_of(node) is a and node.backend is a


def test_an_adopted_plan_that_exceeds_a_budget_is_refused():
    backend, ctx = gs.DryBackend("A"), gs.Context()
    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", 8, "x", input=True)))
    with gs.Scheduler([backend]) as generous, gs.Scheduler([backend], budgets={backend: 16}) as scheduler:
        scheduler.adopt(generous.plan(graph))
        for act in (scheduler.plan, scheduler.alloc):
            with pytest.raises(gs.OutOfMemory, match="the arena needs .*16 are available"):
                act(graph)


def test_what_is_adopted_fits_the_scheduler():
    backends, graph, _ = two_devices()
    plan = gs.Scheduler(backends).plan(graph)
    with pytest.raises(gs.PlacementError, match="other backends"):
        gs.Scheduler(backends[:1]).adopt(plan)
    with pytest.raises(gs.PlacementError, match="policy 'default'"):
        gs.Scheduler(backends, policy="seed").adopt(plan)
    unsound = gs.Scheduler(backends).plan(graph)
    unsound.data._program = Program(unsound.program.steps[:-1], unsound.program.inputs, 1)
    with pytest.raises(gs.HazardError, match="not-run"):
        gs.Scheduler(backends).adopt(unsound)
    for wrong in ("plan.json", None, {}):
        with pytest.raises(TypeError, match="not a Plan, as gs.load_plan.* returns: "):
            gs.Scheduler(backends).adopt(wrong)


def test_a_plan_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    backend = device(gs.DryBackend, "failing", fails={"alloc_size"})
    ctx, path = gs.Context(), tmp_path / "plan.json"
    graph = gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "x", input=True)))
    plan = gs.Scheduler([backend]).plan(graph)
    plan.save(path)
    before = path.read_bytes()
    backend.fail_next("alloc_size", RuntimeError("not today"))
    with pytest.raises(RuntimeError, match="not today"):
        plan.save(path)
    assert not backend.errors
    with pytest.raises(OSError, match="nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["plan.json"]


# -- refusals ----------------------------------------------------------------------------------------


def refused(path, graph, backends, error, match):
    with pytest.raises(error, match=match):
        gs.load_plan(path, graph, backends)


def test_another_graph_is_refused(ctx, tmp_path):
    backends, graph, _ = two_devices()
    path = saved(gs.Scheduler(backends).plan(graph), tmp_path)
    refused(path, gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "x"))), backends, gs.GraphError, "made for graph [0-9a-f]{32}")


def test_other_backends_are_refused_with_the_reason(tmp_path):
    backends, graph, _ = two_devices()
    path = saved(gs.Scheduler(backends).plan(graph), tmp_path)
    a, b = backends
    refused(path, graph, [a], gs.PlacementError, "made for 2 backends \\(A, B\\), not for 1")
    refused(path, graph, [b, a], gs.PlacementError, "backend 0, 'B', has name 'B'; the plan was made for 'A'")
    for options, match in [({"alignment": 64}, "alignment 64"),
                           ({"max_buffer_size": 1 << 20}, "max_buffer_size 1048576"),
                           ({"inplace": lambda op: 0}, "inplace .*'MUL_MAT': 0"), ({"reads": "B"}, r"reads \[0, 1\]")]:
        refused(path, graph, [dry_device("A", **options), b], gs.PlacementError, match)
    other = gs.DryBackend("A")
    other.concurrent_copies = True
    refused(path, graph, [other, b], gs.PlacementError, "concurrent_copies True")


def test_other_answers_are_refused_with_the_tensor(ctx, tmp_path):
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    graph = gs.Graph(ctx.set_name(ctx.sqr(ctx.tensor("f32", 4, "x")), "square"))
    path = saved(gs.Scheduler([a, b], policy="seed").plan(graph), tmp_path)
    refused(path, graph, [dry_device("A", supports_op=lambda t: t.op != "SQR"), b], gs.PlacementError,
            "'square' is not supported")
    refused(path, graph, [dry_device("A", alloc_size=lambda t: t.nbytes + 32), b], gs.PlacementError, "takes 48 bytes")


def test_residents_elsewhere_are_refused_with_the_tensor(tmp_path):
    a, b = gs.DryBackend("A"), gs.DryBackend("B")

    def build(home, usage="weights"):
        ctx, weights = gs.Context(), gs.Context()
        w = weights.tensor("f32", (4, 4), "w")
        if home is not None:
            home.alloc_tensors(weights, usage)
        return gs.Graph(ctx.mul_mat(w, ctx.tensor("f32", 4, "x", input=True))), weights

    graph, keep = build(a)
    path = saved(gs.Scheduler([a, b]).plan(graph), tmp_path)
    for home, usage, match in ((b, "weights", r"'w' has memory .*backends \[1\] read.*backends \[0\] read"),
                               (a, "any", "usage 'any'"), (None, "", "'w' has memory of no buffer")):
        other, keep = build(home, usage)
        refused(path, other, [a, b], gs.PlacementError, match)
    assert keep


@pytest.mark.parametrize("kept", [7, ["any"], ["any", [0], 1], "x", {"usage": "any"}])
def test_a_file_whose_residents_have_no_memory_is_refused_with_what_it_says(kept, tmp_path):
    backends, graph, _ = two_devices()
    plan = gs.Scheduler(backends).plan(graph)
    data = json.loads(json.dumps(plan_to_dict(plan)))
    first = next(iter(data["residents"]))
    data["residents"][first] = kept
    with pytest.raises(gs.PlacementError) as refusal:
        plan_from_dict(data, graph, backends)
    assert str(refusal.value).endswith(f"the plan was made for it {kept!r}")


def test_a_resident_that_another_backend_owns_is_refused_where_all_backends_read_both(tmp_path):
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    outside = gs.DryBackend("C")
    for backend in (a, b):
        backend.supports_buffer = lambda buffer: True

    def build(home):
        ctx, weights = gs.Context(), gs.Context()
        w = weights.tensor("f32", (4, 4), "w")
        home.alloc_tensors(weights)
        return gs.Graph(ctx.mul_mat(w, ctx.tensor("f32", 4, "x", input=True))), weights

    graph, keep = build(b)
    path = saved(gs.Scheduler([a, b]).plan(graph), tmp_path)
    other, kept = build(a)
    refused(path, other, [a, b], gs.PlacementError, "'w' belongs to backend 0, 'A'; .* in memory of backend 1, 'B'")
    other, kept = build(outside)
    refused(path, other, [a, b], gs.PlacementError, "'w' belongs to a backend outside the plan; .* backend 1, 'B'")
    data = json.loads(path.read_text())
    for wrong, error in (([], gs.FileFormatError), ({}, gs.FileFormatError), ({"0": 7}, gs.PlacementError),
                         ({"0": None}, gs.PlacementError)):
        with pytest.raises(error, match="no owners of 1 residents|in memory of backend (7|None)$"):
            plan_from_dict({**data, "owners": wrong}, graph, [a, b])
    del data["owners"]  # as in files of earlier releases
    assert plan_from_dict(data, graph, [a, b]).buffer_sizes
    assert keep and kept


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": "ggml-sched plan"}', "[" * 5000,
                                  '{"format": "ggml-sched plan", "version": 1, "policy": "default"}'])
def test_a_file_that_holds_no_plan_is_refused(text, tmp_path):
    backends, graph, _ = two_devices()
    path = tmp_path / "plan.json"
    path.write_text(text)
    refused(path, graph, backends, gs.Error, "plan.json")


def mutate(value, rng):
    """A JSON value with one change."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], rng)}
    if isinstance(value, list) and value:
        k = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.08:
            return value[:k] + value[k + 1 :]
        if kind < 0.16:
            return value[: k + 1] + value[k:]
        return value[:k] + [mutate(value[k], rng)] + value[k + 1 :]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.8:
        return rng.choice([value + 1, value - 1, -value, 0, -1, 1 << 31, 1 << 40, 1 << 63, value + 32])
    return rng.choice([None, "x", 1.5, [], {}, True, -1])


@pytest.mark.parametrize("block", range(4))
def test_a_mutated_file_is_refused_or_says_the_same(block):
    """No crash, no other exception; what is accepted is a sound plan."""
    accepted = 0
    for seed in range(block * 80, block * 80 + 80):
        rng = random.Random(seed)
        graph, backends, assigned = random_case(random.Random(rng.randrange(40)))
        plan = plan_of((graph, backends, assigned), "default")
        data = json.loads(json.dumps(plan_to_dict(plan)))
        for _ in range(rng.randint(1, 2)):
            field = "plan" if rng.random() < 0.8 else rng.choice(sorted(data))
            data[field] = mutate(data[field], rng)
        try:
            plan_from_dict(data, graph, backends).verify()
            accepted += 1
        except gs.Error:
            pass
    assert accepted < 80


CLAIMS = {
    "another kind of file": ({"format": "ggml-sched graph"}, gs.FileFormatError, "not a plan"),
    "another version": ({"version": 4}, gs.FileFormatError, "version 4 of the format, this is 3"),
    "no policy": ({"policy": None}, gs.FileFormatError, "no policy"),
    "a policy that is no text": ({"policy": "\ud800"}, gs.FileFormatError, r"policy .* has the lone surrogate U\+D800"),
    "an assigner that is no text": ({"assigned_by": "\udfff"}, gs.FileFormatError, r"assigned_by .* surrogate U\+DFFF"),
    "an order of words": ({"order": ["x"]}, gs.FileFormatError, "no order of 6 nodes"),
    "an order of strangers": ({"order": [6]}, gs.FileFormatError, "no order of 6 nodes"),
    "an order from the end": ({"order": [-1]}, gs.FileFormatError, "no order of 6 nodes"),
    "no list of positions": ({"order": 5}, gs.FileFormatError, "no order of 6 nodes"),
    "an order that sources forbid": ({"order": [5, 4, 3, 2, 1, 0]}, gs.FileFormatError, "plan: .*a wrong order"),
    "no backends": ({"backends": None}, gs.FileFormatError, "no list of backends"),
    "names for backends": ({"backends": ["A", "B"]}, gs.FileFormatError, "no list of backends"),
    "no residents": ({"residents": []}, gs.FileFormatError, "no residents"),
    "residents of no number": ({"residents": {"w": ["weights", [0]]}}, gs.PlacementError, "'w[12]' has memory|'w' has"),
    "residents that are not there": ({"residents": {"0": ["weights", [1]], "1": ["weights", [0]], "99": 5}},
                                     gs.PlacementError, "tensor '99' has memory of no buffer"),
    "residents of a word": ({"residents": {"0": ["weights", [1]], "1": ["weights", [0]], "word": 5}},
                            gs.PlacementError, "tensor 'word' has memory of no buffer"),
    "residents of endless digits": ({"residents": {"0": ["weights", [1]], "1": ["weights", [0]], "9" * 5000: 5}},
                                    gs.PlacementError, "tensor '9999"),
    "no plan": ({"plan": None}, gs.FileFormatError, "plan: "),
    "fewer answers": ({"needs": []}, gs.PlacementError, "there are 11 ids"),
    "no program": ({"program": None}, gs.FileFormatError, "the program is not the one"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_wrong_claim_is_refused_with_the_reason(claim):
    backends, graph, _ = two_devices()
    change, error, match = CLAIMS[claim]
    data = {**json.loads(json.dumps(plan_to_dict(gs.Scheduler(backends, policy="seed").plan(graph)))), **change}
    with pytest.raises(error, match=match):
        plan_from_dict(data, graph, backends)


def chain_plan() -> tuple[gs.Graph, list, dict]:
    """x -> h -> y -> z in one arena, where z lives in the memory of h; and what a file of the plan holds."""
    backend, ctx = gs.CpuBackend(1), gs.Context()
    x = ctx.tensor("f32", (4, 4), "x", input=True)
    h = ctx.set_name(ctx.mul_mat(x, x), "h")
    z = ctx.set_name(ctx.mul_mat(ctx.mul_mat(x, h), x), "z")
    graph = gs.Graph(ctx.set_output(z))
    plan = gs.Scheduler([backend]).plan(graph)
    assert plan.data.is_overwritten(graph.id_of(h))
    return graph, [backend], json.loads(json.dumps(plan_to_dict(plan)))


@pytest.mark.parametrize("field, value", [("rest", 0), ("rest", 1 << 40), ("root", 0), ("size", 0), ("size", 128),
                                          ("op", 0), ("view_offs", 4)])
def test_memory_that_the_graph_contradicts_is_refused(field, value):
    """Whether a result may still be read follows from these numbers."""
    graph, backends, data = chain_plan()
    data["plan"][field][next(i for i, t in enumerate(graph.tensors) if t.name == "h")] = value
    with pytest.raises(gs.Error, match="plan: (id|'h' has)|wrong-overwritten: "):
        plan_from_dict(data, graph, backends).verify()


def test_a_birth_after_the_first_use_is_refused():
    """The memory of x serves z later; if x were born after z, z would have been overwritten."""
    backend, ctx = gs.CpuBackend(1), gs.Context()
    x = ctx.tensor("f32", 8, "x", input=True)
    z = ctx.set_output(ctx.norm(ctx.set_output(ctx.clamp(x, 0, 1)), 1e-5))
    graph = gs.Graph(z)
    plan = gs.Scheduler([backend]).plan(graph)
    assert plan.offset_of(z) == plan.offset_of(x)
    data = json.loads(json.dumps(plan_to_dict(plan)))
    data["plan"]["birth"][graph.id_of(x)] = 2
    with pytest.raises(gs.HazardError, match="wrong-overwritten: "):
        plan_from_dict(data, graph, [backend]).verify()


def test_a_tensor_without_one_of_its_sources_is_refused():
    graph, backends, data = chain_plan()
    del data["plan"]["src"][graph.id_of(graph.nodes[-1])][1]
    with pytest.raises(gs.FileFormatError, match="'z' has sources 1, the graph 2"):
        plan_from_dict(data, graph, backends)


def test_the_plan_of_a_smaller_graph_is_refused():
    """Sound in itself, and not of this graph or of these backends."""
    backends, graph, _ = two_devices()
    data = json.loads(json.dumps(plan_to_dict(gs.Scheduler(backends).plan(graph))))
    ctx, more = gs.Context(), [*backends, gs.DryBackend("C")]
    small = gs.Graph(ctx.sqr(ctx.tensor("f32", 4, "x")))
    for other in (gs.Scheduler(backends).plan(small), gs.Scheduler(more).plan(graph)):
        with pytest.raises(gs.FileFormatError, match="tensors over [23] backends, not 9 over 2"):
            plan_from_dict({**data, "plan": json.loads(json.dumps(plan_to_dict(other)))["plan"]}, graph, backends)


def test_a_file_without_end_is_refused(tmp_path, monkeypatch):
    backends, graph, _ = two_devices()
    path = saved(gs.Scheduler(backends).plan(graph), tmp_path)
    monkeypatch.setattr("ggml_sched.planning.planfile.MAX_FILE_BYTES", 1000)
    refused(path, graph, backends, gs.FileFormatError, "more than 1000 bytes")


# -- adopted plans ---------------------------------------------------------------------------------------------------


def sums(n):
    """Seven nodes over vectors of n elements: (input, output, graph)."""
    ctx = gs.Context()
    x = ctx.tensor("f32", n, "x", input=True)
    a, b, c = (ctx.scale(x, factor) for factor in (2.0, 3.0, 5.0))
    out = ctx.set_output(ctx.add(ctx.add(ctx.add(ctx.add(a, b), c), a), b))
    return x, out, gs.Graph(out)


def test_lifetimes_of_a_plan_file_that_are_lies_give_no_smaller_graph_a_plan(tmp_path):
    _, _, large = sums(1024)
    with gs.CpuBackend(1) as cpu, gs.Scheduler([cpu]) as scheduler:
        path = saved(scheduler.plan(large), tmp_path)
        lies = json.loads(path.read_text())
        lies["plan"]["death"] = [*lies["plan"]["birth"]]
        path.write_text(json.dumps(lies))
        scheduler.adopt(gs.load_plan(path, large, [cpu]))
        scheduler.reserve(large)
        x, out, small = sums(700)
        scheduler.alloc(small).verify()
        x.set(np.ones(700, np.float32))
        scheduler.compute(small)
        assert np.all(out.numpy() == 15)


def test_an_adopted_plan_stays_when_backends_change_answers_and_assignments_their_order():
    backends = device(gs.CpuBackend, "A"), device(gs.CpuBackend, "B")
    ctx = gs.Context()
    x = ctx.tensor("f32", 64, "x", input=True)
    y = ctx.scale(x, 2.0)
    z = ctx.set_output(ctx.scale(y, 3.0))
    graph = gs.Graph(z)
    with gs.Scheduler(backends) as other, gs.Scheduler(backends) as scheduler:
        for node, backend in ((y, backends[1]), (z, backends[0])):
            other.set_tensor_backend(node, backend)
        for node, backend in ((x, backends[0]), (y, backends[1])):
            scheduler.set_tensor_backend(node, backend)
        plan = other.plan(graph)
        assert scheduler.plan(graph).backend_of(z) is backends[1]
        scheduler.adopt(plan)
        backends[0].answers_version += 1
        assert scheduler.plan(graph).backend_of(z) is backends[0]
        scheduler.set_tensor_backend(x, None)
        scheduler.set_tensor_backend(x, backends[0])
        assert scheduler.plan(graph).backend_of(z) is backends[0]


def test_an_adopted_plan_that_a_backend_does_not_support_any_more_is_refused():
    supported = [True]
    backend = device(gs.CpuBackend, "A", answers={"supports_op": lambda inherited, node: supported[0]})
    with backend, gs.CpuBackend(1, name="B") as host, gs.Scheduler([backend, host]) as scheduler:
        _, _, graph = sums(16)
        for node in graph.nodes:
            scheduler.set_tensor_backend(node, backend)
        scheduler.adopt(scheduler.plan(graph))
        supported[0] = False
        backend.answers_version += 1
        with pytest.raises(gs.HazardError):
            scheduler.plan(graph)
