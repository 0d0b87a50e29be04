"""A token given as [id], alone or with those of other sequences, takes a fast path; other spellings a general one.

Both give the same bits, the same state and the same errors.
"""

from contextlib import suppress

import numpy as np
import pytest
from devices import device

import ggml_sched as gs
from ggml_sched.llama import ContextFull, load, random_llama
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

PROMPT = [3, 14, 15, 9, 26, 5, 35]
WAYS = {"short": lambda token: [token], "long": lambda token: np.array([token])}


def walk(model, way) -> list[bytes]:
    """Tokens of two sequences that take turns, with rows freed between, over a padding of the cache."""
    found = []
    for i in range(2):
        model.sequence(i).eval(PROMPT[: 4 + i])
    for step in range(40):
        sequence = model.sequence(step % 3 % 2)
        logits = sequence.eval(way(7 + step % 20), last_only=step % 2 == 0)
        assert logits.shape == (1, model.n_vocab) and logits.dtype == np.float32
        found.append(logits.tobytes())
        if step == 20:
            model.sequence(1).reset()
            model.sequence(1).eval(PROMPT)
    found.append(repr([model.sequence(i).tokens for i in range(2)]).encode())
    return found


def walk_together(model, way) -> list[bytes]:
    """Tokens of several sequences in one batch: of all, of some in another order, and of one."""
    found = []
    for i in range(3):
        model.sequence(i).eval(PROMPT[: 2 + i])
    for step in range(30):
        among = ([0, 1, 2], [2, 0], [1])[step % 3]
        logits = model.eval_batch([(i, way(3 + (step + i) % 20)) for i in among])
        assert logits.shape == (len(among), model.n_vocab) and logits.dtype == np.float32
        found.append(logits.tobytes())
        if step == 14:
            model.sequence(1).reset()
            model.sequence(1).eval(PROMPT)
    found.append(repr([model.sequence(i).tokens for i in range(3)]).encode())
    return found


@pytest.mark.spread("arch walk", "flash walk")
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("walk", "n_ctx", "n_seq"), [(walk, 96, 2), (walk_together, 128, 3)])
def test_both_ways_give_the_same_bits(walk, n_ctx, n_seq, arch, flash):
    data, results = random_model(arch, 1), []
    for way in WAYS.values():
        with gs.CpuBackend(1) as backend:
            try:
                model = load(data, [backend], n_ctx=n_ctx, n_seq=n_seq, flash=flash, kv_type="f16" if flash else "f32")
            except gs.UnsupportedOp:
                pytest.skip("no flash attention here")
            with model:
                results.append(walk(model, way))
    assert results[0] == results[1]


def test_batches_that_one_compute_cannot_evaluate_take_the_general_path():
    tokens = [(0, [5]), (1, [6]), (2, [7])]
    with gs.CpuBackend(1) as backend:
        with load(random_llama(1), [backend], n_ctx=64, n_seq=3) as model:
            want = model.eval_batch(tokens)
        with load(random_llama(1), [backend], n_ctx=64, n_seq=3, n_batch=2) as model:
            logits = model.eval_batch(tokens)
            assert max(shape.n_tokens for shape in model._runner.graphs) == 2
            assert logits.shape == want.shape and np.allclose(logits, want, atol=1e-4)
            model.eval_batch([(0, [5]), (0, [6])])          # two tokens of one sequence
            assert model.sequence(0).tokens == [5, 5, 6] and model.n_free == 64 - 5


def test_wrong_batches_of_single_tokens_change_nothing():
    with gs.CpuBackend(1) as backend, load(random_llama(1), [backend], n_ctx=8, n_seq=3) as model:
        model.sequence(1).eval(PROMPT[:6])
        for parts, error in (([(0, [1]), (3, [1])], ValueError), ([(0, [1]), (1, [10**6])], ValueError),
                             ([(0, [1]), (1, [])], ValueError), ([(0, [1]), (-1, [2])], ValueError),
                             ([(0, [1]), 5], TypeError), ([], ValueError), ([(0, [1]), (True, [2.5])], TypeError)):
            with pytest.raises(error):
                model.eval_batch(parts)
        with pytest.raises(ContextFull, match="3 tokens after 6 do not fit a context of 8") as full:
            model.eval_batch([(0, [1]), (1, [2]), (2, [3])])
        assert full.value.n_past == 6
        assert [len(model.sequence(i).tokens) for i in range(3)] == [0, 6, 0] and model.n_free == 2
        assert model.eval_batch([(0, [1]), (2, [3])]).shape == (2, model.n_vocab)


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_context_ends_both(way, others):
    with gs.CpuBackend(1) as backend, load(random_llama(1), [backend], n_ctx=8, n_seq=2) as model:
        model.sequence(1).eval(PROMPT[:others])
        for token in range(8 - others):
            model.eval(WAYS[way](token))
        with pytest.raises(ContextFull) as error:
            model.eval(WAYS[way](1))
        assert (error.value.n_past, error.value.n_ctx) == (8 - others, 8)
        rest = ", of which 8 rows are in use" if others else ""
        assert str(error.value) == f"1 tokens after {8 - others} do not fit a context of 8{rest}"
        assert model.n_past == 8 - others


@pytest.mark.parametrize("way", WAYS)
def test_positions_that_were_not_learned_end_both(way):
    data = random_model("gpt2", 1, metadata={"context_length": 16})
    with gs.CpuBackend(1) as backend, load(data, [backend], n_ctx=32) as model:
        model.eval([5] * 16)
        with pytest.raises(ContextFull, match="position 16 is beyond the 16"):
            model.eval(WAYS[way](1))
        assert model.n_past == 16 and model.n_free == 16


def test_a_backend_that_brings_data_its_own_way_is_asked():
    watched, logits = device(records={"get_tensor"}), []
    for kind in (gs.CpuBackend(1), watched):
        with kind as backend, load(random_llama(1), [backend], n_ctx=64) as model:
            logits.append(model.eval([5]).tobytes())
    assert logits[0] == logits[1] and watched.count("get_tensor") == 1


class Failing(DeferredBackend):
    """Computes fail while `fails`; with `overtaken` another thread gets their exceptions."""

    fails = overtaken = False

    def graph_plan_compute(self, plan):
        if self.fails:
            self.queue.append(lambda: self.fail(plan))
        else:
            super().graph_plan_compute(plan)

    def fail(self, plan):
        raise gs.BackendError("broken")

    def get_tensor(self, tensor, out, offset=0):
        for backend in self.queues._devices:
            if backend.overtaken:
                with suppress(gs.BackendError):
                    backend.synchronize()
        super().get_tensor(tensor, out, offset)


@pytest.mark.parametrize("overtaken", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_no_token_has_logits_of_a_compute_that_failed(n, overtaken):
    queues = DeferredQueues(0)
    backends = [Failing(f"queue{k}", queues) for k in range(n)]
    with load(random_llama(1), backends, n_ctx=32) as model:
        model.eval([1, 2])
        want = model.eval([3])
        model.truncate(2)
        model.eval([4])
        model.truncate(2)
        backends[0].fails, backends[0].overtaken = True, overtaken
        with pytest.raises(gs.BackendError, match="another thread failed.*broken" if overtaken else "^broken"):
            model.eval([3])
        backends[0].fails = backends[0].overtaken = False
        assert model.n_past == 2 and (model.eval([3]) == want).all()
    for backend in backends:
        backend.close()


def test_logits_stay_when_more_are_asked_for():
    with gs.CpuBackend(1) as backend, load(random_llama(1), [backend], n_ctx=64) as model:
        first = model.eval([1])
        kept = first.copy()
        for token in range(5):
            model.eval([token])
        assert first.tobytes() == kept.tobytes()


@pytest.mark.parametrize("way", WAYS)
def test_an_input_with_memory_of_its_own_is_written_there(way):
    """Not only what waits on the host until it is loaded."""
    with gs.CpuBackend(1) as backend, load(random_llama(1), [backend], n_ctx=64) as model:
        model.eval(PROMPT)
        expected = model.eval(WAYS[way](9)).tobytes()
        model.truncate(len(PROMPT))
        for graph in model._runner.graphs.values():
            if graph.shape.n_tokens == 1:
                gs.bind_resident(graph.inputs.tokens, backend.alloc_buffer(64), 0)
                graph.inputs.tokens.set(np.array([1]))
        assert model.eval(WAYS[way](9)).tobytes() == expected
