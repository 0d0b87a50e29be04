// CUDA C++ as host C++ (g++, C++17): put before a kernel source, which then is compiled as it stands.
//
// These files define the part of CUDA that NVRTC offers without headers and kernels may use: no float atomics, no
// clocks, no printf; and products of matrices by a warp and copies to shared memory that go on meanwhile, which are PTX
// in a source.  HOST_CUDA is defined, so that a source can keep PTX behind a wrapper.  Dynamic shared memory is
// `DYNAMIC_SHARED(type, name);` (for NVRTC the source defines that macro itself); arrays that are `__shared__` and
// dynamic shared memory begin each block full of ones (NaNs).
//
// Detected: barriers that not all threads reach, lanes that wait at different lines, wrong argument sizes; with
// AddressSanitizer accesses out of bounds, with UndefinedBehaviorSanitizer misaligned loads, shifts and overflows.
// A race shows as results that differ between thread orders.
#pragma once
#define HOST_CUDA 1
#define __host__
#define __device__ inline
#define __forceinline__
#define __noinline__
#define __constant__ __attribute__((unused))     // a source may add __device__, static or const
#define __shared__ static __attribute__((section("host_shared")))
#define __align__(n) alignas(n)
#define __grid_constant__
// Markers that compile.py finds in the preprocessed source, whose own macros are then expanded.
#define __global__
#define __launch_bounds__(...)

#include "host_blocks.h"
#include "host_math.h"
#include "host_mma.h"
#include "host_warp.h"

#include <stddef.h>

#include <utility>

#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(host_cuda::shared_memory)

namespace host_cuda {

template <class T> static inline char kind() {
    return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> ? 'i' : 's';
}
template <class... A> static inline int describe(void (*)(A...), unsigned* sizes, char* kinds) {
    const unsigned all_sizes[] = {static_cast<unsigned>(sizeof(A))..., 0};
    const char all_kinds[] = {kind<A>()..., 0};
    if (sizes) memcpy(sizes, all_sizes, sizeof...(A) * sizeof(unsigned));
    if (kinds) memcpy(kinds, all_kinds, sizeof...(A));
    return static_cast<int>(sizeof...(A));
}
template <class... A> struct Call {
    void (*kernel)(A...);
    const char* block;
    const unsigned* offsets;
};
template <class... A, size_t... I> static inline void call(const Call<A...>& c, std::index_sequence<I...>) {
    c.kernel(*reinterpret_cast<const std::remove_cv_t<A>*>(c.block + c.offsets[I])...);
}
template <class... A> static void begin(void* c) {
    call(*static_cast<Call<A...>*>(c), std::index_sequence_for<A...>{});
}
// sizes: x, y, z of the grid, then of the block.  Returns 0, or 1 and sets the message.
template <class... A> static inline int launch(
        void (*kernel)(A...), const unsigned* sizes, unsigned shared, const char* block, const unsigned* offsets,
        unsigned thread_order, unsigned seed) {
    Call<A...> c{kernel, block, offsets};
    entry = begin<A...>;
    entry_argument = &c;
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    order = thread_order;
    rng = seed;
    failed = false;
    become_stale();
    const int status = run_grid(shared);
    const uint64_t blocks = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
    return end_early(blocks * static_cast<uint64_t>(n_threads)) ? status : 1;
}

}  // namespace host_cuda

#define HOST_CUDA_PUBLIC extern "C" __attribute__((visibility("default")))
HOST_CUDA_PUBLIC const char* host_cuda_message() { return host_cuda::message; }
HOST_CUDA_PUBLIC unsigned long long host_cuda_switches() { return host_cuda::n_switches; }
// The next launch of this library may begin early: `pieces`, n of them, are the device's memory.
HOST_CUDA_PUBLIC void host_cuda_early(const host_cuda::Stale* pieces, unsigned n) { host_cuda::begin_early(pieces, n); }
// Behind the source, for each kernel: its launch, the sizes and kinds of its arguments, its bound on threads.
#define HOST_CUDA_EXPORT(kernel, bound)                                                                                \
    HOST_CUDA_PUBLIC int host_launch_##kernel(const unsigned* sizes, unsigned shared, const char* block,               \
                                              const unsigned* offsets, unsigned order, unsigned seed) {                \
        return host_cuda::launch(kernel, sizes, shared, block, offsets, order, seed);                                  \
    }                                                                                                                  \
    HOST_CUDA_PUBLIC int host_describe_##kernel(unsigned* sizes, char* kinds, int* threads) {                          \
        *threads = static_cast<int>(bound);                                                                            \
        return host_cuda::describe(kernel, sizes, kinds);                                                              \
    }
