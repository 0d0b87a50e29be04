"""Loading reserves for the longest text: tokens of a growing text need no planning and no new buffers."""

import pytest

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

SMALL = random_llama(1, n_vocab=64, n_embd=32, n_layer=2, n_head=4, n_head_kv=2, n_ff=48)


@pytest.mark.parametrize("flash", [False, True])
def test_tokens_of_a_growing_text_use_the_reserved_plan(flash):
    with gs.CpuBackend(1) as backend, load(SMALL, [backend], 256, flash=flash) as model:
        scheduler = model.scheduler
        held, shapes = scheduler.buffer_size(backend), set()
        for _ in range(200):
            model.eval([5])
            plan = scheduler._allocations.current.plan
            shapes.add(plan.fingerprint)
            assert plan.methods == ("replayed",) or len(shapes) == 1
        plan.verify()
        assert len(shapes) == 7 and scheduler.buffer_size(backend) == held > 0


def test_a_context_of_one_padding_reserves_nothing():
    with gs.CpuBackend(1) as backend, load(SMALL, [backend], 16) as model:
        assert model.scheduler.buffer_size(backend) == 0
        assert model.eval([1, 2, 3]).shape == (3, 64)


def test_a_model_loads_where_only_shorter_texts_fit():
    """Half of what the longest token takes is left: the first tokens are computed, one later is not."""
    def loaded(memory):
        backend = gs.CpuBackend(1, memory=memory)
        return backend, load(SMALL, [backend], 4096, flash=False, use_mmap=False)

    backend, model = loaded(1 << 30)
    with backend, model:
        arena = model.scheduler.buffer_size(backend)
        others = backend.used - arena
        expected = model.eval([1, 2, 3])
    backend, model = loaded(others + arena // 2)
    with backend, model:
        assert backend.used == others
        assert (model.eval([1, 2, 3]) == expected).all()
        with pytest.raises(gs.OutOfMemory):
            for _ in range(4096):
                model.eval([5] * 64, last_only=True)
