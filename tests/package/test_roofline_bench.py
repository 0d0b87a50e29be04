"""Parts of bench/roofline.py: what a token reads from memory, and where its time goes."""

import pytest
import roofline

import ggml_sched as gs
from ggml_sched import llama

SIZES = {"n_vocab": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 96}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.random_llama(3, **SIZES))
    with gs.CpuBackend(2) as cpu, llama.load(path, [cpu], n_ctx=128, kv_type="f16") as model:
        yield cpu, model


def weights_of_a_token():
    """Bytes of the f32 weights that a token of SIZES reads, its row of the embedding among them."""
    n, ff, kv = SIZES["n_embd"], SIZES["n_ff"], SIZES["n_embd"] // 2
    layer = 2 * n * n + 2 * n * kv + 3 * n * ff + 2 * n
    return 4 * (n + SIZES["n_layer"] * layer + n + n * SIZES["n_vocab"])


def test_a_token_reads_each_weight_once_and_the_used_rows_of_the_cache(model):
    _, model = model
    rows = SIZES["n_layer"] * 2 * 2 * (SIZES["n_embd"] // 2)        # bytes of one row of all caches, in f16
    for depth in (31, 47):
        assert roofline.needs(model, 1, depth, 1).nbytes == weights_of_a_token() + (depth + 1) * rows


def test_the_parts_of_a_token_add_up_to_its_time(model):
    cpu, model = model
    model.eval([*range(20)])
    parts = roofline.split(cpu, lambda: model.eval([7], last_only=True), 3)
    assert set(parts) == set(roofline.PARTS) and all(seconds >= 0 for seconds in parts.values())
    assert parts["products"] > 0 and parts["attention"] > 0 and parts["small nodes"] > 0 and parts["host"] > 0


def test_the_limit_of_a_batch_is_the_slower_of_reading_and_computing():
    limits = type("Limits", (), {"bandwidth": 10.0, "operations": 100.0})
    assert roofline.Row(50, 100).limit(limits) == 5 and roofline.Row(50, 1000).limit(limits) == 10


def test_the_limits_of_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(roofline, "READ", 1 << 20)
    monkeypatch.setattr(roofline, "ROUNDS_OF_PRODUCTS", 1000)
    with roofline.compiled_limits() as library:
        limits = roofline.Limits(library, 2)
        limits.measure()
        assert limits.bandwidth > 0 and limits.operations > 0
