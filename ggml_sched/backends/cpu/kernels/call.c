/* call.c -- lists of calls: growing them, and memory that lives as long as they do. */
#include "call.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 4

int gs_add_call(gs_calls *to, const gs_call *call) {
    if (to->n == to->room) {
        int32_t room = to->room ? to->room : FIRST_ROOM;
        if (room > INT32_MAX / 2)
            return GS_NO_HOST_MEMORY;
        room = to->room ? room * 2 : room;
        gs_call *grown = realloc(to->call, (size_t)room * sizeof(gs_call));
        if (grown == NULL)
            return GS_NO_HOST_MEMORY;
        to->call = grown;
        to->room = room;
    }
    to->call[to->n++] = *call;
    return GS_OK;
}

/* A block of gs_keep begins with a pointer to the block before; its data start at the next multiple of 64. */
void *gs_keep(gs_calls *to, int64_t size) {
    if (size < 0 || size > INT64_MAX / 2)
        return NULL;
    char *block = malloc((size_t)size + 128);
    if (block == NULL)
        return NULL;
    memcpy(block, &to->kept, sizeof(void *));
    to->kept = block;
    return block + sizeof(void *) + (64 - ((uintptr_t)block + sizeof(void *)) % 64) % 64;
}

void gs_free_calls(gs_calls *of) {
    void *block = of->kept;
    while (block != NULL) {
        void *before;
        memcpy(&before, block, sizeof(void *));
        free(block);
        block = before;
    }
    free(of->call);
    memset(of, 0, sizeof(*of));
}
