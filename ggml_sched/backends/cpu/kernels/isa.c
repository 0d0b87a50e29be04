/* isa.c -- the best instruction set that both the processor and the kernels have; the environment variable
 * GGML_SCHED_ISA can choose a lower one.
 *
 * The variable is read for each node that is compiled, so a test may change it between two graphs.
 */
#include "call.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* The instruction sets of this architecture, from the slowest to the fastest. */
static const struct {
    enum gs_isa isa;
    const char *name;
} known[] = {
    {GS_ISA_PORTABLE, "portable"},
#if defined(__x86_64__) && defined(__GNUC__)
    {GS_ISA_AVX2, "avx2"},
    {GS_ISA_AVXVNNI, "avxvnni"},
    {GS_ISA_AVX512, "avx512"},
#elif defined(__aarch64__) && defined(__GNUC__)
    {GS_ISA_NEON, "neon"},
    {GS_ISA_DOTPROD, "dotprod"},
#endif
};

#if defined(__aarch64__) && defined(__GNUC__)
static int has_dotprod(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & (1 << 20)) != 0; /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, NULL, 0) == 0 && found;
#else
    return 0;
#endif
}
#endif

#if defined(__x86_64__) && defined(__GNUC__)
/* Read by hand, for older compilers whose __builtin_cpu_supports knows neither.  It has been asked for AVX2 before: so
 * the system saves the registers. */
static int has_f16c(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static int has_avxvnni(void) {
    unsigned a = 0, b, c, d;
    return GS_HAS_AVXVNNI && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

static enum gs_isa of_processor(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()))
        return GS_ISA_PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return GS_ISA_AVX512;
    return has_avxvnni() ? GS_ISA_AVXVNNI : GS_ISA_AVX2;
#elif defined(__aarch64__) && defined(__GNUC__)
    return has_dotprod() ? GS_ISA_DOTPROD : GS_ISA_NEON;
#else
    return GS_ISA_PORTABLE;
#endif
}

int gs_isa(void) {
    enum gs_isa best = of_processor();
    const char *cap = getenv("GGML_SCHED_ISA");
    for (size_t i = 0; cap != NULL && known[i].isa != best; i++) {
        if (strcmp(cap, known[i].name) != 0)
            continue;
#if defined(__x86_64__) && defined(__GNUC__)
        if (known[i].isa == GS_ISA_AVXVNNI && !has_avxvnni()) /* processors with AVX-512 need not have it */
            return GS_ISA_AVX2;
#endif
        return known[i].isa;
    }
    return best;
}
