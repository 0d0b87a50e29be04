/* ggml_sched/llama_cpp/ggml/optional.c -- what a library's buffers and their types may be without.  See introspect.h.
 *
 * ggml calls a function that a buffer bits, and does nothing where it bits none.  Asking whether there is one saves a
 * call for each tensor of each graph: where it would be is found with a buffer and a type that have all functions.
 * Invariant: where that is not found, all are taken to have it.
 */
#define _GNU_SOURCE
#include "introspect.h"

#include <dlfcn.h>
#include <string.h>

/* More functions than buffers and types have. */
#define GH_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define GH_N_FUNCTIONS 16

typedef size_t gh_answers(void *, void *);

typedef struct {
    gh_answers *function[GH_N_FUNCTIONS];
} gh_interface;

static _Thread_local int called;       /* the last function that was, and how many were              */
static _Thread_local int calls;
static _Thread_local size_t answer;

#define GH_ANSWER(i)                                                                                                   \
    static size_t answer_##i(void *of, void *tensor)                                                                   \
    {                                                                                                                  \
        (void)of;                                                                                                      \
        (void)tensor;                                                                                                  \
        called = i;                                                                                                    \
        calls++;                                                                                                       \
        return answer;                                                                                                 \
    }
GH_EACH(GH_ANSWER)

#define GH_LIST(i) answer_##i,
static const gh_interface full = {{GH_EACH(GH_LIST)}};

/* Where a type bits what is asked for bytes: a type without it takes a tensor's own. */
static int find_alloc_size(const gh_ggml *lib, const gx_tensor *t)
{
    gh_interface type = full;
    answer = lib->nbytes(t);
    calls = 0;
    lib->buft_get_alloc_size(&type, t);
    if (calls != 1) {
        return GH_UNKNOWN;
    }
    type.function[called] = NULL;
    return lib->buft_get_alloc_size(&type, t) == answer && calls == 1 ? called * (int)sizeof(void *) : GH_UNKNOWN;
}

/* Where a buffer bits what is found of tensors. */
static int find_init_tensor(const gh_ggml *lib, gx_tensor *t)
{
    gh_interface type = full;
    void *found = dlsym(lib->handle, "ggml_backend_buffer_init"), *buffer;
    void *(*make)(void *, gh_interface, void *, size_t);
    int at = GH_UNKNOWN;
    memcpy(&make, &found, sizeof make);
    /* A struct of this size lies in memory, on the stack or behind a pointer: who knows fewer functions reads the first
     * of these. */
    buffer = found != NULL ? make(&type, full, &type, 64) : NULL;
    if (buffer == NULL) {
        return GH_UNKNOWN;
    }
    t->buffer = buffer;
    t->data = &type;
    answer = 0;
    calls = 0;
    lib->buffer_init_tensor(buffer, t);
    if (calls == 1 && ((gh_answers *const *)buffer)[called] == full.function[called]) {
        at = called * (int)sizeof(void *);
    }
    lib->buffer_free(buffer);
    return at;
}

void gh_find_buffer_hooks(gh_ggml *lib)
{
    gx_tensor t = {.ne = {4, 1, 1, 1}, .nb = {4, 16, 16, 16}};
    lib->at_alloc_size = find_alloc_size(lib, &t);
    lib->at_init_tensor = find_init_tensor(lib, &t);
}
