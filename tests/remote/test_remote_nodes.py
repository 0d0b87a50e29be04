"""Workers on two machines of a Ray cluster, each with room for one: Ray's own daemons, one set for each machine."""

import contextlib
import os
import subprocess
import sys

import forks
import numpy as np
import pytest
from remote_workers import logits_of, products

import ggml_sched as gs
from ggml_sched import llama

ray = pytest.importorskip("ray", reason="needs the extra ray")

from ray.cluster_utils import Cluster  # noqa: E402 - it needs Ray

from ggml_sched.remote import rays  # noqa: E402


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    # Workers look for modules in the driver's folder first.
    with contextlib.chdir(tmp_path_factory.mktemp("machines")), forks.unlimited():
        machines = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 1, "include_dashboard": False, "_system_config": {"worker_niceness": 0}})
        machines.add_node(num_cpus=1, resources={"big": 1})
        yield machines
        machines.shutdown()


def placed(machines, **options):
    """The nodes of two workers that are started with these options of Ray's, and of one that joins."""
    with gs.remote.connect(machines.address, workers=1, threads=1, options=options) as cluster:
        cluster.join("w1", threads=1)
        return list(cluster.session.transport.nodes.values())


def test_resources_and_placement_groups_are_rays(machines, monkeypatch):
    head = machines.head_node.node_id
    big, = (node.node_id for node in machines.worker_nodes)
    assert placed(machines, num_cpus=0, resources={"big": 0.5}) == [big, big]
    ray.init(machines.address, log_to_driver=False, logging_level="ERROR")
    try:
        group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
        ray.get(group.ready(), timeout=60)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        assert set(placed(machines, scheduling_strategy=strategy)) == {head, big}
        monkeypatch.setattr(rays, "STARTS_WITHIN", 5)
        with pytest.raises(gs.BackendError, match="'w0' does not start within 5 s"):
            placed(machines, resources={"none": 1})
    finally:
        ray.shutdown()


def test_the_command_line_joins_a_cluster_or_starts_a_ray_of_its_own_beside_it(machines):
    def text(*arguments):
        command = [sys.executable, "-m", "ggml_sched", "run", "--threads", "1", "-n", "12", *arguments]
        done = subprocess.run(command, env={**os.environ, "RAY_ADDRESS": machines.address}, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    want, _ = text("--backend", "cpu")
    for arguments in (["--backend", "ray:2"], ["--backend", "ray:2", "--ray", "auto"], ["--backend", "ray:1", "ray:1"]):
        out, err = text(*arguments)
        assert out == want and "w0:CPU (RemoteBackend), w1:CPU (RemoteBackend)" in err, arguments
    assert len(machines.list_all_nodes()) == 2


OWN_RAY = """
import ggml_sched as gs
import ray

with gs.remote.connect(workers=1, threads=1) as cluster:
    cluster.join("w1", threads=2)
    with gs.remote.connect(workers=["w2"], threads=2) as other:
        print(*(backend.name for backend in (*cluster.backends, *other.backends)))
    cluster.backends[1].ask("memory", 0)
print(ray.is_initialized())
"""


def test_a_ray_that_connect_has_started_has_room_for_others(machines):
    """Workers that join, and those of a second cluster.  In a process of its own: Ray starts no actors on a cluster in
    a process that has had a local Ray meanwhile."""
    done = subprocess.run([sys.executable, "-c", OWN_RAY], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["w0:CPU", "w1:CPU", "w2:CPU", "False"], done.stderr


# The last one: it ends a machine.


def test_workers_on_two_machines_have_the_bits_of_local_backends_and_one_that_ends_is_lost(machines, ctx):
    with gs.remote.connect(machines.address, workers=2, threads=1, deadline=60) as cluster:
        transport = cluster.session.transport
        assert len(set(transport.nodes.values())) == 2
        with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
            assert np.array_equal(logits_of(cluster.backends), logits_of([a, b]))
        assert transport.messages_relayed > transport.messages_called

        graph, x, y, _held = products(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends, copies=4) as scheduler:
            scheduler.alloc(graph)
            for k in range(20):
                x.set(np.full((2, 16), k, np.float32))
                scheduler.compute_async(graph)
            scheduler.synchronize()
            assert np.array_equal(y.numpy(), np.full((2, 16), 6 * 19, np.float32))

        far = next(worker for worker, node in transport.nodes.items() if node != machines.head_node.node_id)
        with llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
            generation = model.generate([1, 2, 3], 60)
            next(generation)
            machines.remove_node(next(iter(machines.worker_nodes)), allow_graceful=False)
            with pytest.raises(gs.BackendLost, match=f"worker '{far}' has died"):
                list(generation)
            rest = [backend for backend in cluster.backends if backend.lost is None]
            assert len(rest) == 1
            with model.moved(rest) as moved, gs.CpuBackend(1, name="a") as a, \
                    llama.load(llama.small_model(), [a], n_ctx=64) as local:
                local.eval(moved.sequence(0).tokens)
                assert np.array_equal(moved.eval([5]), local.eval([5]))
    assert not ray.is_initialized()     # connect has joined the cluster, so it has left it
