"""CUDA's intrinsics on the host do what a GPU's do: shuffles, votes, conversions, bytes in words, atomics."""

import numpy as np
import pytest
from cupy_sources import Bench, needs_compiler

pytestmark = needs_compiler

SOURCE = r"""
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(1024) name
#define ALL 0xffffffffu
typedef unsigned short u16;

template <class T> __device__ __forceinline__ T sum_of_warp(T v) {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(ALL, v, m);
    return v;
}
template <int N> __device__ float through_shared(float v) {         // a static array of a template's own
    __shared__ float part[N];
    __syncthreads();
    part[threadIdx.x % N] = v;
    __syncthreads();
    return part[(threadIdx.x + 1) % N];
}
static __device__ __constant__ int table[4] = {10, 20, 30, 40};
static __device__ const signed char small[3] = {-1, 0, 1};

KERNEL(shuffles)(int* y, int width) {
    const int i = threadIdx.x, v = 100 + i;
    y += i * 3;
    y[0] = __shfl_xor_sync(ALL, v, 1, width);
    y[1] = __shfl_xor_sync(ALL, v, 8, width);
    y[2] = sum_of_warp(v);
}
KERNEL(wide_values)(double* d, long long* l, unsigned* u) {
    const int i = threadIdx.x;
    d[i] = __shfl_xor_sync(ALL, i + 0.5, 4);
    l[i] = __shfl_xor_sync(ALL, (long long)i << 40, 8);
    u[i] = __shfl_xor_sync(ALL, 0xfffffff0u + (unsigned)i % 16, 1);
}
// Half a warp by itself.
KERNEL(half_a_warp)(int* y) {
    const int i = threadIdx.x;
    if (i % 32 < 16) {
        y[i] = __shfl_xor_sync(0x0000ffffu, i, 1);
    } else {
        y[i] = __shfl_xor_sync(0xffff0000u, i, 2);
    }
}
KERNEL(outside)(float* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, 1.0f, 16);
}
KERNEL(votes)(unsigned* y) { y[threadIdx.x] = __ballot_sync(ALL, threadIdx.x % 3 == 0); }
KERNEL(templates)(float* y) {
    y[threadIdx.x] = through_shared<32>((float)threadIdx.x) + 100 * through_shared<8>((float)(threadIdx.x % 8))
        + (float)table[threadIdx.x % 4] * 1e4f + (float)small[threadIdx.x % 3] * 0.5f;
}
KERNEL(from_half)(float* y) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    y[i] = __half_bits_to_float((u16)i);
}
KERNEL(to_half)(const float* x, u16* y, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = __float_to_half_bits(x[i]);
}
KERNEL(words)(const int* a, const int* b, int* y) {
    const int i = threadIdx.x;
    const unsigned u = (unsigned)a[i], v = (unsigned)b[i];
    y += i * 4;
    y[0] = __dp4a(a[i], b[i], 7);
    y[1] = (int)__byte_perm(u, v, 0x5140);
    y[2] = (int)__byte_perm(u, v, 0x8c93);
    y[3] = __popc(u);
}
KERNEL(rounding)(const float* x, int* y) { y[threadIdx.x] = __float2int_rn(x[threadIdx.x]); }
KERNEL(atomics)(int* most, int* first) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicMax(most, i);
    atomicCAS(first, 0, i + 1);
}
// Each lane's registers as they come: a, b and d of one product after the other.
KERNEL(products)(const uint32_t* a, const uint32_t* b, int* d, int n) {
    for (int i = 0; i < n; ++i, a += 4 * blockDim.x, b += 2 * blockDim.x, d += 4 * blockDim.x) {
        const uint32_t *x = a + 4 * threadIdx.x, *y = b + 2 * threadIdx.x;
        int* z = d + 4 * threadIdx.x;
        const uint32_t x4[4] = {x[0], x[1], x[2], x[3]}, y2[2] = {y[0], y[1]};
        int sum[4] = {z[0], z[1], z[2], z[3]};
        if (i % 2) mma_16_8_16(sum, x[0], x[1], y[0]);
        else mma_16_8_32(sum, x4, y2);
        for (int j = 0; j < 4; ++j) z[j] = sum[j];
    }
}
KERNEL(products_of_halves)(const uint32_t* a, const uint32_t* b, float* d) {
    const uint32_t *x = a + 4 * threadIdx.x, *y = b + 2 * threadIdx.x;
    float* z = d + 4 * threadIdx.x;
    const uint32_t x4[4] = {x[0], x[1], x[2], x[3]}, y2[2] = {y[0], y[1]};
    float sum[4] = {z[0], z[1], z[2], z[3]};
    mma_halves(sum, x4, y2);
    for (int j = 0; j < 4; ++j) z[j] = sum[j];
}
KERNEL(pairs_of_halves)(const float* x, unsigned* y) {
    y[threadIdx.x] = pack_halves(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);
}
// Each thread copies 16 bytes, and reads those of the next thread.  `wait`: 2: as it has to; 1: too late; 0: never.
KERNEL(copies)(const float* x, float* y, int wait, int whole, int to_global) {
    DYNAMIC_SHARED(float, to);
    for (int j = 0; j < 4; ++j) to[4 * threadIdx.x + j] = -1.0f;
    copy_16((to_global ? y : to) + 4 * threadIdx.x, x + 4 * threadIdx.x, (int)threadIdx.x < whole);
    if (wait == 2) wait_copies();
    __syncthreads();
    for (int j = 0; j < 4; ++j) y[4 * threadIdx.x + j] = to[(4 * threadIdx.x + 4 + j) % (4 * blockDim.x)];
    if (wait == 1) wait_copies();
}
KERNEL(half_a_product)(int* d) {
    const uint32_t a[4] = {}, b[2] = {};
    int sum[4] = {};
    if (threadIdx.x < 16) mma_16_8_32(sum, a, b);
    d[threadIdx.x] = sum[0];
}
KERNEL(turns)(unsigned* count, unsigned* seen, unsigned most) {
    __threadfence();
    atomicInc(&seen[atomicInc(count, most)], 0xffffffffu);
}
"""
ORDERS = (0, 1, 99)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(SOURCE, tmp_path_factory.mktemp("shim"))
    yield made
    made.device.close()


def results(bench, name: str, block: int, shape, dtype=np.int32, *args, grid: int = 1, first: bool = False):
    """The data that a kernel writes, asserted to be equal in all thread orders."""
    seen = None
    for order in ORDERS:
        bench.device.order = order
        like = np.zeros(shape, dtype)
        target = bench.up(like)
        bench.run(name, grid, block, *([target, *args] if not first else [*args, target]))
        found = bench.down(target, like)
        assert seen is None or found.tobytes() == seen.tobytes()
        seen = found
    return seen


@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles(bench, width):
    """A lane that is in a later part of `width` lanes gives its value to no earlier one."""
    found = results(bench, "shuffles", 64, (64, 3), np.int32, np.int32(width))
    i = np.arange(64)
    assert np.array_equal(found[:, 0], 100 + (i ^ 1))
    assert np.array_equal(found[:, 1], 100 + np.where((i ^ 8) // width > i // width, i, i ^ 8))
    assert np.array_equal(found[:, 2], (100 + i).reshape(2, 32).sum(1).repeat(32))


def test_shuffles_of_wide_values(bench):
    d, wide, u = (bench.device.alloc(8 * 32) for _ in range(3))
    bench.run("wide_values", 1, 32, d, wide, u)
    i = np.arange(32)
    assert np.array_equal(bench.down(d, np.zeros(32)), (i ^ 4) + 0.5)
    assert np.array_equal(bench.down(wide, np.zeros(32, np.int64)), (i ^ 8) << 40)
    assert np.array_equal(bench.down(u, np.zeros(32, np.uint32)), 0xfffffff0 + (i ^ 1) % 16)


def test_parts_of_a_warp_shuffle_by_themselves(bench):
    i = np.arange(64)
    assert np.array_equal(results(bench, "half_a_warp", 64, 64), np.where(i % 32 < 16, i ^ 1, i ^ 2))


def test_a_lane_that_takes_no_part_gives_no_number(bench):
    assert np.isnan(results(bench, "outside", 32, 16, np.float32)).all()


def test_votes(bench):
    found = results(bench, "votes", 64, 64, np.uint32)
    for warp in (0, 1):
        lanes = np.arange(32 * warp, 32 * warp + 32)
        assert (found[lanes] == sum(1 << (lane % 32) for lane in lanes if lane % 3 == 0)).all()


def test_shared_arrays_of_templates_and_tables(bench):
    i = np.arange(32)
    expected = ((i + 1) % 32 + 100.0 * ((i + 1) % 8) + np.array([10, 20, 30, 40])[i % 4] * 1e4
                + np.array([-0.5, 0, 0.5])[i % 3])
    assert np.array_equal(results(bench, "templates", 32, 32, np.float32), expected.astype(np.float32))


def test_all_halves_become_floats(bench):
    found = results(bench, "from_half", 256, 65536, np.float32, grid=256)
    expected = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found[~np.isnan(found)]), np.signbit(expected[~np.isnan(expected)]))


def test_floats_round_to_halves_as_ieee_says(bench):
    halves = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    rng = np.random.default_rng(7)
    x = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf)),
                        rng.integers(0, 1 << 32, 50_000, np.uint32).view(np.float32),
                        np.array([65519.996, 65520, 1e30, np.inf, 0, 2.0 ** -25, 3e-8, 1e-45], np.float32)])
    x = np.concatenate([x, -x])
    x = x[~np.isnan(x)]
    source, target = bench.up(x), bench.device.alloc(2 * x.size)
    bench.run("to_half", -(-x.size // 256), 256, source, target, np.int32(x.size))
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(bench.down(target, np.zeros(x.size, np.uint16)), x.astype(np.float16).view(np.uint16))
    nan = bench.up(np.array([np.nan], np.float32))
    bench.run("to_half", 1, 32, nan, target, np.int32(1))
    assert bench.down(target, np.zeros(1, np.uint16))[0] == 0x7fff


def test_bytes_and_bits_in_words(bench):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-2**31, 2**31, (2, 64)).astype(np.int32)
    b[:8] = a[:8] & 0xffff | 0x12340000
    a[8] = 0
    found = results(bench, "words", 64, (64, 4), np.int32, bench.up(a), bench.up(b), first=True)
    signed = [v.view(np.int8).reshape(64, 4).astype(np.int64) for v in (a, b)]
    ua, ub = (v.view(np.uint8).reshape(64, 4) for v in (a, b))
    signs = [ua[:, 3], *(np.where(v[:, i] > 127, 255, 0) for v, i in ((ua, 1), (ub, 0), (ua, 0)))]
    for i, want in ((1, np.concatenate([ua, ub], 1)[:, [0, 4, 1, 5]]), (2, np.stack(signs, 1).astype(np.uint8))):
        assert np.array_equal(found[:, i], np.ascontiguousarray(want).view(np.int32).reshape(64)), i
    assert np.array_equal(found[:, 0], (signed[0] * signed[1]).sum(1) + 7)
    assert found[:, 3].tolist() == [bin(v).count("1") for v in a.view(np.uint32)]


def test_floats_become_integers(bench):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4, -2.6, 3e9, -3e9, np.inf, -np.inf, np.nan], np.float32)
    found = results(bench, "rounding", len(x), len(x), np.int32, bench.up(x), first=True)
    want = np.nan_to_num(np.clip(np.rint(x.astype(np.float64)), -2**31, 2**31 - 1), nan=0)
    assert np.array_equal(found, want.astype(np.int32))


def test_atomics_on_integers(bench):
    for order in ORDERS:
        bench.device.order = order
        most, first = (bench.up(np.zeros(1, np.int32)) for _ in range(2))
        bench.run("atomics", 4, 64, most, first)
        numbers = [int(bench.down(memory, np.zeros(1, np.int32))[0]) for memory in (most, first)]
        assert numbers[0] == 255 and 1 <= numbers[1] <= 256
        assert order or numbers[1] == 1


def registers(matrix: np.ndarray) -> np.ndarray:
    """Four neighbouring bytes of each row as a word, low to high."""
    return np.ascontiguousarray(matrix.astype(np.int8)).view(np.uint32)


def test_products_of_matrices_by_a_warp(bench):
    """Lanes hold what PTX documents for mma.m16n8k32 and .m16n8k16 with .s8: lane 4 g + t has the words t and t + 4 of
    rows g and g + 8 of a, of column g of b, and columns 2 t and 2 t + 1 of rows g and g + 8 of the result."""
    rng, n, warps = np.random.default_rng(8), 6, 2
    a = rng.integers(-128, 128, (n, warps, 16, 32))
    b = rng.integers(-128, 128, (n, warps, 32, 8))
    c = rng.integers(-2**31, 2**31, (n, warps, 16, 8))
    a[0, 0], b[0, 0], c[0, 0] = -128, -128, 2**31 - 1          # wraps
    want = c.copy()
    of_a, of_b, of_d = (np.zeros((n, 32 * warps, k), np.uint32) for k in (4, 2, 4))
    for i in range(n):
        depth = 16 if i % 2 else 32
        want[i] += a[i, ..., :depth] @ b[i, :, :depth]
        for warp in range(warps):
            words, columns = registers(a[i, warp]), registers(b[i, warp].T)
            d = c[i, warp].astype(np.int32).view(np.uint32)
            for g, t in np.ndindex(8, 4):
                lane = 32 * warp + 4 * g + t
                of_a[i, lane] = words[g, t], words[g + 8, t], words[g, t + 4], words[g + 8, t + 4]
                of_b[i, lane] = columns[g, t], columns[g, t + 4]
                of_d[i, lane] = *d[g, 2 * t:2 * t + 2], *d[g + 8, 2 * t:2 * t + 2]
    seen = None
    for order in ORDERS:
        bench.device.order = order
        target = bench.up(of_d)
        bench.run("products", 1, 32 * warps, bench.up(of_a), bench.up(of_b), target, np.int32(n))
        found = bench.down(target, np.zeros_like(of_d, np.int32))
        assert seen is None or np.array_equal(found, seen)
        seen = found
    lanes = seen.reshape(n, warps, 8, 4, 2, 2).transpose(0, 1, 4, 2, 3, 5).reshape(n, warps, 16, 8)
    assert np.array_equal(lanes, want.astype(np.int32))


def test_products_of_f16_by_a_warp(bench):
    """Lanes hold what PTX documents for mma.m16n8k16 with .f16: lane 4 g + t has the pairs t of rows g and g + 8 of a,
    then the pairs t + 4; of column g of b the pairs t and t + 4; of the result as with integers."""
    rng, warps = np.random.default_rng(9), 2
    a, b = (rng.integers(-64, 65, (warps, *of)) / 16 for of in ((16, 16), (16, 8)))     # sums are exact
    c = rng.integers(-8, 9, (warps, 16, 8)).astype(np.float32)
    a[0, 0, 0], a[0, 3, 5], b[0, 5, 2] = 2.0**-24, np.inf, 65504       # the least and the largest of f16
    of_a, of_b = (np.zeros((32 * warps, k), np.uint32) for k in (4, 2))
    of_d = np.zeros((32 * warps, 4), np.float32)
    for warp in range(warps):
        words, columns = (np.ascontiguousarray(m.astype(np.float16)).view(np.uint32) for m in (a[warp], b[warp].T))
        for g, t in np.ndindex(8, 4):
            lane = 32 * warp + 4 * g + t
            of_a[lane] = words[g, t], words[g + 8, t], words[g, t + 4], words[g + 8, t + 4]
            of_b[lane] = columns[g, t], columns[g, t + 4]
            of_d[lane] = *c[warp, g, 2 * t:2 * t + 2], *c[warp, g + 8, 2 * t:2 * t + 2]
    with np.errstate(invalid="ignore"):
        want = (c + a.astype(np.float32) @ b.astype(np.float32)).astype(np.float32)
    for order in ORDERS:
        bench.device.order = order
        target = bench.up(of_d)
        bench.run("products_of_halves", 1, 32 * warps, bench.up(of_a), bench.up(of_b), target)
        found = bench.down(target, np.zeros_like(of_d))
        found = found.reshape(warps, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(warps, 16, 8)
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_two_f32_become_a_word_of_f16(bench):
    x = np.float32([1.0, -2.5, 65504, 65520, 2.0**-25, 3 * 2.0**-25, np.nan, -np.inf])
    target = bench.up(np.zeros(4, np.uint32))
    bench.run("pairs_of_halves", 1, 4, bench.up(x), target)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(bench.down(target, np.zeros(4, np.uint32)).view(np.float16), x.astype(np.float16))


def test_copies_to_shared_memory_are_there_when_they_were_waited_for(bench):
    """And not before; what is not copied whole is 0."""
    x = np.arange(256, dtype=np.float32)
    want = np.roll(np.where(x < 160, x, 0), -4)
    for order in ORDERS:
        bench.device.order = order
        for wait in (2, 1):
            target = bench.up(np.zeros(256, np.float32))
            bench.run("copies", 1, 64, bench.up(x), target, np.int32(wait), np.int32(40), np.int32(0),
                      shared=1024)
            found = bench.down(target, np.zeros(256, np.float32))
            assert np.array_equal(found, want) if wait == 2 else (found == -1).any()


@pytest.mark.parametrize(("to_global", "wait", "shift", "said"), [
    (0, 0, 0, "has not waited for its copies"), (1, 2, 0, "to memory that is not shared"),
    (0, 2, 4, "a misaligned address of cp.async")])
def test_copies_to_shared_memory_that_are_wrong_are_errors(bench, to_global, wait, shift, said):
    from ggml_sched.backends.cupy.device import DeviceError
    x, target = bench.up(np.zeros(260, np.float32)), bench.up(np.zeros(256, np.float32))
    for _ in range(2):                  # what was not waited for does not stay
        with pytest.raises(DeviceError, match=said):
            bench.run("copies", 1, 64, np.uint64(x.ptr + shift), target, np.int32(wait), np.int32(64),
                      np.int32(to_global), shared=1024)
            bench.down(target, np.zeros(256, np.float32))


def test_a_product_of_half_a_warp_is_an_error(bench):
    from ggml_sched.backends.cupy.device import DeviceError
    target = bench.up(np.zeros(32, np.int32))
    for threads, said in ((32, "divergent barrier"), (16, "mma.sync.aligned without all lanes")):
        with pytest.raises(DeviceError, match=said):
            bench.run("half_a_product", 1, threads, target)
            bench.down(target, np.zeros(32, np.int32))


def test_counters_that_wrap_count_each_thread_once(bench):
    """atomicInc begins again at 0 behind its limit: the counter of a launch is 0 again at its end."""
    for order in ORDERS:
        bench.device.order = order
        count, seen = bench.up(np.zeros(1, np.uint32)), bench.up(np.zeros(64, np.uint32))
        bench.run("turns", 2, 128, count, seen, np.uint32(63))
        assert bench.down(count, np.zeros(1, np.uint32))[0] == 0
        assert (bench.down(seen, np.zeros(64, np.uint32)) == 4).all()


@pytest.mark.parametrize("source", [
    "extern \"C\" __global__ void f(float* y) { atomicMax(y, 1.0f); }",
    "extern \"C\" __global__ void f(int* y) { *y = undeclared; }",
    "extern \"C\" __global__ void f(int* y) {\n#include \"missing.cuh\"\n }"])
def test_what_does_not_compile_is_an_error_with_its_place(tmp_path, source):
    from ggml_sched.backends.cupy.device import DeviceError
    with pytest.raises(DeviceError, match=r"probe.cu does not compile for the host: [\s\S]*(probe\.cu|float)|missing"):
        Bench(source, tmp_path).function("f")
