// Many call sites of one function, and a count of lookups of an address's library (dladdr). Preloaded.

#include <dlfcn.h>

static int n_asked;

extern "C" {

int dladdr(const void *address, Dl_info *info) noexcept {
    static auto next = reinterpret_cast<int (*)(const void *, Dl_info *)>(dlsym(RTLD_NEXT, "dladdr"));
    n_asked++;
    return next(address, info);
}

int callers_asked() { return n_asked; }

}

namespace {

using Function = int (*)(void *);

volatile int sink;

template <int n> inline __attribute__((always_inline)) void pad() {
    if constexpr (n > 0) {
        sink = n;
        pad<n - 1>();
    }
}

// Call sites at uneven distances, as in a client.
template <int n> inline __attribute__((always_inline)) int call(Function function, void *scheduler) {
    if constexpr (n == 0) {
        return 0;
    } else {
        int found = function(scheduler);
        pad<n * 37 % 13>();
        return found + call<n - 1>(function, scheduler);
    }
}

}

extern "C" int callers_call(Function function, void *scheduler) { return call<64>(function, scheduler); }
