/* ggml_sched/llama_cpp/graph/tensor_names.c -- see tensor_names.h. */
#include "arrays.h"
#include "tensor_names.h"

#include <stdlib.h>
#include <string.h>

#define GH_LONGEST 64   /* bytes of a name in ggml, its end included */
#define GH_USUAL 16

static bool make_room(gh_tensor_names *names, int32_t n, int64_t bytes)
{
    if (n > names->room) {
        if (!gh_grow(&names->at, sizeof *names->at, n + n / 4)) {
            return false;
        }
        names->room = n + n / 4;
    }
    if (bytes > names->room_text) {
        if (!gh_grow(&names->text, 1, bytes * 2)) {
            return false;
        }
        names->room_text = bytes * 2;
    }
    return true;
}

bool gh_tensor_names_fill(gh_tensor_names *names, const gh_reader *r)
{
    int64_t at = 0;
    names->n = 0;
    if (!make_room(names, r->n, (int64_t)r->n * GH_USUAL)) {
        return false;
    }
    for (int32_t id = 0; id < r->n; id++) {
        const char *name = r->item[id].tensor->name;
        const size_t n = strnlen(name, GH_LONGEST - 1);
        if (!make_room(names, r->n, at + GH_LONGEST)) {
            return false;
        }
        names->at[id] = (int32_t)at;
        memcpy(names->text + at, name, n);
        names->text[at + (int64_t)n] = 0;
        at += (int64_t)n + 1;
    }
    names->n = r->n;
    return true;
}

void gh_tensor_names_free(gh_tensor_names *names)
{
    free(names->at);
    free(names->text);
    memset(names, 0, sizeof *names);
}
