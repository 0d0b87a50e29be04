/* ggml_sched/llama_cpp/hook/problem.c -- memory and comparison of problems.  See problem.h. */
#include "problem.h"
#include "arrays.h"

bool gh_problem_make_room(gh_problem *p, int32_t n, int32_t n_backends, bool has_answers)
{
    if (n > p->room || n_backends > p->room_backends || p->has_answers != has_answers) {
        const int32_t room = n + n / 4 + 1;
        const int64_t answers = (int64_t)room * n_backends;
        if (!gh_grow(&p->resident, sizeof *p->resident, room) || !gh_grow(&p->assigned, sizeof *p->assigned, room)
            || !gh_grow(&p->nbytes, sizeof *p->nbytes, answers)
            || (has_answers && (!gh_grow(&p->buffer, sizeof *p->buffer, room) || !gh_grow(&p->usage, 1, room)
                                || !gh_grow(&p->supports, 1, answers) || !gh_grow(&p->offloads, 1, answers)))) {
            p->room = 0;
            return false;
        }
        p->room = room;
        p->room_backends = n_backends;
        p->has_answers = has_answers;
    }
    p->n = n;
    p->n_backends = n_backends;
    p->n_buffers = 0;
    p->some_larger = p->some_assigned = false;
    return true;
}

bool gh_problem_same(const gh_problem *a, const gh_problem *b)
{
    return gh_problem_same_answers(a, b) && gh_same(a->assigned, b->assigned, a->n, sizeof *a->assigned);
}

bool gh_problem_same_answers(const gh_problem *a, const gh_problem *b)
{
    const int64_t n = a->n, m = a->n_backends;
    return n == b->n && m == b->n_backends && a->has_answers == b->has_answers && a->n_buffers == b->n_buffers
        && gh_same(a->resident, b->resident, n, sizeof *a->resident)
        && (!a->has_answers
            || (gh_same(a->buffer, b->buffer, n, sizeof *a->buffer) && gh_same(a->usage, b->usage, n, 1)
                && gh_same(a->reads_buffer, b->reads_buffer, m * a->n_buffers, 1)
                && gh_same(a->supports, b->supports, m * n, 1) && gh_same(a->offloads, b->offloads, m * n, 1)));
}

void gh_problem_free(gh_problem *p)
{
    free(p->resident);
    free(p->assigned);
    free(p->nbytes);
    free(p->buffer);
    free(p->usage);
    free(p->supports);
    free(p->offloads);
    free(p->reads_buffer);
    memset(p, 0, sizeof *p);
}
