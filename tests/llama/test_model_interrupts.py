"""Control-C at any instruction, and failures: a call has its full effect or none, and the model works afterwards."""

import io

import numpy as np
import pytest
from interrupting import interrupted

import ggml_sched as gs
from ggml_sched.llama import load, random_llama
from ggml_sched.llama.kvcache import KVCache
from ggml_sched.llama.synthetic import random_model
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

SHAPES = {"n_vocab": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_head_kv": 2, "n_ff": 48}
DATA = {"llama": lambda: random_llama(1, **SHAPES), "mamba": lambda: random_model("mamba", 1)}
TOKENS = [5, 6, 7]
STEP, FAR = 41, 151
"""Distance between the tried instructions: a prime, so that all instructions of a loop are tried.  FAR: of a model with
a state, which runs the code of the other model and a larger graph; STEP there is a soak."""
STEPS = {"eval of one token": (7, 41), "copy": (5, 29), "truncate": (5, 17), "reset": (5, 17)}
"""The distances in short calls."""


def state_of(model) -> tuple:
    return [model.sequence(i).tokens for i in range(model.n_seq)], model.n_free


def saved(sequence) -> bytes:
    file = io.BytesIO()
    sequence.save(file)
    return file.getvalue()


CALLS = {
    "eval": lambda model, state: model.eval([9, 8]),
    "eval of one token": lambda model, state: model.eval([9]),
    "eval_batch": lambda model, state: model.eval_batch([(0, [9]), (1, [3, 4])]),
    "embed": lambda model, state: model.embed([1, 2]),
    "truncate": lambda model, state: model.truncate(0),
    "shift": lambda model, state: model.shift(1, 1),
    "copy": lambda model, state: model.sequence(0).copy_to(1),
    "restore": lambda model, state: model.sequence(1).restore(io.BytesIO(state)),
    "reset": lambda model, state: model.reset(),
}
RECURRENT = [(name, True) for name in ("eval", "eval_batch", "copy", "restore")]
"""By default for states of a recurrent model: what computes, for one and several sequences, and what writes states."""


def start(model) -> None:
    model.reset()
    model.eval(TOKENS)
    model.sequence(1).eval([2])


def follows(model) -> np.ndarray:
    return np.stack([model.sequence(i).eval([11], last_only=True)[0] for i in (0, 1, 0)])


@pytest.mark.parametrize(("arch", "name", "far"), [
    *(pytest.param("llama", name, False) for name in CALLS),
    *(pytest.param("mamba", name, far, marks=() if (name, far) in RECURRENT else pytest.mark.soak)
      for name in CALLS if name != "shift" for far in (False, True))])
def test_an_interrupt_leaves_what_was_or_what_will_be(arch, name, far):
    call, step = CALLS[name], STEPS.get(name, (STEP, FAR))[far]
    with gs.CpuBackend(1) as backend, load(DATA[arch](), [backend], n_ctx=32, n_batch=1 if arch == "mamba" else 4,
                                           n_seq=2) as model:
        start(model)
        before, state, expected = state_of(model), saved(model.sequence(0)), [follows(model)]
        start(model)
        call(model, state)
        after = state_of(model)
        expected.append(follows(model))
        at = 1
        while True:
            start(model)
            where = interrupted(lambda: call(model, state), at)
            if where is None:
                break
            found = state_of(model)
            assert found in (before, after), where
            got = follows(model)
            likely = [want for want, known in zip(expected, (before, after), strict=True) if known == found]
            assert any(np.allclose(got, want, rtol=0, atol=1e-5 * abs(want).max()) for want in likely), where
            at += step
        assert at > step


COMPUTES = {"eval": 2, "eval of one token": 1, "eval_batch": 3, "embed": 2, "shift": 1, "restore": 1}
"""How many computes a call makes; `restore`: how often it writes rows."""


@pytest.mark.parametrize("way", ["softmax", "flash", "late"])
@pytest.mark.parametrize(("arch", "name", "n_good"), [
    (arch, name, n_good) for arch in DATA for name, n in COMPUTES.items() for n_good in range(n)
    if (arch, name) != ("mamba", "shift")])
def test_a_call_that_fails_changes_nothing(arch, name, n_good, way, monkeypatch):
    """After some good computes one fails, when it has written, and has left NaN in the rows that it took."""
    backend = DeferredBackend("late", DeferredQueues(1)) if way == "late" else gs.CpuBackend(1)
    with backend, load(DATA[arch](), [backend], n_ctx=32, n_batch=1, n_seq=2, flash=way != "softmax") as model:
        start(model)
        before, state, expected = state_of(model), saved(model.sequence(0)), follows(model)
        start(model)
        positions = model._runner.cells.positions
        free = positions < 0
        owner, method = (model.cache, "write_each") if name == "restore" else (model.scheduler, "compute")
        calls, run = [], getattr(owner, method)

        def failing(*args, **options):
            calls.append(args)
            run(*args, **options)
            if len(calls) == n_good + 1:
                taken = np.flatnonzero(free & (positions >= 0))
                nan = [np.full(shape, 0xFF, np.uint8) for shape in model.cache.shapes_of_rows(len(taken))]
                KVCache.write_rows(model.cache, taken, nan)
                raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(owner, method, failing)
            with pytest.raises(ZeroDivisionError):
                CALLS[name](model, state)
        assert state_of(model) == before
        # A shift turns keys back, or forth and back: their last digits may differ.
        assert np.allclose(follows(model), expected, rtol=0, atol=1e-5 * abs(expected).max() * (name == "shift"))


@pytest.mark.parametrize("n_more", [0, 1])
@pytest.mark.parametrize("n_good", [0, 1, 3])
def test_a_shift_layer_by_layer_that_fails_changes_nothing(n_good, n_more, monkeypatch):
    """Under a limit of memory; `n_more`: how many computes of undoing fail, too, which the next call repeats."""
    with load(random_llama(1, **{**SHAPES, "n_layer": 4}), n_ctx=32, n_threads=1, memory=1 << 24) as model:
        def begin():
            model.reset()
            model.eval(range(1, 21))

        begin()
        expected = model.eval([11])
        begin()
        keys, calls, compute = model.cache.read_rows(range(20)), [], model.scheduler.compute

        def failing(*args, **options):
            calls.append(args)
            compute(*args, **options)
            if n_good < len(calls) <= n_good + 1 + n_more:
                raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(model.scheduler, "compute", failing)
            with pytest.raises(ZeroDivisionError):
                model.shift(2, 5)
            model.truncate(20)
        assert model.n_past == 20
        found = model.cache.read_rows(range(20))
        for before, after in zip(keys[2 * n_good :], found[2 * n_good :], strict=True):
            assert (before == after).all(), "what was not rotated back is as it was"
        assert np.allclose(model.eval([11]), expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_an_interrupt_while_undoing_is_made_up_for(monkeypatch):
    """The second control-C comes while the first is being dealt with."""
    with gs.CpuBackend(1) as backend, load(DATA["llama"](), [backend], n_ctx=32) as model:
        model.eval(TOKENS)
        expected = model.eval([9])
        model.truncate(3)
        runner = model._runner

        def interrupt(*args) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model.scheduler, "compute", interrupt)
            patch.setattr(runner, "undo", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.eval([1, 2])
        assert model.eval([9]).tobytes() == expected.tobytes()
        assert (model.n_past, model.n_free) == (4, 28)
