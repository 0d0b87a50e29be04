// Operations among threads of a block: barriers, shuffles, votes, atomics on integers.
//
// Every wait records its line: threads that wait for each other at different lines are an error.  A lane outside the
// mask yields all ones (a NaN), where the hardware yields an undefined value.  Atomics are plain, since one thread runs
// at a time; there are none on floats, whose sums would depend on the order of threads.
#pragma once
#include <type_traits>

#include "host_fibers.h"

static inline void __syncthreads(int line = __builtin_LINE()) { host_cuda::wait_block(line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    host_cuda::wait_warp(mask, line, 0);
}
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
template <class T> struct same { typedef T type; };     // its argument decides no template parameter

}  // namespace host_cuda

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, int line = __builtin_LINE()) {
    const int me = host_cuda::current % 32, from = me ^ bits;
    return host_cuda::shuffle(mask, value, (from & ~(width - 1)) > (me & ~(width - 1)) ? me : from, line);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    host_cuda::wait_warp(mask, line, predicate != 0);
    return host_cuda::warps[host_cuda::current / 32].ballot[host_cuda::current % 32];
}

#define HOST_CUDA_VALUE typename host_cuda::same<T>::type
template <class T> static inline T atomicCAS(T* p, HOST_CUDA_VALUE expected, HOST_CUDA_VALUE value) {
    static_assert(std::is_integral_v<T>, "no atomics on floats: the order of threads shows");
    const T old = *p;
    if (old == expected) *p = value;
    return old;
}
template <class T> static inline T atomicMax(T* p, HOST_CUDA_VALUE value) {
    static_assert(std::is_integral_v<T>, "no atomics on floats: the order of threads shows");
    const T old = *p;
    if (old < value) *p = value;
    return old;
}
static inline unsigned atomicInc(unsigned* p, unsigned most) {
    const unsigned old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}
#undef HOST_CUDA_VALUE

// Blocks run one after the other here: what a thread has written all threads see.
static inline void __threadfence() {}
