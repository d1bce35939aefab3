/* spoil.c - calls that break one rule of their description. Each must be refused by the argument's name, and write
 * nothing. Only what is wrong whatever the rest of the call is counts here. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fuzz.h"

#ifdef BST_EMULATE
const DLDevice fuzz_device = {kDLCUDA, 0};
static const DLDevice other_device = {kDLCPU, 0};
#else
const DLDevice fuzz_device = {kDLCPU, 0};
static const DLDevice other_device = {kDLCUDA, 0};
#endif

DLDataType fuzz_dl_type(bst_dtype type) {
    static const DLDataType types[] = {[BST_F32] = {kDLFloat, 32, 1}, [BST_BF16] = {kDLBfloat, 16, 1},
                                       [BST_F16] = {kDLFloat, 16, 1}, [BST_I64] = {kDLInt, 64, 1},
                                       [BST_I32] = {kDLInt, 32, 1},   [BST_U8] = {kDLUInt, 8, 1}};
    return types[type];
}

void fuzz_write_raw(const fuzz_call *c, fuzz_raw *raw) {
    memset(raw, 0, sizeof *raw);
    memcpy(raw->attributes, c->attributes, sizeof raw->attributes);
    for (int i = 0; i < c->count; i++) {
        const fuzz_tensor *t = &c->of[i];
        if (!t->given) continue;
        memcpy(raw->shape[i], t->shape, sizeof raw->shape[i]);
        memcpy(raw->stride[i], t->stride, sizeof raw->stride[i]);
        int64_t packed = 1;
        bool contiguous = true;
        for (int d = t->dims - 1; d >= 0; packed *= t->shape[d--]) contiguous &= t->stride[d] == packed;
        /* Half of the offset in data, half in byte_offset; strides of what is contiguous are left out. */
        raw->tensor[i] = (DLTensor){.data = t->data - t->count % 64,
                                    .byte_offset = (uint64_t)(t->count % 64),
                                    .device = fuzz_device,
                                    .ndim = t->dims,
                                    .dtype = fuzz_dl_type(t->type),
                                    .shape = raw->shape[i],
                                    .strides = contiguous ? NULL : raw->stride[i]};
        raw->given[i] = &raw->tensor[i];
    }
}

/* A spoiler breaks a rule for one argument, or finds that this one has none. */
typedef bool spoiler(const fuzz_call *c, fuzz_raw *raw, int place);

static const bst_argument *argument(const fuzz_call *c, int place) { return &c->function->arguments[place]; }

static bool missing(const fuzz_call *c, fuzz_raw *raw, int place) {
    const bst_argument *a = argument(c, place);
    if ((a->flags & BST_OPTIONAL) && !a->with) return false;
    raw->given[place] = NULL;
    return true;
}

static bool foreign_type(const fuzz_call *c, fuzz_raw *raw, int place) {
    static const DLDataType types[] = {{kDLFloat, 64, 1}, {kDLInt, 8, 1},      {kDLUInt, 64, 1}, {kDLBool, 8, 1},
                                       {kDLFloat, 32, 4}, {kDLComplex, 64, 1}, {200, 1, 1},      {kDLBfloat, 32, 1}};
    (void)c;
    raw->tensor[place].dtype = types[fuzz_below(sizeof types / sizeof *types)];
    return true;
}

static bool other_type(const fuzz_call *c, fuzz_raw *raw, int place) {
    const bst_argument *a = argument(c, place);
    bst_dtype type = (bst_dtype)fuzz_below(BST_DTYPES);
    if (type == c->of[place].type || ((a->types & 1u << type) && !a->type_of && !a->type_rule)) return false;
    if (bst__dtype_size(type) != bst__dtype_size(c->of[place].type)) return false; /* it may reach beyond the block */
    raw->tensor[place].dtype = fuzz_dl_type(type);
    return true;
}

static bool bad_rank(const fuzz_call *c, fuzz_raw *raw, int place) {
    (void)c;
    raw->tensor[place].ndim = fuzz_chance(2) ? -1 : BST_MAX_DIMS + 1;
    return true;
}

static bool without_shape(const fuzz_call *c, fuzz_raw *raw, int place) {
    (void)c;
    raw->tensor[place].shape = NULL;
    return raw->tensor[place].ndim > 0;
}

static bool negative_size(const fuzz_call *c, fuzz_raw *raw, int place) {
    int dims = c->of[place].dims;
    if (!dims) return false;
    raw->shape[place][fuzz_below(dims)] = -1 - fuzz_below(5);
    return true;
}

/* One more dimension, of one element, where the rank is fixed or another argument's. */
static bool another_rank(const fuzz_call *c, fuzz_raw *raw, int place) {
    const bst_argument *a = argument(c, place);
    int dims = c->of[place].dims;
    if (dims == BST_MAX_DIMS) return false;
    if (!a->like && (strchr("*#.", *a->shape) || (a->reduced && c->attributes[a->reduced - 1].i != BST_REDUCTION_NONE)))
        return false;
    raw->shape[place][dims] = raw->stride[place][dims] = 1;
    raw->tensor[place].ndim++;
    return true;
}

/* Whether an argument that is checked before this one has bound a letter. */
static bool bound_before(const fuzz_call *c, int place, char letter) {
    int order[BST_MOST_ARGUMENTS];
    fuzz_checked(c->function, order);
    for (int i = 0; order[i] != place; i++) {
        const bst_argument *a = argument(c, order[i]);
        const char *shape = a->reduced && c->attributes[a->reduced - 1].i != BST_REDUCTION_NONE ? "." : a->shape;
        if (c->of[order[i]].given && shape && !a->like && strchr(shape, letter)) return true;
    }
    return false;
}

/* One element more along a dimension that something else decides. */
static bool another_size(const fuzz_call *c, fuzz_raw *raw, int place) {
    const bst_argument *a = argument(c, place);
    const fuzz_tensor *t = &c->of[place];
    if (!t->dims) return false;
    int at = t->dims - 1;
    if (a->like) {
        at = (int)fuzz_below(t->dims);
    } else {
        if (a->reduced && c->attributes[a->reduced - 1].i != BST_REDUCTION_NONE)
            return raw->shape[place][at]++, true; /* two elements */
        size_t length = strlen(a->shape);
        char last = a->shape[length - 1];
        bool decided = *a->shape == '.' || (last >= 'a' && last <= 'z') ||
                       (last >= '0' && last <= '9' && *a->shape != '#') ||
                       (last >= 'A' && last <= 'Z' && bound_before(c, place, last));
        if (*a->shape == '#') { /* the number of elements counts */
            decided = t->count > 0;
            at = 0;
        }
        if (!decided || last == '*') return false;
    }
    raw->shape[place][at]++;
    return true;
}

static bool apart_in_rows(const fuzz_call *c, fuzz_raw *raw, int place) {
    const fuzz_tensor *t = &c->of[place];
    if (!t->dims || t->shape[t->dims - 1] < 2 || !t->count) return false;
    if (argument(c, place)->layout == BST_STRIDED) return false; /* no rule of the table */
    raw->tensor[place].strides = raw->stride[place];
    raw->stride[place][t->dims - 1] = 2;
    return true;
}

static bool not_contiguous(const fuzz_call *c, fuzz_raw *raw, int place) {
    const fuzz_tensor *t = &c->of[place];
    if (argument(c, place)->layout != BST_CONTIGUOUS || t->over >= 0) return false;
    for (int i = 0; i + 1 < t->dims; i++)
        if (t->shape[i] > 1 && t->count) {
            raw->tensor[place].strides = raw->stride[place];
            raw->stride[place][i] += 1 + fuzz_below(3);
            return true;
        }
    return false;
}

static bool without_memory(const fuzz_call *c, fuzz_raw *raw, int place) {
    raw->tensor[place].data = NULL;
    return c->of[place].count > 0;
}

static bool between_elements(const fuzz_call *c, fuzz_raw *raw, int place) {
    raw->tensor[place].byte_offset++; /* between bytes there is nothing */
    return c->of[place].count > 0 && bst__dtype_size(c->of[place].type) > 1;
}

static bool beyond_63_bits(const fuzz_call *c, fuzz_raw *raw, int place) {
    const fuzz_tensor *t = &c->of[place];
    for (int i = 0; i < t->dims; i++)
        if (t->shape[i] > 1) {
            raw->tensor[place].strides = raw->stride[place];
            raw->stride[place][i] = fuzz_chance(2) ? INT64_MAX / 2 : INT64_MIN / 2;
            return true;
        }
    return false;
}

static bool elsewhere(const fuzz_call *c, fuzz_raw *raw, int place) {
    if (fuzz_chance(3)) return raw->tensor[place].device.device_type = kDLROCM, true;
    if (!place) return false; /* the others would be elsewhere then */
    raw->tensor[place].device = other_device;
    if (fuzz_chance(2)) raw->tensor[place].device = (DLDevice){fuzz_device.device_type, 1};
    (void)c;
    return true;
}

static bool is_output(const fuzz_call *c, int place) { return argument(c, place)->flags & BST_OUT; }

/* An output where an input lies that it may not be, or another output. */
static bool over_another(const fuzz_call *c, fuzz_raw *raw, int place) {
    int other = (int)fuzz_below(c->count);
    if (!is_output(c, place) || other == place || !c->of[place].count || !c->of[other].given || !c->of[other].count)
        return false;
    if (argument(c, place)->may_be & 1u << other) return false;
    /* The names are those of both; the later of two outputs is the one that is refused. */
    if (is_output(c, other) && other > place) return false;
    /* Elements of the larger type must be aligned. */
    if (bst__dtype_size(c->of[other].type) < bst__dtype_size(c->of[place].type)) return false;
    raw->tensor[place].data = c->of[other].data;
    raw->tensor[place].byte_offset = 0;
    return true;
}

/* Across an input whose place it may take. */
static bool across(const fuzz_call *c, fuzz_raw *raw, int place) {
    const fuzz_tensor *t = &c->of[place];
    for (int i = 0; i < c->count; i++) {
        const fuzz_tensor *in = &c->of[i];
        if (!(argument(c, place)->may_be >> i & 1) || !in->given || in->type != t->type || !t->count) continue;
        if (!in->dims || in->shape[in->dims - 1] < 2) continue;
        raw->tensor[place].data = in->data + bst__dtype_size(in->type);
        raw->tensor[place].byte_offset = 0;
        return true;
    }
    return false;
}

static bool over_itself(const fuzz_call *c, fuzz_raw *raw, int place) {
    const fuzz_tensor *t = &c->of[place];
    if (!is_output(c, place) || !t->count || t->over >= 0) return false;
    for (int i = 0; i + 1 < t->dims; i++)
        if (t->shape[i] > 1) {
            raw->tensor[place].strides = raw->stride[place];
            raw->stride[place][i] = 0;
            return true;
        }
    return false;
}

static const struct {
    const char *what;
    spoiler *spoil;
} spoilers[] = {
    {"is missing", missing},
    {"has a type that is none of ours", foreign_type},
    {"has another type", other_type},
    {"has an impossible rank", bad_rank},
    {"has no shape", without_shape},
    {"has a negative size", negative_size},
    {"has a dimension too many", another_rank},
    {"has an element too many", another_size},
    {"has gaps between the elements of a row", apart_in_rows},
    {"is not contiguous", not_contiguous},
    {"has no memory", without_memory},
    {"begins within an element", between_elements},
    {"reaches beyond 63 bits", beyond_63_bits},
    {"is on another device", elsewhere},
    {"lies over another", over_another},
    {"lies across what it may replace", across},
    {"lies over itself", over_itself},
};

static bool spoil_attribute(const fuzz_call *c, fuzz_raw *raw, char what[128], const char **name) {
    const bst_attribute_rule *rules = c->function->attributes;
    int count = 0;
    while (rules && rules[count].name) count++;
    if (!count) return false;
    int at = (int)fuzz_below(count);
    const bst_attribute_rule *r = &rules[at];
    if (!(r->low < r->high)) return false;
    if (r->type == 'd') {
        const double wrong[] = {NAN, r->low == -DBL_MAX ? -INFINITY : r->low - 0.5,
                                r->high >= (double)FLT_MAX ? INFINITY : r->high + 0.5};
        raw->attributes[at].d = wrong[fuzz_below(3)];
    } else {
        bool low = r->high >= 0x1p62 || fuzz_chance(2);
        raw->attributes[at].i = low ? (int64_t)r->low - 1 - fuzz_below(3) : (int64_t)r->high + 1 + fuzz_below(3);
    }
    snprintf(what, 128, "%s is out of bounds", r->name);
    *name = r->name;
    return true;
}

bool fuzz_spoil(const fuzz_call *c, fuzz_raw *raw, char what[128], const char **name) {
    for (int attempt = 0; attempt < 20; attempt++) {
        fuzz_write_raw(c, raw);
        if (fuzz_chance(12)) {
            if (spoil_attribute(c, raw, what, name)) return true;
            continue;
        }
        int place = (int)fuzz_below(c->count), which = (int)fuzz_below(sizeof spoilers / sizeof *spoilers);
        if (!c->of[place].given || !spoilers[which].spoil(c, raw, place)) continue;
        *name = argument(c, place)->name;
        snprintf(what, 128, "%s %s", *name, spoilers[which].what);
        return true;
    }
    return false;
}
