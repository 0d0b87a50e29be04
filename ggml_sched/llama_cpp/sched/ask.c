/* ggml_sched/llama_cpp/sched/ask.c -- what backends, buffers and the client say of a graph.  See scheduler.h.
 *
 * Everything is asked once for each time that a graph is planned; a graph that is found again is not asked about.
 */
#include "scheduler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GH_MAX_BUFTS 64

/* -- the client's choices --------------------------------------------------------------------------------------- */

static uint32_t choice_place(const gh_choices *c, const gx_tensor *tensor)
{
    uint32_t at = gh_place_in(c->mask, tensor);
    while (c->place[at] != 0 && c->tensor[c->place[at] - 1] != tensor) {
        at = (at + 1) & c->mask;
    }
    return at;
}

void gh_choices_clear(gh_choices *c)
{
    if (c->n > 0) {
        memset(c->place, 0, ((size_t)c->mask + 1) * sizeof *c->place);
    }
    c->n = 0;
}

static bool choices_room(gh_choices *c)
{
    const int32_t room = c->room > 0 ? 2 * c->room : 32;
    uint32_t *place;
    if (c->n < c->room) {
        return true;
    }
    place = calloc(4 * (size_t)room, sizeof *place);
    if (place == NULL || !gh_grow(&c->tensor, sizeof *c->tensor, room)
        || !gh_grow(&c->backend, sizeof *c->backend, room)) {
        free(place);
        return false;
    }
    free(c->place);
    c->place = place;
    c->mask = 4 * (uint32_t)room - 1;
    c->room = room;
    for (int32_t i = 0; i < c->n; i++) {
        place[choice_place(c, c->tensor[i])] = (uint32_t)i + 1;
    }
    return true;
}

bool gh_choices_set(gh_choices *c, const gx_tensor *tensor, int32_t backend)
{
    uint32_t at;
    if (!choices_room(c)) {
        return false;
    }
    at = choice_place(c, tensor);
    if (c->place[at] == 0) {
        c->tensor[c->n] = tensor;
        c->place[at] = (uint32_t)++c->n;
    }
    c->backend[c->place[at] - 1] = backend;
    return true;
}

int32_t gh_choices_get(const gh_choices *c, const gx_tensor *tensor)
{
    uint32_t at;
    if (c->n == 0) {
        return -1;
    }
    at = choice_place(c, tensor);
    return c->place[at] != 0 ? c->backend[c->place[at] - 1] : -1;
}

void gh_choices_free(gh_choices *c)
{
    free(c->tensor);
    free(c->backend);
    free(c->place);
    memset(c, 0, sizeof *c);
}

/* -- room ------------------------------------------------------------------------------------------------------- */

static bool make_room(const gh_sched *s, gh_prepared *p)
{
    const int32_t n = p->reading.n_all;
    const int64_t answers = (int64_t)n * s->n_backends;
    if (n > p->room_ids) {
        const int32_t room = n + n / 4;
        if (!gh_grow(&p->resident, sizeof *p->resident, room) || !gh_grow(&p->buffer, sizeof *p->buffer, room)
            || !gh_grow(&p->assigned, sizeof *p->assigned, room) || !gh_grow(&p->usage, 1, room)) {
            return false;
        }
        p->room_ids = room;
    }
    if (answers > p->room_answers) {
        const int64_t room = answers + answers / 4;
        if (room > INT32_MAX || !gh_grow(&p->supports, 1, room) || !gh_grow(&p->offloads, 1, room)
            || !gh_grow(&p->nbytes, sizeof *p->nbytes, room)) {
            return false;
        }
        p->room_answers = (int32_t)room;
    }
    return true;
}

/* -- buffers ------------------------------------------------------------------------------------------------------ */

/* The buffers of a graph, told apart by their types: that says who reads them. */
typedef struct {
    void *buft[GH_MAX_BUFTS];
    int32_t resident[GH_MAX_BUFTS];
    int32_t n;
    void *last;             /* the buffer that was asked about last, and what was found */
    int32_t last_at;
    unsigned char last_usage;
} met_buffers;

/* The index of a type, new if it is; memory without a buffer is the host's.  -1: too many. */
static int32_t meet_buft(gh_sched *s, met_buffers *met, void *buft)
{
    for (int32_t i = 0; i < met->n; i++) {
        if (met->buft[i] == buft) {
            return i;
        }
    }
    if (met->n == GH_MAX_BUFTS) {
        return -1;
    }
    met->buft[met->n] = buft;
    met->resident[met->n] = s->n_backends - 1;
    for (int b = 0; buft != NULL && b < s->n_backends; b++) {
        if (s->rt->backend_supports_buft(s->backend[b], buft)) {
            met->resident[met->n] = b;
            break;
        }
    }
    return met->n++;
}

static bool meet_buffer(gh_sched *s, met_buffers *met, void *buffer)
{
    if (met->n > 0 && met->last == buffer) {
        return true;
    }
    met->last = buffer;
    met->last_usage = buffer != NULL && s->rt->backend_buffer_get_usage(buffer) == GH_USAGE_WEIGHTS
                          ? GS_USAGE_WEIGHTS : GS_USAGE_ANY;
    met->last_at = meet_buft(s, met, buffer != NULL ? s->rt->backend_buffer_get_type(buffer) : NULL);
    return met->last_at >= 0;
}

static bool ask_readers(gh_sched *s, gh_prepared *p, const met_buffers *met)
{
    const int32_t n = met->n;
    if (n * s->n_backends > p->room_buffers) {
        if (!gh_grow(&p->reads_buffer, 1, (int64_t)n * s->n_backends)) {
            return false;
        }
        p->room_buffers = n * s->n_backends;
    }
    p->n_buffers = n;
    for (int32_t k = 0; k < n; k++) {
        for (int b = 0; b < s->n_backends; b++) {
            p->reads_buffer[b * n + k] = b == met->resident[k] || (met->buft[k] != NULL
                                         && s->rt->backend_supports_buft(s->backend[b], met->buft[k]));
        }
    }
    return true;
}

/* -- nodes --------------------------------------------------------------------------------------------------------- */

static inline bool computes(const gh_item *item)
{
    return item->op != GS_OP_NONE && item->op != GS_OP_VIEW && item->op != GS_OP_RESHAPE
        && item->op != GS_OP_PERMUTE && item->op != GS_OP_TRANSPOSE;
}

static void ask_nodes(gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    const int32_t n = r->n_all, host = s->n_backends - 1;
    memset(p->supports, 1, (size_t)n * s->n_backends);
    memset(p->offloads, 0, (size_t)n * s->n_backends);
    for (int32_t i = 0; i < n; i++) {
        const gh_item *item = &r->item[i];
        if (item->tensor == NULL || item->tensor->op == 0 || !computes(item)) {
            continue;
        }
        for (int b = 0; b < s->n_backends; b++) {
            const bool can = s->rt->backend_supports_op(s->backend[b], item->tensor);
            p->supports[(int64_t)b * n + i] = can;
            if (can && s->offload && b < host) {
                p->offloads[(int64_t)b * n + i] = s->rt->backend_offload_op(s->backend[b], item->tensor);
            }
        }
    }
}

/* Backends of one buffer type are one place to the client: the first of them that can takes what was chosen for any, as
 * ggml does, so that the graph is not cut between them. */
static void join_choices(gh_sched *s, gh_prepared *p)
{
    const int32_t n = p->reading.n_all;
    for (int32_t i = 0; i < n; i++) {
        const int32_t chosen = p->assigned[i];
        for (int32_t b = 0; b < chosen; b++) {
            if (s->buft[b] == s->buft[chosen] && p->supports[(int64_t)b * n + i]) {
                p->assigned[i] = b;
                break;
            }
        }
    }
}

/* What an id looks like when bytes are counted: an id that only planning knows looks like its node. */
static inline const gx_tensor *shown(const gh_reading *r, int32_t id)
{
    const gh_item *item = &r->item[id];
    return item->tensor != NULL || item->root < 0 ? item->tensor : r->item[item->root].tensor;
}

static void ask_sizes(gh_sched *s, gh_prepared *p)
{
    const gh_reading *r = &p->reading;
    const int32_t n = r->n_all;
    p->some_larger = false;
    for (int32_t i = 0; i < n; i++) {
        const gx_tensor *t = shown(r, i);
        const int64_t own = p->arrays.layout[i].nbytes;
        /* Where one backend does everything, only what is placed takes memory; else all may be copied. */
        const bool asks = t != NULL && r->item[i].role != GH_ASIDE
                       && (s->n_backends > 1 || r->item[i].role == GH_PLACED);
        int64_t size = own;
        for (int b = 0; b < s->n_backends; b++) {
            const bool again = b > 0 && s->buft[b] == s->buft[b - 1];
            if (asks && !again) {
                size = gh_bytes_in(s->lib, s->buft[b], t, own);
                p->some_larger |= size > own;
            }
            p->nbytes[(int64_t)b * n + i] = size;
        }
    }
}

int gh_ask(gh_sched *s, gh_prepared *p, const gh_choices *choices, gs_error *error)
{
    const gh_reading *r = &p->reading;
    met_buffers met = {.n = 0};
    p->some_chosen = p->some_larger = false;
    p->n_buffers = 0;
    if (r->n_all == 0) {
        return GS_OK;       /* there is nobody to ask about */
    }
    if (!make_room(s, p)) {
        return GS_NO_HOST_MEMORY;
    }
    for (int32_t i = 0; i < r->n_all; i++) {
        const gh_item *item = &r->item[i];
        p->assigned[i] = item->tensor != NULL ? gh_choices_get(choices, item->tensor) : -1;
        p->some_chosen |= p->assigned[i] >= 0;
        p->resident[i] = -1;
        p->buffer[i] = 0;
        p->usage[i] = GS_USAGE_ANY;
        if (item->tensor != NULL && item->role == GH_EXTERNAL) {
            if (!meet_buffer(s, &met, item->tensor->buffer)) {
                error->tensor = i;
                snprintf(error->message, sizeof error->message,
                         "the tensors of a graph lie in more than %d types of buffers: %.64s is in one more",
                         GH_MAX_BUFTS, item->tensor->name);
                return GS_BAD_ARGUMENT;
            }
            p->resident[i] = met.resident[met.last_at];
            p->usage[i] = met.last_usage;
            p->buffer[i] = met.last_at;
        }
    }
    if (met.n == 0) {
        meet_buft(s, &met, NULL);
    }
    if (!ask_readers(s, p, &met)) {
        return GS_NO_HOST_MEMORY;
    }
    ask_nodes(s, p);
    join_choices(s, p);
    ask_sizes(s, p);
    return GS_OK;
}
