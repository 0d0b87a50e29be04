// Rearranges the blocks of weights in place: repack.py defines the order.
#include "common.cuh"

enum { THREADS = 256, WORDS = 8 };          // words of 4 bytes that a thread moves between two barriers

// The sizes of the fields of a block, in ggml's order; 0 after the last.
struct Fields {
    int32_t size[4];
};

// The offset in ggml's order of byte i of a unit, `n` blocks of `block` bytes that are rearranged together.
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

// Brings whole units from ggml's order into the other one.  A block of threads reads a few units into registers, and
// writes them when all of its threads have read.
extern "C" __global__ void __launch_bounds__(THREADS) pack(uint8_t* data, int64_t units, int n, int block,
                                                           Fields fields) {
    await_inputs();
    const int unit = n * block, words = unit / 4, together = THREADS * WORDS / words;
    for (int64_t first = (int64_t)blockIdx.x * together; first < units; first += (int64_t)gridDim.x * together) {
        const int count = words * (int)(units - first < together ? units - first : together);
        uint8_t* const p = data + first * unit;
        uint32_t found[WORDS];
        UNROLL
        for (int k = 0; k < WORDS; ++k) {
            const int i = threadIdx.x + k * THREADS;
            found[k] = 0;
            if (i >= count) continue;
            const uint8_t* from = p + i / words * unit;
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
