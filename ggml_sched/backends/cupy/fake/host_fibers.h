// Threads of a block on one thread of the host: fibers, barriers, thread orders.
//
// Owns: which CUDA thread runs.  Invariant: one fiber runs at a time and is left only where its thread waits or ends.
// A fiber runs one thread after another, as plain calls; it stays behind with the first that waits.  So a kernel whose
// threads never wait costs one switch for 32 threads, not one for each.
//
// A warp runs until all its threads wait for other warps, then the next: as far ahead of each other as the kernel's
// barriers allow.  Order 0 is forward, 1 backward, any other a seed (which lets a warp stop early, too).
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && !defined(HOST_CUDA_UCONTEXT)
#define HOST_CUDA_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
[[gnu::unused]] static uint3 threadIdx, blockIdx;
[[gnu::unused]] static dim3 blockDim, gridDim;

// All arrays that are __shared__ lie in one section, whose ends the linker knows.
extern "C" {
extern unsigned char __start_host_shared[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_host_shared[] __attribute__((weak, visibility("hidden")));
}

namespace host_cuda {

#ifdef HOST_CUDA_ASSEMBLY
typedef void* Context;      // a stack pointer, below which the registers lie that a call must keep
extern "C" void host_cuda_switch(void** save, void* to) __attribute__((visibility("hidden")));
asm(".text\n"
    ".hidden host_cuda_switch\n"
    ".globl host_cuda_switch\n"
    ".type host_cuda_switch, @function\n"
    "host_cuda_switch:\n"
    "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
    "    ret\n"
    ".size host_cuda_switch, .-host_cuda_switch\n");
#else
typedef ucontext_t Context;
#endif

#ifndef HOST_CUDA_STACK
#define HOST_CUDA_STACK (64 << 10)      // sanitizers take more
#endif
enum { STACK = HOST_CUDA_STACK };
static const uint64_t GUARD = 0x5ca1ab1e0ddba11ull;

struct Fiber {
    Context context;
    char* stack;
    Fiber* next;
};

// Bits are lanes.  A lane is in one of fresh, ready, at_warp, at_block and done.
struct Warp {
    unsigned alive, fresh, ready, at_warp, at_block, done;
    int line[32];           // where a lane waits
    unsigned mask[32];      // for whom
    uint64_t slot[32];      // what it brought
    uint64_t seen[32];      // what its warp brought when the barrier opened
    unsigned members[32];   // who took part in that
    unsigned ballot[32];    // who of them brought something else than 0
    Fiber* fiber[32];
};

static Warp warps[32];
static int n_warps, n_threads;
static int current;                     // index of the running thread
static Fiber *running, *idle;           // idle: fibers without a thread
static Context scheduler;
static unsigned start_lanes;            // what the running fiber may still begin, of warp start_warp
static int start_warp;
static unsigned order, rng;
static unsigned block_votes;            // of the last __syncthreads_*: threads with a predicate that holds
static unsigned char* shared_memory;
static size_t shared_size;
static void (*entry)(void*);
static void* entry_argument;
static bool failed;
static uint64_t n_switches;             // to fibers, ever: what a launch costs besides its threads
static char message[400];

static inline unsigned random_below(unsigned n) {
    rng = rng * 1664525u + 1013904223u;
    return static_cast<unsigned>((static_cast<uint64_t>(rng >> 4) * n) >> 28);
}

#ifdef HOST_CUDA_ASSEMBLY
static inline void leave(Fiber* f) { host_cuda_switch(&f->context, scheduler); }
static inline void enter(Fiber* f) { ++n_switches; host_cuda_switch(&scheduler, f->context); }
#else
static inline void leave(Fiber* f) { swapcontext(&f->context, &scheduler); }
static inline void enter(Fiber* f) { ++n_switches; swapcontext(&scheduler, &f->context); }
#endif

static inline void select(int t) {
    current = t;
    const unsigned u = static_cast<unsigned>(t);
    if (u < blockDim.x) { threadIdx.x = u; threadIdx.y = threadIdx.z = 0; return; }
    threadIdx.x = u % blockDim.x;
    threadIdx.y = u / blockDim.x % blockDim.y;
    threadIdx.z = u / (blockDim.x * blockDim.y);
}

// The lanes in the order of this launch; a multiplication by an odd number goes through all.
struct Lanes {
    unsigned factor, shift;
    Lanes() : factor(order == 0 ? 1 : order == 1 ? 31 : 2 * random_below(16) + 1),
              shift(order == 0 ? 0 : order == 1 ? 31 : random_below(32)) {}
    int operator[](unsigned i) const { return static_cast<int>((i * factor + shift) & 31); }
};
static Lanes start_order;

// What every fiber does for ever: begin threads while the scheduler wants some begun, then lie idle.
static void fiber_main() {
    Fiber* const self = running;
    for (;;) {
        for (unsigned i = 0; i < 32 && start_lanes; ++i) {
            const int lane = start_order[i];
            if (!(start_lanes >> lane & 1)) continue;
            Warp& w = warps[start_warp];
            const int home = start_warp;
            start_lanes &= ~(1u << lane);
            w.fresh &= ~(1u << lane);
            w.fiber[lane] = self;
            select(home * 32 + lane);
            entry(entry_argument);
            warps[home].done |= 1u << lane;
        }
        self->next = idle;
        idle = self;
        leave(self);
    }
}

#ifndef HOST_CUDA_ASSEMBLY
// By itself, since getcontext may return twice as far as the compiler knows.
__attribute__((noinline)) static void make_context(Fiber* f) {
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = STACK;
    f->context.uc_link = nullptr;
    makecontext(&f->context, fiber_main, 0);
}
#endif

static Fiber* new_fiber() {
    Fiber* f = static_cast<Fiber*>(malloc(sizeof(Fiber)));
    char* stack = f ? static_cast<char*>(malloc(STACK)) : nullptr;
    if (!stack) { free(f); return nullptr; }
    f->stack = stack;
    memcpy(stack, &GUARD, sizeof GUARD);
#ifdef HOST_CUDA_ASSEMBLY
    void** top = reinterpret_cast<void**>(stack + STACK - 64);
    *--top = nullptr;                                       // the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(fiber_main);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    f->context = top;
#else
    make_context(f);
#endif
    return f;
}

static inline void fail(const char* what) {
    if (failed) return;
    failed = true;
    snprintf(message, sizeof message, "block (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z, what);
}

static inline void wait_warp(unsigned mask, int line, uint64_t value) {
    Warp& w = warps[current / 32];
    const int lane = current % 32;
    w.line[lane] = line; w.mask[lane] = mask; w.slot[lane] = value;
    w.at_warp |= 1u << lane;
    leave(w.fiber[lane]);
}

static inline void wait_block(int line, uint64_t value) {
    Warp& w = warps[current / 32];
    const int lane = current % 32;
    w.line[lane] = line; w.slot[lane] = value;
    w.at_block |= 1u << lane;
    leave(w.fiber[lane]);
}

[[gnu::unused, noreturn]] static void stop(const char* what) {
    fail(what);
    for (;;) leave(warps[current / 32].fiber[current % 32]);
}

// Open the barriers of a warp that everybody reached.
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

// Open the barrier of the block if everybody reached it; a thread that returned never will: CUDA's documents allow
// only barriers that all threads of the block meet, whatever the hardware does.
static inline bool open_block() {
    int line = 0, at = 0;
    unsigned votes = 0;
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
            votes += w.slot[l] != 0;
        }
    }
    block_votes = votes;
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
        if (is_done) return true;
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
        if (!run_block(k)) { drop_fibers(); return 1; }
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
