// Ops that compute each element from those with the same indices: arithmetic, functions of one element, gated units.
//
// All compute in f32; f16 and bf16 are converted when they are loaded and stored.  The result may be the memory of a
// source of the same layout: each element is read before it is written, by the same thread.
#include "common.cuh"

// -- two operands -----------------------------------------------------------------------------------------------------

enum Binary { ADD, SUB, MUL, DIV };

__device__ __forceinline__ float binary_of(float x, float y, int op) {
    return op == ADD ? x + y : op == SUB ? x - y : op == MUL ? x * y : x / y;
}

// d = a op b; b repeats to the extents of a.
extern "C" __global__ void __launch_bounds__(256) binary(View a, View b, View d, int64_t n, int op, int ka, int kb,
                                                         int kd) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const float x = load_plain(at(a, k), ka), y = load_plain(at(b, wrap(k, b)), kb);
        store_plain(at(d, k), kd, binary_of(x, y, op));
    }
}

// Computes what `binary` does, for f32, and loads four neighbouring elements at once: n and ne[0] count such fours,
// whose addresses are multiples of 16.
extern "C" __global__ void __launch_bounds__(256) binary_by_4(View a, View b, View d, int64_t n, int op) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const float4 x = *(const float4*)at(a, k), y = *(const float4*)at(b, k);
        float4 r;
        r.x = binary_of(x.x, y.x, op);
        r.y = binary_of(x.y, y.y, op);
        r.z = binary_of(x.z, y.z, op);
        r.w = binary_of(x.w, y.w, op);
        *(float4*)at(d, k) = r;
    }
}

// -- one operand ------------------------------------------------------------------------------------------------------

// The functions, numbered as in ops/elementwise.py.
enum Unary {
    SCALE, SQR, SQRT, LOG, CLAMP, ABS, CEIL, ELU, EXP, EXPM1, FLOOR, GELU, GELU_ERF, GELU_QUICK, HARDSIGMOID, HARDSWISH,
    NEG, RELU, ROUND, SGN, SIGMOID, SILU, SOFTPLUS, STEP, TANH, TRUNC, XIELU, GELU_GATE
};

struct Parameters {
    float p[4];
};

// Rounded to f16 and back; values beyond the range of f16 stay.
__device__ __forceinline__ float of_half(float x) {
    return fabsf(x) <= 65504.0f ? __half_bits_to_float(__float_to_half_bits(x)) : x;
}

// GELU as ggml's table has it: a function from f16 to f16.  The compiler must not fuse a product with a sum: the
// result, more exact by a bit, might round to another f16.
__device__ __forceinline__ float gelu_of_halves(float x) {
    x = of_half(x);
    const float u = add_rn(mul_rn(mul_rn(x, x), 0.044715f), 1.0f);
    const float t = tanhf(mul_rn(mul_rn(u, x), 0.7978845608028654f));
    return of_half(mul_rn(mul_rn(add_rn(t, 1.0f), 0.5f), x));
}

__device__ __forceinline__ float hard_gate(float x) {
    return min_nan(max_nan((x + 3.0f) / 6.0f, 0.0f), 1.0f);
}

__device__ __forceinline__ float xielu(float x, const Parameters& v) {
    const float alpha_n = v.p[0], alpha_p = v.p[1], beta = v.p[2], eps = v.p[3];
    return x > 0.0f ? (alpha_p * x + beta) * x : (expm1f(min_nan(x, eps)) - x) * alpha_n + beta * x;
}

__device__ __forceinline__ float function_of(float x, int op, const Parameters& v) {
    switch (op) {
        case SCALE: return v.p[1] != 0.0f ? x * v.p[0] + v.p[1] : x * v.p[0];
        case SQR: return x * x;
        case SQRT: return sqrtf(x);
        case LOG: return logf(x);
        case CLAMP: return max_nan(min_nan(x, v.p[1]), v.p[0]);
        case ABS: return fabsf(x);
        case CEIL: return ceilf(x);
        case ELU: return x > 0.0f ? x : expm1f(x);
        case EXP: return expf(x);
        case EXPM1: return expm1f(x);
        case FLOOR: return floorf(x);
        case GELU: return x >= 10.0f ? x : x <= -10.0f ? 0.0f : gelu_of_halves(x);   // not rounded to f16 beyond 10
        case GELU_GATE: return gelu_of_halves(x);
        case GELU_ERF: return 0.5f * erfcf(x * -0.7071067811865476f) * x;
        case GELU_QUICK: {
            const float h = of_half(x);
            return of_half(h / (1.0f + expf(-1.702f * h)));
        }
        case HARDSIGMOID: return hard_gate(x);
        case HARDSWISH: return x * hard_gate(x);
        case NEG: return -x;
        case RELU: return max_nan(x, 0.0f);
        case ROUND: return roundf(x);
        case SGN: return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f;
        case SIGMOID: return 1.0f / (1.0f + expf(-x));
        case SILU: return x / (1.0f + expf(-x));
        case SOFTPLUS: return x > 20.0f ? x : log1pf(expf(x));
        case STEP: return x > 0.0f ? 1.0f : 0.0f;
        case TANH: return tanhf(x);
        case TRUNC: return truncf(x);
        default: return xielu(x, v);
    }
}

extern "C" __global__ void __launch_bounds__(256) unary(View a, View d, int64_t n, int op, int ka, int kd,
                                                        Parameters v) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        store_plain(at(d, k), kd, function_of(load_plain(at(a, k), ka), op, v));
    }
}

// -- gated units ------------------------------------------------------------------------------------------------------

// A gated unit: function(x) * factor.  With `oai` it is OpenAI's variant: x and factor are limited, the function is
// x * sigmoid(alpha * x), and one is added to the factor.
__device__ __forceinline__ float glu_of(float x, float factor, int op, int oai, const Parameters& v) {
    if (oai) {
        const float alpha = v.p[0], limit = v.p[1];
        const float t = min_nan(x, limit), y = max_nan(min_nan(factor, limit), -limit);
        return (y + 1.0f) * t / (1.0f + expf(-alpha * t));
    }
    // Each call has a constant op, so that the compiler keeps only the code of that function.
    switch (op) {
        case RELU: return function_of(x, RELU, v) * factor;
        case GELU_GATE: return function_of(x, GELU_GATE, v) * factor;
        case GELU_ERF: return function_of(x, GELU_ERF, v) * factor;
        case GELU_QUICK: return function_of(x, GELU_QUICK, v) * factor;
        default: return function_of(x, SILU, v) * factor;
    }
}

extern "C" __global__ void __launch_bounds__(256) glu(View a, View b, View d, int64_t n, int op, int oai, int kind,
                                                      Parameters v) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const float x = load_plain(at(a, k), kind), factor = load_plain(at(b, k), kind);
        store_plain(at(d, k), kind, glu_of(x, factor, op, oai, v));
    }
}

// Computes what `glu` does, for f32, four elements at once: see binary_by_4.
extern "C" __global__ void __launch_bounds__(256) glu_by_4(View a, View b, View d, int64_t n, int op, int oai,
                                                           Parameters v) {
    await_inputs();
    FOR_EACH(i, n) {
        const Index k = split(d, i);
        const float4 x = *(const float4*)at(a, k), y = *(const float4*)at(b, k);
        float4 r;
        r.x = glu_of(x.x, y.x, op, oai, v);
        r.y = glu_of(x.y, y.y, op, oai, v);
        r.z = glu_of(x.z, y.z, op, oai, v);
        r.w = glu_of(x.w, y.w, op, oai, v);
        *(float4*)at(d, k) = r;
    }
}
