"""Creating and closing a CUDA backend: without CuPy, after a fork, in any order, after errors."""

import gc
import itertools
import sys
from contextlib import suppress

import cupy_devices as devices
import numpy as np
import pytest
from cuda_emulator.kernels import EmulatedFunction
from cuda_emulator.simulator import EmulatedGraph
from forks import in_child
from processes import run_python

import ggml_sched as gs
from ggml_sched.backends.cupy.device import DeviceError, DeviceOutOfMemory
from ggml_sched.llama.defaults import named_backends


def sums(backend):
    ctx = gs.Context("sums")
    a = ctx.tensor("f32", 8, "a")
    graph = gs.Graph(ctx.add(a, a))
    buffer = backend.alloc_tensors(ctx)
    a.set(np.arange(8, dtype=np.float32))
    return graph, buffer


# -- the beginning ----------------------------------------------------------------------


def test_importing_loads_neither_cupy_nor_this_backend():
    code = ("import sys, ggml_sched as gs\n"
            "assert not any(name.startswith('ggml_sched.backends.cupy') for name in sys.modules)\n"
            "import ggml_sched.backends.cupy.real\n"
            "assert 'cupy' not in sys.modules and gs.CupyBackend is ggml_sched.backends.cupy.CupyBackend\n")
    run_python("-c", code)


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    said = r"CUDA[01].*pip install ggml-sched\[cuda13\], or ggml-sched\[cuda12\]"
    for make in (gs.CupyBackend, lambda: gs.CupyBackend(1), lambda: named_backends(["cuda"])):
        with pytest.raises(gs.BackendError, match=said):
            make()


def test_the_command_line_says_it_too(monkeypatch, capsys):
    from ggml_sched.cli import main

    monkeypatch.setitem(sys.modules, "cupy", None)
    for names in (["cuda", "cpu"], ["cpu", "cuda:1"]):
        assert main(["run", "-p", "import", "-n", "1", "--backend", *names]) == 1
        assert "ggml-sched[cuda1" in capsys.readouterr().err
    for wrong in ("cuda:", "cuda:x", "cuda:-1"):
        assert main(["run", "--backend", wrong]) == 2
        assert "cuda:N" in capsys.readouterr().err
        with pytest.raises(ValueError, match="cuda:N"):
            named_backends([wrong])


def test_the_command_runs_a_model_on_a_device_and_the_cpu(monkeypatch, capsys, tmp_path):
    from ggml_sched.cli import main
    from ggml_sched.llama import random_llama

    path = tmp_path / "model.gguf"
    path.write_bytes(random_llama(3, n_vocab=64, n_embd=32, n_layer=2, n_head=1, n_head_kv=1, n_ff=32))
    device = devices.device()
    monkeypatch.setattr(gs, "CupyBackend", lambda number: devices.new(device, f"CUDA{number}", exact=True))
    said = []
    for names in (["cpu"], ["cuda"], ["cuda", "cpu"], ["cpu", "cuda:0"]):
        assert main(["run", str(path), "--tokens", "3,5,7", "-n", "5", "--n-ctx", "32", "--backend", *names]) == 0
        out, err = capsys.readouterr()
        said.append(out)
        assert ("CUDA0" in err) == (names != ["cpu"])
    assert len(set(said)) == 1 and device.counts.graph_launches > 0


def test_names_mean_devices(monkeypatch):
    made = []
    monkeypatch.setattr(gs, "CupyBackend",
                        lambda number: made.append(number) or gs.CpuBackend(1, f"CUDA{number}"))
    for names in (["cuda", "cpu"], ["cuda:1", "cpu"], ["cuda", "cuda", "cpu"]):
        backends = named_backends(names, 1)
        assert backends[-1].name == "CPU"
        for backend in backends:
            backend.close()
    assert made == [0, 1, 0, 1]


def test_wrong_arguments():
    for wrong in ({"device": "cuda"}, {"device": 1.5}, {"memory": 1.5, "device": devices.device()}):
        with pytest.raises(TypeError):
            gs.CupyBackend(**wrong)


def test_a_device_that_cannot_hold_what_a_backend_needs_is_an_error():
    device = devices.device(memory=1 << 20)
    taken = device.alloc(1 << 20)
    with pytest.raises(gs.OutOfMemory, match="CUDA7"):
        gs.CupyBackend(device, name="CUDA7")
    taken.free()
    with gs.CupyBackend(device, name="CUDA7") as cuda:
        cuda.graph_compute(sums(cuda)[0])


# -- the end ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [pytest.param(order, marks=pytest.mark.soak if k % 5 else ())
                                   for k, order in enumerate(itertools.permutations(range(5)))],
                         ids=lambda order: "".join(map(str, order)))
def test_closing_in_any_order(order):
    """Model memory, scheduler, plan, backend and the other backend, with work queued everywhere."""
    with devices.pair(1) as (first, second):
        graph, buffer = sums(first)
        plan = first.graph_plan_create(graph)
        for _ in range(3):
            first.graph_plan_compute(plan)
        ctx = gs.Context("inputs")
        x = ctx.tensor("f32", 8, "x", input=True)
        y = ctx.set_output(ctx.add(x, x))
        sched = gs.Scheduler([second, first])
        sched.set_tensor_backend(y, first)
        asked = gs.Graph(ctx.add(y, x))
        sched.alloc(asked)
        x.set(np.ones(8, np.float32))
        for _ in range(3):
            sched.compute_async(asked)
        closes = (buffer.close, sched.close, lambda: first.graph_plan_free(plan), first.close, second.close)
        for i in order:
            closes[i]()
        for close in closes:
            close()
        assert first.used == second.used == 0


def test_a_closed_backend_says_so_and_its_buffers_still_close():
    device = devices.device()
    with gs.CupyBackend(device, name="CUDA0") as cuda:
        graph, buffer = sums(cuda)
        plan = cuda.graph_plan_create(graph)
        cuda.graph_plan_compute(plan)
    assert cuda.closed
    a = graph.tensors[0]
    for use in (lambda: cuda.alloc_buffer(8), lambda: cuda.graph_compute(graph), lambda: a.set(np.zeros(8)),
                lambda: cuda.graph_plan_compute(plan), lambda: cuda.graph_plan_create(graph), a.numpy,
                lambda: buffer.clear(0), cuda.event_new, cuda.memory_available):
        with pytest.raises(gs.BackendError, match="'CUDA0' is closed"):
            use()
    cuda.synchronize()
    cuda.graph_plan_free(plan)
    buffer.close()
    cuda.close()
    assert device.memory()[0] == device.memory()[1], "device memory is lost"
    with gs.CupyBackend(device, name="CUDA0") as again:
        graph, _ = sums(again)
        again.graph_compute(graph)
        assert graph.nodes[0].numpy()[3] == 6


def test_closing_brings_what_was_being_fetched():
    cuda = devices.new()
    graph, _ = sums(cuda)
    cuda.graph_compute(graph)
    out = np.zeros(8, np.float32)
    cuda.get_tensor_async(graph.nodes[0], memoryview(out).cast("B"))
    cuda.close()
    assert np.array_equal(out, 2 * np.arange(8))


def test_closing_again_after_an_interrupt_of_the_wait_gives_all_back(monkeypatch):
    device = devices.device()
    cuda = devices.new(device)
    graph, buffer = sums(cuda)
    cuda.graph_compute(graph)
    buffer.close()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(cuda.stream), "synchronize", interrupted)
        cuda.close()
    cuda.close()
    assert cuda.closed and device.memory()[0] == device.memory()[1]


def test_a_buffer_whose_closing_was_interrupted_is_given_back(monkeypatch):
    device = devices.device()
    cuda = devices.new(device)
    buffer = cuda.alloc_buffer(4096)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(cuda.stream), "synchronize", interrupted)
        buffer.close()
    assert buffer.closed and cuda.used == 0
    cuda.close()
    assert device.memory()[0] == device.memory()[1]


def test_a_buffer_that_is_dropped_without_a_close_counts_no_longer():
    with devices.backend(memory=10_000) as cuda:
        dropped = cuda.alloc_buffer(6000)
        assert cuda.used == 6000
        del dropped
        gc.collect()
        assert cuda.used == 0 and cuda.memory_available() == 10_000


def test_a_child_process_gets_an_error_and_may_close_everything(cuda):
    graph, buffer = sums(cuda)
    plan = cuda.graph_plan_create(graph)
    cuda.graph_plan_compute(plan)
    event = cuda.event_here()
    a = graph.tensors[0]
    other = cuda.alloc_buffer(64)

    def child():
        for use in (lambda: cuda.graph_plan_compute(plan), lambda: cuda.alloc_buffer(8), cuda.synchronize,
                    a.numpy, lambda: a.set(np.zeros(8, np.float32)), lambda: cuda.graph_compute(graph),
                    lambda: cuda.event_synchronize(event), lambda: cuda.event_record(event), other.clear):
            with pytest.raises(gs.BackendError, match="forked from it cannot use its device"):
                use()
        cuda.graph_plan_free(plan)
        other.close()
        cuda.close()
        buffer.close()
        with gs.CpuBackend(1) as cpu:
            cpu.graph_compute(sums(cpu)[0])

    assert in_child(child) == 0
    cuda.graph_plan_compute(plan)
    assert graph.nodes[0].numpy()[3] == 6


# -- errors in the middle ---------------------------------------------------------------


@pytest.mark.parametrize("found", ["where the host waits", "while memory goes"])
def test_a_kernel_that_fails_on_the_device_is_raised_once_and_leaves_no_data(cuda, monkeypatch, found):
    graph, _ = sums(cuda)
    other, out = cuda.alloc_buffer(64), np.full(8, 5, np.float32)
    cuda.graph_compute(graph)
    monkeypatch.setattr(EmulatedFunction, "_run", devices.illegal_address)
    cuda.graph_compute(graph)
    if found == "while memory goes":
        other.close()
    with pytest.raises(gs.BackendError, match="'CUDA0'.*an illegal address"):
        cuda.synchronize() if found == "while memory goes" else cuda.get_tensor(graph.nodes[0], out)
    assert (out == 5).all(), "data of a failed compute was fetched"
    cuda.synchronize()
    monkeypatch.undo()
    cuda.graph_compute(graph)
    assert graph.nodes[0].numpy()[3] == 6


def test_a_lost_device_refuses_everything_and_closing_gives_all_back(monkeypatch):
    device = devices.device()
    home, ctx = gs.Context("weights"), gs.Context("nodes")
    cuda = devices.new(device)
    sched = gs.Scheduler([cuda])
    w, x = home.tensor("q4_0", (64, 8), "w"), ctx.tensor("f32", 64, "x", input=True)
    y = ctx.set_output(ctx.mul_mat(w, x))
    graph = gs.Graph(y)
    buffer = cuda.alloc_tensors(home)
    w.set(np.zeros(w.nbytes, np.uint8))
    sched.alloc(graph)
    x.set(np.ones(64, np.float32))
    for _ in range(4):
        sched.compute(graph)
    assert cuda.work.size and device.counts.graph_launches

    monkeypatch.setattr(type(device), "check_open", devices.illegal_address)
    monkeypatch.setattr(EmulatedGraph, "free", devices.illegal_address)
    for use in (y.numpy, lambda: sched.compute(graph), lambda: cuda.alloc_buffer(8), w.numpy):
        with pytest.raises(gs.BackendError, match="'CUDA0'.*an illegal address"):
            use()
    with suppress(DeviceError):
        sched.close()
    buffer.close()
    for _ in range(2):
        cuda.close()
        sched.close()
    assert cuda.closed and cuda.used == device.used == 0


@pytest.mark.parametrize("queued", [True, False])
def test_a_scheduler_works_after_a_device_ran_out_of_memory(cuda, sched, queued, monkeypatch):
    ctx = gs.Context("inputs")
    x = ctx.tensor("f32", 8, "x", input=True)
    graph = gs.Graph(ctx.add(x, x))
    alloc = type(cuda.device).alloc

    def none(self, n):
        raise DeviceOutOfMemory(n, 3)

    monkeypatch.setattr(type(cuda.device), "alloc", none)
    with pytest.raises(gs.OutOfMemory) as caught:
        sched.alloc(graph)
    assert caught.value.backend == "CUDA0" and caught.value.available == 3
    monkeypatch.setattr(type(cuda.device), "alloc", alloc)
    sched.alloc(graph)
    x.set(np.ones(8, np.float32))
    for _ in range(3):
        sched.compute_async(graph) if queued else sched.compute(graph, wait=False)
    sched.synchronize()
    assert (graph.nodes[0].numpy() == 2).all()
