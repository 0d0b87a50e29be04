"""Cases of plans that an allocator uses again, a process for each: `python allocator_reuse_cases.py NAME`.

Each case asserts the behaviour that its docstring names, and prints "done".
"""

import ctypes as c
import gc
import random
import sys
from pathlib import Path

from ggml_allocators import (
    INPUT,
    Allocator,
    Context,
    apart,
    base,
    fake_device,
    g,
    hooked,
    ours,
    random_graph,
    read,
    span,
    verified,
)

NODE_ROOM = 700


def allocator_after_allocator() -> None:
    """A released allocator's cache serves the next allocator of the same buffer type, in no more memory than that
    needs."""
    backend, seed = g.backend_cpu_init(), 4
    fresh, kept = fake_device(), fake_device()
    first = Allocator(ours, fresh.buft)
    made = random_graph(seed, rows=4)
    assert first.reserve(made.graph)
    small = first.size()
    first.close()
    alive = [random_graph(seed, rows=rows) for rows in (64, 4, 64)]
    first = Allocator(ours, kept.buft)
    assert all(first.alloc(made.graph) for made in alive)
    large = first.size()
    assert large > small and verified() == 1
    first.close()
    assert hooked.plans() == (), "of an allocator that is gone"
    hooked.clear_counters()
    again = Allocator(ours, kept.buft)
    assert again.size() == 0 and hooked.plans() == (), "nothing was asked yet"
    for rows, size in ((4, small), (64, large), (4, large), (64, large)):
        made, plain, stock = random_graph(seed, rows=rows), random_graph(seed, rows=rows), Allocator(base)
        assert again.alloc(made.graph) and stock.alloc(plain.graph)
        assert made.run(backend, rows) == plain.run(backend, rows) and again.size() == size, (rows, again.size())
        assert verified() == 1
        plain.close()
        stock.close()
        alive.append(made)
    served = hooked.served()
    assert served["planned"] == 1 and served["equal"] + served["same"] == 3 and served["failed"] == 0, served
    again.close()


def other_type_at_the_same_address() -> None:
    made, kind = random_graph(1), fake_device(alignment=16)
    allocator = Allocator(ours, kind.buft)
    assert allocator.reserve(made.graph)
    allocator.close()
    other = fake_device(alignment=256)
    c.memmove(kind.buft, other.buft, c.sizeof(kind.type))
    hooked.clear_counters()
    allocator = Allocator(ours, kind.buft)
    assert allocator.reserve(made.graph) and hooked.served()["planned"] == 1
    allocator.close()


def memory_that_came_and_went() -> None:
    """Of an allocated tensor only its allocation matters to the plan; it is checked on every call."""
    made = Context()
    x, weight = made.leaf(16, 8), made.leaf(16, 16)
    made.output(made.mul_mat(weight, x))
    buffer = g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 4096)
    start = g.backend_buffer_get_base(buffer)
    g.backend_tensor_alloc(buffer, weight, start)
    allocator = Allocator(ours)

    def placed() -> bool:
        for t in (x, *made.nodes()):
            t.contents.data = t.contents.buffer = None
        assert allocator.alloc(made.graph)
        return weight.contents.buffer != buffer

    assert not placed() and not placed() and hooked.served()["same"] == 1
    weight.contents.data = weight.contents.buffer = None
    assert placed() and weight.contents.data
    # As a view it shares its root's memory: its former fields, even its address, no longer matter.
    wide = made.leaf(16, 16)
    g.backend_tensor_alloc(buffer, wide, start + 2048)
    weight.contents.data, weight.contents.buffer = wide.contents.data, wide.contents.buffer
    assert not placed()
    known = hooked.served()["same"]
    weight.contents.view_src = wide
    assert not placed() and hooked.served()["same"] == known and span(weight) == span(wide)
    assert hooked.served()["failed"] == 0


def shapes_that_changed() -> None:
    """Tensors at the same addresses that became larger, or nodes of another op."""
    made = Context()
    x = made.leaf(16, 8)
    y = made.output(made.silu(made.view_2d(made.scale(x, 2.0), 16, 4, 64, 0)))
    allocator = Allocator(ours)

    def placed() -> dict:
        for t in (x, *made.nodes()):
            t.contents.data = t.contents.buffer = None
        assert allocator.alloc(made.graph)
        return hooked.served()

    assert placed()["planned"] == 1 and placed()["same"] == 1
    for t in (x, *made.nodes()):
        t.contents.ne[1] *= 16
        t.contents.nb[2] *= 16
        t.contents.nb[3] *= 16
    known = placed()
    assert known["planned"] == 2 and span(y)[1] - span(y)[0] == 16 * 64 * 4 <= allocator.size()
    # Another op, another of a family of ops, a view that begins elsewhere: whatever they are planned as.
    part = made.nodes()[1]
    part.contents.view_offs += 64
    assert placed()["same"] == known["same"]
    made.nodes()[0].contents.op = made.rms_norm(x, 1e-5).contents.op
    assert placed()["same"] == known["same"]
    y.contents.params[0] += 1
    assert placed()["same"] == known["same"]
    part.contents.view_src = x
    assert placed()["same"] == known["same"] and placed()["same"] == known["same"] + 1
    # A sum of squares by rows is not computed in place of what it reads.
    y.contents.op = made.mul_mat(x, x).contents.op
    y.contents.src[1] = y.contents.src[0]
    before = hooked.served()["planned"]
    assert placed()["planned"] == before + 1 and apart(y, y.contents.src[0])


def sources_behind_the_first() -> None:
    """Ops with more sources than most: the last source matters as well."""
    def chain(kept: int) -> Context:
        made = Context()
        x, w = made.leaf(16, 32), made.leaf(16, 16)
        at = [x]
        for _ in range(5):
            at.append(made.mul_mat(w, at[-1]))
        last = made.output(made.add(at[5], at[5]))
        last.contents.src[7] = at[kept]
        return made

    allocator = Allocator(ours)
    made = chain(4)
    assert allocator.reserve(made.graph)
    for kept in (1, 2, 4):
        made.outputs[0].contents.src[7] = made.nodes()[kept - 1]
        assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
        held = made.nodes()[kept - 1]
        assert all(apart(held, t) for t in made.nodes()[kept:]), f"result {kept} is read by the last node"
        made.forget()
    other = chain(2)
    hooked.clear_counters()
    assert allocator.alloc(other.graph) and hooked.served()["equal"] == 1
    other = chain(3)
    assert allocator.alloc(other.graph)
    held = other.nodes()[2]
    assert all(apart(held, t) for t in other.nodes()[3:]) and hooked.served()["planned"] == 1
    for kept in (4, 2, 4):
        other = chain(kept)
        assert allocator.alloc(other.graph)
        held = other.nodes()[kept - 1]
        assert all(apart(held, t) for t in other.nodes()[kept:]), f"result {kept} is read by the last node, elsewhere"
    # A node that had two sources gets one more, in any place.
    for place in range(2, 10):
        made = chain(4)
        made.outputs[0].contents.src[7] = None
        allocator = Allocator(ours)
        assert allocator.alloc(made.graph)
        made.forget()
        held = made.nodes()[1]
        made.outputs[0].contents.src[place] = held
        assert allocator.alloc(made.graph) and all(apart(held, t) for t in made.nodes()[2:]), place
        allocator.close()


def listed(made, at: int, count: int):
    """The array of a graph's nodes (at 16) or leafs (at 40)."""
    return (c.c_void_p * count).from_address(c.c_void_p.from_address(made.graph + at).value)


def lists_that_repeat() -> None:
    """Leafs that are listed twice, and among the nodes: as ggml's scheduler lists its copies of inputs."""
    def repeating(rows: int, again: int = 0):
        made = Context()
        leafs = [made.leaf(16, rows), made.leaf(16, 16)]
        made.output(made.silu(made.mul_mat(leafs[1], leafs[0])))
        c.c_int.from_address(made.graph + 4).value, c.c_int.from_address(made.graph + 8).value = 3, 3
        nodes = listed(made, 16, 3)
        nodes[2], nodes[1], nodes[0] = nodes[1], nodes[0], c.addressof(leafs[0].contents)
        listed(made, 40, 3)[2] = c.addressof(leafs[again].contents)
        return made

    allocator, alive = Allocator(ours), [repeating(16)]
    assert allocator.reserve(alive[0].graph)
    for rows, again, how in ((16, 0, "equal"), (8, 0, "replayed"), (8, 0, "equal"), (16, 1, "planned")):
        before = hooked.served()[how]
        alive.append(repeating(rows, again))
        assert allocator.alloc(alive[-1].graph) and hooked.served()[how] == before + 1, (how, hooked.served())
        alive[-1].forget()
        before = hooked.served()["same"]
        assert allocator.alloc(alive[-1].graph) and hooked.served()["same"] == before + 1
    assert hooked.served()["failed"] == 0


def lists_that_differ() -> None:
    """Unread leafs, and nodes in another order: the graph's lists matter, not only the tensors that they contain."""
    for plain in (True, False):
        made = Context()
        x, w, other = (made.leaf(16, 16) for _ in range(3))
        y = made.mul_mat(w, x)
        if not plain:
            y.contents.flags |= INPUT       # computed, and there from the start
        made.output(made.silu(y))
        n_leafs = c.c_int.from_address(made.graph + 8)
        assert n_leafs.value == 2
        allocator = Allocator(ours)
        assert all(allocator.reserve(made.graph) for _ in range(2)) and hooked.served()["same"] >= 1
        # One more leaf, which is not read; another in its place.
        n_leafs.value = 3
        extra = made.leaf(16, 16)
        for unread in (other, extra):
            listed(made, 40, 3)[2] = c.addressof(unread.contents)
            made.forget(other, extra)
            assert allocator.alloc(made.graph) and unread.contents.data, plain
        # A node replaced by one with equal fields.
        twin = made.silu(y)
        twin.contents.flags |= made.outputs[0].contents.flags
        listed(made, 16, 2)[1] = c.addressof(twin.contents)
        made.forget(*made.outputs)
        assert allocator.alloc(made.graph) and twin.contents.data and not made.outputs[0].contents.data, plain
        # Without the weight in the list: its allocation is checked nevertheless.
        leafs = listed(made, 40, 3)
        leafs[0], leafs[1] = (c.addressof(t.contents) for t in (x, extra))
        n_leafs.value = 2
        made.forget(twin)
        w.contents.data = 4096
        assert all(allocator.alloc(made.graph) for _ in range(2)) and w.contents.data == 4096
        made.forget(twin)
        assert allocator.alloc(made.graph) and w.contents.data not in (None, 4096), plain
        allocator.close()
    assert hooked.served()["failed"] == 0


def wanted_elsewhere() -> None:
    """The same graph, wanted in one type of buffers and then in the other, wherever its tensors are."""
    kinds = fake_device(), fake_device()
    made, alive = random_graph(3), []
    n_nodes, n_leafs = len(made.nodes()), len(made.leafs)

    for elsewhere in (False, True):
        found = {0: set(), 1: set()}
        allocator = Allocator(ours, *(kind.buft for kind in kinds))
        for wanted in (0, 1, 0, 1, 1, 0):
            alive.append(made)
            made = random_graph(3) if elsewhere else made
            made.forget()
            assert allocator.reserve(made.graph, [wanted] * n_nodes, [wanted] * n_leafs)
            assert allocator.alloc(made.graph)
            found[wanted] |= {t.contents.buffer for t in made.nodes() if not t.contents.view_src}
        assert [len(buffers) for buffers in found.values()] == [1, 1] and not found[0] & found[1], found
    made.forget()
    assert not allocator.reserve(made.graph, [2] * n_nodes, [0] * n_leafs), "there are two"
    assert not allocator.reserve(made.graph, [0] * n_nodes, [2] * n_leafs)
    assert allocator.reserve(made.graph, [0] * n_nodes, [0] * n_leafs) and hooked.served()["failed"] == 2


def asked_again() -> None:
    """A buffer type whose alloc size grew since the last allocator: for the same graph at the same and at other
    addresses."""
    kind = fake_device()
    made, more = random_graph(5), 0
    for elsewhere in (False, False, True, True):
        made = random_graph(5) if elsewhere else made
        alone = fake_device(extra=more)
        want, allocator = Allocator(ours, alone.buft), Allocator(ours, kind.buft)
        kind.extra = more
        made.forget()
        assert want.reserve(made.graph) and allocator.alloc(made.graph) and allocator.size() == want.size(), more
        allocator.close()
        want.close()
        more += 4096
    assert hooked.served()["failed"] == 0


def few_are_kept() -> None:
    """The pool keeps the caches of the last two released allocators."""
    made, kinds = random_graph(1), [fake_device() for _ in range(3)]

    def planned(kind) -> int:
        hooked.clear_counters()
        allocator = Allocator(ours, kind.buft)
        assert allocator.reserve(made.graph)
        allocator.close()
        return hooked.served()["planned"]

    assert [planned(kind) for kind in kinds] == [1, 1, 1]
    assert [planned(kind) for kind in (kinds[2], kinds[1], kinds[2], kinds[0])] == [0, 0, 0, 1]


def two_places_in_turn() -> None:
    """A client that builds its graph at two addresses in turn: one plan serves both, each compared every time."""
    allocator, made = Allocator(ours), [random_graph(3), random_graph(3)]

    def alloc(k: int) -> None:
        made[k].forget()
        assert allocator.alloc(made[k].graph)
        assert all(t.contents.data for t in made[k].nodes()), "views among them"

    for k in (0, 1, 0, 1, 0):
        alloc(k)
    served = hooked.served()
    assert (served["planned"], served["equal"], served["same"]) == (1, 4, 0), served
    # Other graphs came since and evicted the entry.
    others = [random_graph(seed) for seed in range(10, 40)]
    assert all(allocator.alloc(other.graph) for other in others)
    known = hooked.served()
    alloc(1)
    served = hooked.served()
    assert served["same"] == known["same"] and served["planned"] == known["planned"] + 1, (known, served)
    last, first = made[1].nodes()[-1], made[1].nodes()[0]
    last.contents.src[1] = first
    alloc(1)
    assert all(apart(first, t) for t in made[1].nodes()[1:-1] if not t.contents.view_src)
    assert hooked.served()["planned"] == served["planned"] + 1 and len(read(last)) > 0


def larger_plans_take_the_places_of_smaller_ones() -> None:
    """A wiring whose graphs grow again and again has one plan: those of other wirings stay."""
    allocator, made, alive = Allocator(ours), random_graph(3), []
    assert allocator.alloc(made.graph)
    for k in range(1, 31):
        alive.append(random_graph(4, rows=4 * k))
        assert allocator.alloc(alive[-1].graph)
    before = hooked.served()
    assert before["planned"] == 31, before
    made.forget()
    assert allocator.alloc(made.graph)
    served = hooked.served()
    assert (served["planned"], served["same"]) == (31, before["same"] + 1), served
    smaller = random_graph(4, rows=4)
    assert allocator.alloc(smaller.graph)
    served = hooked.served()
    assert (served["planned"], served["replayed"]) == (31, before["replayed"] + 1), served


def nodes_without_op() -> None:
    """Nodes without op may name later nodes: such a graph, too, matches elsewhere."""
    def build() -> tuple:
        made = Context()
        a, y = made.scale(made.leaf(64), 2.0), made.leaf(64)
        g.build_forward_expand(made.graph, a)
        last_use = made.view_tensor(a)
        last_use.contents.src[0] = a
        g.graph_add_node(made.graph, last_use)
        b = made.add(a, y)
        last_use.contents.src[1] = b
        made.output(made.mul_mat(b, b))
        return made, last_use

    allocator, two = Allocator(ours), [build(), build()]

    def alloc(k: int) -> dict:
        made = two[k][0]
        made.forget()
        assert allocator.alloc(made.graph)
        return hooked.served()

    for k in (0, 1, 0, 1):
        alloc(k)
    made, last_use = two[1]
    last_use.contents.src[1] = made.nodes()[-1]
    served = alloc(1)
    assert (served["planned"], served["equal"]) == (2, 3), served


def other_weights() -> None:
    """Graphs whose weights differ in layout are different, at any address; with equal layouts they are equal."""
    f16, f32 = 1, 0
    there, buffer = Context(), g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 1 << 14)
    weights = [there.new_tensor_4d(kind, 32, 16, 1, 1) for kind in (f32, f32, f16)]
    for i, weight in enumerate(weights):
        assert g.backend_tensor_alloc(buffer, weight, g.backend_buffer_get_base(buffer) + (i << 12)) == 0

    def build(weight) -> Context:
        made = Context()
        made.output(made.mul_mat(weight, made.leaf(32, 8)))
        return made

    allocator, made = Allocator(ours), [build(weight) for weight in weights]
    found = []
    for graph in made:
        assert allocator.alloc(graph.graph)
        found.append(hooked.served())
    assert [served["planned"] + served["replayed"] for served in found] == [1, 1, 2], found
    assert found[1]["equal"] == 1, found


def buffers_are_told() -> None:
    """init_tensor is called for each tensor of each buffer that has it, views included, on every allocation."""
    def build(rows: int) -> tuple:
        made = Context()
        x = made.leaf(16, rows)
        y = made.silu(made.view_2d(x, 16, rows // 2, 64, 0))
        made.output(made.scale(made.reshape_2d(y, 8 * rows, 1), 2.0))
        return made, [x, *made.nodes()]

    kind = fake_device()
    allocator, (large, _) = Allocator(ours, kind.buft), build(64)
    assert allocator.reserve(large.graph)
    for rows in (64, 8, 16):
        made, held = build(rows)
        for _ in range(3):
            kind.told.clear()
            for t in held:
                t.contents.data = t.contents.buffer = None
            assert allocator.alloc(made.graph)
            assert len({t.contents.buffer for t in held}) == 1 and held[0].contents.buffer
            assert sorted(kind.told) == sorted(c.addressof(t.contents) for t in held), "each once"
    served = hooked.served()
    assert (served["planned"], served["equal"], served["replayed"], served["same"]) == (1, 1, 2, 6), served


def one_tensor_for_two() -> None:
    """A graph that names one tensor twice differs from a planned graph with two tensors there, at any address."""
    def made_of(twice: bool) -> Context:
        made = Context()
        a, b = made.leaf(16, 4), made.leaf(16, 4)
        made.output(made.add(a, a if twice else b))
        if twice:
            # Listed twice as well, so that the counts are equal.
            n_leafs = c.c_int.from_address(made.graph + 8)
            leafs = c.c_void_p.from_address(made.graph + 40).value
            (c.c_void_p * 2).from_address(leafs)[1] = c.addressof(a.contents)
            n_leafs.value = 2
        return made

    allocator = Allocator(ours)
    first, second = made_of(False), made_of(True)
    assert allocator.alloc(first.graph) and allocator.alloc(second.graph)
    served = hooked.served()
    assert served["planned"] == 2 and served["equal"] == served["replayed"] == 0, served


def views_of_views() -> None:
    """A root that is reachable only through an unlisted tensor: such a graph never matches a cached one."""
    made = Context()
    x = made.leaf(16, 8)
    between = made.view_2d(x, 16, 4, 64, 0)
    out = made.view_2d(x, 16, 2, 64, 0)
    out.contents.view_src = between
    made.output(made.silu(out))
    allocator = Allocator(ours)
    assert all(allocator.reserve(made.graph) for _ in range(3))
    served = hooked.served()
    assert served["planned"] == 3 and served["equal"] == served["same"] == 0, served


def roots_that_nobody_lists() -> None:
    """Nodes without op and sources that are views of unlisted roots: such graphs, too, match at other addresses."""
    count = 1900
    there = Context()
    weights = [there.leaf(4) for _ in range(count)]
    buffer = g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 4096)
    for weight in weights:
        assert g.backend_tensor_alloc(buffer, weight, g.backend_buffer_get_base(buffer)) == 0
    allocator, alive = Allocator(ours), []
    for _ in range(2):
        made = Context()
        alive.append(made)
        x = made.silu(made.leaf(16))
        made.output(x)
        for weight in weights:
            view = made.view_tensor(weight)
            view.contents.src[0] = None
            g.graph_add_node(made.graph, view)
        made.output(made.silu(x))
        assert allocator.alloc(made.graph) and view.contents.data == weight.contents.data
    served = hooked.served()
    assert served["planned"] == 1 and served["equal"] == 1, served


def looks_without_end() -> None:
    """Graphs of ever new shapes leak no memory."""
    def resident() -> int:
        return int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines()
                        if line.startswith("VmRSS"))) << 10

    allocator, width = Allocator(ours), 1
    start = 0
    for k in range(150):
        made = Context()
        for _ in range(NODE_ROOM):
            made.output(made.silu(made.leaf(width)))
            width += 1
        assert allocator.reserve(made.graph)
        g.free(made.ctx)
        made.leafs.clear()
        made.outputs.clear()
        gc.collect()
        if k == 40:
            start = resident()
    grown = resident() - start
    assert grown < 8 << 20, f"{grown} bytes for {2 * 110 * NODE_ROOM} looks"


def chain(rows: int, embedded: bool = False):
    """Layers over a batch of so many rows; two wirings, which differ in how they begin."""
    made = Context()
    table, weight = made.leaf(16, 16, name="table"), made.leaf(16, 16, name="weight")
    x = made.leaf(16, rows, name="x")
    if not embedded:
        x = made.mul_mat(table, x)
    for _ in range(4):
        y = made.mul_mat(weight, made.mul(made.rms_norm(x, 1e-5), x))
        x = made.add(x, made.silu(y))
    made.output(made.soft_max(x))
    return made


def reserved_plans_stay() -> None:
    """Ever new shapes of two wirings, one reserved and one first allocated at a small size: each is planned once."""
    backend, rng, allocator, alive = g.backend_cpu_init(), random.Random(1), Allocator(ours), []
    largest = chain(400)
    assert allocator.reserve(largest.graph) and hooked.served()["planned"] == 1
    for n, (rows, embedded) in enumerate([(2, True), *((rng.randint(1, 400), rng.random() < 0.5)
                                                        for _ in range(300))]):
        made = chain(rows, embedded)
        assert allocator.alloc(made.graph)
        if n == 0:
            hooked.clear_counters()
        if n % 50 == 0:
            plain, stock = chain(rows, embedded), Allocator(base)
            assert stock.alloc(plain.graph) and made.run(backend, n) == plain.run(backend, n) and verified() == 1
            alive.append((plain, stock))
        made.close()
    served = hooked.served()
    assert served["planned"] == served["grown"] == served["synchronised"] == 0, served
    assert served["replayed"] + served["same"] + served["equal"] == 300, served


def larger_graphs_of_a_wiring() -> None:
    """A graph that grows is planned for the largest sizes so far: wide and high graphs then alternate without
    planning."""
    def made_of(width: int, rows: int):
        made = Context()
        wide, high = made.leaf(width, 2), made.leaf(8, rows)
        made.output(made.silu(wide))
        made.output(made.soft_max(made.silu(high)))
        return made

    allocator, alive = Allocator(ours), [made_of(64, 4), made_of(8, 64)]
    assert all(allocator.alloc(made.graph) for made in alive) and hooked.served()["planned"] == 2
    hooked.clear_counters()
    alive = [made_of(width, rows) for width in (8, 40, 64) for rows in (4, 40, 64)]
    assert all(allocator.alloc(made.graph) for made in alive)
    served = hooked.served()
    assert served["planned"] == served["grown"] == 0, served


def first_tensor_is_a_node() -> None:
    """A graph that lists no leafs: its first tensor is a node."""
    made = Context()
    node = made.silu(made.leaf(16))
    g.graph_add_node(made.graph, node)
    allocator = Allocator(ours)
    assert allocator.alloc(made.graph) and node.contents.data and hooked.last_error() is None


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("done")
