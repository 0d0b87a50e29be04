"""Which row of the cache holds which position of which sequences: against a list of sets."""

import random
from functools import partial

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.llama import ContextFull, SequenceError
from ggml_sched.llama._cells import MAX_SEQUENCES, Cells, TokenInputs


def put(cells: Cells, seq: int, *positions: int) -> list[int]:
    rows = cells.place(np.array(positions, np.int32), np.full(len(positions), seq, np.int32))
    return rows.tolist()


def visible(cells: Cells, tokens: list[tuple[int, int]], n_kv: int, window: int = 0, half: bool = False) -> list:
    """The rows that tokens of these positions and sequences attend to, from the mask, whose values are 0 and -inf."""
    mask = cells.mask(*(np.array([token[k] for token in tokens], np.int32) for k in (0, 1)), n_kv, window, half)
    values = np.frombuffer(mask, np.float16 if half else np.float32).reshape(len(tokens), n_kv)
    assert np.isin(values, (0, -np.inf)).all()
    return (values == 0).tolist()


class Plain:
    """The same, slowly: for each row None, or its position and its sequences."""

    def __init__(self, n_rows: int) -> None:
        self.rows: list[tuple[int, set[int]] | None] = [None] * n_rows

    def place(self, tokens: list[tuple[int, int]]) -> list[int]:
        free = [i for i, row in enumerate(self.rows) if row is None]
        if len(free) < len(tokens):
            raise ContextFull("full")
        for i, (position, seq) in zip(free, tokens, strict=False):
            self.rows[i] = (position, {seq})
        return free[: len(tokens)]

    def held(self, seq: int, start: int, stop: int | None) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row is not None and seq in row[1]
                and start <= row[0] and (stop is None or row[0] < stop)]

    def remove(self, seq: int, start: int, stop: int | None) -> None:
        for i in self.held(seq, start, stop):
            self.rows[i][1].discard(seq)
        self.rows = [row if row and row[1] else None for row in self.rows]

    def copy(self, src: int, dst: int, start: int, stop: int | None) -> None:
        rows = self.held(src, start, stop)
        theirs = {self.rows[i][0] for i in self.held(dst, 0, None)}
        if src != dst and any(dst not in self.rows[i][1] and self.rows[i][0] in theirs for i in rows):
            raise SequenceError("met")
        for i in rows:
            self.rows[i][1].add(dst)

    def shift(self, seq: int, start: int, stop: int | None, delta: int) -> list[int]:
        rows = self.held(seq, start, stop)
        others = {self.rows[i][0] for i in self.held(seq, 0, None) if i not in rows}
        moved = [self.rows[i][0] + delta for i in rows]
        if any(len(self.rows[i][1]) > 1 for i in rows) or any(p < 0 or p in others for p in moved):
            raise SequenceError("no")
        for i, position in zip(rows, moved, strict=True):
            self.rows[i] = (position, self.rows[i][1])
        return [delta if i in rows else 0 for i in range(len(self.rows))]

    def sees(self, position: int, seq: int, row: int, window: int) -> bool:
        held = self.rows[row]
        return (held is not None and seq in held[1] and held[0] <= position
                and not (window and position - held[0] >= window))


def same(cells: Cells, plain: Plain) -> None:
    for i, row in enumerate(plain.rows):
        sequences = {s for s in range(cells.n_seq) if int(cells.sets[i]) >> s & 1}
        assert (int(cells.positions[i]), sequences) == ((-1, set()) if row is None else row)
    used = [i for i, row in enumerate(plain.rows) if row is not None]
    assert cells.n_used == len(used) and cells.n_free == cells.n_rows - len(used)
    assert cells.rows_in_use() == (used[-1] + 1 if used else 0)


@pytest.mark.spread("n_rows n_seq", "seed")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n_seq", [1, 3, MAX_SEQUENCES])
@pytest.mark.parametrize("n_rows", [1, 5, 24])
def test_random_changes_are_those_of_a_list_of_sets(n_rows, n_seq, seed):
    rng = random.Random(seed)
    cells, plain = Cells(n_rows, n_seq), Plain(n_rows)
    used = sorted({0, n_seq // 2, n_seq - 1})
    refused = set()
    for _ in range(600):
        seq, other = rng.choice(used), rng.choice(used)
        start = rng.choice((0, 0, rng.randrange(12)))
        stop = rng.choice((None, rng.randrange(14)))
        act = rng.choice(("place", "place", "remove", "copy", "shift", "mask", "rollback"))
        before = cells.snapshot()
        if act == "place":
            ends = {s: max((plain.rows[i][0] for i in plain.held(s, 0, None)), default=-1) for s in range(n_seq)}
            tokens = []
            for _ in range(rng.randrange(4)):
                s = rng.choice((seq, other))
                ends[s] += 1
                tokens.append((ends[s], s))
            columns = (np.array([token[k] for token in tokens], np.int32) for k in (0, 1))
            calls = partial(cells.place, *columns), partial(plain.place, tokens)
        elif act == "remove":
            calls = partial(cells.remove, seq, start, stop), partial(plain.remove, seq, start, stop)
        elif act == "copy":
            calls = partial(cells.copy, seq, other, start, stop), partial(plain.copy, seq, other, start, stop)
        elif act == "shift":
            delta = rng.randrange(-6, 7)
            calls = partial(cells.shift, seq, start, stop, delta), partial(plain.shift, seq, start, stop, delta)
        elif act == "mask":
            tokens = [(rng.randrange(12), rng.choice(used)) for _ in range(rng.choice((1, 1, 3)))]
            window, n_kv = rng.choice((0, 1, 3)), rng.randrange(n_rows + 1)
            seen = visible(cells, tokens, n_kv, window, half=rng.random() < 0.5)
            assert seen == [[plain.sees(p, s, i, window) for i in range(n_kv)] for p, s in tokens]
            continue
        else:
            cells.remove(seq)
            cells.rollback(before)
            same(cells, plain)
            continue
        results = []
        for call in calls:
            try:
                result = call()
                results.append(result.tolist() if isinstance(result, np.ndarray) else result)
            except (ContextFull, SequenceError) as error:
                results.append(type(error))
                refused.add(act)
        if act in ("place", "shift") or isinstance(results[0], type):
            assert results[0] == results[1]
        same(cells, plain)
    if n_rows > 1 and n_seq > 1:
        assert "copy" in refused and "shift" in refused


def test_a_full_context_names_the_numbers():
    cells = Cells(4)
    assert put(cells, 0, 0, 1, 2) == [0, 1, 2]
    with pytest.raises(ContextFull, match="2 tokens after 3 do not fit a context of 4") as caught:
        put(cells, 0, 3, 4)
    assert (caught.value.n_past, caught.value.n_tokens, caught.value.n_ctx) == (3, 2, 4)
    assert put(cells, 0, 3) == [3]


def test_rows_that_were_given_back_come_first():
    cells = Cells(8, 2)
    put(cells, 0, 0, 1, 2, 3)
    put(cells, 1, 0, 1)
    assert cells.remove(0, 1, 3).tolist() == [1, 2]
    assert cells.rows_in_use() == 6
    assert put(cells, 1, 2, 3, 4) == [1, 2, 6]
    assert cells.rows_of(1).tolist() == [4, 5, 1, 2, 6]        # by position
    cells.remove(1)
    assert cells.rows_in_use() == 4


def test_shared_rows_live_until_no_sequence_holds_them():
    cells = Cells(8, 3)
    put(cells, 0, 0, 1, 2)
    cells.copy(0, 1, 0, 2)
    assert cells.n_used == 3 and cells.shared(cells.rows_of(0)).tolist() == [True, True, False]
    put(cells, 1, 2)
    assert visible(cells, [(2, 0), (2, 1)], 5) == [[True, True, True, False, False], [True, True, False, True, False]]
    cells.remove(0)
    assert cells.rows_of(1).tolist() == [0, 1, 3] and cells.n_used == 3
    with pytest.raises(SequenceError):
        cells.copy(1, 1 + 1, 0) or cells.shift(1, 0, None, 1)


def test_a_window_counts_the_token_itself():
    cells = Cells(6)
    put(cells, 0, *range(6))
    for window in range(1, 7):
        assert sum(visible(cells, [(5, 0)], 6, window)[0]) == window


def test_sequences_that_are_not_there_are_refused():
    for n in (0, MAX_SEQUENCES + 1):
        with pytest.raises(ValueError):
            Cells(4, n)
    cells = Cells(4, 2)
    for call in (lambda: cells.remove(2), lambda: cells.copy(0, 2), lambda: cells.remove(-1), lambda: cells.rows_of(2)):
        with pytest.raises(ValueError, match="0 .. 1"):
            call()


def test_rows_that_are_not_there_are_not_written_to():
    """All positions are set, but the count of used rows is 0: writing a row raises."""
    cells = Cells(4)
    cells.positions[:] = 7
    with pytest.raises(SequenceError, match="only 0 of 4 are in use"):
        put(cells, 0, 0)
    cells.clear()
    assert put(cells, 0, 0) == [0]


def test_what_cannot_be_made_anew_stays_as_it_is():
    cells = Cells(4)
    put(cells, 0, 0)
    with pytest.raises(MemoryError):
        cells.__init__(1 << 60)
    assert cells.n_rows == 4
    with pytest.raises(ValueError, match="of 4 rows"):
        visible(cells, [(0, 0)], 1 << 20)


def test_inputs_of_a_token_are_rows_of_their_type(ctx):
    """What is written to their bytes fits them."""
    ids = ctx.tensor("i32", 1)
    for kind in ("i8", "i32", "f32"):
        with pytest.raises(ValueError, match="not 1 rows of i64"):
            TokenInputs(ids, None, None, [(ctx.tensor(kind, 64), 5)], [], None)
    for t in (ctx.tensor("i8", 64), ctx.tensor("i64", 64), ctx.tensor("f32", (64, 2))):
        with pytest.raises(ValueError, match="not 1 rows of f32"):
            TokenInputs(ids, None, None, [], [(t, 0)], None)
    inputs = TokenInputs(ids, None, None, [(ctx.tensor("i64", 64), 5)], [(ctx.tensor("f16", 8), 0)], None)
    assert not inputs.set(Cells(8, 2), [1], [0], [0], [0])              # no address
    for seq in (-1, 2, 200):
        with pytest.raises(ValueError, match="sequence"):
            inputs.set(Cells(8, 2), [1], [0], [seq], [0])


def test_inputs_of_several_tokens_have_a_row_for_each(ctx):
    ids, mask = ctx.tensor("i32", 2), ctx.tensor("f32", (64, 3))
    with pytest.raises(ValueError, match="not 2 rows of f32"):
        TokenInputs(ids, None, None, [], [(mask, 0)], None)
    with pytest.raises(ValueError, match="whole number of elements for each of 2 tokens"):
        TokenInputs(ids, None, None, [(ctx.tensor("i64", 63), 5)], [], None)
    inputs = TokenInputs(ids, None, None, [(ctx.tensor("i64", 64), 5)], [(ctx.tensor("f16", (8, 2)), 0)], None)
    right = ([1, 2], [0, 0], [0, 1], [0, 1])
    assert not inputs.set(Cells(8, 2), *right)                  # no address
    for k in range(4):
        for wrong in ([0], [0, 1, 2]):
            with pytest.raises(ValueError, match="for 2 tokens"):
                inputs.set(Cells(8, 2), *right[:k], wrong, *right[k + 1 :])
    with pytest.raises(ValueError, match="sequence 2"):
        inputs.set(Cells(8, 2), [1, 2], [0, 0], [0, 2], [0, 1])


def test_tokens_placed_by_lists_are_where_those_of_arrays_are():
    lists, arrays = Cells(8, 4), Cells(8, 4)
    for positions, sequences in (([0, 0, 0], [2, 0, 3]), ([1], [0]), ([1, 2], [2, 0])):
        rows = arrays.place(np.array(positions, np.int32), np.array(sequences, np.int32))
        assert lists.place_each(positions, sequences) == rows.tolist()
        if len(positions) == 1:
            assert lists.remove(2).tolist() == arrays.remove(2).tolist()
    before = lists.snapshot()
    for wrong, error in ((([0] * 4, [0] * 4), ContextFull), (([0, 0], [0, 4]), ValueError),
                         (([0], [0, 1]), ValueError)):
        with pytest.raises(error):
            lists.place_each(*wrong)
    assert lists.n_used == arrays.n_used and all(map(np.array_equal, before, lists.snapshot()))


def test_lists_of_tokens_are_equally_long_and_masks_are_of_rows_that_there_are():
    cells = Cells(4, 2)
    put(cells, 0, 0)
    one, two = np.zeros(1, np.int32), np.zeros(2, np.int32)
    for call in (lambda: cells.place(two, one), lambda: cells.place(one, two), lambda: cells.mask(two, one, 4),
                 lambda: cells.mask(one, two, 4), lambda: cells.mask(one, one, 5), lambda: cells.mask(one, one, -1)):
        with pytest.raises(ValueError, match="for"):
            call()
    assert cells.n_used == 1 and cells.rows_in_use() == 1


def test_inputs_of_a_token_are_of_rows_that_there_are(ctx):
    tokens, mask = ctx.tensor("i32", 1, "tokens", input=True), ctx.tensor("f32", (6, 1), "mask", input=True)
    graph = gs.Graph(ctx.cont(tokens), ctx.scale(mask, 1.0))
    inputs = TokenInputs(tokens, None, None, [], [(mask, 0)], None)
    with gs.CpuBackend(1) as backend, gs.Scheduler([backend]) as scheduler:
        assert not inputs.set(Cells(6), [3], [0], [0], [0])      # they have no address yet
        scheduler.alloc(graph)
        with pytest.raises(ValueError, match="'mask'.*6 rows for 4"):
            inputs.set(Cells(4), [3], [0], [0], [0])
        cells = Cells(6)
        assert inputs.set(cells, [3], [0], [0], cells.place_each([0], [0]))
        scheduler.compute(graph)
        found = [t.numpy().tolist() for t in graph.nodes]
    assert found == [[3], [0.0] + [-np.inf] * 5]


@pytest.mark.parametrize("wrong", [np.zeros(1), np.zeros(1, np.int64), np.zeros((1, 1), np.int32),
                                   np.zeros(4, np.int32)[::2], None])
def test_tokens_of_other_types_and_shapes_are_refused(wrong):
    cells, one = Cells(4, 2), np.zeros(1, np.int32)
    for call in (lambda: cells.place(wrong, one), lambda: cells.place(one, wrong), lambda: cells.mask(wrong, one, 0),
                 lambda: cells.mask(one, wrong, 0)):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert cells.n_used == 0


def test_cells_may_be_made_again():
    cells = Cells(4, 2)
    put(cells, 0, 0)
    cells.__init__(2, 1)
    assert (cells.n_rows, cells.n_used, len(cells.positions)) == (2, 0, 2)
    put(cells, 0, 7, 8)
    assert cells.positions.tolist() == [7, 8]
