"""Models whose weights have interleaved rows: the same logits, memory in place of the mapping, and what is refused."""

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backends.cpu._kernels import interleaves

pytestmark = pytest.mark.skipif(not interleaves(int(gs.Type.Q4_0)),
                                reason="no rows are interleaved for this instruction set")

TOKENS = [5, 17, 3, 99, 250, 31, 7, 64]
SIZES = {"n_vocab": 320, "n_embd": 256, "n_ff": 512, "n_layer": 2, "n_ctx": 128}


@pytest.fixture(params=["q4_0", "q4_K"], scope="module")
def model(request, tmp_path_factory):
    """The path of a model with weights of this type."""
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    path.write_bytes(llama.random_llama(3, dtype=request.param, **SIZES))
    return path


def near(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal but for roundings, which activations of eight bits enlarge in the layers that follow."""
    return bool(np.abs(got - want).max() <= 0.03 * np.abs(want).max())


def test_logits_of_tokens_prompts_and_batches_are_those_of_the_mapping(model):
    with llama.load(model, n_seq=3) as plain, llama.load(model, n_seq=3, interleave=True) as interleaved:
        for m in (plain, interleaved):
            assert m.eval(TOKENS).shape == (len(TOKENS), SIZES["n_vocab"])
        assert near(interleaved.eval([11]), plain.eval([11]))
        assert near(*(m.eval_batch([(1, [4]), (2, [9])]) for m in (interleaved, plain)))
        assert near(interleaved.embed(TOKENS), plain.embed(TOKENS))


def test_weights_are_private_memory_in_place_of_the_mapping(model):
    with llama.load(model) as plain, llama.load(model, interleave=True) as interleaved:
        (before,), (after,) = plain.memory().values(), interleaved.memory().values()
        assert after.weights == before.weights
        tensors = interleaved._runner.weights.tensors.values()
        moved = sum(t.nbytes for t in tensors if not t.buffer.is_read(t.offset))
        assert 0.5 * after.weights < moved == before.mapped - after.mapped
        assert interleaved.backends[0].used - plain.backends[0].used >= moved
        interleaved.eval(TOKENS)
        interleaved.eval([1])
        assert interleaved.memory().popitem()[1].mapped == after.mapped, "what is read interleaved moves nowhere"


def test_all_memory_ends_with_the_model(model):
    with gs.CpuBackend(2) as backend:
        with llama.load(model, [backend], interleave=True) as m:
            m.eval(TOKENS)
            assert backend.used > 0
        assert backend.used == 0


def test_copied_weights_are_interleaved_too(model):
    with llama.load(model) as plain, llama.load(model, interleave=True, use_mmap=False) as interleaved:
        assert near(interleaved.eval(TOKENS), plain.eval(TOKENS))
        (before,), (after,) = plain.memory().values(), interleaved.memory().values()
        assert after.weights > 1.5 * before.weights and after.mapped == 0


def test_a_model_that_moved_is_interleaved_again(model):
    first, second = gs.CpuBackend(1, name="A"), gs.CpuBackend(1, name="B")
    with first, second, llama.load(model, [first], interleave=True) as m:
        m.eval(TOKENS)
        with m.moved([second]) as moved:
            assert any(not t.buffer.is_read(t.offset) for t in moved._runner.weights.tensors.values())


def test_experts_are_interleaved(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(llama.random_llama(3, dtype="q4_0", n_expert=4, **SIZES))
    with llama.load(path) as plain, llama.load(path, interleave=True) as interleaved:
        experts = [t for name, t in interleaved._runner.weights.tensors.items() if "exps" in name]
        assert experts and not any(t.buffer.is_read(t.offset) for t in experts)
        assert near(interleaved.eval(TOKENS), plain.eval(TOKENS))


def test_a_model_without_such_weights_is_refused_and_leaves_no_memory(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(llama.random_llama(3, dtype="f16", **SIZES))
    with gs.CpuBackend(1) as backend:
        with pytest.raises(gs.UnsupportedOp, match="interleave=True"):
            llama.load(path, [backend], interleave=True)
        assert backend.used == 0
        with llama.load(path, [backend]) as m:
            assert np.isfinite(m.eval(TOKENS)).all()


def test_limits_of_memory_are_refused(model):
    with pytest.raises(TypeError, match="interleave"):
        llama.load(model, memory=10 << 20, interleave=True)
