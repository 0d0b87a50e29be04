// Launches that may begin before those before them have ended: what of those is missing until a thread waits.
//
// Owns the memory's two states.  Up to the first await_inputs() of a launch, the memory is as it was before the
// launches that it may overlap with; then it becomes what they have made of it.  Invariants: a kernel writes nothing
// before it waits, and each of its threads waits; else the launch fails.  What it reads before, in the thread that is
// first, is out of date: it shows as a wrong result.
#pragma once
#include "host_fibers.h"

namespace host_cuda {

// A piece of memory: `then`, its bytes before the launches before this one; `now` has room for those after them.
struct Stale {
    unsigned char* at;
    uint64_t size;
    const unsigned char* then;
    unsigned char* now;
};

static const Stale* stale;
static unsigned n_stale;
static bool is_early, is_stale;
static uint64_t n_awaited;              // threads of the launch that have waited

static inline void begin_early(const Stale* pieces, unsigned n) {
    is_early = is_stale = true;
    stale = pieces;
    n_stale = n;
}

// Takes the memory back to what it was.
static inline void become_stale() {
    n_awaited = 0;
    for (unsigned i = 0; is_stale && i < n_stale; ++i) {
        memcpy(stale[i].now, stale[i].at, stale[i].size);
        memcpy(stale[i].at, stale[i].then, stale[i].size);
    }
}

// Brings what the launches before have written.
static inline void become_fresh() {
    bool wrote = false;
    for (unsigned i = 0; i < n_stale; ++i) {
        wrote = wrote || memcmp(stale[i].at, stale[i].then, stale[i].size) != 0;
        memcpy(stale[i].at, stale[i].now, stale[i].size);
    }
    is_stale = false;
    if (wrote) fail("memory is written before await_inputs()");
}

[[gnu::unused]] static void await_inputs() {
    if (is_stale) become_fresh();
    Warp& w = warps[current / 32];
    const unsigned lane = 1u << current % 32;
    if (!(w.awaited & lane)) ++n_awaited;
    w.awaited |= lane;
}

// At the end of a launch; false, and a message, where not all of its threads have waited.
static inline bool end_early(uint64_t threads) {
    const bool was_early = is_early;
    if (is_stale) become_fresh();
    is_early = false;
    n_stale = 0;
    if (failed || !was_early || n_awaited == threads) return !failed;
    char text[120];
    snprintf(text, sizeof text, "of %llu threads %llu call await_inputs()", static_cast<unsigned long long>(threads),
             static_cast<unsigned long long>(n_awaited));
    fail(text);
    return false;
}

// Reads a byte, which the sanitizers look at.
[[gnu::unused]] static void read_ahead(const void* p) { (void)*static_cast<const volatile unsigned char*>(p); }

}  // namespace host_cuda
