"""Models of experts whose placement has slots: `llama.load(place=fit)` keeps the memory and gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backends.store import has_slots
from ggml_sched.experts import LeastRecentlyUsed, replay
from ggml_sched.llama import Model, random_llama
from ggml_sched.planning.program import Fetch, FetchExperts

pytestmark = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")

SIZES = {"n_vocab": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 192, "n_expert": 8}
OPTIONS = {"n_ctx": 64, "n_batch": 4, "kv_type": "f16"}
PROMPT = [3, 14, 15, 92, 65, 35, 89]
DISK = gs.Link(1e9, 1e-5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(7, **SIZES))
    return path


def said(model: Model) -> list[bytes]:
    """Logits of a prompt and of tokens after it."""
    model.reset()
    found = [model.eval(PROMPT, last_only=True).tobytes()]
    return found + [model.eval([token]).tobytes() for token in (5, 8, 13, 21, 34, 55)]


def unlimited(path: Path, backend: gs.Backend) -> list[bytes]:
    with llama.load(path, [backend], **OPTIONS) as model:
        return said(model)


def fitted(path: Path, memory: int, host: gs.Backend, others: Sequence[gs.Device] = (), **options: object) -> gs.Fit:
    given = gs.Device("CPU", memory, 1e10, 1e11, host=True, backend=host, fetch=DISK)
    backends = [*(device.backend for device in others), host]
    graphs = llama.model_graphs(path, OPTIONS["n_ctx"], OPTIONS["n_batch"], kv_type="f16", backends=backends)
    return gs.fit(graphs, [*others, given], within=0.1, **options)


@pytest.mark.parametrize("memory", [1_700_000, 2_000_000, 2_500_000, 3_000_000, 3_500_000])
def test_a_model_has_the_slots_of_its_fit_and_the_bits_of_a_model_without_a_limit(path: Path, memory: int) -> None:
    with gs.CpuBackend(1, name="CPU") as host:
        right, fit = unlimited(path, host), fitted(path, memory, host)
        slots = fit.fetching.slots
        assert 8 <= slots.n_slots < 24 and fit.fetching.names == ()
        with llama.load(path, place=fit) as model:
            assert said(model) == right == said(model)
            assert model.slots.n_slots == slots.n_slots and model.slots.slot_nbytes == slots.slot_nbytes
            assert model.residency.fetched == () and model.residency.rows == fit.fetching.rows
            held = model.memory()[host]
            assert held.weights == fit.memory[0].weights + fit.memory[0].slots
            assert held.arena <= fit.memory[0].arena + fit.memory[0].left
            assert sum(on.total for on in model.memory().values()) <= memory
            assert model.slots.held_nbytes <= model.slots.nbytes
            graph = model.batch_graph(1, model.cache.padded(1)).graph
            plan = model.scheduler.plan(graph)
            plan.verify()
            assert [type(step) for step in plan.program.steps].count(FetchExperts) == 3
            # The price of the model's plan is that of the fit's.
            disk = fit.fetching.disk.replace(name=model.store.name)
            price = gs.price(plan, [*fit.devices, disk], {(disk.name, "CPU"): gs.Link(1e30)})
            assert price.fetches == pytest.approx(fit.prices[0].fetches)


def test_dense_weights_are_fetched_beside_the_fewest_slots(path: Path) -> None:
    options = {**OPTIONS, "n_batch": 1}
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = llama.model_graphs(path, 64, 1, kv_type="f16", backends=[host])
        given = gs.Device("CPU", 0, 1e10, 1e11, host=True, backend=host, fetch=DISK)
        with pytest.raises(gs.OutOfMemory) as caught:
            gs.fit(graphs, [given])
        least = caught.value.needed
        with llama.load(path, [host], **options) as model:
            right = [model.eval([token]).tobytes() for token in PROMPT]
        fetched = []
        for memory in (least, least + 60_000, least + 120_000):
            fit = gs.fit(graphs, [given.replace(memory=memory)])
            fetched.append(fit.fetching.nbytes)
            with llama.load(path, place=fit) as model:
                assert [model.eval([token]).tobytes() for token in PROMPT] == right
                assert model.residency.fetched == fit.fetching.names
                assert model.slots.n_slots == fit.fetching.slots.n_slots == 2
                assert sum(on.total for on in model.memory().values()) <= memory
                plan = model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph)
                kinds = [type(step) for step in plan.program.steps]
                assert kinds.count(Fetch) == len(fit.fetching.names) and kinds.count(FetchExperts) == 3
        assert fetched == sorted(fetched, reverse=True) and fetched[0] > 100_000
        with pytest.raises(gs.OutOfMemory, match=r"more on CPU would suffice"):
            gs.fit(graphs, [given.replace(memory=least - 1)])


@pytest.mark.parametrize(("gpu", "cpu"), [(900_000, 2_000_000), (1_800_000, 1_700_000), (400_000, 1_900_000)])
def test_experts_of_two_devices_have_slots_on_the_host_alone(path: Path, gpu: int, cpu: int) -> None:
    with gs.CpuBackend(1, name="GPU") as one, gs.CpuBackend(1, name="CPU") as host:
        one.is_host = False
        right = unlimited(path, host)
        fit = fitted(path, cpu, host, [gs.Device("GPU", gpu, 1e11, 1e13, backend=one)])
        slots = fit.fetching.slots
        fit.verify()
        with llama.load(path, place=fit) as model:
            assert said(model) == right == said(model)
            assert model.slots.n_slots == slots.n_slots
            assert {name for name, t in model.weights.tensors.items() if t.buffer.experts} == set(slots.names)
            for use, backend in zip(fit.memory, (one, host), strict=True):
                held = model.memory()[backend]
                assert (held.weights, held.cache) == (use.weights + use.slots, use.cache)
                assert held.arena <= use.arena + use.left
            assert sum(on.total for backend, on in model.memory().items() if backend is not one) <= cpu
            model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph).verify()


def test_the_policy_is_the_caller_s_and_whole_tensors_are_fetched_where_asked(path: Path) -> None:
    with gs.CpuBackend(1, name="CPU") as host:
        right, fit = unlimited(path, host), fitted(path, 2_000_000, host)
        with llama.load(path, place=fit, experts=LeastRecentlyUsed()) as model, model.record_experts() as recording:
            assert said(model) == right
            assert replay(recording, LeastRecentlyUsed(), model.slots.n_slots) == model.slots.traffic
        with llama.load(path, place=fit, experts="whole") as model:
            assert model.slots is None and model.residency.nbytes > 0 and said(model) == right
            assert sum(on.total for on in model.memory().values()) <= 2_000_000


def test_a_placement_that_fetches_experts_as_a_whole_is_loaded_so(path: Path) -> None:
    """For prompts of many tokens, which use nearly all experts."""
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = llama.model_graphs(path, 64, 16, kv_type="f16", backends=[host])
        given = gs.Device("CPU", 2_500_000, 1e10, 1e9, host=True, backend=host, fetch=DISK)
        fit = gs.fit(graphs, [given], goal="prompt")
        assert fit.fetching.slots is None and any("_exps" in name for name in fit.fetching.names)
        with llama.load(path, place=fit) as model:
            assert model.slots is None and model.residency.fetched == fit.fetching.names
            assert sum(on.total for on in model.memory().values()) <= 2_500_000


def test_where_a_loaded_model_needs_more_than_its_fit_it_has_fewer_slots(path: Path) -> None:
    """Kernels of a real backend need work memory that a device of numbers does not know."""
    graphs = llama.model_graphs(path, 64, 4, kv_type="f16")
    fit = gs.fit(graphs, [gs.Device("CPU", 2_000_000, 1e10, 1e11, host=True, fetch=DISK)])
    with gs.CpuBackend(1, name="CPU") as host, llama.load(path, [host], place=fit) as model:
        assert 8 <= model.slots.n_slots < fit.fetching.slots.n_slots
        held = model._runner.held
        assert held.shifts and any(shape.n_outputs == 4 for shape in held.shapes), "graphs that take no slots stay"
        assert said(model) == unlimited(path, host)
        assert sum(on.total for on in model.memory().values()) <= 2_000_000


def test_a_context_shift_that_does_not_fit_is_left_out(path: Path) -> None:
    """Caches of many tokens, which it rotates, need more than a token does."""
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = llama.model_graphs(path, 2048, 1, kv_type="f16", backends=[host])
        given = gs.Device("CPU", 0, 1e10, 1e11, host=True, backend=host, fetch=DISK)
        with pytest.raises(gs.OutOfMemory) as caught:
            gs.fit(graphs, [given])
        fit = gs.fit(graphs, [given.replace(memory=caught.value.needed)])
        with llama.load(path, place=fit) as model:
            assert not model._runner.held.shifts
            assert sum(on.total for on in model.memory().values()) <= caught.value.needed


def test_logits_of_all_tokens_take_no_slots(tmp_path: Path) -> None:
    """A graph of which the placement did not know is left out where it would take memory of slots."""
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(7, **{**SIZES, "n_vocab": 30_000}))
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = llama.model_graphs(path, 64, 8, kv_type="f16", backends=[host])
        fit = gs.fit(graphs, [gs.Device("CPU", 11_200_000, 1e10, 1e11, host=True, backend=host, fetch=DISK)])
        slots = fit.fetching.slots
        assert 14 < slots.n_slots < slots.n_experts
        with llama.load(path, place=fit) as model:
            assert model.slots.n_slots == slots.n_slots
            model.eval(PROMPT, last_only=True)
            assert sum(on.total for on in model.memory().values()) <= 11_200_000


def test_graphs_are_left_out_where_they_take_slots_even_if_fewer_remain_than_the_fit_has(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(7, **{**SIZES, "n_vocab": 30_000}))
    graphs = llama.model_graphs(path, 64, 8, kv_type="f16")
    fit = gs.fit(graphs, [gs.Device("CPU", 11_200_000, 1e10, 1e11, host=True, fetch=DISK)])
    with gs.CpuBackend(1, name="CPU") as host, llama.load(path, [host], place=fit) as model:
        # Work memory of real kernels takes a slot or two; logits of all tokens of a batch would take five.
        assert 0 < fit.fetching.slots.n_slots - model.slots.n_slots <= 2
        model.eval(PROMPT, last_only=True)
        assert sum(on.total for on in model.memory().values()) <= 11_200_000
