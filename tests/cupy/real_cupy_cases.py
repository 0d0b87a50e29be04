"""Cases of the real CuPy over the stub of CUDA, each in a process of its own: what a process begins or ends with."""

import gc
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cuda_stub
import numpy as np
from small_llama import random_llama

import ggml_sched as gs
from ggml_sched.backends.cupy.device import DeviceError


def sums(backend: gs.CupyBackend, times: int = 3) -> None:
    """a + a, on the device: launched, captured and replayed."""
    with gs.Context("sums") as ctx:
        a = ctx.tensor("f32", 8, "a")
        total = ctx.add(a, a)
        graph = gs.Graph(total)
        with backend.alloc_tensors(ctx):
            a.set(np.arange(8, dtype=np.float32))
            plan = backend.graph_plan_create(graph)
            for _ in range(times):
                backend.graph_plan_compute(plan)
            backend.synchronize()
            assert total.numpy().tolist() == [2 * i for i in range(8)]
            backend.graph_plan_free(plan)


def refused(call: Callable[[], object], *said: str) -> None:
    """The call raises a BackendError that says all of this."""
    try:
        call()
    except gs.BackendError as error:
        assert all(part in str(error) for part in said), str(error)
    else:
        raise AssertionError("not refused")


def memory_that_is_collected_in_a_capture_is_freed_at_its_end() -> None:
    world = cuda_stub.install()
    from ggml_sched.backends.cupy.real import open_device
    device = open_device(0)
    stream, kept = device.stream(), device.alloc(64)
    dropped: list[object] = [device.alloc(4096), device.pinned(512), device.event()]
    dropped.append(dropped)         # only the collector finds it
    stream.begin_capture()
    stream.fill(kept.ptr, 1, 64)
    before = world.counts["cudaFree"]
    del dropped
    gc.collect()
    assert world.counts["cudaFree"] == before       # a free in a capture may invalidate it
    graph = stream.end_capture()
    assert world.on_devices() == 64 and world.pinned() == 0
    graph.launch(stream)
    stream.synchronize()
    assert not world.complaints, world.complaints
    del graph, stream
    kept.free()
    device.close()
    gc.collect()
    assert not world.left(), world.left()


def memory_collected_by_another_thread_waits_for_the_end_too() -> None:
    world = cuda_stub.install()
    from ggml_sched.backends.cupy.real import open_device
    device = open_device(0)
    stream = device.stream()
    dropped = [device.alloc(4096)]
    stream.begin_capture()
    thread = threading.Thread(target=dropped.clear)
    thread.start()
    thread.join()
    assert world.on_devices() == 4096
    stream.end_capture()
    assert world.on_devices() == 0 and not world.complaints


def a_backend_makes_the_context_of_its_device_alone() -> None:
    world = cuda_stub.install(devices=3)
    with gs.CupyBackend(1) as backend:
        sums(backend)
        thread = threading.Thread(target=sums, args=(backend,))
        thread.start()
        thread.join()
        assert world.context == 0       # of this thread: as before
    assert world.contexts == {1} and not world.complaints, (world.contexts, world.complaints)


def the_context_of_the_caller_stays_current() -> None:
    world = cuda_stub.install(devices=2)
    from cupy.cuda import runtime
    runtime.setDevice(1)
    there = world.context
    with gs.CupyBackend(0) as backend:
        sums(backend)
        assert world.context == there and runtime.getDevice() == 1
        world.counts.clear()
        backend.stream.synchronize()
        assert world.counts["cudaSetDevice"] == 0
    assert not world.complaints


def without_headers_of_cuda_kernels_compile() -> None:
    cuda_stub.install()
    import cuda.pathfinder
    cuda.pathfinder.find_nvidia_header_directory = lambda name: None
    with gs.CupyBackend() as backend:
        sums(backend)


def a_folder_that_cannot_be_written_is_named() -> None:
    cuda_stub.install()
    file = Path(os.environ["CUPY_CACHE_DIR"]).parent / "file"
    file.write_text("in the way")
    os.environ["CUPY_CACHE_DIR"] = str(file / "kernels")
    refused(gs.CupyBackend, "CUPY_CACHE_DIR", "folder of compiled kernels")


def closing_a_backend_gives_everything_back() -> None:
    world = cuda_stub.install()
    for options in ({}, {"capture": False}):
        backend = gs.CupyBackend(0, **options)
        sums(backend)
        backend.close()
        assert world.pinned() == 0          # although the closed backend is still referred to
        assert world.left().keys() <= {"streams", "events"}, world.left()
        del backend
        gc.collect()
        assert not world.left() and not world.complaints, (world.left(), world.complaints)


def two_backends_of_a_device_have_two_handles_of_cublas() -> None:
    world = cuda_stub.install()
    from ggml_sched.backends.cupy.real import open_device
    with open_device(0) as device:
        first, second = gs.CupyBackend(device), gs.CupyBackend(device)
        assert len(world.blas) == 2
        first.close()
        assert len(world.blas) == 1
        second.close()
        assert not world.blas


def a_child_process_gives_nothing_back() -> None:
    world = cuda_stub.install()
    backend = gs.CupyBackend()
    buffer = backend.alloc_buffer(64)
    sums(backend)
    before = dict(world.counts)
    child = os.fork()
    if not child:
        status = 1
        try:
            refused(lambda: backend.alloc_buffer(8), "forked")
            buffer.close()
            backend.close()
            del buffer, backend
            gc.collect()
            status = 2 * (dict(world.counts) != before)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sums(backend)
    buffer.close()
    backend.close()
    assert not world.complaints


def threads_use_two_devices_at_once() -> None:
    world = cuda_stub.install(devices=2, late=True)
    backends = [gs.CupyBackend(0), gs.CupyBackend(1)]
    failed: list[BaseException] = []

    def work(backend: gs.CupyBackend) -> None:
        try:
            for _ in range(5):
                sums(backend, 4)
                gc.collect()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(backend,)) for backend in backends for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and not world.complaints, (failed, world.complaints)
    assert world.contexts == {0, 1}
    for backend in backends:
        backend.close()


def a_process_ends_without_closing() -> None:
    cuda_stub.install()
    backend = gs.CupyBackend()
    sums(backend)
    sys.modules["__main__"].backend = backend       # type: ignore[attr-defined]  # lives to the very end


def a_process_ends_with_a_model() -> None:
    cuda_stub.install()
    model = gs.llama.load(io.BytesIO(random_llama()), [gs.CupyBackend()], n_ctx=64)
    for _ in range(4):
        model.eval([1])         # the last ones replay a capture
    sys.modules["__main__"].model = model           # type: ignore[attr-defined]  # what it holds is collected last


def without_cublas_products_of_prompts_are_computed_in_tiles() -> None:
    """CuPy's wheels leave cuBLAS out; their bindings are there, and find no library."""
    world = cuda_stub.install(cublas=False)
    from cuda import pathfinder
    load = pathfinder.load_nvidia_dynamic_lib

    def find(name: str) -> object:
        if name.startswith("cublas"):
            raise pathfinder.DynamicLibNotFoundError(f'Failure finding "lib{name}.so"')
        return load(name)

    pathfinder.load_nvidia_dynamic_lib = find
    with gs.CupyBackend() as backend, gs.Context("product") as ctx:
        assert backend.blas is None
        w, x = ctx.tensor("f16", (64, 24), "w"), ctx.tensor("f32", (64, 40), "x")
        out = ctx.mul_mat(w, x)
        with backend.alloc_tensors(ctx):
            rng = np.random.default_rng(1)
            a, b = (rng.standard_normal(t.ne[1::-1]).astype(np.float32) for t in (w, x))
            w.set(a)
            x.set(b)
            backend.graph_compute(gs.Graph(out))
            backend.synchronize()
            assert np.allclose(out.numpy(), b @ a.astype(np.float16).astype(np.float32).T, atol=1e-3)
    assert not world.complaints and world.launched == {"f16": 1}, (world.complaints, world.launched)


def a_freed_handle_of_cublas_is_refused() -> None:
    cuda_stub.install()
    from ggml_sched.backends.cupy.real import open_device
    with open_device(0) as device:
        blas = device.blas()
        assert blas is not None
        blas.close()
        blas.close()
        try:
            blas.gemm(device.stream(), 1, 1, 1, 0, 1, 0, 1, 0, 1)
        except DeviceError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a product by a closed handle")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
