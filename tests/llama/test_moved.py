"""A model that moves to other backends: its sequences go on there, and each backend has one owner."""

import random
import sys

import numpy as np
import pytest
from devices import device
from small_llama import MAMBA, SMALL, TOKENS

import ggml_sched as gs
from ggml_sched import llama

WIDE = llama.random_llama(7, n_vocab=120, n_embd=64, n_layer=6, n_head=4, n_ff=192)
LIMIT = 700_000


@pytest.fixture
def own(monkeypatch):
    """The backends that `load` makes, in a list."""
    made = []

    def make(*given):
        made.append(device(name=f"own{len(made)}", attributes={"lost": None}))
        return made[-1]

    monkeypatch.setattr(sys.modules["ggml_sched.llama.load"], "default_backend", make)
    return made


@pytest.mark.parametrize("lost", [False, True])
def test_a_backend_that_load_has_made_moves_with_the_model(own, lost):
    model = llama.load(SMALL, n_ctx=64)
    want = model.eval(TOKENS)[-1]
    model.sequence(0).truncate(len(TOKENS) - 1)
    with gs.CpuBackend(1, name="other") as other:
        if lost:
            model.backends[0].lost = "gone"
        moved = model.moved([other, *model.backends])
        assert model.closed and not own[0].closed
        model.close()
        assert not own[0].closed
        assert np.allclose(moved.eval(TOKENS[-1:])[0], want, atol=1e-4)
        again = moved.moved([other])
        assert own[0].closed and again.n_past == len(TOKENS)
        again.close()
    assert len(own) == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_move_that_fails_leaves_the_backends_to_the_old_model(own, lost):
    model = llama.load(SMALL, n_ctx=64)
    model.eval(TOKENS)
    if lost:
        model.backends[0].lost = "gone"
    with gs.CpuBackend(1, name="small", memory=1 << 12) as small:
        for _ in range(2):
            with pytest.raises(gs.OutOfMemory):
                model.moved([small])
            assert model.closed is lost and not own[0].closed
    for wrong in (None, own[0], "CPU"):
        with pytest.raises(TypeError):
            model.moved(wrong)
    with model.moved(own) as moved:
        assert moved.n_past == len(TOKENS)
        with pytest.raises(gs.OutOfMemory), gs.CpuBackend(1, name="small", memory=1 << 12) as small:
            moved.moved([small])
    assert own[0].closed
    model.close()


def test_a_closed_model_closes_what_a_move_in_vain_has_left_open(own):
    model = llama.load(SMALL, n_ctx=64)
    model.backends[0].lost = "gone"
    with gs.CpuBackend(1, name="small", memory=1 << 12) as small, pytest.raises(gs.OutOfMemory):
        model.moved([small])
    assert model.closed and not own[0].closed
    model.close()
    assert own[0].closed


@pytest.mark.parametrize("error", [gs.BackendError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_move_whose_old_model_fails_to_close_leaves_no_other_model_open(own, monkeypatch, error):
    model = llama.load(SMALL, n_ctx=64)
    model.eval(TOKENS)
    close, calls = model._runner.close, []

    def fail():
        calls.append(close())
        raise error

    monkeypatch.setattr(model._runner, "close", fail)
    with gs.CpuBackend(1, name="other") as other:
        with pytest.raises(type(error)):
            model.moved([other, *model.backends])
        assert other.used == own[0].used == 0 and not own[0].closed
        with model.moved([other, *model.backends]) as moved:
            assert moved.n_past == len(TOKENS) and len(calls) == 1
        assert own[0].closed


def limits(model):
    return None if model.residency is None else model.residency.limits


@pytest.mark.parametrize("how", ["bytes", "by backend", "fit"])
def test_a_limit_of_the_only_host_moves_to_the_only_host_and_stays_with_a_backend_that_stays(tmp_path, how):
    path = tmp_path / "model.gguf"
    path.write_bytes(WIDE)
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b, gs.CpuBackend(1, name="c") as c:
        if how == "fit":
            host = gs.Device("a", LIMIT, 20e9, 1e11, host=True, backend=a, fetch=gs.Link(1e9, 1e-4))
            options = {"place": gs.fit(llama.model_graphs(path, 64, 16, backends=[a]), [host])}
        else:
            options = {"backends": [a], "n_ctx": 64, "n_batch": 16, "memory": LIMIT if how == "bytes" else {a: LIMIT}}
        model = llama.load(path, **options)
        fetched = model.residency.fetched
        assert fetched
        for to in (a, b, c):
            model = model.moved([to])
            assert limits(model) == {to.name: LIMIT} and model.residency.fetched
            if how != "fit":        # whose choice knows the devices' rates
                assert model.residency.fetched == fetched
            assert sum(on.total for on in model.memory().values()) <= LIMIT
        if how == "bytes":
            with pytest.raises(ValueError, match="2 backends over the host's"):
                model.moved([a, b])
        else:
            model = model.moved([c, b])
            assert limits(model) == {"c": LIMIT}
            model = model.moved([a, b])
            assert limits(model) is None
        model.close()


def test_a_limit_of_one_of_several_hosts_ends_with_it():
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        model = llama.load(WIDE, [a, b], n_ctx=64, n_batch=16, memory={a: LIMIT})
        assert limits(model) == {"a": LIMIT}
        with model.moved([b]) as moved:
            assert limits(moved) is None


@pytest.mark.parametrize("data", [SMALL, MAMBA], ids=["llama", "mamba"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_that_sequences_share_need_rows_once(data, seed):
    rng = random.Random(seed)
    with gs.CpuBackend(1, name="a") as backend:
        model = llama.load(data, [backend], n_ctx=64, n_seq=8)
        model.sequence(7).eval(TOKENS[:5])
        while model.n_free:
            i, other = rng.sample(range(7), 2)
            model.sequence(i).eval([rng.randrange(64) for _ in range(rng.randint(1, min(model.n_free, 10)))])
            if rng.random() < 0.6:
                model.sequence(i).copy_to(other)
        tokens = [model.sequence(i).tokens for i in range(8)]
        assert sum(map(len, tokens)) > 64
        with model.moved([backend]) as moved:
            assert [moved.sequence(i).tokens for i in range(8)] == tokens
            moved.sequence(7).reset()
            for i, ids in enumerate(tokens[:7]):
                with llama.load(data, [backend], n_ctx=64) as alone:
                    want = alone.eval([*ids, 3], last_only=True) if len(ids) < 64 else None
                if want is not None:
                    kept = moved.sequence(i).eval([3])
                    assert np.abs(kept - want).max() <= 1e-4 * np.abs(want).max()
                    moved.sequence(i).reset()
