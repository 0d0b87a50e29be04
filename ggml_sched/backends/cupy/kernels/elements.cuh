// Reads one element of a tensor of any type as f32, for kernels that are not made for one type, such as copies.
//
// The layout of blocks is ggml's (dequantize_row_*); products and sums round as the CPU's do, so the bits are the same.
// Invariant: no load needs more alignment than blocks have: two bytes, or one byte for mxfp4.
#pragma once

// The number of elements of a block of a type; types without blocks count as blocks of one element.
__device__ __forceinline__ int block_elements(int kind) {
    if (kind == F32 || kind == F16 || kind == BF16 || kind == I32 || kind == I64) return 1;
    return (kind >= Q2_K && kind <= Q6_K) || kind == IQ4_XS ? 256 : 32;
}

// The 16 levels that four bits stand for: of iq4_nl and iq4_xs, and of mxfp4 (4-bit floats, doubled to be integers).
__constant__ signed char UNEVEN_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
__constant__ signed char FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

__device__ __forceinline__ float half_at(const uint8_t* p) { return __half_bits_to_float(*(const uint16_t*)p); }

// Level j of 2 n levels of four bits in n bytes: the first n are the low nibbles, the others the high ones.
__device__ __forceinline__ int nibble(const uint8_t* q, int j, int n) { return j < n ? q[j] & 15 : q[j - n] >> 4; }

// Level j of 256 levels of two bits: for each 128, byte l of 32 holds levels l, l + 32, l + 64 and l + 96.
__device__ __forceinline__ int two_bits(const uint8_t* q, int j) {
    return q[j / 128 * 32 + j % 32] >> j % 128 / 32 * 2 & 3;
}

// Bit j of 256 bits, in ggml's order: bit b of byte l belongs to element 32 b + l.
__device__ __forceinline__ int one_bit(const uint8_t* q, int j) { return q[j % 32] >> j / 32 & 1; }

// Scale k and minimum k (0 .. 7) of a block of q4_K or q5_K: the 12 bytes at s hold 8 of each, of six bits.
__device__ __forceinline__ int scale_of_8(const uint8_t* s, int k) {
    return k < 4 ? s[k] & 63 : (s[k + 4] & 15) | s[k - 4] >> 6 << 4;
}
__device__ __forceinline__ int minimum_of_8(const uint8_t* s, int k) {
    return k < 4 ? s[k + 4] & 63 : s[k + 4] >> 4 | s[k] >> 6 << 4;
}

// 2 ** (e - 128): half of mxfp4's scale, because FP4_LEVELS has its levels doubled.  For e = 0 and e = 1 this is a
// subnormal f32.  Code that is compiled to flush subnormals (-ftz, which compiled.py does not set) would take it for
// zero.  No other type has a scale that is a subnormal f32: the least f16, 2 ** -24, is a normal f32.
__device__ __forceinline__ float power_of_two(int e) {
    return __uint_as_float(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

// (d * scale) * q - dmin * minimum, with every product and the sum rounded to f32 by itself, as on the CPU.
__device__ __forceinline__ float with_minimum(int q, float d, int scale, float dmin, int minimum) {
    return add_rn(mul_rn((float)q, mul_rn(d, (float)scale)), -mul_rn(dmin, (float)minimum));
}

// Element j, as f32, of the block of type `kind` at address b.
__device__ __forceinline__ float element_of_block(const uint8_t* b, int kind, int j) {
    switch (kind) {
        case Q4_0: return (float)(nibble(b + 2, j, 16) - 8) * half_at(b);
        case Q4_1: return add_rn(mul_rn((float)nibble(b + 4, j, 16), half_at(b)), half_at(b + 2));
        case Q5_0: return (float)((nibble(b + 6, j, 16) | (b[2 + j / 8] >> j % 8 & 1) << 4) - 16) * half_at(b);
        case Q5_1:
            return add_rn(mul_rn((float)(nibble(b + 8, j, 16) | (b[4 + j / 8] >> j % 8 & 1) << 4), half_at(b)),
                          half_at(b + 2));
        case Q8_0: return (float)(int8_t)b[2 + j] * half_at(b);
        case Q2_K: {
            const int s = b[j / 16];
            return with_minimum(two_bits(b + 16, j), half_at(b + 80), s & 15, half_at(b + 82), s >> 4);
        }
        case Q3_K: {
            const int k = j / 16, high = b[104 + k % 4] >> k / 4 * 2 & 3;
            const int scale = (nibble(b + 96, k, 8) | high << 4) - 32;
            const int q = (two_bits(b + 32, j) | one_bit(b, j) << 2) - 4;
            return mul_rn((float)q, mul_rn(half_at(b + 108), (float)scale));
        }
        case Q4_K:
            return with_minimum(nibble(b + 16 + j / 64 * 32, j % 64, 32), half_at(b), scale_of_8(b + 4, j / 32),
                                half_at(b + 2), minimum_of_8(b + 4, j / 32));
        case Q5_K:
            return with_minimum(nibble(b + 48 + j / 64 * 32, j % 64, 32) | one_bit(b + 16, j) << 4, half_at(b),
                                scale_of_8(b + 4, j / 32), half_at(b + 2), minimum_of_8(b + 4, j / 32));
        case Q6_K: {
            const int q = nibble(b + j / 128 * 64, j % 128, 64) | two_bits(b + 128, j) << 4;
            return mul_rn((float)(q - 32), mul_rn(half_at(b + 208), (float)(int8_t)b[192 + j / 16]));
        }
        case IQ4_NL: return (float)UNEVEN_LEVELS[nibble(b + 2, j, 16)] * half_at(b);
        case IQ4_XS: {
            const int k = j / 32, low = k % 2 ? b[4 + k / 2] >> 4 : b[4 + k / 2] & 15;
            const int scale = (low | (*(const uint16_t*)(b + 2) >> 2 * k & 3) << 4) - 32;
            return mul_rn((float)UNEVEN_LEVELS[nibble(b + 8 + 16 * k, j % 32, 16)], mul_rn(half_at(b), (float)scale));
        }
        default: return (float)FP4_LEVELS[nibble(b + 1, j, 16)] * power_of_two(b[0]);
    }
}

// The element of a tensor at indices k, as f32; t.nb[0]: bytes from element to element, or from block to block.
__device__ __forceinline__ float load_view(const View& t, int kind, const Index& k) {
    const int n = block_elements(kind);
    if (n == 1) return load_plain(at(t, k), kind);
    return element_of_block((const uint8_t*)at(t, k.i0 / n, k.i1, k.i2, k.i3), kind, (int)(k.i0 % n));
}
