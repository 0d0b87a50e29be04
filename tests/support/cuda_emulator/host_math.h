// CUDA's vector types, and its arithmetic that C++ lacks: conversions, bits, bytes in words, loads.
//
// Each function gives the GPU's result where CUDA defines it; the fast ones (`__expf`) are as exact as the host's.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "host_fibers.h"

#define HOST_CUDA_VECTORS(T, name, align2, align4)                                                                     \
    struct name##1 { T x; };                                                                                           \
    struct alignas(align2) name##2 { T x, y; };                                                                        \
    struct name##3 { T x, y, z; };                                                                                     \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                                  \
    static inline name##1 make_##name##1(T x) { return {x}; }                                                          \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                  \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                          \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
// uint3 is also the type of threadIdx.
#define HOST_CUDA_VECTORS_BUT_3(T, name, align2, align4)                                                               \
    struct name##1 { T x; };                                                                                           \
    struct alignas(align2) name##2 { T x, y; };                                                                        \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                                  \
    static inline name##1 make_##name##1(T x) { return {x}; }                                                          \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                                  \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_CUDA_VECTORS(signed char, char, 2, 4)
HOST_CUDA_VECTORS(unsigned char, uchar, 2, 4)
HOST_CUDA_VECTORS(short, short, 4, 8)
HOST_CUDA_VECTORS(unsigned short, ushort, 4, 8)
HOST_CUDA_VECTORS(int, int, 8, 16)
HOST_CUDA_VECTORS_BUT_3(unsigned, uint, 8, 16)
HOST_CUDA_VECTORS(float, float, 8, 16)
HOST_CUDA_VECTORS(long long, longlong, 16, 16)
HOST_CUDA_VECTORS(unsigned long long, ulonglong, 16, 16)
HOST_CUDA_VECTORS(double, double, 16, 16)
#undef HOST_CUDA_VECTORS
#undef HOST_CUDA_VECTORS_BUT_3

// For numbers of any two types; for floats, a NaN gives the other argument.
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(fmin(a, b));
    else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(fmax(a, b));
    else return static_cast<T>(a) > static_cast<T>(b) ? static_cast<T>(a) : static_cast<T>(b);
}

namespace host_cuda {
template <class To, class From> static inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the bits of a value of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
// As the hardware converts: a value out of range becomes the nearest representable one, a NaN becomes 0.
template <class To> static inline To to_integer(double v) {
    const double low = static_cast<double>(std::is_signed_v<To> ? -2147483648.0 : 0.0);
    const double high = std::is_signed_v<To> ? 2147483647.0 : 4294967295.0;
    return v != v ? To(0) : static_cast<To>(v < low ? low : v > high ? high : v);
}
}  // namespace host_cuda

static inline float __int_as_float(int v) { return host_cuda::bits<float>(v); }
static inline float __uint_as_float(unsigned v) { return host_cuda::bits<float>(v); }
static inline int __float_as_int(float v) { return host_cuda::bits<int>(v); }
static inline unsigned __float_as_uint(float v) { return host_cuda::bits<unsigned>(v); }
static inline int __float2int_rn(float v) { return host_cuda::to_integer<int>(rint(v)); }
static inline int __float2int_rz(float v) { return host_cuda::to_integer<int>(trunc(v)); }
static inline int __float2int_rd(float v) { return host_cuda::to_integer<int>(floor(v)); }
static inline int __float2int_ru(float v) { return host_cuda::to_integer<int>(ceil(v)); }
static inline unsigned __float2uint_rn(float v) { return host_cuda::to_integer<unsigned>(rint(v)); }
static inline unsigned __float2uint_rz(float v) { return host_cuda::to_integer<unsigned>(trunc(v)); }
static inline float __int2float_rn(int v) { return static_cast<float>(v); }
static inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }

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

// Macros, since the C library has functions of these names.
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
static inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
static inline float __saturatef(float x) { return x >= 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i & 15, byte = static_cast<unsigned>(both >> 8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (by & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by & 31));
}

namespace host_cuda {
static inline int signed_byte(unsigned v, int i) { return static_cast<signed char>(v >> 8 * i & 255); }
static inline int unsigned_byte(unsigned v, int i) { return static_cast<int>(v >> 8 * i & 255); }
template <class F> static inline unsigned each_byte(F f) {
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= (static_cast<unsigned>(f(i)) & 255u) << 8 * i;
    return r;
}
static inline int clamp_byte(int v) { return v < -128 ? -128 : v > 127 ? 127 : v; }
}  // namespace host_cuda
static inline int __dp4a(int a, int b, int c) {
    unsigned sum = static_cast<unsigned>(c);
    for (int i = 0; i < 4; ++i) {
        sum += static_cast<unsigned>(host_cuda::signed_byte(static_cast<unsigned>(a), i)
                                     * host_cuda::signed_byte(static_cast<unsigned>(b), i));
    }
    return static_cast<int>(sum);
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i)
        c += static_cast<unsigned>(host_cuda::unsigned_byte(a, i) * host_cuda::unsigned_byte(b, i));
    return c;
}
#define HOST_CUDA_BYTES(name, of, f)                                                                                   \
    static inline unsigned name(unsigned a, unsigned b) {                                                              \
        return host_cuda::each_byte([=](int i) {                                                                       \
            const int x = host_cuda::of(a, i), y = host_cuda::of(b, i);                                                \
            return f;                                                                                                  \
        });                                                                                                            \
    }
HOST_CUDA_BYTES(__vadd4, unsigned_byte, x + y)
HOST_CUDA_BYTES(__vsub4, unsigned_byte, x - y)
HOST_CUDA_BYTES(__vaddss4, signed_byte, host_cuda::clamp_byte(x + y))
HOST_CUDA_BYTES(__vsubss4, signed_byte, host_cuda::clamp_byte(x - y))
HOST_CUDA_BYTES(__vcmpeq4, unsigned_byte, x == y ? 255 : 0)
HOST_CUDA_BYTES(__vcmpne4, unsigned_byte, x != y ? 255 : 0)
HOST_CUDA_BYTES(__vcmpgtu4, unsigned_byte, x > y ? 255 : 0)
HOST_CUDA_BYTES(__vcmpltu4, unsigned_byte, x < y ? 255 : 0)
#undef HOST_CUDA_BYTES

// Loads and stores with a hint where to cache.  As on a GPU, each is one access, at an address that is a multiple of
// its size.
namespace host_cuda {
template <class T> static inline T* aligned(T* p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) stop("a misaligned address");
    return p;
}
}  // namespace host_cuda
template <class T> static inline T __ldg(const T* p) { return *host_cuda::aligned(p); }
template <class T> static inline T __ldca(const T* p) { return *host_cuda::aligned(p); }
template <class T> static inline T __ldcg(const T* p) { return *host_cuda::aligned(p); }
template <class T> static inline T __ldcs(const T* p) { return *host_cuda::aligned(p); }
template <class T> static inline void __stcg(T* p, T v) { *host_cuda::aligned(p) = v; }
template <class T> static inline void __stcs(T* p, T v) { *host_cuda::aligned(p) = v; }
template <class T> static inline void __stwb(T* p, T v) { *host_cuda::aligned(p) = v; }
