// What all kernels share: strided views, types and their conversions, reductions of warps and blocks, the error word.
//
// The kernels are compiled for a GPU by NVRTC.  Tests compile the same source with the host's C++ compiler, over a shim
// that defines HOST_CUDA, and run it without a GPU.
// Invariants: elements are counted in 64 bits; results do not depend on the order in which threads run.
#pragma once

#ifndef HOST_CUDA
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define INFINITY __int_as_float(0x7f800000)
#define UNROLL _Pragma("unroll")
#define DYNAMIC_SHARED(type, name)                            \
    extern __shared__ __align__(16) unsigned char dynamic_[]; \
    type* name = reinterpret_cast<type*>(dynamic_)
__device__ __forceinline__ float __half_bits_to_float(unsigned short h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ unsigned short __float_to_half_bits(float f) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#else
#define UNROLL
#endif

#define ALL_LANES 0xffffffffu

// -- launches that overlap --------------------------------------------------------------------------------------------

// With OVERLAP (from sm_90 on) a launch may begin before earlier launches have ended: they may still write what it
// reads, or read what it writes.  So all threads of a kernel begin with await_inputs(), which waits for those launches.
// Before that call a kernel only prefetches, by read_ahead, into the L2 cache, which all multiprocessors share and all
// writes go to.
// await_inputs() also lets the next launch begin, as soon as all blocks of this launch have called it.
// An earlier launch may write data during this one, so the compiler must not treat them as constant: no pointer is
// __restrict__ (loads might be moved to before the wait), and no load goes through the path for constants (__ldg).
#ifdef HOST_CUDA
#define RESTRICT __restrict__
#define OVERLAPS 1
template <class T>
__device__ __forceinline__ T load_input(const T* p) { return __ldg(p); }
__device__ __forceinline__ void await_inputs() { host_cuda::await_inputs(); }
__device__ __forceinline__ void read_ahead(const void* p) { host_cuda::read_ahead(p); }
#elif defined(OVERLAP)
#define RESTRICT
#define OVERLAPS 1
template <class T>
__device__ __forceinline__ T load_input(const T* p) { return *p; }
__device__ __forceinline__ void await_inputs() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void read_ahead(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
#define RESTRICT __restrict__
#define OVERLAPS 0
template <class T>
__device__ __forceinline__ T load_input(const T* p) { return __ldg(p); }
__device__ __forceinline__ void await_inputs() {}
__device__ __forceinline__ void read_ahead(const void*) {}
#endif

// -- views ------------------------------------------------------------------------------------------------------------

// The layout of a tensor in memory: extents, and strides in bytes, innermost first.  Passed by value, 72 bytes.
struct View {
    char* p;
    int64_t ne[4];
    int64_t nb[4];
};

struct Index {
    int64_t i0, i1, i2, i3;
};

__device__ __forceinline__ int64_t elements(const View& t) { return t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3]; }

__device__ __forceinline__ char* at(const View& t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    return t.p + i0 * t.nb[0] + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
}

__device__ __forceinline__ char* at(const View& t, const Index& k) { return at(t, k.i0, k.i1, k.i2, k.i3); }

__device__ __forceinline__ bool narrow(int64_t bits) { return (uint64_t)bits >> 32 == 0; }

// The four indices of element number i, innermost first.  Divisions are slow, those of 64 bits most.  The launching
// code describes dense tensors as one long row, which needs no division.
__device__ __forceinline__ Index split(const View& t, int64_t i) {
    Index k;
    if (i < t.ne[0]) {
        k.i0 = i;
        k.i1 = k.i2 = k.i3 = 0;
        return k;
    }
    if (narrow(i | t.ne[0] | t.ne[1] | t.ne[2])) {
        uint32_t v = (uint32_t)i;
        const uint32_t n0 = (uint32_t)t.ne[0], n1 = (uint32_t)t.ne[1], n2 = (uint32_t)t.ne[2];
        const uint32_t r1 = v / n0;
        k.i0 = v - r1 * n0;
        const uint32_t r2 = r1 / n1;
        k.i1 = r1 - r2 * n1;
        const uint32_t r3 = r2 / n2;
        k.i2 = r2 - r3 * n2;
        k.i3 = r3;
        return k;
    }
    k.i0 = i % t.ne[0];
    i /= t.ne[0];
    k.i1 = i % t.ne[1];
    i /= t.ne[1];
    k.i2 = i % t.ne[2];
    k.i3 = i / t.ne[2];
    return k;
}

// The indices of the first element of row number i; rows are counted over ne[1], ne[2], ne[3].
__device__ __forceinline__ Index split_row(const View& t, int64_t i) {
    View rows = t;
    rows.ne[0] = 1;
    return split(rows, i);
}

// i modulo n: a source that is smaller than the result repeats, as in ggml.
__device__ __forceinline__ int64_t wrap(int64_t i, int64_t n) {
    if (i < n) return i;
    return narrow(i | n) ? (int64_t)((uint32_t)i % (uint32_t)n) : i % n;
}

__device__ __forceinline__ Index wrap(const Index& k, const View& t) {
    Index r;
    r.i0 = wrap(k.i0, t.ne[0]);
    r.i1 = wrap(k.i1, t.ne[1]);
    r.i2 = wrap(k.i2, t.ne[2]);
    r.i3 = wrap(k.i3, t.ne[3]);
    return r;
}

// A loop over those of n elements that this thread computes: a grid may have fewer threads than there are elements.
#define FOR_EACH(i, n)                                                                                          \
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, i##_step = (int64_t)gridDim.x * blockDim.x; \
         i < (n); i += i##_step)

// A loop over those of n rows that this block computes; all threads of a block run it equally often, as barriers
// require.
#define FOR_EACH_ROW(i, n) for (int64_t i = blockIdx.x; i < (n); i += gridDim.x)

// -- types ------------------------------------------------------------------------------------------------------------

// The types of elements, with ggml's numbers.
enum Kind {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, I32 = 26, I64 = 27, BF16 = 30, MXFP4 = 39
};

// A product and a sum that the compiler does not fuse, so that each is rounded: for results that must equal the CPU's
// to the bit.
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }

__device__ __forceinline__ float bf16_to_float(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }

// Rounds to nearest, ties to even; a NaN becomes a quiet NaN.
__device__ __forceinline__ uint16_t float_to_bf16(float f) {
    const uint32_t bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + (bits >> 16 & 1) + 0x7fffu) >> 16);
}

// Converts as x86, and so the CPU's kernels, do: a value outside of int32, or NaN, becomes the least int32.
__device__ __forceinline__ int32_t float_to_int(float f) {
    return f >= -2147483648.0f && f < 2147483648.0f ? (int32_t)f : (int32_t)0x80000000u;
}

// The element at p, of a type without blocks (f32, f16, bf16, i32), as f32.
__device__ __forceinline__ float load_plain(const char* p, int kind) {
    if (kind == F32) return *(const float*)p;
    if (kind == F16) return __half_bits_to_float(*(const uint16_t*)p);
    if (kind == BF16) return bf16_to_float(*(const uint16_t*)p);
    return (float)*(const int32_t*)p;
}

__device__ __forceinline__ void store_plain(char* p, int kind, float v) {
    if (kind == F32) *(float*)p = v;
    else if (kind == F16) *(uint16_t*)p = __float_to_half_bits(v);
    else if (kind == BF16) *(uint16_t*)p = float_to_bf16(v);
    else *(int32_t*)p = float_to_int(v);
}

// The maximum and minimum as NumPy has them: if one of the two is NaN, the result is NaN.
__device__ __forceinline__ float max_nan(float a, float b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ float min_nan(float a, float b) { return a < b || a != a ? a : b; }

// -- reductions -------------------------------------------------------------------------------------------------------

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
    static __device__ __forceinline__ float none() { return 0.0f; }
};
struct Max {
    static __device__ __forceinline__ float of(float a, float b) { return max_nan(a, b); }
    static __device__ __forceinline__ float none() { return -INFINITY; }
};
struct SumDouble {
    static __device__ __forceinline__ double of(double a, double b) { return a + b; }
    static __device__ __forceinline__ double none() { return 0.0; }
};
struct Any {
    static __device__ __forceinline__ int of(int a, int b) { return a | b; }
    static __device__ __forceinline__ int none() { return 0; }
};

// Combines the values of the 32 lanes of a warp; every lane gets the result.
template <class Op, class T>
__device__ __forceinline__ T warp_reduce(T v) {
    UNROLL
    for (int m = 16; m > 0; m >>= 1) v = Op::of(v, __shfl_xor_sync(ALL_LANES, v, m));
    return v;
}

// Combines the values of all threads of a block; every thread gets the result.  blockDim.x is a multiple of 32; `part`
// has room for 32 values in shared memory.
template <class Op, class T>
__device__ __forceinline__ T block_reduce(T v, T* part) {
    v = warp_reduce<Op>(v);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockDim.x >> 5;
    __syncthreads();                       // threads may still read `part` for the previous call
    if (lane == 0) part[warp] = v;
    __syncthreads();
    return warp_reduce<Op>(lane < n ? part[lane] : Op::none());
}

// -- faults -----------------------------------------------------------------------------------------------------------

// The error word: an invalid value in the data, such as an id out of range.  Kernels cannot raise, so the first fault
// is kept here until the host reads and clears it.
struct Fault {
    int32_t position;                      // the number of the node (fault.py), plus one; 0: nothing is wrong
    int32_t source;                        // index of the node's source that has the value
    int64_t value, limit;                  // the value, which should be at least 0 and less than `limit`
};

__device__ __forceinline__ void fault(Fault* word, int position, int source, int64_t value, int64_t limit) {
    if (atomicCAS(&word->position, 0, position + 1) != 0) return;
    word->source = source;
    word->value = value;
    word->limit = limit;
}

#include "elements.cuh"
