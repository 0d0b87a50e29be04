// Ops that compute each element from those at its place: arithmetic, functions of one element, gated units.
//
// All in f32; f16 and bf16 are converted on the way in and out.  A result may lie over a source of the same layout:
// each element is read before it is written, by the same thread.
#include "common.cuh"

// -- two operands -----------------------------------------------------------------------------------------------------

enum Binary { ADD, SUB, MUL, DIV };

// d = a op b; b repeats to the extents of a.
extern "C" __global__ void __launch_bounds__(256) binary(View a, View b, View d, int64_t n, int op, int ka, int kb,
                                                         int kd) {
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const float x = load_plain(at(a, k), ka), y = load_plain(at(b, wrap(k, b)), kb);
        const float v = op == ADD ? x + y : op == SUB ? x - y : op == MUL ? x * y : x / y;
        store_plain(at(d, k), kd, v);
    }
}
