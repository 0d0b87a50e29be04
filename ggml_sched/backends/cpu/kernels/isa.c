/* isa.c -- what the processor is: the best instruction set that both it and the kernels have, of which the environment
 * variable GGML_SCHED_ISA can choose a lower one, and whether it reads ahead.
 *
 * The variable is read for each node that is compiled, so a test may change it between two graphs.  The processor is
 * queried once: in a virtual machine each query leaves the machine, and took 10 of the 13 ms for which a token waited
 * whose graph was compiled anew.
 */
#include "call.h"

#include <stdatomic.h>
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

static int is_amd(void) {
    unsigned a, b = 0, c = 0, d = 0;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}
#endif

typedef struct processor {
    enum gs_isa best;
    int has_avxvnni;            /* processors with AVX-512 need not have it */
    int reads_ahead;            /* see gs_reads_ahead */
} processor;

static processor query(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    int avxvnni = has_avxvnni();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()))
        return (processor){GS_ISA_PORTABLE, 0, 0};
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return (processor){GS_ISA_AVX512, avxvnni, is_amd()};
    return (processor){avxvnni ? GS_ISA_AVXVNNI : GS_ISA_AVX2, avxvnni, 0};
#elif defined(__aarch64__) && defined(__GNUC__)
    return (processor){has_dotprod() ? GS_ISA_DOTPROD : GS_ISA_NEON, 0, 0};
#else
    return (processor){GS_ISA_PORTABLE, 0, 0};
#endif
}

/* The answer of `query`, which threads may ask for at the same time. */
static processor here(void) {
    static _Atomic int kept;    /* 0: not queried; else 1 + 4 * best + 2 * has_avxvnni + reads_ahead */
    int found = atomic_load_explicit(&kept, memory_order_relaxed);
    if (found == 0) {
        processor p = query();
        found = 1 + 4 * (int)p.best + 2 * p.has_avxvnni + p.reads_ahead;
        atomic_store_explicit(&kept, found, memory_order_relaxed);
    }
    return (processor){(enum gs_isa)((found - 1) / 4), (found - 1) / 2 % 2, (found - 1) % 2};
}

int gs_reads_ahead(void) {
    return here().reads_ahead;
}

int gs_isa(void) {
    processor p = here();
    const char *cap = getenv("GGML_SCHED_ISA");
    for (size_t i = 0; cap != NULL && known[i].isa != p.best; i++)
        if (strcmp(cap, known[i].name) == 0)
            return known[i].isa == GS_ISA_AVXVNNI && !p.has_avxvnni ? GS_ISA_AVX2 : known[i].isa;
    return p.best;
}
