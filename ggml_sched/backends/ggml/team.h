/* ggml_sched/backends/ggml/team.h -- the threads that ggml's CPU kernels run on, in place of libgomp's.
 *
 * A library built with OpenMP calls five functions of libgomp.  Ours stand in their places in that one library: nobody
 * else's OpenMP changes.  Why not libgomp's own: after a fork its pool waits for threads that are gone; and its barrier
 * either spins out its time slice (two threads beside a busy process fall to a twentieth of their speed) or sleeps at
 * once (six microseconds for each node).  Ours spins briefly, then yields, then sleeps, and starts anew after a fork.
 *
 * Each thread that computes has a team of its own, in thread-local memory, ended with the thread.
 */
#ifndef GGML_SCHED_BACKENDS_GGML_TEAM_H
#define GGML_SCHED_BACKENDS_GGML_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Nanoseconds of a clock that only goes on. */
static int64_t gx_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#if defined(__linux__) && defined(__GLIBC__) && defined(__LP64__)

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <limits.h>
#include <link.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GX_SPINS 1000
#define GX_YIELDS 200
/* Between two graphs: a thread that sleeps is often woken on the CPU of the one that wakes it, and shares it for
 * milliseconds.  The next token comes sooner than this. */
#define GX_PATIENCE_NS 1000000

static inline void gx_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until *word is no longer `old`, giving way for `patience` ns at least before it sleeps; `sleepers` counts who has
 * to be woken. */
static void gx_wait(atomic_int *word, int old, atomic_int *sleepers, int64_t patience)
{
    for (int i = 0; i < GX_SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) {
            return;
        }
        gx_pause();
    }
    const int64_t until = patience > 0 ? gx_now() + patience : 0;
    do {
        for (int i = 0; i < GX_YIELDS; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old) {
                return;
            }
            sched_yield();
        }
    } while (patience > 0 && gx_now() < until);
    /* Either we see the new value, or who has set it sees us: both orders are sequentially consistent. */
    atomic_fetch_add(sleepers, 1);
    while (atomic_load(word) == old) {
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    }
    atomic_fetch_sub(sleepers, 1);
}

/* After *word was changed. */
static void gx_wake(atomic_int *word, atomic_int *sleepers)
{
    if (atomic_load(sleepers) > 0) {
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
}

typedef struct gx_team {
    pid_t pid;
    int n_made;                 /* threads that there are, the caller included                     */
    int n;                      /* threads of the region that runs                                 */
    void (*function)(void *);
    void *data;
    bool ending;
    atomic_int round;           /* counts regions: workers wait for the next                       */
    atomic_int arrived;         /* at the barrier                                                  */
    atomic_int phase;           /* of the barrier                                                  */
    atomic_int running;         /* workers that are still in the region                            */
    atomic_int single;          /* how many `single`s of the region are taken                      */
    atomic_int sleepers;
    pthread_t threads[512];
    clockid_t clocks[512];      /* of their CPU time                                               */
} gx_team;

typedef struct gx_seat {
    gx_team *team;              /* the region that this thread is in, NULL: none                   */
    int number;
    int singles;                /* how many `single`s this thread has met in the region            */
    gx_team *own;               /* made by this thread, for regions that it starts                 */
} gx_seat;

/* Thread-local: what libgomp keeps there, too.  Nothing is shared between threads that start regions. */
static __thread gx_seat gx_here __attribute__((tls_model("initial-exec")));
/* Ends the team of a thread that ends.  Written once, before any team is made. */
static pthread_key_t gx_key;
static pthread_once_t gx_key_made = PTHREAD_ONCE_INIT;

typedef struct gx_start {
    gx_team *team;
    int number;
    int round;
} gx_start;

static void *gx_work(void *given)
{
    gx_start start = *(gx_start *)given;
    gx_team *team = start.team;
    int round = start.round;
    free(given);
    for (;;) {
        gx_wait(&team->round, round, &team->sleepers, GX_PATIENCE_NS);
        round = atomic_load_explicit(&team->round, memory_order_acquire);
        if (team->ending) {
            return NULL;
        }
        if (start.number < team->n) {
            gx_here.team = team;
            gx_here.number = start.number;
            gx_here.singles = 0;
            team->function(team->data);
            gx_here.team = NULL;
        }
        /* Also those that had no part: the next region may not begin while somebody reads this one. */
        if (atomic_fetch_sub(&team->running, 1) == 1) {
            gx_wake(&team->running, &team->sleepers);
        }
    }
}

static void gx_end_team(void *given)
{
    gx_team *team = given;
    if (team->pid == getpid()) {
        team->ending = true;
        atomic_fetch_add(&team->round, 1);
        gx_wake(&team->round, &team->sleepers);
        for (int i = 1; i < team->n_made; i++) {
            pthread_join(team->threads[i], NULL);
        }
    }
    free(team);
}

static void gx_make_key(void)
{
    (void)pthread_key_create(&gx_key, gx_end_team);
}

/* The team of this thread with at least n threads, or with as many as the host gives; NULL: no memory. */
static gx_team *gx_own_team(int n)
{
    gx_team *team = gx_here.own;
    sigset_t all, before;
    if (team != NULL && team->pid != getpid()) {
        free(team);             /* its threads are those of the process that forked this one */
        team = NULL;
    }
    if (team == NULL) {
        pthread_once(&gx_key_made, gx_make_key);
        team = calloc(1, sizeof *team);
        gx_here.own = team;
        pthread_setspecific(gx_key, team);
        if (team == NULL) {
            return NULL;
        }
        team->pid = getpid();
        team->n_made = 1;
    }
    if (team->n_made < n) {
        /* Signals are for the threads that Python knows. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (team->n_made < n && team->n_made < 512) {
            gx_start *start = malloc(sizeof *start);
            if (start == NULL) {
                break;
            }
            *start = (gx_start){team, team->n_made, atomic_load(&team->round)};
            if (pthread_create(&team->threads[team->n_made], NULL, gx_work, start) != 0) {
                free(start);
                break;
            }
            if (pthread_getcpuclockid(team->threads[team->n_made], &team->clocks[team->n_made]) != 0) {
                team->clocks[team->n_made] = CLOCK_THREAD_CPUTIME_ID;
            }
            team->n_made++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return team;
}

/* #pragma omp parallel num_threads(n) */
static void gx_parallel(void (*function)(void *), void *data, unsigned n, unsigned flags)
{
    const gx_seat before = gx_here;
    gx_team *team = n > 1 && before.team == NULL ? gx_own_team((int)(n < 512 ? n : 512)) : NULL;
    (void)flags;
    if (team == NULL || team->n_made == 1) {
        static gx_team alone = {.n = 1};        /* never written: a region of one thread */
        gx_here.team = &alone;
        gx_here.number = gx_here.singles = 0;
        function(data);
    } else {
        team->function = function;
        team->data = data;
        team->n = (int)n < team->n_made ? (int)n : team->n_made;
        atomic_store(&team->arrived, 0);
        atomic_store(&team->single, 0);
        atomic_store(&team->running, team->n_made - 1);
        gx_here.team = team;
        gx_here.number = gx_here.singles = 0;
        atomic_fetch_add(&team->round, 1);
        gx_wake(&team->round, &team->sleepers);
        function(data);
        for (int left; (left = atomic_load_explicit(&team->running, memory_order_acquire)) != 0;) {
            gx_wait(&team->running, left, &team->sleepers, 0);
        }
    }
    gx_here.team = before.team;
    gx_here.number = before.number;
    gx_here.singles = before.singles;
}

/* #pragma omp barrier */
static void gx_barrier(void)
{
    gx_team *team = gx_here.team;
    if (team == NULL || team->n == 1) {
        return;
    }
    const int phase = atomic_load_explicit(&team->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->n - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_fetch_add(&team->phase, 1);
        gx_wake(&team->phase, &team->sleepers);
    } else {
        gx_wait(&team->phase, phase, &team->sleepers, 0);
    }
}

/* #pragma omp single: whether this thread is the one */
static bool gx_single_start(void)
{
    gx_team *team = gx_here.team;
    int expected = gx_here.singles++;
    return team == NULL || team->n == 1 || atomic_compare_exchange_strong(&team->single, &expected, expected + 1);
}

/* Seconds of CPU time that the caller and the first n - 1 threads of its team have had; -1: they are not here. */
static double gx_team_seconds(int n)
{
    const gx_team *team = gx_here.own;
    double total = 0;
    if (n > 1 && (team == NULL || team->pid != getpid() || team->n_made < n)) {
        return -1;
    }
    for (int i = 0; i < n; i++) {
        struct timespec had = {0, 0};
        clock_gettime(i == 0 ? CLOCK_THREAD_CPUTIME_ID : team->clocks[i], &had);
        total += (double)had.tv_sec + 1e-9 * (double)had.tv_nsec;
    }
    return total;
}

static int gx_thread_num(void)
{
    return gx_here.team == NULL ? 0 : gx_here.number;
}

static int gx_num_threads(void)
{
    return gx_here.team == NULL ? 1 : gx_here.team->n;
}

static void *gx_replacement(const char *name)
{
    static const struct { const char *name; void *function; } table[] = {
        {"GOMP_parallel", (void *)gx_parallel}, {"GOMP_barrier", (void *)gx_barrier},
        {"GOMP_single_start", (void *)gx_single_start}, {"omp_get_thread_num", (void *)gx_thread_num},
        {"omp_get_num_threads", (void *)gx_num_threads},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (strcmp(name, table[i].name) == 0) {
            return table[i].function;
        }
    }
    return NULL;
}

static int gx_is_of_openmp(const char *name)
{
    return strncmp(name, "GOMP_", 5) == 0 || strncmp(name, "omp_", 4) == 0 || strncmp(name, "__kmpc_", 7) == 0;
}

enum gx_visit { GX_LOOK, GX_WRITE, GX_CHECK };

/* Visit the references to functions in one table: look whether we have all of OpenMP's, write ours, or check that they
 * are ours.  -1: no, or the memory may not be written; else how many. */
static int gx_visit(struct link_map *map, const ElfW(Rela) *at, size_t size, const ElfW(Sym) *symbols,
                    const char *strings, enum gx_visit what)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int found = 0;
    for (size_t i = 0; i < size / sizeof *at; i++) {
        const size_t symbol = ELF64_R_SYM(at[i].r_info);
        const char *name = symbol == 0 ? "" : strings + symbols[symbol].st_name;
        if (!gx_is_of_openmp(name)) {
            continue;
        }
        void *ours = gx_replacement(name);
        if (ours == NULL) {
            return -1;
        }
        void **slot = (void **)(map->l_addr + at[i].r_offset);
        if (what == GX_CHECK && *slot != ours) {
            return -1;
        }
        if (what == GX_WRITE) {
            /* It stays writable: whether the loader still binds other functions of this page we do not know. */
            void *start = (void *)((uintptr_t)slot / page * page);
            if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
                return -1;
            }
            *slot = ours;
        }
        found++;
    }
    return found;
}

/* Let a loaded library (a handle of dlopen) run on our threads, unless it `runs` already, for somebody else; 1: it
 * does, 0: it does not, or has no OpenMP that we can stand for. */
static int gx_adopt_threads(void *handle, bool runs)
{
    struct link_map *map = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    size_t sizes[2] = {0, 0};
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    int found = 0;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0) {
        return 0;
    }
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_JMPREL: tables[0] = (const void *)d->d_un.d_ptr; break;
        case DT_PLTRELSZ: sizes[0] = d->d_un.d_val; break;
        case DT_RELA: tables[1] = (const void *)d->d_un.d_ptr; break;
        case DT_RELASZ: sizes[1] = d->d_un.d_val; break;
        case DT_SYMTAB: symbols = (const void *)d->d_un.d_ptr; break;
        case DT_STRTAB: strings = (const void *)d->d_un.d_ptr; break;
        case DT_PLTREL: if (d->d_un.d_val != DT_RELA) { return 0; } break;
        default: break;
        }
    }
    if (symbols == NULL || strings == NULL) {
        return 0;
    }
    for (enum gx_visit what = runs ? GX_CHECK : GX_LOOK; what <= GX_CHECK; what++) {
        found = 0;
        for (int i = 0; i < 2; i++) {
            const int here = tables[i] == NULL ? 0 : gx_visit(map, tables[i], sizes[i], symbols, strings, what);
            if (here < 0) {
                return 0;
            }
            found += here;
        }
    }
    return found > 0;
}

#else

static double gx_team_seconds(int n)
{
    (void)n;
    return -1;
}

static int gx_adopt_threads(void *handle, bool runs)
{
    (void)handle;
    (void)runs;
    return 0;
}

#endif
#endif
