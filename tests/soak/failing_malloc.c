/* failing_malloc.c -- malloc, calloc and realloc that fail on demand for callers in given ranges of code.
 *
 * To be preloaded (LD_PRELOAD).  All other callers get glibc's functions.  Records the blocks allocated for callers in
 * the ranges, so that leaks after a failure are seen.  The caller of free() is not checked: a function that ends with
 * free() jumps there and looks like its own caller.  One thread at a time: the tests that use it have no more.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void __libc_free(void *memory);

#define MAX_RANGES 256

static uintptr_t begins[MAX_RANGES], ends[MAX_RANGES];
static int n_ranges;
static long calls, first, last, held;

#define N_SLOTS (1u << 20)
/* Hash table, linear probing, of the blocks allocated for callers in the ranges; its size is a power of two. */
static void *blocks[N_SLOTS];

static unsigned home(const void *block) { return (unsigned)(((uintptr_t)block >> 4) * 2654435761u) % N_SLOTS; }

static void note(void *block) {
    unsigned i = home(block);
    if (block == NULL || held >= N_SLOTS / 2) return;
    while (blocks[i] != NULL) i = (i + 1) % N_SLOTS;
    blocks[i] = block;
    held++;
}

/* Removes a block; returns whether it was there.  Later blocks move up, so that a lookup may stop at an empty slot. */
static int forget(const void *block) {
    unsigned hole = home(block), i;
    while (blocks[hole] != block) {
        if (blocks[hole] == NULL) return 0;
        hole = (hole + 1) % N_SLOTS;
    }
    for (i = (hole + 1) % N_SLOTS; blocks[i] != NULL; i = (i + 1) % N_SLOTS)
        if ((i - home(blocks[i])) % N_SLOTS >= (i - hole) % N_SLOTS) {
            blocks[hole] = blocks[i];
            hole = i;
        }
    blocks[hole] = NULL;
    held--;
    return 1;
}

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
    note(memory);
    return memory;
}

void *calloc(size_t count, size_t size) {
    void *memory;
    if (!watched(__builtin_return_address(0))) return __libc_calloc(count, size);
    memory = fails() ? NULL : __libc_calloc(count, size);
    note(memory);
    return memory;
}

void *realloc(void *old, size_t size) {
    void *memory;
    if (watched(__builtin_return_address(0))) {
        if (fails()) return NULL;
        memory = __libc_realloc(old, size);
        if (memory != NULL || size == 0) {
            if (old != NULL) forget(old);
            note(memory);
        }
        return memory;
    }
    memory = __libc_realloc(old, size);
    if (memory != NULL && old != NULL && forget(old)) note(memory);
    return memory;
}

void free(void *memory) {
    if (memory != NULL && held > 0) forget(memory);
    __libc_free(memory);
}
