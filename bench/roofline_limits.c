/* roofline_limits.c -- what a machine can do at most: bytes that threads read from memory, f32 products and sums.
 *
 * roofline.py compiles it for the machine that it runs on, and calls it by ctypes.  Threads start together; a time is
 * from their start to the end of the last one.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 256
#if defined(__AVX512F__)
#define WIDE 64                 /* bytes of a register */
#elif defined(__AVX__)
#define WIDE 32
#else
#define WIDE 16
#endif
#define CHAINS 10               /* independent sums, to cover the latency of an addition; they fit into the registers */

typedef float floats __attribute__((vector_size(WIDE), aligned(WIDE)));
typedef int64_t ints __attribute__((vector_size(WIDE), aligned(WIDE)));

typedef struct job {
    pthread_barrier_t *start;
    const char *memory;
    int64_t n;                  /* bytes, or rounds */
    double began, ended;
    double result;              /* is stored, so that the compiler leaves nothing out */
} job;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Reads the memory; if `prefetches`, each line is prefetched to L2 first and then to L1, as far ahead as kernels do. */
static inline __attribute__((always_inline)) void *read_all(job *mine, const int prefetches) {
    const ints *at = (const ints *)mine->memory, *end = (const ints *)(mine->memory + mine->n);
    ints sum[4] = {{0}};
    pthread_barrier_wait(mine->start);
    mine->began = seconds();
    for (; at + 4 <= end; at += 4) {
        for (int line = 0; prefetches && line < 4 * WIDE; line += 64) {
            __builtin_prefetch((const char *)at + 8192 + line, 0, 2);
            __builtin_prefetch((const char *)at + 2048 + line);
        }
        for (int i = 0; i < 4; i++)
            sum[i] ^= at[i];
    }
    mine->ended = seconds();
    mine->result = (double)(sum[0] ^ sum[1] ^ sum[2] ^ sum[3])[0];
    return NULL;
}

static void *read_alone(void *given) {
    return read_all(given, 0);
}

static void *read_prefetched(void *given) {
    return read_all(given, 1);
}

static void *multiply(void *given) {
    job *mine = given;
    floats sum[CHAINS], a = (floats){0} + 0.999f, b = (floats){0} + 1e-3f;
    for (int i = 0; i < CHAINS; i++)
        sum[i] = (floats){0} + (float)i;
    pthread_barrier_wait(mine->start);
    mine->began = seconds();
    for (int64_t n = 0; n < mine->n; n++)
        for (int i = 0; i < CHAINS; i++)
            sum[i] = sum[i] * a + b;
    mine->ended = seconds();
    for (int i = 0; i < CHAINS; i++)
        mine->result += (double)sum[i][0];
    return NULL;
}

static double together(void *(*work)(void *), const char *memory, int64_t n, int threads) {
    pthread_t thread[MAX_THREADS];
    job jobs[MAX_THREADS];
    pthread_barrier_t start;
    if (threads < 1 || threads > MAX_THREADS || pthread_barrier_init(&start, NULL, (unsigned)threads))
        return -1;
    for (int i = 0; i < threads; i++) {
        int64_t part = memory == NULL ? n : n / threads / (4 * WIDE) * (4 * WIDE);
        jobs[i] = (job){&start, memory == NULL ? NULL : memory + i * part, part, 0, 0, 0};
        if (i > 0 && pthread_create(&thread[i], NULL, work, &jobs[i]))
            abort();
    }
    work(&jobs[0]);
    double began = jobs[0].began, ended = jobs[0].ended;
    for (int i = 1; i < threads; i++) {
        pthread_join(thread[i], NULL);
        began = jobs[i].began < began ? jobs[i].began : began;
        ended = jobs[i].ended > ended ? jobs[i].ended : ended;
    }
    pthread_barrier_destroy(&start);
    return ended - began;
}

/* Seconds in which `threads` threads read n bytes, from an address that is a multiple of 64, once: the better of two
 * loops, because some processors read faster with prefetches, and others without. */
double read_seconds(const char *memory, int64_t n, int threads) {
    double alone = together(read_alone, memory, n, threads), prefetched = together(read_prefetched, memory, n, threads);
    return alone < prefetched ? alone : prefetched;
}

/* Seconds in which each of `threads` threads computes `rounds` rounds of operations_of_a_round() operations. */
double multiply_seconds(int64_t rounds, int threads) {
    return together(multiply, NULL, rounds, threads);
}

int64_t operations_of_a_round(void) {
    return (int64_t)CHAINS * 2 * (WIDE / (int64_t)sizeof(float));
}
