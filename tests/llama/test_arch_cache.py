"""The cache of a model: rows and states are cleared, saved, restored, shared and turned without changing a result."""

import arch_cases as cases
import numpy as np
import pytest
from arch_runner import Runner
from devices import device

import ggml_sched as gs
from ggml_sched.llama import load, random_llama, shift
from ggml_sched.llama.shift import build_shifts
from ggml_sched.llama.synthetic import random_model

TOKENS = cases.tokens()
TURNING = ("llama", "llama-yarn", "llama-longrope-long", "gemma3", "phi2", "phi3-long", "gpt-oss", "deepseek2-yarn",
           "deepseek2-absorbed")
LAYOUTS = [(False, "f32"), (True, "f32"), (True, "f16")]


def error(got, expected) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def keys(runner: Runner, n: int) -> np.ndarray:
    """The first n rows of every K, as numbers."""
    return np.stack([k.numpy()[:n].astype(np.float32) for k in runner.cache.k])


# -- the context shift -------------------------------------------------------------------


@pytest.mark.parametrize("name", TURNING)
@pytest.mark.parametrize(("flash", "kind"), LAYOUTS)
def test_shifted_keys_are_those_of_earlier_positions(name, flash, kind):
    data, n, far = cases.model(name), 12, 9
    with Runner(data, flash=flash, kv_type=kind) as runner:
        runner.run(TOKENS[:n])
        expected = keys(runner, n)
    with Runner(data, flash=flash, kv_type=kind) as runner:
        runner.run(TOKENS[:n], positions=np.arange(far, far + n))
        assert error(keys(runner, n), expected) > 0.1
        moves = np.zeros(64, np.int32)
        moves[:n] = -far
        runner.shift(moves)
        assert error(keys(runner, n), expected) <= (2e-5 if kind == "f32" else 5e-3)
        before = keys(runner, n)
        runner.shift(np.zeros(64))
        assert error(keys(runner, n), before) <= (1e-6 if kind == "f32" else 1e-3)


def test_shifted_rows_continue_as_if_they_had_always_been_there():
    with Runner(cases.model("llama")) as runner:
        runner.run(TOKENS[:12])
        expected = runner.run([7])
    with Runner(cases.model("llama")) as runner:
        runner.run(TOKENS[:12], positions=np.arange(20, 32), rows=np.arange(30, 42))
        runner.owner = [o and (o[0], o[1] - 20) for o in runner.owner]
        runner.shift([-20 if o else 0 for o in runner.owner])
        assert error(runner.run([7]), expected) <= 1e-5


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize(("arch", "metadata"), [
    ("llama", {"embedding_length": 128}), ("phi2", {"embedding_length": 256, "rope.dimension_count": 32}),
    ("phi2", {"embedding_length": 256, "rope.dimension_count": 16}),
    ("deepseek2", {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16})])
def test_keys_that_rope_does_not_turn_in_place_are_shifted_through_f32(arch, metadata, kind):
    data = random_model(arch, 3, metadata=metadata)
    with Runner(data, flash=True, kv_type=kind) as runner:
        runner.run(TOKENS[:12])
        expected = keys(runner, 12)
    with Runner(data, flash=True, kv_type=kind) as runner:
        runner.run(TOKENS[:12], positions=np.arange(9, 21))
        runner.shift([-9] * 12 + [0] * 52)
        assert error(keys(runner, 12), expected) <= 3e-2


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_keys_turn_the_same_in_pieces_of_rows(kind, monkeypatch):
    data = random_llama(1, n_vocab=64, n_embd=128, n_layer=2, n_head=4, n_head_kv=4, n_ff=96)
    found = []
    for rows in (1024, 7):
        monkeypatch.setattr(shift, "ROWS", rows)
        with (gs.CpuBackend(1, "A") as first, gs.CpuBackend(1, "B") as last,
              load(data, [first, last], n_ctx=32, kv_type=kind) as model):
            model.eval(range(1, 31), last_only=True)
            model.shift(2, 9)
            found.append((model.cache.read_rows(range(32)), model.eval([3])))
    assert all((a == b).all() for a, b in zip(found[0][0], found[1][0], strict=True))
    assert (found[0][1] == found[1][1]).all()


def test_models_that_turn_nothing_have_nothing_to_shift():
    for name in ("gpt2", "mamba"):
        with Runner(cases.model(name)) as runner:
            assert not build_shifts(runner.hparams, runner.weights, runner.cache, False)


def test_a_shift_runs_where_the_layers_are():
    data = cases.model("llama")
    results = []
    for n in (1, 3):
        with Runner(data, backends=[gs.CpuBackend(name=f"CPU{i}") for i in range(n)]) as runner:
            runner.run(TOKENS[:12], positions=np.arange(9, 21))
            runner.shift([-9] * 64)
            results.append(keys(runner, 12).tobytes())
    assert results[0] == results[1]


# -- rows and states -------------------------------------------------------------------------


@pytest.mark.parametrize(("flash", "kind"), [*LAYOUTS, (False, "f16"), (True, "q8_0")])
def test_rows_saved_and_written_elsewhere_continue_alike(flash, kind):
    data = random_model("llama", 3, metadata={"embedding_length": 128})
    with Runner(data, flash=flash, kv_type=kind) as runner:
        runner.run(TOKENS[:12])
        saved = runner.cache.read_rows(range(12))
        expected = runner.run([7])
    rows = [10, 11, 12, 1, 2, 3, 14, 13, 30, 31, 63, 40]
    with Runner(data, flash=flash, kv_type=kind) as runner:
        runner.cache.write_rows(rows, saved)
        for i, row in enumerate(rows):
            runner.owner[row] = (0, i)
        again = runner.cache.read_rows(rows)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again, saved, strict=True))
        assert error(runner.run([7]), expected) <= 1e-5


@pytest.mark.parametrize("flash", [False, True])
def test_cleared_rows_are_zero_and_others_are_not(flash):
    with Runner(cases.model("llama"), flash=flash) as runner:
        runner.run(TOKENS[:12])
        before = runner.cache.read_rows(range(64))
        runner.cache.clear_rows([3, 4, 9])
        after = runner.cache.read_rows(range(64))
        kept = np.delete(np.arange(64), [3, 4, 9])
        for a, b in zip(before, after, strict=True):
            assert (a[kept] == b[kept]).all() and not b[[3, 4, 9]].any() and a[[3, 4, 9]].any()
        runner.cache.clear()
        assert not any(part.any() for part in runner.cache.read_rows(range(64)))
        runner.cache.clear_rows([])


def test_wrong_rows_and_wrong_data_change_nothing():
    with Runner(cases.model("llama"), n_seq=2) as runner:
        runner.run(TOKENS[:12])
        cache, before = runner.cache, runner.cache.read_rows(range(64))
        for rows in ([64], [-1], [3, 3], [4, 3, 4]):
            for call in (cache.read_rows, cache.clear_rows, lambda r: cache.write_rows(r, before)):
                with pytest.raises(ValueError, match="rows are different"):
                    call(rows)
        with pytest.raises(gs.FileFormatError, match="do not fit 63 rows of 3 layers"):
            cache.write_rows(range(63), before)
        with pytest.raises(gs.FileFormatError, match="do not fit"):
            cache.write_rows(range(64), before[:2])
        assert all((a == b).all() for a, b in zip(before, cache.read_rows(range(64)), strict=True))


def test_wrong_states_change_nothing():
    with Runner(cases.model("mamba"), n_seq=3) as runner:
        runner.run(TOKENS[:9])
        saved = runner.cache.read_state(0)
        for row in (-1, 3):
            with pytest.raises(ValueError, match=r"not in 0 \.\. 2"):
                runner.cache.clear_state(row)
        with pytest.raises(gs.FileFormatError, match="do not fit"):
            runner.cache.write_state(0, saved[:1])
        assert all((a == b).all() and a.any() for a, b in zip(saved, runner.cache.read_state(0), strict=True))
        assert runner.cache.read_rows([0]) == [] and runner.cache.padded(40) == 1


def test_attention_reads_as_many_rows_as_the_backends_like():
    wide = device(name="wide", attributes={"kv_padding": 96})
    with Runner(cases.model("llama"), backends=[gs.CpuBackend(), wide], n_ctx=200) as runner:
        assert [runner.cache.padded(n) for n in (0, 1, 96, 97, 193, 200)] == [96, 96, 96, 192, 200, 200]
    with Runner(cases.model("llama"), n_ctx=200) as runner:
        assert [runner.cache.padded(n) for n in (1, 64, 65)] == [64, 64, 128]


def test_batches_of_another_shape_and_flash_of_another_cache_are_refused():
    from ggml_sched.llama.batch import Batch
    from ggml_sched.llama.builder import Shape, build_graph

    with Runner(cases.model("llama")) as runner:
        graph = runner.graph(Shape(2, 32, 1))
        two, none = np.zeros(2, np.int32), np.zeros(0, np.int32)
        with pytest.raises(ValueError, match="2 tokens with 0 outputs"):
            graph.set_inputs(Batch(two, two, two, none), np.arange(2), lambda window, half: bytes(2 * 32 * 4))
        with pytest.raises(ValueError, match="flash"):
            build_graph(runner.arch, runner.hparams, runner.weights, runner.cache, Shape(1, 32, 1), True)
