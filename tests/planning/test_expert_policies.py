"""Policies for experts: what goes first, what replays count, and that no policy reads less than Belady's bound."""

import itertools

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.experts import (
    Bank,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Mixture,
    Routing,
    Static,
    Visit,
    bound,
    replay,
)
from ggml_sched.experts.policies import checked_policy
from ggml_sched.experts.table import SlotTable

HEADER = '{"format": "ggml-sched experts", "version": 1, "banks": [{"name": "a", "n_experts": 2, "nbytes": 1}]}'
POLICIES = [LeastRecentlyUsed(), LeastFrequentlyUsed(), LeastFrequentlyUsed((0.5,)), Mixture(), Mixture(0.25)]


def recording(seed, n_banks=3, n_experts=6, n_used=2, n_tokens=30, skew=1.0, together=1):
    """A recording of a router with a static preference: each token's experts are drawn by scores of Gumbel's."""
    rng = np.random.default_rng(seed)
    base = skew * rng.gumbel(size=(n_banks, n_experts))
    made = Routing([Bank(f"blk.{b}", n_experts, 1000 + b) for b in range(n_banks)])
    for _ in range(n_tokens):
        for b in range(n_banks):
            tokens = [np.argsort(-base[b] - rng.gumbel(size=n_experts))[:n_used].tolist() for _ in range(together)]
            made.visits.append(Visit(b, tuple(map(tuple, tokens))))
    return made


def visits(*of):
    return Routing([Bank("a", 4, 10), Bank("b", 4, 10)], [Visit(bank, (tuple(experts),)) for bank, experts in of])


def kept(policy, made, n_slots):
    """The experts that are in slots after a recording, (bank, expert)."""
    table = SlotTable(len(made.banks), made.n_experts, n_slots, policy)
    for visit in made.visits:
        for expert, _ in table.visit(visit.bank, visit.used):
            table.put(visit.bank, expert)
    return {(int(b), int(e)) for b, e in np.argwhere(table.held)}


def test_the_least_recently_used_goes():
    assert kept(LeastRecentlyUsed(), visits((0, [0]), (0, [1]), (0, [2])), 2) == {(0, 1), (0, 2)}
    assert kept(LeastRecentlyUsed(), visits((0, [0]), (0, [1]), (0, [0]), (0, [2])), 2) == {(0, 0), (0, 2)}


def test_of_experts_of_equal_age_the_one_whose_layer_comes_last_goes():
    """Layer b is next when layer a has been: what b used last time is needed sooner than what a used just now."""
    assert kept(LeastRecentlyUsed(), visits((0, [0]), (1, [0]), (0, [0, 1])), 2) == {(0, 0), (0, 1)}
    three = Routing([Bank(name, 4, 10) for name in "abc"],
                      [Visit(0, ((0,),)), Visit(1, ((0,),)), Visit(2, ((0,),)), Visit(0, ((0,),)), Visit(1, ((1,),))])
    # The expert of layer a was used later than that of c, and c comes before a.
    assert kept(LeastRecentlyUsed(), three, 3) == {(0, 0), (1, 1), (2, 0)}


def test_the_least_frequently_used_goes():
    often = [(0, [0])] * 5 + [(0, [1]), (0, [2])]
    assert kept(LeastFrequentlyUsed(), visits(*often), 2) == {(0, 0), (0, 2)}
    # With a short memory what was used often long ago counts for nothing.
    assert kept(LeastFrequentlyUsed((0.1,)), visits(*often), 2) == {(0, 1), (0, 2)}


def test_static_keeps_the_most_used_of_a_profile_and_a_mixture_keeps_half():
    profile = np.array([[0, 9, 0, 0], [0, 0, 8, 0]])
    made = visits((0, [1]), (1, [2]), (0, [0]), (1, [0]), (0, [2]), (1, [3]), (0, [3]))
    assert {(0, 1), (1, 2)} <= kept(Static(profile), made, 3)
    assert (0, 1) in kept(Mixture(0.5, profile), made, 2)
    assert (0, 1) not in kept(LeastRecentlyUsed(), made, 2)
    for other in (profile.tolist(), profile.astype(np.uint32)):
        assert replay(made, Static(other), 3) == replay(made, Static(profile), 3)
    for wrong in ([[1, 2]], profile[0], [[0] * 4] * 3):
        with pytest.raises(ValueError, match="a profile of"):
            replay(made, Static(wrong), 3)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_no_expert_of_the_present_visit_goes_and_slots_are_never_exceeded(policy):
    made = recording(3, n_tokens=20, together=2)
    table = SlotTable(3, 6, 5, policy)
    for visit in made.visits:
        for expert, gone in table.visit(visit.bank, visit.used):
            assert gone is None or not (gone[0] == visit.bank and gone[1] in visit.used)
            assert not table.held[visit.bank, expert]
            table.put(visit.bank, expert)
        assert table.held.sum() <= 5 and table.held[visit.bank, visit.used].all()


class Costs:
    """A policy of constant costs, and its order."""

    def __init__(self, costs):
        self._costs = np.array(costs)

    def begin(self, n_banks, n_experts, n_slots):
        return self

    def use(self, bank, experts):
        pass

    def costs(self, bank):
        return self._costs


@pytest.mark.parametrize(("costs", "gone"), [
    (np.zeros((2, 4)), [(0, 0), (0, 2)]), (np.full((2, 4), -np.inf), [(0, 0), (0, 2)]),
    (np.full((2, 4), np.nan), [(0, 0), (0, 2)]), (np.full((2, 4), np.inf), [(0, 0), (0, 2)]),
    (np.zeros((2, 4), np.uint8), [(0, 0), (0, 2)]),
    ([[np.nan, 9, -np.inf, 9], [9, 9, 9, 9]], [(0, 2), (0, 0)]),
    ([[np.nan, 9, np.inf, 9], [9, 9, 9, 1]], [(0, 2), (0, 0)]),
])
def test_whatever_the_costs_only_experts_with_a_slot_that_are_not_used_give_it_up(costs, gone):
    table = SlotTable(2, 4, 4, Costs(costs))
    for bank, expert in ((0, 0), (0, 2), (1, 1), (1, 3)):
        table.put(bank, expert)
    going = []
    for expert, pair in table.visit(1, [0, 1, 2, 3]):
        going.append(pair)
        table.put(1, expert)
        assert table.held.sum() == 4
    assert going == gone and table.held[1].all()


def test_an_expert_that_did_not_arrive_is_missing_at_the_next_visit():
    table = SlotTable(1, 4, 2, LeastRecentlyUsed())
    assert next(table.visit(0, [1, 2])) == (1, None)
    assert [expert for expert, _ in table.visit(0, [1, 2])] == [1, 2]
    assert not table.held.any()


def test_more_experts_than_slots_are_refused_and_nothing_changes():
    table = SlotTable(1, 4, 2, LeastRecentlyUsed())
    table.put(0, 3)
    with pytest.raises(ValueError, match="3 experts of bank 0"):
        table.visit(0, [0, 1, 2])
    assert table.held.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("seed", range(6))
def test_no_policy_reads_less_than_the_bound(seed):
    made = recording(seed, together=1 + seed % 2)
    for n_slots in (4, 8, 12, 18):
        best = bound(made, n_slots)
        assert best.hits + best.misses == sum(len(visit.used) for visit in made.visits)
        for policy in (*POLICIES, Static(made.profile)):
            assert replay(made, policy, n_slots).misses >= best.misses
        if n_slots == 18:
            assert best.misses == np.count_nonzero(made.profile)


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_the_least_of_all_choices(seed):
    """Against every choice of what goes, followed to the end."""
    made = recording(seed, n_banks=2, n_experts=3, n_used=1, n_tokens=4)
    n_slots = 2 + seed % 2

    def least(k, held):
        if k == len(made.visits):
            return 0
        visit = made.visits[k]
        used = {(visit.bank, expert) for expert in visit.used}
        missing, rest = used - held, held - used
        n_go = max(len(held | used) - n_slots, 0)
        return len(missing) + min(least(k + 1, frozenset((held | used) - set(gone)))
                                  for gone in itertools.combinations(sorted(rest), n_go))

    assert bound(made, n_slots).misses == least(0, frozenset())


def test_bytes_are_those_of_the_banks():
    made = visits((0, [0, 1]), (1, [2]), (0, [0, 1]))
    made.banks[1] = Bank("b", 4, 7)
    assert replay(made, LeastRecentlyUsed(), 4) == (2, 3, 27, 0)
    assert replay(made, LeastRecentlyUsed(), 4).rate == 0.4 and replay(visits(), LeastRecentlyUsed(), 4).rate == 0


def test_recordings_are_written_and_read(tmp_path):
    made = recording(1, together=3)
    made.save(tmp_path / "r")
    assert Routing.load(tmp_path / "r") == made
    assert made.profile.sum() == 3 * 2 * len(made.visits)


@pytest.mark.parametrize("text", [
    "", "{}", "[]", "nonsense", '{"format": "ggml-sched experts", "version": 9, "banks": []}',
    '{"format": "ggml-sched experts", "version": 1, "banks": [{"name": "a", "n_experts": 0, "nbytes": 1}]}',
    HEADER + "\n[1, [[0]]]",
    HEADER + "\n[0, [[2]]]",
    HEADER + "\n[0, [[0.5]]]",
    HEADER + "\n[0, 1]",
])
def test_other_files_are_no_recordings(tmp_path, text):
    (tmp_path / "r").write_text(text)
    with pytest.raises(gs.FileFormatError, match="not a recording"):
        Routing.load(tmp_path / "r")


def test_policies_are_checked():
    assert checked_policy("lru") == LeastRecentlyUsed() and checked_policy(Mixture(0.1)) == Mixture(0.1)
    for wrong, error in (("fifo", ValueError), (3, TypeError), (None, TypeError)):
        with pytest.raises(error, match="lfu, lru, mixture"):
            checked_policy(wrong)
    for made in (lambda: LeastFrequentlyUsed((1.0,)), lambda: LeastFrequentlyUsed(()), lambda: Mixture(1.5)):
        with pytest.raises(ValueError, match="between"):
            made()
    with pytest.raises(ValueError, match="profile"):
        SlotTable(2, 4, 3, Static(np.zeros((1, 4), np.int64)))
