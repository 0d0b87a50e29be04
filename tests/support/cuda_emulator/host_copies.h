// Copies to shared memory that go on while their thread computes: cp.async of 16 bytes, on the host.
//
// As late as may be: a copy is made when its thread waits for it.  So a thread that reads without waiting, or before a
// barrier behind the wait of another, finds what was there before.  A thread that ends and has not waited is an error.
#pragma once
#include "host_fibers.h"

namespace host_cuda {

struct Copying { void* to; const void* from; bool whole; };
enum { MOST_COPIES = 256 };
static Copying copying[1024][MOST_COPIES];  // of each thread of a block
static int n_copying[1024], n_unfinished;   // of each thread, of all

static inline void copy_later(void* to, const void* from, bool whole) {
    const uintptr_t shared = reinterpret_cast<uintptr_t>(to), first = reinterpret_cast<uintptr_t>(shared_memory);
    if (shared % 16 || reinterpret_cast<uintptr_t>(from) % 16) stop("a misaligned address of cp.async");
    if (shared < first || shared + 16 > first + shared_size) stop("cp.async to memory that is not shared");
    if (n_copying[current] == MOST_COPIES) stop("the host has no room for so many copies that were not waited for");
    copying[current][n_copying[current]++] = {to, from, whole};
    ++n_unfinished;
}

static inline void finish_copies() {
    for (int i = 0; i < n_copying[current]; ++i) {
        const Copying& c = copying[current][i];
        if (c.whole) memcpy(c.to, c.from, 16);
        else memset(c.to, 0, 16);
    }
    n_unfinished -= n_copying[current];
    n_copying[current] = 0;
}

// At the end of a block; false, and a message, where copies were not waited for.
static inline bool end_copies() {
    if (!n_unfinished) return true;
    memset(n_copying, 0, sizeof n_copying);
    n_unfinished = 0;
    fail("a thread ends and has not waited for its copies to shared memory");
    return false;
}

}  // namespace host_cuda

// cp.async.cg.shared.global of 16 bytes, which are 0 where not `whole`; and cp.async.wait_all.
[[gnu::unused]] static void copy_16(void* shared, const void* from, bool whole = true) {
    host_cuda::copy_later(shared, from, whole);
}
[[gnu::unused]] static void wait_copies() { host_cuda::finish_copies(); }
