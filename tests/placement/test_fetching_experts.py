"""`fit` with a disk, of models of experts: slots, what evaluations are expected to read, and bounds."""

from __future__ import annotations

import json
import pickle
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from dry_file_store import DryFileStore
from fetching_plans import every_fetching_plan
from small_models import mixture

import ggml_sched as gs
from ggml_sched.backends.store import has_slots
from ggml_sched.backends.store.rows import fits
from ggml_sched.placement.devices import Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.fetching import FetchingTrials
from ggml_sched.placement.leastfetches import Costs, Curve, LeastFetches, seconds_beside
from ggml_sched.placement.residency import reads_of
from ggml_sched.placement.shares import Shares
from ggml_sched.placement.slots import Slots, by_expert, can_have_slots
from ggml_sched.placement.trials import Trials
from ggml_sched.planning.program import Fetch, FetchExperts

pytestmark = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")

GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
GIB = 1 << 30
LINK = gs.Link(5e8, 1e-6)
UNUSED = 1 << 40


def host(memory: int, fetch: gs.Link | None, **options: float) -> gs.Device:
    return gs.Device("CPU", memory, options.pop("bandwidth", 1e10), 1e11, host=True, fetch=fetch, **options)


def checked(fit: gs.Fit) -> None:
    """What holds for every answer with slots."""
    slots = fit.fetching.slots
    fit.verify()
    assert 0 < slots.n_slots <= slots.n_experts
    assert all(fit.place(name).host and fit.entry(name).fetched for name in slots.names)
    for use in fit.memory:
        assert use.weights + use.slots + use.cache + use.arena + use.reserve + use.left == use.device.memory
        assert use.left >= 0
    assert fit.memory[-1].slots == slots.n_slots * slots.slot_nbytes
    assert fit.bound <= fit.rules_bound <= fit.seconds
    for used, read, more in zip(slots.used, slots.nbytes, slots.nbytes_with_more, strict=True):
        assert 0 <= more <= read <= used


# -- the bound ----------------------------------------------------------------------------------


def every_placement(graph: gs.Graph, ordered: Sequence[gs.Device]) -> Iterator[float]:
    """The seconds of each placement whose real plan keeps the budgets: each weight is on a device or in a store, and
    those of experts on the host may have slots together, of any number."""
    for one in every_fetching_plan([graph], ordered, (True,)):
        left, n_slots = one.left(ordered), 0
        if min(left) < 0:
            continue
        if one.slots is not None:
            n_slots = one.slots.within(left[-1])
            if n_slots * one.slots.slot_nbytes > left[-1]:
                continue
        yield one.seconds(ordered, LINK, n_slots=n_slots)


@pytest.mark.parametrize("speed", [2e7, 1e9, 1e11])
@pytest.mark.parametrize("memory", [155_000, 185_000, 222_000])
@pytest.mark.parametrize(("tokens", "n_used"), [(1, 1), (1, 2), (2, 1)])
def test_the_bound_is_below_every_placement_with_slots_and_without(speed: float, memory: int, tokens: int,
                                                                      n_used: int) -> None:
    graph = mixture(tokens=tokens, n_used=n_used)
    given = host(memory, gs.Link(speed, 1e-6))
    fit = gs.fit([graph], [given], LINK)
    best = min(every_placement(graph, [given]))
    assert 0 < fit.bound <= fit.rules_bound <= best * (1 + 1e-9)
    assert fit.seconds <= best * 1.5


@pytest.mark.parametrize("speed", [5e7, 1e11])
def test_the_same_on_two_devices(speed: float) -> None:
    graph = mixture(n_experts=3, n_used=1)
    given = [gs.Device("GPU", 60_000, 1e11, 1e12), host(125_000, gs.Link(speed, 1e-6))]
    fit = gs.fit([graph], given, LINK)
    best = min(every_placement(graph, given))
    assert 0 < fit.bound <= fit.rules_bound <= best * (1 + 1e-9)
    assert fit.seconds <= best * 1.5


@pytest.mark.parametrize("bandwidth", [1e8, 2e8])
def test_the_bound_counts_that_a_device_computes_with_a_weight_of_a_bank_while_another_one_is_read(
        bandwidth: float) -> None:
    """`up0` on the GPU, and `down0` in slots: its experts are known before the product with `up0`."""
    graph = mixture(n_experts=8, n_used=1, width=128, wide=128)
    given = [gs.Device("GPU", 535_000, bandwidth, 1e12), host(225_000, gs.Link(1e8, 1e-6), bandwidth=bandwidth)]
    fit = gs.fit([graph], given, LINK)
    assert 0 < fit.bound <= fit.rules_bound <= min(every_placement(graph, given)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_least_seconds_are_below_every_division_of_the_bytes(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {f"{k}": rng.randrange(1, 1000) for k in range(6)}
    whole = {name: size * rng.uniform(0.5, 1.5) for name, size in sizes.items() if name != "0"}
    experts = {name: whole[name] * rng.uniform(0.1, 0.9) for name in ("3", "4", "5")}
    beside = rng.uniform(0, 100)
    least = LeastFetches([Costs(sizes, whole, experts, beside)])
    total = sum(sizes.values())
    for _ in range(200):
        parts = {name: rng.random() ** rng.choice((0.2, 1, 5)) for name in sizes}
        nbytes = sum(parts[name] * size for name, size in sizes.items())
        computing = rng.uniform(0, 1.2) * total
        alone = computing * rng.uniform(0.5, 1)
        fetched = sum(parts[name] * whole.get(name, 0.0) for name in sizes)
        one_by_one = sum(parts[name] * cost for name, cost in experts.items())
        others = fetched - sum(parts[name] * whole[name] for name in experts)
        assert least.seconds(nbytes, computing, alone) <= max(computing, fetched) * (1 + 1e-9)
        ways = max(computing, others + one_by_one, alone - beside + one_by_one)
        assert least.seconds(nbytes, computing, alone) <= ways * (1 + 1e-9)
        assert least.seconds(nbytes, computing, alone) >= max(computing, least.seconds(nbytes, computing)) * (1 - 1e-9)


def test_a_curve_takes_the_cheapest_bytes_first() -> None:
    curve = Curve({"free": 10, "dear": 20, "cheap": 30, "empty": 0}, {"dear": 40.0, "cheap": 15.0})
    assert [curve.at(n) for n in (0, 10, 25, 40, 50, 60, 99)] == [0, 0, 7.5, 15, 35, 55, 55]
    assert [curve.within(n) for n in (0, 7.5, 35, 55, 99)] == [10, 25, 50, 60, 60]
    assert [curve.slope(n) for n in (5, 25, 50, 60)] == [0, 0.5, 2, 2]
    assert (curve.most, Curve({}, {}).most, Curve({}, {}).at(1), Curve({}, {}).slope(1)) == (60, 0, 0, 0)


def test_what_computes_beside_reads_of_experts_lies_between_the_choice_and_the_products() -> None:
    given = host(GIB, None)
    graph = mixture(layers=3)
    found = facts(graph)
    names = set(by_expert([reads(graph)]))
    assert names == {f"{what}{k}" for what in ("up", "down") for k in range(3)}
    assert seconds_beside(found, names, [given]) == 0
    # Of two devices one may compute with `up` while experts of `down` are read, on the slower of both.
    slow = given.replace(name="GPU", host=False, bandwidth=1e9)
    taken = dict(zip(found.nodes, found.seconds(slow), strict=True))
    ups = [node for node in found.nodes if node.op == "MUL_MAT_ID"][::2]
    expected = sum(taken[node] + taken[found.nodes[found.nodes.index(node) + 1]] for node in ups)
    assert seconds_beside(found, names, [slow, given]) == pytest.approx(expected)
    ctx = gs.Context()
    with gs.Context() as scratch:
        plain = scratch.tensor("f32", (64, 64, 4))
        weights = [ctx.restore("NONE", plain.type, plain.ne, plain.nb, name=f"w{k}", resident="weight")
                   for k in range(2)]
    x = ctx.tensor("f32", (64, 1, 1), "x", input=True)
    early = [ctx.argsort(ctx.tensor("f32", (4, 1), f"s{k}", input=True), "desc") for k in range(2)]
    ids = [ctx.view_2d(order, 2, 1, order.nb[1]) for order in early]
    y = ctx.relu(ctx.mul_mat_id(weights[0], x, ids[0]))
    graph = gs.Graph(early[0], early[1], ctx.mul_mat_id(weights[1], y, ids[1]))
    found, first = facts(graph), facts(graph).seconds(given)
    assert seconds_beside(found, ["w0"], [given]) == pytest.approx(first[1])
    assert seconds_beside(found, ["w0", "w1"], [given]) is None, "the second layer has chosen before the first reads"


def reads(graph: gs.Graph) -> list:
    residents = {t.name: t for t in graph.tensors if t.resident and t.view_src is None}
    return [*reads_of(graph.nodes, residents, fits)]


def test_weights_that_are_read_otherwise_have_no_slots() -> None:
    graph = mixture()
    assert [*by_expert([reads(graph)])] == ["up0", "down0"]
    assert {entry.bank for entry in by_expert([reads(graph)]).values()} == {"up0"}
    up = next(t for t in graph.tensors if t.name == "up0")
    with gs.Context() as ctx:
        one = ctx.mul_mat(ctx.view_2d(up, 64, 96, up.nb[1]), ctx.tensor("f32", (64, 1), "z", input=True))
        assert by_expert([reads(gs.Graph(graph.nodes[-1], one))]) == {}
        product = next(node for node in graph.nodes if node.op == "MUL_MAT_ID")
        part = ctx.view_3d(up, 64, 96, 2, up.nb[1], up.nb[2])
        assert by_expert([reads(gs.Graph(ctx.mul_mat_id(part, product.src[1], product.src[2])))]) == {}
    with gs.Context() as ctx:
        assert by_expert([reads(chosen_from(ctx, [1]))]) == {}, "its only expert is always needed"


def test_there_are_slots_for_what_one_node_uses_and_at_most_for_each_expert() -> None:
    graphs = (mixture(layers=2, tokens=3, n_used=1), mixture(layers=2))
    slots = Slots(DryFileStore("file"), by_expert([reads(graph) for graph in graphs]))
    assert (slots.fewest, slots.n_experts, slots.n_slots) == (3, 8, 3)
    size = slots.slot_nbytes
    assert [slots.within(room) for room in (-1, 0, 4 * size - 1, 4 * size, 1 << 50)] == [3, 3, 3, 4, 8]


def chosen_from(ctx: gs.Context, counts: Sequence[int], n_ids: int = 1, rows: bool = False) -> gs.Graph:
    """A graph of products with experts of weights w0, w1, ..., which have so many, by `n_ids` lists of numbers in turn.
    `rows`: between the choice and the first product rows of another weight are read."""
    lists = []
    for k in range(n_ids):
        order = ctx.argsort(ctx.tensor("f32", (min(counts), 1), f"s{k}", input=True), "desc")
        lists.append(ctx.view_2d(order, 1, 1, order.nb[1]))
    y = ctx.tensor("f32", (32, 1, 1), "x", input=True)
    with gs.Context() as scratch:
        plain = [scratch.tensor("f32", (32, 32, n)) for n in counts] + [scratch.tensor("f32", (32, 9))]
        weights = [ctx.restore("NONE", t.type, t.ne, t.nb, name=f"w{k}", resident="weight")
                   for k, t in enumerate(plain)]
    if rows:
        y = ctx.add(y, ctx.get_rows(weights[-1], lists[0]))
    for k, weight in enumerate(weights[:-1]):
        y = ctx.mul_mat_id(weight, y, lists[k % n_ids])
    return gs.Graph(y)


def test_weights_are_in_one_bank_where_the_same_numbers_choose_in_all_graphs() -> None:
    with gs.Context() as ctx, gs.Context() as other:
        one, two = chosen_from(ctx, [4, 4]), chosen_from(other, [4, 4], n_ids=2)
        assert [entry.bank for entry in by_expert([reads(one)]).values()] == ["w0", "w0"]
        assert [entry.bank for entry in by_expert([reads(two)]).values()] == ["w0", "w1"]
        assert by_expert([reads(one), reads(two)]) == {}
    with gs.Context() as ctx:
        assert by_expert([reads(chosen_from(ctx, [4, 5]))]) == {}, "two numbers of experts in a bank"


def test_a_bank_without_slots_takes_none_from_others() -> None:
    with gs.Context() as ctx, gs.Context() as other, gs.Context() as third:
        graph = chosen_from(ctx, [4, 4, 4, 5], n_ids=2)
        assert [*by_expert([reads(graph)])] == ["w0", "w2"], "w1 and w3 have two numbers of experts"
        # w0, w1 and w2 in banks of w0, w1 and w0; in the other graph w0 and w3 are together.
        graphs = [reads(chosen_from(other, [4] * 3, n_ids=2)), reads(chosen_from(third, [4] * 4, n_ids=3))]
        assert [*by_expert(graphs)] == ["w1"]
    with gs.Context() as ctx:
        graph = mixture(layers=2)
        up = next(t for t in graph.tensors if t.name == "up0")
        one = ctx.mul_mat(ctx.view_2d(up, 64, 96, up.nb[1]), ctx.tensor("f32", (64, 1), "z", input=True))
        assert [*by_expert([reads(gs.Graph(graph.nodes[-1], one))])] == ["up1", "down1"]


def test_rows_that_a_store_may_read_between_say_nothing_of_what_computes_beside() -> None:
    for rows in (False, True):
        with gs.Context() as ctx:
            found = seconds_beside(facts(chosen_from(ctx, [4], rows=rows)), ["w0"], [host(GIB, None)])
            assert found is None if rows else found == 0


def test_a_host_has_slots_if_it_computes_on_memory_of_its_caller() -> None:
    assert can_have_slots(gs.DryBackend("numbers"))
    with gs.CpuBackend(1) as cpu:
        assert can_have_slots(cpu)
    device = gs.DryBackend("device")
    device.has_memory = True
    assert not can_have_slots(device)


def test_weights_whose_alignment_takes_more_than_slots_for_all_have_none() -> None:
    """The bound counts that slots for all experts take no fewer bytes."""
    for alignment, slotted in ((64, ("up0", "down0")), (1 << 17, ())):
        given = [host(222_000 if slotted else 1_100_000, gs.Link(1e9, 1e-6), alignment=alignment)]
        model = Trials([mixture()], given, Links(given, LINK), (1.0,), 1.0)
        found = Shares([model], LINK, turns=False).place(([dict.fromkeys(model.sizes, 0)], [None]))
        assert found is not None and found.parts[0].way.slotted == slotted


# -- a model of billions of weights -----------------------------------------------------------------


def mixtral(cpu: float, gpu: float = 0, fetch: float = 2e9, **options: object) -> gs.Fit:
    """A fit of Mixtral 8x7B on a host of so many GiB, and a GPU if that is not 0."""
    graphs = [gs.load_graph(GRAPHS / f"mixtral-8x7b-{kind}.json.gz") for kind in ("decode", "prefill512")]
    given = [gs.Device("CPU", int(cpu * GIB), 60e9, 1e12, host=True, fetch=gs.Link(fetch, 1e-4))]
    if gpu:
        given.append(gs.Device("GPU", int(gpu * GIB), 1e12, 80e12, reserve=300 << 20))
    return gs.fit(graphs, given, gs.Link(25e9, 8e-6), within=0.05, **options)


@pytest.fixture(scope="module")
def large() -> gs.Fit:
    return mixtral(16)


@pytest.fixture(scope="module")
def with_gpu() -> gs.Fit:
    return mixtral(12, 6)


def test_experts_have_the_slots_that_memory_leaves_and_a_token_reads_the_others(large: gs.Fit) -> None:
    checked(large)
    found, slots = large.fetching, large.fetching.slots
    assert found.names == () and found.rows == ("token_embd.weight",) and found.nbytes == 0
    assert len(slots.names) == 96 and slots.n_experts == 256
    assert large.memory[0].left < slots.slot_nbytes
    one = sum(large.entry(name).nbytes for name in slots.names) / 256
    share = (256 - slots.n_slots) / 254
    assert slots.used[0] == pytest.approx(32 * 2 * one)
    assert 31 * 8 * one < slots.used[1] < 256 * one, "of a prompt the last layer computes one token"
    assert slots.nbytes[0] == pytest.approx(slots.used[0] * share)
    price = large.prices[0]
    assert price.fetches == price.stalled == pytest.approx(slots.nbytes[0] / 2e9 + 64 * share * 3 * 1e-4)
    assert large.gap < 0.06
    # A slot more or less is worth about that.
    assert large.worth[0] == pytest.approx(0.25 / 2e9, rel=0.1)
    gib = large.worth[0] * GIB
    assert (slots.nbytes[0] - slots.nbytes_with_more[0]) / 2e9 == pytest.approx(gib, rel=0.2)


def test_the_price_is_that_of_the_plans_with_the_disk_as_a_device(large: gs.Fit) -> None:
    for plan, price in zip(large.plans, large.prices, strict=True):
        found = gs.price(plan, [*large.devices, large.fetching.disk], {("file", "CPU"): gs.Link(1e30)})
        assert found.seconds == pytest.approx(price.seconds) and found.fetches == pytest.approx(price.fetches)


def test_more_memory_reads_less_and_a_gpu_has_experts_of_its_own(large: gs.Fit, with_gpu: gs.Fit) -> None:
    small, more = mixtral(6), with_gpu
    checked(small)
    checked(more)
    assert small.fetching.slots.n_slots < large.fetching.slots.n_slots
    assert small.fetching.slots.nbytes[0] > 1.5 * large.fetching.slots.nbytes[0] and small.gap < 0.05
    held = {entry.name for entry in more.placed if entry.device == 0 and "_exps" in entry.name}
    assert held and held.isdisjoint(more.fetching.slots.names) and more.fetching.slots.n_experts < 256
    assert more.seconds < large.seconds
    assert {device.name for plan in more.plans for device in more.nodes(plan.graph).values()} <= {"GPU", "CPU"}


def test_prompts_fetch_whole_tensors_while_they_compute(large: gs.Fit) -> None:
    """Nearly all experts of a layer are used, and known only when it has chosen them."""
    fit = mixtral(16, goal="prompt")
    assert fit.fetching.slots is None and any("_exps" in name for name in fit.fetching.names)
    assert fit.prices[1].seconds < large.prices[1].seconds
    assert large.prices[0].seconds < fit.prices[0].seconds


def test_the_answer_says_what_is_read_and_what_it_assumes(large: gs.Fit) -> None:
    slots, text = large.fetching.slots, str(large)
    size = f"{slots.nbytes[0] / GIB:.2f} GiB"
    assert text.startswith(f"not without a disk: each evaluation reads about {size} of experts; all else fits CPU (")
    assert re.search(rf"{slots.n_slots} slots of [\d.]+ MiB on CPU are for 256 experts: of [\d.]+ GiB of experts for 1 "
                     rf"token, about {size} are in no slot, and read from file at 2 GB/s; with 1 GiB more on CPU there "
                     rf"would be {slots.n_slots_with_more} slots, and about [\d.]+ GiB to read\n"
                     "assumed: each token chooses its experts at random", text)
    assert re.search(r"device +memory +weights +slots +cache", text)
    said = large.explain("blk.3.ffn_up_exps.weight")
    assert f"reads the experts that a node has chosen and that are in none of {slots.n_slots} slots" in said
    assert f"there would be {slots.n_slots_with_more} slots" in said
    assert "would fetch" not in large.explain("blk.3.attn_q.weight")
    data = json.loads(large.to_json())
    assert data["fetching"]["experts"] == slots.to_dict() and data["memory"][0]["slots"] == large.memory[0].slots
    again = pickle.loads(pickle.dumps(large))
    assert again == large and str(again) == text
    assert large.model(0) == large
    stored = large.memory[0].fetched
    assert stored > 20 * GIB
    with pytest.raises(gs.PlacementError, match=f"llama.cpp cannot fetch what an evaluation reads of {stored} bytes"):
        large.llama_cpp()
    drawn = large.to_svg(json.loads(large.to_json()))
    assert drawn.count("experts") >= 2


def test_drawings_count_the_bytes_of_slots_as_experts(large: gs.Fit) -> None:
    from ggml_sched.view.bars import _of_dict, _of_fit

    slots = large.memory[0].slots
    for drawn in (_of_fit(large), _of_dict(large.to_dict(), large)):
        parts = drawn.devices[0].parts
        assert 0 <= parts["experts"] - slots < 8 << 20, "and routers"
        assert sum(parts.values()) + drawn.devices[0].left == large.memory[0].device.memory


# -- refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 16])
def test_what_a_refusal_asks_for_is_enough_with_slots_or_with_whole_tensors(tokens: int) -> None:
    graph = mixture(layers=2, tokens=tokens, n_experts=8)
    least = "the fewest slots for experts" if tokens == 1 else "a window of the weights that CPU would fetch"
    with pytest.raises(gs.OutOfMemory, match=f"caches, arenas and {least} exceed the 29.30 KiB of CPU, too") as caught:
        gs.fit([graph], [host(30_000, gs.Link(1e9, 1e-5))])
    least = caught.value.needed
    fit = gs.fit([graph], [host(least, gs.Link(1e9, 1e-5))])
    assert fit.memory[0].left >= 0
    assert (fit.fetching.slots is not None) == (tokens == 1), "a prompt needs a slot for each expert of a layer"
    with pytest.raises(gs.OutOfMemory):
        gs.fit([graph], [host(least - 1, gs.Link(1e9, 1e-5))])


def test_a_system_without_slots_fetches_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = mixture(layers=2)
    given = host(260_000, gs.Link(1e9, 1e-5))
    assert gs.fit([graph], [given]).fetching.slots is not None
    monkeypatch.setattr("sys.platform", "plan9")
    fit = gs.fit([graph], [given])
    assert fit.fetching.slots is None and fit.fetching.names


def test_a_search_that_is_late_has_an_answer_with_a_bound() -> None:
    fit = mixtral(16, seconds=1e-9)
    checked(fit)
    assert fit.bound > 0


def test_trials_of_other_placements_have_slots_for_what_comes_to_the_host(with_gpu: gs.Fit) -> None:
    fit = with_gpu
    name = next(entry.name for entry in fit.placed if entry.device == 0 and "_exps" in entry.name)
    assert "on CPU all together would take" in fit.explain(name)
    assert "on GPU all together would take" in fit.explain(fit.fetching.slots.names[0])


def test_a_placement_that_another_device_lacks_room_for_is_none() -> None:
    given = [gs.Device("GPU", 1000, 1e11, 1e12), host(222_000, gs.Link(1e9, 1e-6))]
    model = Trials([mixture()], given, Links(given, LINK), (1.0,), 1.0)
    shares, residents = Shares([model], LINK, turns=False), dict.fromkeys(model.sizes, 1)
    placement = [residents], [None]
    assert shares.place(placement) is not None and shares.least_bytes(placement) is not None
    residents["first"] = 0
    assert shares.place(placement) is None and shares.least_bytes(placement) is None


def test_experts_that_come_to_the_host_in_a_trial_are_read_one_by_one() -> None:
    given = [gs.Device("GPU", GIB, 1e11, 1e12), host(222_000, gs.Link(1e9, 1e-6))]
    model = Trials([mixture()], given, Links(given, LINK), (1.0,), 1.0)
    before = {**dict.fromkeys(model.sizes, 1), "up0": 0}
    for slotted, kinds in ((("down0",), {FetchExperts}), ((), {Fetch})):
        trial = FetchingTrials(model, LINK, before, [] if slotted else ["down0"], slotted).run({**before, "up0": 1})
        steps = [step for step in trial.plans[0].program.steps if isinstance(step, (Fetch, FetchExperts))]
        assert {type(step) for step in steps} == kinds
        read = {i for step in steps for i in getattr(step, "weights", (step.tensor,))}
        assert {trial.plans[0].graph.tensors[i].name for i in read} == {"up0", "down0"}


def test_a_node_that_reads_experts_in_slots_is_on_the_host_whatever_a_search_has_assigned() -> None:
    given = [gs.Device("GPU", GIB, 1e11, 1e12), host(222_000, gs.Link(1e9, 1e-6))]
    model = Trials([mixture()], given, Links(given, LINK), (1.0,), 1.0)
    chosen = [node for node in model.facts[0].nodes if node.op == "MUL_MAT_ID"]
    placement = [dict.fromkeys(model.sizes, 1)], [[dict.fromkeys(chosen, 0)]]
    found = Shares([model], LINK, turns=False).place(placement)
    assert found is not None and found.parts[0].way.slotted == ("up0", "down0")
    plan, = found.parts[0].trial.plans
    assert {plan.backend_of(node).name for node in chosen} == {"CPU"}
