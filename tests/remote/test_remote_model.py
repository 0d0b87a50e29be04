"""A model over remote backends gives the bits of the same split over local ones, in few messages."""

import numpy as np
import pytest
from remote_workers import ARCHITECTURES, check_architecture, logits_of, products, simulated, two_halves

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_model
from ggml_sched.remote.cluster import cluster_of
from ggml_sched.remote.messages import unpacked
from ggml_sched.remote.simulated import Faults, SimulatedNetwork
from ggml_sched.remote.worker import Worker


@pytest.fixture(scope="module")
def local():
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        return logits_of([a, b])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_model_over_workers_has_the_bits_of_local_backends(n):
    locals_ = [gs.CpuBackend(1, name=f"local {k}") for k in range(n)]
    with simulated(n) as cluster:
        assert np.array_equal(logits_of(cluster.backends), logits_of(locals_))


def test_workers_beside_a_local_host(local):
    with simulated(1) as cluster, gs.CpuBackend(1) as cpu:
        assert np.array_equal(logits_of([*cluster.backends, cpu]), local)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_compute_over_w_workers_takes_at_most_w_plus_one_messages(ctx, n):
    with simulated(n) as cluster:
        x = ctx.tensor("f32", (16, 2), "x", input=True)
        y, held = x, []
        for k, backend in enumerate(cluster.backends):
            weights = gs.Context(f"weights {k}")
            w = weights.tensor("f32", (16, 16), f"w{k}")
            held.append((weights, w, backend.alloc_tensors(weights)))
            w.set(np.eye(16, dtype=np.float32) * 2)
            y = ctx.relu(ctx.mul_mat(w, y))
        graph, carried = gs.Graph(ctx.set_output(y)), cluster.session.transport.carried
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            for value in range(3):
                x.set(np.full((2, 16), value, np.float32))
                before = sum(carried.values())
                scheduler.compute(graph, wait=False)
                found = y.numpy()
                assert np.array_equal(found, np.full((2, 16), value * 2.0**n, np.float32))
                messages = sum(carried.values()) - before
                # The first compute registers its splits; those after it send inputs and get outputs.
                assert messages <= n + 1 or value == 0


def test_what_the_host_writes_for_the_last_worker_first_costs_no_message(ctx):
    """Inputs of a later worker are often set first; they travel with the work that it has anyway."""
    with simulated(3) as cluster:
        carried = cluster.session.transport.carried
        contexts = [gs.Context() for _ in range(3)]
        tensors = [(c.tensor("f32", (16,), "own"), c.tensor("f32", (16,), "given")) for c in contexts]
        buffers = [backend.alloc_tensors(c) for backend, c in zip(cluster.backends, contexts, strict=True)]
        before = dict(carried)
        for k in (2, 1, 0):
            cluster.backends[k].set_tensor_async(tensors[k][0], memoryview(np.full(16, k, np.float32)).cast("B"))
        for k in (0, 1):
            assert cluster.backends[k].cpy_tensor_async(tensors[k][0], tensors[k + 1][1])
        cluster.backends[0].synchronize()
        ways = {way: n - before.get(way, 0) for way, n in carried.items() if n != before.get(way, 0)}
        assert ways == {("driver", "w0"): 1, ("w0", "w1"): 1, ("w1", "w2"): 1, ("w2", "driver"): 1}
        for k, (own, given) in enumerate(tensors):
            assert np.all(own.numpy() == k) and (k == 0 or np.all(given.numpy() == k - 1))
        for buffer in buffers:
            buffer.close()


def test_work_whose_result_another_worker_has_read_is_not_moved_behind_it(ctx):
    """w1 reads a value for w0, changes it, and then gets what w0 made of it."""
    with simulated(2) as cluster:
        contexts = [gs.Context() for _ in range(2)]
        (a, b), (c, d) = ((ctx.tensor("f32", (16,), "a"), ctx.tensor("f32", (16,), "b")) for ctx in contexts)
        buffers = [backend.alloc_tensors(ctx) for backend, ctx in zip(cluster.backends, contexts, strict=True)]
        one, two = cluster.backends
        two.set_tensor_async(c, memoryview(np.full(16, 7, np.float32)).cast("B"))
        assert two.cpy_tensor_async(c, a)
        two.set_tensor_async(c, memoryview(np.full(16, 9, np.float32)).cast("B"))
        assert one.cpy_tensor_async(a, d)
        two.synchronize()
        assert np.all(a.numpy() == 7) and np.all(d.numpy() == 7) and np.all(c.numpy() == 9)
        for buffer in buffers:
            buffer.close()


def messages_of_tokens(cluster, source, n=4, **how):
    """How many messages each of `n` tokens takes, after the prompt and the first token, whose splits are registered."""
    carried, taken = cluster.session.transport.carried, []
    with llama.load(source, cluster.backends, n_ctx=64, **how) as model:
        model.eval([3, 14, 15])
        for k in range(n + 1):
            before = sum(carried.values())
            model.eval([5 + k])
            taken.append(sum(carried.values()) - before)
    return taken[1:]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_token_of_every_architecture_takes_a_message_more_than_there_are_workers(arch, tied):
    data = random_model(arch, 1, tied=tied)
    for n in (1, 2, 3) if arch == "llama" else (2,):
        with simulated(n) as cluster:
            assert messages_of_tokens(cluster, data, 2) == [n + 1] * 2, n


class Fusing(gs.CpuBackend):
    """A backend that has to be queried for fusion groups and work memory, too."""

    def fusion_groups(self, graph):
        return super().fusion_groups(graph)

    def work_size(self, nodes):
        return 64 * len(nodes)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("made, memory", [(gs.CpuBackend, None), (gs.CpuBackend, 1 << 30), (Fusing, 1 << 30)],
                         ids=["", "bounded", "fusing"])
def test_tokens_for_which_attention_reads_more_rows_take_no_more_messages(n, made, memory):
    """What planning their graphs takes has come with an earlier compute."""
    network = SimulatedNetwork([Worker(f"w{k}", [made(1)], memory) for k in range(n)])
    with cluster_of(network) as cluster, llama.load(llama.random_llama(), cluster.backends, n_ctx=160) as model:
        taken = []
        for tokens in ([1, 2, 3], [4], *([5 + k] for k in range(100))):
            before = sum(network.carried.values())
            model.eval(tokens)
            taken.append(sum(network.carried.values()) - before)
        assert set(taken[1:]) == {n + 1}


def test_batches_of_sequences_that_read_more_rows_take_no_more_messages():
    with simulated(2) as cluster, llama.load(llama.random_llama(), cluster.backends, n_ctx=256, n_seq=3) as model:
        taken = []
        for k in range(40):
            before = sum(cluster.session.transport.carried.values())
            model.eval_batch([(sequence, [1 + k]) for sequence in range(3)])
            taken.append(sum(cluster.session.transport.carried.values()) - before)
        assert set(taken[2:]) == {3}


def test_the_first_token_after_a_prompt_takes_no_more_messages():
    with simulated(2) as cluster, llama.load(llama.random_llama(), cluster.backends, n_ctx=256) as model:
        model.eval([1, 2, 3])
        model.eval([4])
        model.eval([*range(5, 75)])         # the tokens before have read fewer rows
        before = sum(cluster.session.transport.carried.values())
        model.eval([4])
        assert sum(cluster.session.transport.carried.values()) - before == 3


def test_a_generation_takes_a_message_more_than_there_are_workers_for_each_token():
    with simulated(2) as cluster, llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
        carried, taken, before = cluster.session.transport.carried, [], None
        for _ in model.generate([1, 2, 3], 12):
            now = sum(carried.values())
            taken.append(now - (before or 0))
            before = now
        assert taken[2:] == [3] * 10


def test_loading_asks_each_worker_about_all_kinds_of_nodes_of_a_graph_at_once():
    """Four graphs are reserved; beyond the weights, which are bytes here, each worker answers a few questions."""
    n_weights = len(llama.gguf.open_gguf(llama.random_llama()).tensors)
    with simulated(2) as cluster:
        before = cluster.session.messages
        with llama.load(llama.random_llama(), cluster.backends, n_ctx=64):
            assert cluster.session.messages - before < n_weights + 2 * 12


def test_tied_weights_are_loaded_on_the_first_and_on_the_last_worker_where_there_is_room():
    data = random_model("llama", 1, tied=True)
    with gs.CpuBackend(1, name="a") as a, gs.CpuBackend(1, name="b") as b:
        local = logits_of([a, b], source=data)
        with llama.load(data, [a, b], n_ctx=64) as model:
            assert "output.weight" not in model.weights.tensors     # a copy between backends of a process is cheap
    with simulated(2) as cluster:
        assert np.array_equal(logits_of(cluster.backends, source=data), local)
        with llama.load(data, cluster.backends, n_ctx=64) as model:
            first, last = (model.weights[f"{name}.weight"] for name in ("token_embd", "output"))
            assert [first.backend, last.backend] == [*cluster.backends]
            assert first.numpy().tobytes() == last.numpy().tobytes()
            held = [sum(worker.used) for worker in cluster.session.transport.handlers.values()]
    # With room for all but the second one, it is there once, and a token takes a message more.
    with simulated(2, memory=max(held[0] - first.nbytes // 2, held[1])) as cluster:
        assert messages_of_tokens(cluster, data) == [4] * 4
        assert np.array_equal(logits_of(cluster.backends, source=data), local)


def test_the_cache_never_travels():
    with simulated(2) as cluster, llama.load(llama.small_model(), cluster.backends, n_ctx=64) as model:
        model.eval([1, 2, 3])
        model.eval([4])
        carried = cluster.session.transport.bytes_carried
        before = sum(carried.values())
        for _ in range(8):
            model.eval([5])
        # Logits, ids and activations; the cache of this model has 65,536 bytes a layer.
        assert (sum(carried.values()) - before) / 8 < 4 * model.n_vocab + 8192


def test_weights_stay_on_their_worker_where_they_are_computed_with():
    """Whatever backend is best: nothing of them travels, and no worker holds a second copy."""
    data = llama.random_llama()
    total = sum(info.nbytes for info in llama.gguf.open_gguf(data).tensors.values())
    with simulated(2) as cluster, gs.CpuBackend(1) as local:
        backends = [local, *cluster.backends]
        with llama.load(data, backends, n_ctx=64, place=lambda name, layer: backends[(layer or 0) % 3]) as model:
            carried, workers = cluster.session.transport.bytes_carried, cluster.session.transport.handlers
            before = sum(carried.values())
            for token in range(8):
                model.eval([token])
            assert sum(carried.values()) - before < total / 8
            held = model.memory()
            for backend, worker in zip(cluster.backends, workers.values(), strict=True):
                assert held[backend].weights > 0
                assert worker.used[0] == held[backend].weights + held[backend].cache + held[backend].arena


def test_queued_computes_are_sent_before_the_host_waits(ctx):
    with simulated(2) as cluster:
        graph, x, y, _held = two_halves(ctx, *cluster.backends)
        carried = cluster.session.transport.carried
        with gs.Scheduler(cluster.backends, copies=4) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            for _ in range(4):      # splits are registered for each slot of a copy
                scheduler.compute(graph)
            before = carried["driver", "w0"]
            for k in range(4):
                x.set(np.full((2, 16), k, np.float32))
                scheduler.compute_async(graph)
                # Before the host waits.
                assert carried["driver", "w0"] == before + k + 1
            scheduler.synchronize()
            assert np.array_equal(y.numpy(), np.full((2, 16), 18.0, np.float32))


def test_a_bound_on_memory_is_enforced_by_the_worker():
    with simulated(1, memory=1 << 20) as cluster:
        backend = cluster.backends[0]
        assert backend.memory_available() == 1 << 20
        buffer = backend.alloc_buffer(1 << 19)
        with pytest.raises(gs.OutOfMemory, match="524289 bytes needed, 524288 left") as raised:
            backend.alloc_buffer((1 << 19) + 1)
        assert (raised.value.needed, raised.value.available) == ((1 << 19) + 1, 1 << 19)
        assert raised.value.backend == backend.name == "w0:CPU"
        with pytest.raises(gs.OutOfMemory) as raised:
            gs.remote.RemoteBackend(cluster.workers[0], name="mine").alloc_buffer(1 << 20)
        assert raised.value.backend == "mine"
        buffer.close()
        backend.alloc_buffer(1 << 20).close()


def test_an_error_of_a_kernel_reaches_the_caller_with_its_type_and_the_worker(ctx):
    class Broken(gs.CpuBackend):
        def graph_plan_create(self, graph):
            return None

        def graph_compute(self, graph):
            raise gs.HazardError("broken on purpose")

    with simulated(2, backends=lambda: [Broken(1)]) as cluster:
        graph, x, _y, _held = two_halves(ctx, *cluster.backends)
        with gs.Scheduler(cluster.backends) as scheduler:
            scheduler.alloc(graph)
            x.set(np.ones((2, 16), np.float32))
            for _ in range(2):
                with pytest.raises(gs.HazardError, match="broken on purpose") as raised:
                    scheduler.compute(graph)
                assert any("w0" in note for note in raised.value.__notes__)


def test_measured_links_are_those_of_the_network():
    """Latency of one hop, not of the way to the first worker and back from the last."""
    with simulated(2, delay=1e-3, bandwidth=1e9, memory=1 << 22) as cluster, gs.CpuBackend(1, name="host") as host:
        links = cluster.links(host, seconds=10.0)
        one, two = (backend.name for backend in cluster.backends)
        assert set(links) == {(a, b) for a in (one, two, "host") for b in (one, two, "host") if a != b}
        for link in links.values():
            assert link.latency == pytest.approx(1e-3, rel=0.02)
            assert link.bandwidth == pytest.approx(1e9, rel=0.02)


def test_backends_of_one_worker_have_a_link_without_a_way():
    with simulated(1, delay=1e-3, bandwidth=1e9, memory=1 << 22,
                   backends=lambda: [gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="b")]) as cluster:
        for pair, link in cluster.links(seconds=10.0).items():
            assert (link.latency < 1e-6 and link.bandwidth > 1e11) != ("driver" in pair)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_more_workers_cost_a_hop_each_and_nothing_else(ctx, n):
    """Six products take six times the seconds of one, wherever they are computed, and n + 1 messages."""

    def cost(worker, message):
        segments = unpacked(message)[0]["segments"]
        return 0.01 * sum(6 // n for command in segments[0][3] if command[0] == "run")

    with simulated(n, delay=1e-3, cost=cost) as cluster:
        network = cluster.session.transport
        graph, x, y, _held = products(ctx, *(cluster.backends[k * n // 6] for k in range(6)))
        with gs.Scheduler(cluster.backends) as scheduler:
            for k in range(3):
                scheduler.alloc(graph)
                x.set(np.full((2, 16), k, np.float32))
                start, before = network.now(), sum(network.carried.values())
                scheduler.compute(graph, wait=False)
                assert np.array_equal(y.numpy(), np.full((2, 16), 5040.0 * k, np.float32))
                if k:
                    assert network.now() - start == pytest.approx(0.06 + 1e-3 * (n + 1))
                    assert sum(network.carried.values()) - before == n + 1


def test_work_memory_that_a_worker_has_allocated_counts_in_budgets():
    class Working(gs.CpuBackend):
        def work_size(self, nodes):
            return 100

        work_held = 40

    with simulated(1, backends=lambda: [Working(1)]) as cluster:
        backend, = cluster.backends
        assert backend.work_size(()) == 100 and backend.work_held == 40
    assert backend.work_held == 0       # closed
    with simulated(1) as cluster:
        before = cluster.session.messages
        assert cluster.backends[0].work_held == 0 and cluster.session.messages == before


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("faults", [None, Faults(loss=0.02, repeat=0.1, late=0.5)], ids=["simulated", "lossy"])
def test_every_architecture_has_the_bits_of_local_backends(arch, faults):
    with simulated(2, 5, faults, 1000.0) as cluster:
        check_architecture(arch, cluster.backends)


# -- slow links -------------------------------------------------------------------------------------


def streamed(network, n, deadline, queued):
    """Send `n` bytes to one worker, its link carrying one message after the other: (seconds, bytes that were sent)."""
    with gs.remote.cluster_of(network, deadline) as cluster:
        backend, weights = cluster.backends[0], gs.Context()
        w = weights.tensor("i8", (n,), "w")
        data = np.resize(np.arange(101, dtype=np.int8), n)
        with backend.alloc_tensors(weights):
            start, before = network.now(), network.bytes_carried["driver", "w0"]
            for at in range(0, n, 1 << 24):
                set_piece = backend.set_tensor_async if queued else backend.set_tensor
                set_piece(w, memoryview(data[at : at + (1 << 24)]), at)
            backend.synchronize()
            took, sent = network.now() - start, network.bytes_carried["driver", "w0"] - before
            assert np.array_equal(w.numpy(), data)
            return took, sent


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("rate", [2e6, 12.5e6, 50e6, 125e6])
def test_a_slow_link_is_not_made_slower_by_messages_that_are_sent_again(rate, queued):
    """16 Mbit/s to 1 Gbit/s, of which the session knows nothing at first."""
    n = 1 << 26
    network = SimulatedNetwork([Worker("w0", [gs.CpuBackend(1)])], delay=1e-3, bandwidth=rate)
    took, sent = streamed(network, n, 60.0, queued)
    assert sent < 1.15 * n and took < 1.2 * n / rate + 0.1


def test_a_transport_that_loses_nothing_carries_each_message_once_however_long_answers_take():
    n = 1 << 24
    network = SimulatedNetwork([Worker("w0", [gs.CpuBackend(1)])], delay=1e-3, bandwidth=2e5)
    network.patience = None
    took, sent = streamed(network, n, 60.0, True)
    assert sent < 1.001 * n and took < 1.01 * n / 2e5


def test_a_stream_goes_on_over_a_link_that_is_fast_and_loses_messages():
    """What is lost is sent again soon, and what waits behind it is not."""
    n = 1 << 26
    network = SimulatedNetwork([Worker("w0", [gs.CpuBackend(1)])], 1, Faults(loss=0.1), delay=1e-3, bandwidth=1e9)
    took, sent = streamed(network, n, 60.0, True)
    assert sent < 1.5 * n and took < 30


def test_large_data_are_read_and_copied_in_pieces_that_each_have_the_deadline(ctx):
    """16 MiB take longer than the deadline."""
    n = 1 << 24
    network = SimulatedNetwork([Worker(f"w{k}", [gs.CpuBackend(1)]) for k in range(2)], bandwidth=4e6)
    network.patience = None
    with gs.remote.cluster_of(network, 3.0) as cluster:
        contexts = [gs.Context() for _ in range(2)]
        one, two = (ctx.tensor("i8", (n,), "t") for ctx in contexts)
        buffers = [backend.alloc_tensors(ctx) for backend, ctx in zip(cluster.backends, contexts, strict=True)]
        data = np.resize(np.arange(101, dtype=np.int8), n)
        one.set(data)
        gs.tensor_copy(one, two)
        start = network.now()
        assert np.array_equal(two.numpy(), data)
        assert network.now() - start > 4
        for buffer in buffers:
            buffer.close()
