"""Allocators and seed policy agree with a second, slow implementation on random sequences and graphs."""

from dataclasses import replace

import pytest
import reference_first_generation as reference
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import Built, Recipe, quick, recipes

import ggml_sched as gs

ALIGNMENTS = st.sampled_from([1, 16, 32, 64])


# -- one tensor at a time ---------------------------------------------------------------


@quick(150)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=80),
       st.sampled_from([None, 700, 4096]), ALIGNMENTS)
def test_alloc_and_free_sequences(actions, capacity, alignment):
    """Free blocks, addresses, failures and high-water mark after every step."""
    ctx = gs.Context()
    if capacity is None:
        ours = gs.TensorAllocator.measure(alignment)
    else:
        ours = gs.TensorAllocator.from_backend(gs.DryBackend("dry", alignment), capacity)
    theirs = reference.Arena(*(() if capacity is None else (capacity,)))
    held = []
    for take, number in actions:
        if take or not held:
            t = ctx.tensor("i8", number * 7 + 1)
            size = reference.rounded(t.nbytes, alignment)
            try:
                address = theirs.alloc(size)
            except reference.DoesNotFit:
                with pytest.raises(gs.OutOfMemory) as failed:
                    ours.alloc(t)
                assert failed.value.needed == size
                assert failed.value.available == max([block[1] for block in theirs.free], default=0)
                assert t.buffer is None
            else:
                assert ours.alloc(t) == address == t.offset
                held.append((t, address, size))
        else:
            t, address, size = held.pop(number % len(held))
            theirs.give(address, size)
            ours.free(t)
            assert t.buffer is None
        assert [list(block) for block in ours.free_blocks] == theirs.free
        assert ours.max_size == theirs.max_size


# -- graphs in one arena ------------------------------------------------------------------


def reference_of(graph: gs.Graph) -> tuple[dict, list]:
    nodes = reference.from_tensors(graph.tensors)
    return nodes, [nodes[t] for t in graph.nodes]


def give_residents(built: Built, backends) -> None:
    for ctx, backend in zip(built.homes, backends, strict=True):
        backend.alloc_tensors(ctx)


def check_gallocr(recipe: Recipe, alignment: int, parse_seq: list[int] | None) -> None:
    built = Built(recipe, flag_inputs=recipe.leafs[0][1] % 2 == 0, keeps=False)
    graph = built.graph
    give_residents(built, [gs.DryBackend("elsewhere")])
    expected, order = reference_of(graph)
    for t, node in expected.items():
        if t.view_src is None and t not in built.residents:
            node.home, node.size = 0, reference.rounded(t.nbytes, alignment)
    arena = reference.Arena()
    reference.allocate_graph(order, [arena], parse_seq)
    allocator = gs.GraphAllocator()
    allocator.set_parse_seq(parse_seq)
    with gs.TensorAllocator.measure(alignment) as tallocr:
        assert allocator.alloc_graph(tallocr, graph) == arena.max_size
        assert [list(block) for block in tallocr.free_blocks] == arena.free
    for t in graph.tensors:
        node = expected[t]
        assert allocator.offset_of(t) == node.address
        root = allocator.inplace_root(t)
        assert (root and expected[root]) is node.shares
    # And again, in a buffer that has exactly that room.
    with gs.TensorAllocator.from_backend(gs.DryBackend("dry", alignment), arena.max_size) as tallocr:
        assert allocator.alloc_graph(tallocr, graph) == arena.max_size
        for t in graph.tensors:
            assert allocator.offset_of(t) == expected[t].address
            if expected[t].address is not None:
                assert t.buffer is tallocr.buffer and t.offset == expected[t].address


@quick(150)
@given(recipes(40), ALIGNMENTS)
def test_graph_allocation(recipe, alignment):
    check_gallocr(recipe, alignment, None)


@quick(75)
@given(recipes(20), ALIGNMENTS, st.randoms(use_true_random=False))
def test_graph_allocation_along_a_parse_sequence(recipe, alignment, random):
    """Barriers at random places; the last may be missing, and then the last nodes free nothing."""
    seq: list[int] = []
    for i in range(len(Built(recipe, keeps=False).graph)):
        seq.append(i)
        if random.random() < 0.4:
            seq.append(-1)
    check_gallocr(recipe, alignment, seq)


@quick(75)
@given(recipes(30), st.lists(ALIGNMENTS, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_graph_allocation_from_a_table_of_allocators(recipe, alignments, random):
    built = Built(recipe, keeps=False)
    graph = built.graph
    give_residents(built, [gs.DryBackend("elsewhere")])
    expected, order = reference_of(graph)
    tallocrs = [gs.TensorAllocator.measure(alignment) for alignment in alignments]
    arenas = [reference.Arena() for _ in alignments]
    table: dict = dict.fromkeys(graph.tensors)
    for t, node in expected.items():
        if t.view_src is None and t not in built.residents:
            node.home = random.randrange(len(arenas))
            node.size = reference.rounded(t.nbytes, alignments[node.home])
            table[t] = tallocrs[node.home]
    reference.allocate_graph(order, arenas)
    allocator = gs.GraphAllocator()
    allocator.alloc_graph_n(graph, table if random.random() < 0.5 else [table[t] for t in graph.tensors])
    assert [tallocr.max_size for tallocr in tallocrs] == [arena.max_size for arena in arenas]
    assert [allocator.offset_of(t) for t in graph.tensors] == [expected[t].address for t in graph.tensors]


# -- several backends -----------------------------------------------------------------------


@quick(100)
@given(recipes(40), st.integers(1, 4), st.lists(ALIGNMENTS, min_size=4, max_size=4))
def test_seed_policy(recipe, n_backends, alignments):
    """Assignment, splits, copies, offsets and buffer sizes over one to four backends."""
    # Mostly residents: where nothing decides, the first generation is no reference.
    recipe = replace(recipe, leafs=tuple((s, k if k % 4 == 0 else k // 3 * 3 + 2) for s, k in recipe.leafs))
    alignments = alignments[:n_backends]
    backends = [gs.DryBackend(f"B{i}", alignment) for i, alignment in enumerate(alignments)]
    built = Built(recipe, n_backends, flag_inputs=recipe.leafs[0][1] % 2 == 0, keeps=False)
    graph = built.graph
    give_residents(built, backends)
    expected, order = reference_of(graph)
    for t in built.residents:
        if t in expected:
            expected[t].resident = backends.index(t.backend)
    try:
        leafs = [expected[t] for t in graph.leafs]
        where, splits, known, arenas = reference.schedule(leafs, order, alignments)
    except reference.Undefined:
        assume(False)
    with gs.Scheduler(backends, policy="seed") as sched:
        plan = sched.plan(graph)
    for t in graph.tensors:
        backend = where[expected[t]]        # None: a leaf that nothing uses
        assert plan.backend_of(t) is (None if backend is None else backends[backend])
        assert plan.offset_of(t) == expected[t].address
    assert plan.buffer_sizes == tuple(arena.max_size for arena in arenas)
    ours = [(s.backend, s.start, s.stop, [expected[t] for t in s.inputs]) for s in plan.splits]
    assert ours == [(backends[s.backend], s.start, s.stop, s.inputs) for s in splits]
    assert plan.copy_bytes == sum(s.nbytes for part in splits for s in part.inputs)
    copies = {expected[graph.tensors[i]]: i for i in range(len(graph.tensors))}
    at = {(copies[s], backend): copy.address for (s, backend), copy in known.items()}
    data = plan.data
    ours_at = {like: data.offset(data.n_tensors + c) for c, like in enumerate(data.copies)}
    assert ours_at == at
