"""find_twins(): equal devices are found, with what an exchange makes of states and columns, and others are not."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from placed_models import CPU, FAST, GPU, decoder

from ggml_sched.placement.chain import Chain
from ggml_sched.placement.devices import Link, Links
from ggml_sched.placement.facts import facts
from ggml_sched.placement.solve.problem import Problem
from ggml_sched.placement.solve.twins import find_twins
from ggml_sched.placement.tables import Tables


def mirrored(n_devices: int, n_graphs: int, equal: int = 2) -> Chain:
    """A chain in which the first `equal` devices may be exchanged: its tables have each pattern in every order."""
    random = np.random.default_rng(n_devices + 7 * n_graphs)
    n = n_devices ** n_graphs
    cost, memory = random.uniform(0.5, 5.0, (2, n, n)), random.integers(1, 20, (2, n_devices))
    start = np.ones(n)
    costs, bytes_ = [], []
    for order in itertools.permutations(range(equal)):
        devices = [*order, *range(equal, n_devices)]
        states = states_after(devices, n_graphs)
        costs.append(cost[:, states][:, :, states])
        bytes_.append(memory[:, devices])
    states = tuple(itertools.product(range(n_devices), repeat=n_graphs))
    return Chain((0, 0, 0), (np.concatenate(costs),), (np.concatenate(bytes_),), start, states)


def states_after(devices: list[int], n_graphs: int) -> list[int]:
    """For each state, a device for each graph, the number of the state in which each device is that of `devices`."""
    tuples = list(itertools.product(range(len(devices)), repeat=n_graphs))
    return [tuples.index(tuple(devices[d] for d in state)) for state in tuples]


def room(n_devices: int, *others: int) -> list[int]:
    return [10] * (n_devices - len(others)) + [*others]


@pytest.mark.parametrize("n_devices, n_graphs", [(2, 0), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_two_equal_devices_are_exchanged_in_states_and_columns(n_devices, n_graphs):
    problem = Problem(mirrored(n_devices, n_graphs), room(n_devices, *[1 << 30] * (n_devices - 2)))
    found = find_twins(problem)
    assert found.swaps.tolist() == [[0, 1]]
    states = states_after([1, 0, *range(2, n_devices)], n_graphs)
    assert found.state_swaps.tolist() == [states]
    columns, = found.columns
    assert sorted(columns) == list(range(len(problem.cost)))
    assert (problem.cost[columns] == problem.cost).all()
    assert (problem.bytes[columns][:, ::-1] == problem.bytes).all()
    assert (problem.before[columns] == np.array(states)[problem.before]).all()
    assert (problem.after[columns] == np.array(states)[problem.after]).all()


def test_of_three_equal_devices_neighbours_are_exchanged():
    assert find_twins(Problem(mirrored(3, 1, equal=3), room(3))).swaps.tolist() == [[0, 1], [1, 2]]


def with_memory(chain: Chain) -> Chain:
    """A byte less where most are: nothing is in another order."""
    memory = chain.memory[0].copy()
    memory[np.unravel_index(memory.argmax(), memory.shape)] -= 1
    return replace(chain, memory=(memory,))


def with_cost(chain: Chain) -> Chain:
    """The cheapest entry a little cheaper: nothing is in another order."""
    cost = chain.cost[0].copy()
    cost[np.unravel_index(cost.argmin(), cost.shape)] -= 1e-9
    return replace(chain, cost=(cost,))


def with_start(chain: Chain) -> Chain:
    return replace(chain, start=np.array([1.0, 2.0]))


def with_another_state(chain: Chain) -> Chain:
    """Three states, the last of which has no other with the devices exchanged."""
    return replace(chain, cost=(np.pad(chain.cost[0], ((0, 0), (0, 1), (0, 1)), constant_values=9.0),),
                   start=np.ones(3), devices=((0,), (1,), (0, 1)))


def with_unknown_states(chain: Chain) -> Chain:
    return replace(chain, devices=())


@pytest.mark.parametrize("change", [with_memory, with_cost, with_start, with_another_state, with_unknown_states])
def test_devices_that_differ_in_the_chain_are_none(change):
    chain = mirrored(2, 1)
    assert len(find_twins(Problem(chain, [10, 10])).swaps)
    found = find_twins(Problem(change(chain), [10, 10]))
    assert found.swaps.shape == (0, 2) and found.columns == ()


def test_devices_of_different_budgets_are_none():
    assert not len(find_twins(Problem(mirrored(2, 1), [10, 11])).swaps)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (256.0, 1.0)], ids=["token", "both"])
def test_equal_devices_are_found_in_the_tables_of_a_model(weights):
    devices = (GPU, FAST.replace(name="one"), FAST.replace(name="two"), CPU)
    links = Links(devices, Link(25e9, 8e-6))
    tables = Tables([facts(decoder(2)), facts(decoder(2, tokens=64))], weights, devices, links)
    chain = tables.chain()
    room = [sum(tables.residents.values()) // 4] * 3
    found = find_twins(Problem(chain, [*room, 1 << 40]))
    assert found.swaps.tolist() == [[1, 2]]
    assert [tables.states[state] for state in found.state_swaps[0]] == [
        tuple({1: 2, 2: 1}.get(d, d) for d in state) for state in tables.states]
    assert not len(find_twins(Problem(chain, [room[0], room[1], room[2] - 1, 1 << 40])).swaps)
