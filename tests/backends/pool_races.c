/* pool_races.c -- two threads run calls, one changes the pool's number of threads, one queries it.
 *
 * Every other round, the parts of every other call are computed together where a thread has five of them.
 * The thread sanitizer ends the program with a status other than 0 on a data race.  The program counts wrong results.
 */
#include "pool.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <stdatomic.h>

#define PARTS 37
static _Atomic int wrong, over;
static gs_pool *pool;

static void fill(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    (void)scratch; (void)fault;
    scratch[0] = (char)part;
    ((int64_t *)shared)[part] = call->arg[0] + part;
}
static void fill_several(const gs_call *call, int32_t part, int32_t n, char *shared, char *scratch, gs_fault *fault) {
    for (int32_t end = part + n; part < end; part++)
        fill(call, part, shared, scratch, fault);
}
static void sum(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    int64_t total = 0;
    for (int i = 0; i < PARTS; i++)
        total += ((int64_t *)shared)[i];
    ((int64_t *)shared)[PARTS + part] = total;
    scratch[1] = 1;
    if (call->arg[1] && part >= PARTS / 2)
        *fault = (gs_fault){GS_FAULT_ID, 0, part, 0};
}
static void *run(void *number) {
    int rounds = *(int *)number;
    int64_t shared_size = 64 * 64;
    char *memory = aligned_alloc(64, shared_size + 8 * 64);
    gs_work work = {memory, shared_size, 64, 8};
    gs_call calls[8];
    memset(calls, 0, sizeof(calls));
    for (int r = 0; r < rounds; r++) {
        gs_fault fault;
        gs_time measured[8] = {{0}}, *times = r % 2 ? measured : NULL;
        int failing = r % 5 == 0;
        for (int i = 0; i < 8; i += 2) {
            calls[i] = (gs_call){.run = fill, .n_parts = PARTS, .arg = {r + i}};
            if (r % 4 < 2) {
                calls[i].run_several = fill_several;
                calls[i].at_once = 5;
            }
            calls[i + 1] = (gs_call){.run = sum, .n_parts = PARTS, .arg = {0, failing && i == 6}};
        }
        int32_t at = gs_pool_run(pool, calls, 8, &work, times, &fault);
        int64_t want = (int64_t)PARTS * (r + 6) + PARTS * (PARTS - 1) / 2;
        if (at != (failing ? 7 : -1) || (failing && fault.value != PARTS / 2))
            wrong++;
        if (!failing)
            for (int i = 0; i < PARTS; i++)
                if (((int64_t *)memory)[PARTS + i] != want)
                    wrong++;
    }
    free(memory);
    return NULL;
}
static void *change(void *none) {
    (void)none;
    for (int i = 0; !over; i++) {
        if (i % 3 == 2) gs_pool_stop(pool); else gs_pool_resize(pool, 1 + i % 4);
        usleep(300);
    }
    return NULL;
}
static void *ask(void *none) {
    (void)none;
    while (!over)
        if (gs_pool_alive(pool) > 8) wrong++;
    return NULL;
}
int main(void) {
    pthread_t a, b, c, d;
    int rounds = 2000;
    pool = gs_pool_new();
    gs_pool_resize(pool, 3);
    run(&rounds);
    pthread_create(&a, NULL, run, &rounds);
    pthread_create(&b, NULL, run, &rounds);
    pthread_create(&c, NULL, change, NULL);
    pthread_create(&d, NULL, ask, NULL);
    pthread_join(a, NULL); pthread_join(b, NULL);
    over = 1;
    pthread_join(c, NULL); pthread_join(d, NULL);
    gs_pool_free(pool);
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
