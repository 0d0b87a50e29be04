"""Models: their logits are llama.cpp's, however they are placed, batched and interrupted."""

import gc
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from devices import device
from processes import run_python
from small_llama import SHAPES, SMALL, TOKENS, contents, written

import ggml_sched as gs
from ggml_sched.llama import (
    ContextFull,
    ModelBusy,
    ModelClosed,
    greedy,
    load,
    open_gguf,
    random_llama,
)
from ggml_sched.llama import weights as weights_module
from ggml_sched.planning.tables import memory_text
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

HERE = Path(__file__).parents[1] / "data" / "models"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "models"
MODELS = {path.stem: path for folder in (SHARED, HERE) if folder.is_dir()
          for path in sorted(folder.glob("*.gguf")) if path.with_suffix(".logits.npz").exists()}
EXPERTS = random_llama(2, **SHAPES, n_expert=4)


@pytest.fixture(autouse=True, params=["cpu", "late"])
def every_cpu(request, monkeypatch):
    """Runs the tests below with CPU backends, and with devices whose queues run late."""
    if request.param == "late":
        world = DeferredQueues(1)

        class Late(DeferredBackend):
            def __init__(self, n_threads: int = 1, name: str = "CPU") -> None:
                super().__init__(name, world)

        monkeypatch.setattr(gs, "CpuBackend", Late)
    monkeypatch.setattr(sys.modules["ggml_sched.llama.load"], "default_backend", lambda *given: gs.CpuBackend())


def edited(data: bytes, metadata=(), drop=(), tensors=()) -> bytes:
    """The same model with other metadata and tensors."""
    values, kept = contents(data)
    return written(values | dict(metadata), {k: v for k, v in kept.items() if k not in drop} | dict(tensors))


def error_of(kind: str, got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """The error in the measure that a weight type is judged by, and its bound."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    if kind in ("f32", "f16"):
        return np.abs(got - expected).max() / np.abs(expected).max(), {"f32": 1e-4, "f16": 5e-3}[kind]
    return ((got - expected) ** 2).sum() / (expected**2).sum(), 5e-3


def backends(n: int) -> list[gs.Backend]:
    return [gs.CpuBackend(name=f"CPU{i}") for i in range(n)]


def weight_kind(path: Path) -> str:
    with open_gguf(path) as f:
        return str(f.tensors["token_embd.weight"].type)


# -- the same logits as llama.cpp -------------------------------------------------------


@pytest.mark.spread("name every_cpu", "policy every_cpu")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["default", "seed"])
def test_logits_are_those_of_llama_cpp(name, policy):
    path = MODELS[name]
    reference = np.load(path.with_suffix(".logits.npz"))
    tokens, n_prompt = reference["tokens"], int(reference["n_prompt"])
    kind = weight_kind(path)
    with load(path, n_ctx=64, policy=policy) as model:
        parts = [model.eval(tokens[:n_prompt])] + [model.eval([t]) for t in tokens[n_prompt:]]
        at_once = np.concatenate(parts)
        assert at_once.dtype == np.float32 and at_once.shape == (len(tokens), model.n_vocab)
        error, bound = error_of(kind, at_once, reference["logits"])
        assert error <= bound
        model.reset()
        assert model.n_past == 0
        one_by_one = np.concatenate([model.eval([t]) for t in tokens])
        error, bound = error_of(kind, one_by_one, at_once)
        assert error <= bound


PLACED = {"llama": SMALL, "experts": EXPERTS, "qwen3": random_llama(3, **SHAPES, arch="qwen3"),
          "tied": random_llama(4, **SHAPES, tied=True), **{n: path for n, path in MODELS.items() if n.endswith("f32")}}


@pytest.mark.spread("data", "every_cpu")
@pytest.mark.parametrize("seeds", [[0], pytest.param([1, 2], marks=pytest.mark.soak)], ids=["once", "often"])
@pytest.mark.parametrize("data", PLACED.values(), ids=PLACED)
def test_any_placement_gives_the_same_bits(data, seeds):
    """Layers spread over two and three backends, and each tensor anywhere."""
    with load(data, backends(1), n_ctx=32) as model:
        expected = np.concatenate([model.eval(part) for part in np.split(TOKENS, (7, 8))])
    for n, seed in ((2, None), (3, None), *((3, seed) for seed in seeds)):
        several, random, where = backends(n), np.random.default_rng(seed), {}

        def place(name, layer, several=several, random=random, where=where):
            return where.setdefault(name, several[random.integers(len(several))])

        with load(data, several, n_ctx=32, place=None if seed is None else place) as model:
            if seed is None:
                assert {t.backend for t in model.weights.tensors.values()} == set(several)
                assert {k.backend for k in model.cache.k} == set(several)
                assert len(model.scheduler.plan(model.batch_graph(1, 32).graph).splits) >= n
            else:
                assert all(t.backend is where[t.name] for t in model.weights.tensors.values())
            got = np.concatenate([model.eval(part) for part in np.split(TOKENS, (7, 8))])
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("data", [SMALL, random_llama(6, **SHAPES, dtype=np.float16)], ids=["f32", "f16"])
def test_mapped_and_copied_weights_give_the_same_bits(data, tmp_path):
    """The alignment of the weights' addresses changes no bit."""
    path = tmp_path / "model.gguf"
    results = []
    for alignment, pad in ((64, 0), (32, 0), (32, 32), (8, 0), (8, 8), (8, 16)):
        metadata, tensors = contents(data)
        path.write_bytes(written({**metadata, "pad": "x" * pad}, tensors, alignment=alignment))
        for use_mmap in (True, False):
            with load(path, n_ctx=32, use_mmap=use_mmap) as model:
                assert list(model.weights.mapped.values()) == [use_mmap]
                assert all(b.usage == "weights" for here in model.weights.buffers.values() for b in here)
                results.append(model.eval(TOKENS).tobytes())
    assert len(set(results)) == 1


def test_backends_that_map_and_backends_that_copy_work_together():
    with load(SMALL, n_ctx=32) as model:
        expected = model.eval(TOKENS)
    copying, cpu = device(name="device", attributes={"buffer_from_ptr": None}), gs.CpuBackend()
    with load(SMALL, [copying, cpu], n_ctx=32) as model:
        assert model.weights.mapped == {copying: False, cpu: True}
        assert model.eval(TOKENS).tobytes() == expected.tobytes()


def test_misaligned_weights_are_copied(monkeypatch):
    monkeypatch.setattr(weights_module, "ELEMENT_ALIGNMENT", 1 << 30)
    with load(SMALL, n_ctx=32) as model:
        assert list(model.weights.mapped.values()) == [False]
        assert np.isfinite(model.eval(TOKENS)).all()


# -- batches and caches --------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("n_batch", [1, 5, 12])
def test_batches_and_caches_agree_with_one_pass(n_batch, kv_type):
    with load(SMALL, n_ctx=50) as model:
        expected = model.eval(TOKENS * 4)
    with load(SMALL, n_ctx=50, n_batch=n_batch, kv_type=kv_type) as model:
        got = model.eval(TOKENS * 4)
    assert np.abs(got - expected).max() <= (1e-4 if kv_type == "f32" else 5e-3) * np.abs(expected).max()


def test_fields_that_models_with_reference_logits_do_not_have():
    """The bias of the output matrix, and the old name of the factor of rope's linear scaling."""
    with load(SMALL, n_ctx=16) as model:
        base = model.eval(TOKENS)
    with load(edited(SMALL, tensors={"output.bias": np.ones(64, np.float32)}), n_ctx=16) as model:
        assert np.allclose(model.eval(TOKENS), base + 1, atol=1e-5)
    seen = set()
    for field in ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
                  {"llama.rope.scale_linear": 4.0}):
        with load(edited(SMALL, field), n_ctx=16) as model:
            assert model.hparams.rope.freq_scale == 0.25 and model.hparams.rope.ext_factor == 0
            seen.add(model.eval(TOKENS).tobytes())
    assert len(seen) == 1


def test_graphs_repeat_while_generating():
    with load(SMALL, n_ctx=256) as model:
        model.eval(TOKENS)
        for _ in range(15):
            model.eval([1])
        assert len(model._runner.graphs) == 2  # the prompt's, and one for all tokens after it
        fingerprints = {g.graph.fingerprint for g in model._runner.graphs.values()}
        for _ in range(200):
            model.eval([1])
        assert len(model._runner.graphs) == 5 and len(fingerprints) == 2


def test_a_graph_can_be_saved_and_planned(tmp_path):
    with load(EXPERTS, n_ctx=32) as model:
        graph = model.batch_graph(4, 32).graph
        gs.save_graph(graph, tmp_path / "graph.json.gz")
        again = gs.load_graph(tmp_path / "graph.json.gz")
        assert again.fingerprint == graph.fingerprint
        assert {t.resident for t in again.leafs} == {"", "weight", "kv"}


# -- the state of a sequence -------------------------------------------------------------------


def test_a_full_context_is_an_error_and_changes_nothing():
    with load(SMALL, n_ctx=16) as model:
        first = model.eval(TOKENS)
        with pytest.raises(ContextFull, match="5 tokens after 12") as caught:
            model.eval([1] * 5)
        assert (caught.value.n_past, caught.value.n_tokens, caught.value.n_ctx) == (12, 5, 16)
        assert model.n_past == 12
        last = model.eval([1] * 4)
        assert model.n_past == 16
        model.reset()
        assert np.allclose(model.eval(TOKENS + [1] * 4), np.concatenate([first, last]), atol=1e-4)


def test_wrong_tokens_change_nothing():
    with load(SMALL, n_ctx=16) as model:
        before = model.eval(TOKENS[:3])
        for wrong, kind in (([[64], [-1], [1 << 40], [0, 1 << 40], [1 << 70]], ValueError),
                            ([[0.5], [2.0], "abc", ["a"], [None], 5, [[1, 2]], None], TypeError)):
            for tokens in wrong:
                with pytest.raises(kind):
                    model.eval(tokens)
                assert model.n_past == 3
        assert model.eval([]).shape == (0, 64)
        assert model.eval(np.array(TOKENS[3:5], np.int64)).shape == (2, 64)
        model.reset()
        assert model.eval(TOKENS[:3]).tobytes() == before.tobytes()


def test_reset_forgets():
    with load(SMALL, n_ctx=32) as model:
        first = model.eval(TOKENS)
        model.eval(TOKENS)
        model.reset()
        assert all((t.numpy() == 0).all() for t in (*model.cache.k, *model.cache.v))
        assert model.eval(TOKENS).tobytes() == first.tobytes()


def test_a_closed_model_raises_model_closed():
    model = load(SMALL, n_ctx=16)
    assert "llama" in repr(model)
    model.close()
    model.close()
    for call in (lambda: model.eval([1]), model.reset, lambda: next(model.generate([1], 1))):
        with pytest.raises(ModelClosed):
            call()
    assert "closed" in repr(model)


def test_given_backends_stay_open():
    cpu = gs.CpuBackend()
    for _ in range(2):
        with load(SMALL, [cpu], n_ctx=16) as model:
            model.eval([1])


def test_a_second_thread_gets_an_error(monkeypatch):
    with load(SMALL, n_ctx=16) as model:
        inside, go = threading.Event(), threading.Event()
        compute = model._runner.compute

        def slow(*batch):
            inside.set()
            assert go.wait(10)
            return compute(*batch)

        monkeypatch.setattr(model._runner, "compute", slow)
        results = []
        thread = threading.Thread(target=lambda: results.append(model.eval([1, 2])))
        thread.start()
        assert inside.wait(10)
        for call in (lambda: model.eval([1]), model.reset, model.close):
            with pytest.raises(ModelBusy):
                call()
        go.set()
        thread.join()
        assert results[0].shape == (2, 64) and model.n_past == 2


# -- sampling --------------------------------------------------------------------------------------


def test_generation_follows_the_sampler():
    with load(SMALL, n_ctx=64) as model:
        ids = list(model.generate(TOKENS, 8))
        assert model.n_past == len(TOKENS) + 7
        model.reset()
        logits = model.eval(TOKENS + ids)
        assert [greedy(row) for row in logits[len(TOKENS) - 1 : -1]] == ids
        with pytest.raises(ValueError, match="one token"):
            next(model.generate([], 1))


# -- files that are no models --------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "match"), [
    ({"metadata": {"general.architecture": "rwkv7"}}, "unknown architecture 'rwkv7'"),
    ({"metadata": {"general.architecture": None}}, "general.architecture"),
    ({"metadata": {"llama.embedding_length": None}}, "llama.embedding_length"),
    ({"metadata": {"llama.embedding_length": "32"}}, "llama.embedding_length"),
    ({"metadata": {"llama.block_count": 4}}, "blk.3.attn_norm.weight"),
    ({"metadata": {"llama.block_count": 2}}, "blk.2.*not one"),
    ({"metadata": {"llama.block_count": (1 << 32) - 1}}, "llama.block_count"),
    ({"metadata": {"llama.block_count": 1 << 20}}, f"llama.block_count: is {1 << 20}, not an integer in 1"),
    ({"metadata": {"llama.attention.head_count": 0}}, "head_count"),
    ({"metadata": {"llama.attention.head_count": [4, 4, 2]}}, "blk.2.attn_q.weight"),
    ({"metadata": {"llama.attention.head_count": [4, 4]}}, "2 numbers for 3 layers"),
    ({"metadata": {"llama.context_length": [512, 256]}}, "differs"),
    ({"metadata": {"llama.attention.head_count_kv": 3}}, "evenly"),
    ({"metadata": {"llama.attention.head_count": 8, "llama.rope.dimension_count": 4}}, "blk.0.attn_k.weight"),
    ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "epsilon"),
    ({"metadata": {"llama.rope.dimension_count": 7}}, "rope"),
    ({"metadata": {"llama.rope.dimension_count": 10}}, "rope.dimension_count"),
    ({"metadata": {"llama.rope.freq_base": 0.0}}, "freq_base"),
    ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope_factors_long"),
    ({"metadata": {"llama.rope.scaling.type": "dynamic"}}, "dynamic"),
    ({"metadata": {"llama.rope.scaling.factor": float("inf")}}, "scaling.factor"),
    ({"metadata": {"llama.vocab_size": 65}}, "token_embd.weight"),
    ({"metadata": {"llama.expert_count": 4}}, "experts"),
    ({"metadata": {"llama.expert_count": 2, "llama.expert_used_count": 3}}, "3 of 2 experts"),
    ({"metadata": {"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5}}, "32 does not split into 5"),
    ({"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 1e-5}}, "magnitude"),
    ({"metadata": {"llama.context_length": True}}, "context_length: is True"),
    ({"metadata": {"llama.expert_count": 4, "llama.expert_used_count": 2}}, "ffn_gate_inp"),
    ({"drop": ["blk.1.ffn_up.weight"]}, "blk.1.ffn_up.weight"),
    ({"drop": ["token_embd.weight"]}, "token_embd.weight"),
    ({"tensors": {"blk.0.attn_q.weight": np.zeros((32, 16), np.float32)}}, "blk.0.attn_q.weight"),
    ({"tensors": {"mystery": np.zeros(4, np.float32)}}, "mystery"),
])
def test_what_is_wrong_with_a_model_is_named(change, match):
    with pytest.raises(gs.FileFormatError, match=match):
        load(edited(SMALL, **change), n_ctx=16)


def test_heads_given_for_each_layer_may_agree():
    with load(edited(SMALL, {"llama.attention.head_count": [4, 4, 4]}), n_ctx=16) as model:
        assert model.hparams.n_head == 4


def test_tensors_of_old_files_that_rope_computes_are_ignored():
    data = edited(SMALL, tensors={"blk.0.attn_rot_embd": np.zeros(4, np.float32)})
    with load(data, n_ctx=16) as model:
        assert "blk.0.attn_rot_embd" not in model.weights.tensors


def test_a_model_that_does_not_fit_says_where():
    small = gs.DryBackend("small", memory=10_000)
    with pytest.raises(gs.OutOfMemory, match="small"):
        load(SMALL, [small], n_ctx=16)
    assert small.used == 0
    # The weights fit, the cache does not.
    with open_gguf(SMALL) as f:
        total = sum(-(-t.nbytes // 32) * 32 for t in f.tensors.values())
    tight = gs.DryBackend("tight", memory=total + 100)
    with pytest.raises(gs.OutOfMemory, match="tight"):
        load(SMALL, [tight], n_ctx=16)
    assert tight.used == 0


def test_what_no_backend_computes_is_known_at_load():
    picky = gs.DryBackend("picky", supports_op=lambda tensor: tensor.op != "ROPE")
    with pytest.raises(gs.UnsupportedOp, match="ROPE"):
        load(SMALL, [picky], n_ctx=16)
    assert picky.used == 0


def test_a_live_model_at_exit_prints_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    code = (f"from ggml_sched.llama import load; model = load({str(path)!r})\n"
            "ids = model.generate([1, 2], 9); next(ids)")
    done = run_python("-X", "dev", "-W", "error", "-c", code)
    assert done.stdout + done.stderr == ""


def test_a_model_runs_on_dry_backends_for_planning():
    three = [gs.DryBackend(f"GPU{i}") for i in range(3)]
    with load(SMALL, three, n_ctx=16) as model:
        plan = model.scheduler.plan(model.batch_graph(4, 16).graph)
        assert len(plan.splits) >= 3
    gc.collect()
    assert [b.used for b in three] == [0, 0, 0]


def test_notebooks_show_a_model_as_escaped_text():
    with gs.CpuBackend(1, name="<cpu>") as backend:
        with load(SMALL, [backend], n_ctx=64, n_seq=2) as model:
            model.sequence(1).eval([1, 2, 3])
            shown = model._repr_html_()
            weights = memory_text(model.memory()[backend].weights)
        closed = model._repr_html_()
    assert shown.startswith("<pre") and shown.endswith("\nsequence 1: 3 tokens</pre>") and "<cpu>" not in shown
    assert f"&lt;cpu&gt;: weights {weights}, cache " in shown and "&lt;Model llama: 3 layers of 32" in shown
    assert "closed" in closed and "weights 0 B, cache 0 B, arena 0 B" in closed
