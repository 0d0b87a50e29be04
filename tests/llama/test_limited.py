"""Models under a limit of memory: the same bits, never more bytes than the limit, and errors that say what suffices."""

import gc
import os
import subprocess
import sys
import tracemalloc

import arch_cases
import numpy as np
import pytest
from ggml_here import IS_HERE, WHY_NOT, backend
from small_llama import MAMBA, SHAPES, SMALL, TOKENS, contents

import ggml_sched as gs
from ggml_sched.llama import limited, load, process_budget, random_llama, write_gguf
from ggml_sched.llama.gguf import Kind
from ggml_sched.llama.synthetic import random_model
from ggml_sched.placement.residency import choose, least_choice
from ggml_sched.planning.program import Fetch

WIDE = random_llama(5, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160)
LARGEST = 1 << 40


def held(model):
    return sum(on.total for on in model.memory().values())


def free_limit(data, **options):
    """(the limit with which a model loads without fetching anything, the bytes of its weights)."""
    with load(data, memory=LARGEST, **options) as model:
        assert model.store is None and model.residency.fetched == ()
        weights = sum(on.weights for on in model.memory().values())
        (budget,) = model._runner.held.budgets.values()
        arenas = sum(model.scheduler.buffer_size(b) for b in model.backends)
        return LARGEST - budget + arenas, weights


def limits_between(data, parts, **options):
    whole, weights = free_limit(data, **options)
    return [int(whole - weights + part * weights) for part in parts]


def limit_of(data, part, **options):
    """The limit that lets this part of the weights stay; "least": the smallest that does."""
    if part != "least":
        return limits_between(data, [part], **options)[0]
    with pytest.raises(gs.OutOfMemory) as raised:
        load(data, memory=0, **options)
    return raised.value.needed


def shifted(model):
    """The logits of a token after a context shift."""
    model.eval(TOKENS * 4)
    model.shift(2, 5)
    return model.eval([3]).tobytes()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(WIDE)
    return path


# -- bits and bytes --------------------------------------------------------------------------------------------------


def checked(data, limit, expected, backends=None, **options):
    """Load under a limit, compare logits of a prompt and of tokens, and return how many weights are fetched."""
    prompt, more = expected["prompt"], expected["more"]
    with load(data, backends, memory=limit, **options) as model:
        assert held(model) <= limit
        for _ in range(2):
            assert model.eval(arch_cases.tokens(64)[:12]).tobytes() == prompt
            for token, logits in zip(arch_cases.tokens(64)[12:16], more, strict=True):
                assert model.eval([token]).tobytes() == logits
            assert held(model) <= limit
            model.reset()
        model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph).verify()
        return len(model.residency.fetched)


def without_limit(data, backends=None, **options):
    with load(data, backends, **options) as model:
        prompt = model.eval(arch_cases.tokens(64)[:12]).tobytes()
        return {"prompt": prompt, "more": [model.eval([t]).tobytes() for t in arch_cases.tokens(64)[12:16]]}


@pytest.mark.spread("name", "kind")
@pytest.mark.parametrize("kind", ["cpu", pytest.param("ggml", marks=pytest.mark.skipif(not IS_HERE, reason=WHY_NOT))])
@pytest.mark.parametrize("name", list(arch_cases.CASES))
def test_every_architecture_gives_the_same_bits_under_half_of_its_weights(name, kind):
    data, options = arch_cases.model(name), {"n_ctx": 32, "n_batch": 16}
    with backend(1) if kind == "ggml" else gs.CpuBackend(1) as only:
        expected = without_limit(data, [only], **options)
        (limit,) = limits_between(data, [0.5], backends=[only], **options)
        assert checked(data, limit, expected, [only], **options) > 0


@pytest.mark.spread("dtype", "part")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1", "iq4_nl"])
@pytest.mark.parametrize("part", [0.95, 0.4, "least"])
def test_every_limit_gives_the_same_bits_for_all_formats(part, dtype):
    data = random_llama(5, n_vocab=120, n_embd=64, n_layer=4, n_head=4, n_head_kv=2, n_ff=160, dtype=dtype)
    options = {"n_ctx": 64, "n_threads": 2, "n_batch": 16}
    expected = without_limit(data, **options)
    limit = limit_of(data, part, **options)
    assert checked(data, limit, expected, **options) > 0


@pytest.mark.skipif(not IS_HERE, reason=WHY_NOT)
@pytest.mark.parametrize("part", [0.9, 0.5, "least"])
def test_ggml_s_kernels_give_the_same_bits_under_a_limit(part):
    options = {"n_ctx": 64, "n_batch": 16}
    with backend(1) as ggml:
        expected = without_limit(WIDE, [ggml], **options)
        limit = limit_of(WIDE, part, backends=[ggml], **options)
        assert checked(WIDE, limit, expected, [ggml], **options) > 0


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("part", [0.8, 0.3])
def test_weights_of_a_file_are_fetched_from_it(path, part, flash):
    options = {"n_ctx": 64, "n_threads": 1, "flash": flash, "n_batch": 16}
    expected = without_limit(path, **options)
    (limit,) = limits_between(path, [part], **options)
    # What a fetch reads around a weight needs more room in a model as small as this.
    limit += 120_000
    assert checked(path, limit, expected, **options) > 0
    with load(path, memory=limit, **options) as model:
        assert isinstance(model.store, gs.FileStore)
        model.eval([1, 2, 3])
        before = model.store.traffic
        model.eval([4])
        after = model.store.traffic
        assert after.fetches - before.fetches == len(model.residency.fetched)
        row = 64 * 4
        assert after.nbytes - before.nbytes == row + sum(model.weights[name].nbytes for name in model.residency.fetched)


def test_parts_of_a_split_model_are_all_read(tmp_path):
    metadata, tensors = contents(WIDE)
    for k in range(3):
        fields = {"split.no": (Kind.U16, k), "split.count": (Kind.U16, 3),
                  "split.tensors.count": (Kind.I32, len(tensors))}
        write_gguf(tmp_path / f"m-{k + 1:05}-of-00003.gguf", (metadata if k == 0 else {}) | fields,
                   {name: tensors[name] for name in list(tensors)[k::3]})
    first = tmp_path / "m-00001-of-00003.gguf"
    options = {"n_ctx": 32, "n_threads": 1, "n_batch": 16}
    expected = without_limit(WIDE, **options)
    (limit,) = limits_between(WIDE, [0.5], **options)
    assert checked(first, limit + 120_000, expected, **options) > 0


def test_where_everything_fits_the_file_is_mapped_as_without_a_limit(path):
    whole, _ = free_limit(path, n_ctx=64)
    with load(path, n_ctx=64, memory=whole + 200_000) as model:
        (on,) = model.memory().values()
        assert on.mapped == on.weights and model.store is None and held(model) <= whole + 200_000


def test_sequences_of_tokens_hold_whatever_is_done_with_them(path):
    """Generating, chatting with several sequences, shifting, saving and embedding, beside a model without a limit."""
    options = {"n_ctx": 64, "n_threads": 1, "n_seq": 2, "n_batch": 16}
    (limit,) = limits_between(path, [0.5], **options)
    results = []
    for memory in (None, limit + 120_000):
        with load(path, memory=memory, **options) as model:
            found = [model.eval_batch([(0, TOKENS), (1, [5, 6, 7])]).tobytes()]
            found.append(list(model.generate([1, 2], 8, sequence=1)))
            model.shift(2, 4)
            found.append(model.eval([9]).tobytes())
            found.append(model.embed([3, 1, 4]).tobytes())
            state = model.sequence(0).n_past
            found.append(list(model.generate(TOKENS[:3], 5, temperature=0.9, seed=3)))
            results.append((found, state))
            if memory is not None:
                assert held(model) <= memory and model.residency.fetched
    assert results[0] == results[1]


def test_recurrent_states_count():
    options = {"n_threads": 1, "n_ctx": 32, "n_batch": 16}
    expected = without_limit(MAMBA, **options)
    (limit,) = limits_between(MAMBA, [0.6], **options)
    assert checked(MAMBA, limit, expected, **options) > 0


def test_the_largest_arena_of_any_graph_stays_under_the_limit():
    """Prompts of all lengths, with few outputs and with many; those that do not fit are an error, and no overrun."""
    options = {"n_ctx": 128, "n_threads": 2}
    (limit,) = limits_between(WIDE, [0.5], **options)
    with load(WIDE, memory=limit, **options) as model:
        for n in (1, 2, 3, 5, 7, 8, 31, 64, 100, model.n_batch):
            for last_only in (True, False):
                model.reset()
                try:
                    model.eval([1 + k % 60 for k in range(n)], last_only=last_only)
                except gs.OutOfMemory:
                    assert not last_only, n
                assert held(model) <= limit, (n, last_only)
        model.reset()
        assert len(model.eval([3])) == 1


# -- how much ----------------------------------------------------------------------------------------------------------


def test_the_least_limit_that_an_error_names_is_enough_and_one_byte_less_is_not():
    options = {"n_ctx": 64, "n_threads": 1, "n_batch": 16}
    with pytest.raises(gs.OutOfMemory, match="the model needs .* at least") as raised:
        load(WIDE, memory=1000, **options)
    least = raised.value.needed
    assert raised.value.available == 1000 and raised.value.backend == "CPU"
    with load(WIDE, memory=least, **options) as model:
        assert held(model) <= least
        assert np.isfinite(model.eval(TOKENS)).all()
    with pytest.raises(gs.OutOfMemory, match="at least"):
        load(WIDE, memory=least - 1, **options)


@pytest.mark.parametrize("options", [{"n_batch": 64, "flash": False}, {"n_batch": None}, {"n_batch": 4, "n_seq": 3}])
def test_the_least_limit_suffices_where_the_context_is_left_open(options):
    data = random_llama(1, n_vocab=64, n_embd=32, n_layer=2, n_head=4, n_head_kv=1, n_ff=48, n_ctx=4000)
    least = limit_of(data, "least", n_threads=1, **options)
    with load(data, memory=least, n_threads=1, **options) as model:
        assert model.n_ctx == 256 and held(model) <= least
    with pytest.raises(gs.OutOfMemory) as raised:
        load(data, memory=least - 1, n_threads=1, **options)
    assert raised.value.needed == least
    for limit in 2 * least, 4 * least, 1 << 24:
        with load(data, memory=limit, n_threads=1, **options) as model:
            assert 256 <= model.n_ctx <= 4000 and held(model) <= limit


def test_the_least_limit_fetches_nothing_where_fetches_would_need_more(tmp_path):
    """Of a file each fetch reads whole blocks, which can be more than all weights of a small model."""
    path, options = tmp_path / "model.gguf", {"n_ctx": 32, "n_threads": 1, "n_batch": 16}
    path.write_bytes(random_llama(1, n_vocab=60, n_embd=64, n_layer=1, n_head=4, n_head_kv=2, n_ff=96, dtype="q8_0"))
    with pytest.raises(gs.OutOfMemory, match=r"at least, where all of its .* bytes of weights stay") as raised:
        load(path, memory=1000, **options)
    with load(path, memory=raised.value.needed, **options) as model:
        assert model.store is None and held(model) <= raised.value.needed
    with pytest.raises(gs.OutOfMemory, match="at least"):
        load(path, memory=raised.value.needed - 1, **options)


def test_logits_of_all_tokens_fit_where_a_limit_leaves_room_for_them_beside_all_weights():
    """Their kernels need more work memory than those of prompts with few outputs."""
    options = {"n_ctx": 64, "n_threads": 2, "n_batch": 16}
    data = random_llama(1, n_vocab=120, n_embd=64, n_layer=1, n_head=4, n_head_kv=2, n_ff=256, n_expert=8, dtype="q4_0")
    with load(data, **options) as free:
        right = [free.eval([1] * n).tobytes() for n in (8, 16)]
        limit = held(free) + 64 * 32 * 4 + 1000     # a context shift copies the keys of a layer
    with load(data, memory=limit, **options) as model:
        assert model.store is None
        assert all(shape.n_outputs < 16 for shape in model._runner.held.shapes), "no memory before the first use"
        assert [model.eval([1] * n).tobytes() for n in (8, 16)] == right
        assert held(model) <= limit


def test_an_error_says_how_to_evaluate_a_batch_whose_logits_do_not_fit():
    options = {"n_ctx": 32, "n_threads": 1, "n_batch": 8}
    data = random_llama(1, n_vocab=500, n_embd=64, n_layer=2, n_head=4, n_head_kv=1, n_ff=96)
    with load(data, memory=limit_of(data, "least", **options), **options) as model:
        with pytest.raises(gs.OutOfMemory) as raised:
            model.eval([1] * 8)
        assert "the batch has 8 outputs, the limit leaves room for 2 at most: eval(last_only=True)" in str(
            raised.value.__notes__)
        assert len(model.eval([1] * 8, last_only=True)) == 1


def test_a_limit_counts_no_batch_of_more_tokens_than_are_evaluated_at_a_time():
    least = set()
    for n_seq in 8, 32:
        with pytest.raises(gs.OutOfMemory) as raised:
            load(WIDE, memory=1000, n_ctx=64, n_threads=1, n_batch=2, n_seq=n_seq)
        least.add(raised.value.needed)
    assert len(least) == 1


@pytest.mark.parametrize("options", [
    {"n_ctx": 60, "n_batch": 7, "n_seq": 3},                    # more memory leaves room for the logits of a prompt
    {"n_ctx": 1000, "n_batch": 1, "n_seq": 3},                  # the context shift has the largest arena
    {"n_ctx": 1000, "n_batch": 2, "kv_type": "f16"}])
def test_the_least_limit_suffices_for_a_model_whose_shift_reads_a_weight(options):
    data = random_model("phi3", 1, metadata={"vocab_size": 64})
    with pytest.raises(gs.OutOfMemory) as raised:
        load(data, memory=1, n_threads=1, **options)
    with load(data, memory=raised.value.needed, n_threads=1, **options) as model:
        shifted(model)
        assert held(model) <= raised.value.needed


def test_more_memory_never_fetches_more():
    options = {"n_ctx": 64, "n_threads": 1, "n_batch": 16}
    fetched = []
    for limit in limits_between(WIDE, [0.3, 0.5, 0.7, 0.9, 1.2], **options):
        with load(WIDE, memory=limit, **options) as model:
            fetched.append(model.residency.nbytes)
    assert fetched == sorted(fetched, reverse=True) and fetched[-1] == 0 < fetched[-2]


def test_a_window_takes_no_memory_beside_arenas_that_are_largest_elsewhere():
    """The logits of a prompt need the most; weights are fetched when most of that memory is free."""
    options = {"n_ctx": 256, "n_threads": 1, "n_batch": 16}
    data = random_llama(1, n_vocab=2000, n_embd=128, n_layer=4, n_head=4, n_head_kv=2, n_ff=96)
    expected = without_limit(data, **options)
    for limit in limits_between(data, [0.5, 0.6], **options):
        assert checked(data, limit, expected, **options) > 0
        with load(data, memory=limit, **options) as model:
            (cpu,) = model.backends
            left = model._runner.held.budgets[cpu] - model.scheduler.buffer_size(cpu)
            assert 0 <= left < 10_000


def test_a_residency_says_what_a_load_with_more_memory_would_fetch(monkeypatch):
    """The window has bytes besides its room, where arenas are largest at the logits of a prompt."""
    more = 200_000
    monkeypatch.setattr("ggml_sched.llama.residency.GIB", more)
    options = {"n_ctx": 256, "n_threads": 1, "n_batch": 16}
    data = random_llama(1, n_vocab=2000, n_embd=128, n_layer=6, n_head=4, n_head_kv=2, n_ff=96)
    for limit in limits_between(data, [0.5, 0.55, 0.6], **options):
        with load(data, memory=limit, **options) as model:
            held = model.residency
            (choice,), (room,), (spare,) = held.choices.values(), held.rooms.values(), held.spare.values()
            assert choice.taken(spare) <= room < choice.taken()
            said = held.explain(held.fetched[0])
        with load(data, memory=limit + more, **options) as model:
            assert f"an evaluation would fetch {model.residency.nbytes:,} bytes instead of" in said


def test_a_limit_above_the_least_one_is_enough_where_arenas_grow_with_each_choice():
    data = random_model("gpt2", 2, metadata={"vocab_size": 600})
    options = {"n_ctx": 128, "n_threads": 1, "n_batch": 16}
    least = limit_of(data, "least", **options)
    for limit in (*range(least, least + 20_000, 2_000), 266_861):
        with load(data, memory=limit, **options) as model:
            assert held(model) <= limit and model.residency.fetched


@pytest.fixture
def planned(monkeypatch):
    """The weights in the store of each planning with such weights."""
    found, plans = [], limited._Limited.plans

    def noted(self, shapes, stored, windows):
        if stored:
            found.append([*stored])
        return plans(self, shapes, stored, windows)

    monkeypatch.setattr(limited._Limited, "plans", noted)
    return found


def test_no_choice_is_planned_twice(planned):
    options = {"n_ctx": 256, "n_threads": 1, "n_batch": 16}
    data = random_llama(1, n_vocab=2000, n_embd=128, n_layer=4, n_head=4, n_head_kv=2, n_ff=96)
    for limit in limits_between(data, [0.3, 0.5, 0.6, 0.8], **options):
        planned.clear()
        load(data, memory=limit, **options).close()
        assert planned and all(planned.count(stored) == 1 for stored in planned)


@pytest.mark.parametrize("worse", ["slower", "too large"])
def test_a_choice_with_a_larger_window_is_taken_only_if_it_fits_and_is_better(worse, planned, monkeypatch):
    options = {"n_ctx": 256, "n_threads": 1, "n_batch": 16}
    data = random_llama(1, n_vocab=2000, n_embd=128, n_layer=4, n_head=4, n_head_kv=2, n_ff=96)
    (limit,) = limits_between(data, [0.5], **options)

    def other(uses, room, free=0):
        if not free:
            return choose(uses, room)
        return least_choice(uses) if worse == "slower" else choose(uses, room + 250_000)

    monkeypatch.setattr("ggml_sched.llama.limited.choose", other)
    with load(data, memory=limit, **options) as model:
        assert held(model) <= limit
        assert {*planned[0]} == {*model.residency.fetched, *model.residency.rows} != {*planned[1]}
        assert len(planned) == 2


class Counted(gs.CpuBackend):
    """Counts the most bytes of its buffers at a time."""

    most = 0

    def alloc_buffer(self, size):
        buffer = super().alloc_buffer(size)
        self.most = max(self.most, self.used)
        return buffer


@pytest.mark.parametrize("options", [{}, {"n_ctx": 1024}, {"flash": False}])
def test_nothing_is_allocated_before_a_limit_is_kept_or_refused(options):
    data = random_llama(1, n_vocab=64, n_embd=32, n_layer=2, n_head=4, n_head_kv=4, n_ff=48, n_ctx=4000)
    least = limit_of(data, "least", n_threads=1, **options)
    with Counted(1) as cpu:
        for limit in 1000, least - 1:
            with pytest.raises(gs.OutOfMemory):
                load(data, [cpu], memory=limit, **options)
            assert cpu.most == 0
        with load(data, [cpu], memory=least, **options) as model:
            assert 0 < held(model) <= least and cpu.most <= least


@pytest.mark.parametrize("data, n", [
    (random_llama(1, n_vocab=5000, n_embd=32, n_layer=1, n_head=4, n_head_kv=1, n_ff=48, n_ctx=100_000), 2),
    (random_model("mamba", 1, metadata={"context_length": 1 << 20, "vocab_size": 5000}), 1)])    # a cache without rows
def test_a_refusal_takes_few_attempts(data, n, monkeypatch):
    least = limit_of(data, "least", n_threads=1, n_batch=64)
    attempts, hold = [], limited.hold

    def counted(*arguments):
        attempts.append(arguments[3].n_ctx)
        return hold(*arguments)

    monkeypatch.setattr(limited, "hold", counted)
    with pytest.raises(gs.OutOfMemory):
        load(data, memory=least - 1, n_threads=1, n_batch=64)
    assert len(attempts) == n and attempts[0] > 1024
    load(data, memory=least, n_threads=1, n_batch=64).close()


def test_limits_are_bytes_texts_or_by_backend():
    options = {"n_ctx": 64, "n_batch": 16}
    with gs.CpuBackend(1) as cpu:
        for limit in (1 << 24, "16MiB", np.int64(1 << 24), {cpu: "16 MiB"}, {cpu: 1 << 24}):
            with load(WIDE, [cpu], memory=limit, **options) as model:
                assert model.residency.limits == {"CPU": 1 << 24}
        with load(WIDE, [cpu], memory={}, n_ctx=600) as model:
            assert model.residency is None and model.n_batch == 512
        with gs.CpuBackend(1, "other") as other:
            with pytest.raises(ValueError, match="not one of the model's backends"):
                load(WIDE, [cpu], memory={other: 5})
            with pytest.raises(ValueError, match="one limit of memory, and 2 backends"):
                load(WIDE, [cpu, other], memory=5)
        with pytest.raises(TypeError, match="memory is a number of bytes or a text"):
            load(WIDE, [cpu], memory=1.5)
        with pytest.raises(ValueError, match="'lots' is no size"):
            load(WIDE, [cpu], memory="lots")
        with pytest.raises(ValueError, match="memory of -1 bytes is negative"):
            load(WIDE, [cpu], memory=-1)
        graphs = [gs.llama.model_graphs(WIDE, 32)[0]]
        placed = gs.fit(graphs, [gs.Device("CPU", 1 << 30, 1e9, 1e9, host=True)])
        with pytest.raises(TypeError, match="memory bounds what a placement has decided already"):
            load(WIDE, [cpu], place=placed, memory=1 << 24)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("part", ["least", 0.5, 1.5])
def test_a_context_shift_fits_under_the_limit(part, kv_type):
    data = random_llama(1, n_vocab=64, n_embd=128, n_layer=2, n_head=4, n_head_kv=4, n_ff=96)
    options = {"n_ctx": 2100, "n_threads": 1, "n_batch": 4, "kv_type": kv_type}
    with load(data, **options) as model:
        expected = shifted(model)
    limit = limit_of(data, part, **options)
    with load(data, memory=limit, **options) as model:
        assert shifted(model) == expected
        assert held(model) <= limit


def peak_of(call) -> int:
    """The most bytes of Python and NumPy that a call holds besides what was there."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_limit_counts_what_a_context_shift_copies():
    data = random_llama(1, n_vocab=64, n_embd=256, n_layer=4, n_head=4, n_head_kv=4, n_ff=96)
    options = {"n_ctx": 1024, "n_threads": 1, "n_batch": 64}
    layer = 1024 * 256 * 4
    with load(data, memory=limit_of(data, "least", **options), **options) as model:
        model.eval([1, 2, 3] * 340, last_only=True)
        limit = sum(model.residency.limits.values())
        assert held(model) + layer <= limit
        assert peak_of(lambda: model.shift(0, 4)) < layer + 300_000


@pytest.mark.parametrize("flash", [True, False])
def test_saving_and_restoring_hold_little_more_than_a_layer(tmp_path, flash):
    """And restoring the rows that it overwrites, which it restores after a failure."""
    data = random_llama(1, n_vocab=64, n_embd=256, n_layer=8, n_head=4, n_head_kv=4, n_ff=96)
    with load(data, n_ctx=1024, n_threads=1, n_batch=64, flash=flash) as model:
        model.eval([1, 2, 3] * 340, last_only=True)
        part = 1024 * 256 * 4
        assert peak_of(lambda: model.save(tmp_path / "state")) < 5 * part
        assert peak_of(lambda: model.restore(tmp_path / "state")) < (16 + 5) * part
        model.reset()
        assert peak_of(lambda: model.restore(tmp_path / "state")) < 5 * part
        assert model.n_past == 1020


def test_a_generation_goes_on_in_a_full_context_under_a_limit():
    options = {"n_ctx": 1024, "n_threads": 1, "n_batch": 8}
    with load(WIDE, memory=limit_of(WIDE, "least", **options), **options) as model:
        model.eval([1] * 1020, last_only=True)
        assert len(model.generate([2], 20, shift=True, ignore_eos=True).read()) == 20


def test_two_backends_have_limits_of_their_own():
    options = {"n_ctx": 64, "n_batch": 16}
    with gs.CpuBackend(1, "A") as first, gs.CpuBackend(1, "B") as last:
        expected = without_limit(WIDE, [first, last], **options)
        with load(WIDE, [first, last], memory={first: LARGEST, last: LARGEST}, **options) as model:
            whole = {b: LARGEST - model._runner.held.budgets[b] + model.scheduler.buffer_size(b) for b in (first, last)}
            weights = {b: on.weights for b, on in model.memory().items()}
        limits = {b: int(whole[b] - 0.6 * weights[b]) for b in (first, last)}
        for given in (limits, {first: limits[first]}, {last: limits[last]}):
            with load(WIDE, [first, last], memory=given, **options) as model:
                assert model.eval(arch_cases.tokens(64)[:12]).tobytes() == expected["prompt"]
                assert model.eval([arch_cases.tokens(64)[12]]).tobytes() == expected["more"][0]
                memory = model.memory()
                assert memory[first].total <= given.get(first, LARGEST)
                assert memory[last].total + memory[model.store].total <= given.get(last, LARGEST)
                model.shift(1, 4)
                # Weights are computed with where the placement put them, not where there happens to be room.
                graph = model.batch_graph(1, 32).graph
                plan = model.scheduler.plan(graph)
                for name, home in model.weights.homes.items():
                    readers = [n for n in graph.nodes if n.op == "MUL_MAT" and n.src[0].name == name]
                    assert all(plan.backend_of(n) is home for n in readers)


def test_the_context_takes_an_eighth_of_a_limit_at_most():
    data = random_llama(1, **SHAPES, n_ctx=100_000)
    with load(data, n_threads=1, memory="2MiB", n_batch=16) as model:
        assert model.memory()[model.backends[0]].cache <= (2 << 20) // 8 and model.n_ctx > 100


def test_a_batch_is_as_long_as_without_a_limit_where_that_fits_at_all():
    (limit,) = limits_between(WIDE, [0.8], n_ctx=256, n_threads=1, n_batch=256)
    with load(WIDE, n_ctx=256, n_threads=1, memory=limit) as model:
        assert model.n_batch == 256
    with pytest.raises(gs.OutOfMemory) as raised:
        load(WIDE, n_ctx=256, n_threads=1, memory=1000, n_batch=256)
    with load(WIDE, n_ctx=256, n_threads=1, memory=raised.value.needed - 1) as model:
        assert model.n_batch == 128


def test_what_a_process_may_leave_to_a_model():
    left = process_budget("100GiB")
    assert 90 << 30 < left < (100 << 30) - (24 << 20) and left % (1 << 20) == 0
    assert process_budget("100GiB", 1 << 20) < left - (300 << 20)
    with pytest.raises(gs.OutOfMemory, match="the process holds"):
        process_budget("10MiB")


def test_what_a_process_leaves_to_a_model_depends_on_its_graphs():
    assert process_budget("100GiB", n_nodes=300) - process_budget("100GiB", n_nodes=3300) > 30 << 20


IN_A_PROCESS = """
import random, sys
from ggml_sched import llama
path, limit = sys.argv[1:]
nodes = llama.model_graphs(path, n_batch=1)[0].nodes
memory = llama.process_budget(limit, n_nodes=len(nodes))
chosen = random.Random(1)
with llama.load(path, n_ctx=256, n_threads=1, memory=memory) as model:
    for n in range(24):
        model.reset()
        model.eval([chosen.randrange(60) for _ in range(chosen.randint(1, 200))], last_only=True)
        model.eval([1])
    with open("/proc/self/status") as file:
        most, = (line.split()[1] for line in file if line.startswith("VmHWM"))
    print(model.residency.nbytes, most)
"""


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="the sanitizers need memory of their own")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a process has held at most")
def test_a_process_keeps_its_limit_with_many_layers_and_prompts_of_many_lengths(tmp_path):
    path = tmp_path / "deep.gguf"
    path.write_bytes(random_llama(1, n_vocab=64, n_embd=128, n_layer=80, n_head=4, n_ff=384))
    done = subprocess.run([sys.executable, "-c", IN_A_PROCESS, str(path), "90MiB"], capture_output=True, text=True,
                          check=True)
    fetched, most = map(int, done.stdout.split())
    assert fetched and most << 10 <= 90 << 20


def test_a_limit_that_is_found_in_several_attempts_leaves_no_cycle_of_graphs():
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(gs.OutOfMemory) as raised:
            load(WIDE, n_threads=1, memory=1000)
        needed = raised.value.needed
        del raised
        gc.collect()
        before = sum(isinstance(one, gs.Tensor) for one in gc.get_objects())
        with load(WIDE, n_threads=1, memory=needed) as model:
            kept = {id(t) for graph in model._runner.graphs.values() for t in graph.graph.tensors}
            found = sum(isinstance(one, gs.Tensor) for one in gc.get_objects()) - before
            assert found < 3 * len(kept)
    finally:
        gc.enable()


# -- explanations, and the end ---------------------------------------------------------------------------------------


def test_a_residency_explains_each_weight():
    (limit,) = limits_between(WIDE, [0.5], n_ctx=64, n_threads=1, n_batch=16)
    with load(WIDE, n_ctx=64, n_threads=1, memory=limit, n_batch=16) as model:
        held = model.residency
        assert "nodes read single rows" in held.explain("token_embd.weight")
        assert "fetched from memory in each evaluation" in held.explain(held.fetched[0])
        assert "small" in held.explain("blk.0.attn_norm.weight")
        for name in model.weights.tensors:
            assert held.explain(name).startswith(name)
        plan = model.scheduler.plan(model.batch_graph(1, 32).graph)
        fetches = [step for step in plan.program.steps if isinstance(step, Fetch)]
        assert [plan.graph.tensors[step.tensor].name for step in fetches] == list(held.fetched)
        assert held.nbytes == sum(step.nbytes for step in fetches)


def test_a_model_explains_each_of_its_weights_whatever_has_a_limit():
    options = {"n_ctx": 64, "n_batch": 16}
    with gs.CpuBackend(1, "A") as first, gs.CpuBackend(1, "B") as last:
        for backends, limited in (([first], first), ([first, last], first), ([first, last], last)):
            with load(WIDE, backends, memory={limited: LARGEST}, **options) as model:
                for name in model.weights.tensors:
                    is_limited = model.weights[name].backend.name in model.residency.limits
                    assert ("stays" in model.explain(name)) == is_limited
                with pytest.raises(KeyError):
                    model.explain("nothing")
    (limit,) = limits_between(WIDE, [0.5], n_threads=1, **options)
    with load(WIDE, memory=limit, n_threads=1, **options) as model:
        assert all(model.explain(name).startswith(model.residency.explain(name)) for name in model.weights.tensors)


@pytest.mark.parametrize("memory", [None, LARGEST])
def test_a_weight_that_no_node_reads_is_explained_too(memory):
    with load(random_model("phi3", 1), n_ctx=64, n_threads=1, memory=memory) as model:
        assert "rope_factors_long.weight: no node reads it" in model.explain("rope_factors_long.weight")
        assert all(name in model.explain(name) for name in model.weights.tensors)


def test_closing_and_failing_leave_nothing_open(path):
    import os
    import threading
    import time

    (limit,) = limits_between(path, [0.5], n_ctx=64, n_threads=1, n_batch=16)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        model = load(path, n_ctx=64, n_threads=1, memory=limit + 120_000, n_batch=16)
        model.eval([1, 2])
        assert len(os.listdir("/proc/self/fd")) > files
        model.close()
        model.close()
        with pytest.raises(gs.OutOfMemory):
            load(path, n_ctx=64, n_threads=1, memory=1000, n_batch=16)
    model = load(path, n_ctx=64, n_threads=1, memory=limit + 120_000, n_batch=16)
    model.eval([1, 2])
    del model                   # not closed, but freed
    for _ in range(100):        # the thread ends by itself
        gc.collect()
        if threading.active_count() == threads:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) == files and threading.active_count() == threads


@pytest.mark.parametrize("how", ["replaced", "written"])
def test_a_file_that_changes_between_its_header_and_its_weights_is_refused(path, how, monkeypatch):
    import importlib
    import os

    loading = importlib.import_module("ggml_sched.llama.limited")
    (limit,) = limits_between(path, [0.5], n_ctx=64, n_threads=1, n_batch=16)
    hold, files = loading.hold, len(os.listdir("/proc/self/fd"))

    def meanwhile(*arguments):
        found = hold(*arguments)
        other = random_llama(6, n_vocab=120, n_embd=64, n_layer=5, n_head=4, n_head_kv=2, n_ff=160)
        target = path.with_name("other") if how == "replaced" else path
        with open(target, "wb" if how == "replaced" else "r+b") as file:
            file.write(other)
        os.replace(target, path)
        os.utime(path, ns=(5, 5))
        return found

    monkeypatch.setattr(loading, "hold", meanwhile)
    with pytest.raises(gs.FetchError, match="was replaced or changed after its header was read"):
        load(path, n_ctx=64, n_threads=1, memory=limit + 120_000, n_batch=16)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_model_moves_to_other_backends_with_its_limit(path):
    (limit,) = limits_between(path, [0.5], n_ctx=64, n_threads=1, n_batch=16)
    limit += 120_000
    with gs.CpuBackend(1, "new") as other:
        model = load(path, n_ctx=64, n_threads=1, memory=limit, n_batch=16)
        model.eval(TOKENS)
        with model.moved([other]) as moved:
            assert moved.residency.fetched and held(moved) <= limit and moved.n_past == len(TOKENS)
            with load(path, n_ctx=64, n_threads=1, n_batch=16) as free:
                free.eval(TOKENS)
                assert moved.eval([3]).tobytes() == free.eval([3]).tobytes()


def test_progress_counts_the_weights_that_are_read(path):
    heard = []
    (limit,) = limits_between(path, [0.5], n_ctx=64, n_threads=1, n_batch=16)
    with load(path, n_ctx=64, n_threads=1, memory=limit + 120_000, n_batch=16,
              progress=lambda done, total: heard.append((done, total))) as model:
        assert heard[0][0] == 0 and heard[-1][0] == heard[-1][1] == sum(
            t.nbytes for name, t in model.weights.tensors.items() if name not in model.weights.homes)
    assert heard == sorted(heard)


def test_a_file_object_stays_in_memory_and_its_weights_are_fetched_from_there():
    import io

    options = {"n_ctx": 32, "n_threads": 1, "n_batch": 16}
    expected = without_limit(SMALL, **options)
    (limit,) = limits_between(SMALL, [0.5], **options)
    assert checked(io.BytesIO(SMALL), limit, expected, **options) > 0
