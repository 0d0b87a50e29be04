/* tools/counted_memory.h -- counts the blocks of C memory that compiled modules take and free, in debug builds.
 *
 * setup.py has the compiler include it before every source of a debug or sanitizer build; no other build contains any
 * of it.  Each module exports two counters of its own.  A block may be freed by another module than the one that took
 * it, so only the sums over all modules say how many are alive; tests/support/alive.py adds them up.
 */
#ifndef GGML_SCHED_COUNTED_MEMORY_H
#define GGML_SCHED_COUNTED_MEMORY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE         /* before the first header of the system: some sources need it */
#endif
#include <stdint.h>
#include <stdlib.h>

/* Weak: one pair for all sources of a module. */
__attribute__((weak, visibility("default"))) int64_t gs_blocks_taken = 0;
__attribute__((weak, visibility("default"))) int64_t gs_blocks_freed = 0;

static inline void *gs_counted_block(void *block)
{
    if (block != NULL) __atomic_fetch_add(&gs_blocks_taken, 1, __ATOMIC_RELAXED);
    return block;
}

static inline void *gs_counted_malloc(size_t bytes)
{
    return gs_counted_block(malloc(bytes));
}

static inline void *gs_counted_calloc(size_t n, size_t bytes)
{
    return gs_counted_block(calloc(n, bytes));
}

static inline void *gs_counted_aligned_alloc(size_t alignment, size_t bytes)
{
    return gs_counted_block(aligned_alloc(alignment, bytes));
}

/* A block that grows stays one block. */
static inline void *gs_counted_realloc(void *block, size_t bytes)
{
    return block == NULL ? gs_counted_malloc(bytes) : realloc(block, bytes);
}

static inline void gs_counted_free(void *block)
{
    if (block != NULL) __atomic_fetch_add(&gs_blocks_freed, 1, __ATOMIC_RELAXED);
    free(block);
}

/* Names without parameters: pointers to these functions are replaced, too, and members of structs stay consistent. */
#define malloc gs_counted_malloc
#define calloc gs_counted_calloc
#define aligned_alloc gs_counted_aligned_alloc
#define realloc gs_counted_realloc
#define free gs_counted_free

#endif
