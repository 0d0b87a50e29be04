/* ggml_sched/llama_cpp/hook/open_buffers.h -- the buffers that clients of ggml hold now, and, during a dry run, ggml's
 * contexts with their tensors.
 *
 *     open_buffers.c     ggml's functions that make and free buffers: each call is passed on, and its buffer recorded
 *     open_contexts.c    ggml's functions that make and free contexts: recorded only during a dry run
 *
 * Any thread may call these functions.  Invariant: while the lock is held, every recorded buffer exists.
 */
#ifndef GGML_SCHED_LLAMA_CPP_HOOK_OPEN_BUFFERS_H
#define GGML_SCHED_LLAMA_CPP_HOOK_OPEN_BUFFERS_H

#include "library.h"

#define GH_NAME_ROOM 64

/* A buffer that a client holds.  Buffers of the plan caches are not among them. */
typedef struct gh_open_buffer {
    const gh_ggml *lib;
    void *buffer;
    size_t nbytes;
    int usage;                      /* ggml's: 0 any, 1 weights, 2 compute                                      */
    bool is_mapped;                 /* made over memory that the client had before, such as a mapped file       */
    char first[GH_NAME_ROOM];       /* the name of the first tensor of the context that it was made for, else "" */
    const char *type;               /* the name of its buffer type                                              */
    const char *device;             /* the name of its device; NULL: the library does not say                   */
    void *buft;                     /* its buffer type                                                          */
} gh_open_buffer;

/* Copy open buffer number i to *found; false: there are fewer. */
bool gh_open_buffer_at(int i, gh_open_buffer *found);

/* Whether this is an open buffer without bytes: a client makes such buffers when it only simulates allocations. */
bool gh_is_simulated(const void *buffer);

/* The name of a buffer type's device; NULL: the library does not say. */
const char *gh_device_of(const gh_ggml *lib, void *buft);

/* The bytes that the device of a buffer type has free, and those that it has in all.  False: the library does not
 * say. */
bool gh_device_memory(const gh_ggml *lib, void *buft, size_t *free_bytes, size_t *total);

/* A tensor whose allocation a client only simulates: it is no view, and lies in a buffer without bytes. */
typedef struct gh_simulated {
    int context;                    /* number of its context among those that exist, in the order made          */
    char name[GH_NAME_ROOM];
    int32_t type;                   /* ggml's number of the type                                                */
    const char *type_name;
    int64_t ne[4];
    size_t nbytes;
    int usage;
    const char *buffer_type;
    const char *device;
    size_t total;                   /* bytes that all tensors of the context take when they are allocated       */
} gh_simulated;

/* Choose whether contexts are recorded from now on.  Meanwhile allocations of contexts are simulated: their tensors get
 * buffers without bytes. */
void gh_record_contexts(bool on);
bool gh_records_contexts(void);

/* Call `each` for every tensor of a recorded context that has a buffer without bytes, in the order in which the
 * contexts were made. */
void gh_simulated_tensors(void (*each)(const gh_simulated *tensor, void *user), void *user);

#endif
