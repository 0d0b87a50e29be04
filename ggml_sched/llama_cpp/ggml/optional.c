/* ggml_sched/llama_cpp/ggml/optional.c -- what a library's buffers and their types may be without.  See learn.h.
 *
 * ggml calls a function that a buffer has, and does nothing where it has none.  Asking whether there is one saves a
 * call for each tensor of each graph: where it would be is found with a buffer and a type that have all functions.
 * Invariant: where that is not found, all are taken to have it.
 */
#define _GNU_SOURCE
#include "learn.h"

#include <dlfcn.h>
#include <string.h>

/* More functions than buffers and types have. */
#define GH_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define GH_N_FUNCTIONS 16

typedef size_t gh_answers(void *, void *);

typedef struct {
    gh_answers *function[GH_N_FUNCTIONS];
} gh_face;

static _Thread_local int called;
static _Thread_local size_t answer;

#define GH_ANSWER(i)                                                                                                   \
    static size_t answer_##i(void *of, void *tensor)                                                                   \
    {                                                                                                                  \
        (void)of;                                                                                                      \
        (void)tensor;                                                                                                  \
        called = i;                                                                                                    \
        return answer;                                                                                                 \
    }
GH_EACH(GH_ANSWER)

void gh_find_optional(gh_ggml *lib)
{
#define GH_LIST(i) answer_##i,
    gh_face face = {{GH_EACH(GH_LIST)}};
    gx_tensor t = {.ne = {4, 1, 1, 1}, .nb = {4, 16, 16, 16}};
    void *(*make)(void *, gh_face, void *, size_t);
    void *found = dlsym(lib->handle, "ggml_backend_buffer_init"), *buffer;
    lib->at_init_tensor = lib->at_alloc_size = GH_UNKNOWN;
    answer = lib->nbytes(&t);
    called = GH_UNKNOWN;
    lib->buft_get_alloc_size(&face, &t);
    if (called >= 0) {
        lib->at_alloc_size = called * (int)sizeof(void *);
    }
    /* It is given as many functions as it knows: the first of these. */
    memcpy(&make, &found, sizeof make);
    buffer = found != NULL ? make(&face, face, &face, 64) : NULL;
    if (buffer == NULL) {
        return;
    }
    t.buffer = buffer;
    t.data = &face;
    answer = 0;
    called = GH_UNKNOWN;
    lib->buffer_init_tensor(buffer, &t);
    if (called >= 0 && ((gh_answers *const *)buffer)[called] == face.function[called]) {
        lib->at_init_tensor = called * (int)sizeof(void *);
    }
    lib->buffer_free(buffer);
}
