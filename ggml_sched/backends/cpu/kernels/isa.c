/* isa.c -- the best instruction set that both the processor and the kernels have; the environment variable
 * GGML_SCHED_ISA can choose a lower one.
 *
 * The variable is read for each node that is compiled, so a test may change it between two graphs.
 */
#include "call.h"

#include <stdlib.h>
#include <string.h>

static int of_processor(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")))
        return GS_ISA_PORTABLE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return GS_ISA_AVX512;
    return GS_ISA_AVX2;
#else
    return GS_ISA_PORTABLE;
#endif
}

int gs_isa(void) {
    static const char *const names[] = {"portable", "avx2", "avx512"};
    int best = of_processor();
    const char *cap = getenv("GGML_SCHED_ISA");
    for (int level = GS_ISA_PORTABLE; cap != NULL && level < best; level++)
        if (strcmp(cap, names[level]) == 0)
            return level;
    return best;
}
