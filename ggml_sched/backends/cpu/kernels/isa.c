/* isa.c -- what the processor is: the best instruction set that both it and the kernels have, of which the environment
 * variable GGML_SCHED_ISA can choose a lower one, and whether it reads ahead.
 *
 * The variable is read for each node that is compiled, so a test may change it between two graphs.  The processor is
 * queried once: in a virtual machine each query leaves the machine, and took 10 of the 13 ms for which a token waited
 * whose graph was compiled anew.
 */
#include "call.h"

#include <pthread.h>
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

static struct {
    enum gs_isa best;
    int has_avxvnni;            /* processors with AVX-512 need not have it */
    int reads_ahead;            /* see gs_reads_ahead */
} processor;                    /* filled by query */

static void query(void) {
    processor.best = GS_ISA_PORTABLE;
#if defined(__x86_64__) && defined(__GNUC__)
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()))
        return;
    processor.has_avxvnni = has_avxvnni();
    processor.best = processor.has_avxvnni ? GS_ISA_AVXVNNI : GS_ISA_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        processor.best = GS_ISA_AVX512;
        processor.reads_ahead = is_amd();
    }
#elif defined(__aarch64__) && defined(__GNUC__)
    processor.best = has_dotprod() ? GS_ISA_DOTPROD : GS_ISA_NEON;
#endif
}

static void query_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, query);
}

int gs_reads_ahead(void) {
    query_once();
    return processor.reads_ahead;
}

int gs_isa(void) {
    query_once();
    const char *cap = getenv("GGML_SCHED_ISA");
    for (size_t i = 0; cap != NULL && known[i].isa != processor.best; i++)
        if (strcmp(cap, known[i].name) == 0)
            return known[i].isa == GS_ISA_AVXVNNI && !processor.has_avxvnni ? GS_ISA_AVX2 : known[i].isa;
    return processor.best;
}
