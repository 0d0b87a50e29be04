"""What holds for every answer of `fit`: pins, tied tensors, experts, more of anything, order, equality, errors."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from small_models import devices, layered, sized

import ggml_sched as gs
from ggml_sched.placement.trials import Trial, Trials

LINK = gs.Link(5e8, 1e-6)
WITHIN = 0.005
GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
GIB = 1 << 30
HOST = gs.Device("CPU", 64 * GIB, 6e10, 1e12, host=True)


def small(seed: int, count: int = 2, **kind: int) -> tuple[gs.Graph, list[gs.Device]]:
    rng = random.Random(seed)
    graph = layered(rng, 3, **kind)
    return graph, devices(rng, count, sum(sized(graph).values()))


def recorded(name: str) -> list[gs.Graph]:
    return [gs.load_graph(GRAPHS / f"{name}-{kind}.json.gz") for kind in ("decode", "prefill512")]


# -- constraints ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_pins_are_obeyed(seed: int) -> None:
    graph, given = small(seed, 3)
    fit = gs.fit([graph], given, LINK, pins={"up*": given[0], "output": given[0].name})
    assert {name for name, device in fit.residents.items() if device == given[0]} >= {"up0", "up1", "up2", "output"}


def test_a_pin_costs_no_less_than_the_free_choice() -> None:
    graph, given = small(1)
    free = gs.fit([graph], given, LINK)
    assert gs.fit([graph], given, LINK, pins={"down*": given[0]}).seconds >= free.seconds * (1 - WITHIN)


@pytest.mark.parametrize("seed", range(3))
def test_a_tied_embedding_is_in_one_place_and_counts_once(seed: int) -> None:
    graph, given = small(seed, 2, tied=True)
    fit = gs.fit([graph], given, LINK)
    assert [entry.name for entry in fit.placed].count("embedding") == 1
    assert sum(entry.nbytes for entry in fit.placed) == sum(-(-n // 64) * 64 for n in sized(graph).values())
    assert sum(use.weights for use in fit.memory) == sum(entry.nbytes for entry in fit.placed)


def test_only_experts_and_the_embedding_leave_a_card_that_is_too_small() -> None:
    given = [gs.Device("GPU", 8 * GIB, 256e9, 20e12), gs.Device("CPU", 256 * GIB, 80e9, 1e12, host=True)]
    graphs = recorded("mixtral-8x7b")
    fit = gs.fit(graphs, given, within=0.02)
    moved = {entry.name for entry in fit.placed if fit.devices[entry.device].host}
    assert moved
    assert all("_exps" in name or name == "token_embd.weight" for name in moved)
    assert all(use.left >= 0 for use in fit.memory)


# -- more of anything ---------------------------------------------------------------------


def seconds(graph: gs.Graph, given: list[gs.Device], link: gs.Link = LINK) -> float:
    return gs.fit([graph], given, link, within=WITHIN).seconds


@pytest.mark.parametrize("seed", [0, 2, *(pytest.param(k, marks=pytest.mark.soak) for k in (1, 3))])
def test_more_of_anything_is_never_slower(seed: int) -> None:
    graph, given = small(seed)
    base = seconds(graph, given) * (1 + WITHIN)
    cpu, gpu = given
    assert seconds(graph, [cpu, gpu.replace(memory=gpu.memory + 40000)]) <= base
    assert seconds(graph, [cpu, gpu.replace(bandwidth=2 * gpu.bandwidth, flops=2 * gpu.flops)]) <= base
    assert seconds(graph, given, gs.Link(2 * LINK.bandwidth, LINK.latency / 2)) <= base
    assert seconds(graph, [*given, gpu.replace(name="GPU1")]) <= base


@pytest.mark.parametrize("seed", range(3))
def test_wrong_speeds_change_the_time_that_is_said_not_the_placement(seed: int) -> None:
    graph, given = small(seed)
    right = seconds(graph, given)
    for factor in (0.7, 1.3):
        wrong = [given[0], given[1].replace(bandwidth=factor * given[1].bandwidth, flops=factor * given[1].flops)]
        fit = gs.fit([graph], wrong, LINK, within=WITHIN)
        assert gs.price(fit.plans[0], given, LINK).seconds <= right * 1.01


@pytest.mark.parametrize("wrong", ["host", "GPU", "link"])
@pytest.mark.parametrize("name", ["llama-2-7b", *(pytest.param(name, marks=pytest.mark.soak)
                                                  for name in ("mixtral-8x7b", "llama-2-7b-fa"))])
def test_a_bandwidth_that_is_wrong_by_30_percent_costs_at_most_1_percent(name: str, wrong: str) -> None:
    gpu, cpu = gs.Device("GPU", 4 * GIB, 256e9, 20e12), gs.Device("CPU", 256 * GIB, 80e9, 1e12, host=True)
    link, graphs = gs.Link(25e9, 8e-6), recorded(name)
    right = gs.fit(graphs, [gpu, cpu], link).seconds
    for factor in (0.7, 1.3):
        given = [device.replace(bandwidth=factor * device.bandwidth) if wrong == ("host" if device.host else "GPU")
                 else device for device in (gpu, cpu)]
        other = gs.Link(factor * link.bandwidth, link.latency) if wrong == "link" else link
        fit = gs.fit(graphs, given, other)
        assert fit.seconds != right
        assert gs.price(fit.plans[0], [gpu, cpu], link).seconds <= 1.01 * right


# -- the same question, the same answer ------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_the_devices_has_no_influence(seed: int) -> None:
    graph, given = small(seed, 3)
    assert gs.fit([graph], given, LINK) == gs.fit([graph], given[::-1], LINK)


def test_equal_calls_have_equal_answers() -> None:
    graph, given = small(0, 3)
    one, two = gs.fit([graph], given, LINK), gs.fit([graph], given, LINK)
    assert one == two
    assert one.to_json() == two.to_json()
    assert str(one) == str(two)


def test_an_answer_is_a_value() -> None:
    graph, given = small(2)
    fit = gs.fit([graph], given, LINK)
    again = pickle.loads(pickle.dumps(fit))
    assert again == fit
    assert str(again) == str(fit)
    assert again.explain("up0") == fit.explain("up0")
    again.verify()
    with pytest.raises(AttributeError):
        fit.seconds = 0.0  # type: ignore[misc]


def test_verify_refuses_an_answer_that_exceeds_a_budget() -> None:
    graph, given = small(2)
    fit = gs.fit([graph], given, LINK)
    for d, use in enumerate(fit.memory):
        least = use.device.budget - use.left
        tight, less = (tuple(device.replace(memory=device.reserve + least - size) if k == d else device
                             for k, device in enumerate(fit.devices)) for size in (0, 1))
        dataclasses.replace(fit, devices=tight).verify()
        with pytest.raises(gs.OutOfMemory, match="1 bytes more than its budget of") as caught:
            dataclasses.replace(fit, devices=less).verify()
        error = caught.value
        assert (error.backend, error.needed, error.available) == (use.device.name, least, least - 1)


@pytest.mark.parametrize(("factor", "assigned"), [(1.1, False), (0.9, True)])
def test_of_plans_with_nodes_assigned_and_with_residents_alone_the_cheaper_is_kept(
        factor: float, assigned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trials.run

    def priced(self: Trials, residents: Mapping[str, int],
               nodes: Sequence[Mapping[gs.Tensor, int]] | None = None) -> Trial:
        trial = run(self, residents, nodes)
        return trial if nodes is None else dataclasses.replace(trial, seconds=factor * trial.seconds)

    monkeypatch.setattr(Trials, "run", priced)
    graph = layered(random.Random(8), 5)        # too many residents to plan all placements one by one
    assert gs.fit([graph], devices(random.Random(8), 2, sum(sized(graph).values())), LINK).assigned is assigned


def test_the_caller_s_graph_does_not_change() -> None:
    backend = gs.DryBackend("mine")
    graph, given = small(2)
    fields = gs.graph.graphfile.graph_to_dict(graph)
    mine = gs.graph.graphfile.graph_from_dict(fields, lambda t: backend)
    gs.fit([mine], given, LINK)
    assert {t.backend for t in mine.tensors if t.resident and t.view_src is None} == {backend}


def test_the_answer_as_json_names_every_resident_and_adds_up() -> None:
    graph, given = small(3, 3)
    fit = gs.fit([graph], given, LINK)
    data = json.loads(fit.to_json())
    assert set(data["residents"]) == set(sized(graph))
    assert set(data["residents"].values()) <= {device.name for device in given}
    [price] = data["graphs"]
    assert sum(price["compute"].values()) + price["copies"] + price["splits"] == pytest.approx(data["seconds"])
    for row, device in zip(data["memory"], fit.devices, strict=True):
        parts = row["weights"] + row["cache"] + row["arena"] + row["reserve"] + row["left"]
        assert (row["device"], parts) == (device.name, device.memory)


def test_an_explanation_names_the_alternative_and_its_price() -> None:
    graph, given = small(4)
    fit = gs.fit([graph], given, LINK)
    text = fit.explain("up0")
    assert text.startswith("up0: ")
    assert fit.place("up0").name in text
    assert all(f"on {device.name} all together would take" in text for device in given if device != fit.place("up0"))
    with pytest.raises(gs.PlacementError, match="nothing"):
        fit.explain("nothing")


def test_what_an_explanation_says_to_fit_fits() -> None:
    graphs, link, name = recorded("llama-2-7b"), gs.Link(25e9, 8e-6), "blk.15.ffn_down.weight"
    given = [gs.Device("GPU0", 3 * GIB, 1e12, 80e12), gs.Device("GPU1", 2 * GIB, 3.6e11, 40e12), HOST]
    fit = gs.fit(graphs, given, link)
    home = {entry.name: fit.devices[entry.device].name for entry in fit.placed}
    said = re.findall(r"  on (\S+) all .*?(?:and it fits there|push out (\S+) to (\S+), and then)", fit.explain(name))
    assert len(said) == 2 and any(pushed for _, pushed, _ in said)
    for device, pushed, to in said:
        gs.fit(graphs, given, link, pins={**home, name: device} | ({pushed: to} if pushed else {}))


def test_an_explanation_pushes_out_nothing_that_is_pinned() -> None:
    graphs, given = recorded("llama-2-7b-fa"), [gs.Device("GPU", 2 * GIB, 1e12, 80e12), HOST]
    pinned = "token_embd.weight"
    fit = gs.fit(graphs, given, gs.Link(25e9, 8e-6), pins={pinned: "GPU"})
    text = fit.explain(next(entry.name for entry in fit.placed if fit.devices[entry.device].host))
    assert "push out" in text and pinned not in text


@pytest.mark.parametrize("tokens", ["1", None, 1.5, [1], 10**400])
def test_nodes_and_explanations_need_no_number_of_tokens(tokens: object) -> None:
    graph, given = small(1)
    graph.meta = {"n_tokens": tokens}
    fit = gs.fit([graph], given, LINK)
    assert fit.assigned and len(fit.nodes(graph)) == len(fit.nodes(fit.plans[0].graph)) > 0
    assert fit.explain("up0").startswith("up0: ")


def test_more_memory_is_worth_less_than_the_whole_time() -> None:
    graph, given = small(4)
    fit = gs.fit([graph], given, LINK)
    worth = dict(zip((device.name for device in fit.devices), fit.worth, strict=True))
    lines = re.findall(r"^a ([GMK])B more on (\w+) is worth about ([\d.]+) (s|ms|us)$", str(fit), re.MULTILINE)
    assert {name for _, name, *_ in lines} == {name for name, price in worth.items() if price} != set()
    for prefix, name, number, unit in lines:
        said = float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        size = {"G": 1e9, "M": 1e6, "K": 1e3}[prefix]
        assert said <= fit.seconds * 1.01
        assert said == pytest.approx(min(worth[name] * size, fit.seconds), rel=0.01, abs=5e-7)


# -- several models ---------------------------------------------------------------------------


def test_several_models_share_the_budgets() -> None:
    one, given = small(5)
    two, _ = small(6)
    fit = gs.fit([[one], [two]], given, LINK)
    parts = [fit.model(0), fit.model(1)]
    for part, graph in zip(parts, (one, two), strict=True):
        assert set(part.residents) == set(sized(graph))
        part.verify()
    for d, use in enumerate(fit.memory):
        assert use.left >= 0
        assert use.arena == sum(part.arenas[d] for part in parts)
        assert use.weights == sum(part.memory[d].weights for part in parts)
        assert {part.memory[d].left for part in parts} == {use.left}
    assert fit.seconds == pytest.approx(sum(part.seconds for part in parts))


def test_models_that_take_turns_share_their_arenas() -> None:
    one, given = small(5)
    two, _ = small(6)
    fit = gs.fit([[one], [two]], given, LINK, turns=True)
    for d, use in enumerate(fit.memory):
        assert use.left >= 0
        assert use.arena == max(fit.model(k).arenas[d] for k in (0, 1))
        assert {fit.model(k).memory[d].left for k in (0, 1)} == {use.left}


def test_a_goal_without_a_graph_of_a_model_names_the_model() -> None:
    one, given = small(5)
    two, _ = small(6)
    with pytest.raises(ValueError, match=r"goal \(1, 0, 0\): no graph of model 1 has a weight above 0"):
        gs.fit([[one], [two, two]], given, LINK, goal=(1, 0, 0))
    assert gs.fit([[one], [two, two]], given, LINK, goal=(1, 0, 1)).goal == (1.0, 0.0, 1.0)


def models_of_equal_names() -> gs.Fit:
    """Two models with the same names, on budgets that part them."""
    one, given = small(5)
    two = layered(random.Random(5), 3, width=128)
    total = sum(sized(one).values())
    fit = gs.fit([[one], [two]], [device if device.host else device.replace(memory=total) for device in given], LINK)
    assert set(sized(one)) == set(sized(two))
    return fit


def test_equal_names_of_several_models_are_all_in_the_json() -> None:
    fit = models_of_equal_names()
    data = json.loads(fit.to_json())
    assert "residents" not in data
    assert [model["graphs"] for model in data["models"]] == [[0], [1]]
    for k, model in enumerate(data["models"]):
        part = fit.model(k)
        assert model["residents"] == {name: device.name for name, device in part.residents.items()}
        assert list(model["arenas"].values()) == list(part.arenas)
    assert data["models"][0]["residents"] != data["models"][1]["residents"]


def test_a_name_that_several_models_have_elsewhere_has_no_one_place() -> None:
    fit = models_of_equal_names()
    parts = [fit.model(0), fit.model(1)]
    apart = [name for name in parts[0].residents if parts[0].place(name).name != parts[1].place(name).name]
    same = set(parts[0].residents).difference(apart)
    assert apart
    assert same
    for name in same:
        assert fit.place(name).name == parts[0].place(name).name
    for name in apart:
        with pytest.raises(gs.PlacementError, match=rf"{name}.*of model 0 on .* and of model 1 on"):
            fit.place(name)
    with pytest.raises(gs.PlacementError, match="several models"):
        _ = fit.residents
    with pytest.raises(gs.PlacementError, match="several models"):
        fit.entry(apart[0])
    with pytest.raises(gs.PlacementError, match="2 models"):
        gs.llama.load("a file that is not read.gguf", place=fit)


def test_an_explanation_of_a_name_that_several_models_have_is_one_for_each() -> None:
    fit = models_of_equal_names()
    text = fit.explain("up0")
    for k in (0, 1):
        part = fit.model(k)
        assert f"model {k}, {part.explain('up0')}" in text


def test_nodes_of_a_graph_that_several_models_may_have_are_not_guessed() -> None:
    fit = dataclasses.replace(models_of_equal_names(), assigned=True)
    for k, plan in enumerate(fit.plans):
        own, found = fit.model(k).nodes(plan.graph), fit.nodes(plan.graph)
        assert {t: device.name for t, device in found.items()} == {t: device.name for t, device in own.items()} != {}
    with pytest.raises(gs.PlacementError, match="2 of 2 models"):
        fit.nodes(small(5)[0])


# -- errors -------------------------------------------------------------------------------------


def missing_on_cpu(error: gs.OutOfMemory) -> int:
    found = re.search(r"\((\d+) bytes\) more on CPU would suffice", str(error))
    assert found
    return int(found[1])


def test_a_refusal_of_pins_names_the_device_and_the_bytes_that_suffice() -> None:
    graphs, gpu, link = recorded("tinyllama-1.1b"), gs.Device("GPU", 600 << 20, 1e12, 80e12), gs.Link(25e9, 8e-6)
    with pytest.raises(gs.OutOfMemory, match=r"\((\d+) bytes\) more on GPU would suffice") as caught:
        gs.fit(graphs, [gpu, HOST], link, pins={"*": "GPU"})
    error = caught.value
    assert (error.backend, error.available) == ("GPU", gpu.memory)
    assert f"({error.needed - gpu.memory} bytes) more" in str(error)
    assert gs.fit(graphs, [gpu.replace(memory=error.needed), HOST], link, pins={"*": "GPU"}).memory[0].left == 0
    disk = HOST.replace(fetch=gs.Link(2e9, 1e-4))
    with pytest.raises(gs.OutOfMemory, match=r"bytes\) more on GPU would suffice"):
        gs.fit(graphs, [gpu, disk], link, pins={"*": "GPU"})


def test_nothing_fits_is_an_error_with_the_bytes() -> None:
    graph, given = small(0)
    total = sum(sized(graph).values())
    few = [given[0].replace(memory=total // 4), given[1].replace(memory=total // 4)]
    with pytest.raises(gs.OutOfMemory, match=r"bytes\) more on CPU would suffice") as caught:
        gs.fit([graph], few, LINK)
    assert (caught.value.backend, caught.value.available) == ("CPU", few[0].budget)
    assert caught.value.needed > few[0].budget


def test_a_refusal_asks_for_little_where_the_host_is_the_fastest() -> None:
    graph, given = small(0)
    total = sum(sized(graph).values())
    slow = [device.replace(memory=total // 2, bandwidth=device.bandwidth * (1.0 if device.host else 1e-3))
            for device in given]
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit([graph], slow, LINK)
    more = missing_on_cpu(caught.value)
    assert more < total // 4
    enough = [device.replace(memory=device.memory + more) if device.host else device for device in slow]
    assert all(use.left >= 0 for use in gs.fit([graph], enough, LINK).memory)


def test_a_refusal_asks_for_little_where_what_is_read_least_is_the_largest() -> None:
    graph, given = small(0, vocabulary=4096)
    sizes = sized(graph)
    tight = [device.replace(memory=1024 if device.host else sum(sizes.values()) - 4096) for device in given]
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit([graph], tight, LINK)
    assert missing_on_cpu(caught.value) < sizes["embedding"] // 2


def test_a_refusal_counts_what_the_reserve_of_the_host_takes() -> None:
    graph, given = small(0)
    total = sum(sized(graph).values())
    few = [device.replace(memory=total // 4, reserve=total // 2 if device.host else 0) for device in given]
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit([graph], few, LINK)
    more = missing_on_cpu(caught.value)
    enough = [device.replace(memory=device.memory + more) if device.host else device for device in few]
    assert all(use.left >= 0 for use in gs.fit([graph], enough, LINK).memory)


def test_a_refusal_does_not_count_arenas_that_no_placement_has() -> None:
    graph, given = small(0)
    few = [device if device.host else device.replace(memory=1024) for device in given]
    with pytest.raises(gs.OutOfMemory, match="pinned to GPU0 takes") as caught:
        gs.fit([graph], few, LINK, pins={"*": next(device.name for device in few if not device.host)})
    assert "arenas" not in str(caught.value).split("; ")[0]


def test_what_a_refusal_asks_for_is_enough() -> None:
    graph, given = small(0)
    total = sum(sized(graph).values())
    few = [given[0].replace(memory=total // 4), given[1].replace(memory=total // 4)]
    with pytest.raises(gs.OutOfMemory) as caught:
        gs.fit([graph], few, LINK)
    more = missing_on_cpu(caught.value)
    fit = gs.fit([graph], [few[0].replace(memory=few[0].memory + more), few[1]], LINK)
    assert all(use.left >= 0 for use in fit.memory)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"graphs": []}, ValueError, "at least one graph"),
    ({"graphs": ["graph"]}, TypeError, "list of Graphs"),
    ({"graphs": "model.gguf"}, TypeError, "model_graphs makes those of a model file"),
    ({"graphs": None}, TypeError, "list of Graphs"),
    ({"devices": None}, TypeError, "list of Devices and Backends, not None"),
    ({"devices": "4090"}, TypeError, "list of Devices and Backends, not '4090'"),
    ({"devices": gs.Device("CPU", 1, 1, 1, host=True)}, TypeError, "list of Devices and Backends, not Device"),
    ({"devices": ["4090"]}, TypeError, "read_devices reads texts"),
    ({"within": "0.5%"}, TypeError, "within is a number, not '0.5%'"),
    ({"within": float("nan")}, ValueError, "within = nan"),
    ({"within": 1}, ValueError, "within = 1 is not between 0 and 1"),
    ({"fill": None}, TypeError, "fill is a number, not None"),
    ({"goal": 3}, TypeError, "goal 3 is not"),
    ({"goal": ["a"]}, TypeError, "a weight for each graph"),
    ({"pins": {"up[0-9]+": "CPU"}}, gs.PlacementError, r"it matches \d+ as a regular expression: .* such as \w+\*$"),
    ({"pins": {"out": "CPU"}}, gs.PlacementError, "'out' names none of .*matches 1 as a regular"),
    ({"pins": {"optput": "CPU"}}, gs.PlacementError, "like it are output"),
    ({"devices": []}, ValueError, "host"),
    ({"devices": [gs.Device("GPU", 1 << 20, 1e9, 1e9)]}, ValueError, "host"),
    ({"devices": [gs.Device(f"GPU{k}", 1 << 20, 1e9, 1e9) for k in range(40)]}, ValueError, "devices"),
    ({"devices": ["GPU"]}, TypeError, "neither"),
    ({"within": 0.0}, ValueError, "within"),
    ({"fill": 0.0}, ValueError, "fill"),
    ({"goal": (1.0, 1.0)}, ValueError, "2 weights for 1 graphs"),
    ({"goal": (-1.0,)}, ValueError, "negative"),
    ({"goal": (1e308,)}, ValueError, r"goal \(1e\+308,\): weights are .* from 1e-30 to 1e\+30"),
    ({"goal": (5e-324,)}, ValueError, "from 1e-30 to"),
    ({"goal": (10**400,)}, ValueError, "from 1e-30 to"),
    ({"within": 10**400}, ValueError, "is not between 0 and 1"),
    ({"fill": 10**400}, ValueError, "is not a part of a cache"),
    ({"goal": "fast"}, ValueError, "fast"),
    ({"pins": {3: "CPU"}}, TypeError, "pins are .*; 3 is no name"),
    ({"pins": {"up0": "TPU"}}, gs.PlacementError, "TPU"),
    ({"pins": {"nothing*": "CPU"}}, gs.PlacementError, "nothing"),
    ({"stream": [True, False]}, ValueError, "2 flags"),
])
def test_wrong_arguments_are_typed_errors(change: dict[str, object], error: type[Exception], message: str) -> None:
    graph, given = small(0)
    arguments: dict[str, object] = {"graphs": [graph], "devices": given, "link": LINK, **change}
    with pytest.raises(error, match=message):
        gs.fit(**arguments)  # type: ignore[arg-type]


def test_the_largest_and_the_least_weights_of_a_goal_change_seconds_alone() -> None:
    graph, given = small(0)
    plain = gs.fit([graph], given, LINK)
    for weight in (1e30, 1e-30):
        fit = gs.fit([graph], given, LINK, goal=[weight], seconds=10**400)
        assert fit.residents == plain.residents
        assert fit.seconds == pytest.approx(weight * plain.seconds) and fit.bound == pytest.approx(weight * plain.bound)


def test_residents_without_a_name_or_of_two_sizes_are_typed_errors() -> None:
    graph, given = small(0)
    fields = gs.graph.graphfile.graph_to_dict(graph)
    index = next(i for i, t in enumerate(fields["tensors"]) if t["name"] == "up0")
    fields["tensors"][index]["name"] = ""
    with pytest.raises(gs.GraphError, match="no name"):
        gs.fit([gs.graph.graphfile.graph_from_dict(fields)], given, LINK)
    other, _ = small(7)
    if sized(other)["up0"] != sized(graph)["up0"]:
        with pytest.raises(gs.GraphError, match="two graphs have a resident"):
            gs.fit([graph, other], given, LINK)


def test_many_devices_are_an_answer_in_bounded_time() -> None:
    graph, given = small(0)
    many = [given[0], *(given[1].replace(name=f"GPU{k}") for k in range(7))]
    fit = gs.fit([graph], many, LINK)
    assert all(use.left >= 0 for use in fit.memory)
