/* ggml_sched/llama_cpp/hook/open_contexts.c -- ggml's functions that make and free contexts, recorded during a dry run.
 * See open_buffers.h.
 *
 * In a dry run the client makes its weights and caches in contexts, and gives each tensor a buffer without bytes: only
 * the contexts say which tensors there are.
 */
#define _GNU_SOURCE
#include "open_buffers.h"

#include "plan_cache.h"

static struct {
    pthread_mutex_t lock;
    atomic_bool on;
    struct {
        const gh_ggml *lib;
        void *ctx;
    } *at;
    int n;
    int room;
} contexts = {.lock = PTHREAD_MUTEX_INITIALIZER};

void gh_record_contexts(bool on)
{
    pthread_mutex_lock(&contexts.lock);
    contexts.n = 0;
    atomic_store(&contexts.on, on);
    pthread_mutex_unlock(&contexts.lock);
}

bool gh_records_contexts(void)
{
    return atomic_load_explicit(&contexts.on, memory_order_relaxed);
}

GH_EXPORT void *ggml_init(gx_init_params params)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    void *ctx = lib != NULL && lib->init != NULL ? lib->init(params) : NULL;
    if (ctx != NULL && gh_records_contexts()) {
        pthread_mutex_lock(&contexts.lock);
        if (gh_make_room(&contexts.at, sizeof *contexts.at, &contexts.room, (int64_t)contexts.n + 1)) {
            contexts.at[contexts.n].lib = lib;
            contexts.at[contexts.n++].ctx = ctx;
        }
        pthread_mutex_unlock(&contexts.lock);
    }
    return ctx;
}

GH_EXPORT void ggml_free(void *ctx)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    if (ctx != NULL && gh_records_contexts()) {
        pthread_mutex_lock(&contexts.lock);
        for (int i = contexts.n - 1; i >= 0; i--) {
            if (contexts.at[i].ctx == ctx) {
                contexts.n--;
                memmove(contexts.at + i, contexts.at + i + 1, (size_t)(contexts.n - i) * sizeof *contexts.at);
            }
        }
        pthread_mutex_unlock(&contexts.lock);
    }
    if (lib != NULL && lib->free != NULL) {
        lib->free(ctx);
    }
}

/* Call `each` for the simulated tensors of context `number`; a context's tensors share one buffer type. */
static void list(const gh_ggml *lib, void *ctx, int number, void (*each)(const gh_simulated *, void *), void *user)
{
    size_t total = 0;
    for (gx_tensor *t = lib->get_first_tensor(ctx); t != NULL; t = lib->get_next_tensor(ctx, t)) {
        gh_simulated found = {.context = number, .type = t->type, .nbytes = lib->nbytes(t)};
        void *buft;
        if (t->buffer == NULL || t->view_src != NULL || !gh_is_simulated(t->buffer)) {
            continue;
        }
        buft = lib->backend_buffer_get_type(t->buffer);
        if (total == 0) {
            total = lib->backend_alloc_ctx_tensors_from_buft_size(ctx, buft);
        }
        memcpy(found.name, t->name, GH_NAME_ROOM);
        memcpy(found.ne, t->ne, sizeof found.ne);
        found.type_name = lib->type_name(t->type);
        found.usage = lib->backend_buffer_get_usage(t->buffer);
        found.buffer_type = lib->backend_buft_name(buft);
        found.device = gh_device_of(lib, buft);
        found.total = total;
        each(&found, user);
    }
}

void gh_simulated_tensors(void (*each)(const gh_simulated *tensor, void *user), void *user)
{
    pthread_mutex_lock(&contexts.lock);
    for (int i = 0; i < contexts.n; i++) {
        const gh_ggml *lib = contexts.at[i].lib;
        if (lib->get_first_tensor != NULL && lib->get_next_tensor != NULL && lib->backend_buffer_get_type != NULL
            && lib->backend_buffer_get_usage != NULL && lib->backend_alloc_ctx_tensors_from_buft_size != NULL) {
            list(lib, contexts.at[i].ctx, i, each, user);
        }
    }
    pthread_mutex_unlock(&contexts.lock);
}
