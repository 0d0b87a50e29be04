// State space models: ssm_conv, ssm_scan.
//
// A state id outside the table sets the error word, and nothing is written for its sequence.
#include "common.cuh"

// d[channel, token, seq] = the sum over taps of inputs[token + tap, channel, seq] * filters[tap, channel], in order.
extern "C" __global__ void __launch_bounds__(256) ssm_conv(View inputs, View filters, View d, int64_t n) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        float sum = 0.0f;
        for (int64_t tap = 0; tap < filters.ne[0]; ++tap)
            sum += *(const float*)at(inputs, k.i1 + tap, k.i0, k.i2, 0) * *(const float*)at(filters, tap, k.i0, 0, 0);
        *(float*)at(d, k) = sum;
    }
}

// A warp computes one of n elements, each of a head of a sequence, for token after token; the element's d_state state
// values are divided among the lanes.  d has the outputs, in the order of x, and then the states after the last token
// [d_state, head_dim, n_head, n_seqs].
extern "C" __global__ void __launch_bounds__(256) ssm_scan(View s, View x, View dt, View a, View b, View c, View ids,
                                                           View d, int64_t n, Fault* word, int position) {
    await_inputs();
    const int lane = threadIdx.x & 31;
    const int64_t n_state = s.ne[0], n_dim = x.ne[0], n_head = x.ne[1], n_tokens = x.ne[2], together = n_head / b.ne[1];
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    for (int64_t w = first; w < n; w += (int64_t)gridDim.x * blockDim.x >> 5) {
        const int64_t i = w % n_dim, head = w / n_dim % n_head, seq = w / (n_dim * n_head);
        const int64_t from = *(const int32_t*)at(ids, seq, 0, 0, 0);
        if (from < 0 || from >= s.ne[3]) {
            if (lane == 0 && i == 0) fault(word, position, 6, from, s.ne[3]);
            continue;
        }
        char* const states = at(d, elements(x) + w * n_state, 0, 0, 0);
        for (int64_t j = lane; j < n_state; j += 32)
            *(float*)(states + j * d.nb[0]) = *(const float*)at(s, j, i, head, from);
        for (int64_t token = 0; token < n_tokens; ++token) {
            float step = *(const float*)at(dt, head, token, seq, 0);
            if (!(step > 20.0f)) step = log1pf(expf(step));           // softplus; above 20 it is the identity
            const float in = *(const float*)at(x, i, head, token, seq) * step;
            float sum = 0.0f;
            for (int64_t j = lane; j < n_state; j += 32) {
                float* const state = (float*)(states + j * d.nb[0]);
                const float decay = expf(step * *(const float*)at(a, a.ne[0] == 1 ? 0 : j, head, 0, 0));
                *state = *state * decay + in * *(const float*)at(b, j, head / together, token, seq);
                sum += *state * *(const float*)at(c, j, head / together, token, seq);
            }
            sum = warp_reduce<Sum>(sum);
            if (lane == 0) *(float*)at(d, ((seq * n_tokens + token) * n_head + head) * n_dim + i, 0, 0, 0) = sum;
        }
    }
}
