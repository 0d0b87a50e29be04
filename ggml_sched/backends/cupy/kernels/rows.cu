// Rows of a table that ids name: GET_ROWS, SET_ROWS, ADD_ID.
//
// An id outside the table sets the error word, and nothing is written for it.  If several rows of SET_ROWS have the
// same id, the last one is written, as on the CPU, which writes the rows in order.
#include "common.cuh"
#include "quantize.cuh"

// d[row] = a[ids[row]], as f32; a table of i32 stays i32.
extern "C" __global__ void __launch_bounds__(256) get_rows(View a, View ids, View d, int64_t n, int kind, Fault* word,
                                                           int position) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const int64_t row = *(const int32_t*)at(ids, k.i1, k.i2, k.i3, 0);
        if (row < 0 || row >= a.ne[1]) {
            if (k.i0 == 0) fault(word, position, 1, row, a.ne[1]);
            continue;
        }
        const Index from = {k.i0, row, k.i2, k.i3};
        if (kind == I32) *(int32_t*)at(d, k) = *(const int32_t*)at(a, from);
        else *(float*)at(d, k) = load_view(a, kind, from);
    }
}

// The id of row (i1, i2, i3), i64 where `wide`, else i32; ids repeat over the outer two extents.
__device__ __forceinline__ int64_t number_at(const View& ids, int64_t i1, int64_t i2, int64_t i3, int wide) {
    const char* p = at(ids, i1, wrap(i2, ids.ne[1]), wrap(i3, ids.ne[2]), 0);
    return wide ? *(const int64_t*)p : (int64_t)*(const int32_t*)p;
}

// d[ids[row]] = b[row] in the type of d.  A block for each row first looks for a later row with the same id.
extern "C" __global__ void __launch_bounds__(1024) set_rows(View b, View ids, View d, int64_t rows, int kind, int wide,
                                                            Fault* word, int position) {
    await_inputs();
    __shared__ int part[32];
    FOR_EACH_ROW(r, rows) {
        const Index k = split_row(b, r);
        const int64_t row = number_at(ids, k.i1, k.i2, k.i3, wide);
        int again = 0;
        for (int64_t j = k.i1 + 1 + threadIdx.x; j < b.ne[1]; j += blockDim.x)
            again |= number_at(ids, j, k.i2, k.i3, wide) == row;
        again = block_reduce<Any>(again, part);
        if (row < 0 || row >= d.ne[1]) {
            if (threadIdx.x == 0) fault(word, position, 1, row, d.ne[1]);
            continue;
        }
        if (again) continue;
        const char* from = at(b, 0, k.i1, k.i2, k.i3);
        char* to = at(d, 0, row, k.i2, k.i3);
        if (block_elements(kind) == 1) {
            for (int64_t i = threadIdx.x; i < b.ne[0]; i += blockDim.x)
                store_plain(to + i * d.nb[0], kind, *(const float*)(from + i * b.nb[0]));
        } else {
            const int lane = threadIdx.x & 31;
            for (int64_t i = threadIdx.x >> 5; i < b.ne[0] / 32; i += blockDim.x >> 5)
                quantize_block(*(const float*)(from + (i * 32 + lane) * b.nb[0]), kind, to + i * d.nb[0], lane);
        }
    }
}

// SET_ROWS of many rows, where looking for later rows would be slow.  Scratch memory `owner` has a number for each row
// of d.  Three launches: claim_rows with `forget` sets the numbers of the rows that ids name to -1; claim_rows without
// it sets each to the last row of b with that id; write_owned writes these rows of b.
extern "C" __global__ void __launch_bounds__(256) claim_rows(View b, View ids, View d, int64_t rows, int wide,
                                                             int forget, int32_t* owner, Fault* word, int position) {
    await_inputs();
    FOR_EACH(r, rows) {
        const Index k = split_row(b, r);
        const int64_t row = number_at(ids, k.i1, k.i2, k.i3, wide);
        if (row < 0 || row >= d.ne[1]) {
            fault(word, position, 1, row, d.ne[1]);
            continue;
        }
        int32_t* const to = owner + (k.i3 * d.ne[2] + k.i2) * d.ne[1] + row;
        if (forget) *to = -1;
        else atomicMax(to, (int32_t)k.i1);
    }
}

// Writes the rows of b that `owner` names.  A thread writes an element; of a quantised type a warp writes a block.
extern "C" __global__ void __launch_bounds__(256) write_owned(View b, View ids, View d, int64_t n, int kind, int wide,
                                                              const int32_t* owner) {
    await_inputs();
    const int lane = threadIdx.x & 31;
    const bool blocks = block_elements(kind) != 1;
    FOR_EACH(i, n) {
        const Index k = split(b, i);
        const int64_t row = number_at(ids, k.i1, k.i2, k.i3, wide);
        if (row < 0 || row >= d.ne[1]) continue;
        if (owner[(k.i3 * d.ne[2] + k.i2) * d.ne[1] + row] != (int32_t)k.i1) continue;
        const float v = *(const float*)at(b, k);
        if (blocks) quantize_block(v, kind, at(d, k.i0 / 32, row, k.i2, k.i3), lane);
        else store_plain(at(d, k.i0, row, k.i2, k.i3), kind, v);
    }
}

// d = a + b[ids].
extern "C" __global__ void __launch_bounds__(256) add_id(View a, View b, View ids, View d, int64_t n, Fault* word,
                                                         int position) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const int64_t row = *(const int32_t*)at(ids, k.i1, k.i2, 0, 0);
        if (row < 0 || row >= b.ne[1]) {
            if (k.i0 == 0) fault(word, position, 2, row, b.ne[1]);
            continue;
        }
        *(float*)at(d, k) = *(const float*)at(a, k) + *(const float*)at(b, k.i0, row, 0, 0);
    }
}
