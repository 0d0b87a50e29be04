"""Models that share arenas: the bits of models with their own, in turns, in threads, under limits, after moves."""

import threading

import pytest
from devices import PATIENCE
from small_llama import MAMBA, TOKENS

import ggml_sched as gs
from ggml_sched.llama import load, random_llama

FILES = [random_llama(k, n_vocab=120, n_embd=64, n_layer=2 + k, n_head=4, n_head_kv=2, n_ff=96 + 32 * k)
         for k in range(3)]
OPTIONS = {"n_ctx": 64, "n_batch": 16}


def replies(model):
    model.reset()
    return [model.eval(TOKENS).tobytes(), *(model.eval([token]).tobytes() for token in TOKENS[:3])]


@pytest.fixture(scope="module")
def expected():
    found = []
    for data in FILES:
        with load(data, n_threads=1, **OPTIONS) as model:
            found.append(replies(model))
    return found


@pytest.fixture(params=["own", "wait"])
def arenas(request):
    with gs.Arenas(request.param) as arenas:
        yield arenas


def close(models):
    for model in models:
        model.close()


def test_models_that_take_turns_need_the_largest_of_their_arenas(arenas, expected):
    with gs.CpuBackend(1) as cpu:
        alone = []
        for data in FILES:
            with load(data, [cpu], **OPTIONS) as model:
                replies(model)
                alone.append(model.memory()[cpu].arena)
        models = [load(data, [cpu], arenas=arenas, **OPTIONS) for data in FILES]
        for _ in range(2):
            assert [replies(model) for model in models] == expected
        for model in models:
            model.reset()
        assert [model.eval(TOKENS).tobytes() for model in models] == [found[0] for found in expected]
        for k, token in enumerate(TOKENS[:3]):
            assert [model.eval([token]).tobytes() for model in models] == [found[k + 1] for found in expected]
        assert arenas.nbytes(cpu) == max(alone) < sum(alone)
        close(models)
        assert arenas.nbytes(cpu) == 0


def test_models_of_several_threads_compute_the_same_bits(arenas, expected):
    with gs.CpuBackend(1) as cpu:
        models = [load(data, [cpu], arenas=arenas, **OPTIONS) for data in FILES]
        wrong = []

        def work(model, wanted):
            try:
                wrong.extend(k for k in range(6) if replies(model) != wanted)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work, args=pair) for pair in zip(models, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert wrong == []
        close(models)


def test_a_model_under_a_limit_shares_its_window_too(arenas, expected, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[2])
    with pytest.raises(gs.OutOfMemory) as raised:
        load(path, memory=0, n_threads=1, **OPTIONS)
    with gs.CpuBackend(1) as cpu:
        one = load(path, [cpu], memory=raised.value.needed, arenas=arenas, **OPTIONS)
        two = load(FILES[0], [cpu], arenas=arenas, **OPTIONS)
        assert one.residency.fetched
        for _ in range(3):
            assert replies(one) == expected[2] and replies(two) == expected[0]
        assert sum(on.total for on in one.memory().values()) <= raised.value.needed
        close([one, two])


def test_a_recurrent_model_keeps_its_states_when_another_computes(arenas, expected):
    with load(MAMBA, n_threads=1, **OPTIONS) as model:
        wanted = replies(model)
    with gs.CpuBackend(1) as cpu:
        one, two = load(MAMBA, [cpu], arenas=arenas, **OPTIONS), load(FILES[0], [cpu], arenas=arenas, **OPTIONS)
        one.reset()
        found = [one.eval(TOKENS).tobytes()]
        for token in TOKENS[:3]:
            assert replies(two) == expected[0]
            found.append(one.eval([token]).tobytes())
        assert found == wanted
        close([one, two])


def test_a_failed_load_leaves_the_others_their_memory(arenas, expected):
    with gs.CpuBackend(1) as cpu, load(FILES[0], [cpu], arenas=arenas, **OPTIONS) as model:
        replies(model)
        wanted = arenas.nbytes(cpu)
        with pytest.raises(gs.OutOfMemory):
            load(FILES[1], [cpu], memory=0, arenas=arenas, **OPTIONS)
        assert replies(model) == expected[0] and arenas.nbytes(cpu) == wanted


def test_a_model_that_moves_shares_the_same_arenas(arenas, expected, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(FILES[0])
    with gs.CpuBackend(1) as one, gs.CpuBackend(1, "other") as two:
        model = load(path, [one], arenas=arenas, **OPTIONS)
        replies(model)
        with model.moved([two]) as moved:
            assert replies(moved) == expected[0]
            assert arenas.nbytes(two) == moved.memory()[two].arena > 0
        model.close()


def test_arenas_need_backends_in_common():
    with gs.Arenas() as arenas, pytest.raises(TypeError, match="give each load the same backends"):
        load(FILES[0], arenas=arenas)
