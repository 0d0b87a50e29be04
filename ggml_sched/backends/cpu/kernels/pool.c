/* pool.c -- see pool.h.
 *
 * One word, `next`, describes the present call: its number in the upper half, how many of its parts are unclaimed in
 * the lower.  A thread claims a part by a compare-and-swap of that word, so a late claim for an earlier call fails.
 * Between a claim and its report in `done`, `call` stays valid, because the caller waits until all parts are done.
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

/* The threads of a pool and all that they share.  A new crew is made whenever threads are started.  A forked child
 * reads only `owner` of its parent's crew, because the parent's threads and locks are of no use there. */
typedef struct crew {
    _Alignas(CACHE_LINE) _Atomic uint64_t next;
    _Alignas(CACHE_LINE) _Atomic int32_t done;      /* parts of the present call that are done */
    _Atomic int32_t waiting;        /* the caller sleeps until the last part is done */
    _Alignas(CACHE_LINE) _Atomic int32_t asleep;    /* number of threads that sleep  */
    _Atomic int32_t stop;
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
    pthread_t thread[];
} crew;

typedef struct seat {
    crew *crew;
    int32_t number;                 /* from 1 on: chooses the thread's scratch; the caller has 0 */
} seat;

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

static void do_part(crew *c, int32_t part, int32_t number) {
    const gs_call *call = c->call;
    gs_fault fault = {0};
    int64_t began = c->time == NULL ? 0 : gs_now();
    call->run(call, part, c->work->memory, scratch_of(c->work, number), &fault);
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
    int32_t n_parts = call->n_parts;
    if (atomic_fetch_add(&c->done, 1) + 1 == n_parts && atomic_load(&c->waiting)) {
        pthread_mutex_lock(&c->lock);
        pthread_cond_signal(&c->all_done);
        pthread_mutex_unlock(&c->lock);
    }
}

/* Claims a part of the present call and runs it; returns 0 if all parts were claimed already. */
static int take_part(crew *c, int32_t number) {
    uint64_t next = atomic_load_explicit(&c->next, memory_order_acquire);
    for (;;) {
        uint32_t left = (uint32_t)next;
        if (left == 0)
            return 0;
        if (atomic_compare_exchange_weak(&c->next, &next, next - 1)) {
            do_part(c, c->call->n_parts - (int32_t)left, number);
            return 1;
        }
    }
}

static void sleep_until_work(crew *c) {
    pthread_mutex_lock(&c->lock);
    atomic_fetch_add(&c->asleep, 1);
    while ((uint32_t)atomic_load(&c->next) == 0 && !atomic_load(&c->stop))
        pthread_cond_wait(&c->wake, &c->lock);
    atomic_fetch_sub(&c->asleep, 1);
    pthread_mutex_unlock(&c->lock);
}

static void *serve(void *given) {
    seat mine = *(seat *)given;
    crew *c = mine.crew;
    free(given);
    int64_t since = gs_now();
    while (!atomic_load_explicit(&c->stop, memory_order_relaxed)) {
        if (take_part(c, mine.number)) {
            while (take_part(c, mine.number))
                ;
            since = gs_now();
            continue;
        }
        for (int i = 0; i < POLLS && (uint32_t)atomic_load_explicit(&c->next, memory_order_relaxed) == 0; i++)
            pause_briefly();
        if (gs_now() - since > SPIN_NS) {
            sleep_until_work(c);
            since = gs_now();
        }
    }
    return NULL;
}

static int start_thread(crew *c, int32_t i) {
    seat *s = malloc(sizeof(seat));
    if (s == NULL)
        return -1;
    *s = (seat){c, i + 1};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int failed = pthread_create(&c->thread[i], &attributes, serve, s);
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(s);
        return -1;
    }
#if defined(__linux__)
    pthread_setname_np(c->thread[i], "ggml-sched-cpu");
#endif
    return 0;
}

/* Starts a crew of up to n threads: fewer if the system refuses one.  NULL if memory ran out. */
static crew *new_crew(int32_t n) {
    size_t size = (sizeof(crew) + (size_t)n * sizeof(pthread_t) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
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
    while (c->n < n && start_thread(c, c->n) == 0)
        c->n++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return c;
}

static void end_crew(crew *c) {
    pthread_mutex_lock(&c->lock);
    atomic_store(&c->stop, 1);
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
    for (int32_t i = 0; i < c->n; i++)
        pthread_join(c->thread[i], NULL);
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
    c->call = call;
    c->time = time;
    c->fault.kind = GS_FAULT_NONE;
    atomic_store(&c->done, 0);
    uint64_t number = (atomic_load(&c->next) >> 32) + 1;
    atomic_store(&c->next, number << 32 | (uint32_t)call->n_parts);
    if (atomic_load(&c->asleep)) {
        pthread_mutex_lock(&c->lock);
        pthread_cond_broadcast(&c->wake);
        pthread_mutex_unlock(&c->lock);
    }
    while (take_part(c, 0))
        ;
    wait_for_others(c, call->n_parts);
    *fault = c->fault;
}

static void run_alone(const gs_call *call, const gs_work *work, gs_fault *fault) {
    for (int32_t part = 0; part < call->n_parts && fault->kind == GS_FAULT_NONE; part++)
        call->run(call, part, work->memory, scratch_of(work, 0), fault);
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
