"""What our scheduler asks of devices, and does to them, on devices that watch it: each case in a process of its own.

    python hooked_device_cases.py CASE      CASE a function of this module
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
from hooked_fakes import Bench
from hooked_sched_cases import Weights, check_same, run_all
from hooked_schedulers import CALLBACK, I32, Ggml, Graph, hook, view

WIDTH, ROWS = 32, 24
ABORTED, FAILED = 1, -1
CPU = 0


def start() -> tuple[Ggml, Bench]:
    g = Ggml()
    return g, Bench(g)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape[::-1]).astype(np.float32)


def places(g: Ggml, backends: list[int], make, ours: bool = True, offload: bool = True, choose=None) -> list[int]:
    """The numbers of the backends that the nodes of a new graph are given, some chosen: {node: backend}."""
    scheduler = g.scheduler(backends, ours, offload=offload)
    graph = Graph(g)
    nodes = make(graph)
    graph.expand(nodes[-1])
    g.backend_sched_reset(scheduler)
    for node, backend in (choose or {}).items():
        g.backend_sched_set_tensor_backend(scheduler, nodes[node], backend)
    assert g.backend_sched_alloc_graph(scheduler, graph.graph)
    found = [backends.index(g.backend_sched_get_tensor_backend(scheduler, node)) for node in nodes]
    g.backend_sched_free(scheduler)
    graph.close()
    return found


def chain_of(weight: int, width: int = WIDTH):
    """What makes a product with a resident tensor, and something before and behind it."""
    def make(graph: Graph) -> list[int]:
        x = graph.tensor(width, ROWS, flags="i")
        scaled = graph.op("scale", x, 2.0)
        product = graph.op("mul_mat", weight, scaled)
        silu = graph.op("silu", product)
        return [scaled, product, silu, graph.op("soft_max", silu)]
    return make


# -- what devices are asked ----------------------------------------------------------------------------------------


def random_graphs() -> None:
    """Devices that work late, read no memory but their own and write behind every tensor: the bits of the CPU."""
    g, bench = start()
    want, _served = run_all(g, [bench.cpu], False, range(20), resident_on=[bench.cpu] * 3)
    for lazy, extra, parallel in ((False, 0, False), (True, 0, False), (True, 96, False), (True, 0, True)):
        one, two = (bench.device(name, lazy=lazy, extra=extra, events=parallel) for name in "AB")
        backends = [one.handle, two.handle, bench.cpu]
        check_same(want, run_all(g, backends, True, range(20), parallel)[0])
        bench.sound()


def one_device_asks_for_more() -> None:
    """Bytes behind a tensor are those of the device where it lies, copies and what others computed included."""
    g, bench = start()
    want, _served = run_all(g, [bench.cpu], False, range(20), resident_on=[bench.cpu] * 3)
    for extras in ((0, 96), (96, 0), (32, 160)):
        backends = [bench.device(name, extra=extra).handle for name, extra in zip("AB", extras, strict=True)]
        check_same(want, run_all(g, [*backends, bench.cpu], True, range(20), choose=True)[0])
        bench.sound()


def weights_draw_their_readers() -> None:
    """A node goes where its weights lie, not where anything else that has memory does."""
    g, bench = start()
    device = bench.device("A")
    backends = [device.handle, bench.cpu]
    for usage, want in ((1, [0, 0, 0, 0]), (0, [1, 0, 0, 0])):
        weights = Weights(g, device.handle, np.random.default_rng(1), usage)
        assert places(g, backends, chain_of(weights.square[0])) == want
        assert places(g, backends, chain_of(weights.square[0]), ours=False) == want
        weights.close()


def offloading() -> None:
    """Weights on the host are computed with by a device that wants to and can, if the client lets it."""
    g, bench = start()
    device = bench.device("A", offloads={"MUL_MAT"})
    backends = [device.handle, bench.cpu]
    for usage in (1, 0):
        weights = Weights(g, bench.cpu, np.random.default_rng(1), usage)
        for offload, refuses in ((True, set()), (False, set()), (True, {"MUL_MAT"})):
            device.refuses = refuses
            want = [0 if usage and offload and not refuses else 1] * 4
            for ours in (True, False):
                assert places(g, backends, chain_of(weights.square[0]), ours, offload) == want, (usage, offload, ours)
        weights.close()


def older_library() -> None:
    """One whose clients do not say whether to offload, so that all of them do; and which has no gated units."""
    g, bench = start()
    device = bench.device("A", offloads={"MUL_MAT"})
    weights = Weights(g, bench.cpu, np.random.default_rng(1))
    for offload in (False, True):
        assert places(g, [device.handle, bench.cpu], chain_of(weights.square[0]), offload=offload) == [0, 0, 0, 0]
    weights.close()
    want, _served = run_all(g, [bench.cpu], False, range(12), resident_on=[bench.cpu] * 2)
    got, served = run_all(g, [device.handle, bench.cpu], True, range(12))
    check_same(want, got)
    assert served["planned"] > 0 and hook().not_understood() is None
    # A word that is a number to some only: what is not known is still computed, and never in place.
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
    out = graph.op("swiglu_split", graph.op("scale", x, 2.0), y)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    values = [numbers(k, WIDTH, ROWS) for k in (1, 2)]
    graph.put(x, values[0])
    graph.put(y, values[1])
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    want = 2 * values[0] / (1 + np.exp(-2 * values[0])) * values[1]
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-5)
    assert [t["op"] for t in hook().last_scheduled()[0]["graph"]["tensors"]].count("CUSTOM") == 1
    g.backend_sched_free(s)


def schedulers_that_cannot_be() -> None:
    """No backends, or too many; a last one that is no CPU; one that does not read the buffers it is given."""
    g, bench = start()
    device, other = bench.device("A"), bench.device("B")
    hook().schedule(True)
    p = ctypes.c_void_p

    def make(*backends: int, bufts=None) -> int | None:
        return g.backend_sched_new((p * len(backends))(*backends), bufts and (p * len(bufts))(*bufts), len(backends),
                                   64, False, False)

    assert make() is None and make(*[bench.cpu] * 17) is None
    assert make(bench.cpu, device.handle) is None
    assert make(device.handle, bench.cpu, bufts=[other.buft, g.backend_get_default_buffer_type(bench.cpu)]) is None
    for found in (make(*[bench.cpu] * 16), make(device.handle, bench.cpu),
                  make(device.handle, bench.cpu, bufts=[device.buft, g.backend_get_default_buffer_type(bench.cpu)])):
        assert found
        g.backend_sched_free(found)


def library_without_a_function() -> None:
    """A library that lacks what we need has its own schedulers, and `check` says why."""
    from ggml_sched.llama_cpp import HookError, check

    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("scale", x, 2.0)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    graph.put(x, numbers(1, WIDTH, ROWS))
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH), numbers(1, WIDTH, ROWS) * 2)
    assert hook().last_scheduled() == [] and len(hook().last_planned()) == 1, "its allocator is ours all the same"
    g.backend_sched_free(s)
    try:
        check()
    except HookError as error:
        assert "ggml_backend_event_wait" in str(error)
    else:
        raise AssertionError("its schedulers are not ours")


def ops_that_are_refused() -> None:
    """They are computed by somebody who can, whoever was chosen."""
    g, bench = start()
    device = bench.device("A", refuses={"UNARY"})
    weights = Weights(g, device.handle, np.random.default_rng(1))
    backends = [device.handle, bench.cpu]
    assert places(g, backends, chain_of(weights.square[0])) == [0, 0, 1, 1]
    assert places(g, backends, chain_of(weights.square[0]), choose={2: device.handle}) == [0, 0, 1, 1]
    device.refuses = {"MUL_MAT"}
    assert places(g, backends, chain_of(weights.square[0])) == [1, 1, 1, 1]
    # Whoever reads it first has it, if it can.
    reader = bench.device("B", reads=[device], refuses={"MUL_MAT"})
    device.refuses = set()
    for ours in (True, False):
        assert places(g, [reader.handle, *backends], chain_of(weights.square[0]), ours) == [1, 1, 1, 1]
        reader.refuses = set()
        assert places(g, [reader.handle, *backends], chain_of(weights.square[0]), ours) == [0, 0, 0, 0]
        reader.refuses = {"MUL_MAT"}
    weights.close()


def choices_of_one_place() -> None:
    """Backends of one buffer type are one place to the client: the first of them that can computes what was chosen."""
    g, bench = start()
    device = bench.device("A")
    twin = bench.device("C", shares=device)
    backends = [device.handle, twin.handle, bench.cpu]
    weights = Weights(g, device.handle, np.random.default_rng(1))
    for chosen in (device, twin):
        assert places(g, backends, chain_of(weights.square[0]), choose={2: chosen.handle}) == [0, 0, 0, 0]
    device.refuses = {"UNARY"}
    assert places(g, backends, chain_of(weights.square[0]), choose={2: twin.handle}) == [0, 0, 1, 0]
    hosts = Weights(g, bench.cpu, np.random.default_rng(1))
    assert places(g, backends, chain_of(hosts.square[0])) == [2, 2, 2, 2]
    assert places(g, backends, chain_of(hosts.square[0]), choose={2: twin.handle}) == [2, 2, 1, 0]
    hosts.close()
    # Where types differ, a choice is a choice.
    device.refuses = set()
    other = bench.device("B")
    assert places(g, [device.handle, other.handle, bench.cpu], chain_of(weights.square[0]),
                  choose={1: other.handle, 3: bench.cpu}) == [1, 1, 1, 2]
    weights.close()


def many_choices() -> None:
    """More of them than there is room for at first, some told twice; those of before a reset are forgotten."""
    g, bench = start()
    backends = [bench.device("A").handle, bench.device("B").handle, bench.cpu]
    s = g.scheduler(backends, True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    nodes = [graph.op("scale", x, float(k)) for k in range(150)]
    for first in (0, 1):
        assert all(g.backend_sched_get_tensor_backend(s, node) is None for node in nodes)
        for k, node in enumerate(nodes):
            g.backend_sched_set_tensor_backend(s, node, backends[(k + first) % 3])
        for k, node in enumerate(nodes[:100]):
            g.backend_sched_set_tensor_backend(s, node, backends[(k + first + 1) % 3])
        found = [backends.index(g.backend_sched_get_tensor_backend(s, node)) for node in nodes]
        assert found == [(k + first + (k < 100)) % 3 for k in range(150)]
        g.backend_sched_reset(s)
    g.backend_sched_free(s)


def memory_that_others_read() -> None:
    """Who reads another's memory has no copy of it, and waits until that has computed what it reads."""
    g, bench = start()
    device = bench.device("A", lazy=True, events=True)
    reader = bench.device("B", reads=[device], lazy=True, events=True)
    stranger = bench.device("C", lazy=True, events=True)
    weights = Weights(g, device.handle, np.random.default_rng(1))
    values, copies = numbers(2, WIDTH, ROWS), {}
    for other in (reader, stranger):
        for parallel in (False, True):
            backends = [other.handle, device.handle, bench.cpu]
            s = g.scheduler(backends, True, parallel)
            graph = Graph(g)
            x = graph.tensor(WIDTH, ROWS, flags="i")
            product = graph.op("mul_mat", weights.square[0], x)
            out = graph.op("mul_mat", weights.square[1], graph.op("silu", product))
            back = graph.op("mul_mat", weights.square[2], out)
            graph.expand(back)
            for _ in range(4):
                g.backend_sched_reset(s)
                for node, where in ((product, device), (out, other), (back, device)):
                    g.backend_sched_set_tensor_backend(s, node, where.handle)
                assert g.backend_sched_alloc_graph(s, graph.graph)
                copies[other.name] = len(hook().last_scheduled()[0]["plan"]["copies"])
                graph.put(x, values)
                assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
            g.backend_sched_synchronize(s)
            bench.sound()
            w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]
            h = values @ w[0].T
            want = ((h / (1 + np.exp(-h))) @ w[1].T) @ w[2].T
            assert np.allclose(graph.get(back).reshape(want.shape), want, atol=1e-4)
            g.backend_sched_free(s)
            graph.close()
    assert copies == {"B": 2, "C": 4}, "what is not read: the input, and what comes back"
    weights.close()


def memory_that_two_share() -> None:
    """Backends of one type have one memory: what one is still at work in is not given to the other meanwhile."""
    g, bench = start()
    device = bench.device("A", refuses={"UNARY"}, lazy=True)
    twin = bench.device("C", shares=device, lazy=True)
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, twin.handle, bench.cpu], True)
    graph = Graph(g)
    x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
    one = graph.op("mul_mat", weights.square[1], graph.op("mul_mat", weights.square[0], x))
    first = graph.op("sum_rows", one)
    silu = graph.op("silu", y)
    out = graph.op("add", silu, first)
    g.build_forward_expand(graph.graph, first)
    graph.expand(out)
    for node, where in ((silu, twin.handle), (out, bench.cpu)):
        g.backend_sched_set_tensor_backend(s, node, where)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    assert [g.backend_sched_get_tensor_backend(s, t) for t in (one, silu)] == [device.handle, twin.handle]
    for k in range(3):
        values = [numbers(2 * k + i, WIDTH, ROWS) for i in range(2)]
        graph.put(x, values[0])
        graph.put(y, values[1])
        assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
    g.backend_sched_synchronize(s)
    bench.sound()
    w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]
    want = values[1] / (1 + np.exp(-values[1])) + (values[0] @ w[0].T @ w[1].T).sum(axis=1, keepdims=True)
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-3)
    g.backend_sched_free(s)
    weights.close()


def writes_that_others_read() -> None:
    """Nothing but the order of nodes tells that one reads what another has written to memory of the client's."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    reader = bench.device("B", reads=[device], lazy=True)
    store = Weights(g, device.handle, np.random.default_rng(1), 0)
    for first, second in ((device, reader), (reader, device)):
        for kind in (int, aside):
            for writer, other in ((device, reader), (reader, device)):
                s = g.scheduler([first.handle, second.handle, bench.cpu], True)
                graph = Graph(g)
                x, y = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
                scaled = graph.op("scale", x, 2.0)
                into, read = (kind(graph.op("view_2d", store.store, WIDTH, ROWS, WIDTH * 4, 0)) for _ in range(2))
                written = graph.op("cpy", scaled, into)
                out = graph.op("add", read, y)
                g.build_forward_expand(graph.graph, written)
                graph.expand(out)
                g.backend_sched_reset(s)
                for node, where in ((scaled, writer), (written, writer), (out, other)):
                    g.backend_sched_set_tensor_backend(s, node, where.handle)
                assert g.backend_sched_alloc_graph(s, graph.graph)
                for k in range(3):
                    graph.put(x, numbers(k, WIDTH, ROWS))
                    graph.put(y, numbers(k + 9, WIDTH, ROWS))
                    assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
                g.backend_sched_synchronize(s)
                bench.sound()
                assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH),
                                      numbers(2, WIDTH, ROWS) * 2 + numbers(11, WIDTH, ROWS))
                g.backend_sched_free(s)
                graph.close()
    store.close()


def memory_without_a_buffer() -> None:
    """It is the host's: nobody is asked whether he reads a buffer that there is not."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, g.cpu_backend(), bench.cpu], True)
    graph, values = Graph(g), numbers(4, WIDTH, ROWS)
    x = graph.tensor(WIDTH, ROWS)
    view(x).data = values.ctypes.data
    y = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("add", graph.op("scale", y, 3.0), x)
    graph.expand(out)
    assert g.backend_sched_alloc_graph(s, graph.graph)
    graph.put(y, values)
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    assert np.array_equal(graph.get(out).reshape(ROWS, WIDTH), values * 3 + values)
    assert view(x).data == values.ctypes.data
    g.backend_sched_free(s)


def too_large_for_a_buffer() -> None:
    """A tensor above the largest buffer has one of its own, which the device may refuse; others share theirs."""
    g, bench = start()
    size = WIDTH * ROWS * 4
    device = bench.device("A", max_size=size // 2)
    s = g.scheduler([device.handle, bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    out = graph.op("scale", graph.op("silu", x), 2.0)
    graph.expand(out)
    for node in graph.nodes():
        g.backend_sched_set_tensor_backend(s, node, device.handle)
    device.room = size - 1
    assert not g.backend_sched_alloc_graph(s, graph.graph)
    assert hook().last_error() == f"A refused compute buffers: {size} bytes are needed"
    device.room = 1 << 20
    assert g.backend_sched_alloc_graph(s, graph.graph)
    assert g.backend_sched_get_buffer_size(s, device.handle) >= size
    values = numbers(1, WIDTH, ROWS)
    graph.put(x, values)
    assert g.backend_sched_graph_compute(s, graph.graph) == 0
    bench.sound()
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), values / (1 + np.exp(-values)) * 2, atol=1e-5)
    g.backend_sched_free(s)


def too_many_types() -> None:
    """More buffer types than are told apart: an error, and everything works afterwards."""
    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    graph = Graph(g)
    total = graph.tensor(WIDTH, flags="i")
    owners = []
    for k in range(70):
        own = Graph(g)
        t = own.tensor(WIDTH)
        owners.append((own, g.backend_alloc_ctx_tensors(own.ctx, bench.device(f"D{k}", host=True).handle)))
        own.put(t, np.full(WIDTH, k, np.float32))
        total = graph.op("add", total, t)
        if k == 40:
            few = total
    graph.expand(total)
    assert not g.backend_sched_alloc_graph(s, graph.graph)
    assert "64" in hook().last_error() and "types of buffers" in hook().last_error()
    g.backend_sched_reset(s)
    fewer = Graph(g)
    fewer.expand(few)
    g.backend_sched_reset(s)
    assert g.backend_sched_alloc_graph(s, fewer.graph)
    graph.put(first_source(few), np.zeros(WIDTH, np.float32))
    assert g.backend_sched_graph_compute(s, fewer.graph) == 0
    assert np.array_equal(fewer.get(few), np.full(WIDTH, sum(range(41)), np.float32))
    g.backend_sched_free(s)


def aside(t: int) -> int:
    """A view that no graph lists as a node of its own."""
    view(t).op, view(t).src[0] = 0, None
    return t


def graphs_that_are_circles() -> None:
    """They cannot be planned, which is said; the next graph can."""
    g, bench = start()
    s = g.scheduler([bench.cpu], True)
    for whole in (False, True):
        graph = Graph(g)
        x = graph.tensor(WIDTH, ROWS, flags="i")
        first = graph.op("scale", x, 2.0)
        out = graph.op("silu", first)
        graph.expand(out)
        if not whole:
            view(first).src[0] = out
            assert not g.backend_sched_reserve(s, graph.graph) and hook().last_error()
            view(first).src[0], view(out).view_src = x, out
            assert not g.backend_sched_reserve(s, graph.graph)
            assert hook().last_error() == "a graph of 2 nodes cannot be read"
        else:
            assert g.backend_sched_reserve(s, graph.graph)
    g.backend_sched_free(s)


def first_source(t: int) -> int:
    """The leaf that a chain of nodes begins with."""
    while view(t).src[0]:
        t = view(t).src[0]
    return t


def ops_that_nobody_supports() -> None:
    """An error that names the node; and a plan with a node on a backend that refuses it would not pass as sound."""
    from ggml_sched.errors import Error
    from ggml_sched.llama_cpp.plans import _plan

    g, bench = start()
    device, host = bench.device("A", refuses={"UNARY"}), bench.device("H", kind=CPU, host=True, refuses={"UNARY"})
    weights = Weights(g, device.handle, np.random.default_rng(1))
    s = g.scheduler([device.handle, host.handle], True)
    graph = Graph(g)
    nodes = chain_of(weights.square[0])(graph)
    graph.expand(nodes[-1])
    assert not g.backend_sched_reserve(s, graph.graph) and not g.backend_sched_alloc_graph(s, graph.graph)
    assert "SILU" in hook().last_error() and "none of the 2 backends supports it" in hook().last_error()
    host.refuses = set()
    assert g.backend_sched_alloc_graph(s, graph.graph)
    (found,) = hook().last_scheduled()
    assert found["refused"] == []
    _plan(found).verify()
    silu = [t["name"] for t in found["graph"]["tensors"]].index(view(nodes[2]).name.decode())
    try:
        _plan({**found, "refused": [silu]}).verify()
    except Error as error:
        assert view(nodes[2]).name.decode() in str(error) and "H" in str(error), error
    else:
        raise AssertionError("its backend refused it")
    g.backend_sched_free(s)
    weights.close()


# -- what devices are given ----------------------------------------------------------------------------------------


def two_devices(g: Ggml, bench: Bench, weights: Weights, scheduler: int, devices: list):
    """(graph, input, output, what it computes): an input on the host, read on both devices; a result that travels."""
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    first = graph.op("silu", graph.op("mul_mat", weights.square[0], x))
    second = graph.op("add", graph.op("mul_mat", weights.square[1], first), x)
    out = graph.op("soft_max", second)
    graph.expand(out)
    g.backend_sched_reset(scheduler)
    for node, where in ((first, devices[0]), (second, devices[1]), (out, devices[1])):
        g.backend_sched_set_tensor_backend(scheduler, node, where.handle)
    w = [weights.own.get(t).reshape(WIDTH, WIDTH) for t in weights.square]

    def answer(values: np.ndarray) -> np.ndarray:
        h = values @ w[0].T
        z = (h / (1 + np.exp(-h))) @ w[1].T + values
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    return graph, x, out, answer


def waiting_before_writing() -> None:
    """What a device still reads is not written over by the next compute, and what it writes late is not read early."""
    g, bench = start()
    devices = [bench.device(name, lazy=True) for name in "AB"]
    # One that copies as late as the others work.
    late = bench.device("H", lazy=True, host=True, kind=CPU)
    for host in (bench.cpu, late.handle):
        weights = Weights(g, host, np.random.default_rng(1))
        s = g.scheduler([*(d.handle for d in devices), host], True)
        graph, x, out, answer = two_devices(g, bench, weights, s, devices)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        for k in range(4):
            # The client may write to an input as soon as the call before has returned.
            graph.put(x, numbers(k, WIDTH, ROWS))
            assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
            assert devices[1].queue, "nobody asked for the result"
        graph.put(x, np.full((ROWS, WIDTH), np.nan, np.float32))
        g.backend_sched_synchronize(s)
        bench.sound()
        assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), answer(numbers(3, WIDTH, ROWS)), atol=1e-5)
        g.backend_sched_free(s)
        weights.close()


def pipeline() -> None:
    """Each allocation has its own places of copies, four in turn: so many computes wait for nobody."""
    g, bench = start()
    devices = [bench.device(name, lazy=True, events=True) for name in "AB"]
    weights = Weights(g, devices[0].handle, np.random.default_rng(1))
    s = g.scheduler([*(d.handle for d in devices), bench.cpu], True, parallel=True)
    assert g.backend_sched_get_n_copies(s) == 4 and len(devices[0]._events) == 4
    made, last = None, [0, 0]
    for k in range(9):
        made = two_devices(g, bench, weights, s, devices)
        graph, x, out, answer = made
        assert g.backend_sched_alloc_graph(s, graph.graph)
        names = [view(t).name.decode() for t in view(graph.nodes()[0]).src[:2]]
        assert [name[-2:] for name in names if "#" in name] == [f"#{k % 4}"]
        graph.put(x, numbers(k, WIDTH, ROWS))
        bench.log.clear()
        assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
        assert not bench.named("synchronize"), "nobody waits for a whole device"
        assert {name for _, name, _ in bench.named("record")} == {"A", "B"}
        left = [len([w for w in d.queue if w.reads]) for d in devices]
        if k < 4:
            assert all(now > before for now, before in zip(left, last, strict=True)), (k, left, last)
        else:
            assert bench.named("synchronize_event") and left <= [5 * n for n in left]
        last = left
    g.backend_sched_synchronize(s)
    bench.sound()
    assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), answer(numbers(8, WIDTH, ROWS)), atol=1e-5)
    g.backend_sched_free(s)
    assert not devices[0]._events
    weights.close()


def views_of_copies() -> None:
    """A node that reads a view of what is copied reads the same part of it, or of its copy where it is no node."""
    g, bench = start()
    device = bench.device("A")
    s = g.scheduler([device.handle, bench.cpu], True)
    for whole, kind in ((False, int), (True, int), (False, aside), (True, aside)):
        graph = Graph(g)
        x = graph.tensor(WIDTH, ROWS, flags="i")
        rows = ROWS // 4
        parts = [kind(graph.op("view_2d", x, WIDTH, rows, WIDTH * 4, k * rows * WIDTH * 4)) for k in range(4)]
        read = parts if not whole else [*parts[:3], graph.op("cont", x)]
        found = [graph.op("scale", part, float(k + 1)) for k, part in enumerate(read)]
        halves = [graph.op("concat", *found[2 * k:2 * k + 2], 1) for k in range(2)]
        out = graph.op("concat", *halves, 1)
        graph.expand(out)
        g.backend_sched_reset(s)
        for node in (*found, *halves, out, *(read[3:] if whole else ())):
            g.backend_sched_set_tensor_backend(s, node, device.handle)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        values = numbers(5, WIDTH, ROWS)
        for _ in range(2):
            graph.put(x, values)
            assert g.backend_sched_graph_compute(s, graph.graph) == 0
            bench.sound()
            want = [values[6 * k:6 * k + 6] * np.float32(k + 1) for k in range(4)]
            want = want if not whole else [*want[:3], values * np.float32(4)]
            assert np.array_equal(graph.get(out).reshape(-1, WIDTH), np.concatenate(want))
        graph.close()
    g.backend_sched_free(s)


def fused_nodes_that_read_copies() -> None:
    """A product may be computed together with the norm before it: it does not lie over rows of what that reads."""
    g, bench = start()
    device = bench.device("A")
    store = Weights(g, device.handle, np.random.default_rng(1), 0)
    s = g.scheduler([device.handle, bench.cpu], True)
    for kind in (int, aside):
        graph = Graph(g)
        x, y = graph.tensor(WIDTH, 2 * ROWS, flags="i"), graph.tensor(WIDTH, ROWS, flags="i")
        part = kind(graph.op("view_2d", x, WIDTH, ROWS, WIDTH * 4, ROWS // 2 * WIDTH * 4))
        norm = graph.op("rms_norm", part, 1e-5)
        # The client has placed it: the product cannot lie in its place.
        g.backend_tensor_alloc(store.buffer, norm, view(store.store).data)
        product = graph.op("mul", y, norm)
        out = graph.op("add", product, y)
        graph.expand(out)
        g.backend_sched_reset(s)
        for node in (norm, product, out):
            g.backend_sched_set_tensor_backend(s, node, device.handle)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        read = view(norm).src[0]
        assert b"#" in view(view(read).view_src or read).name, "a copy"
        a, b = bench.span(read), bench.span(product)
        assert a == b or a[1] <= b[0] or b[1] <= a[0], kind
        values = [numbers(1, WIDTH, 2 * ROWS), numbers(2, WIDTH, ROWS)]
        graph.put(x, values[0])
        graph.put(y, values[1])
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        bench.sound()
        rows = values[0][ROWS // 2:ROWS // 2 + ROWS]
        want = rows / np.sqrt((rows * rows).mean(axis=1, keepdims=True) + 1e-5) * values[1] + values[1]
        assert np.allclose(graph.get(out).reshape(ROWS, WIDTH), want, atol=1e-4)
        graph.close()
    g.backend_sched_free(s)
    store.close()


def errors_of_devices() -> None:
    """A compute that fails is the answer, whatever way its nodes are run; what comes behind it is not computed."""
    g, bench = start()
    one, two = (bench.device(name) for name in "AB")
    weights = Weights(g, one.handle, np.random.default_rng(1), 0)
    s = g.scheduler([one.handle, two.handle, bench.cpu], True)
    graph = Graph(g)
    x = graph.tensor(WIDTH, ROWS, flags="i")
    first = graph.op("scale", x, 2.0)
    # Computed by another than whose memory it is: through a copy that goes back.
    into = graph.op("view_2d", weights.store, WIDTH, ROWS, WIDTH * 4, 0)
    written = graph.op("cpy", first, into)
    out = graph.op("silu", first)
    g.build_forward_expand(graph.graph, written)
    graph.expand(out)

    def allocate() -> None:
        g.backend_sched_reset(s)
        for node, where in ((first, one), (written, two), (out, one)):
            g.backend_sched_set_tensor_backend(s, node, where.handle)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        graph.put(x, numbers(1, WIDTH, ROWS))

    def ran() -> list[int]:
        names = [name for _, _, nodes in bench.named("compute") for name in nodes]
        return [names.count(view(t).name.decode()) for t in (first, written, out)]

    ask = CALLBACK(lambda t, first, user: True)
    for callback in (CALLBACK(0), ask):
        g.backend_sched_set_eval_callback(s, callback, None)
        for device, node, times in ((one, first, [1, 0, 0]), (two, written, [1, 1, 0]), (one, out, [1, 1, 1])):
            for status in (ABORTED, FAILED):
                device.fails = {node: status}
                allocate()
                weights.own.put(weights.store, np.zeros((12 * ROWS, WIDTH), np.float32))
                bench.log.clear()
                assert g.backend_sched_graph_compute(s, graph.graph) == status, (device.name, node)
                assert ran() == times
                stored = weights.own.get(weights.store).reshape(-1, WIDTH)[:ROWS]
                assert stored.any() == (node == out), "what failed does not go back"
                device.fails = {}
                assert g.backend_sched_graph_compute(s, graph.graph) == 0
                assert np.array_equal(weights.own.get(weights.store).reshape(-1, WIDTH)[:ROWS],
                                      numbers(1, WIDTH, ROWS) * 2)
    bench.sound()
    g.backend_sched_free(s)
    weights.close()


# -- experts -------------------------------------------------------------------------------------------------------


class Mixture:
    """A product with the experts that ids name, of weights on the host, on a device that has nothing of them."""

    def __init__(self, bench: Bench, s: int, weights: Weights, device, ids=None, also=None) -> None:
        self.width = view(weights.experts).ne[0]
        self.g, self.bench, self.s, self.weights, self.device = bench.g, bench, s, weights, device
        graph = self.graph = Graph(self.g)
        self.x = graph.tensor(self.width, 1, ROWS, flags="i")
        self.ids = graph.tensor(2, ROWS, kind=I32, flags="i") if ids is None else ids(graph)
        self.mixed = graph.op("mul_mat_id", weights.experts, self.x, self.ids)
        self.out = graph.op("scale", self.mixed, 0.5)
        more = also(graph, self) if also is not None else []
        graph.expand(self.out, *more)
        self.g.backend_sched_reset(s)
        for node in (self.mixed, self.out, *more):
            self.g.backend_sched_set_tensor_backend(s, node, device.handle)

    def allocate(self) -> None:
        assert self.g.backend_sched_alloc_graph(self.s, self.graph.graph)

    def run(self, used=None) -> list[tuple[int, int]]:
        """Where and how many bytes of the experts travelled by the use of them; the copy of all: [(-1, bytes)]."""
        self.graph.put(self.x, numbers(3, self.width, 1, ROWS))
        if used is not None:
            self.graph.put(self.ids, np.array([used] * ROWS, np.int32))
        self.bench.log.clear()
        assert self.g.backend_sched_graph_compute(self.s, self.graph.graph) == 0
        self.bench.sound()
        name = view(self.weights.experts).name.decode()
        return [(row[3] if row[0] == "set_async" else -1, row[4]) for row in self.bench.log
                if row[0] in ("set", "set_async") and row[1] == self.device.name and f"#{name}#" in row[2]]

    def want(self, used) -> np.ndarray:
        w = self.weights.own.get(self.weights.experts).reshape(6, self.width, self.width)
        x = numbers(3, self.width, 1, ROWS)
        return np.stack([np.stack([w[e] @ x[row, 0] for e in used]) for row in range(ROWS)]) * np.float32(0.5)

    def got(self) -> np.ndarray:
        return self.graph.get(self.out).reshape(ROWS, 2, self.width)


ALL = [(-1, 6 * WIDTH * WIDTH * 4)]
ONE = WIDTH * WIDTH * 4


def used_experts_travel() -> None:
    """Runs of them, with the bytes behind that kernels may look at; of ids that name none, all."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used, runs in (((0, 1), [(0, 2)]), ((3, 5), [(3, 1), (5, 1)]), ((4, 4), [(4, 1)]), ((2, 0), [(0, 1), (2, 1)]),
                       ((4, 5), [(4, 2)])):
        found = mixture.run(used)
        assert found == [(first * ONE, n * ONE + (512 if first + n < 6 else 0)) for first, n in runs], (used, found)
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4), used
    g.backend_sched_free(s)
    weights.close()
    # Smaller ones than what is looked at behind the last.
    weights = Weights(g, bench.cpu, np.random.default_rng(2), experts=8)
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used, runs in (((4, 0), [(0, 512), (1024, 512)]), ((5, 1), [(256, 512), (1280, 256)])):
        assert mixture.run(used) == runs
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4), used
    g.backend_sched_free(s)
    weights.close()


def ids_of_no_expert() -> None:
    """Everything is copied, and nobody reads or writes outside of anything."""
    g, bench = start()
    device = bench.device("A")
    device._compute_node = lambda t: None
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    mixture = Mixture(bench, s, weights, device)
    mixture.allocate()
    for used in ((0, 6), (-1, 2), (1 << 30, 0), (-(1 << 31), 1)):
        assert mixture.run(used) == ALL, used
    assert mixture.run((1, 1)) == [(ONE, ONE + 512)]
    g.backend_sched_free(s)
    weights.close()


def experts_that_others_read() -> None:
    """All of them travel where anything else reads the copy, be it in a later split or through a view."""
    g, bench = start()
    device = bench.device("A")
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    whole = weights.own.get(weights.experts)

    def second(graph: Graph, m: Mixture) -> list[int]:
        m.second = graph.tensor(2, ROWS, kind=I32, flags="i")
        return [graph.op("mul_mat_id", weights.experts, m.x, m.second)]

    def scaled(graph: Graph, m: Mixture) -> list[int]:
        return [graph.op("scale", weights.experts, 3.0)]

    def seen(graph: Graph, m: Mixture) -> list[int]:
        return [graph.op("scale", aside(graph.op("view_1d", weights.experts, WIDTH * WIDTH, 5 * ONE)), 3.0)]

    whole *= np.float32(3)
    for also, other in ((second, None), (scaled, whole), (seen, whole[-WIDTH * WIDTH:])):
        mixture = Mixture(bench, s, weights, device, also=also)
        mixture.allocate()
        if also is second:
            mixture.graph.put(mixture.second, np.array([[4, 5]] * ROWS, np.int32))
            other = mixture.want((4, 5)).ravel() * np.float32(2)
        found = mixture.run((0, 1))
        assert found == ALL, found
        assert np.allclose(mixture.got(), mixture.want((0, 1)), atol=1e-4)
        assert np.allclose(mixture.graph.get(mixture.graph.nodes()[-1]), other, atol=1e-4)
        mixture.graph.close()
    g.backend_sched_free(s)
    weights.close()


def experts_that_are_no_weights() -> None:
    """Tensors that a client may have written to, and memory that the host does not read, travel whole."""
    g, bench = start()
    device, owner = bench.device("A"), bench.device("B")
    for on, usage in ((bench.cpu, 0), (owner.handle, 1)):
        weights = Weights(g, on, np.random.default_rng(2), usage)
        s = g.scheduler([device.handle, owner.handle, bench.cpu], True)
        mixture = Mixture(bench, s, weights, device)
        mixture.allocate()
        found = mixture.run((0, 1))
        assert not [row for row in found if row[0] >= 0], found
        assert np.allclose(mixture.got(), mixture.want((0, 1)), atol=1e-4)
        g.backend_sched_free(s)
        weights.close()


def experts_of_no_mixture() -> None:
    """What else reads weights as its first source, with numbers as its third, reads all of them."""
    g, bench = start()
    device = bench.device("A")
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    found = []
    for where in (device.handle, bench.cpu):
        graph = Graph(g)
        out = graph.op("soft_max", weights.experts)
        # One for each expert: their bits would name the first.
        sinks = graph.tensor(6, flags="i")
        g.soft_max_add_sinks(out, sinks)
        graph.expand(out)
        g.backend_sched_reset(s)
        g.backend_sched_set_tensor_backend(s, out, where)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        graph.put(sinks, np.zeros(6, np.float32))
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        found.append(graph.get(out))
    assert np.array_equal(*found)
    g.backend_sched_free(s)
    weights.close()


def ids_seen_through_a_view() -> None:
    """Of ids that are a view of a copy, nothing is known before it is there."""
    g, bench = start()
    device = bench.device("A", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    s = g.scheduler([device.handle, bench.cpu], True)
    kept: list[int] = []

    def ids(graph: Graph) -> int:
        kept[:] = [graph.tensor(6, ROWS, kind=I32, flags="i")]
        return aside(graph.op("view_2d", kept[0], 2, ROWS, 6 * 4, 2 * 4))

    mixture = Mixture(bench, s, weights, device, ids=ids)
    mixture.allocate()
    for used in ((3, 5), (0, 2)):
        mixture.graph.put(kept[0], np.array([[1, 1, *used, 1, 1]] * ROWS, np.int32))
        assert mixture.run() == ALL
        assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4)
    g.backend_sched_free(s)
    weights.close()


def computed_ids() -> None:
    """Ids that an earlier split has computed are read back; those of the same split are not there yet."""
    g, bench = start()
    device, other = bench.device("A", lazy=True), bench.device("B", lazy=True)
    weights = Weights(g, bench.cpu, np.random.default_rng(2))
    kept: list[int] = []

    def ids(graph: Graph) -> int:
        kept[:] = [graph.tensor(6, ROWS, flags="i")]
        kept.append(graph.op("argsort", kept[0], 1))
        return graph.op("view_2d", kept[1], 2, ROWS, 6 * 4, 0)

    for where, whole in ((device, True), (other, False), (None, False)):
        s = g.scheduler([device.handle, other.handle, bench.cpu], True)
        mixture = Mixture(bench, s, weights, device, ids=ids)
        g.backend_sched_set_tensor_backend(s, kept[1], where.handle if where is not None else bench.cpu)
        mixture.allocate()
        for used in ((3, 5), (0, 2)):
            scores = np.zeros((ROWS, 6), np.float32)
            scores[:, used[0]], scores[:, used[1]] = 2, 1
            mixture.graph.put(kept[0], scores)
            found = mixture.run()
            assert found == (ALL if whole else [(e * ONE, ONE + (512 if e < 5 else 0)) for e in used]), (where, found)
            assert np.allclose(mixture.got(), mixture.want(used), atol=1e-4)
        g.backend_sched_free(s)
    weights.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
