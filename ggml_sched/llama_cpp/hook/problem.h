/* ggml_sched/llama_cpp/hook/problem.h -- what the planner is given besides a graph: placements, sizes, device answers.
 *
 * The arrays are indexed by the ids of the graph's tensors (graph_reader.h).  A gh_problem is filled again and again:
 * its arrays grow and are freed by gh_problem_free.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_PROBLEM_H
#define GGML_SCHED_LLAMA_CPP_HOOK_PROBLEM_H

#include "graph_reader.h"

typedef struct gh_problem {
    int32_t n;              /* ids                                                                  */
    int32_t n_backends;
    int32_t *resident;      /* [n] backend whose memory holds the tensor; -1: the planner places it  */
    int32_t *assigned;      /* [n] backend that the client chose; -1: none                          */
    int64_t *nbytes;        /* [n_backends][n] bytes that the tensor takes there                    */
    bool some_larger;       /* some tensor takes more than its own bytes: nbytes counts             */
    bool some_assigned;
    /* Of schedulers only: */
    bool has_answers;
    int32_t *buffer;        /* [n] index of the kind of buffer that holds a resident tensor         */
    unsigned char *usage;   /* [n] GS_USAGE_*                                                       */
    unsigned char *supports; /* [n_backends][n]                                                     */
    unsigned char *offloads; /* [n_backends][n]                                                     */
    unsigned char *reads_buffer; /* [n_backends][n_buffers]                                         */
    int32_t n_buffers;
    int32_t room;
    int32_t room_backends;
    int32_t room_buffers;
} gh_problem;

/* Make room for n ids, with or without the arrays of device answers.  False without memory. */
bool gh_problem_make_room(gh_problem *p, int32_t n, int32_t n_backends, bool has_answers);

/* Whether two problems are the same, sizes aside; or sizes and assignments aside. */
bool gh_problem_same(const gh_problem *a, const gh_problem *b);
bool gh_problem_same_answers(const gh_problem *a, const gh_problem *b);

void gh_problem_free(gh_problem *p);

#endif
