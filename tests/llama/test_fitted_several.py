"""Several models of one fit with a disk: each is loaded within its share of the host, with the bits of a model without
a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backends.store import has_slots
from ggml_sched.llama import Model, random_llama

OPTIONS = {"n_ctx": 64, "n_batch": 4, "kv_type": "f16"}
PROMPT = [3, 14, 15, 92, 65, 35, 89]
DISK = gs.Link(1e9, 1e-5)
DENSE = {"n_vocab": 120, "n_embd": 128, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
EXPERTS = {"n_vocab": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 192, "n_expert": 8}


def files(folder: Path, kinds: Sequence[dict[str, int]]) -> list[Path]:
    paths = [folder / f"model{k}.gguf" for k in range(len(kinds))]
    for k, (path, sizes) in enumerate(zip(paths, kinds, strict=True)):
        path.write_bytes(random_llama(7 + k, **sizes))
    return paths


def said(model: Model) -> list[bytes]:
    """Logits of a prompt and of tokens after it."""
    model.reset()
    found = [model.eval(PROMPT, last_only=True).tobytes()]
    return found + [model.eval([token]).tobytes() for token in (5, 8, 13, 21)]


def unlimited(paths: Sequence[Path], host: gs.Backend) -> list[list[bytes]]:
    found = []
    for path in paths:
        with llama.load(path, [host], **OPTIONS) as model:
            found.append(said(model))
    return found


def fitted(paths: Sequence[Path], memory: int, host: gs.Backend, turns: bool, others: Sequence[gs.Device] = (),
           **options: object) -> gs.Fit:
    given = gs.Device("CPU", memory, 1e10, 1e11, host=True, backend=host, fetch=DISK)
    backends = [*(device.backend for device in others), host]
    graphs = [llama.model_graphs(path, OPTIONS["n_ctx"], OPTIONS["n_batch"], kv_type="f16", backends=backends)
              for path in paths]
    return gs.fit(graphs, [*others, given], turns=turns, within=0.1, **options)


def held(models: Sequence[Model], host: gs.Backend, arenas: gs.Arenas | None) -> int:
    """The bytes of the host that models hold together: kernels have work memory once on their backend, and models that
    share their arenas have one there."""
    total = host.work_held + host.host_work_held
    for model in models:
        for backend, on in model.memory().items():
            total += on.weights + on.cache + (on.arena if arenas is None or backend is not host else 0)
            total += on.work if backend is not host else 0
    return total + (0 if arenas is None else arenas.nbytes(host))


@pytest.mark.spread("turns", "kinds")
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize(("kinds", "memory"), [
    ((DENSE, DENSE), 2_000_000),
    pytest.param((EXPERTS, DENSE), 3_500_000, marks=pytest.mark.skipif(not has_slots(), reason="no slots")),
    pytest.param((EXPERTS, EXPERTS), 4_000_000, marks=pytest.mark.skipif(not has_slots(), reason="no slots"))])
def test_models_run_within_their_shares_with_the_same_bits(tmp_path: Path, turns: bool,
                                                           kinds: Sequence[dict[str, int]], memory: int) -> None:
    paths = files(tmp_path, kinds)
    with gs.CpuBackend(1, name="CPU") as host, ExitStack() as stack:
        right = unlimited(paths, host)
        fit = fitted(paths, memory, host, turns)
        assert sum(found.nbytes + (found.slots is not None) for found in fit.fetchings) > 0
        arenas = stack.enter_context(gs.Arenas("wait")) if turns else None
        models = [stack.enter_context(llama.load(path, [host], place=fit.model(k), arenas=arenas))
                  for k, path in enumerate(paths)]
        for _ in range(2):
            for model, expected in zip(models, right, strict=True):
                assert said(model) == expected
        for model, found in zip(models, fit.fetchings, strict=True):
            assert model.residency.fetched == found.names
            assert (model.slots is None) == (found.slots is None)
            if model.slots is not None:
                assert model.slots.n_slots == found.slots.n_slots
            on = model.memory()[host]
            use = fit.model(models.index(model)).memory[-1]
            assert (on.weights, on.cache) == (use.weights + use.slots, use.cache)
            if not turns:
                assert sum(on.total for on in model.memory().values()) <= found.share
        assert memory * 0.85 <= held(models, host, arenas) <= memory


@pytest.mark.parametrize("memory", [2_800_000, 3_600_000])
@pytest.mark.skipif(not has_slots(), reason="no slots")
def test_whole_experts_of_a_model_in_turns_keep_the_joint_budget(tmp_path: Path, memory: int) -> None:
    """A model whose batches are smaller than those of its fit needs less of the arena than it has; what another model
    has there anyway is no room for weights."""
    kinds = ({**EXPERTS, "n_vocab": 1500, "n_ff": 32, "n_expert": 16}, {**DENSE, "n_vocab": 1500})
    paths, tokens = files(tmp_path, kinds), [*range(1, 65)]
    with gs.CpuBackend(1, name="CPU") as host, gs.Arenas("wait") as arenas, ExitStack() as stack:
        given = gs.Device("CPU", memory, 1e10, 1e11, host=True, backend=host, fetch=DISK)
        graphs = [llama.model_graphs(path, 64, 64, kv_type="f16", all_outputs=True, backends=[host]) for path in paths]
        fit = gs.fit(graphs, [given], turns=True)
        assert fit.fetchings[0].slots is not None
        models = [stack.enter_context(llama.load(path, [host], n_batch=n, place=fit.model(k), arenas=arenas,
                                                 experts="whole")) for k, (path, n) in enumerate(zip(
                                                     paths, (1, 64), strict=True))]
        assert models[0].slots is None and models[0].residency.nbytes == 6 * 131_072
        for _ in range(2):
            for model in models:
                model.reset()
                model.eval(tokens)
                assert held(models, host, arenas) <= memory


@pytest.mark.skipif(not has_slots(), reason="no slots")
def test_a_model_leaves_the_other_models_each_part_of_its_placement_that_it_does_not_need(tmp_path: Path) -> None:
    """With batches of one token its arena, work memory and store are smaller than in its placement.  It keeps the
    placement's choice, and all experts, in a share that holds them beside what the placement has, and in no smaller."""
    paths = files(tmp_path, ({**EXPERTS, "n_vocab": 1500, "n_ff": 32, "n_expert": 16}, {**DENSE, "n_vocab": 1500}))
    with gs.CpuBackend(1, name="CPU") as host:
        given = gs.Device("CPU", 2_800_000, 1e10, 1e11, host=True, backend=host, fetch=DISK)
        fit = gs.fit([llama.model_graphs(path, 64, 64, kv_type="f16", all_outputs=True, backends=[host])
                      for path in paths], [given], turns=True, within=0.1)
        found, other = fit.fetchings

        def loaded(share: int) -> Model:
            part = dataclasses.replace(fit, fetchings=(dataclasses.replace(found, share=share), other)).model(0)
            return llama.load(paths[0], [host], n_batch=1, place=part, experts="whole")

        with loaded(2_700_000) as model:
            assert model.residency.fetched == found.names
            least = model.residency.resident + model.memory()[host].cache + fit.model(0).arenas[-1]
        for less in 0, 1:
            with loaded(least - less) as model:
                assert (model.residency.fetched == found.names) == (less == 0)


@pytest.mark.skipif(not has_slots(), reason="no slots")
def test_models_in_turns_count_the_largest_arena_and_the_largest_work_memory(tmp_path: Path) -> None:
    """They can be those of two models: here of one that fetches to a window, and of one with a longer prompt."""
    paths = files(tmp_path, (EXPERTS, DENSE))
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = [llama.model_graphs(path, 64, n, kv_type="f16", backends=[host])
                  for path, n in zip(paths, (8, 1), strict=True)]
        fit = gs.fit(graphs, [gs.Device("CPU", 2_000_000, 1e10, 1e11, host=True, backend=host, fetch=DISK)], turns=True)
        arenas, works, stores = [], [], []
        for k, of in enumerate(graphs):
            plans = fit.model(k).plans
            arenas.append(max(plan.buffer_sizes[1] for plan in plans))
            works.append(max(host.host_work(graph.nodes) for graph in of))
            stores.append(max(plan.buffer_sizes[0] for plan in plans) + max(plan.work_sizes[0] for plan in plans))
        assert arenas[0] < arenas[1] and works[0] > works[1]
        assert fit.arenas[-1] == max(arenas) + max(works) + sum(stores)


@pytest.mark.skipif(not has_slots(), reason="no slots")
def test_memory_that_a_model_does_not_need_is_left_to_the_others(tmp_path: Path) -> None:
    """The arena of models in turns is one memory: a smaller one of this model leaves none for its slots."""
    paths = files(tmp_path, (EXPERTS, DENSE))
    with gs.CpuBackend(1, name="CPU") as host:
        part = fitted(paths, 3_500_000, host, True).model(0)
        slots = part.fetching.slots
        more = part.devices[0].replace(memory=part.devices[0].memory + 2 * slots.slot_nbytes)
        with llama.load(paths[0], [host], place=dataclasses.replace(part, devices=(more,))) as model:
            assert model.slots.n_slots == slots.n_slots < slots.n_experts


def test_models_on_two_devices_fetch_to_the_host(tmp_path: Path) -> None:
    paths = files(tmp_path, (DENSE, DENSE))
    with gs.CpuBackend(1, name="GPU") as one, gs.CpuBackend(1, name="CPU") as host, ExitStack() as stack:
        one.is_host = False
        right = unlimited(paths, host)
        fit = fitted(paths, 1_700_000, host, False, [gs.Device("GPU", 700_000, 1e11, 1e13, backend=one)])
        assert sum(found.nbytes for found in fit.fetchings) > 0 and fit.memory[0].weights > 0
        fit.verify()
        models = [stack.enter_context(llama.load(path, place=fit.model(k))) for k, path in enumerate(paths)]
        assert [said(model) for model in models] == right == [said(model) for model in models]
        assert held(models, host, None) - sum(model.memory()[one].total for model in models) <= 1_700_000
