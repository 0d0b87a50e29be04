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
#define AT_ONCE 5
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
    wrong += n > 1 && (n != call->at_once || part % n);
    groups += n > 1;
}

static void run(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    run_several(call, part, 1, shared, scratch, fault);
}

/* Runs one call, whose part number `slow` is slow (-1: none is). */
static void run_call(gs_pool *pool, const gs_work *work, gs_run_several several, int at_once, int slow) {
    gs_fault fault;
    gs_call call = {.run = run, .n_parts = PARTS, .arg = {slow}};
    if (at_once > 0) {
        call.run_several = several;
        call.at_once = at_once;
    }
    memset(runs, 0, sizeof(runs));
    done = groups = 0;
    if (gs_pool_run(pool, &call, 1, work, NULL, &fault) != -1)
        wrong++;
    for (int i = 0; i < PARTS; i++)
        wrong += runs[i] != 1;
}

static void run_until_7(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    (void)call; (void)shared; (void)scratch;
    runs[part]++;
    if (part == 7)
        *fault = (gs_fault){GS_FAULT_ID, 0, part, 0};
}

/* A call without run_several, of which parts are claimed at once: those after a fault do not run. */
static void run_faulty_call(gs_pool *pool, const gs_work *work) {
    gs_fault fault;
    gs_call call = {.run = run_until_7, .n_parts = PARTS, .at_once = AT_ONCE};
    memset(runs, 0, sizeof(runs));
    if (gs_pool_run(pool, &call, 1, work, NULL, &fault) != 0 || fault.value != 7)
        wrong++;
    wrong += runs[7] != 1 || (work->n_threads == 1 && (runs[8] != 0 || runs[9] != 0));
}

int main(void) {
    _Alignas(64) static char memory[64 * 3];
    for (int32_t threads = 1; threads <= 3; threads++) {
        gs_work work = {memory, 0, 64, threads};
        gs_pool *pool = gs_pool_new();
        gs_pool_resize(pool, threads);
        run_faulty_call(pool, &work);
        run_call(pool, &work, NULL, AT_ONCE, -1);
        for (int at_once = 0; at_once <= AT_ONCE; at_once += AT_ONCE) {
            run_call(pool, &work, run_several, at_once, -1);
            wrong += threads == 1 && groups != (at_once ? PARTS / at_once : 0);
            for (int slow = 0; slow < PARTS && threads > 1 && !wrong; slow++)
                run_call(pool, &work, run_several, at_once, slow);
        }
        gs_pool_free(pool);
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
