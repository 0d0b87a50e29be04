/* ggml_sched/llama_cpp/ggml/op_map.c -- maps a library's numbers of ops and types to the planner's.
 * See library.h. */
#define _GNU_SOURCE
#include "library.h"
#include "inplace.h"

#include <dlfcn.h>
#include <string.h>
#include <strings.h>

/* Whether a text lies in the same library as a function that returned its address: if so, the text is a name. */
static bool is_of(const char *(*function)(int), const char *address)
{
    Dl_info mine, found;
    void *at;
    memcpy(&at, &function, sizeof at);
    return address != NULL && dladdr(at, &mine) != 0 && dladdr(address, &found) != 0
        && mine.dli_fbase == found.dli_fbase;
}

/* Map ggml's ops to the planner's by their names, and note which may be computed in place.  Ends at the last op of this
 * version, because the name of a number beyond it is undefined in ggml.  GLU is the last op since June 2025,
 * OPT_STEP_ADAMW was before. */
static void find_ops(gh_ggml *lib)
{
    const char *last = lib->glu_op_name != NULL ? "GLU" : "OPT_STEP_ADAMW";
    memset(lib->op, GS_OP_CUSTOM, sizeof lib->op);
    memset(lib->unary, GS_OP_CUSTOM, sizeof lib->unary);
    memset(lib->glu, GS_OP_CUSTOM, sizeof lib->glu);
    for (int i = 0; i < GH_N_OPS; i++) {
        const char *name = lib->op_name(i);
        uint64_t mask = 0;
        int number;
        if (name == NULL) {
            break;
        }
        number = gh_api->op_of_name(name);
        if (strcmp(name, "UNARY") == 0) {
            number = GS_OP_UNARY;
            mask = 1;
        } else if (strcmp(name, "GLU") == 0) {
            number = GS_OP_GLU;
        }
        if (number >= 0) {
            lib->op[i] = (unsigned char)number;
        }
#define GH_X(op, sources) mask = number == GS_OP_##op ? (sources) : mask;
        GH_INPLACE(GH_X)
#undef GH_X
        if (lib->op_can_inplace != NULL && !lib->op_can_inplace(i)) {
            mask = 0;
        }
        for (int k = 0; mask != 0 && k < (number == GS_OP_UNARY ? GS_N_UNARY_OPS : 1); k++) {
            lib->inplace[number + k] = mask;
        }
        if (strcmp(name, last) == 0) {
            break;
        }
    }
}

/* Map the ops of a family by their names: the planner's name is `family`, then ggml's name.  All versions have the ops
 * up to the name `last`.  Beyond it the search ends at the first name that the planner does not have: after the names
 * of a version there may be any other text of the library. */
static void find_sub_ops(unsigned char *numbers, const char *(*name_of)(int), const char *family, const char *last)
{
    char full[64];
    bool certain = true;
    for (int i = 0; i < GH_N_OPS; i++) {
        const char *name = name_of(i);
        int number;
        if (!is_of(name_of, name) || strlen(name) > sizeof full - 16) {
            break;
        }
        strcpy(full, family);
        strcat(full, name);
        number = gh_api->op_of_name(full);
        if (number >= 0) {
            numbers[i] = (unsigned char)number;
        } else if (!certain) {
            break;
        }
        certain &= strcmp(name, last) != 0;
    }
}

/* Map ggml's types to the planner's.  A type has the same number in all versions; where ggml's name or block size
 * differs from the planner's, the type is mapped to GH_FOREIGN_TYPE + its number.  After the last type of a version
 * there may be anything instead of a name, hence is_of. */
static void find_types(gh_ggml *lib)
{
    for (int i = 0; i < GH_N_TYPES; i++) {
        const char *ours = gh_api->type_name(i);
        gs_type_traits traits;
        lib->type[i] = GH_FOREIGN_TYPE + i;
        if (ours != NULL && gh_api->type_traits(i, &traits) == GS_OK) {
            const char *theirs = lib->type_name(i);
            if (is_of(lib->type_name, theirs) && strcasecmp(ours, theirs) == 0 && lib->blck_size(i) == traits.block_size
                && lib->type_size(i) == (size_t)traits.type_size) {
                lib->type[i] = i;
            }
        }
    }
}

void gh_find_op_map(gh_ggml *lib)
{
    find_ops(lib);
    find_sub_ops(lib->unary, lib->unary_op_name, "UNARY:", "EXP");
    if (lib->glu_op_name != NULL) {
        find_sub_ops(lib->glu, lib->glu_op_name, "GLU:", "SWIGLU");
    }
    find_types(lib);
}
