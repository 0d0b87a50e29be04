"""Facts of nodes: bytes and operations by hand, for each rule; which tensors a price depends on."""

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.experts import Bank, Routing, Visit, policy_named, replay
from ggml_sched.placement.facts import expected_reads, facts


def resident(ctx, kind, type_, *ne):
    """A weight or cache ("kv") as graph files describe them, without memory."""
    like = ctx.tensor(type_, ne)
    return ctx.restore("NONE", type_, like.ne, like.nb, name=f"{kind} {len(ctx.tensors)}", resident=kind)


@pytest.fixture
def ctx():
    with gs.Context("facts") as made:
        yield made


def of(*ends, fill=1.0):
    return facts(gs.Graph(*ends), fill)


def test_a_product_reads_both_sources_and_writes_its_result(ctx):
    w, x = resident(ctx, "weight", "q4_0", 64, 32), ctx.tensor("f32", (64, 5), input=True)
    found = of(ctx.mul_mat(w, x))
    assert found.nbytes.tolist() == [32 * 64 // 32 * 18 + 64 * 5 * 4 + 32 * 5 * 4]
    assert found.flops.tolist() == [2 * 64 * 32 * 5]
    assert found.kinds == ("q4_0",)
    assert found.residents == ((w,),) and found.activations == ((x,),)


def test_views_are_left_out_and_their_readers_move_their_elements_alone(ctx):
    x = ctx.tensor("f32", (8, 6), input=True)
    end = ctx.relu(ctx.view_2d(x, 8, 3, nb1=32, offset=32))
    found = of(end)
    assert found.nodes == (end,)
    assert found.nbytes.tolist() == [2 * 8 * 3 * 4]
    assert found.activations == ((x,),) and found.kinds == (None,)


def test_a_source_that_is_read_twice_counts_once(ctx):
    x = ctx.tensor("f32", (16,), input=True)
    assert of(ctx.mul(x, x)).nbytes.tolist() == [2 * 64]
    rows = [ctx.view_1d(x, 12, offset) for offset in (0, 16)]
    assert of(ctx.add(*rows)).nbytes.tolist() == [64 + 48], "no more than all of the root"


def test_get_rows_reads_the_rows_that_it_gets(ctx):
    table, ids = resident(ctx, "weight", "q8_0", 64, 1000), ctx.tensor("i32", (3,), input=True)
    found = of(ctx.get_rows(table, ids))
    assert found.nbytes.tolist() == [3 * 68 + 3 * 4 + 3 * 64 * 4]
    assert found.residents == ((table,),)


def test_set_rows_and_cpy_write_rows_and_do_not_read_the_cache(ctx):
    cache, x = resident(ctx, "kv", "f16", 64, 100), ctx.tensor("f32", (64, 3), input=True)
    ids = ctx.tensor("i64", (3,), input=True)
    written = of(ctx.set_rows(cache, x, ids))
    assert written.nbytes.tolist() == [64 * 3 * 4 + 3 * 8 + 64 * 3 * 2]
    assert written.residents == ((cache,),) and written.kinds == (None,)
    copied = of(ctx.cpy(x, ctx.view_2d(cache, 64, 3, nb1=128, offset=128)))
    assert copied.nbytes.tolist() == [64 * 3 * 4 + 64 * 3 * 2]
    assert copied.residents == ((cache,),) and copied.activations == ((x,),)


@pytest.mark.parametrize(("tokens", "share"), [(1, 2 / 8), (2, 1 - .75 ** 2), (500, 1.0)])
def test_products_with_experts_read_those_that_are_expected_to_be_distinct(ctx, tokens, share):
    experts, x = resident(ctx, "weight", "f16", 16, 4, 8), ctx.tensor("f32", (16, 1, tokens), input=True)
    ids = ctx.tensor("i32", (2, tokens), input=True)
    bias = resident(ctx, "weight", "f32", 4, 8)
    product = ctx.mul_mat_id(experts, x, ids)
    found = of(ctx.add_id(product, bias, ids))
    out = 4 * 2 * tokens * 4
    assert np.allclose(found.nbytes, [16 * 4 * 8 * 2 * share + 64 * tokens + 8 * tokens + out,
                                      out + 4 * 8 * 4 * share + 8 * tokens + out])
    assert found.flops.tolist() == [2 * 16 * 4 * 2 * tokens, 2 * 4 * 2 * tokens]
    assert found.kinds == ("f16", "f32")


def attention(ctx, flash):
    """Four queries of 2 heads of 16 over a cache of 100 cells."""
    keys = resident(ctx, "kv", "f16", 32, 100)
    heads = ctx.permute(ctx.view_3d(keys, 16, 2, 100, nb1=32, nb2=64), 0, 2, 1, 3)
    q = ctx.tensor("f32", (16, 4, 2), input=True)
    if not flash:
        return keys, ctx.mul_mat(heads, q)
    values = resident(ctx, "kv", "f16", 32, 100)
    v = ctx.permute(ctx.view_3d(values, 16, 2, 100, nb1=32, nb2=64), 0, 2, 1, 3)
    return keys, ctx.flash_attn_ext(q, heads, v, None, 0.25)


@pytest.mark.parametrize("fill", [1.0, 0.25, 0.0])
def test_attention_reads_the_filled_part_of_a_cache(ctx, fill):
    cache, scores = attention(ctx, flash=False)
    found = of(scores, fill=fill)
    assert found.nbytes.tolist() == [32 * 100 * 2 * fill + 16 * 4 * 2 * 4 + 100 * 4 * 2 * 4]
    assert found.flops.tolist() == [2 * 16 * 100 * 4 * 2 * fill]
    assert found.residents == ((cache,),) and found.kinds == ("attention",)
    _, result = attention(ctx, flash=True)
    found = of(result, fill=fill)
    assert found.nbytes.tolist() == [2 * 32 * 100 * 2 * fill + 16 * 4 * 2 * 4 + 16 * 4 * 2 * 4]
    assert found.flops.tolist() == [2 * (16 + 16) * 100 * 4 * 2 * fill]


def test_a_cache_may_be_the_second_source(ctx):
    cache, x = resident(ctx, "kv", "f16", 16, 100), ctx.tensor("f32", (16, 4), input=True)
    found = of(ctx.mul_mat(x, cache), fill=0.5)
    assert found.nbytes.tolist() == [16 * 4 * 4 + 16 * 100 * 2 * .5 + 4 * 100 * 4] and found.kinds[0].startswith("att")


def test_attention_for_many_tokens_is_a_kind_of_its_own(ctx):
    keys, values = resident(ctx, "kv", "f16", 16, 100), resident(ctx, "kv", "f16", 16, 100)
    kinds = [of(ctx.flash_attn_ext(ctx.tensor("f32", (16, n), input=True), keys, values, None, 1.0)).kinds
             for n in (1, 8, 9, 512)]
    assert kinds == [("attention",)] * 2 + [("attention of prompts",)] * 2


def test_weights_of_products_do_not_depend_on_the_fill(ctx):
    w, x = resident(ctx, "weight", "f16", 8, 8), ctx.tensor("f32", (8,), input=True)
    assert of(ctx.mul_mat(w, x), fill=0.0).nbytes.tolist() == [128 + 32 + 32]


@pytest.mark.parametrize("fill", [-.1, 1.1, float("nan")])
def test_a_fill_that_is_no_part_is_an_error(ctx, fill):
    with pytest.raises(ValueError, match="fill"):
        of(ctx.relu(ctx.tensor("f32", (4,), input=True)), fill=fill)


def test_residents_with_memory_are_found_without_a_file(ctx):
    with gs.Context("weights") as weights, gs.Context("caches") as caches, gs.DryBackend("D") as backend:
        w, cache = weights.tensor("f16", (8, 4)), caches.tensor("f16", (4, 10))
        backend.alloc_tensors(weights)
        backend.alloc_tensors(caches, usage="any")
        x = ctx.tensor("f32", (8, 10), input=True)
        found = of(ctx.cpy(ctx.mul_mat(w, x), cache))
    assert found.residents == ((w,), (cache,)) and found.kinds == ("f16", None)


def test_seconds_are_those_of_a_roofline(ctx):
    w, x = resident(ctx, "weight", "q4_0", 64, 32), ctx.tensor("f32", (64, 5), input=True)
    found = of(ctx.relu(ctx.mul_mat(w, x)))
    nbytes, flops = found.nbytes, found.flops
    slow = gs.Device("A", 1, bandwidth=1e3, flops=1e12, launch=1.0)
    assert np.allclose(found.seconds(slow), nbytes / 1e3 + 1)
    weak = gs.Device("A", 1, bandwidth=1e12, flops=10, launch=2.0)
    assert np.allclose(found.seconds(weak), flops / 10 + 2)
    typed = weak.replace(flops_of={"q4_0": 20}, launch=0)
    assert np.allclose(found.seconds(typed), [flops[0] / 20, flops[1] / 10])


def test_a_graph_without_nodes_takes_no_time(ctx):
    x = ctx.tensor("f32", (4,), input=True)
    assert of(ctx.reshape(x, 2, 2)).seconds(gs.Device("A", 1, 1, 1)).tolist() == []


def dense(*ne):
    ne = (*ne, 1, 1, 1)[:4]
    return ne, tuple(4 * int(np.prod(ne[:k])) for k in range(4))


@pytest.mark.parametrize(("op", "out", "sources", "flops"), [
    ("SOFT_MAX", (8, 3), [(8, 3)], 2 * 24),
    ("OUT_PROD", (6, 4), [(6, 5), (4, 5)], 2 * 6 * 4 * 5),
    ("CONV_2D", (6, 6, 5), [(3, 3, 2, 5), (8, 8, 2)], 2 * 6 * 6 * 5 * 3 * 3 * 2),
    ("CONV_2D_DW", (6, 6, 2), [(3, 3, 1, 2), (8, 8, 2)], 2 * 6 * 6 * 2 * 3 * 3),
    ("CONV_3D", (6, 6, 6, 5), [(3, 3, 3, 10), (8, 8, 8, 2)], 2 * 6 ** 3 * 5 * 27 * 2),
    ("CONV_TRANSPOSE_1D", (10, 5), [(3, 5, 2), (8, 2)], 2 * 8 * 2 * 3 * 5),
    ("CONV_TRANSPOSE_2D", (10, 10, 5), [(3, 3, 5, 2), (8, 8, 2)], 2 * 8 * 8 * 2 * 3 * 3 * 5),
    ("SSM_SCAN", (100,), [(16, 1, 8), (1, 8, 5), (8, 5), (16, 8), (16, 1, 5), (16, 1, 5), (1,)], 6 * 16 * 8 * 5),
    ("RWKV_WKV6", (64,), [(8, 2, 4), (8, 2, 4), (8, 2, 4), (8, 2), (8, 2, 4), (128, 1)], 6 * 8 * 8 * 2 * 4),
])
def test_operations_of_other_ops(ctx, op, out, sources, flops):
    given = [ctx.tensor("f32", ne, input=True) for ne in sources]
    assert of(ctx.restore(op, "f32", *dense(*out), given)).flops.tolist() == [flops]


@pytest.mark.spread("policy", "n_banks n_experts")
@pytest.mark.parametrize("policy", ["lfu", "lru", "mixture"])
@pytest.mark.parametrize(("n_banks", "n_experts", "n_used", "tokens"), [(3, 8, 2, 1), (12, 16, 2, 1), (6, 8, 2, 4),
                                                                        (6, 32, 4, 2)])
def test_replays_of_random_choices_read_what_is_expected(policy, n_banks, n_experts, n_used, tokens):
    rng = np.random.default_rng(0)
    visits = [Visit(k % n_banks, tuple(tuple(rng.choice(n_experts, n_used, replace=False).tolist())
                                       for _ in range(tokens))) for k in range(400 * n_banks)]
    recording = Routing([Bank(f"{k}", n_experts, 1) for k in range(n_banks)], visits)
    distinct = n_experts * (1 - (1 - n_used / n_experts) ** tokens)
    count = n_banks * n_experts
    for part in (0.25, 0.5, 0.75, 0.9):
        n_slots = max(int(part * count), min(n_experts, n_used * tokens))
        expected = len(visits) * expected_reads(distinct, n_slots, count)
        assert replay(recording, policy_named(policy), n_slots).misses == pytest.approx(expected, rel=0.1, abs=count)


def test_more_slots_read_less_and_a_slot_for_each_expert_reads_none():
    reads = [expected_reads(2.5, n, 24) for n in range(2, 25)]
    assert reads == sorted(reads, reverse=True) and reads[0] == 2.5 and reads[-1] == 0
    assert expected_reads(8, 8, 8) == 0 and expected_reads(8, 4, 8) == 8
    # The bound counts so many of the bytes that are in no slot.
    assert all(expected_reads(2.5, n, 24) >= 2.5 * (24 - n) / 24 for n in range(2, 25))
