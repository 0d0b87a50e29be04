/* pool_shares.c -- how parts of a call are shared: each runs once, and no thread keeps parts that others could take.
 *
 * In turn each part, or each group of parts that are computed together, is slow: it takes until all others are done, so
 * other threads must take its thread's share.  The program counts parts that did not run once, slow ones that were left
 * with others of their thread, and groups that one thread alone did not compute together.
 */
#include "pool.h"
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define PARTS 37
#define PATIENCE 20             /* seconds */
static _Atomic int runs[PARTS], done, wrong, groups;

static void run_several(const gs_call *call, int32_t part, int32_t n, char *shared, char *scratch, gs_fault *fault) {
    (void)shared; (void)scratch; (void)fault;
    time_t began = time(NULL);
    int64_t slow = call->arg[0];
    while (part <= slow && slow < part + n && done < PARTS - n)
        if (time(NULL) - began > PATIENCE) {
            wrong++;
            break;
        }
    for (int i = 0; i < n; i++)
        runs[part + i]++;
    done += n;
    wrong += n > 1 && (n != call->together || part % n);
    groups += n > 1;
}

static void run(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    run_several(call, part, 1, shared, scratch, fault);
}

/* Runs one call, whose part number `slow` is slow (-1: none is). */
static void run_call(gs_pool *pool, const gs_work *work, int together, int slow) {
    gs_fault fault;
    gs_call call = {.run = run, .n_parts = PARTS, .arg = {slow}};
    if (together > 0) {
        call.run_several = run_several;
        call.together = together;
    }
    memset(runs, 0, sizeof(runs));
    done = groups = 0;
    if (gs_pool_run(pool, &call, 1, work, NULL, &fault) != -1)
        wrong++;
    for (int i = 0; i < PARTS; i++)
        wrong += runs[i] != 1;
}

int main(void) {
    _Alignas(64) static char memory[64 * 3];
    for (int32_t threads = 1; threads <= 3; threads++) {
        gs_work work = {memory, 0, 64, threads};
        gs_pool *pool = gs_pool_new();
        gs_pool_resize(pool, threads);
        for (int together = 0; together <= 5; together += 5) {
            run_call(pool, &work, together, -1);
            wrong += threads == 1 && groups != (together ? PARTS / together : 0);
            for (int slow = 0; slow < PARTS && threads > 1 && !wrong; slow++)
                run_call(pool, &work, together, slow);
        }
        gs_pool_free(pool);
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
