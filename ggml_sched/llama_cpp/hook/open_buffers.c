/* ggml_sched/llama_cpp/hook/open_buffers.c -- ggml's functions that make and free buffers.  See open_buffers.h.
 *
 * Each call is passed on to the library of the caller.  Calls are few: a client makes its buffers when it opens a
 * model or a context.
 */
#define _GNU_SOURCE
#include "open_buffers.h"

#include "plan_cache.h"

static struct {
    pthread_mutex_t lock;
    gh_open_buffer *at;
    int32_t n;
    int32_t room;
} open_buffers = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The name of the first tensor of the context that the calling thread allocates; NULL: it allocates none. */
static _Thread_local const char *first_of_context;

/* -- recording ----------------------------------------------------------------------------------------------------- */

/* The index of a buffer; -1: it is not recorded.  The caller holds the lock. */
static int index_of(const void *buffer)
{
    for (int i = open_buffers.n - 1; i >= 0; i--) {
        if (open_buffers.at[i].buffer == buffer) {
            return i;
        }
    }
    return -1;
}

/* Record a buffer that was made.  Without host memory for the record the buffer is not listed. */
static void *record(const gh_ggml *lib, void *buffer, bool is_mapped)
{
    int at;
    if (buffer == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&open_buffers.lock);
    at = index_of(buffer);
    if (at < 0 && gh_make_room(&open_buffers.at, sizeof *open_buffers.at, &open_buffers.room, open_buffers.n + 1)) {
        at = open_buffers.n++;
        open_buffers.at[at] = (gh_open_buffer){.lib = lib, .buffer = buffer};
        if (first_of_context != NULL) {
            strncpy(open_buffers.at[at].first, first_of_context, GH_NAME_ROOM - 1);
        }
    }
    if (at >= 0) {
        open_buffers.at[at].is_mapped |= is_mapped;
    }
    pthread_mutex_unlock(&open_buffers.lock);
    return buffer;
}

static void forget(const void *buffer)
{
    pthread_mutex_lock(&open_buffers.lock);
    const int at = index_of(buffer);
    if (at >= 0) {
        open_buffers.n--;
        memmove(open_buffers.at + at, open_buffers.at + at + 1,
                (size_t)(open_buffers.n - at) * sizeof *open_buffers.at);
    }
    pthread_mutex_unlock(&open_buffers.lock);
}

/* -- ggml's functions ---------------------------------------------------------------------------------------------- */

GH_EXPORT void *ggml_backend_buft_alloc_buffer(void *buft, size_t size)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    return lib != NULL && lib->backend_buft_alloc_buffer != NULL
        ? record(lib, lib->backend_buft_alloc_buffer(buft, size), false) : NULL;
}

GH_EXPORT void *ggml_backend_dev_buffer_from_host_ptr(void *device, void *memory, size_t size, size_t max_tensor)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    return lib != NULL && lib->backend_dev_buffer_from_host_ptr != NULL
        ? record(lib, lib->backend_dev_buffer_from_host_ptr(device, memory, size, max_tensor), true) : NULL;
}

GH_EXPORT void *ggml_backend_cpu_buffer_from_ptr(void *memory, size_t size)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    return lib != NULL && lib->backend_cpu_buffer_from_ptr != NULL
        ? record(lib, lib->backend_cpu_buffer_from_ptr(memory, size), true) : NULL;
}

/* Give the tensors of a context a buffer without bytes, as a client does that simulates its allocations.  Some clients
 * do so for attention's caches alone, and would allocate recurrent states. */
static void *simulate(const gh_ggml *lib, void *ctx, void *buft)
{
    void *buffer = record(lib, lib->backend_buft_alloc_buffer(buft, 0), false);
    for (gx_tensor *t = lib->get_first_tensor(ctx); buffer != NULL && t != NULL; t = lib->get_next_tensor(ctx, t)) {
        t->buffer = buffer;
    }
    return buffer;
}

/* The library makes the context's buffers, perhaps several, inside of this call.  They are recorded with the name of
 * the context's first tensor. */
GH_EXPORT void *ggml_backend_alloc_ctx_tensors_from_buft(void *ctx, void *buft)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    const char *outer = first_of_context;
    const gx_tensor *first;
    void *buffer;
    if (lib == NULL || lib->backend_alloc_ctx_tensors_from_buft == NULL) {
        return NULL;
    }
    if (gh_records_contexts() && lib->get_first_tensor != NULL && lib->get_next_tensor != NULL) {
        return simulate(lib, ctx, buft);
    }
    first = lib->get_first_tensor != NULL ? lib->get_first_tensor(ctx) : NULL;
    first_of_context = first != NULL ? first->name : NULL;
    buffer = lib->backend_alloc_ctx_tensors_from_buft(ctx, buft);
    first_of_context = outer;
    return buffer;
}

GH_EXPORT void ggml_backend_buffer_free(void *buffer)
{
    const gh_ggml *lib = gh_ggml_of_caller(GH_CALLER);
    if (buffer != NULL) {
        forget(buffer);
        if (lib != NULL && lib->backend_buffer_free != NULL) {
            lib->backend_buffer_free(buffer);
        }
    }
}

/* -- queries ------------------------------------------------------------------------------------------------------- */

const char *gh_device_of(const gh_ggml *lib, void *buft)
{
    void *device = lib->backend_buft_get_device != NULL ? lib->backend_buft_get_device(buft) : NULL;
    return device != NULL && lib->backend_dev_name != NULL ? lib->backend_dev_name(device) : NULL;
}

bool gh_device_memory(const gh_ggml *lib, void *buft, size_t *free_bytes, size_t *total)
{
    void *device = lib->backend_buft_get_device != NULL ? lib->backend_buft_get_device(buft) : NULL;
    if (device == NULL || lib->backend_dev_memory == NULL) {
        return false;
    }
    lib->backend_dev_memory(device, free_bytes, total);
    return true;
}

bool gh_open_buffer_at(int i, gh_open_buffer *found)
{
    bool is_there;
    pthread_mutex_lock(&open_buffers.lock);
    is_there = i < open_buffers.n;
    if (is_there) {
        const gh_ggml *lib = open_buffers.at[i].lib;
        *found = open_buffers.at[i];
        found->nbytes = lib->backend_buffer_get_size(found->buffer);
        found->usage = lib->backend_buffer_get_usage != NULL ? lib->backend_buffer_get_usage(found->buffer) : 0;
        if (lib->backend_buffer_get_type != NULL) {
            void *buft = lib->backend_buffer_get_type(found->buffer);
            found->buft = buft;
            found->type = lib->backend_buft_name(buft);
            found->device = gh_device_of(lib, buft);
        }
    }
    pthread_mutex_unlock(&open_buffers.lock);
    return is_there;
}

bool gh_is_simulated(const void *buffer)
{
    bool is_empty = false;
    pthread_mutex_lock(&open_buffers.lock);
    const int at = index_of(buffer);
    if (at >= 0) {
        is_empty = open_buffers.at[at].lib->backend_buffer_get_size(open_buffers.at[at].buffer) == 0;
    }
    pthread_mutex_unlock(&open_buffers.lock);
    return is_empty;
}
