// The weighted sum of experts; and what MUL_MAT_ID needs for matmul.cuh: a list of all (token, slot) pairs, ordered by
// the expert that each chose, and a table that divides the list into tiles of one expert each.  A pair is numbered
// token * ids.ne[0] + slot.
//
// Each expert has a warp.  In kernel `count` it counts the expert's pairs.  In kernel `place` it adds up the counts of
// the experts before, which is where the expert's pairs begin in the list, and writes them, ascending.  No result
// depends on the order in which warps run.
// Invariant: an id that names no expert is in no list, and sets the error word.
#include "common.cuh"

__device__ __forceinline__ int sum_lanes(int v) {
    UNROLL
    for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(ALL_LANES, v, m);
    return v;
}

__device__ __forceinline__ int id_of(const View& ids, int pair) {
    const int used = (int)ids.ne[0];
    return *(const int32_t*)at(ids, pair % used, pair / used, 0, 0);
}

extern "C" __global__ void __launch_bounds__(128) count(View ids, int32_t* RESTRICT counts, int n_pairs,
                                                       int n_experts, Fault* word, int position) {
    await_inputs();
    const int expert = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (expert >= n_experts) return;
    int n = 0;
    for (int i = lane; i < n_pairs; i += 32) {
        const int id = id_of(ids, i);
        n += id == expert;
        if (expert == 0 && (id < 0 || id >= n_experts)) fault(word, position, 2, id, n_experts);
    }
    n = sum_lanes(n);
    if (lane == 0) counts[expert] = n;
}

// Fills the list, `pairs`, and the table, `groups`: {expert, first, end, 0} for each tile, the pairs at positions
// first .. end - 1 of the list, at most `tile`.  The table has n_groups entries; those without a tile get expert -1.
extern "C" __global__ void __launch_bounds__(128) place(View ids, const int32_t* RESTRICT counts,
                                                       int32_t* RESTRICT pairs, int4* RESTRICT groups,
                                                       int n_pairs, int n_experts, int tile, int n_groups) {
    await_inputs();
    const int expert = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (expert >= n_experts) return;
    int before = 0, tiles = 0;
    for (int e = lane; e < expert; e += 32) {
        before += counts[e];
        tiles += (counts[e] + tile - 1) / tile;
    }
    before = sum_lanes(before);
    tiles = sum_lanes(tiles);
    const int n = counts[expert], own = (n + tile - 1) / tile;
    for (int t = lane; t < own; t += 32) {
        int4 g;
        g.x = expert;
        g.y = before + t * tile;
        g.z = t + 1 < own ? g.y + tile : before + n;
        g.w = 0;
        groups[tiles + t] = g;
    }
    if (expert == n_experts - 1) {
        for (int t = tiles + own + lane; t < n_groups; t += 32) {
            int4 g;
            g.x = -1;
            g.y = g.z = g.w = 0;
            groups[t] = g;
        }
    }
    for (int start = 0; start < n_pairs; start += 32) {
        const int i = start + lane;
        const bool mine = i < n_pairs && id_of(ids, i) == expert;
        const unsigned all = __ballot_sync(ALL_LANES, mine);
        if (mine) pairs[before + __popc(all & ((1u << lane) - 1))] = i;
        before += __popc(all);
    }
}

// d = the sum over x.ne[1] experts, from the first to the last, of their result x times their weight w, each product
// and sum rounded by itself; x [n, experts, tokens], w [1, experts, tokens], d [n, tokens].
extern "C" __global__ void __launch_bounds__(256) weighted_sum(View x, View w, View d, int64_t n) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        float sum = 0.0f;
        for (int64_t j = 0; j < x.ne[1]; ++j) {
            const float v = mul_rn(*(const float*)at(x, k.i0, j, k.i1, 0), *(const float*)at(w, 0, j, k.i1, 0));
            sum = j ? add_rn(sum, v) : v;
        }
        *(float*)at(d, k) = sum;
    }
}
