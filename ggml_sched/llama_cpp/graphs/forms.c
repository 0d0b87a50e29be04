/* ggml_sched/llama_cpp/graphs/forms.c -- the table of forms.  See forms.h. */
#include "arrays.h"
#include "forms.h"

#include <stdlib.h>

void gh_forms_init(gh_forms *forms, const gh_ggml *lib, bool whole)
{
    memset(forms, 0, sizeof *forms);
    forms->lib = lib;
    forms->whole = whole;
    forms->n_kept = GH_FEW_FORMS;
}

/* The words of ne and nb, which are one run. */
static inline void shape_of(int64_t shape[8], const gx_tensor *t)
{
    memcpy(shape, (const char *)t + offsetof(gx_tensor, ne), 8 * sizeof *shape);
}

static uint32_t hash_of(const int64_t shape[8], int32_t type, int32_t op, uint64_t view_offs)
{
    const uint64_t mixed = ((uint64_t)(uint32_t)op << 32 | (uint32_t)type)
                         + (uint64_t)shape[0] * UINT64_C(0x9e3779b97f4a7c15)
                         + (uint64_t)shape[1] * UINT64_C(0xc2b2ae3d27d4eb4f)
                         + (uint64_t)shape[2] * UINT64_C(0x165667b19e3779f9)
                         + (uint64_t)shape[3] * UINT64_C(0xd6e8feb86659fd93)
                         + (uint64_t)shape[5] * UINT64_C(0xff51afd7ed558ccd)
                         + (uint64_t)shape[6] * UINT64_C(0xc4ceb9fe1a85ec53)
                         + view_offs * UINT64_C(0xa0761d6478bd642f);
    return (uint32_t)((mixed * UINT64_C(0xe7037ed1a0b428db)) >> 32);
}

static void put_in_places(const gh_forms *forms, int32_t *place, uint32_t mask)
{
    for (int32_t i = 0; i < forms->n; i++) {
        const gh_form *f = &forms->form[i];
        uint32_t at = hash_of(f->shape, f->type, f->op, f->view_offs) & mask;
        while (place[at] != 0) {
            at = (at + 1) & mask;
        }
        place[at] = i + 1;
    }
}

/* Room for one more form, and places for four times as many. */
static bool make_room(gh_forms *forms)
{
    const int32_t room = forms->room > 0 ? 2 * forms->room : 128;
    const uint32_t mask = 4 * (uint32_t)room - 1;
    int32_t *place;
    if (forms->n < forms->room) {
        return true;
    }
    if (!gh_grow(&forms->form, sizeof *forms->form, room)) {
        return false;
    }
    place = calloc((size_t)mask + 1, sizeof *place);
    if (place == NULL) {
        return false;
    }
    put_in_places(forms, place, mask);
    free(forms->place);
    forms->place = place;
    forms->mask = mask;
    forms->room = room;
    return true;
}

int32_t gh_form_of(gh_forms *forms, const gx_tensor *t)
{
    int64_t shape[8];
    uint32_t at;
    gh_form *f;
    if (!make_room(forms)) {
        return -1;
    }
    shape_of(shape, t);
    at = hash_of(shape, t->type, t->op, t->view_offs) & forms->mask;
    for (; forms->place[at] != 0; at = (at + 1) & forms->mask) {
        if (gh_is_of_form(t, &forms->form[forms->place[at] - 1], forms->whole)) {
            return forms->place[at] - 1;
        }
    }
    f = &forms->form[forms->n];
    memset(f, 0, sizeof *f);
    memcpy(f->shape, shape, sizeof f->shape);
    f->view_offs = t->view_offs;
    f->type = t->type;
    f->op = t->op;
    f->flags = t->flags;
    f->counts[0] = -1;
    f->counts[1] = gh_is_of_family(forms->lib, t->op) ? -1 : 0;
    f->params[0] = t->op_params[0] & f->counts[1];
    if (forms->whole) {
        memcpy(f->params, t->op_params, sizeof f->params);
    }
    f->nbytes = (int64_t)forms->lib->nbytes(t);
    forms->place[at] = ++forms->n;
    return forms->n - 1;
}

void gh_forms_keep(gh_forms *forms, const int32_t *number, int32_t n)
{
    for (int32_t i = 0; i < forms->n; i++) {
        if (number[i] >= 0) {
            forms->form[number[i]] = forms->form[i];
        }
    }
    forms->n = n;
    forms->n_kept = 2 * n > GH_FEW_FORMS ? 2 * n : GH_FEW_FORMS;
    memset(forms->place, 0, ((size_t)forms->mask + 1) * sizeof *forms->place);
    put_in_places(forms, forms->place, forms->mask);
}

void gh_forms_free(gh_forms *forms)
{
    free(forms->form);
    free(forms->place);
    memset(forms, 0, sizeof *forms);
}
