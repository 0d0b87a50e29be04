"""ggml's scheduler functions on our planner, compared with ggml's own: each case in a process of its own.

    python scheduler_cases.py CASE [DEVICES]     CASE a function of this module, DEVICES a library of devices
"""

import ctypes
import threading
from ctypes import byref, c_size_t, c_void_p

import numpy as np
from ggml_schedulers import CALLBACK, Ggml, Graph, hook, run, view

WIDTH, ROWS = 32, 24
WEIGHTS = 1


class Weights:
    """Resident tensors on a backend: square matrices, rows of factors, a store to write to, experts."""

    def __init__(self, g: Ggml, backend: int, rng: np.random.Generator, usage: int = WEIGHTS,
                 experts: int = WIDTH) -> None:
        self.own = Graph(g)
        self.square = [self.own.tensor(WIDTH, WIDTH) for _ in range(3)]
        self.factor = [self.own.tensor(WIDTH) for _ in range(2)]
        self.store = self.own.tensor(WIDTH, 12 * ROWS)
        self.experts = self.own.tensor(experts, experts, 6)
        self.buffer = g.backend_alloc_ctx_tensors(self.own.ctx, backend)
        if usage:
            g.backend_buffer_set_usage(self.buffer, usage)
        self.g, self.rng = g, rng
        for t in (*self.square, *self.factor, self.store, self.experts):
            self.own.put(t, rng.standard_normal(g.nbytes(t) // 4).astype(np.float32) * 0.3)

    def close(self) -> None:
        self.g.backend_buffer_free(self.buffer)
        self.own.close()


def random_graph(g: Ggml, weights: list[Weights], stores: list[Weights], seed: int, memory=None, rows: int = ROWS):
    """(graph, inputs, outputs): nodes of many kinds, some of which only views read, or write to resident memory."""
    rng = np.random.default_rng(seed)
    graph = Graph(g, memory=memory)
    inputs = [graph.tensor(WIDTH, rows, flags="i") for _ in range(2)]
    live = list(inputs)
    pick = lambda: live[int(rng.integers(max(0, len(live) - 5), len(live)))]  # noqa: E731
    for _ in range(int(rng.integers(10, 40))):
        w = weights[int(rng.integers(len(weights)))]
        x, kind = pick(), int(rng.integers(12))
        if kind == 0:
            live.append(graph.op("add", x, pick()))
        elif kind == 1:
            live.append(graph.op("mul_mat", w.square[int(rng.integers(3))], x))
        elif kind in (2, 3):
            # Nodes that CPU kernels fuse.
            live.append(graph.op("mul", graph.op("rms_norm", x, 1e-5), w.factor[int(rng.integers(2))]))
        elif kind == 4:
            live.append(graph.op("scale", x, 0.7))
        elif kind == 5:
            live.append(graph.op("soft_max", x))
        elif kind == 6:
            live.append(graph.op("silu", x))
        elif kind == 7:
            flat = graph.op("reshape_2d", x, 2 * WIDTH, rows // 2)
            live.append(graph.op("reshape_2d", graph.op("rms_norm", flat, 1e-5), WIDTH, rows))
        elif kind == 8:
            half = graph.op("view_2d", x, WIDTH, rows // 2, WIDTH * 4, (rows // 2) * WIDTH * 4)
            live.append(graph.op("concat", graph.op("scale", half, 0.5), half, 1))
        elif kind == 9:
            live.append(graph.op("cont", graph.op("reshape_2d", graph.op("cont", graph.op("transpose", x)), WIDTH,
                                                  rows)))
        elif kind == 10:
            store = stores[int(rng.integers(len(stores)))].store
            at = int(rng.integers(3)) * rows * WIDTH * 4
            into = graph.op("view_2d", store, WIDTH, rows, WIDTH * 4, at)
            written = graph.op("cpy", x, into)
            g.build_forward_expand(graph.graph, written)
            live.append(graph.op("add", graph.op("view_2d", store, WIDTH, rows, WIDTH * 4, at), x))
        else:
            live.append(graph.op("mul", x, pick()))
    outputs = live[-1:]
    graph.expand(*outputs)
    return graph, inputs, outputs


def compute(g: Ggml, scheduler: int, made, seed: int, times: int = 2) -> list[bytes]:
    """The outputs' bits, of a graph that is allocated once and computed several times with other inputs."""
    graph, inputs, outputs = made
    rng = np.random.default_rng(seed)
    assert g.backend_sched_alloc_graph(scheduler, graph.graph)
    found = []
    for _ in range(times):
        for t in inputs:
            if view(t).buffer:
                graph.put(t, rng.standard_normal(g.nbytes(t) // 4).astype(np.float32))
        assert g.backend_sched_graph_compute(scheduler, graph.graph) == 0
        found += [graph.get(t).tobytes() for t in outputs]
    return found


def run_all(g: Ggml, backends: list[int], ours: bool, seeds: range, parallel: bool = False, choose: bool = False,
            repeat: int = 2, resident_on=None):
    """Bits of random graphs by one scheduler, one after the other, each made and allocated several times."""
    again = hook().served()
    scheduler = g.scheduler(backends, ours, parallel)
    rng = np.random.default_rng(7)
    on = backends if resident_on is None else resident_on
    weights = [Weights(g, b, rng) for b in on]
    stores = [Weights(g, b, rng, usage=0) for b in on]
    found, memory, written = [], None, 0
    for seed in seeds:
        for _ in range(repeat):
            made = random_graph(g, weights, stores, seed, memory)
            memory = made[0].memory
            g.backend_sched_reset(scheduler)
            if choose:
                pick = np.random.default_rng(seed)
                for node in made[0].nodes():
                    # Of nodes that share a root's memory, only those that write to it.
                    if (view(node).view_src is None or view(node).src[1]) and pick.random() < 0.3:
                        g.backend_sched_set_tensor_backend(scheduler, node, backends[int(pick.integers(len(backends)))])
            found.append(compute(g, scheduler, made, seed))
            written += sum(len(said["plan"]["write_backs"]) for said in hook().last_planned()) if choose else 0
            made[0].close()
    g.backend_sched_free(scheduler)
    found.append([w.own.get(w.store).tobytes() for w in stores])
    for w in (*weights, *stores):
        w.close()
    return found, {"written back": written} | {k: v - again[k] for k, v in hook().served().items()}


def check_same(want: list, got: list) -> None:
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            worst = np.abs(np.frombuffer(x, np.float32) - np.frombuffer(y, np.float32)).max()
            assert x == y, f"graph {i}, output {j}: differs by {worst}"


# -- cases ---------------------------------------------------------------------------------------------------------


def one_cpu() -> None:
    g = Ggml()
    backends = [g.cpu_backend()]
    want, _stock = run_all(g, backends, False, range(60))
    got, served = run_all(g, backends, True, range(60))
    check_same(want, got)
    assert served["allocators"] == 1 and served["same"] >= 55 and served["planned"] >= 50, served


def threads() -> None:
    """With several threads, a result that overlaps its sources becomes wrong."""
    g = Ggml()
    backends = [g.cpu_backend(3)]
    check_same(run_all(g, backends, False, range(40))[0], run_all(g, backends, True, range(40))[0])


def several_cpus() -> None:
    """Backends of one buffer type share buffers, whatever nodes are assigned."""
    g = Ggml()
    backends = [g.cpu_backend() for _ in range(3)]
    for parallel in (False, True):
        want, _served = run_all(g, backends, False, range(25), parallel, choose=True)
        check_same(want, run_all(g, backends, True, range(25), parallel, choose=True)[0])


def devices(library: str) -> None:
    g = Ggml()
    backends = [*g.devices(library, 2), g.cpu_backend()]
    want, _served = run_all(g, backends, False, range(40))
    check_same(want, run_all(g, backends, True, range(40))[0])


def devices_parallel(library: str) -> None:
    g = Ggml()
    backends = [*g.devices(library, 2, events=True), g.cpu_backend()]
    want, _served = run_all(g, backends, False, range(25), parallel=True)
    check_same(want, run_all(g, backends, True, range(25), parallel=True)[0])


def devices_chosen(library: str) -> None:
    """Assigned nodes, also ones that write to another backend's memory, through a copy and a write-back."""
    g = Ggml()
    backends = [*g.devices(library, 2), g.cpu_backend()]
    alone = [backends[-1]]
    want, _served = run_all(g, alone, False, range(30), resident_on=[alone[0]] * 3)
    got, served = run_all(g, backends, True, range(30), choose=True)
    check_same(want, got)
    assert served["written back"] > 0, served


def callbacks() -> None:
    """The same questions in the same order as ggml's, of which some stop a split."""
    g = Ggml()
    backends = [g.cpu_backend()]
    asked = {}
    for ours in (False, True):
        weights = [Weights(g, b, np.random.default_rng(1)) for b in backends]
        scheduler, said = g.scheduler(backends, ours), []

        def ask(t, first, _user, said=said):
            said.append((view(t).name, first))
            return len(said) % 3 != 0 if first else len(said) % 5 != 0

        callback = CALLBACK(ask)
        g.backend_sched_set_eval_callback(scheduler, callback, None)
        for seed in range(12):
            made = random_graph(g, weights, weights, seed)
            g.backend_sched_reset(scheduler)
            assert g.backend_sched_alloc_graph(scheduler, made[0].graph)
            assert g.backend_sched_graph_compute(scheduler, made[0].graph) == 0
            said.append((g.backend_sched_get_n_splits(scheduler), None))
            made[0].close()
        asked[ours] = said
        g.backend_sched_free(scheduler)
    assert asked[True] == asked[False] and len(asked[True]) > 100


def answers(library: str) -> None:
    """Queries for sizes, backends and splits give ggml's answers, before and after allocation."""
    g = Ggml()
    backends = [*g.devices(library, 1), g.cpu_backend(), g.cpu_backend()]
    weights = [Weights(g, backends[0], np.random.default_rng(1))]
    s = g.scheduler(backends, True)
    assert g.backend_sched_get_n_backends(s) == 3 and g.backend_sched_get_n_copies(s) == 1
    assert [g.backend_sched_get_backend(s, i) for i in range(3)] == backends
    assert g.backend_sched_get_backend(s, 3) is None and g.backend_sched_get_backend(s, -1) is None
    assert g.backend_sched_get_buffer_type(s, backends[1]) == g.backend_get_default_buffer_type(backends[1])
    assert g.backend_sched_get_buffer_type(s, 1234) is None and g.backend_sched_get_buffer_size(s, 1234) == 0
    big, small = random_graph(g, weights, weights, 3, rows=4 * ROWS), random_graph(g, weights, weights, 3, rows=12)
    sizes = (c_size_t * 3)()
    g.backend_sched_reserve_size(s, big[0].graph, sizes)
    assert [g.backend_sched_get_buffer_size(s, b) for b in backends] == [0, 0, 0]
    assert g.backend_sched_reserve(s, big[0].graph)
    reserved = [g.backend_sched_get_buffer_size(s, b) for b in backends]
    assert reserved == list(sizes) and reserved[0] > 0 and reserved[2] == 0
    assert g.backend_sched_get_tensor_backend(s, big[2][0]) is None
    splits = g.backend_sched_get_n_splits(s)
    assert splits >= 1
    g.backend_sched_reset(s)
    assert g.backend_sched_get_n_splits(s) == splits
    g.backend_sched_set_tensor_backend(s, small[2][0], backends[2])
    g.backend_sched_set_tensor_backend(s, small[2][0], 1234)
    assert g.backend_sched_get_tensor_backend(s, small[2][0]) == backends[2]
    g.backend_sched_reset(s)
    assert g.backend_sched_get_tensor_backend(s, small[2][0]) is None
    want = compute(g, s, small, 5, times=1)
    assert not g.backend_sched_alloc_graph(s, small[0].graph)
    for _ in range(20):
        assert g.backend_sched_get_tensor_backend(s, small[2][0]) == backends[0]
        assert compute_again(g, s, small, 5) == want
    assert g.backend_sched_get_tensor_backend(s, big[2][0]) is None
    assert [g.backend_sched_get_buffer_size(s, b) for b in backends] == reserved
    # The same graph once more, as nothing was built anew: its nodes read their own sources again.
    for _ in range(3):
        g.backend_sched_reset(s)
        assert compute(g, s, small, 5, times=1) == want
    # And once more, with the same node assigned to another backend.
    for chosen in (backends[1], backends[0], backends[1]):
        g.backend_sched_reset(s)
        g.backend_sched_set_tensor_backend(s, small[2][0], chosen)
        assert compute(g, s, small, 5, times=1) == want
        assert g.backend_sched_get_tensor_backend(s, small[2][0]) == chosen


def compute_again(g: Ggml, s: int, made, seed: int) -> list[bytes]:
    graph, inputs, outputs = made
    rng = np.random.default_rng(seed)
    for t in inputs:
        if view(t).buffer:
            graph.put(t, rng.standard_normal(g.nbytes(t) // 4).astype(np.float32))
    assert g.backend_sched_graph_compute_async(s, graph.graph) == 0
    g.backend_sched_synchronize(s)
    return [graph.get(t).tobytes() for t in outputs]


def wiring() -> None:
    """Graphs of the same tensors that differ in their wiring alone: each is computed as it is."""
    g = Ggml()
    s = g.scheduler([g.cpu_backend()], True)
    graph = Graph(g)
    a, b = (graph.tensor(WIDTH, ROWS, flags="i") for _ in range(2))
    x = graph.op("scale", a, 2.0)
    y = graph.op("scale", b, 3.0)
    z = graph.op("add", x, y)
    out = graph.op("mul", z, x)
    graph.expand(out)
    rng = np.random.default_rng(0)
    va, vb = (rng.standard_normal(WIDTH * ROWS).astype(np.float32) for _ in range(2))
    for k in range(6):
        sources = (x, y) if k % 2 else (y, x)
        view(out).src[1] = sources[0]
        g.backend_sched_reset(s)
        assert g.backend_sched_alloc_graph(s, graph.graph)
        graph.put(a, va)
        graph.put(b, vb)
        assert g.backend_sched_graph_compute(s, graph.graph) == 0
        xy = {x: va * np.float32(2), y: vb * np.float32(3)}
        assert np.array_equal(graph.get(out), (xy[x] + xy[y]) * xy[sources[0]]), k
    # One node more at the end, after all that there was.
    more = graph.op("scale", out, 0.5)
    graph.expand(more)
    g.backend_sched_reset(s)
    assert g.backend_sched_alloc_graph(s, graph.graph) and view(more).buffer
    # And one less, at the same address: the scheduler no longer knows it.
    assert g.backend_sched_get_tensor_backend(s, more)
    g.backend_sched_reset(s)
    ctypes.c_int.from_address(graph.graph + 4).value -= 1
    assert g.backend_sched_alloc_graph(s, graph.graph) and g.backend_sched_get_tensor_backend(s, out)
    assert not g.backend_sched_get_tensor_backend(s, more)


def replayed(library: str) -> None:
    """A reservation serves equal graphs at other addresses, and smaller graphs, without new buffers."""
    g = Ggml()
    backends = [*g.devices(library, 1), g.cpu_backend()]
    weights = [Weights(g, b, np.random.default_rng(1)) for b in backends]
    stock, s = g.scheduler(backends, False), None
    want = {}
    for rows in (12, 24, 48, 96):
        g.backend_sched_reset(stock)
        want[rows] = compute(g, stock, random_graph(g, weights, weights[:1], 3, rows=rows), 5)
    g.backend_sched_free(stock)
    s = g.scheduler(backends, True)
    before = hook().served()
    alive = [random_graph(g, weights, weights[:1], 3, rows=96)]
    assert g.backend_sched_reserve(s, alive[0][0].graph)
    sizes = [g.backend_sched_get_buffer_size(s, b) for b in backends]
    for rows in (96, 24, 96, 12, 48, 24, 96, 12):
        g.backend_sched_reset(s)
        alive.append(random_graph(g, weights, weights[:1], 3, rows=rows))
        assert compute(g, s, alive[-1], 5) == want[rows], rows
    served = {k: v - before[k] for k, v in hook().served().items()}
    assert served["equal"] >= 4 and served["replayed"] >= 3 and served["grown"] == len([n for n in sizes if n]), served
    assert [g.backend_sched_get_buffer_size(s, b) for b in backends] == sizes


def explained(library: str) -> None:
    """Plans verify and explain themselves; their offsets are the tensors' addresses."""
    from ggml_sched.llama_cpp import plans

    g = Ggml()
    backends = [*g.devices(library, 2), g.cpu_backend()]
    weights = [Weights(g, b, np.random.default_rng(1)) for b in backends]
    copies = 0
    for parallel in (False, True):
        s = g.scheduler(backends, True, parallel)
        for seed in range(12):
            graph = random_graph(g, weights, weights, seed)[0]
            g.backend_sched_reset(s)
            assert g.backend_sched_reserve(s, graph.graph)
            assert len(plans()) == 1
            assert g.backend_sched_alloc_graph(s, graph.graph)
            (plan,) = plans()
            plan.verify()
            sizes = tuple(g.backend_sched_get_buffer_size(s, b) for b in backends)
            assert all(a <= b for a, b in zip(plan.buffer_sizes, sizes, strict=True))
            named = {t.name: t for t in plan.graph.tensors}
            node = graph.nodes()[-1]
            last = named[view(node).name.decode()]
            assert last.name in plan.explain(last) and "digraph" in plan.to_dot()
            assert backends[[b.name for b in plan.backends].index(plan.backend_of(last).name)] \
                == g.backend_sched_get_tensor_backend(s, node)
            assert len(plan.splits) == g.backend_sched_get_n_splits(s)
            copies += len(plan.copies)
            graph.close()
        g.backend_sched_free(s)
        assert plans() == ()
    assert copies > 10


def refused() -> None:
    """A device with too little memory: the call fails, and everything works afterwards."""
    g = Ggml()
    s = g.scheduler([g.cpu_backend()], True)
    weights = [Weights(g, g.cpu_backend(), np.random.default_rng(1))]
    want = compute(g, s, random_graph(g, weights, weights, 4), 5, times=1)
    huge = Graph(g)
    x = huge.tensor(1 << 40, flags="i")
    huge.expand(huge.op("mul", huge.op("scale", x, 2.0), huge.op("silu", x)))
    for _ in range(2):
        g.backend_sched_reset(s)
        assert not g.backend_sched_reserve(s, huge.graph)
        assert not g.backend_sched_alloc_graph(s, huge.graph)
        assert g.backend_sched_graph_compute(s, huge.graph) == -2
        assert g.backend_sched_get_buffer_size(s, g.backend_sched_get_backend(s, 0)) == 0
        g.backend_sched_reset(s)
        assert compute(g, s, random_graph(g, weights, weights, 4), 5, times=1) == want


def two_threads() -> None:
    g = Ggml()
    want, _served = run_all(g, [g.cpu_backend()], False, range(12))
    failures, lock = [], threading.Lock()

    def work() -> None:
        try:
            check_same(want, run_all(g, [g.cpu_backend()], True, range(12))[0])
        except BaseException as error:
            with lock:
                failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def passed_on(library: str) -> None:
    """With the allocator alone, schedulers are ggml's own, and every call of theirs comes back to ggml."""
    g = Ggml("alloc")
    backends = [*g.devices(library, 1), g.cpu_backend()]
    want, _served = run_all(g, [backends[-1]], False, range(10), resident_on=[backends[-1]] * 2)
    check_same(want, run_all(g, backends, False, range(10))[0])


def callers(library: str) -> None:
    """Calls passed to ggml: the calling library is looked up once per call site (callers.cpp)."""
    g = Ggml("alloc")
    scheduler = g.scheduler([g.cpu_backend()], False)
    places = ctypes.CDLL(library)
    places.callers_call.argtypes = c_void_p, c_void_p
    function = ctypes.cast(g.backend_sched_get_n_splits, c_void_p)
    before = places.callers_asked()
    places.callers_call(function, scheduler)
    asked = places.callers_asked()
    for _ in range(3):
        places.callers_call(function, scheduler)
    assert places.callers_asked() == asked > before, (before, asked, places.callers_asked())


def empty() -> None:
    """Graphs of nothing, of views alone, of tensors without elements; schedulers that there are not."""
    g = Ggml()
    cpu = g.cpu_backend()
    s = g.scheduler([cpu], True)
    nothing = Graph(g)
    assert g.backend_sched_reserve(s, nothing.graph) and g.backend_sched_alloc_graph(s, nothing.graph)
    assert g.backend_sched_graph_compute(s, nothing.graph) == 0
    g.backend_sched_reset(s)
    views = Graph(g)
    x = views.tensor(WIDTH, ROWS, flags="i")
    views.expand(views.op("reshape_2d", x, ROWS, WIDTH))
    assert g.backend_sched_graph_compute(s, views.graph) == 0 and view(views.nodes()[0]).data
    g.backend_sched_reset(s)
    none = Graph(g)
    x = none.tensor(0, 4, flags="i")
    y = none.op("scale", x, 2.0)
    none.expand(y)
    assert g.backend_sched_graph_compute(s, none.graph) == 0 and view(y).buffer
    g.backend_sched_free(s)
    assert not g.backend_sched_reserve(None, none.graph) and not g.backend_sched_alloc_graph(None, none.graph)
    assert g.backend_sched_graph_compute(None, none.graph) == -1 and g.backend_sched_get_n_splits(None) == 0
    assert g.backend_sched_get_tensor_backend(None, x) is None
    sizes = (c_size_t * 1)()
    g.backend_sched_reserve_size(None, none.graph, sizes)
    assert byref(sizes)


if __name__ == "__main__":
    run(globals())
