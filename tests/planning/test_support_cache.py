"""The support cache queries a backend once per kind of node, and again when its answers_version changes."""

import numpy as np
import pytest
from configs import sample_paths
from devices import device, resident_tensor
from hypothesis import given
from random_graphs import Built, quick, recipes

import ggml_sched as gs
from ggml_sched._core import Devices, Policy, Request, make_plan

METHODS = ("supports_op", "offload_op", "alloc_size")
VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")


def asked(name="A", base=gs.DryBackend, **answers):
    """A backend that records support queries; `answers` are functions by method."""
    return device(base, name, records=METHODS, answers={
        method: lambda inherited, tensor, answer=answer: answer(tensor) for method, answer in answers.items()})


def take(backend, method="supports_op"):
    """The tensors of the recorded queries by a method, which are then forgotten."""
    taken = [call.args[0] for call in backend.calls if call.method == method]
    backend.calls = [call for call in backend.calls if call.method != method]
    return taken


def plan(devices, graph):
    return make_plan(Request(graph, devices, None), Policy())


def layers(n, scale=2.0, size=8, name="", output=False):
    """Layers of three nodes, the same in all of them but for names and flags."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (size, 2), "x")
    for k in range(n):
        y = ctx.set_name(ctx.relu(x), f"{name}{k}")
        if output:
            ctx.set_output(y)
        x = ctx.add(ctx.scale(ctx.reshape(y, size, 2), scale), y)
    return gs.Graph(x)


def key(t):
    """The fields of a node that a backend's answer may depend on, written independently of the core."""
    words = () if t.op in VIEWS else t.op_params
    sources = tuple((k, s.type, s.ne, s.nb) for k, s in enumerate(t.src) if s is not None)
    return t.op, words, t.type, t.ne, t.nb, sources


# -- once for each kind ------------------------------------------------------------------------


def test_nodes_of_one_kind_are_asked_about_once():
    backend = asked()
    devices, graph = Devices((backend,)), layers(5)
    plan(devices, graph)
    assert [t.op for t in take(backend)] == ["UNARY:RELU", "SCALE", "ADD"]
    assert [t.op for t in take(backend, "offload_op")] == ["UNARY:RELU", "SCALE", "ADD"]
    assert [t.op for t in take(backend, "alloc_size")] == ["NONE", "UNARY:RELU", "RESHAPE", "SCALE", "ADD"]
    for again in (graph, layers(5), layers(9, name="other", output=True)):
        plan(devices, again)
        assert all(take(backend, method) == [] for method in METHODS)
    plan(devices, layers(2, scale=3.0))
    assert [t.op for t in take(backend)] == ["SCALE"]
    plan(devices, layers(2, size=4))
    assert len(take(backend)) == 3
    plan(Devices((backend,)), graph)
    assert len(take(backend)) == 3             # another cache shares nothing with it


def test_a_backend_expects_the_nodes_that_it_is_then_asked_about():
    """One whose answers take a message asks about all of them at once."""
    class Far(gs.DryBackend):
        expected, asked = (), ()

        def expect_queries(self, nodes):
            self.expected = *self.expected, [t.op for t in nodes]

        def supports_op(self, node):
            self.asked = *self.asked, node.op
            return True

    backend = Far("A")
    devices, graph = Devices((backend,)), layers(5)
    plan(devices, graph)
    assert backend.expected == (["UNARY:RELU", "SCALE", "ADD"],) and backend.asked == ("UNARY:RELU", "SCALE", "ADD")
    plan(devices, graph)
    plan(devices, layers(2, scale=3.0))     # a single query is not announced
    assert len(backend.expected) == 1 and backend.asked[3:] == ("SCALE",)


def test_a_backend_expects_a_graph_with_the_tensors_that_it_has_not_been_asked_about():
    class Far(gs.DryBackend):
        expected = ()

        def expect_graph(self, graph, nodes):
            self.expected = *self.expected, (graph, [t.op for t in nodes])

        def supports_op(self, node):
            return True

    backend, changing = Far("A"), Far("B")
    changing.answers_version = None         # its answers depend on more than the kind of a node
    devices, first, second = Devices((backend, changing)), layers(5), layers(2, scale=3.0)
    devices.expect(first)
    assert backend.expected == ((first, ["UNARY:RELU", "SCALE", "ADD"]),) and changing.expected == ()
    plan(devices, first)
    devices.expect(second)
    assert backend.expected[1:] == ((second, ["SCALE"]),)
    plan(devices, second)
    backend.answers_version += 1
    devices.expect(first)
    assert [ops for _, ops in backend.expected[2:]] == [["UNARY:RELU", "SCALE", "ADD"]]
    Devices((gs.DryBackend("C"),)).expect(first)


def test_every_backend_is_asked_itself():
    backends = asked("A"), asked("B", supports_op=lambda node: node.op != "SCALE"), gs.DryBackend("C")
    graph = layers(3)
    for _ in range(2):
        plan(Devices(backends), graph)
        assert [len(take(backend)) for backend in backends[:2]] == [3, 3]


SAYS = {
    "supports_op": (lambda node: node.op != "SCALE", "GPU", ["CPU", "GPU"], 0),
    "offload_op": (lambda node: node.op == "MUL", "CPU", ["GPU", "GPU"], 0),
    "alloc_size": (lambda tensor: tensor.nbytes + 512 * (tensor.op == "SCALE"), "GPU", ["GPU", "GPU"], 768),
}
"""The GPU's answers, the backend of the weights, the expected backends of SCALE and MUL, its arena's least bytes."""


@pytest.mark.parametrize("version", [0, None])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_said_of_a_kind_holds_for_all_its_nodes(method, version):
    says, where, expected, least = SAYS[method]
    gpu, cpu = asked("GPU", **{method: says}), asked("CPU")
    gpu.answers_version = version
    ctx, w = gs.Context(), resident_tensor(gpu if where == "GPU" else cpu, 64)
    x = ctx.tensor("f32", 64, "x")
    for _ in range(4):
        x = ctx.mul(ctx.scale(x, 2.0), w)
    with gs.Scheduler([gpu, cpu], plan_cache=0) as scheduler:
        for graph in (gs.Graph(x), gs.Graph(ctx.sqr(x))) * 2:
            made = scheduler.plan(graph)
            assert [made.backend_of(t).name for t in graph.nodes[:8]] == expected * 4
            assert made.buffer_sizes[0] >= least


@pytest.mark.parametrize("path", sample_paths()[:4], ids=lambda path: path.stem)
def test_a_model_has_few_kinds(path):
    backend = asked()
    graph = gs.load_graph(path, place=lambda t: backend)
    plan(Devices((backend,)), graph)
    assert len(take(backend)) < 40 < len(graph)


# -- kinds of nodes ----------------------------------------------------------------------------


@quick(150)
@given(recipes())
def test_kinds_are_what_backends_may_look_at(recipe):
    graph = Built(recipe).graph
    kinds = graph.kinds()
    assert len(kinds) == len(graph.tensors)
    seen = {}
    for kind, t in zip(kinds, graph.tensors, strict=True):
        assert seen.setdefault(kind, (key(t), graph.kind_of(t))) == (key(t), graph.kind_of(t))
    assert len({k for k, _ in seen.values()}) == len({w for _, w in seen.values()}) == len(seen)


def test_kinds_of_different_graphs_are_told_apart_as_those_of_one():
    backend, known = asked(), set()
    devices = Devices((backend,))

    @quick(100)
    @given(recipes())
    def run(recipe):
        graph = Built(recipe).graph
        plan(devices, graph)
        met = {key(t) for t in graph.tensors}
        assert {key(t) for t in take(backend, "alloc_size")} == met - known
        known.update(met)

    run()
    assert devices.n_cached == len(known) > 50


CHANGES = {
    "parameter": {"op_params": (2,)}, "shape": {"ne": (4, 1, 1, 1)}, "stride": {"nb": (4, 16, 16, 64)},
    "type": {"type": "i32"}, "op": {"op": "SQR"}, "slot": {"src": "ab gap"}, "fewer": {"src": "a"},
    "other layout": {"src": "ac"}, "other stride": {"src": "ad"}, "other type": {"src": "ae"},
    "parameters": {"op_params": (1, 2)}, "later parameter": {"op_params": (0, 1)},
}


def test_each_part_of_a_kind_counts(ctx):
    a, b = ctx.tensor("f32", (4, 2), "a"), ctx.tensor("f32", (4, 2), "b")
    c, e = ctx.tensor("f32", (4, 3), "c"), ctx.tensor("i32", (4, 2), "e")
    d = ctx.restore("NONE", "f32", (4, 2, 1, 1), (4, 32, 64, 64), name="d")
    sources = {"ab": (a, b), "ba": (b, a), "ab gap": (a, None, b), "a": (a,), "ac": (a, c), "ad": (a, d), "ae": (a, e)}

    # An op that may have any sources.
    def node(op="CUSTOM", type="f32", ne=(4, 2, 1, 1), nb=(4, 16, 32, 32), src="ab", op_params=(1,), **others):
        return ctx.restore(op, type, ne, nb, sources[src], op_params=op_params, **others)

    nodes = [node(), *[node(**change) for change in CHANGES.values()]]
    same = [node(name="named"), node(flags=("output",)), node(src="ba"), node(op_params=(1, 0, 0))]
    graph = gs.Graph(*nodes, *same)
    kinds = dict(zip(graph.tensors, graph.kinds(), strict=True))
    assert len({kinds[t] for t in nodes}) == len({graph.kind_of(t) for t in nodes}) == len(nodes), list(CHANGES)
    for other in (graph, gs.Graph(*same)):
        assert {other.kind_of(t) for t in same} == {graph.kind_of(nodes[0])}
    assert {kinds[t] for t in same} == {kinds[nodes[0]]}
    with pytest.raises(gs.GraphError, match="'stranger'"):
        graph.kind_of(ctx.tensor("f32", 4, "stranger"))


def test_kinds_that_meet_in_the_table_are_told_apart():
    """So many small graphs that hashes of some kinds collide: then only the comparison tells them apart."""
    for n in range(1, 400):
        ctx = gs.Context()
        a, b, c = (ctx.tensor("f32", n) for _ in range(3))
        sources = [(a,), (None, a), (a, b), (a, None, b), (None, a, b), (a, b, c), (a, b, None, c), (a, None, b, c)]
        nodes = [ctx.restore("CUSTOM", "f32", a.ne, a.nb, src, op_params=words)
                 for src in sources[:: 1 if n % 2 else -1] for words in ((), (1,), (1, 2))]
        graph = gs.Graph(*nodes)
        kinds = dict(zip(graph.tensors, graph.kinds(), strict=True))
        assert len({kinds[t] for t in nodes}) == len(nodes)


def test_empty_slots_at_the_end_are_none(ctx):
    a = ctx.tensor("f32", 4)
    assert ctx.restore("SQR", "f32", a.ne, a.nb, (a, None, None)).src == (a,)
    assert ctx.restore("CUSTOM", "f32", a.ne, a.nb, (None, a, None)).src == (None, a)


MASK = 2**64 - 1


def mix(h, x):
    """gs_mix of include/ggml_sched/hash.h."""
    h = (h ^ x) * 0x9E3779B97F4A7C15 & MASK
    return h ^ h >> 29


def strides_of_equal_hash():
    """Strides of two f32 tensors of one element whose hashes are the same."""
    def before_the_last(nb):
        h = mix(0x243F6A8885A308D3, 0)
        for extent, stride in zip((1, 1, 1), nb, strict=True):
            h = mix(mix(h, extent), stride)
        return mix(h, 1)

    first = (4, 4, 4)
    for k in range(5, 200):
        last = before_the_last(first) ^ before_the_last((4, 4, k))
        if last < 2**63:
            return (*first, 0), (4, 4, k, last)
    raise AssertionError("none found")


def colliding(ctx):
    """Two nodes whose kinds have one hash, their sources being told apart by strides only."""
    leafs = [ctx.restore("NONE", "f32", (1, 1, 1, 1), nb) for nb in strides_of_equal_hash()]
    return [ctx.sqr(leaf) for leaf in leafs]


def test_nodes_whose_hashes_collide_are_of_different_kinds(ctx):
    one, other = colliding(ctx)
    graph = gs.Graph(one, other)
    # The hashes collide, and so do the first halves of the fingerprints: therefore fingerprints have a second half.
    prints = gs.Graph(one).fingerprint, gs.Graph(other).fingerprint
    assert prints[0] >> 64 == prints[1] >> 64 and prints[0] != prints[1]
    kinds = dict(zip(graph.tensors, graph.kinds(), strict=True))
    assert kinds[one] != kinds[other] and kinds[one.src[0]] != kinds[other.src[0]]


@pytest.mark.parametrize("together", [False, True])
def test_answers_about_kinds_whose_hashes_collide_are_kept_apart(ctx, together):
    one, other = colliding(ctx)
    fussy, host = asked("fussy", supports_op=lambda node: node.src[0].nb[3] == 0), gs.DryBackend("host")
    with gs.Scheduler([fussy, host]) as scheduler:
        scheduler.set_tensor_backend(one.src[0], fussy)
        scheduler.set_tensor_backend(other.src[0], fussy)
        graphs = [gs.Graph(one, other)] * 2 if together else [gs.Graph(one), gs.Graph(other)]
        found = [scheduler.plan(graph).backend_of(t) for graph, t in zip(graphs, (one, other), strict=True)]
    assert found == [fussy, host]


# -- versions of answers ----------------------------------------------------------------------


def test_answers_of_another_version_are_asked_for_anew():
    """Plans made with answers of the earlier version are not used again."""
    refused = []
    a, b = asked("A", supports_op=lambda node: node.op not in refused), gs.DryBackend("B")
    graph = layers(2)
    with gs.Scheduler([a, b]) as scheduler:
        assert {scheduler.alloc(graph).backend_of(t) for t in graph.nodes} == {a}
        refused.append("SCALE")
        assert {scheduler.alloc(graph).backend_of(t) for t in graph.nodes} == {a}       # not said yet
        a.answers_version += 1
        for planned in (scheduler.plan(graph), scheduler.alloc(graph), scheduler.plan(layers(2))):
            assert [planned.backend_of(t).name for t in planned.graph.nodes if t.op != "RESHAPE"] == ["A", "B", "A"] * 2
        refused.clear()
        a.answers_version += 1
        assert {scheduler.alloc(graph).backend_of(t) for t in graph.nodes} == {a}


def test_a_version_that_is_as_it_was_changes_nothing():
    backend = asked()
    devices = Devices((backend,))
    backend.answers_version = 2**70
    plan(devices, layers(1))
    assert len(take(backend)) == 3
    epoch = devices.epoch()
    backend.answers_version = 2**69 * 2
    plan(devices, layers(1))
    assert take(backend) == [] and devices.epoch() == epoch


@pytest.mark.parametrize("kind", ["attribute of the class", "property"])
def test_a_version_may_be_declared_by_a_class(kind):
    class Declares(gs.DryBackend):
        now = 3
        answers_version = 3 if kind == "attribute of the class" else property(lambda self: self.now)

    backend = asked(base=Declares)
    devices = Devices((backend,))
    for _ in range(2):
        plan(devices, layers(1))
    assert len(take(backend)) == 3
    if kind == "property":
        backend.now += 1
    else:
        backend.answers_version += 1
    plan(devices, layers(1))
    assert len(take(backend)) == 3


@pytest.mark.parametrize("how", ["instance", "class"])
def test_without_a_version_every_node_is_asked_about_every_time(how):
    """Without a version, answers may depend on anything, such as names."""
    class Each(gs.DryBackend):
        if how == "class":
            answers_version = None

    each, other = asked("each", Each, supports_op=lambda node: node.name != "1"), asked("other")
    each.answers_version = None
    graph = layers(3)
    devices = Devices((each, other))
    for k in range(2):
        made = plan(devices, graph)
        assert len(take(each)) == len(take(each, "offload_op")) == 9
        assert len(take(other)) == (3 if k == 0 else 0)
        assert take(each, "alloc_size") == list(graph.tensors)
        assert [made.backend_index(graph.id_of(t)) for t in graph.nodes if t.op == "UNARY:RELU"][:2] == [0, 1]
    each.answers_version = 0
    if how == "instance":
        plan(devices, graph)
        assert len(take(each)) == 3


@pytest.mark.parametrize("version", [1.5, "1", (0,)])
def test_a_version_that_is_no_int(version):
    backend = asked("strange")
    with gs.Scheduler([backend]) as scheduler:
        backend.answers_version = version
        with pytest.raises(TypeError, match=r"'strange': answers_version"):
            scheduler.plan(layers(1))
        backend.answers_version = 1
        scheduler.plan(layers(1))
    backend.answers_version = version
    with pytest.raises(TypeError, match=r"'strange': answers_version"):
        gs.Scheduler([backend])


def test_answers_given_while_the_version_changes_are_not_remembered():
    def once(node):
        if node.op == "SCALE":
            backend.answers_version += 1
        return True

    backend = asked(supports_op=once)
    devices = Devices((backend,))
    plan(devices, layers(1))
    assert devices.n_cached == 0 and len(take(backend)) == 3
    backend.answers = {}
    plan(devices, layers(1))
    assert len(take(backend)) == 3 and devices.n_cached > 0


def test_a_reset_forgets_answers():
    backend = asked()
    with gs.Scheduler([backend]) as scheduler:
        scheduler.plan(layers(1))
        assert scheduler._planner.devices.n_cached > 0
        scheduler.reset()
        assert scheduler._planner.devices.n_cached == 0
        scheduler.plan(layers(1))


# -- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_a_backend_raises_reaches_the_caller_and_nothing_is_remembered(method):
    errors = [KeyError("flaky")]

    def sometimes(tensor):
        if tensor.op == "ADD" and errors:
            raise errors.pop()
        return {"supports_op": True, "offload_op": False, "alloc_size": tensor.nbytes}[method]

    calm, flaky = asked("calm"), asked("flaky", **{method: sometimes})
    devices, graph = Devices((calm, flaky)), layers(2)
    with pytest.raises(KeyError, match="flaky"):
        plan(devices, graph)
    assert devices.n_cached == 0 and len(take(calm)) == 3
    take(flaky, method)
    plan(devices, graph)
    assert len(take(calm)) == 3 and len(take(flaky, method)) == (5 if method == "alloc_size" else 3)


@pytest.mark.parametrize("version", [0, None])
def test_a_request_that_failed_knows_nothing_of_its_first_attempt(version):
    """Queries answered before the failure are repeated."""
    first = [True]

    def refuses_then_fails(node):
        if first and node.op == "ADD":
            first.clear()
            raise KeyError("flaky")
        return not first

    a, b = asked("A", supports_op=refuses_then_fails), gs.DryBackend("B")
    a.answers_version = version
    graph = layers(1)
    request = Request(graph, Devices((a, b)), None)
    with pytest.raises(KeyError, match="flaky"):
        make_plan(request, Policy())
    made = make_plan(request, Policy())
    assert {made.backend_index(graph.id_of(t)) for t in graph.nodes} == {0}


@pytest.mark.parametrize("size", [-1, 63, 2**63, 64.0, None])
def test_a_size_that_makes_no_sense_is_not_remembered(size):
    sizes = [size]
    backend = asked("strange", alloc_size=lambda tensor: sizes[0] if sizes else tensor.nbytes)
    devices = Devices((backend,))
    for _ in range(2):
        with pytest.raises((gs.PlacementError, TypeError), match="'strange'"):
            plan(devices, layers(1))
    sizes.clear()
    plan(devices, layers(1))


def test_the_memory_of_answers_is_bounded(ctx):
    """Evicted answers are queried again, and graphs of more kinds than are kept are planned right."""
    x = ctx.tensor("f32", 4)
    backend = asked("odd", supports_op=lambda node: node.op_params[0] % 2 == 1)
    devices = Devices((backend, gs.DryBackend("host")))

    def scales(start, n=1500):
        words = np.arange(start + 1, start + n + 1, dtype=np.int32).view(np.float32)
        nodes = [ctx.scale(x, word) for word in words]
        graph = gs.Graph(*nodes)
        made = plan(devices, graph)
        assert [made.backend_index(graph.id_of(t)) for t in nodes] == [1 - t.op_params[0] % 2 for t in nodes]
        assert 0 < devices.n_cached <= 4096
        return len(take(backend))

    assert [scales(1500 * k) for k in range(6)] == [1500] * 6
    assert scales(1500 * 5) < 1500 and scales(0) == 1500
    for _ in range(2):
        scales(0, n=5000)
