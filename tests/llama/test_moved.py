"""A model that moves to other backends: its sequences go on there, and each backend has one owner."""

import sys

import numpy as np
import pytest
from devices import device
from small_llama import SMALL, TOKENS

import ggml_sched as gs
from ggml_sched import llama


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
