"""Replays with experts read ahead: what is read and wasted, when nothing is read, and what each prediction learns."""

import numpy as np
import pytest

from ggml_sched.experts import (
    PREDICTIONS,
    Bank,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    Routing,
    Visit,
    bound,
    replay,
    replay_ahead,
)
from ggml_sched.experts.table import SlotTable

LRU = LeastRecentlyUsed()


def visits(*of, n_experts=4):
    return Routing([Bank("a", n_experts, 300), Bank("b", n_experts, 300)],
                   [Visit(bank, (tuple(experts),)) for bank, experts in of])


def drawn(seed, n_tokens=40, n_banks=3, n_experts=6, n_used=2):
    rng = np.random.default_rng(seed)
    made = Routing([Bank(f"blk.{b}", n_experts, 300) for b in range(n_banks)])
    for _ in range(n_tokens):
        made.visits += [Visit(b, (tuple(rng.permutation(n_experts)[:n_used].tolist()),)) for b in range(n_banks)]
    return made


class Fixed:
    """A prediction that always names the same expert, with the same likelihood."""

    def __init__(self, expert, likelihood):
        self.expert, self.likelihood = expert, likelihood

    def __call__(self, recording):
        self.n_experts = recording.n_experts
        return self

    def use(self, bank, used):
        pass

    def likely(self, bank):
        found = np.zeros(self.n_experts)
        found[self.expert] = self.likelihood
        return found


@pytest.mark.parametrize("n_slots", [3, 9, 18])
def test_without_a_prediction_bytes_are_those_of_a_replay_and_time_is_computing_and_misses(n_slots):
    made = drawn(1)
    found, known = replay_ahead(made, LRU, n_slots, None, 0.5), replay(made, LRU, n_slots)
    assert found[:4] == (0, 0, known.nbytes, 0)
    assert found.time == pytest.approx(known.misses + 0.5 * len(made.visits))


@pytest.mark.parametrize(("computing", "waits"), [(0.25, 1 + 0.75), (1.0, 1.0), (3.0, 1.0)])
def test_a_used_expert_is_awaited_for_the_rest_of_its_read(computing, waits):
    made = visits((0, [0]), (1, [2]))
    found = replay_ahead(made, LRU, 4, PREDICTIONS["known"], computing)
    assert found[:4] == (1, 1, 600, 0) and found.precision == 1
    assert found.time == pytest.approx(2 * computing + waits)


@pytest.mark.parametrize(("computing", "stop"), [(0.25, 1 / 3), (0.5, 2 / 3), (2 / 3, 2 / 3), (1.0, 1.0)])
def test_an_expert_that_is_not_used_delays_the_next_read_until_its_part_has_ended(computing, stop):
    found = replay_ahead(visits((0, [0]), (1, [2])), LRU, 4, Fixed(1, 0.99), computing)
    assert found[:4] == (1, 0, 600 + round(300 * stop), round(300 * stop)) and found.precision == 0
    assert found.time == pytest.approx(2 * computing + 2 + stop - min(computing, 1))


def test_a_whole_expert_that_was_read_ahead_is_in_its_slot_for_later_visits_and_a_part_is_not():
    made = visits((0, [0]), (1, [2]), (0, [0]), (1, [1]))
    assert replay_ahead(made, LRU, 4, Fixed(1, 0.99), 1.0).nbytes == 4 * 300
    parts = replay_ahead(made, LRU, 4, Fixed(1, 0.99), 0.25)
    assert parts.reads == 3 and parts.used == 1 and parts.nbytes == 3 * 300 + 2 * 100


@pytest.mark.parametrize(("likelihood", "computing", "reads"), [
    (0.2, 0.25, 0), (0.3, 0.25, 1), (0.01, 1.0, 1), (0.0, 1.0, 0)])
def test_nothing_is_read_ahead_where_that_is_expected_to_take_time(likelihood, computing, reads):
    """With 0.25 of a read done, a wrong guess waits for 1/3 - 1/4 of one: 1 of 4 right guesses make up for it."""
    assert replay_ahead(visits((0, [0]), (1, [2])), LRU, 4, Fixed(1, likelihood), computing).reads == reads


def test_an_expert_in_a_slot_is_not_read_ahead():
    made = visits((0, [0]), (1, [1]), (0, [0]), (1, [1]), (0, [0]))
    assert replay_ahead(made, LRU, 4, PREDICTIONS["known"], 1.0).reads == 1


def test_reading_ahead_takes_the_slot_of_what_the_policy_gives_up_but_not_of_what_is_used_now():
    """Three slots, which the experts 0 of both layers and 1 of the second hold, when 2 of the second is read ahead."""
    made = visits((0, [0]), (1, [0]), (0, [0]), (1, [1]), (0, [0]), (1, [2]), (0, [0]), (1, [1]))
    found = replay_ahead(made, LRU, 3, PREDICTIONS["known"], 1.0)
    assert (found.reads, found.used, found.nbytes) == (3, 3, 4 * 300)      # 1 of the second stays
    # One slot, which the present visit uses: nothing can be read ahead.
    assert replay_ahead(made, LRU, 1, PREDICTIONS["known"], 1.0).reads == 0


def test_a_slot_is_freed_for_a_read_ahead_once():
    table = SlotTable(2, 4, 2, LRU)
    assert table.free(0, [0]) and not table.held.any()
    for expert, _ in table.visit(0, [0, 1]):
        table.put(0, expert)
    assert not table.free(0, [0, 1]) and table.held.sum() == 2
    assert table.free(0, [1]) and np.argwhere(table.held).tolist() == [[0, 1]] and table.counted(0).evictions == 1
    assert table.free(0, [0]) and table.counted(0).evictions == 1


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("n_slots", [3, 5, 12])
def test_counts_of_any_recording_agree(prediction, n_slots):
    for seed in range(4):
        made = drawn(seed)
        for computing in (0.2, 1.0):
            found = replay_ahead(made, LeastFrequentlyUsed(), n_slots, PREDICTIONS[prediction], computing)
            assert 0 <= found.used <= found.reads < len(made.visits)
            assert found.wasted <= 300 * (found.reads - found.used) and found.wasted <= found.nbytes
            assert found.used == found.reads or prediction != "known"
            least = 300 * np.count_nonzero(made.profile)
            assert found.nbytes >= least and found.time >= computing * len(made.visits)


def precision(prediction, made, n_slots=2):
    found = replay_ahead(made, LRU, n_slots, PREDICTIONS[prediction], 1.0)
    assert found.reads > 10
    return found.precision


def test_each_prediction_learns_its_pattern():
    n, rng = 60, np.random.default_rng(0)
    # The second layer uses the expert of the number that the first layer has used.
    pairs = visits(*((bank, [number]) for number in rng.integers(0, 4, n).tolist() for bank in (0, 1)))
    # Nearly always expert 3 of the second layer; runs of equal experts, which change.
    often = visits(*((k % 2, [3 if k % 2 and k % 9 else int(rng.integers(3))]) for k in range(n)))
    runs = visits(*((k % 2, [k // 40 % 4]) for k in range(4 * n)))

    def second(prediction, made):
        """The part of the likeliest experts of the second layer that it used."""
        state, right = PREDICTIONS[prediction](made), []
        for k, visit in enumerate(made.visits[:-1]):
            state.use(visit.bank, visit.used)
            if made.visits[k + 1].bank == 1:
                right.append(int(np.argmax(state.likely(1))) in made.visits[k + 1].used)
        return np.mean(right[4:])

    assert second("together", pairs) > 0.9 > 0.6 > second("recent", pairs)
    assert second("frequent", often) > 0.8
    assert second("recent", runs) > 0.7 > 0.5 > second("frequent", runs)
    assert second("known", pairs) == second("known", runs) == 1
    assert precision("together", pairs) > precision("frequent", pairs)


def test_likelihoods_are_parts_of_visits():
    """Of layer b, expert 0 is used by the first two of four visits, 1 by the first, 2 and 3 by the last two.  Layer a
    uses 0 before the first and the third, and 1 before the second, the third and the fourth."""
    made = visits((0, [0]), (1, [0, 1]), (0, [1]), (1, [0]), (0, [0, 1]), (1, [2, 3]), (0, [1]), (1, [2, 3]),
                  (0, [0, 2]), (1, [1]))
    found = {}
    for name, prediction in PREDICTIONS.items():
        state = prediction(made)
        for visit in made.visits[:-1]:
            state.use(visit.bank, visit.used)
        found[name] = state.likely(1)
    assert found["known"].tolist() == [0, 1, 0, 0]
    assert found["frequent"].tolist() == [0.5, 0.25, 0.5, 0.5]
    assert found["recent"] == pytest.approx([0.2 * (0.8**3 + 0.8**2), 0.2 * 0.8**3, 0.2 * 1.8, 0.2 * 1.8])
    # After 0 of layer a half of the visits use each expert; after 2, which came never before, none is likely.
    assert found["together"].tolist() == [0.25, 0.25, 0.25, 0.25]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PREDICTIONS)
def test_visits_without_experts_are_replayed(name):
    made = visits((0, []), (1, [1]), (0, []), (0, [3]))
    found = replay_ahead(made, LRU, 3, PREDICTIONS[name], 0.5)
    assert found.nbytes == 600 and found.used == (2 if name == "known" else 0)


@pytest.mark.parametrize(("bank", "expert", "match"), [
    (2, 1, "visit 1 is of bank 2, and there are 2 banks"), (-1, 1, "visit 1 is of bank -1"),
    (1, 4, "visit 1 uses expert 4 of bank 1, which has 4 experts"), (1, -1, "visit 1 uses expert -1 of bank 1")])
def test_banks_and_experts_that_there_are_not_are_refused(bank, expert, match):
    made = visits((0, [1]), (bank, [expert]))
    for call in (lambda: replay(made, LRU, 3), lambda: bound(made, 3), lambda: replay_ahead(made, LRU, 3, None, 1.0)):
        with pytest.raises(ValueError, match=match):
            call()


@pytest.mark.parametrize("computing", [float("nan"), float("inf"), -1.0])
def test_computing_takes_a_number_of_reads(computing):
    with pytest.raises(ValueError, match="is not a number of reads"):
        replay_ahead(visits((0, [1])), LRU, 3, None, computing)
