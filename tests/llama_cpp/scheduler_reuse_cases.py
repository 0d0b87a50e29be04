"""Cases of plans that a scheduler uses again, ggml's own on our allocator or ours, a process for each:
`python scheduler_reuse_cases.py NAME DEVICES`.  Each case asserts the behaviour that its docstring names, and prints
"done".
"""

import ctypes as c

from ggml_schedulers import Ggml, hook, run
from numpy.random import default_rng
from scheduler_cases import Weights, compute, random_graph


def graphs_elsewhere(library: str) -> None:
    """The same graph at other addresses is not collected again; with other assignments it is."""
    g = Ggml()
    backends = [*g.devices(library, 1), g.cpu_backend()]
    weights = [Weights(g, b, default_rng(1)) for b in backends]
    stock, s = g.scheduler(backends, False), None
    want = {}
    for choice in (None, *backends):
        made = random_graph(g, weights, weights[:1], 3)
        g.backend_sched_reset(stock)
        if choice is not None:
            g.backend_sched_set_tensor_backend(stock, made[2][0], choice)
        want[choice] = compute(g, stock, made, 5)
    g.backend_sched_free(stock)
    s, alive = g.scheduler(backends, True), []
    for round_ in range(3):
        hook().clear_counters()
        for choice in (None, *backends):
            alive.append(random_graph(g, weights, weights[:1], 3))
            g.backend_sched_reset(s)
            if choice is not None:
                g.backend_sched_set_tensor_backend(s, alive[-1][2][0], choice)
            assert compute(g, s, alive[-1], 5) == want[choice], choice
            if choice is not None:
                assert g.backend_sched_get_tensor_backend(s, alive[-1][2][0]) == choice
        served = hook().served()
        # Assigning it to the backend that it is on without an assignment needs no plan.
        assert served["failed"] == 0 and (served["equal"], served["replayed"], served["planned"]) == (
            (0, 1, 2) if not round_ else (3, 0, 0)), (round_, served)
    # One plan serves two graphs in turn.
    alive += [random_graph(g, weights, weights[:1], 3) for _ in range(2)]
    hook().clear_counters()
    for k in (-2, -1, -2, -1):
        g.backend_sched_reset(s)
        assert compute(g, s, alive[k], 5) == want[None], (k, hook().served())
    served = hook().served()
    assert (served["planned"], served["equal"], served["same"]) == (0, 4, 0), served
    # One that was allocated gets its own sources back, however many were reserved, but not bound, elsewhere since.
    bound, *others = [random_graph(g, weights, weights[:1], 3) for _ in range(4)]
    alive += [bound, *others]
    for other in (None, *others, None):
        g.backend_sched_reset(s)
        if other is None:
            assert compute(g, s, bound, 5) == want[None]
        else:
            assert g.backend_sched_reserve(s, other[0].graph)
    for made in (bound, others[0], others[0], bound):
        g.backend_sched_reset(s)
        assert compute(g, s, made, 5) == want[None], "bound twice in one place, and once more in the other"
    # Assigning a tensor outside the graph changes nothing; assigning one at its address, or another, does.
    def placed(choose: int | None) -> tuple[int, int]:
        """Where the first output and some node are, the one number `choose` of the two being wanted elsewhere."""
        alive.append(random_graph(g, weights, weights[:1], 4))
        wanted = alive[-1][2][0], alive[-1][0].nodes()[1]
        g.backend_sched_reset(s)
        chosen = stranger if choose is None else wanted[choose]
        g.backend_sched_set_tensor_backend(s, chosen, elsewhere[choose])
        assert g.backend_sched_alloc_graph(s, alive[-1][0].graph)
        return tuple(g.backend_sched_get_tensor_backend(s, t) for t in wanted)

    stranger, elsewhere = alive[0][2][0], {None: backends[0]}
    first = placed(None)
    for i in range(2):
        elsewhere[i] = next(b for b in backends if b != first[i])
    for other in elsewhere[0], elsewhere[1]:
        elsewhere[None] = other
        assert placed(None) == first and placed(0)[0] == elsewhere[0] and placed(1)[1] == elsewhere[1]


def only_backend(library: str) -> None:
    """Assigning tensors to the only backend changes no plan: llama.cpp assigns the norms of small batches."""
    g = Ggml()
    backends = [g.cpu_backend()]
    weights = [Weights(g, backends[0], default_rng(1))]
    stock, s = (g.scheduler(backends, ours) for ours in (False, True))
    alive = []
    hook().clear_counters()
    for rows, assigned in (96, 0), (12, 1), (96, 1), (12, 0):
        alive += [random_graph(g, weights, weights, 3, rows=rows) for _ in range(2)]
        want = compute(g, stock, alive[-2], 5)
        for t in alive[-1][2][:assigned]:
            g.backend_sched_set_tensor_backend(s, t, backends[0])
        assert compute(g, s, alive[-1], 5) == want
        for made in (stock, s):
            g.backend_sched_reset(made)
    served = hook().served()
    assert (served["planned"], served["replayed"], served["equal"]) == (1, 1, 2), served
    for made in (s, stock):
        g.backend_sched_free(made)


def assigned_where_the_planner_puts_it(library: str) -> None:
    """A plan made for an assignment serves larger graphs without it, where a plan without it chose that backend, too.

    As for the norms of recurrent models under llama.cpp, which assigns those of small batches alone.
    """
    g = Ggml()
    backends = [*g.devices(library, 1), g.cpu_backend()]
    weights, alive = [Weights(g, b, default_rng(1)) for b in backends], []
    stock, s = (g.scheduler(backends, ours) for ours in (False, True))

    def planned(seed: int, rows: int, choice: int | None) -> int:
        """Compute a new graph whose first output is assigned to `choice`; how many plans that took."""
        hook().clear_counters()
        results = []
        for scheduler in (stock, s):
            alive.append(random_graph(g, weights, weights[:1], seed, rows=rows))
            g.backend_sched_reset(scheduler)
            if choice is not None:
                g.backend_sched_set_tensor_backend(scheduler, alive[-1][2][0], choice)
            results.append(compute(g, scheduler, alive[-1], 5))
        assert results[0] == results[1]
        return hook().served()["planned"]

    for seed, elsewhere in ((3, False), (4, True)):
        assert planned(seed, 12, None) == 1
        chosen = g.backend_sched_get_tensor_backend(s, alive[-1][2][0])
        other = next(b for b in backends if b != chosen)
        assert planned(seed, 96, other if elsewhere else chosen) == 1
        assert planned(seed, 96, None) == elsewhere
        assert g.backend_sched_get_tensor_backend(s, alive[-1][2][0]) == chosen


def under_ggml_s_scheduler(library: str) -> None:
    """ggml's scheduler adds nodes to the graphs of an allocator: copies, and views that keep their roots alive."""
    from ggml_sched.llama_cpp import plans

    g = Ggml("alloc")
    backends = [*g.devices(library, 1), g.cpu_backend()]
    weights = [Weights(g, b, default_rng(1)) for b in backends]
    stock = g.scheduler(backends, False)
    hook().pass_through(False)
    s = g.backend_sched_new((c.c_void_p * 2)(*backends), None, 2, 4096, False, True)
    for seed in (2, 3, 5):
        want = compute(g, stock, random_graph(g, weights, weights[:1], seed), 5)
        memory, n_same = None, hook().served()["same"]
        for _ in range(4):
            # As llama.cpp does: built again in the same place.
            made = random_graph(g, weights, weights[:1], seed, memory)
            memory = made[0].memory
            g.backend_sched_reset(s)
            assert compute(g, s, made, 5) == want, seed
            made[0].close()
        g.backend_sched_reset(stock)
        assert hook().served()["same"] >= n_same + 3, (seed, hook().served())
        # A smaller one follows, and can be looked at.
        made = random_graph(g, weights, weights[:1], seed, rows=12)
        g.backend_sched_reset(s)
        compute(g, s, made, 5)
        (plan,) = plans()
        plan.verify()
    for made in (s, stock):
        g.backend_sched_free(made)


def next_scheduler(library: str) -> None:
    """A released scheduler's cache serves the next one for the same devices, in no more memory than that needs."""
    g = Ggml()
    backends = [*g.devices(library, 1), g.cpu_backend()]
    weights = [Weights(g, b, default_rng(1)) for b in backends]

    alive = []

    def graph_of(rows: int, on: list | None = None):
        alive.append(random_graph(g, on or weights, (on or weights)[:1], 3, rows=rows))
        return alive[-1]

    def sizes(s: int) -> list[int]:
        return [g.backend_sched_get_buffer_size(s, b) for b in backends]

    s = g.scheduler(backends, True)
    assert g.backend_sched_reserve(s, graph_of(96)[0].graph)
    large = sizes(s)
    g.backend_sched_free(s)
    single = g.scheduler(backends[1:], True)
    hook().clear_counters()
    own = [Weights(g, backends[1], default_rng(1))]
    assert g.backend_sched_reserve(single, graph_of(96, own)[0].graph)
    assert hook().served()["planned"] == 1, "other devices"
    g.backend_sched_free(single)
    hook().clear_counters()
    several = g.scheduler(backends, True, parallel=True)
    assert g.backend_sched_reserve(several, graph_of(96)[0].graph) and g.backend_sched_get_n_copies(several) == 4
    assert hook().served()["planned"] == 1, "copies that take turns"
    g.backend_sched_free(several)
    s = g.scheduler(backends, True)
    assert g.backend_sched_reserve(s, graph_of(96)[0].graph)
    assert g.backend_sched_reserve(s, graph_of(12)[0].graph) and hook().served()["replayed"] >= 1
    g.backend_sched_free(s)
    hook().clear_counters()
    s = g.scheduler(backends, True)
    assert hook().last_planned() == [], "nothing was asked yet"
    assert g.backend_sched_reserve(s, graph_of(12)[0].graph)
    assert all(small <= most for small, most in zip(sizes(s), large, strict=True)) and sizes(s) != large
    assert hook().served()["planned"] == 1, hook().served()
    assert g.backend_sched_reserve(s, graph_of(96)[0].graph) and sizes(s) == large
    assert hook().served()["planned"] == 1 and hook().served()["equal"] == 1, hook().served()
    stock = g.scheduler(backends, False)
    want = compute(g, stock, graph_of(96), 5)
    assert compute(g, s, graph_of(96), 5) == want and len(hook().last_planned()) == 1
    # The same tensors where other memory holds a weight, which other backends read.
    made = graph_of(96)
    g.backend_sched_reset(s)
    hook().clear_counters()
    g.backend_buffer_set_usage(weights[0].buffer, 0)
    compute(g, s, made, 5)
    assert hook().served()["planned"] + hook().served()["replayed"] == 1, hook().served()
    for w in (s, stock):
        g.backend_sched_free(w)


if __name__ == "__main__":
    run(globals())
