// CUDA's vector types, and its arithmetic that C++ lacks: conversions, bits, bytes in words, loads.
//
// Only what the kernels use.  Each function gives the GPU's result where CUDA defines it.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "host_fibers.h"

#define HOST_CUDA_VECTORS(T, name)                  \
    struct alignas(8) name##2 { T x, y; };          \
    struct alignas(16) name##4 { T x, y, z, w; };
HOST_CUDA_VECTORS(int, int)
HOST_CUDA_VECTORS(unsigned, uint)
HOST_CUDA_VECTORS(float, float)
#undef HOST_CUDA_VECTORS

namespace host_cuda {
template <class To, class From> static inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the bits of a value of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace host_cuda

static inline float __int_as_float(int v) { return host_cuda::bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return host_cuda::bits<float>(v); }
static inline unsigned __float_as_uint(float v) { return host_cuda::bits<unsigned>(v); }
// To nearest, ties to even; a value out of range becomes the nearest int, a NaN becomes 0.
static inline int __float2int_rn(float v) {
    const double whole = rint(static_cast<double>(v));
    return v != v ? 0 : static_cast<int>(fmax(-2147483648.0, fmin(whole, 2147483647.0)));
}

// IEEE half precision, round to nearest even: what cvt.f32.f16 and cvt.rn.f16.f32 do.
static inline float __half_bits_to_float(unsigned short h) {
    const unsigned sign = static_cast<unsigned>(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float tiny = static_cast<float>(fraction) * (1.0f / 16777216.0f);
    return __uint_as_float(sign | __float_as_uint(tiny));
}
static inline unsigned short __float_to_half_bits(float f) {
    const unsigned u = __float_as_uint(f), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<unsigned short>(0x7fffu);                       // the GPU's NaN
    if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);               // 65520 and above
    if (magnitude < 0x38800000u) {      // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in its low bits
        const unsigned low = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
        return static_cast<unsigned short>(sign | low);
    }
    const unsigned odd = magnitude >> 13 & 1;
    return static_cast<unsigned short>(sign | (magnitude - 0x38000000u + 0xfffu + odd) >> 13);
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i & 15, byte = static_cast<unsigned>(both >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
// c plus the products of the four signed bytes of a with those of b.
static inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c);
    for (int i = 0; i < 32; i += 8) {
        const int x = static_cast<signed char>(a >> i & 255), y = static_cast<signed char>(b >> i & 255);
        sum += static_cast<unsigned>(x * y);
    }
    return static_cast<int>(sum);
}

// A load through the read-only cache.  As on a GPU it is one access, at an address that is a multiple of its size.
template <class T> static inline T __ldg(const T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) host_cuda::stop("a misaligned address");
    return *p;
}
