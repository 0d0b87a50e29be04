"""Cases of the allocator under ggml, a process for each: `python allocator_cases.py NAME ...`.

Each case asserts the behaviour that its docstring names, and prints "done".
"""

import ctypes as c
import sys
import threading

from ggml_allocators import (
    INPUT,
    OUTPUT,
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
from ggml_schedulers import hook


def both(make, backend, *bufts: int, seed: int = 0) -> tuple[list[bytes], list[bytes], int, int]:
    """Output values and allocated bytes of a graph with ggml's allocator, and with ours."""
    found, sizes = [], []
    for library in (base, ours):
        made, allocator = make(), Allocator(library, *bufts)
        assert allocator.reserve(made.graph)
        assert allocator.alloc(made.graph)
        found.append(made.run(backend, seed))
        sizes.append(allocator.size())
        if library is ours:
            assert verified() == 1
        allocator.close()
        made.close()
    return *found, *sizes


def random_graphs(first: str, last: str) -> None:
    backend = g.backend_cpu_init()
    total = [0, 0]
    for seed in range(int(first), int(last)):
        g.backend_cpu_set_n_threads(backend, 1 + seed % 3)
        want, got, stock, bytes_ = both(lambda seed=seed: random_graph(seed), backend, seed=seed)
        assert got == want, seed
        total[0] += stock
        total[1] += bytes_
    assert total[1] < total[0], total
    g.backend_free(backend)


def fake_types() -> None:
    backend = g.backend_cpu_init()
    for seed in range(8):
        # Extra bytes behind each tensor; chunks smaller than the graph; a coarse alignment.
        fake = fake_device(alignment=(16, 256)[seed % 2], extra=(0, 100)[seed // 2 % 2],
                        max_size=(2**64 - 1, 2048)[seed // 4])
        want, got, _, _ = both(lambda seed=seed: random_graph(seed), backend, fake.buft, seed=seed)
        assert got == want, seed
        if seed >= 4:
            assert max(fake.allocated) <= 2048 and len(fake.allocated) > 2, fake.allocated
    g.backend_free(backend)


def too_large_for_a_buffer() -> None:
    fake = fake_device(max_size=256, extra=100)
    made = Context()
    x = made.leaf(256)
    made.output(made.scale(made.scale(x, 2.0), 3.0))
    allocator = Allocator(ours, fake.buft)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert max(fake.allocated) == 1152 and verified() == 1
    (plan,) = hooked.plans()
    (device,) = plan.backends
    assert device.max_buffer_size == 1152, "what is behind the plan would take it, too"
    assert device.alloc_size(plan.graph.nodes[0]) == 1024 + 100


def a_buffer_that_is_just_large_enough() -> None:
    """The largest buffer is no multiple of the alignment: what fits into its rest is placed as by ggml."""
    made = Context()
    made.output(made.silu(made.scale(made.leaf(16, 8), 2.0)))
    for library in (base, ours):
        fake = fake_device(alignment=64, max_size=532, extra=10)
        allocator = Allocator(library, fake.buft)
        assert allocator.reserve(made.graph), "each takes 522 bytes"
        allocator.close()


def views_at_the_edge() -> None:
    """Views of computed inputs, and views of nothing that begin behind what they view."""
    backend = g.backend_cpu_init()

    def computed_input() -> Context:
        made = Context()
        x = made.leaf(16, 8)
        n = made.scale(x, 2.0)
        n.contents.flags |= INPUT
        made.output(made.add(made.reshape_2d(n, 8, 16), made.reshape_2d(x, 8, 16)))
        return made

    def nothing() -> Context:
        made = Context()
        x = made.leaf(16, 8)
        empty = made.scale(made.view_2d(x, 16, 0, 64, 64), 2.0)
        made.output(made.silu(made.view_2d(empty, 8, 0, 64, 32)))
        made.output(made.silu(x))
        return made

    def no_rows() -> Context:
        """A prompt without wanted rows: each expert's part begins past the end."""
        made = Context()
        x = made.leaf(16, 6)
        none = made.scale(made.view_2d(x, 16, 0, 64, 0), 2.0)
        made.output(made.add(*(made.view_2d(none, 8, 0, 64, 32 * i) for i in range(2))))
        made.output(made.scale(x, 3.0))
        return made

    for make, empty in ((computed_input, 0), (nothing, 1), (no_rows, 1)):
        want, got, _, _ = both(make, backend)
        assert got == want and want.count(b"") == empty and want[-1], make.__name__
        # Elsewhere, and smaller buffers than they might take.
        allocator, alive = Allocator(ours), [make(), make()]
        assert all(allocator.alloc(made.graph) and verified() == 1 for made in alive)
        assert alive[1].run(backend, 0) == want
        allocator.close()


def saved_bytes_are_stock_s_less_ours() -> None:
    """With buffer types of two alignments, one of them named twice, and for the larger of two reserved graphs."""
    fake, cpu = fake_device(alignment=256), g.backend_cpu_buffer_type()
    hooked.compare()
    made = [random_graph(seed, width=width) for seed, width in ((3, 16), (7, 64), (3, 16))]
    held = []
    for library in (base, ours):
        allocator = Allocator(library, cpu, fake.buft, cpu)
        for graph in made:
            ids = [i % 3 for i in range(len(graph.nodes()))]
            assert allocator.reserve(graph.graph, ids, [1] * 100)
        held.append((allocator.size(0), allocator.size(1)))
        if library is ours:
            (cpu_name, of_cpu), (fake_name, of_fake) = hooked.compute_buffers().items()
            assert (of_cpu, of_fake) == held[1]
            assert hooked.saved() == {cpu_name: held[0][0] - of_cpu, fake_name: held[0][1] - of_fake}
            stock, other = Allocator(base, cpu), Allocator(ours, cpu)
            assert stock.reserve(made[1].graph) and other.reserve(made[1].graph) and stock.size() > other.size()
            assert hooked.saved()[cpu_name] == held[0][0] - of_cpu + stock.size() - other.size()
            other.close()
            hooked.compare(False)
            other = Allocator(ours, cpu)
            assert other.reserve(made[1].graph) and hooked.saved()[cpu_name] == held[0][0] - of_cpu
            other.close()
            stock.close()
        allocator.close()
    assert hooked.compute_buffers() == {}
    try:
        hooked.saved()
    except hooked.HookError as error:
        assert "call compare() before" in str(error)
    else:
        raise AssertionError("saved bytes of no context")
    for graph in made:
        graph.close()


def two_types() -> None:
    backend = g.backend_cpu_init()
    a, b = fake_device(), fake_device()
    made = random_graph(3)
    nodes = [k % 3 for k in range(len(made.nodes()))]
    leafs = [k % 3 for k in range(len(made.leafs))]
    allocator = Allocator(ours, a.buft, b.buft, a.buft)
    assert not allocator.alloc(made.graph), "no buffer type was chosen"
    sizes = allocator.sizes(made.graph, nodes, leafs)
    assert allocator.size(0) == 0 and sizes[2] == 0 and sizes[0] > 0 and sizes[1] > 0
    assert allocator.reserve(made.graph, nodes, leafs)
    assert [allocator.size(i) for i in range(3)] == sizes
    assert allocator.alloc(made.graph)
    got = made.run(backend)
    where = {t.contents.buffer for t in made.nodes() if not t.contents.view_src}
    assert len(where) == 2
    # Another graph of as many nodes and leafs goes where the same numbers say, if it fits; a larger one does not.
    again = random_graph(3)
    assert allocator.alloc(again.graph) and again.run(backend) == got
    larger = random_graph(3, rows=60)
    assert not allocator.alloc(larger.graph)
    assert larger.nodes()[-1].contents.data is None
    assert allocator.reserve(larger.graph, nodes, leafs) and allocator.alloc(larger.graph)
    assert verified() == 1
    stock = Allocator(base)
    plain = random_graph(3)
    assert stock.alloc(plain.graph) and plain.run(backend) == got


def external_tensors_are_left_alone() -> None:
    backend = g.backend_cpu_init()
    buffer = g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 4096)
    start = g.backend_buffer_get_base(buffer)
    made = Context()
    weight, x = made.leaf(16, 16), made.leaf(16, 4)
    g.backend_tensor_alloc(buffer, weight, start)
    kept = made.leaf(16, 4)
    g.backend_tensor_alloc(buffer, kept, start + 2048)
    y = made.mul_mat(weight, x)
    written = made.cpy(y, made.view_2d(kept, 16, 4, 64, 0))
    made.output(made.add(made.scale(y, 2.0), kept))
    g.build_forward_expand(made.graph, written)
    # A result that the caller has allocated.
    placed = made.silu(y)
    g.backend_tensor_alloc(buffer, placed, start + 3072)
    made.output(placed)
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert (weight.contents.data, kept.contents.data, placed.contents.data) == (start, start + 2048, start + 3072)
    assert written.contents.data == start + 2048 and written.contents.buffer == buffer
    for t in made.nodes():
        if t.contents.buffer != buffer:
            assert t.contents.data >= start + 4096 or t.contents.data < start
    made.run(backend)
    assert verified() == 1
    allocator.close()
    g.backend_buffer_free(buffer)


def leafs_outputs_and_views() -> None:
    made = Context()
    x, unread, unread_input = made.leaf(64), made.leaf(64, flags=0), made.leaf(64)
    chain = [x]
    for _ in range(6):
        chain.append(made.soft_max(made.mul_mat(chain[-1], chain[-1])))
        chain[-1] = made.add(made.reshape_2d(made.scale(x, 0.5), 64, 1), chain[-1])
    held = made.output(made.scale(chain[2], 3.0))
    made.output(chain[-1])
    half = made.view_2d(held, 32, 1, 128, 128)
    g.build_forward_expand(made.graph, half)
    # Leafs that no node reads come into a graph only as nodes of its list, as a scheduler puts them there.
    for t in (unread, unread_input):
        g.graph_add_node(made.graph, t)
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert half.contents.data == held.contents.data + 128
    names = [c.addressof(t.contents) for t in made.nodes()]
    later = made.nodes()[names.index(c.addressof(held.contents)) + 1:]
    assert all(apart(held, t) for t in later if not t.contents.view_src), "an output is never written over"
    for t in (unread, unread_input, x, held):
        assert t.contents.data and g.backend_buffer_get_usage(t.contents.buffer) == 2
    assert apart(x, unread_input) and verified() == 1


def outputs_that_are_views() -> None:
    """Outputs that are views, which ggml's own allocator overwrites: the reference is computed without any reuse."""
    backend = g.backend_cpu_init()

    def make(everything: bool) -> Context:
        made = Context()
        x, w = made.leaf(16, 6), made.leaf(16, 16)
        made.output(made.reshape_2d(made.scale(x, 2.0), 6, 16))
        t = made.mul_mat(w, x)
        for _ in range(4):
            t = made.silu(made.mul_mat(w, t))
        made.output(t)
        for node in made.nodes() if everything else ():
            node.contents.flags |= OUTPUT
        return made

    want, got = make(True), make(False)
    for made, allocator in ((want, Allocator(base)), (got, Allocator(ours))):
        assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert got.run(backend) == want.run(backend)
    assert verified() == 1


def a_scheduler_s_own_nodes() -> None:
    """Nodes without op: markers that a tensor is still read, and destinations of copies."""
    made = Context()
    x, y = made.leaf(64), made.leaf(64)
    a = made.scale(x, 2.0)
    g.build_forward_expand(made.graph, a)
    last_use = made.view_tensor(a)
    last_use.contents.src[0] = a
    copy = made.dup_tensor(a)
    for t in (last_use, copy):
        g.graph_add_node(made.graph, t)
    b = made.add(copy, y)
    # A node without op may name a tensor computed later.
    last_use.contents.src[1] = b
    made.output(made.mul_mat(b, b))
    fake = fake_device()
    allocator = Allocator(ours, fake.buft)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert apart(a, copy), "the source is read until the copy is made"
    assert span(last_use) == span(a)
    assert verified() == 1


def copies_of_views() -> None:
    """Copies that ggml's scheduler makes of views have the views' strides: gaps, or dimensions in another order."""
    made = Context()
    x = made.output(made.scale(made.leaf(64, 8), 2.0))
    views = made.view_2d(x, 16, 8, 256, 64), made.transpose(x)
    for view in views:
        copy = made.dup_tensor(view)
        copy.contents.nb[:] = view.contents.nb[:]
        g.set_name(copy, b"copy")
        turned = made.transpose(copy)
        # Added as the scheduler adds them: build_forward_expand would list the copy as a leaf.
        for t in (copy, made.cont(copy), turned, made.cont(turned)):
            g.graph_add_node(made.graph, t)
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    assert verified() == 1
    (plan,) = hooked.plans()
    copies = [t for t in plan.graph.nodes if t.name == "copy"]
    assert [t.nbytes for t in copies] == [g.nbytes(view) for view in views]
    assert all("'copy'" in plan.explain(t) for t in copies) and "1 splits" in str(plan)


def growing_shrinking_and_rewiring() -> None:
    backend = g.backend_cpu_init()

    def chain(rows: int, other: bool = False) -> Context:
        """Two graphs of the same tensors, which differ in what the last but one reads."""
        made = Context()
        x, w = made.leaf(16, rows), made.leaf(16, 16)
        a = made.mul_mat(w, x)
        b = made.mul_mat(w, a)
        d = made.mul_mat(w, b)
        e = made.mul_mat(w, d)
        made.output(made.add(e, a if other else d))
        return made

    allocator = Allocator(ours)
    sizes = []
    for rows, other in ((8, False), (64, False), (8, False), (64, False), (64, True), (8, True), (64, True)):
        made, plain, stock = chain(rows, other), chain(rows, other), Allocator(base)
        assert allocator.alloc(made.graph) and stock.alloc(plain.graph)
        assert made.run(backend, rows) == plain.run(backend, rows), (rows, other)
        sizes.append(allocator.size())
        assert verified() == 1
        made.close()
        plain.close()
        stock.close()
    assert sizes == sorted(sizes), "buffers only grow"
    # The same tensors, rewired in place: only the wiring differs.
    made = chain(64)
    allocator.close()
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph)
    last, first = made.outputs[0], made.nodes()[0]
    last.contents.src[1] = first
    assert allocator.alloc(made.graph)
    assert all(apart(first, t) for t in made.nodes()[1:-1]), "the first result is read by the last node"
    served = hooked.served()
    assert served["failed"] == 0


def the_same_graph_is_not_planned_twice() -> None:
    allocator = Allocator(ours)
    for seed in (1, 2, 1, 2):
        made = random_graph(seed)
        assert allocator.alloc(made.graph)
        made.close()
    served = hooked.served()
    assert served["planned"] == 2 and served["equal"] + served["same"] + served["replayed"] == 2, served
    made = random_graph(5)
    hooked.clear_counters()
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    addresses = [span(t) for t in made.nodes()]
    # A second time everything has memory, and keeps it.
    assert allocator.alloc(made.graph) and [span(t) for t in made.nodes()] == addresses
    assert hooked.served()["same"] == 1
    assert hooked.counters()["ggml_gallocr_alloc_graph"][0] == 2


def wired_alike() -> None:
    """One plan serves graphs of one wiring in many shapes; a single difference in wiring makes another graph."""
    backend = g.backend_cpu_init()

    def swapped(made: Context) -> None:
        """The last difference, the other way round: the same tensors, read in another order."""
        nodes = [t for t in made.nodes() if t.contents.op == subtracts and not same(*t.contents.src[:2])]
        if nodes:
            src = nodes[-1].contents.src
            src[0], src[1] = src[1], src[0]

    def same(a, b) -> bool:
        return c.addressof(a.contents) == c.addressof(b.contents)

    def shown(made: Context) -> None:
        """A result in the middle that is wanted afterwards."""
        made.outputs.append(next(t for t in made.nodes()[8:] if not t.contents.view_src))
        made.outputs[-1].contents.flags |= OUTPUT

    def moved(made: Context) -> None:
        """A view of other rows of an input."""
        view = next((t for t in made.nodes() if t.contents.view_src and t.contents.view_offs == 0
                     and t.contents.view_src.contents.ne[1] > t.contents.ne[1]), None)
        if view:
            view.contents.view_offs = view.contents.nb[1] * view.contents.ne[1]

    sample = Context()
    x = sample.leaf(4)
    subtracts = sample.sub(x, x).contents.op
    for seed in range(12):
        hooked.clear_counters()
        allocator = Allocator(ours)
        kept = [random_graph(seed, rows=8)]
        assert allocator.reserve(kept[0].graph)
        ways = [(8, None), (8, swapped), (8, None), (8, shown), (8, moved), (4, None), (1, None), (4, None), (8, None),
                (2, moved), (1, shown), (2, swapped), (16, None), (2, None)]
        for rows, change in ways:
            made, plain, stock = random_graph(seed, rows=rows), random_graph(seed, rows=rows), Allocator(base)
            if change is not None:
                change(made)
                change(plain)
            assert allocator.alloc(made.graph) and stock.alloc(plain.graph)
            assert made.run(backend, seed) == plain.run(backend, seed), (seed, rows, change)
            assert verified() == 1
            stock.close()
            plain.close()
            kept.append(made)
        for made in kept:
            made.close()
        served = hooked.served()
        assert served["same"] + served["equal"] >= 2 and served["replayed"] >= 1 and served["failed"] == 0, served
        assert served["planned"] < len(ways) + 1, served
        allocator.close()
    g.backend_free(backend)


def refused_memory_is_false() -> None:
    backend = g.backend_cpu_init()
    fake = fake_device(room=64)
    made = random_graph(1)
    allocator = Allocator(ours, fake.buft)
    assert not allocator.reserve(made.graph) and allocator.size() == 0
    assert "fake" in hooked.last_error() and "bytes" in hooked.last_error()
    assert not allocator.alloc(made.graph)
    assert all(not t.contents.data for t in made.nodes())
    fake.room = 1 << 30
    assert allocator.alloc(made.graph)
    made.run(backend)
    # Growing fails: the old buffer is gone, as with ggml, and is allocated again when there is memory.
    fake.room = allocator.size()
    larger = random_graph(1, rows=80)
    assert not allocator.alloc(larger.graph)
    small = random_graph(1)
    assert allocator.alloc(small.graph) and verified() == 1
    small.run(backend)


def graphs_that_are_none() -> None:
    """Empty ones, tensors of no bytes, and a cycle."""
    allocator = Allocator(ours)
    empty = Context()
    assert allocator.reserve(empty.graph) and allocator.alloc(empty.graph)
    nothing = Context()
    x = nothing.leaf(0, 4)
    nothing.output(nothing.scale(x, 2.0))
    assert allocator.reserve(nothing.graph) and allocator.alloc(nothing.graph)
    circle = Context()
    x = circle.leaf(16)
    a = circle.scale(x, 2.0)
    b = circle.output(circle.scale(a, 2.0))
    a.contents.src[0] = b
    assert not allocator.reserve(circle.graph) and not allocator.alloc(circle.graph)
    assert hooked.last_error()
    made = random_graph(2)
    assert allocator.alloc(made.graph)


def fused_products_read_their_sources() -> None:
    """A norm and its product are computed as one, row by row: the product must not lie over other rows."""
    backend = g.backend_cpu_init()
    for threads in (1, 4):
        g.backend_cpu_set_n_threads(backend, threads)
        for rows in (8, 33):
            def make(rows=rows):
                made = Context()
                x, w = made.leaf(64, rows), made.leaf(64, 64)
                weight = made.leaf(64)
                both_ = made.mul_mat(w, made.leaf(64, rows * 2))
                part = made.view_2d(both_, 64, rows, 256, 256 * (rows // 2))
                normed = made.mul(made.rms_norm(part, 1e-5), weight)
                more = made.mul(made.rms_norm(made.add(normed, x), 1e-5), normed)
                made.output(made.mul(made.rms_norm(made.mul_mat(w, more), 1e-5), weight))
                return made

            want, got, _, _ = both(make, backend)
            assert got == want, (threads, rows)


def fused(rows: int, wide: int, at: int = 0, buffer: int | None = None):
    """(graph, what a norm reads, the norm, its product): the first is part of an input, which is dead afterwards, and
    the product has `wide` times the rows of the norm; another node may take over a view of row `at` of an input."""
    made = Context()
    x, y = made.leaf(64, 2 * rows), made.leaf(64, rows * wide)
    part = made.view_2d(x, 64, rows, 256, 256 * (rows // 2))
    norm = made.rms_norm(part, 1e-5)
    if buffer is not None:
        g.backend_tensor_alloc(buffer, norm, g.backend_buffer_get_base(buffer))
    product = made.mul(y, norm)
    g.build_forward_expand(made.graph, made.add(product, y))
    halved = made.scale(made.view_2d(made.leaf(64, 16), 64, 4, 256, 256 * at), 0.5)
    made.output(made.mul(halved, halved))
    made.output(made.nodes()[3])
    return made, part, norm, product


def fused_products_of_what_has_memory() -> None:
    """A norm that the client has allocated: its product cannot reuse it in place, and must not overlap the norm's
    source."""
    backend = g.backend_cpu_init()
    g.backend_cpu_set_n_threads(backend, 4)
    buffer = g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 1 << 16)
    found = []
    for library in (base, ours):
        allocator = Allocator(library)
        made, part, _norm, product = fused(8, 1, buffer=buffer)
        assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
        found.append(made.run(backend))
        if library is ours:
            assert apart(part, product) or span(part) == span(product)
            assert verified() == 1
    assert found[0] == found[1]


def replayed_plans_let_nothing_fused_overlap() -> None:
    """A larger graph's plan is not replayed for a graph whose shapes permit fusing nodes that the plan lets overlap."""
    backend = g.backend_cpu_init()
    g.backend_cpu_set_n_threads(backend, 4)
    for at in (0, 2):
        hooked.clear_counters()
        kind = fake_device()  # which no allocator has used
        allocator, stock = Allocator(ours, kind.buft), Allocator(base)
        larger, smaller, plain = fused(8, 2), fused(8, 1, at), fused(8, 1, at)
        assert allocator.reserve(larger[0].graph) and allocator.alloc(smaller[0].graph)
        _made, part, _norm, product = smaller
        assert apart(part, product) or span(part) == span(product), at
        assert stock.alloc(plain[0].graph)
        assert smaller[0].run(backend) == plain[0].run(backend), at
        assert hooked.served()["planned"] == 2 and verified() == 1
        # A plan without such an overlap is replayed.
        again = fused(8, 2)
        assert allocator.alloc(again[0].graph) and hooked.served()["planned"] == 2
        allocator.close()


def shown_plans_let_nothing_fused_overlap() -> None:
    """A replayed plan was shown by plans(): later graphs are checked for overlaps of fused nodes as before."""
    backend = g.backend_cpu_init()
    g.backend_cpu_set_n_threads(backend, 4)
    kind = fake_device()
    allocator, stock = Allocator(ours, kind.buft), Allocator(base)
    larger, taken, smaller, plain = fused(8, 2), fused(6, 2), fused(6, 1), fused(6, 1)
    assert allocator.reserve(larger[0].graph) and allocator.alloc(taken[0].graph)
    assert hooked.served()["replayed"] == 1 and verified() == 1
    names = [t.name for t in hooked.plans()[0].graph.tensors]
    assert all(name in names for name in ("leaf 0", "leaf 1", "leaf 2")), names
    assert allocator.alloc(smaller[0].graph) and stock.alloc(plain[0].graph)
    _made, part, _norm, product = smaller
    assert apart(part, product) or span(part) == span(product)
    assert smaller[0].run(backend) == plain[0].run(backend) and verified() == 1


def two_threads() -> None:
    wrong: list = []

    def work(first: int) -> None:
        try:
            backend = g.backend_cpu_init()
            allocator = Allocator(ours)
            for seed in range(first, first + 12):
                made, plain, stock = random_graph(seed), random_graph(seed), Allocator(base)
                assert allocator.alloc(made.graph) and stock.alloc(plain.graph)
                assert made.run(backend, seed) == plain.run(backend, seed), seed
                stock.close()
                made.close()
                plain.close()
            allocator.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        verified()
    assert not wrong, wrong


def plans_explain_themselves() -> None:
    made = random_graph(4)
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph)
    (plan,) = hooked.plans()
    assert plan.buffer_sizes == (allocator.size(),)
    named = {t.name: t for t in plan.graph.tensors}
    assert "leaf 0" in named and str(allocator.size())[:2] in str(plan)
    assert "leaf 0" in plan.explain(named["leaf 0"])
    assert "digraph" in plan.to_dot()
    assert allocator.alloc(made.graph)
    (plan,) = hooked.plans()
    start = min(t.contents.data for t in (*made.nodes(), *made.leafs) if t.contents.data)
    for t in made.leafs:
        if t.contents.data:
            assert plan.offset_of(plan.graph.tensors[[x.name for x in plan.graph.tensors].index(
                t.contents.name.decode())]) == t.contents.data - start
    allocator.close()
    assert hooked.plans() == ()


def ggml_s_own_scheduler_calls_us() -> None:
    hooked.check()
    before = hooked.served()["allocators"]
    backend = g.backend_cpu_init()
    new = base.ggml_backend_sched_new
    new.restype, new.argtypes = c.c_void_p, [c.POINTER(c.c_void_p), c.c_void_p, c.c_int, c.c_size_t, c.c_bool, c.c_bool]
    scheduler = new(c.byref(c.c_void_p(backend)), None, 1, 2048, False, True)
    assert hooked.served()["allocators"] == before + 1
    made, plain, stock = random_graph(6), random_graph(6), Allocator(base)
    assert stock.alloc(plain.graph)
    want = plain.run(backend)
    alloc = base.ggml_backend_sched_alloc_graph
    alloc.restype, alloc.argtypes = c.c_bool, [c.c_void_p, c.c_void_p]
    assert alloc(scheduler, made.graph)
    assert verified() >= 1
    assert made.run(backend) == want
    base.ggml_backend_sched_free.argtypes = [c.c_void_p]
    base.ggml_backend_sched_free(scheduler)


def passed_through() -> None:
    """Calls of ggml's own allocator pass through the hook, which counts them."""
    backend = g.backend_cpu_init()
    hook().pass_through(True)
    made = random_graph(7)
    allocator = Allocator(ours)
    assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
    made.run(backend)
    assert hooked.served()["stock"] == 1 and allocator.size() > 0 and hooked.plans() == ()
    assert read(made.outputs[0])
    allocator.close()


def many_types() -> None:
    """An allocator of more buffer types than ours serves is ggml's own; a type counts once."""
    backend, made = g.backend_cpu_init(), random_graph(7)
    fakes = [fake_device() for _ in range(17)]
    for bufts, stock in ([fake.buft for fake in fakes], 1), ([fake.buft for fake in fakes[:16]] * 2, 0):
        hook().clear_counters()
        allocator = Allocator(ours, *bufts)
        assert hooked.served()["stock"] == stock and hooked.served()["allocators"] == 1
        made = random_graph(7)
        assert allocator.reserve(made.graph) and allocator.alloc(made.graph)
        made.run(backend)
        assert read(made.outputs[0]) and allocator.size() > 0
        allocator.close()
    g.backend_free(backend)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("done")
