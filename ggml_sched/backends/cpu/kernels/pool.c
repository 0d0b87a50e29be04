/* pool.c -- see pool.h.
 *
 * The parts of a call are divided among the threads: each has a range of parts that follow one another, so it reads
 * memory in order, and the same memory each time that a call runs.  A thread claims the first part of its own range,
 * or the first few where a call computes them faster at once; when that is empty, the last part of another one.  One
 * word holds the unclaimed parts of a range, and a claim is a compare-and-swap of that word, so a claim that is late
 * takes parts of the present call or fails.  Between a claim and its report in `done`, `call` stays valid, because the
 * caller waits until all parts are done.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "ggml_sched/clock.h"

#define MAX_THREADS 1024
/* Nanoseconds that an idle thread polls before it sleeps.  With 200,000 tokens were as fast on an idle machine, but
 * half as fast beside a busy process, which then has the processor when the thread has work. */
#define SPIN_NS 40000
#define POLLS 32                /* how often it polls between two readings of the clock   */
#define STACK_BYTES (512 << 10)
#define CACHE_LINE 128          /* bytes between words of different threads, against false sharing */

/* A thread of a crew; the caller of gs_pool_run has seat 0. */
typedef struct seat {
    _Alignas(CACHE_LINE) _Atomic uint64_t range;    /* unclaimed parts of the present call: range_of(...) */
    struct crew *crew;
    int32_t number;                 /* index of the seat: chooses the thread's scratch */
    pthread_t thread;
} seat;

/* The threads of a pool and all that they share.  A new crew is made whenever threads are started.  A forked child
 * reads only `owner` of its parent's crew, because the parent's threads and locks are of no use there. */
typedef struct crew {
    _Alignas(CACHE_LINE) _Atomic int32_t done;      /* parts of the present call that are done */
    _Atomic int32_t waiting;        /* the caller sleeps until the last part is done */
    _Alignas(CACHE_LINE) _Atomic int32_t asleep;    /* number of threads that sleep  */
    _Atomic int32_t stop;
    _Atomic int32_t at_once;        /* of the present call */
    const gs_call *call;
    const gs_work *work;
    gs_time *time;                  /* of the present call; NULL: not measured */
    gs_fault fault;
    int32_t fault_part;             /* the lowest part with a fault: the one that is reported */
    pthread_mutex_t lock;           /* protects fault and fault_part; the mutex of wake and all_done */
    pthread_cond_t wake;
    pthread_cond_t all_done;
    pid_t owner;                    /* process that started the threads */
    int32_t n;                      /* how many threads were started */
    seat seat[];                    /* n + 1 */
} crew;

/* One thread at a time holds the pool; only the holder accesses n_threads and the crew.  A thread that calls
 * gs_pool_run while another holds the pool computes all parts itself. */
struct gs_pool {
    _Atomic int32_t holder;         /* id of the process of the thread that holds the pool; 0: none holds it */
    int32_t n_threads;
    crew *crew;
    _Atomic uint64_t alive;         /* process id << 32 | number of running threads; 0: none.  Read by gs_pool_alive */
};

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline char *scratch_of(const gs_work *work, int32_t number) {
    return work->memory + work->shared + (int64_t)number * work->scratch;
}

static inline uint64_t range_of(int32_t first, int32_t end) {
    return (uint64_t)first << 32 | (uint64_t)end;
}

static inline int32_t first_of(uint64_t range) {
    return (int32_t)(range >> 32);
}

static inline int32_t end_of(uint64_t range) {
    return (int32_t)(uint32_t)range;
}

static inline int has_any(uint64_t range) {
    return first_of(range) != end_of(range);
}

static inline int has_parts(seat *of) {
    return has_any(atomic_load(&of->range));
}

static inline void run_parts(const gs_call *call, int32_t part, int32_t n, char *shared, char *scratch,
                             gs_fault *fault) {
    if (n > 1 && call->run_several != NULL) {
        call->run_several(call, part, n, shared, scratch, fault);
        return;
    }
    for (int32_t end = part + n; part < end && fault->kind == GS_FAULT_NONE; part++)
        call->run(call, part, shared, scratch, fault);
}

/* How many of the parts first .. end - 1 a thread computes next: those that are computed at once, or one. */
static inline int32_t next_parts(int32_t at_once, int32_t first, int32_t end) {
    return at_once > 0 && first % at_once == 0 && end - first >= at_once ? at_once : 1;
}

static void do_parts(crew *c, int32_t part, int32_t n, int32_t number) {
    gs_fault fault = {0};
    int64_t began = c->time == NULL ? 0 : gs_now();
    run_parts(c->call, part, n, c->work->memory, scratch_of(c->work, number), &fault);
    if (c->time != NULL)
        __atomic_fetch_add(&c->time->busy, gs_now() - began, __ATOMIC_RELAXED);
    if (fault.kind != GS_FAULT_NONE) {
        pthread_mutex_lock(&c->lock);
        if (c->fault.kind == GS_FAULT_NONE || part < c->fault_part) {
            c->fault = fault;
            c->fault_part = part;
        }
        pthread_mutex_unlock(&c->lock);
    }
}

static void report(crew *c, int32_t n) {
    int32_t n_parts = c->call->n_parts;
    if (atomic_fetch_add(&c->done, n) + n == n_parts && atomic_load(&c->waiting)) {
        pthread_mutex_lock(&c->lock);
        pthread_cond_signal(&c->all_done);
        pthread_mutex_unlock(&c->lock);
    }
}

/* Claims the first part of a range, or the first few that are computed at once, and returns how many; 0 if all were
 * claimed already.  A claim that is late may have read `at_once` of an earlier call, so any number may come out. */
static inline int32_t claim_first(crew *c, seat *of, int32_t *part) {
    uint64_t range = atomic_load_explicit(&of->range, memory_order_acquire);
    while (has_any(range)) {
        int32_t at_once = atomic_load_explicit(&c->at_once, memory_order_relaxed), first = first_of(range);
        int32_t n = next_parts(at_once, first, end_of(range));
        *part = first;
        if (atomic_compare_exchange_weak(&of->range, &range, range_of(first + n, end_of(range))))
            return n;
    }
    return 0;
}

/* Claims the last part of a range; returns -1 if all were claimed already. */
static inline int32_t claim_last(seat *of) {
    uint64_t range = atomic_load_explicit(&of->range, memory_order_acquire);
    while (has_any(range))
        if (atomic_compare_exchange_weak(&of->range, &range, range - 1))
            return end_of(range) - 1;
    return -1;
}

/* Runs parts of the present call until all are claimed. */
static void take_parts(crew *c, int32_t number) {
    int32_t part, n, own = 0;
    while ((n = claim_first(c, &c->seat[number], &part)) > 0) {
        do_parts(c, part, n, number);
        own += n;
    }
    if (own > 0)
        report(c, own);
    for (int32_t i = 1; i <= c->n; i++)
        while ((part = claim_last(&c->seat[(number + i) % (c->n + 1)])) >= 0) {
            do_parts(c, part, 1, number);
            report(c, 1);
        }
}

static void sleep_until_work(crew *c, seat *mine) {
    pthread_mutex_lock(&c->lock);
    atomic_fetch_add(&c->asleep, 1);
    while (!has_parts(mine) && !atomic_load(&c->stop))
        pthread_cond_wait(&c->wake, &c->lock);
    atomic_fetch_sub(&c->asleep, 1);
    pthread_mutex_unlock(&c->lock);
}

static void *serve(void *given) {
    seat *mine = given;
    crew *c = mine->crew;
    int64_t since = gs_now();
    while (!atomic_load_explicit(&c->stop, memory_order_relaxed)) {
        if (has_parts(mine)) {
            take_parts(c, mine->number);
            since = gs_now();
        }
        for (int i = 0; i < POLLS && !has_parts(mine); i++)
            pause_briefly();
        if (gs_now() - since > SPIN_NS) {
            sleep_until_work(c, mine);
            since = gs_now();
        }
    }
    return NULL;
}

static int start_thread(crew *c, int32_t number) {
    seat *s = &c->seat[number];
    s->crew = c;
    s->number = number;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = pthread_create(&s->thread, &attributes, serve, s);
    pthread_attr_destroy(&attributes);
#if defined(__linux__)
    if (!failed)
        pthread_setname_np(s->thread, "ggml-sched-cpu");
#endif
    return failed;
}

/* Starts a crew of up to n threads: fewer if the system refuses one.  NULL if memory ran out. */
static crew *new_crew(int32_t n) {
    size_t size = sizeof(crew) + ((size_t)n + 1) * sizeof(seat);
    crew *c = aligned_alloc(CACHE_LINE, size);
    if (c == NULL)
        return NULL;
    memset(c, 0, size);
    c->owner = getpid();
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->wake, NULL);
    pthread_cond_init(&c->all_done, NULL);
    /* Block all signals in the new threads: the program's own threads handle them. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (c->n < n && start_thread(c, c->n + 1) == 0)
        c->n++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return c;
}

static void end_crew(crew *c) {
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->stop, 1);
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
    for (int32_t i = 1; i <= c->n; i++)
        pthread_join(c->seat[i].thread, NULL);
    pthread_cond_destroy(&c->wake);
    pthread_cond_destroy(&c->all_done);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

static void set_crew(gs_pool *pool, crew *c) {
    pool->crew = c;
    atomic_store(&pool->alive, c == NULL ? 0 : (uint64_t)(uint32_t)c->owner << 32 | (uint32_t)c->n);
}

static void drop_crew(gs_pool *pool) {
    crew *c = pool->crew;
    set_crew(pool, NULL);
    if (c != NULL)
        end_crew(c);
}

/* Takes hold of the pool and returns 1; or returns 0 if another thread of this process holds it.  In a forked child the
 * parent's threads do not exist, and locks that they held stay locked for ever: so the child ignores a holder of the
 * parent, and drops the parent's crew without freeing it. */
static int hold(gs_pool *pool) {
    int32_t here = (int32_t)getpid(), holder = atomic_load(&pool->holder);
    while (holder != here)
        if (atomic_compare_exchange_weak(&pool->holder, &holder, here)) {
            if (pool->crew != NULL && pool->crew->owner != here)
                set_crew(pool, NULL);
            return 1;
        }
    return 0;
}

static void wait_and_hold(gs_pool *pool) {
    while (!hold(pool))
        usleep(100);
}

static void let_go(gs_pool *pool) {
    atomic_store(&pool->holder, 0);
}

gs_pool *gs_pool_new(void) {
    gs_pool *pool = calloc(1, sizeof(gs_pool));
    if (pool != NULL)
        pool->n_threads = 1;
    return pool;
}

void gs_pool_resize(gs_pool *pool, int32_t n_threads) {
    wait_and_hold(pool);
    if (n_threads != pool->n_threads)
        drop_crew(pool);
    pool->n_threads = n_threads < 1 ? 1 : n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    let_go(pool);
}

void gs_pool_stop(gs_pool *pool) {
    wait_and_hold(pool);
    drop_crew(pool);
    let_go(pool);
}

void gs_pool_free(gs_pool *pool) {
    if (pool != NULL) {
        gs_pool_stop(pool);
        free(pool);
    }
}

int32_t gs_pool_alive(gs_pool *pool) {
    uint64_t alive = atomic_load(&pool->alive);
    return alive >> 32 == (uint32_t)getpid() ? (int32_t)(uint32_t)alive : 0;
}

/* When all parts are claimed, the caller waits for those that other threads still compute: it polls, then sleeps. */
static void wait_for_others(crew *c, int32_t n_parts) {
    for (int i = 0; i < 2000; i++) {
        if (atomic_load_explicit(&c->done, memory_order_acquire) == n_parts)
            return;
        pause_briefly();
    }
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->waiting, 1);
    while (atomic_load(&c->done) != n_parts)
        pthread_cond_wait(&c->all_done, &c->lock);
    atomic_store(&c->waiting, 0);
    pthread_mutex_unlock(&c->lock);
}

static void share_call(crew *c, const gs_call *call, gs_time *time, gs_fault *fault) {
    int32_t n = c->n + 1, end = 0;
    c->call = call;
    atomic_store_explicit(&c->at_once, call->at_once, memory_order_relaxed);
    c->time = time;
    c->fault.kind = GS_FAULT_NONE;
    atomic_store(&c->done, 0);
    for (int32_t i = 0; i < n; i++) {
        int32_t first = end;
        end = (int32_t)((int64_t)call->n_parts * (i + 1) / n);
        atomic_store_explicit(&c->seat[i].range, range_of(first, end), memory_order_release);
    }
    /* Either this thread sees in `asleep` one that goes to sleep now, or that one sees its range. */
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(&c->asleep)) {
        pthread_mutex_lock(&c->lock);
        pthread_cond_broadcast(&c->wake);
        pthread_mutex_unlock(&c->lock);
    }
    take_parts(c, 0);
    wait_for_others(c, call->n_parts);
    *fault = c->fault;
}

static void run_alone(const gs_call *call, const gs_work *work, gs_fault *fault) {
    for (int32_t part = 0, n; part < call->n_parts && fault->kind == GS_FAULT_NONE; part += n) {
        n = next_parts(call->at_once, part, call->n_parts);
        run_parts(call, part, n, work->memory, scratch_of(work, 0), fault);
    }
}

int32_t gs_pool_run(gs_pool *pool, const gs_call *calls, int32_t n, const gs_work *work, gs_time *times,
                    gs_fault *fault) {
    crew *c = NULL;
    int mine = 0, tried = 0;
    int32_t failed = -1;
    int64_t now = times == NULL ? 0 : gs_now();
    fault->kind = GS_FAULT_NONE;
    for (int32_t i = 0; i < n && failed < 0; i++) {
        const gs_call *call = &calls[i];
        if (call->n_parts > 1 && !tried) {
            tried = 1;
            mine = hold(pool);
            if (mine && pool->n_threads > 1 && work->n_threads >= pool->n_threads) {
                if (pool->crew == NULL)
                    set_crew(pool, new_crew(pool->n_threads - 1));
                c = pool->crew != NULL && pool->crew->n > 0 ? pool->crew : NULL;
                if (c != NULL)
                    c->work = work;
            }
        }
        if (c != NULL && call->n_parts > 1)
            share_call(c, call, times == NULL ? NULL : &times[i], fault);
        else
            run_alone(call, work, fault);
        if (times != NULL) {
            int64_t began = now, taken = (now = gs_now()) - began;
            times[i].wall += taken;
            if (c == NULL || call->n_parts == 1)
                times[i].busy += taken;
        }
        if (fault->kind != GS_FAULT_NONE)
            failed = i;
    }
    if (mine)
        let_go(pool);
    return failed;
}
