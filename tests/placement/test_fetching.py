"""`fit` with a disk: weights that no device has room for are fetched, and the bound holds for every such placement."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from fetching_plans import every_fetching_plan
from small_models import devices, layered, sized

import ggml_sched as gs
from ggml_sched.graph import graphfile
from ggml_sched.placement.devices import Links
from ggml_sched.placement.shares import Shares
from ggml_sched.placement.trials import Trials

LINK = gs.Link(5e8, 1e-6)
GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
GIB = 1 << 30


def with_disk(given: Sequence[gs.Device], fetch: gs.Link | None, part: float | None = None,
              total: int = 0) -> list[gs.Device]:
    """The devices with a disk at the host, whose memory is a part of `total` bytes, if `part` is given."""
    return [device.replace(fetch=fetch, **({} if part is None else {"memory": int(part * total)})) if device.host
            else device for device in given]


def checked(fit: gs.Fit, graphs: Sequence[gs.Graph], weights: Sequence[float]) -> None:
    """What holds for every answer with fetched weights."""
    found = fit.fetching
    fit.verify()
    assert found.names or found.rows
    assert all(fit.place(name).host and fit.entry(name).fetched for name in (*found.names, *found.rows))
    assert found.nbytes == sum(fit.entry(name).nbytes for name in found.names)
    assert all(use.left >= 0 for use in fit.memory)
    for use in fit.memory:
        assert use.weights + use.cache + use.arena + use.reserve + use.left == use.device.memory
    assert fit.memory[-1].fetched == sum(fit.entry(name).nbytes for name in (*found.names, *found.rows))
    assert fit.bound <= fit.rules_bound <= fit.seconds
    assert fit.seconds == pytest.approx(sum(w * price.seconds for w, price in zip(weights, fit.prices, strict=True)))
    for plan in fit.plans:
        assert {copy.tensor.name for copy in plan.fetches} <= set(found.names)
    by_name = [{copy.tensor.name for copy in plan.fetches} for plan in fit.plans]
    assert set().union(*by_name) == set(found.names)


def tight(seed: int, count: int, tokens: int = 1, **kind: bool) -> tuple[gs.Graph, list[gs.Device], int]:
    """A small model, devices with little room beside the host, and the bytes of its weights and caches."""
    graph = layered(random.Random(seed), 2, tokens, width=256, **kind)
    total = sum(sized(graph).values())
    return graph, devices(random.Random(seed), count, total, tight=0.3), total


def compared(graphs: Sequence[gs.Graph], given: Sequence[gs.Device], goal: Sequence[float],
             speeds: Sequence[float]) -> None:
    """Compare answers that fetch weights, from disks of these speeds, with every placement.  With so few weights as
    here, a window of two is much, and a placement that fetches one after another may be better."""
    fits = [gs.fit(graphs, with_disk(given, gs.Link(speed, 1e-6)), LINK, goal=goal) for speed in speeds]
    best = [float("inf")] * len(speeds)
    for one in every_fetching_plan(graphs, fits[0].devices, (False, True)):
        if min(one.left(fits[0].devices)) >= 0:
            best = [min(least, one.seconds(fit.devices, LINK, goal)) for least, fit in zip(best, fits, strict=True)]
    for fit, least in zip(fits, best, strict=True):
        checked(fit, graphs, goal)
        assert 0 < fit.bound <= fit.rules_bound <= least * (1 + 1e-9)
        assert fit.seconds <= least * 2


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 4, 5))])
def test_the_bound_is_below_every_placement_and_every_choice_of_fetched_weights(seed: int) -> None:
    graph, given, total = tight(seed, 2, tied=seed % 3 == 1, caches=seed % 3 == 2)
    compared([graph], with_disk(given, None, 0.7, total), (1.0,), (2e7, 2e8, 1e11))


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("goal", [(1.0, 0.0), (0.0, 1.0), (20.0, 1.0)])
def test_the_same_for_a_token_and_a_prompt_together(goal: tuple[float, float]) -> None:
    graphs = [tight(3, 2, tokens)[0] for tokens in (1, 24)]
    _, given, total = tight(3, 2)
    compared(graphs, with_disk(given, None, 0.75, total), goal, (2e8,))


@pytest.mark.soak
@pytest.mark.usefixtures("unverified")
def test_the_same_on_three_devices() -> None:
    graph, given, total = tight(3, 3)
    compared([graph], with_disk(given, None, 0.5, total), (1.0,), (2e7,))


@pytest.mark.parametrize("seed", range(3))
def test_where_everything_fits_a_disk_changes_nothing(seed: int) -> None:
    graph, given, total = tight(seed, 2)
    plain = gs.fit([graph], given, LINK)
    fit = gs.fit([graph], with_disk(given, gs.Link(1e9, 1e-5)), LINK)
    assert fit.fetching is None
    assert dataclasses.replace(fit, devices=plain.devices) == plain
    assert str(fit) == str(plain)
    assert fit.explain("up0") == plain.explain("up0")


# -- a model of billions of weights ---------------------------------------------------------


def recorded(gpu: float, cpu: float, fetch: gs.Link | None = None, **options: object) -> gs.Fit:
    """A fit of Llama 2 7B on a GPU and a host of so many GiB; without a GPU if that is 0."""
    graphs = [gs.load_graph(GRAPHS / f"llama-2-7b-fa-{kind}.json.gz") for kind in ("decode", "prefill512")]
    fetch = fetch or gs.Link(2e9, 1e-4)
    given = [gs.Device("CPU", int(cpu * GIB), 60e9, 1e12, host=True, fetch=fetch)]
    if gpu:
        given.append(gs.Device("GPU", int(gpu * GIB), 1e12, 80e12, reserve=300 << 20))
    return gs.fit(graphs, given, gs.Link(25e9, 8e-6), **options)


@pytest.fixture(scope="module")
def large() -> gs.Fit:
    return recorded(4, 1)


def test_a_slow_disk_is_nearly_all_of_the_time_and_the_gap_is_its_window(large: gs.Fit) -> None:
    checked(large, [plan.graph for plan in large.plans], large.goal)
    assert large.gap < 0.15
    price, found = large.prices[0], large.fetching
    assert found.nbytes / 2e9 <= price.fetches <= large.seconds <= price.fetches * 1.1
    assert price.fetches == pytest.approx(found.nbytes / 2e9 + 1e-4 * len(found.names))
    assert found.rows == ("token_embd.weight",) and found.with_more == 0 == len(found.still)
    assert large.memory[0].left < 24 << 20      # a GPU is filled: what is on it need not be fetched


def test_the_price_is_that_of_the_plans_with_the_disk_as_a_device(large: gs.Fit) -> None:
    disk = large.fetching.disk
    links = {("*", "*"): gs.Link(25e9, 8e-6), ("file", "CPU"): gs.Link(1e30)}
    for plan, price in zip(large.plans, large.prices, strict=True):
        found = gs.price(plan, [*large.devices, disk], links)
        assert found.seconds == pytest.approx(price.seconds)
        assert (found.fetches, found.stalled) == pytest.approx((price.fetches, price.stalled))


def test_a_fast_disk_is_hidden_behind_what_computes(large: gs.Fit) -> None:
    fast = recorded(4, 1, gs.Link(50e9, 1e-5))
    assert fast.seconds < large.seconds / 5
    assert fast.prices[0].stalled < 0.2 * fast.prices[0].fetches
    assert fast.gap < 0.1


def test_more_memory_on_any_device_fetches_less(large: gs.Fit) -> None:
    assert recorded(4.25, 1, within=0.15).fetching.nbytes < large.fetching.nbytes - (128 << 20)
    assert recorded(4, 1.25, within=0.15).fetching.nbytes < large.fetching.nbytes - (128 << 20)
    assert large.worth[0] == large.worth[1] == pytest.approx(1 / 2e9, rel=0.1)
    assert recorded(4, 1, gs.Link(1e12), within=0.15).worth[1] < large.worth[1] / 10


def test_an_embedding_alone_may_be_in_the_file() -> None:
    """A token reads one row of it, which costs next to nothing."""
    fit = recorded(0, 5.55)
    checked(fit, [plan.graph for plan in fit.plans], fit.goal)
    assert (fit.fetching.names, fit.fetching.rows, fit.fetching.nbytes) == ((), ("token_embd.weight",), 0)
    assert fit.prices[0].fetches == 0 == fit.prices[0].stalled and fit.gap < 0.002
    assert str(fit).startswith("not without a disk: each evaluation reads rows of token_embd.weight; all else fits CPU")


def test_caches_that_exceed_the_host_are_on_other_devices() -> None:
    """Only weights can be fetched."""
    fit = recorded(3, 1, within=0.15)
    checked(fit, [plan.graph for plan in fit.plans], fit.goal)
    assert fit.memory[0].cache > 1 << 30


def test_the_answer_says_what_is_fetched(large: gs.Fit) -> None:
    found = large.fetching
    text = str(large)
    mib = f"{found.nbytes / (1 << 20):.2f} MiB"
    assert text.startswith(f"not without a disk: each evaluation fetches {mib} of the weights; all else fits GPU (")
    assert re.search(rf"fetches {len(found.names)} weights of {mib} from file at 2 GB/s, which takes [\d.]+ ms, to a "
                     r"window of .* MiB; with 1 GiB more on CPU it would fetch 0 B", text)
    assert "in the file" in text and "waits for fetches" in text
    data = json.loads(large.to_json())
    assert data["fetching"]["nbytes"] == found.nbytes and data["fetching"]["weights"] == list(found.names)
    assert data["fetching"]["nbytes_with_1GiB_more"] == 0
    assert data["memory"][1]["fetched"] == large.memory[1].fetched > found.nbytes
    for row, price in zip(data["graphs"], large.prices, strict=True):
        parts = sum(row["compute"].values()) + row["copies"] + row["splits"] + row["stalled"]
        assert parts == pytest.approx(row["seconds"]) and row["fetches"] == price.fetches
    assert data["devices"][1]["fetch"] == {"bandwidth": 2e9, "latency": 1e-4}
    again = pickle.loads(pickle.dumps(large))
    assert again == large and str(again) == text and gs.Device.from_dict(data["devices"][1]) == large.devices[1]


def test_a_drawing_counts_what_is_in_memory_and_the_waits(large: gs.Fit) -> None:
    drawn = large.to_svg()
    assert drawn.startswith("<svg") and "waits for the disk" in drawn
    assert large.to_svg(json.loads(large.to_json())).count("waits for the disk") >= 2


def test_an_explanation_says_whether_a_weight_is_fetched_and_what_1_gib_would_change(large: gs.Fit) -> None:
    fetched = large.explain(large.fetching.names[0])
    assert re.search(r"in file, from which CPU fetches it in each evaluation in [\d.]+ ms", fetched)
    assert "with 1 GiB more on CPU it would stay, too, and an evaluation would fetch 0 B instead of" in fetched
    assert "on GPU all together would take" in fetched
    kept = next(entry.name for entry in large.placed if entry.device == 1 and not entry.fetched)
    assert re.search(r"stay on CPU, where .*\n  with 1 GiB more on CPU it would stay, and", large.explain(kept))
    assert "reads the rows that it needs" in large.explain("token_embd.weight")
    elsewhere = large.explain("output.weight")
    assert re.search(r"on GPU, where.*\n  on CPU all together would take [\d.]+ ms more", elsewhere)


def test_the_answer_for_the_only_model_is_the_same(large: gs.Fit) -> None:
    assert large.model(0) == large and large.model(0).memory == large.memory


def test_nodes_are_assigned_to_devices_and_never_to_the_disk(large: gs.Fit) -> None:
    for plan in large.plans:
        assert {device.name for device in large.nodes(plan.graph).values()} <= {"GPU", "CPU"}
    with pytest.raises(gs.PlacementError, match="llama.cpp cannot fetch"):
        large.llama_cpp()


def test_a_node_with_the_name_of_a_weight_costs_no_fetch() -> None:
    """The time of fetching at least so many bytes is part of the bound."""
    graph, given, _ = tight(0, 2)
    ordered = sorted(with_disk(given, gs.Link(1e9)), key=lambda device: device.host)
    found = []
    for name in ("", "embedding"):
        fields = graphfile.graph_to_dict(graph)
        next(entry for entry in fields["tensors"] if entry["op"] == "MUL_MAT")["name"] = name
        named = graphfile.graph_from_dict(fields)
        shares = Shares([Trials([named], ordered, Links(ordered, LINK), (1.0,), 1.0)], LINK, turns=False)
        embedding = sized(graph)["embedding"]
        found.append([shares.least(nbytes) for nbytes in (embedding, embedding + 4096, shares.most)])
        assert shares.within(shares.least(shares.most // 2)) == pytest.approx(shares.most // 2, rel=1e-6)
    assert found[0] == found[1] and found[0][0] == 0 < found[0][1] < found[0][2]


# -- refusals and arguments -------------------------------------------------------------------


def test_what_a_refusal_asks_for_is_enough_and_less_than_without_a_disk() -> None:
    graph, given, total = tight(0, 2)
    few = with_disk(given, gs.Link(1e9, 1e-5), 0.3, total)
    with pytest.raises(gs.OutOfMemory, match="a window of the weights that CPU would fetch") as caught:
        gs.fit([graph], few, LINK)
    with pytest.raises(gs.OutOfMemory) as without:
        gs.fit([graph], with_disk(few, None), LINK)
    assert caught.value.needed < without.value.needed
    found = re.search(r"\((\d+) bytes\) more on CPU would suffice", str(caught.value))
    enough = [device.replace(memory=device.memory + int(found[1])) if device.host else device for device in few]
    fit = gs.fit([graph], enough, LINK)
    assert fit.fetching is not None and fit.memory[-1].left >= 0


def test_more_memory_on_the_host_never_turns_an_answer_into_a_refusal() -> None:
    """With 165 MiB this model was placed, and with 170 MiB refused."""
    base = str(Path(__file__).parents[1] / "data" / "graphs" / "tinyllama-1.1b-")
    graphs = [gs.load_graph(f"{base}{what}.json.gz") for what in ("decode", "prefill512")]
    gpu = gs.Device("GPU", 200 << 20, 1e12, 80e12)
    for memory in (75 << 20, 170 << 20):
        cpu = gs.Device("CPU", memory, 6e10, 1e12, host=True, fetch=gs.Link(2e9, 1e-4))
        gs.fit(graphs, [gpu, cpu], LINK).verify()


def test_streamed_weights_are_not_fetched() -> None:
    graph, given, total = tight(0, 2)
    tiny = with_disk(given, gs.Link(1e9, 1e-5), 0.6, total)
    with pytest.raises(gs.OutOfMemory, match="CPU fetches no weights that are streamed to other devices"):
        gs.fit([graph], tiny, LINK, stream=[True])


@pytest.mark.parametrize(("fetch", "host", "error", "message"), [
    (1e9, False, ValueError, "device 'X' is no host"),
    (0, True, ValueError, "fetch is 0 a second"),
    ("fast", True, TypeError, "fetch is a number, not 'fast'")])
def test_a_disk_is_checked(fetch: object, host: bool, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gs.Device("X", 1 << 30, 1e9, 1e9, host=host, fetch=fetch)  # type: ignore[arg-type]


def test_a_search_that_is_late_has_an_answer_with_a_bound() -> None:
    fit = recorded(4, 1, seconds=1e-9)
    checked(fit, [plan.graph for plan in fit.plans], fit.goal)
    assert fit.fetching is not None and fit.bound > 0
