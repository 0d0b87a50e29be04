"""Which weights stay under a limit: as many bytes as it allows, small and shared ones first, the others evenly."""

import random
from itertools import combinations
from types import SimpleNamespace

import pytest

from ggml_sched.llama.residency import Residency
from ggml_sched.placement.residency import Use, choose, least_choice

MIB = 1 << 20


def layers(n, sizes=(4, 1, 1, 4, 12, 12, 12), norms=True, margin=0):
    """The weights of n layers of these matrices (MiB), with small norms between."""
    uses = []
    for i in range(n):
        for k, size in enumerate(sizes):
            if norms and k in (0, 4):
                uses.append(Use(f"blk.{i}.norm{k}", 4096, 4096 + margin, 1))
            uses.append(Use(f"blk.{i}.w{k}", size * MIB, size * MIB + margin, 1))
    return uses


def room_of(choice):
    return choice.resident + choice.window


def total(uses):
    return sum(use.nbytes for use in uses)


def test_everything_stays_where_it_fits():
    uses = layers(4)
    assert choose(uses, total(uses)).fetched == () and choose(uses, total(uses)).window == 0
    assert choose(uses, total(uses) - 1).fetched


@pytest.mark.parametrize("part", [0.9, 0.5, 0.2, 0.1])
def test_the_room_is_used_and_never_exceeded(part):
    uses = layers(16)
    room = int(total(uses) * part)
    found = choose(uses, room)
    assert found.resident + found.window <= room
    assert found.resident + found.nbytes == total(uses)
    # What is left is less than the smallest weight that is fetched.
    assert room - found.resident - found.window < min(use.nbytes for use in found.fetched)
    assert found.nbytes <= total(uses) - room + found.window + 12 * MIB


@pytest.mark.parametrize("part", [0.8, 0.5, 0.3])
def test_what_is_fetched_is_spread_evenly(part):
    uses = layers(32)
    found = choose(uses, int(total(uses) * part))
    names = {use.name for use in found.fetched}
    share = [sum(use.nbytes for use in uses if use.name in names and use.name.startswith(f"blk.{i}."))
             for i in range(32)]
    for i in range(0, 32, 8):
        assert abs(sum(share[i : i + 8]) - sum(share) / 4) <= 24 * MIB


def test_small_weights_stay_first():
    uses = layers(16)
    assert not any("norm" in use.name for use in choose(uses, total(uses) // 3).fetched)


def test_weights_of_several_uses_stay_unless_nothing_else_is_left():
    uses = [*layers(8), Use("output", 100 * MIB, 100 * MIB, 2)]
    assert "output" not in {use.name for use in choose(uses, total(uses) // 2).fetched}
    assert "output" in {use.name for use in choose(uses, 114 * MIB).fetched}


def test_a_weight_that_would_need_a_large_window_stays():
    """A window for the output matrix costs more bytes than it saves, until there is no other way."""
    uses = [*layers(16), Use("output", 150 * MIB, 150 * MIB, 1)]
    found = choose(uses, total(uses) * 2 // 3)
    assert "output" not in {use.name for use in found.fetched} and found.window <= 24 * MIB
    found = choose(uses, 164 * MIB)
    assert "output" in {use.name for use in found.fetched} and found.window == 162 * MIB


def test_nothing_is_chosen_where_not_even_the_window_fits():
    uses = layers(4)
    least = next(room for room in range(0, 100 * MIB, MIB // 4) if choose(uses, room) is not None)
    assert choose(uses, least).window >= 24 * MIB and choose(uses, 20 * MIB) is None
    assert least - MIB // 4 < room_of(least_choice(uses)) <= least
    assert choose([], 0).fetched == () and choose([Use("w", 5, 5, 1)], 4) is None


@pytest.mark.parametrize("seed", range(60))
def test_random_weights_against_all_sets(seed):
    """Of few weights every set is tried: the choice costs little more than the cheapest."""
    rng = random.Random(seed)
    uses = [Use(f"w{k}", size, size + rng.choice((0, 100)), rng.choice((1, 1, 1, 2)))
            for k in range(rng.randrange(1, 9)) for size in [rng.choice((1, 2, 3, 5, 8)) * 10**6]]
    room = rng.randrange(0, total(uses) + 10**6)
    best = None
    for n in range(len(uses) + 1):
        for picked in combinations(range(len(uses)), n):
            fetched = [uses[k] for k in picked]
            window = max((a.fetched + b.fetched for a, b in zip(fetched, fetched[1:], strict=False)),
                         default=max((use.fetched for use in fetched), default=0))
            if total(uses) - total(fetched) + window <= room:
                seconds = sum(2e-4 + use.nbytes / 1e9 for use in fetched)
                best = seconds if best is None else min(best, seconds)
    found = choose(uses, room)
    assert (found is None) == (best is None)
    least = room_of(least_choice(uses))
    assert choose(uses, least) is not None and (least == 0 or choose(uses, least - 1) is None)
    if found is not None:
        assert found.resident + found.window <= room
        assert found.seconds <= best + 9e-3       # at most the largest weight more


def test_explanations_name_the_reason_and_the_next_gib():
    uses = {"CPU": (*layers(64), Use("tied", 30 * MIB, 30 * MIB, 2))}
    room = total(uses["CPU"]) // 2
    held = Residency({"CPU": room + 5 * MIB}, {"CPU": room}, uses, {"CPU": choose(uses["CPU"], room)}, ("embd",),
                     "disk")
    assert held.explain("embd").startswith("embd: in disk, because nodes read single rows of it")
    name = held.fetched[3]
    assert f"{name}: fetched from disk in each evaluation" in held.explain(name)
    assert "with 1 GiB more" in held.explain(name)
    assert "because it is small" in held.explain("blk.0.norm0") and "2 nodes read it" in held.explain("tied")
    stays = next(use.name for use in uses["CPU"] if use.nbytes == 12 * MIB and use.name not in held.fetched)
    assert "one of those of its size that fit beside" in held.explain(stays)
    with pytest.raises(KeyError):
        held.explain("nothing")
    whole = Residency({"CPU": 1 << 40}, {"CPU": 1 << 39}, uses, {"CPU": choose(uses["CPU"], 1 << 39)})
    assert "because everything fits" in whole.explain("blk.0.w1") and "GiB" not in whole.explain("blk.0.w1")


def test_slots_of_experts_have_what_a_window_has_besides_its_room():
    bank = SimpleNamespace(name="bank", weights=["experts"], n_experts=64)
    slots = SimpleNamespace(home=SimpleNamespace(name="CPU"), names={"experts"}, n_slots=2, fewest=2, n_experts=64,
                            slot_nbytes=100 * MIB, banks=[bank])
    uses = {"CPU": tuple(Use(f"w{k}", 2048 * MIB, 2048 * MIB, 1) for k in range(2))}
    held = Residency({"CPU": 4300 * MIB}, {"CPU": 200 * MIB}, uses, {"CPU": least_choice(uses["CPU"])}, (), "disk",
                     slots, spare={"CPU": 4096 * MIB})
    assert "with 1 GiB more there would be 12 slots" in held.explain("experts")
