"""CUDA's intrinsics on the host do what a GPU's do: shuffles, votes, conversions, bytes in words, atomics."""

from __future__ import annotations

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
    y += i * 6;
    y[0] = __shfl_sync(ALL, v, 3, width);
    y[1] = __shfl_xor_sync(ALL, v, 1, width);
    y[2] = __shfl_down_sync(ALL, v, 2, width);
    y[3] = __shfl_up_sync(ALL, v, 2, width);
    y[4] = sum_of_warp(v);
    y[5] = __shfl_sync(ALL, v, i + 1, width);
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
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}
KERNEL(votes)(unsigned* y, int n) {
    const int i = threadIdx.x;
    y += i * 9;
    y[0] = __ballot_sync(ALL, i % 3 == 0);
    y[1] = (unsigned)__any_sync(ALL, i % 32 == n);
    y[2] = (unsigned)__all_sync(ALL, i % 32 != n);
    y[3] = (unsigned)__syncthreads_count(i < n);
    y[4] = (unsigned)__syncthreads_or(i == n);
    y[5] = (unsigned)__syncthreads_and(i != n);
    y[6] = __reduce_add_sync(ALL, (unsigned)i);
    y[7] = (unsigned)__reduce_max_sync(ALL, -i);
    y[8] = (unsigned)__reduce_min_sync(ALL, -i);
}
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
    y += i * 15;
    y[0] = __dp4a(a[i], b[i], 7);
    y[1] = (int)__dp4a(u, v, 7u);
    y[2] = (int)__vsub4(u, v);
    y[3] = (int)__vadd4(u, v);
    y[4] = (int)__vsubss4(u, v);
    y[5] = (int)__byte_perm(u, v, 0x5140);
    y[6] = __popc(u);
    y[7] = __clz(a[i]);
    y[8] = __ffs(a[i]);
    y[9] = (int)__funnelshift_l(u, v, 5);
    y[10] = (int)__funnelshift_r(u, v, 5);
    y[11] = (int)__umulhi(u, v);
    y[12] = __mulhi(a[i], b[i]);
    y[13] = (int)__vcmpeq4(u, v);
    y[14] = (int)__byte_perm(u, v, 0x8c93);
}
KERNEL(rounding)(const float* x, int* y) {
    const int i = threadIdx.x;
    y += i * 6;
    y[0] = __float2int_rn(x[i]);
    y[1] = __float2int_rz(x[i]);
    y[2] = __float2int_rd(x[i]);
    y[3] = __float2int_ru(x[i]);
    y[4] = (int)__float2uint_rn(x[i]);
    y[5] = __float_as_int(__int_as_float(__float_as_int(x[i])));
}
KERNEL(atomics)(int* sum, int* most, int* first, unsigned* bits, unsigned long long* big) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(sum, i);
    atomicMax(most, i);
    atomicCAS(first, 0, i + 1);
    atomicOr(bits, 1u << (i & 31));
    atomicAdd(big, 1ull << 32);
}
KERNEL(least)(float* y, const float* x) {
    const float inf = __int_as_float(0x7f800000), nan = __int_as_float(0x7fffffff);
    y[0] = min(x[0], 2.0f); y[1] = max(x[0], 2.0f); y[2] = max(nan, 1.0f); y[3] = min(-inf, nan);
    y[4] = (float)min(3LL, 5); y[5] = (float)max((unsigned char)3, 5u); y[6] = rsqrtf(4.0f); y[7] = __expf(0.0f);
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
    found = results(bench, "shuffles", 64, (64, 6), np.int32, np.int32(width))
    i = np.arange(64)
    base, at, v = i // width * width, i % width, 100 + i
    assert np.array_equal(found[:, 0], 100 + base + 3)
    assert np.array_equal(found[:, 1], 100 + (i ^ 1))
    assert np.array_equal(found[:, 2], np.where(at + 2 < width, v + 2, v))
    assert np.array_equal(found[:, 3], np.where(at >= 2, v - 2, v))
    assert np.array_equal(found[:, 4], v.reshape(2, 32).sum(1).repeat(32))
    assert np.array_equal(found[:, 5], 100 + base + (i + 1) % width)


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


@pytest.mark.parametrize("n", [5, 40])
def test_votes(bench, n):
    found = results(bench, "votes", 64, (64, 9), np.uint32, np.int32(n))
    i = np.arange(64)
    for warp in (0, 1):
        lanes = i[warp * 32:warp * 32 + 32]
        rows = found[lanes]
        assert (rows[:, 0] == sum(1 << (lane % 32) for lane in lanes if lane % 3 == 0)).all()
        assert (rows[:, 1] == (n < 32)).all() and (rows[:, 2] == (n >= 32)).all()
        assert (rows[:, 6] == lanes.sum()).all()
        assert (rows[:, 7].view(np.int32) == -lanes[0]).all() and (rows[:, 8].view(np.int32) == -lanes[-1]).all()
    assert (found[:, 3] == n).all() and (found[:, 4] == 1).all() and (found[:, 5] == 0).all()


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
    found = results(bench, "words", 64, (64, 15), np.int32, bench.up(a), bench.up(b), first=True)
    sa, sb = (v.view(np.int8).reshape(64, 4).astype(np.int64) for v in (a, b))
    ua, ub = (v.view(np.uint8).reshape(64, 4).astype(np.int64) for v in (a, b))
    wa, wb = a.view(np.uint32).astype(np.uint64), b.view(np.uint32).astype(np.uint64)

    def word(v):
        return np.ascontiguousarray(v.astype(np.uint8)).view(np.int32).reshape(64)

    eight = np.concatenate([ua, ub], 1)
    expected = [
        (sa * sb).sum(1) + 7, (ua * ub).sum(1) + 7, word(ua - ub), word(ua + ub), word(np.clip(sa - sb, -128, 127)),
        word(eight[:, [0, 4, 1, 5]]),
        [bin(v).count("1") for v in wa], [32 - int(v).bit_length() for v in wa],
        [(int(v) & -int(v)).bit_length() for v in wa],
        ((wb << np.uint64(32) | wa) << np.uint64(5) >> np.uint64(32)).astype(np.uint32),
        ((wb << np.uint64(32) | wa) >> np.uint64(5)).astype(np.uint32), (wa * wb >> np.uint64(32)).astype(np.uint32),
        a.astype(np.int64) * b >> 32, word((ua == ub) * 255),
        word(np.stack([ua[:, 3], np.where(ua[:, 1] > 127, 255, 0), np.where(ub[:, 0] > 127, 255, 0),
                       np.where(ua[:, 0] > 127, 255, 0)], 1))]
    for i, want in enumerate(expected):
        want = np.asarray(want)
        assert np.array_equal(found[:, i], want.astype(np.int64).astype(np.uint32).view(np.int32)), i


def test_floats_become_integers(bench):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4, -2.6, 3e9, -3e9, np.inf, -np.inf, np.nan], np.float32)
    found = results(bench, "rounding", len(x), (len(x), 6), np.int32, bench.up(x), first=True)
    for i, rounded in enumerate((np.rint, np.trunc, np.floor, np.ceil)):
        want = np.nan_to_num(np.clip(rounded(x.astype(np.float64)), -2**31, 2**31 - 1), nan=0)
        assert np.array_equal(found[:, i], want.astype(np.int32))
    want = np.nan_to_num(np.clip(np.rint(x.astype(np.float64)), 0, 2**32 - 1), nan=0)
    assert np.array_equal(found[:, 4].view(np.uint32), want.astype(np.uint32))
    assert np.array_equal(found[:, 5], x.view(np.int32))


def test_atomics_on_integers(bench):
    for order in ORDERS:
        bench.device.order = order
        total, most, first = (bench.up(np.zeros(1, np.int32)) for _ in range(3))
        bits, big = bench.up(np.zeros(1, np.uint32)), bench.up(np.zeros(1, np.uint64))
        bench.run("atomics", 4, 64, total, most, first, bits, big)
        numbers = [int(bench.down(memory, np.zeros(1, np.int32))[0]) for memory in (total, most, first)]
        assert numbers[:2] == [255 * 128, 255] and 1 <= numbers[2] <= 256
        assert order or numbers[2] == 1
        assert bench.down(bits, np.zeros(1, np.uint32))[0] == 0xffffffff
        assert bench.down(big, np.zeros(1, np.uint64))[0] == 256 << 32


def test_minimum_and_maximum_of_mixed_types(bench):
    found = results(bench, "least", 1, 8, np.float32, bench.up(np.array([3], np.float32)))
    assert found.tolist() == [2, 3, 1, -np.inf, 3, 5, 0.5, 1]


@pytest.mark.parametrize("source", [
    "extern \"C\" __global__ void f(float* y) { atomicAdd(y, 1.0f); }",
    "extern \"C\" __global__ void f(int* y) { *y = undeclared; }",
    "extern \"C\" __global__ void f(int* y) {\n#include \"missing.cuh\"\n }"])
def test_what_does_not_compile_is_an_error_with_its_place(tmp_path, source):
    from ggml_sched.backends.cupy.device import DeviceError
    with pytest.raises(DeviceError, match=r"probe.cu does not compile for the host: [\s\S]*(probe\.cu|float)|missing"):
        Bench(source, tmp_path).module.function("f")
