"""Matrix products of the same activations: they share the converted columns and one call where that changes nothing.

Each graph is computed by calls of all its nodes, and compared bit by bit with each node computed by calls of its own.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from op_results import place, random, raw, set_values

import ggml_sched as gs
from ggml_sched._graph import bind_resident
from ggml_sched.backends.cpu._kernels import CallList, Pool, WorkMemory

RNG = np.random.default_rng(31)
K, M = 256, 96


class Products:
    """Tensors of one context, and the values of its leafs."""

    def __init__(self, columns: int = 1) -> None:
        self.ctx = gs.Context()
        self.values: dict[gs.Tensor, np.ndarray] = {}
        self.x = self.leaf("f32", K, columns, name="x")

    def leaf(self, type: str, *ne: int, name: str = "") -> gs.Tensor:
        tensor = self.ctx.tensor(type, ne, name)
        self.values[tensor] = random(RNG, *ne)
        return tensor

    def times(self, x: gs.Tensor, type: str = "q4_0") -> gs.Tensor:
        """x times weights of its own."""
        return self.ctx.mul_mat(self.leaf(type, x.ne[0], M), x)

    def n_calls(self, nodes: Sequence[gs.Tensor]) -> int:
        """`n_calls` of nodes whose tensors all have memory of their own."""
        with gs.CpuBackend(1) as backend:
            place(self.ctx, backend)
            set_values(self.values)
            return n_calls(nodes)


def calls_of(nodes: Sequence[gs.Tensor]) -> CallList:
    calls = CallList("CPU", nodes, lambda buffer: buffer.memory, WorkMemory("CPU"))
    assert calls.add(0, len(nodes)) == len(nodes)
    return calls


def n_calls(nodes: Sequence[gs.Tensor], n_threads: int = 3) -> int:
    """How many calls compute these nodes together.  They leave what calls of each node alone leave in all of them."""
    held = {buffer: bytes(buffer.memory) for buffer in {node.buffer for node in nodes}}

    def results(lists: list[CallList]) -> list[bytes]:
        pool = Pool(n_threads)
        for buffer, before in held.items():
            buffer.memory[:] = np.frombuffer(before, np.uint8)
        for calls in lists:
            calls.run(pool, 0, calls.n_calls)
        pool.close()
        return [bytes(buffer.memory) for buffer in held]

    together = calls_of(nodes)
    assert results([together]) == results([calls_of([node]) for node in nodes])
    return together.n_calls


def test_query_key_and_value_are_one_conversion_and_one_call(isa):
    for columns in (1, 4, 40):
        p = Products(columns)
        positions = p.ctx.tensor("i32", (columns,))
        p.values[positions] = np.arange(columns, dtype=np.int32)
        q = p.times(p.x)
        turned = p.ctx.rope(p.ctx.reshape_3d(q, 32, 3, columns), positions, 32)
        v, k = p.times(p.x), p.times(p.x)
        assert p.n_calls([q, turned, v, k]) == 2 + 2      # rope has a call for its table


@pytest.mark.parametrize(("first", "second", "calls"), [
    ("f32", "bf16", 2), ("q4_0", "q4_0", 2), ("q4_K", "q5_K", 2), ("q4_0", "f16", 4), ("q4_K", "q6_K", 4),
    ("q4_0", "q4_1", 4), ("q4_1", "q2_K", 4), ("q4_K", "q2_K", 4), ("q2_K", "q3_K", 4)])
def test_types_share_columns_that_are_converted_alike(isa, first, second, calls):
    for columns in (1, 9):
        p = Products(columns)
        nodes = [p.times(p.x, first), p.times(p.x, second)]
        assert p.n_calls(nodes) == calls


def test_minima_keep_columns_apart_where_no_type_has_an_offset(isa):
    """AVX2 multiplies q8_0 without an offset, as it does all types with minima."""
    p = Products()
    nodes = [p.times(p.x, type) for type in ("q8_0", "q4_1")]
    assert p.n_calls(nodes) == 4


def test_offsets_keep_columns_apart_where_kernels_multiply_unsigned_bytes(isa):
    p = Products()
    nodes = [p.times(p.x, type) for type in ("q4_0", "q5_0")]
    assert p.n_calls(nodes) == (4 if isa.startswith("avx") else 2)


@pytest.mark.parametrize("type", ["f32", "q4_0"])
def test_matrices_that_several_share_group_columns_otherwise(isa, type):
    for ne in ((1, 2), (2, 1)):
        p = Products()
        x = p.leaf("f32", K, 3, *ne)
        nodes = [p.ctx.mul_mat(p.leaf(type, K, M, *own), x) for own in (ne, (1, 1))]
        assert p.n_calls(nodes) == 4


def test_types_whose_kernels_order_elements_differently_share_nothing(isa):
    """On x86-64 q4_1 takes the first and the last 16 elements of several steps together, q4_K does not."""
    for columns in (1, 9):
        p = Products(columns)
        nodes = [p.times(p.x, "q4_1"), p.times(p.x, "q4_K")]
        assert p.n_calls(nodes) == (4 if isa.startswith("avx") else 2)


def test_other_activations_have_a_conversion_of_their_own():
    p = Products()
    y, matrix = p.leaf("f32", K, 1), p.leaf("f32", K, 4)
    views = [p.ctx.view_2d(matrix, K, 1, matrix.nb[1], i * matrix.nb[1]) for i in (0, 1)]
    with gs.CpuBackend(1) as backend:
        nodes = [p.times(a) for a in (p.x, y, *views, p.x)]
        place(p.ctx, backend)
        set_values(p.values)
        assert n_calls(nodes) == 2 * len(nodes)


def test_activations_of_the_same_address_differ_by_type_extents_and_strides():
    p = Products()
    matrix, halves, brains = p.leaf("f32", K, 4), p.leaf("f16", K, 2), p.ctx.tensor("bf16", (K, 2))
    views = [p.ctx.view_3d(matrix, K, n, 1, step * matrix.nb[1], matrix.nb[2]) for n, step in ((3, 1), (2, 1), (2, 2))]
    nodes = [p.times(a) for a in (halves, brains, *views)]
    with gs.CpuBackend(1) as backend:
        buffer = backend.alloc_buffer(1 << 20)
        at = 0
        for tensor in p.ctx.tensors:
            if tensor.view_src is None and tensor is not brains:
                bind_resident(tensor, buffer, at)
                at += -(-tensor.nbytes // 64) * 64
        bind_resident(brains, buffer, halves.offset)
        set_values(p.values)
        assert n_calls(nodes) == 2 * len(nodes)


def between(p: Products, make: Callable[[Products], tuple[gs.Tensor, ...]],
            shared: dict[str, str] | None = None) -> int:
    """The calls of two products of x with other nodes between them; `shared`: names of tensors that have the memory of
    another one."""
    first = p.ctx.set_name(p.times(p.x), "first")
    nodes = make(p)
    nodes = [first, *nodes[:-1], p.ctx.set_name(nodes[-1], "second")]
    with gs.CpuBackend(1) as backend:
        shared = shared or {}
        places: dict[str, tuple[gs.Buffer, int]] = {}
        buffer = backend.alloc_buffer(1 << 20)
        at = 0
        for tensor in p.ctx.tensors:
            if tensor.view_src is None and tensor.name not in shared:
                bind_resident(tensor, buffer, at)
                places[tensor.name] = buffer, at
                at += -(-tensor.nbytes // 64) * 64
        for tensor in p.ctx.tensors:
            if tensor.name in shared:
                bind_resident(tensor, *places[shared[tensor.name]])
        set_values(p.values)
        return n_calls([node for node in nodes if node.computes])


def test_nodes_that_touch_nothing_of_it_let_a_product_be_earlier():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        return p.ctx.neg(p.leaf("f32", M, name="other")), p.times(p.x)

    assert between(Products(), make) == 2 + 1


def test_a_product_is_not_computed_before_its_activations_change():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        return p.ctx.set_name(p.ctx.scale(p.x, 2.0), "doubled"), p.times(p.x)

    assert between(Products(), make, {"doubled": "x"}) == 2 + 1 + 2


def test_a_product_is_not_computed_before_its_weights_are():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        w = p.ctx.neg(p.leaf("f32", K, M))
        return w, p.ctx.mul_mat(w, p.x)

    p = Products()
    p.times = lambda x, type="f32": p.ctx.mul_mat(p.leaf(type, x.ne[0], M), x)      # type: ignore[method-assign]
    assert between(p, make) == 2 + 1 + 1


def test_a_product_does_not_overwrite_what_is_read_before_it():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        return p.ctx.neg(p.leaf("f32", M, name="dead")), p.times(p.x)

    assert between(Products(), make, {"second": "dead"}) == 2 + 1 + 1


def test_a_product_is_not_overwritten_by_what_was_to_be_computed_before_it():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        dead = p.ctx.set_name(p.ctx.neg(p.leaf("f32", M)), "dead")
        return dead, p.ctx.sqr(dead), p.times(p.x)

    assert between(Products(), make, {"second": "dead"}) == 2 + 2 + 1


def test_a_product_is_not_computed_with_one_whose_memory_it_has():
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        return p.ctx.set_name(p.ctx.neg(p.ctx.tensors[-1]), "kept"), p.times(p.x)

    assert between(Products(), make, {"second": "first"}) == 2 + 1 + 1


def test_a_product_waits_for_all_that_one_call_computes():
    """The third product has the memory of the second, which an earlier call computes with the first."""
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        second = p.ctx.set_name(p.times(p.x), "middle")
        return second, p.times(p.x)

    assert between(Products(), make, {"second": "middle"}) == 2 + 1


def test_a_product_of_a_copy_follows_the_copy():
    """A result that overlaps its own activations is computed from a copy of them."""
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        return p.times(p.x), p.times(p.x)

    assert between(Products(), make, {"second": "x"}) == 2 + 3


def test_a_product_into_a_copy_of_its_result_follows_the_copy():
    """A result that is not aligned is computed elsewhere, where its memory's bytes are copied first."""
    p = Products()
    nodes = [p.times(p.x), p.times(p.x), p.times(p.x)]
    with gs.CpuBackend(1) as backend:
        buffer = backend.alloc_buffer(sum(tensor.nbytes + 64 for tensor in p.ctx.tensors))
        at = 0
        for tensor in p.ctx.tensors:
            bind_resident(tensor, buffer, at + 2 * (tensor is nodes[1]))
            at += -(-tensor.nbytes // 64) * 64 + 64
        set_values(p.values)
        assert n_calls(nodes) == 2 + 4      # the third product is computed with the second


def test_attention_between_products_overwrites_the_converted_columns(isa):
    def make(p: Products) -> tuple[gs.Tensor, ...]:
        q, k, v = (p.leaf("f32", 32, 1, 2), *(p.leaf("f16", 32, 40, 2) for _ in range(2)))
        return p.ctx.flash_attn_ext(q, k, v, None, 0.2), p.times(p.x)

    assert between(Products(), make) == 2 + 1 + 2


def test_many_nodes_between_products_keep_them_apart():
    """So that the nodes examined for each product are few."""
    def make(p: Products, n: int) -> tuple[gs.Tensor, ...]:
        return *(p.ctx.neg(p.leaf("f32", 8)) for _ in range(n)), p.times(p.x)

    assert between(Products(), lambda p: make(p, 8)) == 2 + 8
    assert between(Products(), lambda p: make(p, 40)) == 2 + 40 + 1


def experts(p: Products, ids: gs.Tensor, type: str = "q4_0", n: int = 5) -> gs.Tensor:
    x = p.ctx.reshape_3d(p.x, K, 1, p.x.ne[1])
    return p.ctx.mul_mat_id(p.leaf(type, K, M, n), x, ids)


@pytest.mark.parametrize("n_tokens", [1, 30])
def test_experts_are_sorted_once_for_the_same_ids(isa, n_tokens):
    p = Products(n_tokens)
    ids, others = (p.ctx.tensor("i32", (2, n_tokens)) for _ in range(2))
    nodes = [experts(p, ids), experts(p, ids), experts(p, others)]
    p.values[ids] = RNG.integers(0, 5, (n_tokens, 2)).astype(np.int32)
    p.values[others] = RNG.integers(0, 5, (n_tokens, 2)).astype(np.int32)
    assert p.n_calls(nodes[:2]) == 3
    assert p.n_calls(nodes) == 6


def test_ids_are_checked_for_each_number_of_experts():
    p = Products()
    ids = p.ctx.tensor("i32", (2, 1))
    nodes = [experts(p, ids, n=7), p.ctx.set_name(experts(p, ids, n=5), "fewer")]
    with gs.CpuBackend(1) as backend:
        place(p.ctx, backend)
        set_values(p.values)
        ids.set(np.int32([[1, 6]]))
        calls = calls_of(nodes)
        with pytest.raises(gs.BackendError, match="'fewer'.*id 6 .* 5 rows"):
            calls.run(Pool(1), 0, calls.n_calls)


def test_products_of_all_experts_and_of_chosen_ones_share_no_columns():
    p = Products(2)
    x = p.ctx.reshape_3d(p.x, K, 1, 2)
    weights, ids = p.leaf("q4_0", K, M, 2), p.ctx.tensor("i32", (1, 2))
    p.values[ids] = np.int32([[1], [0]])
    for nodes in ([p.ctx.mul_mat(weights, x), p.ctx.mul_mat_id(weights, x, ids)],
                  [p.ctx.mul_mat_id(weights, x, ids), p.ctx.mul_mat(weights, x)]):
        assert p.n_calls(nodes) == 2 + 3


def test_experts_are_sorted_again_where_a_node_writes_the_ids():
    p = Products(4)
    source, ids = p.ctx.tensor("i32", (2, 4)), p.ctx.tensor("i32", (2, 4))
    nodes = [experts(p, ids), p.ctx.cpy(source, ids), experts(p, ids)]
    p.values[ids] = np.zeros((4, 2), np.int32)
    p.values[source] = RNG.integers(0, 5, (4, 2)).astype(np.int32)
    assert p.n_calls(nodes) == 3 + 1 + 3


def test_a_wrong_id_of_experts_that_share_a_call_leaves_the_results(ctx):
    p = Products(2)
    ids = p.ctx.tensor("i32", (2, 2), "ids")
    nodes = [p.ctx.set_name(experts(p, ids), name) for name in ("gate", "up")]
    with gs.CpuBackend(2) as backend:
        place(p.ctx, backend)
        set_values(p.values)
        ids.set(np.int32([[0, 1], [7, 2]]))
        before = [raw(node) for node in nodes]
        plan = backend.graph_plan_create(gs.Graph(*nodes))
        with pytest.raises(gs.BackendError, match="'gate'.*id 7 "):
            backend.graph_plan_compute(plan)
        assert [raw(node) for node in nodes] == before
        ids.set(np.int32([[0, 1], [3, 2]]))
        backend.graph_plan_compute(plan)
        assert all(raw(node) != was for node, was in zip(nodes, before, strict=True))


def test_products_are_shared_by_all_threads_in_parts_of_equal_size():
    """Four parts each or a multiple of four, whatever the number of rows: no thread waits for the last one."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (768, 1))
    nodes = [ctx.mul_mat(ctx.tensor("q4_0", (768, m)), x) for m in (768, 256, 192)]
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        calls = calls_of(nodes)
        assert calls.n_calls == 2 and calls.n_parts(1) == 8 + 4 + 4


def test_parts_of_experts_that_many_tokens_may_choose_are_whole_panels(isa):
    """An expert that more tokens choose than expected repacks its rows a panel at a time."""
    ctx = gs.Context()
    weights = ctx.tensor("q4_0", (2048, 51, 8))
    nodes = [ctx.mul_mat_id(weights, ctx.tensor("f32", (2048, 1, n)), ctx.tensor("i32", (1, n))) for n in (1, 13)]
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        calls = calls_of(nodes)
        assert [calls.n_parts(i) for i in (2, 5)] == [3, 8 * 2]     # of 17 and of 32 rows


def test_parts_of_a_few_columns_have_rows_for_whole_vectors(isa):
    """Up to sixteen rows are multiplied side by side, in parts of sixteen rows as fast as in parts of five."""
    ctx = gs.Context()
    nodes = [ctx.mul_mat(ctx.tensor(type, (16384, 20)), ctx.tensor("f32", (16384, n)))
             for type, n in (("q4_0", 1), ("q4_0", 3), ("q4_K", 1), ("f32", 1))]
    with gs.CpuBackend(1) as backend:
        place(ctx, backend)
        calls = calls_of(nodes)
        # Of 5 and of 16 rows; one column of K-quants has rows side by side with AVX-512.
        assert [calls.n_parts(i) for i in (1, 3, 5, 7)] == [4, 2, 2 if isa == "avx512" else 4, 20]
