// Rearranges the blocks of weights in place: repack.py defines the order.
#include "common.cuh"

enum { THREADS = 256, WORDS = 8 };          // words of 4 bytes that a thread moves between two barriers

// The sizes of the fields of a block, in ggml's order; 0 after the last.
struct Fields {
    int32_t size[4];
};

// Where byte i of a rearranged bundle is in ggml's order.  A bundle: n blocks of `block` bytes, rearranged together.
__device__ __forceinline__ int source_of(int i, int n, int block, const Fields& fields) {
    int start = 0;
    UNROLL
    for (int f = 0; f < 4; ++f) {
        const int size = fields.size[f];
        if (size == 0) break;
        const int within = i - n * start;
        if (within < n * size) return within / size * block + start + within % size;
        start += size;
    }
    return 0;
}

// Rearranges bundles of n blocks of `block` bytes, which are in ggml's order.  A block of threads reads a few bundles
// into registers, and writes them when all of its threads have read.
extern "C" __global__ void __launch_bounds__(THREADS) pack(uint8_t* data, int64_t bundles, int n, int block,
                                                           Fields fields) {
    await_inputs();
    const int bundle = n * block, words = bundle / 4, together = THREADS * WORDS / words;
    for (int64_t first = (int64_t)blockIdx.x * together; first < bundles; first += (int64_t)gridDim.x * together) {
        const int count = words * (int)(bundles - first < together ? bundles - first : together);
        uint8_t* const p = data + first * bundle;
        uint32_t found[WORDS];
        UNROLL
        for (int k = 0; k < WORDS; ++k) {
            const int i = threadIdx.x + k * THREADS;
            found[k] = 0;
            if (i >= count) continue;
            const uint8_t* from = p + i / words * bundle;
            UNROLL
            for (int j = 0; j < 4; ++j)
                found[k] |= (uint32_t)from[source_of(4 * (i % words) + j, n, block, fields)] << 8 * j;
        }
        __syncthreads();
        UNROLL
        for (int k = 0; k < WORDS; ++k) {
            const int i = threadIdx.x + k * THREADS;
            if (i < count) ((uint32_t*)p)[i] = found[k];
        }
    }
}
