/* Two kinds of backends for test_capi_programs.py: one computes at once, the other has a queue and events.
 *
 * The queue is run as late as the interface allows: when the host waits for it, so that a wait that was not issued
 * gives wrong results.  A node's result is a hash of its op, its parameters and its sources, element by element; no
 * two ops give the same bits.  A fusion group is computed at the position of its last node; afterwards the results that
 * need not be written are overwritten.  Each function can be made to fail; what is allocated is counted. */
#include <stdlib.h>
#include <string.h>
#include "ggml_sched/api.h"

enum { ALLOC, WRITE, READ, COPY, RUN, SYNCHRONIZE, EVENT_NEW, EVENT_RECORD, EVENT_WAIT, EVENT_SYNCHRONIZE,
       N_FUNCTIONS };

typedef struct toy toy;

/* A piece of queued work. */
typedef struct work {
    int kind; /* WRITE, COPY, RUN or EVENT_WAIT */
    void *to;
    const void *from; /* of a write: a copy of the data, owned */
    int64_t nbytes;
    const gs_run_nodes *run;
    toy *other;
    int64_t position;
} work;

struct toy {
    int32_t queued;         /* whether it has a queue                                      */
    int32_t copies;         /* whether `copy` works                                        */
    int32_t fails;          /* the number of the function that fails; -1: none             */
    int32_t fails_after;    /* after how many calls of it                                  */
    int32_t status;         /* what it returns                                             */
    int64_t calls[N_FUNCTIONS];
    int64_t n_memory;       /* allocations and events that are not freed yet               */
    int64_t n_bytes;        /* of these allocations                                        */
    int64_t n_fused;        /* fusion groups of the runs so far                            */
    int64_t n_skipped;      /* results that need not be written                            */
    work *queue;
    int64_t room, begin;    /* the array's length, and the position of its first entry    */
    int64_t n_work, n_done; /* positions: how much work was queued, and done, so far       */
};

static int may(toy *t, int function, gs_error *error) {
    int64_t before = t->calls[function]++;
    if (t->fails != function || before < t->fails_after) return GS_OK;
    strcpy(error->message, "the toy was broken on purpose");
    return t->status;
}

/* -- kernels -------------------------------------------------------------------------------------------------- */

static uint32_t mix(uint32_t h, uint32_t x) {
    h = (h ^ x) * 0x9e3779b1u;
    return h ^ (h >> 15);
}

static const char *element(const gs_node *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
    const gs_layout *l = &t->layout;
    if (l->ne[0] < 1 || l->ne[1] < 1 || l->ne[2] < 1 || l->ne[3] < 1) return NULL;
    return (const char *)t->data + i0 % l->ne[0] * l->nb[0] + i1 % l->ne[1] * l->nb[1] + i2 % l->ne[2] * l->nb[2]
           + i3 % l->ne[3] * l->nb[3];
}

static uint32_t bits_at(const char *at) {
    uint32_t bits = 0;
    if (at != NULL) memcpy(&bits, at, sizeof bits);
    return bits;
}

/* Exported: the Python backend of the test calls it, too. */
void toy_compute(const gs_node *node) {
    const int64_t *ne = node->layout.ne, *nb = node->layout.nb;
    int64_t i0, i1, i2, i3;
    int k, blind = node->op == GS_OP_CPY ? 1 : node->op == GS_OP_SET_ROWS ? 2 : -1;
    uint32_t seed = mix((uint32_t)node->op, (uint32_t)node->sub_op);
    for (k = 0; k < GS_MAX_OP_PARAMS; k++) seed = mix(seed, (uint32_t)node->params[k]);
    for (i3 = 0; i3 < ne[3]; i3++)
        for (i2 = 0; i2 < ne[2]; i2++)
            for (i1 = 0; i1 < ne[1]; i1++)
                for (i0 = 0; i0 < ne[0]; i0++) {
                    uint32_t h = seed;
                    for (k = 0; k < node->n_src; k++) {
                        const gs_node *s = node->src[k];
                        if (s == NULL || k == blind) continue;
                        if (node->op == GS_OP_MUL_MAT_ID && k == 0) {
                            /* No other expert may have been copied. */
                            uint32_t expert = bits_at(element(node->src[2], i1, i2, 0, 0));
                            h = mix(h, bits_at(element(s, i0, i1, (int64_t)expert, 0)));
                        } else {
                            h = mix(h, bits_at(element(s, i0, i1, i2, i3)));
                        }
                    }
                    if (node->layout.type == GS_TYPE_I32) h &= 1; /* the number of an expert */
                    memcpy((char *)node->data + i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3], &h, sizeof h);
                }
}

/* Whether two nodes have bytes in common. */
static int overlap(const gs_node *a, const gs_node *b) {
    const char *x = a->data, *y = b->data;
    return x < y + b->layout.nbytes && y < x + a->layout.nbytes;
}

static void compute_group(toy *t, const gs_run_nodes *run, const int32_t *member, int32_t n) {
    int32_t k, m, is_read;
    for (k = 0; k < n; k++) toy_compute(run->nodes[member[k]]);
    for (k = 0; k < n; k++) {
        const gs_node *node = run->nodes[member[k]];
        if (run->needed[member[k]]) continue;
        t->n_skipped++;
        for (m = is_read = 0; m < n; m++) is_read |= run->needed[member[m]] && overlap(node, run->nodes[member[m]]);
        if (!is_read) memset(node->data, 0xee, (size_t)node->layout.nbytes);
    }
    t->n_fused++;
}

static void compute(toy *t, const gs_run_nodes *run) {
    int32_t k, group;
    for (k = 0; k < run->n_nodes; k++) {
        const int32_t *begin = run->group_begin, *member = run->group_member;
        int32_t m, n = 0, is_last = 0;
        for (group = 0; group < run->n_groups; group++) {
            for (m = begin[group]; m < begin[group + 1] && member[m] != k; m++) {}
            if (m == begin[group + 1]) continue;
            is_last = m + 1 == begin[group + 1];
            member += begin[group];
            n = begin[group + 1] - begin[group];
            break;
        }
        if (is_last) compute_group(t, run, member, n);
        else if (n == 0) toy_compute(run->nodes[k]);
    }
}

/* -- the queue ------------------------------------------------------------------------------------------------ */

static void finish(toy *t, int64_t position) {
    while (t->n_done < position && t->n_done < t->n_work) {
        work w = t->queue[t->n_done++ - t->begin]; /* a wait may come back to this queue: the place is taken first */
        if (w.kind == EVENT_WAIT) finish(w.other, w.position);
        else if (w.kind == RUN) compute(t, w.run);
        else memcpy(w.to, w.from, (size_t)w.nbytes);
        if (w.kind == WRITE) free((void *)w.from);
    }
    if (t->n_done == t->n_work) t->begin = t->n_work;
}

static int later(toy *t, work w) {
    if (t->n_work - t->begin == t->room) {
        int64_t room = t->room * 2 + 16;
        work *queue = realloc(t->queue, (size_t)room * sizeof *queue);
        if (queue == NULL) return GS_NO_HOST_MEMORY;
        t->queue = queue, t->room = room;
    }
    t->queue[t->n_work++ - t->begin] = w;
    return GS_OK;
}

/* -- functions of the table ----------------------------------------------------------------------------------- */

static int toy_alloc(void *context, int64_t nbytes, void **memory, gs_error *error) {
    toy *t = context;
    int status = may(t, ALLOC, error);
    if (status != GS_OK) return status;
    *memory = aligned_alloc(256, (size_t)(nbytes + 255) / 256 * 256);
    if (*memory == NULL) return GS_OUT_OF_MEMORY;
    memset(*memory, 0xcd, (size_t)nbytes);
    t->n_memory++, t->n_bytes += nbytes;
    return GS_OK;
}

static void toy_free(void *context, void *memory, int64_t nbytes) {
    memset(memory, 0xdd, (size_t)nbytes);
    ((toy *)context)->n_memory--, ((toy *)context)->n_bytes -= nbytes;
    free(memory);
}

static int toy_write(void *context, void *to, const void *from, int64_t nbytes, gs_error *error) {
    toy *t = context;
    work w = {WRITE, to, NULL, nbytes, NULL, NULL, 0};
    int status = may(t, WRITE, error);
    if (status != GS_OK) return status;
    if (!t->queued) {
        memcpy(to, from, (size_t)nbytes);
        return GS_OK;
    }
    w.from = malloc((size_t)nbytes);
    if (w.from == NULL) return GS_NO_HOST_MEMORY;
    memcpy((void *)w.from, from, (size_t)nbytes);
    return later(t, w);
}

static int toy_read(void *context, void *to, const void *from, int64_t nbytes, gs_error *error) {
    toy *t = context;
    int status = may(t, READ, error);
    if (status != GS_OK) return status;
    finish(t, t->n_work);
    memcpy(to, from, (size_t)nbytes);
    return GS_OK;
}

static int toy_copy(void *context, const gs_backend *to_backend, void *to, const gs_backend *from_backend,
                    const void *from, int64_t nbytes, gs_error *error) {
    toy *t = context;
    work w = {COPY, to, from, nbytes, NULL, NULL, 0};
    int status = may(t, COPY, error);
    if (status != GS_OK) return status;
    if (!t->copies || (to_backend->context != context && from_backend->context != context)) return GS_NOT_DONE;
    if (t->queued) return later(t, w);
    memcpy(to, from, (size_t)nbytes);
    return GS_OK;
}

static int toy_run(void *context, const gs_run_nodes *run, gs_error *error) {
    toy *t = context;
    work w = {RUN, NULL, NULL, 0, run, NULL, 0};
    int status = may(t, RUN, error);
    if (status != GS_OK) return status;
    if (t->queued) return later(t, w);
    compute(t, run);
    return GS_OK;
}

static int toy_synchronize(void *context, gs_error *error) {
    toy *t = context;
    int status = may(t, SYNCHRONIZE, error);
    finish(t, t->n_work);
    return status;
}

typedef struct event {
    toy *of;
    int64_t position;
} event;

static int toy_event_new(void *context, void **found, gs_error *error) {
    toy *t = context;
    event *made;
    int status = may(t, EVENT_NEW, error);
    if (status != GS_OK) return status;
    made = calloc(1, sizeof *made);
    if (made == NULL) return GS_NO_HOST_MEMORY;
    made->of = t;
    *found = made;
    t->n_memory++;
    return GS_OK;
}

static void toy_event_free(void *context, void *e) {
    ((toy *)context)->n_memory--;
    free(e);
}

static int toy_event_record(void *context, void *e, gs_error *error) {
    toy *t = context;
    ((event *)e)->position = t->n_work;
    return may(t, EVENT_RECORD, error);
}

static int toy_event_wait(void *context, const gs_backend *of, void *e, gs_error *error) {
    toy *t = context;
    work w = {EVENT_WAIT, NULL, NULL, 0, NULL, of->context, ((event *)e)->position};
    int status = may(t, EVENT_WAIT, error);
    if (status != GS_OK) return status;
    if (!t->copies) return GS_NOT_DONE; /* then the host waits */
    return later(t, w);
}

static int toy_event_synchronize(void *context, void *e, gs_error *error) {
    toy *t = context;
    int64_t position = ((event *)e)->position;
    int status = may(t, EVENT_SYNCHRONIZE, error);
    finish(t, position);
    return status;
}

/* Exported: a backend's table.  The queue's own array stays with the toy; toy_end frees it. */
void toy_table(toy *t, const char *name, int32_t concurrent_copies, gs_backend *table) {
    memset(table, 0, sizeof *table);
    table->context = t, table->name = name, table->concurrent_copies = concurrent_copies;
    table->alloc = toy_alloc, table->free = toy_free, table->write = toy_write, table->read = toy_read;
    table->copy = toy_copy, table->run = toy_run;
    if (t->queued) {
        table->synchronize = toy_synchronize;
        table->event_new = toy_event_new, table->event_free = toy_event_free;
        table->event_record = toy_event_record, table->event_wait = toy_event_wait;
        table->event_synchronize = toy_event_synchronize;
    }
}

void toy_end(toy *t) {
    finish(t, t->n_work);
    free(t->queue);
    t->queue = NULL, t->room = 0;
}

size_t toy_size(void) { return sizeof(toy); }

/* Exported: what a consumer that was compiled against this header makes of a table. */
int toy_check(const gs_api *api, gs_error *error) { return gs_api_check(api, error); }
