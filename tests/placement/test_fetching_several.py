"""`fit` of several models with a disk: each fetches weights within a share of the host, and the bound holds for every
division of it."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, combinations, product
from typing import NamedTuple

import pytest
from fetching_plans import every_fetching_plan
from small_models import layered, mixture, sized

import ggml_sched as gs
from ggml_sched.backends.store import has_slots
from ggml_sched.placement.devices import Links
from ggml_sched.placement.fetching import Fetches
from ggml_sched.placement.leastfetches import Costs, LeastFetches
from ggml_sched.placement.residency import Use, choose, chosen, least_choice
from ggml_sched.placement.shares import Shares, exchanged
from ggml_sched.placement.trials import Trials

needs_slots = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")
LINK = gs.Link(5e8, 1e-6)


class One(NamedTuple):
    """A placement of one model that was planned for real."""

    seconds: float
    held: tuple[int, ...]
    """Bytes of weights, slots and caches on each device."""
    arenas: tuple[int, ...]
    store: int
    """Bytes that its store takes on the host."""


def every_one(graph: gs.Graph, ordered: Sequence[gs.Device]) -> list[One]:
    """Each placement of a model that keeps the budgets alone: each weight is on a device or in a store, and those of
    experts on the host may have slots together, of any number.  Without those that another one beats in all."""
    found = []
    for one in every_fetching_plan([graph], ordered, (False, True)):
        slots, left = one.slots, one.left(ordered)
        for n in range(slots.fewest, slots.n_experts + 1) if slots is not None else (0,):
            seconds = one.seconds(ordered, LINK, n_slots=n)
            nbytes = 0 if slots is None else slots.nbytes
            if min([*left[:-1], left[-1] - nbytes]) >= 0:
                found.append(One(seconds, (*one.used[:-1], one.used[-1] + nbytes), one.arenas, one.store))
    best: list[One] = []
    for one in sorted(found):
        if not any(all(a <= b for a, b in zip((*other.held, *other.arenas, other.store),
                                              (*one.held, *one.arenas, one.store), strict=True)) for other in best):
            best.append(one)
    return best


def cheapest(models: Sequence[Sequence[One]], ordered: Sequence[gs.Device], turns: bool) -> float:
    """The least seconds of any placements of these models that keep the budgets together."""
    best = float("inf")
    for pair in product(*models):
        arenas = [(max if turns else sum)(of) for of in zip(*(one.arenas for one in pair), strict=True)]
        arenas[-1] += sum(one.store for one in pair)
        held = [sum(of) for of in zip(*(one.held for one in pair), strict=True)]
        if all(h + a <= device.budget for h, a, device in zip(held, arenas, ordered, strict=True)):
            best = min(best, sum(one.seconds for one in pair))
    return best


def host(memory: int, speed: float, **options: float) -> gs.Device:
    return gs.Device("CPU", memory, options.pop("bandwidth", 1e9), 1e11, host=True, fetch=gs.Link(speed, 1e-6),
                     **options)


def dense(seed: int, stages: int = 1, **options: int) -> gs.Graph:
    return layered(random.Random(seed), stages, **options)


def checked(fit: gs.Fit) -> None:
    """What holds for every answer of several models that fetch."""
    fit.verify()
    count = len(fit.fetchings)
    assert count == 1 + max(fit.models) > 1
    assert 0 < fit.bound <= fit.rules_bound <= fit.seconds
    for use in fit.memory:
        assert use.weights + use.slots + use.cache + use.arena + use.reserve + use.left == use.device.memory
        assert use.left >= 0
    for k, found in enumerate(fit.fetchings):
        part = fit.model(k)
        part.verify()
        assert part.fetching == found and part.devices[-1].budget == found.share
        stored = {*found.names, *found.rows, *(found.slots.names if found.slots else ())}
        assert stored == {entry.name for entry in fit.placed if entry.model == k and entry.fetched}
        for plan in part.plans:
            assert {copy.tensor.name for copy in plan.fetches} <= set(found.names)
    with pytest.raises(gs.PlacementError, match=r"fit\.model\(k\)\.fetching"):
        _ = fit.fetching


def taken(fit: gs.Fit, turns: bool) -> int:
    """The bytes of the host that all models together may take, each within its share."""
    parts = [fit.model(k) for k in range(len(fit.fetchings))]
    if not turns:
        return sum(part.devices[-1].budget for part in parts)
    return sum(part.devices[-1].budget - part.arenas[-1] for part in parts) + fit.arenas[-1]


# -- beside every placement ---------------------------------------------------------------------


def compared(graphs: Sequence[gs.Graph], given: Sequence[gs.Device], *, turns: Sequence[bool] = (False, True),
             factor: float = float("inf")) -> None:
    """Compare answers, for models in turns and for others, with every placement, of which the best is at most so many
    times as fast; and with each model alone in a part of the host, for many parts."""
    ordered = sorted(given, key=lambda device: device.host)
    every = [every_one(graph, ordered) for graph in graphs]
    alone = divided(graphs, given[0]) if len(given) == 1 else float("inf")
    for in_turns in turns:
        fit = gs.fit([[graph] for graph in graphs], given, LINK, turns=in_turns)
        checked(fit)
        assert taken(fit, in_turns) <= fit.devices[-1].budget
        best = cheapest(every, ordered, in_turns)
        assert 0 < fit.bound <= fit.rules_bound <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= fit.seconds <= best * factor
        assert fit.seconds <= alone * 1.06, "alone a model may fit, and read no rows from the disk"


def divided(graphs: Sequence[gs.Graph], given: gs.Device, parts: int = 40) -> float:
    """The least seconds of two models with any of so many divisions of the host between them."""
    best = float("inf")
    for k in range(1, parts):
        size = given.memory * k // parts
        with suppress(gs.OutOfMemory):
            best = min(best, sum(gs.fit([graph], [given.replace(memory=of)], LINK).seconds
                                 for graph, of in zip(graphs, (size, given.memory - size), strict=True)))
    return best


@pytest.mark.usefixtures("unverified")
@pytest.mark.spread("speed", "part")
@pytest.mark.parametrize("speed", [2e7, 3e8, 1e11])
@pytest.mark.parametrize("part", [0.8, 0.95])
def test_the_bound_is_below_every_division_of_the_host(speed: float, part: float) -> None:
    graphs = [dense(1, width=128), dense(2, width=256)]
    total = sum(sum(sized(graph).values()) for graph in graphs)
    compared(graphs, [host(int(part * total), speed)])


@needs_slots
@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(("memory", "speed"), [
    (300_000, 5e7), (380_000, 1e10),        # of the latter the bound is nearest
    *(pytest.param(*case, marks=pytest.mark.soak) for case in ((300_000, 1e10), (380_000, 5e7)))])
def test_the_same_with_slots_for_experts(memory: int, speed: float) -> None:
    graphs = [mixture(), mixture(n_experts=6, n_used=1)]
    compared(graphs, [host(memory, speed)])


@needs_slots
@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("memory", [300_000, pytest.param(340_000, marks=pytest.mark.soak)])
def test_the_same_with_slots_for_one_of_two(memory: int) -> None:
    compared([mixture(), dense(3)], [host(memory, 1e8)], turns=[False])


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("speed", [2e7, 1e10])
def test_the_same_on_two_devices(speed: float) -> None:
    graphs = [dense(4), dense(5)]
    total = sum(sum(sized(graph).values()) for graph in graphs)
    given = [gs.Device("GPU", total // 4, 1e10, 1e12), host(int(0.7 * total), speed)]
    compared(graphs, given, turns=[False], factor=2)


def shared(graphs: Sequence[gs.Graph], device: gs.Device) -> float:
    """The least seconds of models in turns on one device, whichever weights each of them fetches."""
    options = []
    for graph in graphs:
        fetches = Fetches(Trials([graph], [device], Links([device], LINK), (1.0,), 1.0), LINK)
        residents = dict.fromkeys(fetches.model.sizes, 0)
        way, = fetches.ways(residents)
        names = [use.name for use in way.uses]
        found = []
        for fetched in chain.from_iterable(combinations(names, n) for n in range(len(names) + 1)):
            planned = fetches.planned(residents, None, way, chosen(way.uses, fetched))
            assert planned is not None
            found.append((fetches.priced(planned, way, 0).seconds, planned.held[0] + planned.store, planned.arenas[0]))
        options.append(found)
    return min(one[0] + other[0] for one, other in product(*options)
               if one[1] + other[1] + max(one[2], other[2]) <= device.budget)


@pytest.mark.parametrize(("seeds", "width", "caches", "part"), [
    ((6, 7), 128, False, 0.8), ((4, 5), 64, False, 0.8), ((2, 3), 64, True, 0.8), ((1, 2), 256, False, 0.7)])
def test_models_in_turns_share_a_window_no_wider_than_pays(seeds: tuple[int, int], width: int, caches: bool,
                                                         part: float) -> None:
    """The fewest bytes are fetched where the model of wide weights fetches few, through the window of the other."""
    graphs = [dense(seed, width=wide, caches=caches) for seed, wide in zip(seeds, (128, width), strict=True)]
    device = host(int(part * sum(sum(sized(graph).values()) for graph in graphs)), 3e7)
    fit = gs.fit([[graph] for graph in graphs], [device], LINK, turns=True)
    checked(fit)
    assert fit.seconds <= shared(graphs, device) * 1.06


@pytest.mark.parametrize(("seeds", "widths", "part", "speed"), [
    ((12, 42), (64, 256), 0.8473594410046452, 3e7), ((34, 37), (256, 64), 0.9088615709233233, 3e8),
    ((28, 46), (64, 64), 0.585520686698014, 3e8)])
def test_models_in_turns_may_have_a_window_of_one_weight(seeds: tuple[int, int], widths: tuple[int, int], part: float,
                                                         speed: float) -> None:
    """Each model fetches a single weight, or the largest one and small ones; the last case fits no other way."""
    graphs = [dense(seed, width=width) for seed, width in zip(seeds, widths, strict=True)]
    device = host(int(part * sum(sum(sized(graph).values()) for graph in graphs)), speed)
    fit = gs.fit([[graph] for graph in graphs], [device], LINK, turns=True)
    checked(fit)
    assert fit.seconds <= shared(graphs, device) * 1.06


@pytest.mark.parametrize(("seeds", "widths", "part", "speed"), [
    ((26, 10, 7), (256, 256, 64), 0.6011635160654986, 3e7), ((11, 1, 9), (128, 256, 64), 0.6411247137787328, 3e8)])
def test_windows_of_one_weight_of_many_sizes_leave_windows_of_two_compared(
        monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...], widths: tuple[int, ...], part: float,
        speed: float) -> None:
    graphs = [dense(seed, width=width) for seed, width in zip(seeds, widths, strict=True)]
    device = host(int(part * sum(sum(sized(graph).values()) for graph in graphs)), speed)
    fit = gs.fit([[graph] for graph in graphs], [device], LINK, turns=True)
    monkeypatch.setattr(Shares, "_single", lambda self, ways, frees: [])
    assert fit.seconds <= gs.fit([[graph] for graph in graphs], [device], LINK, turns=True).seconds * 1.01


# -- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_least_seconds_of_several_models_are_below_every_division(seed: int) -> None:
    """Each model may read its experts one by one, or fetch them as a whole; of one nothing is known meanwhile."""
    rng = random.Random(seed)
    models = []
    for beside in (rng.uniform(0, 100), rng.uniform(0, 100), None):
        sizes = {f"{k}": rng.randrange(1, 1000) for k in range(5)}
        whole = {name: size * rng.uniform(0.5, 1.5) for name, size in sizes.items() if name != "0"}
        models.append(Costs(sizes, whole, {name: whole[name] * rng.uniform(0.1, 0.9) for name in ("3", "4")}, beside))
    least = LeastFetches(models)
    total = sum(sum(of.sizes.values()) for of in models)
    for _ in range(200):
        nbytes = computing = alone = seconds = 0.0
        for of in models:
            parts = {name: rng.random() ** rng.choice((0.2, 1, 5)) for name in of.sizes}
            nbytes += sum(parts[name] * size for name, size in of.sizes.items())
            taken = rng.uniform(0, 1.2) * total / 3
            own = taken * rng.uniform(0.5, 1)
            fetched = sum(parts[name] * of.whole.get(name, 0.0) for name in of.sizes)
            experts = sum(parts[name] * cost for name, cost in of.experts.items())
            others = fetched - sum(parts[name] * of.whole[name] for name in of.experts)
            if of.beside is None:
                found = max(taken, min(fetched, others + experts))
            else:
                found = min(max(taken, fetched), max(taken, others + experts, own - of.beside + experts,
                                                     max(own - of.beside, others) + experts))
            computing, alone, seconds = computing + taken, alone + own, seconds + found
        assert least.seconds(nbytes, computing, alone) <= seconds * (1 + 1e-9)
        assert least.seconds(nbytes, computing, alone) >= least.seconds(nbytes, computing) * (1 - 1e-9)


def test_of_more_models_than_are_tried_nothing_is_known_of_what_computes_meanwhile() -> None:
    one = Costs({"w": 10}, {"w": 10.0}, {"w": 5.0}, 0.0)
    assert LeastFetches([one] * 6).seconds(10, 3, 3) > LeastFetches([one] * 7).seconds(10, 3, 3) == pytest.approx(5)


@pytest.mark.parametrize("seed", range(5))
def test_exchanges_of_bytes_end_near_the_least_sum(seed: int) -> None:
    rng = random.Random(seed)
    rates = [(rng.uniform(0.1, 2), rng.randrange(10, 1000)) for _ in range(3)]
    costs = [lambda nbytes, rate=rate, most=most: rate * max(0, most - nbytes) for rate, most in rates]
    total = sum(most for _, most in rates) // 2
    parts = exchanged(costs, total)
    assert sum(parts) == total and min(parts) >= 0
    left, best = total, 0.0
    for rate, most in sorted(rates, reverse=True):
        best += rate * max(0, most - left)
        left -= min(left, most)
    assert sum(of(nbytes) for of, nbytes in zip(costs, parts, strict=True)) <= best * 1.02 + 20
    assert exchanged(costs[:1], 7) == [7]
    same = [lambda nbytes: 0.0] * 2
    assert exchanged(same, 9) == [5, 4], "none is preferred"


@pytest.mark.parametrize("seed", range(20))
def test_a_window_that_another_model_has_anyway_takes_no_room(seed: int) -> None:
    rng = random.Random(seed)
    uses = [Use(f"w{k}", size, size + 8, rng.choice((1, 1, 2))) for k, size in enumerate(
        rng.randrange(1, 100) for _ in range(12))]
    total = sum(use.nbytes for use in uses)
    for free in (0, 60, 500):
        least = least_choice(uses, free).taken(free)
        assert least <= least_choice(uses).taken(free)
        for room in range(least, total + 10, 17):
            found = choose(uses, room, free)
            assert found is not None and found.resident + max(0, found.window - free) <= room
        assert choose(uses, least - 1, free) is None or least == total


# -- what answers say ---------------------------------------------------------------------------


def both(turns: bool = False, memory: int = 520_000) -> gs.Fit:
    """Two models of equal names, of which one has slots for experts."""
    return gs.fit([[mixture(width=128, wide=128)], [dense(3, 2)]], [host(memory, 1e8)], LINK, turns=turns)


@needs_slots
def test_the_text_says_the_share_and_the_fetches_of_each_model() -> None:
    fit = both()
    checked(fit)
    text, (slots, none) = str(fit), [found.slots for found in fit.fetchings]
    assert slots is not None and none is None
    assert text.startswith("not without a disk: each evaluation of model 0 reads about ")
    assert re.search(r" of experts, each evaluation of model 1 (fetches|reads) .*; all else fits CPU \(", text)
    for k, found in enumerate(fit.fetchings):
        assert f"\nmodel {k} has {found.share / 1024:.2f} KiB of CPU\n" in text
    size = f"{slots.slot_nbytes / 1024:.2f} KiB"
    assert f"{slots.n_slots} slots of {size} on CPU are for 4 experts of model 0: of" in text
    again = pickle.loads(pickle.dumps(fit))
    assert again == fit and str(again) == text


@needs_slots
def test_an_explanation_is_that_of_the_share_of_each_model() -> None:
    fit = both()
    text = fit.explain("up0")
    assert re.search(r"model 0, up0: .* in none of \d slots, which are for 4 experts", text)
    assert re.search(r"model 1, up0: ", text)


@needs_slots
def test_the_json_and_the_drawing_have_what_each_model_fetches() -> None:
    fit = both()
    data = json.loads(fit.to_json())
    assert "fetching" not in data
    assert [model["fetching"] for model in data["models"]] == [
        json.loads(json.dumps(found.to_dict())) for found in fit.fetchings]
    assert [model["fetching"]["share"] for model in data["models"]] == [found.share for found in fit.fetchings]
    from ggml_sched.view.bars import _of_dict, _of_fit

    one, other = _of_fit(fit), _of_dict(data, fit)
    assert one == other, "weights of equal names, of which one is in a file, count apart"
    assert "waits for the disk" in fit.to_svg(data)


def test_models_that_fetch_nothing_say_so() -> None:
    ctx = gs.Context()
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", (64, 64))
        weight = ctx.restore("NONE", plain.type, plain.ne, plain.nb, name="w", resident="weight")
    small = gs.Graph(ctx.mul_mat(weight, ctx.tensor("f32", (64, 1), "x", input=True)))
    large = dense(2, width=128)
    fit = gs.fit([[large], [small]], [host(int(0.9 * sum(sized(large).values())), 1e8)], LINK)
    checked(fit)
    assert fit.fetchings[1].names == () == fit.fetchings[1].rows
    assert ", each evaluation of model 1 fetches nothing; all else fits CPU" in str(fit)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=needs_slots)])
def test_what_a_refusal_asks_for_is_enough_for_all_models(turns: bool, experts: bool) -> None:
    graphs = [[mixture(layers=2, n_experts=8)] if experts else [dense(1, 2)], [dense(2, 2)]]
    with pytest.raises(gs.OutOfMemory, match="exceed the 29.30 KiB of CPU, too") as caught:
        gs.fit(graphs, [host(30_000, 1e9)], LINK, turns=turns)
    assert ("the fewest slots for experts" in str(caught.value)) == experts
    least = caught.value.needed
    fit = gs.fit(graphs, [host(least, 1e9)], LINK, turns=turns)
    checked(fit)
    assert taken(fit, turns) <= least


@needs_slots
def test_what_a_refusal_asks_for_is_enough_where_a_smaller_placement_is_not_found_again() -> None:
    """The fewest bytes of all placements that a search finds need not suffice: with so many bytes it finds others."""
    graphs = [[mixture(1, 2, 2, 2, 64, 96)], [mixture(1, 2, 6, 1, 64, 32)]]
    gpu = gs.Device("GPU", 46_433, 8.036e10, 1e12)
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit(graphs, [gpu, host(158_547, 1.2967e9, bandwidth=7.134e9)], LINK)
    checked(gs.fit(graphs, [gpu, host(caught.value.needed, 1.2967e9, bandwidth=7.134e9)], LINK))


def test_models_in_turns_need_less_as_they_share_a_window() -> None:
    needs = []
    for turns in (True, False):
        with pytest.raises(gs.OutOfMemory) as caught:
            gs.fit([[dense(1, 2)], [dense(2, 2)]], [host(30_000, 1e9)], LINK, turns=turns)
        needs.append(caught.value.needed)
    assert needs[0] < 0.8 * needs[1]


def test_caches_of_several_models_that_exceed_the_host_are_on_other_devices() -> None:
    graphs = [[dense(k, 2, caches=True)] for k in (1, 2)]
    caches = sum(sized(graph)["cache"] for graph, in graphs)
    given = [gs.Device("GPU", int(caches * 1.3), 1e9, 1e11), host(262_000, 1e9, bandwidth=2e9)]
    fit = gs.fit(graphs, given, LINK)
    checked(fit)
    assert [fit.model(k).place("cache").name for k in (0, 1)] == ["GPU", "GPU"]
