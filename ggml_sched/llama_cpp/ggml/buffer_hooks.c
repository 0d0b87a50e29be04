/* ggml_sched/llama_cpp/ggml/buffer_hooks.c -- the functions that buffers and buffer types may lack.  See library.h.
 *
 * ggml calls init_tensor and get_alloc_size where they exist.  With the offsets of their pointers we see whether they
 * exist, which saves two calls into the library for each tensor of each graph.  To find the offsets, the library is
 * given a buffer type of ours, and a buffer, in which every function pointer is a function that records its own index.
 * Invariant: where an offset is not found, the function is assumed to exist.
 */
#define _GNU_SOURCE
#include "library.h"

#include <dlfcn.h>
#include <string.h>

/* At least as many functions as ggml's structs of buffers and buffer types have, in any version. */
#define GH_EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define GH_N_FUNCTIONS 16

typedef size_t gh_answers(void *, void *);

typedef struct {
    gh_answers *function[GH_N_FUNCTIONS];
} gh_interface;

static _Thread_local int called;       /* index of the function that the library called last            */
static _Thread_local int calls;        /* how many of these functions it has called                     */
static _Thread_local size_t answer;    /* what each of them returns                                     */

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

/* The offset of get_alloc_size in a buffer type, or GH_UNKNOWN.  As a check, the library is called again without that
 * function: it must then return the tensor's own bytes, and call nothing else. */
static int find_alloc_size(const gh_ggml *lib, const gx_tensor *t)
{
    gh_interface type = full;
    answer = lib->nbytes(t);
    calls = 0;
    lib->backend_buft_get_alloc_size(&type, t);
    if (calls != 1) {
        return GH_UNKNOWN;
    }
    type.function[called] = NULL;
    return lib->backend_buft_get_alloc_size(&type, t) == answer && calls == 1 ? called * (int)sizeof(void *)
                                                                             : GH_UNKNOWN;
}

/* The offset of init_tensor in a buffer, or GH_UNKNOWN. */
static int find_init_tensor(const gh_ggml *lib, gx_tensor *t)
{
    gh_interface type = full;
    void *found = dlsym(lib->handle, "ggml_backend_buffer_init"), *buffer;
    void *(*make)(void *, gh_interface, void *, size_t);
    int at = GH_UNKNOWN;
    memcpy(&make, &found, sizeof make);
    /* A struct this large is passed in memory, so a version whose buffers have fewer functions reads only the first of
     * them. */
    buffer = found != NULL ? make(&type, full, &type, 64) : NULL;
    if (buffer == NULL) {
        return GH_UNKNOWN;
    }
    t->buffer = buffer;
    t->data = &type;
    answer = 0;
    calls = 0;
    lib->backend_buffer_init_tensor(buffer, t);
    if (calls == 1 && ((gh_answers *const *)buffer)[called] == full.function[called]) {
        at = called * (int)sizeof(void *);
    }
    lib->backend_buffer_free(buffer);
    return at;
}

void gh_find_buffer_hooks(gh_ggml *lib)
{
    gx_tensor t = {.ne = {4, 1, 1, 1}, .nb = {4, 16, 16, 16}};
    lib->at_alloc_size = find_alloc_size(lib, &t);
    lib->at_init_tensor = find_init_tensor(lib, &t);
}
