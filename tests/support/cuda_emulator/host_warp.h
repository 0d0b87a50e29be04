// Operations among threads of a block: barriers, shuffles, votes, atomics on integers.
//
// Every wait records its line: threads that wait for each other at different lines are an error.  A lane outside the
// mask yields all ones (a NaN), where the hardware yields an undefined value.  Atomics are plain, since one thread runs
// at a time; there are none on floats, whose sums would depend on the order of threads.
#pragma once
#include "host_fibers.h"

[[gnu::unused]] static const int warpSize = 32;

static inline void __syncthreads(int line = __builtin_LINE()) { host_cuda::wait_block(line, 0); }
static inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    host_cuda::wait_block(line, predicate != 0);
    return static_cast<int>(host_cuda::block_votes);
}
static inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    return __syncthreads_count(predicate, line) != 0;
}
static inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
    return __syncthreads_count(predicate, line) == host_cuda::n_threads;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    host_cuda::wait_warp(mask, line, 0);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __trap() { host_cuda::stop("a thread trapped"); }

namespace host_cuda {

template <class T> static inline T shuffle(unsigned mask, T value, int from, int line) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "shuffles take values of 2, 4 or 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    wait_warp(mask, line, bits);
    const Warp& w = warps[current / 32];
    const unsigned members = w.members[current % 32];
    bits = from >= 0 && from < 32 && (members >> from & 1) ? w.seen[from] : ~static_cast<uint64_t>(0);
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline int lane() { return current % 32; }
static inline unsigned ballot(unsigned mask, int predicate, int line) {
    wait_warp(mask, line, predicate != 0);
    return warps[current / 32].ballot[lane()];
}
static inline unsigned members() { return warps[current / 32].members[lane()]; }
template <class T, class F> static inline T reduce(unsigned mask, T value, F f, int line) {
    wait_warp(mask, line, static_cast<unsigned>(value));
    const Warp& w = warps[current / 32];
    bool is_first = true;
    for (unsigned rest = members(); rest; rest &= rest - 1) {
        const T other = static_cast<T>(static_cast<unsigned>(w.seen[__builtin_ctz(rest)]));
        value = is_first ? other : f(value, other);
        is_first = false;
    }
    return value;
}
template <class T> struct same { typedef T type; };     // its argument decides no template parameter

}  // namespace host_cuda

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, int line = __builtin_LINE()) {
    return host_cuda::shuffle(mask, value, (host_cuda::lane() & ~(width - 1)) | (from & (width - 1)), line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    const int me = host_cuda::lane(), from = me ^ bits;
    return host_cuda::shuffle(mask, value, (from & ~(width - 1)) > (me & ~(width - 1)) ? me : from, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
    const int me = host_cuda::lane(), at = me & (width - 1);
    return host_cuda::shuffle(mask, value, at + static_cast<int>(by) < width ? me + static_cast<int>(by) : me, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, int line = __builtin_LINE()) {
    const int me = host_cuda::lane(), at = me & (width - 1);
    return host_cuda::shuffle(mask, value, at >= static_cast<int>(by) ? me - static_cast<int>(by) : me, line);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return host_cuda::ballot(mask, predicate, line);
}
static inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return host_cuda::ballot(mask, predicate, line) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return host_cuda::ballot(mask, predicate, line) == host_cuda::members();
}
template <class T> static inline T __reduce_add_sync(unsigned mask, T value, int line = __builtin_LINE()) {
    return host_cuda::reduce(mask, value, [](T a, T b) {
        return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }, line);
}
template <class T> static inline T __reduce_min_sync(unsigned mask, T value, int line = __builtin_LINE()) {
    return host_cuda::reduce(mask, value, [](T a, T b) { return a < b ? a : b; }, line);
}
template <class T> static inline T __reduce_max_sync(unsigned mask, T value, int line = __builtin_LINE()) {
    return host_cuda::reduce(mask, value, [](T a, T b) { return a > b ? a : b; }, line);
}

namespace host_cuda {
template <class T, class F> static inline T exchange(T* p, F f) {
    static_assert(static_cast<T>(0.5) == static_cast<T>(0), "no atomics on floats: the order of threads shows");
    const T old = *p;
    *p = f(old);
    return old;
}
}  // namespace host_cuda
#define HOST_CUDA_VALUE typename host_cuda::same<T>::type
template <class T> static inline T atomicExch(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T) { return value; });
}
template <class T> static inline T atomicCAS(T* p, HOST_CUDA_VALUE expected, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return old == expected ? value : old; });
}
template <class T> static inline T atomicAdd(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return static_cast<T>(old + value); });
}
template <class T> static inline T atomicMin(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return old < value ? old : value; });
}
template <class T> static inline T atomicMax(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return old > value ? old : value; });
}
template <class T> static inline T atomicOr(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return old | value; });
}
template <class T> static inline T atomicAnd(T* p, HOST_CUDA_VALUE value) {
    return host_cuda::exchange(p, [=](T old) { return old & value; });
}
#undef HOST_CUDA_VALUE
