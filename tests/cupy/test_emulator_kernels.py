"""The emulated device detects errors of kernels and launches: races, barriers, arguments, sizes."""

import numpy as np
import pytest
from cuda_emulator import EmulatedDevice
from cupy_sources import Bench, needs_compiler

from ggml_sched.backends.cupy.device import DeviceError, KernelArguments
from ggml_sched.backends.cupy.regions import VIEW

pytestmark = needs_compiler

SOURCE = """
struct View { char* p; long long ne[4]; long long nb[4]; };
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(1024) name

KERNEL(neighbour)(const float* x, float* y) {
    __shared__ float part[128];
    part[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = part[(threadIdx.x + 1) % blockDim.x];
}
KERNEL(missing_barrier)(const float* x, float* y) {
    __shared__ float part[128];
    part[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = part[(threadIdx.x + 1) % blockDim.x];
}
// Right within a warp that runs together, wrong between warps.
KERNEL(missing_between_warps)(const float* x, float* y) {
    __shared__ float part[128];
    part[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = part[(threadIdx.x + 32) % blockDim.x];
}
KERNEL(last_block_wins)(int* y) { *y = (int)blockIdx.x; }
KERNEL(divergent)(int n) { if ((int)threadIdx.x < n) __syncthreads(); }
KERNEL(left_early)(int n) { if ((int)threadIdx.x >= n) return; __syncthreads(); }
KERNEL(two_places)() {
    if (threadIdx.x % 2)
        __syncthreads();
    else
        __syncthreads();
}
KERNEL(two_shuffles)(int* y) {
    if (threadIdx.x % 2)
        y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
    else
        y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 2, 1);
}
KERNEL(left_out)() { __syncwarp(0xfffffffeu); }
KERNEL(warp_left_early)(int* y, int n) {
    if ((int)threadIdx.x >= n) return;
    y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
KERNEL(wide)(const char* x, float* y) { y[threadIdx.x] = __ldg((const float4*)x).x; }
KERNEL(trapped)(int n) { if ((int)threadIdx.x == n) __trap(); }
KERNEL(four)(const float* p, int i, long long n, float f) { if (!p && i && n && f > 0) __trap(); }
KERNEL(by_value)(View v, int n, int* y) { y[0] = (int)v.ne[3] + n; }
extern "C" __global__ void __launch_bounds__(64, 2) bounded() {}
extern "C" __launch_bounds__(96) __global__ void bounded_before() {}
extern "C" __global__ void unbounded() {}
// What an earlier block left in shared memory is not there.
KERNEL(leftover)(float* y) {
    __shared__ float still[32];
    DYNAMIC_SHARED(float, moving);
    y[blockIdx.x * 2] = still[5];
    y[blockIdx.x * 2 + 1] = moving[5];
    still[5] = 1.0f;
    moving[5] = 1.0f;
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def bench(folder):
    made = Bench(SOURCE, folder)
    yield made
    made.device.close()


ORDERS = (0, 1, 5, 77, 1234)


def in_orders(bench: Bench, name: str, threads: int) -> list[np.ndarray]:
    x = np.arange(1, threads + 1, dtype=np.float32)
    source, target, found = bench.up(x), bench.device.alloc(x.nbytes), []
    for order in ORDERS:
        bench.device.order = order
        bench.run(name, 1, threads, source, target)
        found.append(bench.down(target, x))
    return found


def test_barriers_make_orders_of_threads_agree(bench):
    for found in in_orders(bench, "neighbour", 128):
        assert np.array_equal(found, np.roll(np.arange(1, 129, dtype=np.float32), -1))


@pytest.mark.parametrize(("name", "threads"), [
    ("missing_barrier", 32), ("missing_barrier", 128), ("missing_between_warps", 128)])
def test_a_missing_barrier_shows_between_orders(bench, name, threads):
    found = in_orders(bench, name, threads)
    assert len({one.tobytes() for one in found}) > 1
    assert all(np.isnan(one).any() for one in found[:2]), "shared memory that no thread wrote is no number"


def test_a_race_of_blocks_shows_between_orders(bench):
    target, found = bench.device.alloc(4), set()
    for order in ORDERS:
        bench.device.order = order
        bench.run("last_block_wins", 100, 32, target)
        found.add(int(bench.down(target, np.zeros(1, np.int32))[0]))
    assert {99, 0} < found


def test_every_block_and_thread_runs_once_in_any_order(folder):
    source = """
    extern "C" __global__ void count(int* y) {
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        if (block % 3 == 0) __syncwarp(blockDim.x * blockDim.y * blockDim.z >= 32 ? ~0u : ~0u);
        y[block * (int)(blockDim.x * blockDim.y * blockDim.z) + thread] += 1 + block * 1000;
    }"""
    with EmulatedDevice() as device:
        bench = Bench(source, folder, device)
        for grid, block in (((7, 3, 2), (32, 2, 2)), ((1, 1, 1), (1, 1, 1)), ((5, 1, 4), (3, 5, 7))):
            blocks, threads = np.prod(grid), np.prod(block)
            expected = 1 + 1000 * np.repeat(np.arange(blocks, dtype=np.int32), threads)
            for order in ORDERS:
                device.order = order
                target = bench.up(np.zeros(blocks * threads, np.int32))
                bench.run("count", grid, block, target)
                assert np.array_equal(bench.down(target, expected), expected), (grid, block, order)


@pytest.mark.parametrize("order", ORDERS[:3])
def test_threads_that_never_wait_cost_no_switch_of_their_own(bench, order):
    """One for a warp's 32 threads; those that wait cost theirs."""
    bench.device.order = order
    target, function = bench.device.alloc(4), bench.function("last_block_wins")
    before = function.switches
    bench.run("last_block_wins", 100, 256, target)
    assert function.switches - before == 100 * 8
    before = function.switches
    bench.run("divergent", 100, 256, np.int32(256))
    assert function.switches - before >= 100 * 256


def test_fibers_work_without_assembly(tmp_path, monkeypatch):
    """As on processors that have no switch of their own here."""
    monkeypatch.setenv("CXX", "g++ -DHOST_CUDA_UCONTEXT")
    with EmulatedDevice() as device:
        test_barriers_make_orders_of_threads_agree(Bench(SOURCE, tmp_path, device))


@pytest.mark.parametrize("order", ORDERS[:3])
@pytest.mark.parametrize(("name", "args", "said"), [
    ("divergent", [np.int32(40)], r"divergent barrier at line \d+: of 64 threads 40 wait for the block, .* 24 have"),
    ("left_early", [np.int32(32)], r"divergent barrier at line \d+: of 64 threads 32 wait for the block, .* 32 have"),
    ("two_places", [], r"divergent barrier: thread 0 waits at line (\d+), thread 1 at line (?!\1)\d+"),
    ("left_out", [], r"thread (0|32) waits at line \d+ with mask fffffffe, which leaves it out"),
    ("trapped", [np.int32(50)], r"block \(0, 0, 0\): a thread trapped"),
])
def test_barriers_that_cannot_open_are_errors(bench, order, name, args, said):
    bench.device.order = order
    bench.launch(name, 1, 64, *args)
    with pytest.raises(DeviceError, match=rf"probe\.{name}: .*{said}"):
        bench.stream.synchronize()
    bench.stream.synchronize()          # the device works afterwards
    test_barriers_make_orders_of_threads_agree(bench)


def test_wide_loads_from_an_address_that_is_no_multiple_are_errors(bench):
    x, y = bench.up(np.arange(16, dtype=np.float32)), bench.device.alloc(4 * 32)
    for skip, wrong in ((0, False), (16, False), (8, True), (4, True)):
        bench.launch("wide", 1, 32, np.uint64(x.ptr + skip), y)
        if wrong:
            with pytest.raises(DeviceError, match=r"probe\.wide: .*a misaligned address"):
                bench.stream.synchronize()
        else:
            bench.stream.synchronize()


@pytest.mark.parametrize(("name", "args"), [("two_shuffles", []), ("warp_left_early", [np.int32(20)])])
def test_shuffles_that_not_all_lanes_reach_are_errors(bench, name, args):
    target = bench.device.alloc(4 * 32)
    with pytest.raises(DeviceError, match=rf"probe\.{name}: .*divergent barrier"):
        bench.run(name, 1, 32, target, *args)


def test_shared_memory_is_poison_at_the_start_of_a_block(bench):
    like = np.zeros(8, np.float32)
    target = bench.device.alloc(like.nbytes)
    bench.run("leftover", 4, 1, target, shared=128)
    assert np.isnan(bench.down(target, like)).all()


# -- arguments --------------------------------------------------------------------------------------------------------

GOOD = (np.uint64(0), np.int32(1), np.int64(2), np.float32(3))


@pytest.mark.parametrize(("at", "wrong", "said"), [
    (1, np.int64(1), "argument 1 is int64 of 8 bytes, the kernel takes an integer of 4"),
    (2, np.int32(2), "argument 2 is int32 of 4 bytes, the kernel takes an integer of 8"),
    (3, np.float64(3), "argument 3 is float64 of 8 bytes, the kernel takes a float of 4"),
    (3, np.int32(3), "argument 3 is int32, the kernel takes a float"),
    (1, np.float32(1), "argument 1 is float32, the kernel takes an integer"),
    (0, np.float64(0), "argument 0 is float64, the kernel takes a pointer"),
    (2, np.zeros(1, VIEW), "argument 2 is .* of 72 bytes, the kernel takes an integer of 8"),
])
def test_an_argument_of_the_wrong_width_or_kind_is_an_error(bench, at, wrong, said):
    function, args = bench.function("four"), list(GOOD)
    function.pack(args)
    args[at] = wrong
    with pytest.raises(DeviceError, match=f"probe.four: {said}"):
        function.pack(args)


def test_a_wrong_number_of_arguments_is_an_error(bench):
    with pytest.raises(DeviceError, match=r"probe\.four: 3 arguments, the kernel takes 4"):
        bench.function("four").pack(GOOD[:3])


@pytest.mark.parametrize("wrong", [3, 3.0, None, np.zeros(2, np.int32), "x"])
def test_arguments_are_numpy_scalars_or_structs(bench, wrong):
    with pytest.raises(TypeError, match=r"probe\.four: argument 1 is a NumPy scalar or an array of size 1"):
        bench.function("four").pack([GOOD[0], wrong, *GOOD[2:]])


def test_a_launch_takes_the_values_of_its_moment(bench):
    target = bench.device.alloc(4)
    view = np.zeros(1, VIEW)
    view["ne"][0, 3] = 5
    function = bench.function("by_value")
    packed = function.pack([view, np.int32(1), np.uint64(target.ptr)])
    view["ne"][0, 3] = 1000             # what was packed is a copy
    found = []
    for n in (10, 20):
        packed.values[1][0] = n
        function.launch((1,), (1,), packed, 0, bench.stream)
        packed.values[1][0] = 7777      # the launch has its own
        found.append(int(bench.down(target, np.zeros(1, np.int32))[0]))
    assert found == [15, 25]


def test_packed_arguments_lie_where_their_pointers_say():
    import ctypes
    packed = KernelArguments([np.int8(1), np.float64(2), np.zeros(1, VIEW), np.int32(-4)])
    assert all(int(pointer) % 8 == 0 for pointer in packed.pointers)
    assert packed.address == packed.pointers.ctypes.data
    assert ctypes.c_double.from_address(int(packed.pointers[1])).value == 2
    assert ctypes.c_int32.from_address(int(packed.pointers[3])).value == -4
    with pytest.raises(DeviceError, match="4096 bytes of arguments"):
        KernelArguments([np.zeros(1, np.dtype((np.void, 5000)))])


# -- sizes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "grid", "block", "shared", "said"), [
    ("unbounded", (0,), (32,), 0, "a grid of"), ("unbounded", (1, 65536), (32,), 0, "a grid of"),
    ("unbounded", (1, 1, 65536), (32,), 0, "a grid of"), ("unbounded", (1 << 31,), (32,), 0, "a grid of"),
    ("unbounded", (1,), (0,), 0, "a block of"), ("unbounded", (1,), (2048,), 0, "a block of"),
    ("unbounded", (1,), (1, 1, 65), 0, "a block of"), ("unbounded", (1,), (32, 33), 0, "1056 threads, .* is 1024"),
    ("bounded", (1,), (65,), 0, "a block of 65 threads, its launch bound is 64"),
    ("bounded_before", (1,), (32, 4), 0, "a block of 128 threads, its launch bound is 96"),
    ("unbounded", (1,), (32,), 101_377, "101377 bytes of shared memory, a block may have 101376"),
])
def test_sizes_that_a_gpu_refuses_are_errors(bench, name, grid, block, shared, said):
    function = bench.function(name)
    with pytest.raises(DeviceError, match=rf"probe\.{name}: .*{said}"):
        function.launch(grid, block, function.pack([]), shared, bench.stream)
    bench.stream.synchronize()


def test_the_largest_sizes_run(bench):
    for name, block in (("bounded", 64), ("bounded_before", 96), ("unbounded", (8, 2, 64))):
        bench.run(name, (3, 2, 2), block, shared=101_376 if name == "unbounded" else 0)


def test_kernels_that_are_not_there_are_errors(bench):
    with pytest.raises(DeviceError, match=r"no kernel probe\.nothing: not in probe\.cu"):
        bench.function("nothing")
    with pytest.raises(DeviceError, match=r"no kernels nowhere: .*nowhere\.cu"):
        bench.device.function("nowhere.nothing")
    assert bench.function("bounded").name == "probe.bounded"
