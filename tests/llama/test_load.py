"""Loading: choice of backend, context size and attention, and plans reserved for the longest text."""

import os
import sys

import numpy as np
import pytest
from devices import device, poisoned
from small_llama import SHAPES

import ggml_sched as gs
from ggml_sched import _host
from ggml_sched.llama import load, model_graphs, random_llama
from ggml_sched.llama.defaults import default_backend, named_backends
from ggml_sched.llama.load import longest, trained_context

SMALL = random_llama(1, **SHAPES, n_ctx=96)
TOKENS = [3, 14, 15, 9, 26, 5]


def test_attention_is_one_node_where_every_layer_has_it():
    plain, logits = device(name="plain", refuses={"FLASH_ATTN_EXT"}), []
    for backends, flash, expected in (([gs.CpuBackend()], None, True), ([gs.CpuBackend()], False, False),
                                      ([plain], None, False), ([gs.CpuBackend(), plain], None, False)):
        with load(SMALL, backends, n_ctx=32, flash=flash) as model:
            assert model.flash is expected
            ops = {node.op for node in model.batch_graph(1, 32).graph.nodes}
            assert ("FLASH_ATTN_EXT" in ops) is expected and ("SOFT_MAX" in ops) is not expected
            logits.append(model.eval(TOKENS))
    for other in logits[1:]:
        assert np.abs(other - logits[0]).max() <= 1e-4 * np.abs(logits[0]).max()
    with pytest.raises(gs.UnsupportedOp, match="FLASH_ATTN_EXT"):
        load(SMALL, [plain], n_ctx=32, flash=True)


def test_nothing_is_held_after_loading_in_vain_or_in_two_ways(monkeypatch):
    """The default backend is closed, and the cache that was laid out for attention in one node is given back."""
    copies = {"buffer_from_ptr": None}
    backend = device(refuses={"FLASH_ATTN_EXT"}, attributes=copies, memory=1 << 24)
    with load(SMALL, [backend], n_ctx=32) as model:
        held = sum(b.size for b in (*model.cache.buffers.values(), *model.weights.buffers[backend]))
        assert not model.flash and held <= backend.used < held + (1 << 12)
    assert backend.used == 0
    for wrong, kind in ((b"nothing", gs.FileFormatError), (SMALL, gs.UnsupportedOp)):
        backend = device(refuses={"FLASH_ATTN_EXT", "ROPE"}, attributes=copies)
        monkeypatch.setattr(sys.modules["ggml_sched.llama.load"], "default_backend",
                            lambda *given, backend=backend: backend)
        with pytest.raises(kind):
            load(wrong, n_ctx=32)
        assert backend.closed and backend.used == 0


def test_nothing_is_held_where_a_backend_fails_to_say_what_it_supports(monkeypatch):
    backend = device(attributes={"buffer_from_ptr": None})
    monkeypatch.setattr(backend, "supports_op", lambda node: 1 // 0)
    with pytest.raises(ZeroDivisionError) as failure:
        load(SMALL, [backend], n_ctx=32)
    assert backend.used == 0 and failure.tb is not None     # the traceback holds what is not closed


def test_types_of_blocks_need_attention_in_one_node():
    data = random_llama(1, **{**SHAPES, "n_embd": 128, "n_head_kv": 4})
    with load(data, n_ctx=32, kv_type="f32") as model:
        expected = model.eval(TOKENS)
    with load(data, n_ctx=32, kv_type="q8_0") as model:
        assert model.kv_type == "q8_0"
        assert np.abs(model.eval(TOKENS) - expected).max() <= 0.05 * np.abs(expected).max()
    with pytest.raises(ValueError, match="flash"):
        load(data, n_ctx=32, kv_type="q8_0", flash=False)
    narrow = random_llama(1, **{**SHAPES, "n_embd": 64})
    for flash in (None, True):
        with pytest.raises(ValueError, match="heads of 16 elements do not hold whole blocks of q8_0"):
            load(narrow, n_ctx=32, kv_type="q8_0", flash=flash)
    with pytest.raises(ValueError, match="heads of 16 elements"):
        model_graphs(narrow, 32, 4, kv_type="q8_0")


def test_where_a_full_context_has_no_memory_short_texts_still_fit():
    copies = {"buffer_from_ptr": None}
    with device(attributes=copies) as backend, load(SMALL, [backend], n_ctx=4096, flash=False) as model:
        needed = backend.used
        expected = model.eval(TOKENS)
    with (device(attributes=copies, memory=needed - 1) as backend,
          load(SMALL, [backend], n_ctx=4096, flash=False) as model):
        assert model.eval(TOKENS).tobytes() == expected.tobytes()
        with pytest.raises(gs.OutOfMemory, match="'CPU'.*are missing"):
            model.eval([1] * 4000)
        assert model.n_past == len(TOKENS)


def test_a_cache_is_zero_whatever_the_memory_held():
    with poisoned("device") as backend, load(SMALL, [backend], n_ctx=32) as model:
        assert not any(t.numpy().any() for t in (*model.cache.k, *model.cache.v))


def test_a_cache_that_fits_one_backend_alone_is_given_back():
    with load(SMALL, [first := gs.DryBackend("first"), last := gs.DryBackend("last")], n_ctx=32) as model:
        weights = sum(buffer.size for buffer in model.weights.buffers[last])
        assert first in model.cache.buffers and model.cache.buffers[last].size > 100
    first, last = gs.DryBackend("first"), gs.DryBackend("last", memory=weights + 100)
    with pytest.raises(gs.OutOfMemory, match="last"):
        load(SMALL, [first, last], n_ctx=32)
    assert first.used == last.used == 0


def test_the_context_that_a_model_was_trained_with():
    for given in (None, 0):
        with load(SMALL, n_ctx=given) as model:
            assert model.n_ctx == 96
        with pytest.raises(ValueError, match="kv_type = 'nonsense'; known"):
            load(SMALL, n_ctx=given, kv_type="nonsense")
    with load(random_llama(1, **SHAPES, n_ctx=(1 << 31) - 1), [gs.DryBackend("dry")], n_ctx=None) as model:
        held = sum(buffer.size for buffer in model.cache.buffers.values())
        assert model.n_ctx > 512 and held <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_the_context_is_known_where_the_system_does_not_say_how_much_memory_is_free(monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    monkeypatch.setattr(_host, "MEMINFO", os.devnull)
    with load(SMALL) as model:
        assert model.n_ctx == 96


@pytest.mark.parametrize("most, tried, found", [
    (9, [8], 8), (8, [8], 8), (5, [8, 1, 4], 4), (2, [8, 1, 4, 2], 2), (1, [8, 1, 4, 2], 1), (0, [8, 1], None)])
def test_the_longest_context_is_found_and_a_refusal_takes_two_attempts(most, tried, found):
    heard = []

    def attempt(n_ctx):
        heard.append(n_ctx)
        if n_ctx > most:
            raise gs.OutOfMemory(f"{n_ctx} tokens")
        return -n_ctx

    if found is None:
        with pytest.raises(gs.OutOfMemory, match="1 tokens"):
            longest([8, 4, 2, 1], attempt)
    else:
        assert longest([8, 4, 2, 1], attempt) == (found, -found)
    assert heard == tried


def test_progress_ends_with_everything(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    heard = []
    with load(path, n_ctx=16, progress=lambda done, total: heard.append((done, total))):
        pass
    assert heard == sorted(heard) and heard[-1][0] == heard[-1][1] > 10_000


def test_the_default_backend_is_the_one_that_is_known_to_be_faster(monkeypatch):
    class Ggml(gs.CpuBackend):
        def __init__(self, device: str, n_threads: int | None, *, name: str) -> None:
            super().__init__(n_threads, name=name)
            self.device = device

    def missing(*args, **options):
        raise gs.BackendError("pip install 'ggml-sched[ggml]'")

    monkeypatch.setattr(gs, "GgmlBackend", Ggml)
    defaults = sys.modules["ggml_sched.llama.defaults"]
    for instructions in ("avx2", "avxvnni", "avx512"):
        monkeypatch.setattr(defaults, "isa", lambda instructions=instructions: instructions)
        with default_backend(2) as backend:
            assert type(backend) is gs.CpuBackend and backend.n_threads == 2
    for instructions in ("neon", "dotprod", "portable"):
        monkeypatch.setattr(defaults, "isa", lambda instructions=instructions: instructions)
        with default_backend(2) as backend:
            assert type(backend) is Ggml and (backend.name, backend.n_threads) == ("GGML", 2)
    with load(SMALL, n_ctx=16) as model:
        assert isinstance(model.backends[0], Ggml)
    first, second, third = named_backends(["ggml:Vulkan0", "cpu", "cpu"], 1)
    assert (first.device, first.name, second.name, third.name) == ("Vulkan0", "VULKAN0", "CPU0", "CPU1")
    monkeypatch.setattr(gs, "GgmlBackend", missing)
    with default_backend() as backend:
        assert type(backend) is gs.CpuBackend
    with pytest.raises(gs.BackendError, match="pip install"):
        named_backends(["cpu", "ggml"])
    with pytest.raises(ValueError, match="abacus"):
        named_backends(["cpu", "abacus"])


def test_threads_are_those_of_the_default_backend():
    with load(SMALL, n_ctx=16, n_threads=1) as model:
        assert model.backends[0].n_threads == 1 and model.residency is None and model.store is None
    with gs.CpuBackend(n_threads=1) as cpu, pytest.raises(TypeError, match="default backend"):
        load(SMALL, [cpu], n_threads=1)


def test_the_context_is_the_model_s_own_where_memory_allows():
    with load(SMALL) as model:
        h = model.hparams
        assert model.n_ctx == h.n_ctx_train
    row = 4 * sum(layer.n_embd_k + layer.n_embd_v for layer in h.layers)
    with gs.CpuBackend(1, memory=10 * row) as first, gs.CpuBackend(1, "other", memory=10 * row) as second:
        assert trained_context(h, gs.Type.F32, [first]) == 5
        assert trained_context(h, gs.Type.F32, [first, second]) == 10
        assert trained_context(h, gs.Type.F16, [first]) == 10


@pytest.mark.parametrize(("call", "name", "hint"), [
    ("load", "n_gpu_layers", "backends"), ("load", "type_k", "kv_type"), ("load", "context_length", "'n_ctx'"),
    ("load", "n_thread", "'n_threads'"),
    ("load", "abacus", "it has arenas, backends, experts, flash, huge_pages, interleave, kv_type"),
    ("generate", "max_tokens", "'n'"), ("generate", "max_new_tokens", "'n'"), ("generate", "temp", "'temperature'"),
    ("generate", "top_kk", "'top_k'"), ("generate", "ignore_eof", "'ignore_eos'"),
    ("generate", "abacus", "it has echo, frequency_penalty, ignore_eos, .*, parse_special, .*, prompt, "),
    ("chat", "max_tokens", "'n'"), ("chat", "abacus", "it has frequency_penalty, .*, messages, .*, parse_special, "),
    ("load", "max_tokens", "model.generate takes n"), ("load", "model_path", "'path'"),
])
def test_an_unknown_argument_is_an_error_that_says_what_it_is_called_here(call, name, hint):
    with pytest.raises(TypeError, match=f"{call}.. has no argument '{name}': .*{hint}"):
        if call == "load":
            load(SMALL, n_ctx=16, **{name: 1})
        with load(SMALL, n_ctx=16) as model:
            getattr(model, call)([1], **{name: 1})


@pytest.mark.parametrize(("name", "value", "kind"), [
    ("n_ctx", "512", TypeError), ("n_ctx", 2.5, TypeError), ("n_ctx", -1, ValueError), ("n_batch", "64", TypeError),
    ("n_batch", 0, ValueError), ("n_seq", "2", TypeError), ("n_seq", 64, ValueError), ("kv_type", "", ValueError),
    ("kv_type", "q6_K", ValueError), ("place", 3, TypeError), ("progress", 3, TypeError),
    ("backends", "cpu", TypeError), ("backends", ["cpu"], TypeError), ("backends", [None], TypeError),
    ("backends", 3, TypeError),
    ("a model is", None, TypeError), ("a model is", 3, TypeError), ("n_ctx", 1 << 40, ValueError),
    ("backend", [], ValueError), ("place", lambda name, layer: None, gs.PlacementError),
    ("place", lambda name, layer: gs.DryBackend("other"), gs.PlacementError),
    ("policy", "unheard of", (ValueError, gs.Error)),
])
def test_wrong_arguments_are_named(name, value, kind):
    with pytest.raises(kind, match=name):
        load(value) if name == "a model is" else load(SMALL, **{{"backend": "backends"}.get(name, name): value})


def test_one_backend_is_no_list():
    with gs.CpuBackend() as backend, pytest.raises(TypeError, match=r"load\(path, \[backend\]\), not <CpuBackend"):
        load(SMALL, backend)


def test_cache_types_are_named_as_files_and_people_do():
    with load(SMALL, n_ctx=32, kv_type="F16") as model:
        assert model.kv_type == "f16"


# -- memory -----------------------------------------------------------------------------------


def test_a_model_says_what_it_holds_on_each_backend(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    with gs.CpuBackend(1, name="A", memory=1 << 24) as first, gs.CpuBackend(1, name="B", memory=1 << 24) as last:
        for use_mmap in (True, False):
            with load(path, [first, last], 64, n_seq=2, use_mmap=use_mmap) as model:
                before = model.memory()
                model.eval(TOKENS)
                held = model.memory()
                assert list(held) == [first, last]
                for backend, on in held.items():
                    assert on.weights > 0 and on.mapped == (on.weights if use_mmap else 0)
                    assert on.total - on.work == on.weights + on.cache + on.arena == backend.used + on.mapped
                    assert on.work == backend.host_work_held > 0
                    assert on.arena == model.scheduler.buffer_size(backend) >= before[backend].arena
                    assert on[:3] == before[backend][:3]
                # Rows of keys and values, f32, of both layers.
                assert sum(on.cache for on in held.values()) == 64 * model._runner.sizes()[0]
            assert set(model.memory().values()) == {(0, 0, 0, 0, 0)}


def test_out_of_memory_says_what_the_memory_was_for():
    with gs.CpuBackend(1, memory=1000) as backend, pytest.raises(gs.OutOfMemory, match="1000 of 1000 left") as caught:
        load(SMALL, [backend], 64)
    assert caught.value.__notes__ == [f"for the tensors of context 'KV cache on CPU': {caught.value.needed} bytes in "
                                      "one buffer"]


def test_the_memory_of_a_model_is_found_without_having_it():
    with (gs.CpuBackend(1) as cpu, load(SMALL, [cpu], 4096, use_mmap=False) as model,
          load(SMALL, [dry := gs.DryBackend("GPU")], 4096) as planned):
        assert planned.memory()[dry][:3] == model.memory()[cpu][:3]


# -- reserved plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("flash", [False, True])
def test_tokens_of_a_growing_text_use_the_reserved_plan(flash):
    with gs.CpuBackend(1) as backend, load(SMALL, [backend], 512, flash=flash) as model:
        scheduler = model.scheduler
        held, shapes = scheduler.buffer_size(backend), set()
        for _ in range(400):
            model.eval([5])
            plan = scheduler._allocations.current.plan
            shapes.add(plan.fingerprint)
            assert plan.methods == ("replayed",) or len(shapes) == 1
        plan.verify()
        assert len(shapes) == 7 and scheduler.buffer_size(backend) == held > 0


def test_a_token_of_every_sequence_needs_no_more_memory_than_their_prompts():
    """The logits of n_batch tokens, 4 MiB here, are for those who want all of them."""
    data = random_llama(1, **{**SHAPES, "n_vocab": 4096})
    with gs.CpuBackend(1) as backend, load(data, [backend], 256, n_batch=256, n_seq=4) as model:
        model.eval_batch([(i, TOKENS) for i in range(4)])
        held = model.scheduler.buffer_size(backend)
        for n in (4, 2, 3):
            assert model.eval_batch([(i, [5]) for i in range(n)]).shape == (n, 4096)
            assert model.scheduler._allocations.current.plan.methods == ("replayed",) or n == 4
        assert model.scheduler.buffer_size(backend) == held < 256 * 4096 * 4
        model.eval(TOKENS)
        assert model.scheduler.buffer_size(backend) >= 256 * 4096 * 4


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
