"""Placement over workers: their memory, the links that were measured at connecting, and this process as the host."""

import itertools
import pickle
import sys

import numpy as np
import placement_models
import pytest
from remote_workers import simulated

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched._host import host_memory
from ggml_sched.llama import model_graphs
from ggml_sched.placement.measure import measure_links, memory_left

MODEL = llama.random_llama(n_vocab=2000, n_embd=128, n_layer=6)


@pytest.fixture(scope="module")
def cluster():
    if sys.platform == "win32":
        pytest.skip("needs sockets of the file system")
    with gs.remote.connect(workers=2, threads=1, transport="processes") as cluster:
        yield cluster


def test_a_fit_places_on_workers_alone_and_its_model_runs(cluster):
    graphs = model_graphs(MODEL, 64, 16)
    found = gs.fit(graphs, cluster.backends)
    found.verify()
    host = found.devices[-1]
    assert host.name == "driver" and host.host
    held = {use.device.name: use.weights + use.cache for use in found.memory}
    assert held["driver"] == 0 and sum(held.values()) > len(MODEL) / 2
    assert "split" in found.devices[0].measured and 1e-6 < found.devices[0].split < 0.1
    with gs.CpuBackend(1) as cpu, llama.load(MODEL, [cpu], 64, 16) as local, \
            llama.load(MODEL, cluster.backends, place=found) as model:
        assert [backend.name for backend in model.backends] == [device.name for device in found.devices]
        for tokens in ([3, 14, 15], [9], [26]):
            assert np.array_equal(model.eval(tokens), local.eval(tokens))


def test_a_model_that_fits_no_worker_alone_is_placed_on_both():
    graphs = model_graphs(MODEL, 64, 16)
    with simulated(2, memory=5 << 20, delay=1e-3, bandwidth=1e9) as cluster:
        cluster.measure()
        devices = [gs.Device(backend.name, 5 << 20, 1e10, 1e11, split=1e-4, backend=backend)
                   for backend in cluster.backends]
        found = gs.fit(graphs, devices, measure_links(cluster.backends))
        held = {use.device.name: use.weights + use.cache for use in found.memory}
        assert held["driver"] == 0 and all(held[backend.name] for backend in cluster.backends)
        carried = cluster.session.transport.carried
        with gs.CpuBackend(1) as cpu, llama.load(MODEL, [cpu], 64, 16) as local, \
                llama.load(MODEL, cluster.backends, place=found) as model:
            for tokens in ([3, 14, 15], [9], [26]):
                before = sum(carried.values())
                assert np.array_equal(model.eval(tokens), local.eval(tokens))
            assert sum(carried.values()) - before == 3


def test_the_bytes_of_the_host_that_a_fit_adds_do_not_bound_what_a_model_evaluates():
    """Workers with long launches leave nodes to this process.  Their results for a prompt with all logits are larger
    than for the graphs of the fit."""
    model = llama.random_llama(n_vocab=2000, n_embd=128, n_layer=2)
    with simulated(2) as cluster:
        devices = [gs.Device(backend.name, 32 << 20, 1e10, 1e11, split=1e-4, launch=5e-5, backend=backend)
                   for backend in cluster.backends]
        found = gs.fit(model_graphs(model, 256, 256), devices, gs.Link(1e9, 1e-5))
        assert "driver" in {split.backend.name for plan in found.plans for split in plan.splits}
        tokens = range(1, 256)
        with gs.CpuBackend(1) as cpu, llama.load(model, [cpu], 256, 256) as local, \
                llama.load(model, cluster.backends, place=found) as placed:
            assert np.array_equal(placed.eval(tokens), local.eval(tokens))
            assert placed.memory()[placed.backends[-1]].arena > found.memory[-1].arena + found.memory[-1].left
            needed = placed.memory()[placed.backends[-1]].arena
        with gs.CpuBackend(1, name="driver", memory=needed // 2) as driver, \
                llama.load(model, [*cluster.backends, driver], place=found) as placed, \
                pytest.raises(gs.OutOfMemory, match=r"'driver': the arena needs .* alive at the peak"):
            placed.eval(tokens)
        for same in pickle.loads(pickle.dumps(found)), found.model(0):
            assert same.budgets() == found.budgets() and same.budgets()[-1] is None
        own = gs.fit(model_graphs(model, 256, 256), [*devices, gs.Device("driver", 1 << 20, 1e10, 1e11, host=True)])
        assert own.budgets()[-1] == own.memory[-1].arena + own.memory[-1].left     # bytes of a device that is given


@pytest.mark.soak
def test_a_placement_on_four_unequal_nodes_is_within_a_hundredth_of_its_bound():
    """A model of 70B parameters, of which no node holds half."""
    nodes = {"w0:CUDA": (9e11, 8e13), "w1:CUDA": (6e11, 5e13), "w2:CUDA": (4e11, 4e13), "w3:CUDA": (3e11, 3e13)}
    devices = [gs.Device(name, 16 * 10**9, *speeds, split=2e-5) for name, speeds in nodes.items()]
    driver = gs.Device("driver", 4 * 10**9, 4e10, 4e11, host=True)
    links = {pair: gs.Link(3e9, 1e-4) for pair in itertools.permutations([*nodes, "driver"], 2)}
    found = gs.fit(placement_models.graphs("dense 70B"), [*devices, driver], links)
    found.verify()
    assert found.gap <= 0.01
    assert sum(use.weights > 0 for use in found.memory if use.device.name in nodes) >= 3
    # A token pays for each copy that its plan lists, by bytes and link.
    copies = found.plans[0].copies
    assert len(copies) >= 3
    assert found.prices[0].copies == pytest.approx(sum(1e-4 + copy.nbytes / 3e9 for copy in copies))


def test_workers_report_the_memory_of_their_machine_in_equal_parts(cluster):
    """Two workers and this process share it."""
    for backend in cluster.backends:
        assert backend.memory_available() is None
        assert memory_left(backend) == pytest.approx(host_memory() / 3, rel=0.2)
    with simulated(1, memory=1 << 20) as bounded:
        assert memory_left(bounded.backends[0]) == 1 << 20


def test_links_are_measured_when_a_cluster_is_connected_and_when_a_worker_joins():
    if sys.platform == "win32":
        pytest.skip("needs sockets of the file system")
    with gs.remote.connect(workers=1, threads=1, transport="processes") as cluster:
        assert set(cluster.session.links) == {("driver", "w0:CPU"), ("w0:CPU", "driver")}
        first = dict(cluster.session.links)
        cluster.join("w1", threads=1)
        names = "driver", "w0:CPU", "w1:CPU"
        assert set(cluster.session.links) == {(a, b) for a in names for b in names if a != b}
        assert {pair: cluster.session.links[pair] for pair in first} == first
        one, two = cluster.backends
        assert one.link_to("w1:CPU") == two.link_from("w0:CPU") == cluster.session.links["w0:CPU", "w1:CPU"]
        before = cluster.session.messages
        assert set(measure_links([one, two])) == set(cluster.session.links)
        assert cluster.session.messages - before < 40       # round trips, and no copies


def test_the_links_that_backends_state_are_those_of_the_network():
    with simulated(2, delay=2e-3, bandwidth=5e8, backends=lambda: [gs.CpuBackend(1, name=n) for n in "ab"]) as cluster:
        cluster.measure(seconds=10)
        names = [backend.name for backend in cluster.backends]
        assert names == ["w0:a", "w0:b", "w1:a", "w1:b"]
        workers = {"driver": "driver", **{name: name[:2] for name in names}}
        assert set(cluster.session.links) == {(a, b) for a in workers for b in workers if workers[a] != workers[b]}
        for bandwidth, latency in cluster.session.links.values():
            assert (bandwidth, latency) == (pytest.approx(5e8, rel=0.05), pytest.approx(2e-3, rel=0.05))


def test_a_worker_without_room_leaves_links_unknown_and_a_lost_one_is_left_out():
    with simulated(2, memory=256) as cluster:
        cluster.measure()
        assert not cluster.session.links
    with simulated(2, deadline=4) as cluster:
        network = cluster.session.transport
        network.begin(gs.remote.Faults(hangs={"w1": network.handled["w1"]}))
        with pytest.raises(gs.BackendLost):
            cluster.backends[1].ask("memory", 0)
        cluster.measure()
        assert set(cluster.session.links) == {("driver", "w0:CPU"), ("w0:CPU", "driver")}
