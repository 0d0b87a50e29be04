/* failing_malloc.c -- malloc, calloc and realloc that fail on demand for callers in given ranges of code.
 *
 * To be preloaded (LD_PRELOAD).  Everybody else gets what glibc gives.  Counts what the callers in the ranges hold, so
 * that a failure that leaks is seen.  One thread at a time: the tests that use it have no more.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void __libc_free(void *memory);

#define MAX_RANGES 16

static uintptr_t begins[MAX_RANGES], ends[MAX_RANGES];
static int n_ranges;
static long calls, first, last, held;

void failing_malloc_watch(uintptr_t begin, uintptr_t end) {
    if (n_ranges < MAX_RANGES) {
        begins[n_ranges] = begin;
        ends[n_ranges++] = end;
    }
}

/* Calls from now on are counted from 1; those from `from` to `to` fail.  0, 0: none does. */
void failing_malloc_fail(long from, long to) {
    calls = 0;
    first = from;
    last = to;
}

long failing_malloc_calls(void) { return calls; }
long failing_malloc_held(void) { return held; }

static int watched(void *caller) {
    int i;
    for (i = 0; i < n_ranges; i++)
        if ((uintptr_t)caller >= begins[i] && (uintptr_t)caller < ends[i]) return 1;
    return 0;
}

static int fails(void) {
    calls++;
    return first && calls >= first && calls <= last;
}

void *malloc(size_t size) {
    void *memory;
    if (!watched(__builtin_return_address(0))) return __libc_malloc(size);
    memory = fails() ? NULL : __libc_malloc(size);
    held += memory != NULL;
    return memory;
}

void *calloc(size_t count, size_t size) {
    void *memory;
    if (!watched(__builtin_return_address(0))) return __libc_calloc(count, size);
    memory = fails() ? NULL : __libc_calloc(count, size);
    held += memory != NULL;
    return memory;
}

void *realloc(void *old, size_t size) {
    void *memory;
    if (!watched(__builtin_return_address(0))) return __libc_realloc(old, size);
    memory = fails() ? NULL : __libc_realloc(old, size);
    held += memory != NULL && old == NULL;
    return memory;
}

void free(void *memory) {
    if (memory != NULL && watched(__builtin_return_address(0))) held--;
    __libc_free(memory);
}
