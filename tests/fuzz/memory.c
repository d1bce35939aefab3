/* memory.c - where a call's tensors lie: every layout that their descriptions allow, at every alignment, amid bytes
 * that tell who wrote beside an output or read beside an input (as float they are NaN). */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { AROUND = 0xff };

int64_t fuzz_offset(const fuzz_tensor *t, int64_t element) {
    int64_t offset = 0;
    for (int i = t->dims - 1; i >= 0; i--) {
        offset += element % t->shape[i] * t->stride[i];
        element /= t->shape[i];
    }
    return offset;
}

/* ---- layouts ----------------------------------------------------------------------------------------------------- */

static int64_t draw_gap(void) {
    return fuzz_chance(2) ? 0 : fuzz_chance(2) ? 8 * (1 + fuzz_below(4)) : 1 + fuzz_below(9);
}

/* Without gaps from dimension `from` on, where an element of `from + ... + to` takes `step`; what they all take. */
static int64_t pack(fuzz_tensor *t, int from, int to, int64_t step) {
    for (int i = to - 1; i >= from; i--) {
        t->stride[i] = step;
        step *= t->shape[i];
    }
    return step;
}

/* Rows that fold into two strides: gaps, and for inputs rows that are the same or come in falling order. */
static void lay_rows(fuzz_tensor *t, bool input) {
    int last = t->dims - 1, split = (int)fuzz_below(last + 1);
    int64_t columns = t->shape[last];
    t->stride[last] = 1;
    int64_t row = input && fuzz_chance(12) ? 0 : columns + draw_gap();
    int64_t all = pack(t, split, last, row);
    int64_t outer = input && fuzz_chance(12) ? 0 : (row ? all : columns) + draw_gap();
    if (input && fuzz_chance(16)) outer = -outer;
    pack(t, 0, split, outer);
}

/* Any order of the leading dimensions. */
static void lay_anyhow(fuzz_tensor *t, bool input) {
    int last = t->dims - 1, order[FUZZ_MOST_DIMS];
    t->stride[last] = 1;
    int64_t step = t->shape[last] + draw_gap();
    for (int i = 0; i < last; i++) order[i] = i;
    for (int i = last - 1; i >= 0; i--) {
        int with = fuzz_chance(3) ? i : (int)fuzz_below(i + 1), dimension = order[with];
        order[with] = order[i];
        if (input && fuzz_chance(20)) {
            t->stride[dimension] = 0;
            continue;
        }
        t->stride[dimension] = input && fuzz_chance(20) ? -step : step;
        step = step * (t->shape[dimension] ? t->shape[dimension] : 1) + draw_gap();
    }
}

static void exchange(int64_t *sizes, int dims) {
    int64_t last = sizes[dims - 1];
    sizes[dims - 1] = sizes[dims - 2];
    sizes[dims - 2] = last;
}

/* Any dimension contiguous of the last two. */
static void lay_strided(fuzz_tensor *t, bool input) {
    bool turned = t->dims > 1 && fuzz_chance(2);
    if (turned) exchange(t->shape, t->dims);
    lay_anyhow(t, input);
    if (turned) exchange(t->shape, t->dims), exchange(t->stride, t->dims);
}

static void lay_out(fuzz_tensor *t, bst_layout layout, bool input) {
    pack(t, 0, t->dims, 1);
    if (t->dims && layout == BST_ROWS) lay_rows(t, input);
    if (t->dims && layout == BST_LAST) lay_anyhow(t, input);
    if (t->dims && layout == BST_STRIDED) lay_strided(t, input);
    for (int i = 0; i < t->dims; i++) /* says nothing there */
        if (t->shape[i] == 1 && fuzz_chance(2)) t->stride[i] = fuzz_chance(2) ? 0 : 12345;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static void allocate(fuzz_tensor *t, bool input) {
    int64_t low = 0, high = 0, bytes = bst__dtype_size(t->type);
    for (int i = 0; i < t->dims && t->count; i++) {
        int64_t span = t->shape[i] > 1 ? (t->shape[i] - 1) * t->stride[i] : 0;
        if (span < 0)
            low -= span;
        else
            high += span;
    }
    /* The block of an input ends with its last element, so that AddressSanitizer sees who reads on. */
    int64_t begin = FUZZ_GUARD + (fuzz_chance(2) ? 0 : fuzz_below(9)) * bytes;
    t->bytes = (size_t)(begin + (t->count ? low + high + 1 : 0) * bytes + (input ? 0 : FUZZ_GUARD));
    t->block = malloc(t->bytes);
    t->before = malloc(t->bytes);
    if (!t->block || !t->before) abort();
    memset(t->block, AROUND, t->bytes);
    t->data = (char *)t->block + begin + low * bytes;
}

static bool is_distinct(const fuzz_tensor *t) {
    for (int i = 0; i < t->dims; i++)
        if (t->shape[i] > 1 && t->stride[i] <= 0) return false;
    return true;
}

/* An input in whose place this output may lie and nobody else does; -1. */
static int draw_over(const fuzz_call *c, int place) {
    uint32_t may_be = c->function->arguments[place].may_be;
    const fuzz_tensor *t = &c->of[place];
    int over = -1, found = 0;
    for (int i = 0; i < c->count; i++) {
        const fuzz_tensor *in = &c->of[i];
        if (!(may_be >> i & 1) || !in->given || !t->count || in->type != t->type || !is_distinct(in)) continue;
        bool taken = in->dims != t->dims || memcmp(in->shape, t->shape, (size_t)t->dims * sizeof *t->shape) != 0;
        for (int j = 0; j < c->count; j++) taken = taken || (c->of[j].given && j < place && c->of[j].over == i);
        if (!taken && fuzz_chance(++found)) over = i;
    }
    return over;
}

void fuzz_place_in_memory(fuzz_call *c) {
    int order[BST_MOST_ARGUMENTS];
    fuzz_checked(c->function, order);
    for (int i = 0; i < c->count; i++) {
        const bst_argument *a = &c->function->arguments[order[i]];
        fuzz_tensor *t = &c->of[order[i]];
        bool input = !(a->flags & BST_OUT);
        if (!t->given) continue;
        if (!input && fuzz_chance(3) && (t->over = draw_over(c, order[i])) >= 0) {
            const fuzz_tensor *in = &c->of[t->over];
            memcpy(t->stride, in->stride, sizeof t->stride);
            t->data = in->data;
            continue;
        }
        lay_out(t, a->layout, input);
        allocate(t, input);
    }
}

void fuzz_free(fuzz_call *c) {
    for (int i = 0; i < c->count; i++) {
        free(c->of[i].block);
        free(c->of[i].before);
        free(c->of[i].numbers);
        free(c->of[i].size);
        free(c->of[i].results);
    }
}

/* ---- before and after -------------------------------------------------------------------------------------------- */

void fuzz_restore(fuzz_call *c, unsigned char garbage) {
    for (int i = 0; i < c->count; i++) {
        fuzz_tensor *t = &c->of[i];
        if (!t->block) continue;
        if (c->function->arguments[i].flags & BST_OUT) {
            size_t bytes = (size_t)bst__dtype_size(t->type);
            for (int64_t e = 0; e < t->count; e++)
                memset(t->before + (t->data - (char *)t->block) + fuzz_offset(t, e) * (int64_t)bytes, garbage, bytes);
        }
        memcpy(t->block, t->before, t->bytes);
    }
}

/* Puts the elements of an output back as they were before. */
static void forget(const fuzz_call *c, int place, unsigned char *copy, const fuzz_tensor *owner) {
    const fuzz_tensor *t = &c->of[place];
    int64_t bytes = bst__dtype_size(t->type);
    for (int64_t e = 0; e < t->count; e++) {
        int64_t at = t->data - (char *)owner->block + fuzz_offset(t, e) * bytes;
        memcpy(copy + at, owner->before + at, (size_t)bytes);
    }
}

const char *fuzz_changed(const fuzz_call *c, bool ran) {
    for (int i = 0; i < c->count; i++) {
        const fuzz_tensor *t = &c->of[i];
        if (!t->block) continue;
        unsigned char *copy = malloc(t->bytes);
        if (!copy) abort();
        memcpy(copy, t->block, t->bytes);
        for (int j = 0; j < c->count && ran; j++)
            if (c->of[j].given && (c->function->arguments[j].flags & BST_OUT) && (j == i || c->of[j].over == i))
                forget(c, j, copy, t);
        bool same = memcmp(copy, t->before, t->bytes) == 0;
        free(copy);
        if (!same) return c->function->arguments[i].name;
    }
    return NULL;
}
