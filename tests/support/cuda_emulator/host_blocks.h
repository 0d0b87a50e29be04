// Schedules the threads of a CUDA block, and opens its barriers.
//
// Owns: the order of threads, warps and blocks.  A warp runs until all its threads wait for other warps, then the next:
// as far ahead of each other as the kernel's barriers allow.  Order 0 is forward, 1 backward, any other a seed (which
// lets a warp stop early, too).  Invariant: a barrier that can never open is an error that names the waiting threads
// and their lines.
#pragma once
#include "host_copies.h"
#include "host_overlap.h"

namespace host_cuda {

// Open those barriers of a warp that all their threads have reached.
static inline bool open_warp(int index) {
    Warp& w = warps[index];
    bool opened = false;
    char text[200];
    for (unsigned left = w.at_warp; left;) {
        const int first = __builtin_ctz(left);
        const unsigned mask = w.mask[first], members = mask & w.alive, here = members & w.at_warp;
        unsigned ballot = 0;
        if (!(members >> first & 1)) {
            snprintf(text, sizeof text, "thread %d waits at line %d with mask %08x, which leaves it out",
                     index * 32 + first, w.line[first], mask);
            fail(text);
            return false;
        }
        for (unsigned rest = here; rest; rest &= rest - 1) {
            const int l = __builtin_ctz(rest);
            if (w.mask[l] != mask || w.line[l] != w.line[first]) {
                snprintf(text, sizeof text, "divergent barrier of a warp: thread %d waits at line %d with mask %08x, "
                         "thread %d at line %d with mask %08x", index * 32 + first, w.line[first], mask,
                         index * 32 + l, w.line[l], w.mask[l]);
                fail(text);
                return false;
            }
            if (w.slot[l]) ballot |= 1u << l;
        }
        left &= ~here;
        if (here != members) continue;
        for (unsigned rest = here; rest; rest &= rest - 1) {
            const int l = __builtin_ctz(rest);
            w.seen[l] = w.slot[l]; w.members[l] = members; w.ballot[l] = ballot;
        }
        w.at_warp &= ~here;
        w.ready |= here;
        opened = true;
    }
    return opened;
}

// Open the barrier of the block if all threads have reached it.  A thread that returned never will: CUDA's documents
// permit only barriers that all threads of the block reach, although hardware is more tolerant.
static inline bool open_block() {
    int line = 0, at = 0;
    for (int i = 0; i < n_warps; ++i) {
        Warp& w = warps[i];
        if (w.at_block != w.alive) return false;
        for (unsigned rest = w.at_block; rest; rest &= rest - 1) {
            const int l = __builtin_ctz(rest);
            if (!line) { line = w.line[l]; at = i * 32 + l; }
            if (w.line[l] != line) {
                char text[160];
                snprintf(text, sizeof text, "divergent barrier: thread %d waits at line %d, thread %d at line %d",
                         at, line, i * 32 + l, w.line[l]);
                fail(text);
                return false;
            }
        }
    }
    for (int i = 0; i < n_warps; ++i) { warps[i].ready = warps[i].at_block; warps[i].at_block = 0; }
    return true;
}

static inline void report_stuck() {
    int at_block = 0, at_warp = 0, done = 0, line = 0;
    for (int i = 0; i < n_warps; ++i) {
        const Warp& w = warps[i];
        at_block += __builtin_popcount(w.at_block);
        at_warp += __builtin_popcount(w.at_warp);
        done += __builtin_popcount(w.done);
        const unsigned waiting = w.at_block | w.at_warp;
        if (!line && waiting) line = w.line[__builtin_ctz(waiting)];
    }
    char text[200];
    snprintf(text, sizeof text, "divergent barrier at line %d: of %d threads %d wait for the block, %d for their warp, "
             "%d have returned", line, n_threads, at_block, at_warp, done);
    fail(text);
}

// Let the threads of a warp run until they wait for other warps.
static inline void run_warp(int index) {
    Warp& w = warps[index];
    while (w.fresh | w.ready) {
        Lanes lanes;
        start_warp = index; start_lanes = w.fresh; start_order = lanes;
        while (start_lanes && !failed) {
            if (!idle) {
                Fiber* f = new_fiber();
                if (!f) { fail("the host has no memory for stacks"); return; }
                f->next = nullptr;
                idle = f;
            }
            running = idle;
            idle = idle->next;
            enter(running);
        }
        const unsigned now = w.ready;
        for (unsigned i = 0; i < 32 && !failed; ++i) {
            const int lane = lanes[i];
            if (!(now >> lane & 1)) continue;
            w.ready &= ~(1u << lane);
            select(index * 32 + lane);
            running = w.fiber[lane];
            enter(running);
        }
        if (failed) return;
        if (w.at_warp) open_warp(index);
        if (failed || (order > 1 && random_below(4) == 0)) return;
    }
}

// Shared memory is uninitialised on a GPU; NaNs and -1 make a read of it show.  The static arrays of a whole module may
// be large: then only the first blocks of a launch begin with poison in them.
__attribute__((noinline, no_sanitize_address)) static void poison_shared(uint64_t n_blocks_done) {
    if (shared_size) memset(shared_memory, 0xff, shared_size);
    const size_t n = static_cast<size_t>(__stop_host_shared - __start_host_shared);
    if (n > 64 << 10 && n_blocks_done > 1) return;
#ifdef __SANITIZE_ADDRESS__
    for (volatile unsigned char* p = __start_host_shared; p < __stop_host_shared; ++p) *p = 0xff;   // over red zones
#else
    if (n) memset(__start_host_shared, 0xff, n);
#endif
}

static inline bool run_block(uint64_t n_blocks_done) {
    poison_shared(n_blocks_done);
    for (int i = 0; i < n_warps; ++i) {
        Warp& w = warps[i];
        const int n = n_threads - i * 32;
        w.alive = w.fresh = n >= 32 ? ~0u : (1u << n) - 1;
        w.ready = w.at_warp = w.at_block = w.done = 0;
        w.awaited = 0;
        memset(w.turn, 0, sizeof w.turn);
    }
    for (;;) {
        bool ran = false, is_done = true;
        Lanes sequence;
        for (unsigned i = 0; i < 32; ++i) {
            const int index = sequence[i];
            if (index >= n_warps || !(warps[index].fresh | warps[index].ready)) continue;
            run_warp(index);
            if (failed) return false;
            ran = true;
        }
        for (int i = 0; i < n_warps; ++i) is_done = is_done && warps[i].done == warps[i].alive;
        if (is_done) return end_copies();
        if (!open_block() && !ran) {
            if (!failed) report_stuck();
            return false;
        }
        if (failed) return false;
    }
}

// The stacks of threads that never ended cannot be used again.
static inline void drop_fibers() {
    for (int i = 0; i < n_warps; ++i) {
        Warp& w = warps[i];
        const unsigned left = w.ready | w.at_warp | w.at_block | (w.alive & ~(w.fresh | w.done));
        for (unsigned rest = left; rest; rest &= rest - 1) {
            Fiber* f = w.fiber[__builtin_ctz(rest)];
            free(f->stack);
            free(f);
        }
    }
}

static inline unsigned gcd(unsigned a, unsigned b) { return b ? gcd(b, a % b) : a; }

// All blocks, in no order that means something either.  0, or 1 with a message.
static inline int run_grid(unsigned shared) {
    n_threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
    n_warps = (n_threads + 31) / 32;
    failed = false;
    if (shared != shared_size) {        // of the exact size, for AddressSanitizer
        free(shared_memory);
        shared_memory = shared ? static_cast<unsigned char*>(malloc(shared)) : nullptr;
        shared_size = shared_memory ? shared : 0;
        if (shared && !shared_memory) { fail("the host has no memory for shared memory"); return 1; }
    }
    const uint64_t total = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
    uint64_t factor = 1, at = 0;
    if (order > 1 && total < 1u << 31) {
        const unsigned n = static_cast<unsigned>(total);
        do { factor = 1 + random_below(n); } while (gcd(n, static_cast<unsigned>(factor)) != 1);
        at = random_below(n);
    }
    for (uint64_t k = 0; k < total; ++k, at = (at + factor) % total) {
        const uint64_t i = order == 1 ? total - 1 - k : at;
        blockIdx.x = static_cast<unsigned>(i % gridDim.x);
        blockIdx.y = static_cast<unsigned>(i / gridDim.x % gridDim.y);
        blockIdx.z = static_cast<unsigned>(i / gridDim.x / gridDim.y);
        if (!run_block(k)) { drop_fibers(); end_copies(); return 1; }
    }
    for (Fiber* f = idle; f; f = f->next) {
        if (memcmp(f->stack, &GUARD, sizeof GUARD) != 0) {
            fail("a thread needs more stack than the host gives it");
            return 1;
        }
    }
    return 0;
}

}  // namespace host_cuda
