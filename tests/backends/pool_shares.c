/* pool_shares.c -- one part of a call takes until all others are done: the other threads must take its thread's share.
 *
 * Each part in turn is the slow one.  The program counts parts that did not run once, and slow ones that were left with
 * others of their thread.
 */
#include "pool.h"
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define PARTS 37
#define PATIENCE 20             /* seconds */
static _Atomic int runs[PARTS], done, wrong;

static void run(const gs_call *call, int32_t part, char *shared, char *scratch, gs_fault *fault) {
    (void)shared; (void)scratch; (void)fault;
    time_t began = time(NULL);
    while (part == call->arg[0] && done < PARTS - 1)
        if (time(NULL) - began > PATIENCE) {
            wrong++;
            break;
        }
    runs[part]++;
    done++;
}

int main(void) {
    _Alignas(64) static char memory[64 * 3];
    for (int32_t threads = 2; threads <= 3; threads++) {
        gs_work work = {memory, 0, 64, threads};
        gs_pool *pool = gs_pool_new();
        gs_pool_resize(pool, threads);
        for (int slow = 0; slow < PARTS && !wrong; slow++) {
            gs_fault fault;
            gs_call call = {.run = run, .n_parts = PARTS, .arg = {slow}};
            memset(runs, 0, sizeof(runs));
            done = 0;
            if (gs_pool_run(pool, &call, 1, &work, NULL, &fault) != -1)
                wrong++;
            for (int i = 0; i < PARTS; i++)
                wrong += runs[i] != 1;
        }
        gs_pool_free(pool);
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
