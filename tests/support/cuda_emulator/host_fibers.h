// Threads of a CUDA block as fibers on one thread of the host, and their state.
//
// Owns: stacks, and the state of warps.  Invariant: one fiber runs at a time and is left only where its thread waits or
// ends.  A fiber runs threads one after the other, as plain calls, until a thread waits; the fiber then belongs to that
// thread, and another fiber runs the rest.  So a kernel whose threads never wait costs one switch for 32 threads, not
// one for each.
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
    unsigned mask[32];      // of the lanes that it waits for
    uint64_t slot[32];      // its argument of the barrier
    uint64_t seen[32];      // its argument when the barrier opened
    unsigned members[32];   // lanes that took part in that barrier
    unsigned ballot[32];    // those of them with an argument other than 0
    unsigned turn[32];      // how many products of matrices a lane has begun
    unsigned awaited;       // lanes that have called await_inputs()
    Fiber* fiber[32];
};

static Warp warps[32];
static int n_warps, n_threads;
static int current;                     // index of the running thread
static Fiber *running, *idle;           // idle: fibers without a thread
static Context scheduler;
static unsigned start_lanes;            // lanes of warp start_warp that the running fiber may still begin
static int start_warp;
static unsigned order, rng;
static unsigned char* shared_memory;
static size_t shared_size;
static void (*entry)(void*);
static void* entry_argument;
static bool failed;
static uint64_t n_switches;             // to fibers since loading: the cost of a launch besides its threads
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

// The lanes in the order of this launch: multiplying by an odd number modulo 32 is a permutation.
struct Lanes {
    unsigned factor, shift;
    Lanes() : factor(order == 0 ? 1 : order == 1 ? 31 : 2 * random_below(16) + 1),
              shift(order == 0 ? 0 : order == 1 ? 31 : random_below(32)) {}
    int operator[](unsigned i) const { return static_cast<int>((i * factor + shift) & 31); }
};
static Lanes start_order;

// The endless loop of every fiber: begin threads while start_lanes has some, then become idle.
static void fiber_main() {
    Fiber* const self = running;
    for (;;) {
        for (unsigned i = 0; i < 32 && start_lanes; ++i) {
            const int lane = start_order[i];
            if (!(start_lanes >> lane & 1)) continue;
            Warp& w = warps[start_warp];
            const int warp = start_warp;
            start_lanes &= ~(1u << lane);
            w.fresh &= ~(1u << lane);
            w.fiber[lane] = self;
            select(warp * 32 + lane);
            entry(entry_argument);
            warps[warp].done |= 1u << lane;
        }
        self->next = idle;
        idle = self;
        leave(self);
    }
}

#ifndef HOST_CUDA_ASSEMBLY
// A function of its own, since the compiler assumes that getcontext may return twice.
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

static inline void wait_block(int line) {
    Warp& w = warps[current / 32];
    const int lane = current % 32;
    w.line[lane] = line;
    w.at_block |= 1u << lane;
    leave(w.fiber[lane]);
}

[[gnu::unused, noreturn]] static void stop(const char* what) {
    fail(what);
    for (;;) leave(warps[current / 32].fiber[current % 32]);
}

}  // namespace host_cuda
