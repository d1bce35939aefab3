/* describe.c - see describe.h. */
#include "core/describe.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/options.h"

/* ---- shapes ------------------------------------------------------------------------------------------------------ */

enum { MEANING = 96 };

/* What a symbol is: "the last dimension of x", "half the last dimension of x". */
static const char *meaning(const bst_function *f, const bst_view *views, const bst_symbols *s, int symbol, bool half,
                           char text[MEANING]) {
    int owner = s->owner[symbol], dimension = s->dimension[symbol];
    const char *half_of = half ? "half " : "";
    for (const char *const *m = f->meanings; m && *m; m++) {
        if (**m != 'A' + symbol) continue;
        snprintf(text, MEANING, "%s%s", half_of, *m + 1);
        return text;
    }
    if (dimension == views[owner].dims - 1)
        snprintf(text, MEANING, "%sthe last dimension of %s", half_of, f->arguments[owner].name);
    else
        snprintf(text, MEANING, "%sdimension %d of %s", half_of, dimension, f->arguments[owner].name);
    return text;
}

/* The integer attribute whose name begins so. */
static int attribute_place(const bst_function *f, char initial) {
    int place = 0;
    while (f->attributes[place].type != 'i' || *f->attributes[place].name != initial) place++;
    return place;
}

static bst_status bind_leading(const bst_function *f, int place, int leading, const bst_view *views, bst_symbols *s) {
    const bst_view *v = &views[place];
    if (!s->leading_of) {
        s->leading_of = place + 1;
        s->leading = leading;
        s->rows = 1;
        for (int i = 0; i < leading; i++) s->rows *= v->size[i];
        return BST_OK;
    }
    const bst_view *owner = &views[s->leading_of - 1];
    bool same = leading == s->leading;
    for (int i = 0; same && i < leading; i++) same = v->size[i] == owner->size[i];
    if (same) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s has shape %s; its leading dimensions must be those of %s, %s", f->name,
                      f->arguments[place].name, bst__shape_text(v), f->arguments[s->leading_of - 1].name,
                      bst__shape_text(owner));
}

static const char *shape_of(const bst_argument *a, const bst_attribute *attributes) {
    return a->reduced && attributes[a->reduced - 1].i != BST_REDUCTION_NONE ? "." : a->shape;
}

static bst_status match(const bst_function *f, int place, const bst_attribute *attributes, bst_view *views,
                        bst_symbols *s) {
    const char *shape = shape_of(&f->arguments[place], attributes);
    const char *name = f->arguments[place].name;
    bst_view *v = &views[place];
    char text[MEANING];
    if (*shape == '.') return bst__need_one(f->name, name, v);
    if (*shape == '#') {
        int64_t each = shape[1] ? shape[1] - '0' : 1;
        if (v->count == each * s->rows) return BST_OK;
        return bst__error(BST_INVALID, "%s: %s has shape %s; %" PRId64 " elements, %s %s of %s, are needed", f->name,
                          name, bst__shape_text(v), each * s->rows, each == 1 ? "one" : "two",
                          s->leading < views[s->leading_of - 1].dims ? "a row" : "an element",
                          f->arguments[s->leading_of - 1].name);
    }
    int fixed = (int)strlen(shape), at = 0;
    for (const char *c = shape; *c; c++) fixed -= *c == '~' || *c == '-';
    if (*shape == '*') {
        at = v->dims - --fixed;
        shape++;
        if (at < 0)
            return v->dims
                       ? bst__need_dims(f->name, name, v, fixed)
                       : bst__error(BST_INVALID, "%s: %s is a scalar; at least one dimension is needed", f->name, name);
        BST_TRY(bind_leading(f, place, at, views, s));
    } else {
        BST_TRY(bst__need_dims(f->name, name, v, fixed));
    }
    for (; *shape; shape++, at++) {
        if (*shape == '~') {
            int64_t size = s->size[*++shape - 'A'];
            if (v->size[at] != 1 && v->size[at] != size)
                return bst__error(BST_INVALID, "%s: %s has shape %s; dimension %d must be 1 or %" PRId64 ", %s",
                                  f->name, name, bst__shape_text(v), at, size,
                                  meaning(f, views, s, *shape - 'A', false, text));
            if (v->size[at] == 1) v->stride[at] = 0;
            continue;
        }
        bool half = *shape == '-';
        shape += half;
        if (*shape <= '9') {
            BST_TRY(bst__need_size(f->name, name, v, at, *shape - '0', "always"));
            continue;
        }
        if (*shape >= 'a') {
            int from = attribute_place(f, *shape);
            BST_TRY(bst__need_size(f->name, name, v, at, attributes[from].i, f->attributes[from].name));
            continue;
        }
        int symbol = *shape - 'A';
        if (!(s->bound & 1u << symbol)) {
            s->bound |= 1u << symbol;
            s->owner[symbol] = (uint8_t)place;
            s->dimension[symbol] = (uint8_t)at;
            s->size[symbol] = v->size[at];
            continue;
        }
        int64_t size = half ? s->size[symbol] / 2 : s->size[symbol];
        if (v->size[at] != size)
            return bst__need_size(f->name, name, v, at, size, meaning(f, views, s, symbol, half, text));
    }
    return BST_OK;
}

int bst__output_shape(const bst_function *f, int place, const bst_view *views, const bst_attribute *attributes,
                      const bst_symbols *s, int64_t size[BST_MAX_DIMS]) {
    const bst_argument *a = &f->arguments[place];
    if (a->like) {
        const bst_view *model = &views[a->like - 1];
        memcpy(size, model->size, sizeof model->size);
        return model->dims;
    }
    const char *shape = shape_of(a, attributes);
    if (*shape == '.') return 0;
    if (*shape == '#') return size[0] = s->rows, size[1] = shape[1] - '0', shape[1] ? 2 : 1;
    int dims = 0;
    for (const char *c = shape; *c; c++) {
        if (*c == '*')
            for (int i = 0; i < s->leading; i++) size[dims++] = views[s->leading_of - 1].size[i];
        else if (*c == '-')
            size[dims++] = s->size[*++c - 'A'] / 2;
        else if (*c >= 'a')
            size[dims++] = attributes[attribute_place(f, *c)].i;
        else
            size[dims++] = *c <= '9' ? *c - '0' : s->size[*c - 'A'];
    }
    return dims;
}

bst_dtype bst__output_type(const bst_function *f, int place, const bst_view *views, const bst_attribute *attributes) {
    const bst_argument *a = &f->arguments[place];
    if (a->type_of) return views[a->type_of - 1].dtype;
    return a->type_rule ? a->type_rule(views, attributes) : (bst_dtype)__builtin_ctz(a->types);
}

/* Whether an output is one of the inputs that it may be. */
static bool takes_a_place(const bst_function *f, int place, const bst_view *views) {
    uint32_t may_be = f->arguments[place].may_be;
    for (int i = 0; may_be >> i; i++)
        if ((may_be >> i & 1) && views[i].count && bst__same_memory(&views[place], &views[i])) return true;
    return false;
}

/* ---- one argument ------------------------------------------------------------------------------------------------ */

static bst_status read_rows(const bst_function *f, int place, bst_view *v) {
    bst_layout layout = f->arguments[place].layout;
    if (layout == BST_LAST || layout == BST_STRIDED || (layout == BST_CONTIGUOUS && !v->dims)) return BST_OK;
    return bst__rows(f->name, f->arguments[place].name, v, &v->rows);
}

static bst_status check_one(const bst_function *f, int place, const DLTensor *tensor, const bst_attribute *attributes,
                            bst_view *views, bst_symbols *s) {
    const bst_argument *a = &f->arguments[place];
    bst_view *v = &views[place];
    BST_TRY(bst__view(f->name, a->name, a->types, tensor, v));
    if (a->like)
        BST_TRY(bst__need_same_shape(f->name, a->name, v, f->arguments[a->like - 1].name, &views[a->like - 1]));
    else
        BST_TRY(match(f, place, attributes, views, s));
    if (a->type_of || a->type_rule)
        BST_TRY(bst__need_dtype(f->name, a->name, v, bst__output_type(f, place, views, attributes), a->why));
    /* An output in an input's place lies as that one does. */
    bool contiguous = a->layout == BST_CONTIGUOUS && !takes_a_place(f, place, views);
    if (contiguous) BST_TRY(bst__need_contiguous(f->name, a->name, v));
    BST_TRY(read_rows(f, place, v));
    if (a->layout == BST_LAST && v->count && v->dims && v->size[v->dims - 1] > 1 && v->stride[v->dims - 1] != 1)
        return bst__error(BST_UNSUPPORTED, "%s: the last dimension of %s is not contiguous; make it so", f->name,
                          a->name);
    int other = a->like ? a->like - 1 : 0;
    if (place) BST_TRY(bst__need_device(f->name, a->name, v, &views[other], f->arguments[other].name));
    return a->check ? a->check(f->name, views) : BST_OK;
}

/* Whether an argument may be absent, or present, as it is; what is absent gets an empty view. */
static bst_status check_presence(const bst_function *f, int place, const DLTensor *tensor, bst_view *views) {
    const bst_argument *a = &f->arguments[place];
    if (!tensor) {
        bool wanted = a->with && bst__given(&views[a->with - 1]);
        views[place] = (bst_view){.dtype = views[0].dtype};
        if ((a->flags & BST_OPTIONAL) && !wanted) return BST_OK;
        return bst__error(BST_INVALID, "%s: %s is NULL; a tensor is needed%s%s", f->name, a->name,
                          wanted ? " with " : "", wanted ? f->arguments[a->with - 1].name : "");
    }
    int other = a->with ? a->with : a->like;
    if (!other || bst__given(&views[other - 1])) return BST_OK;
    return bst__error(BST_INVALID, "%s: %s is %s, but %s is NULL", f->name, a->name, a->with ? "given" : "wanted",
                      f->arguments[other - 1].name);
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

static bst_status check_attributes(const char *op, const bst_attribute_rule *rules, const bst_attribute *attributes) {
    for (int i = 0; rules && rules[i].name; i++) {
        const bst_attribute_rule *r = &rules[i];
        double value = r->type == 'd' ? attributes[i].d : (double)attributes[i].i;
        if (r->low < r->high && !(value >= r->low && value <= r->high))
            return bst__error(BST_INVALID, "%s: %s is %g; %s is needed", op, r->name, value, r->needed);
    }
    return BST_OK;
}

bst_status bst__check_inputs(const bst_function *f, const DLTensor *const *tensors, const bst_attribute *attributes,
                             bst_view *views, bst_symbols *s) {
    BST_TRY(check_attributes(f->name, f->attributes, attributes));
    s->bound = 0;
    s->leading_of = s->leading = 0;
    s->rows = 0;
    for (int i = 0; f->arguments[i].name; i++) {
        if (f->arguments[i].flags & BST_OUT) continue;
        BST_TRY(check_presence(f, i, tensors[i], views));
        if (tensors[i]) BST_TRY(check_one(f, i, tensors[i], attributes, views, s));
    }
    return f->check ? f->check(f->name, views, attributes) : BST_OK;
}

bst_status bst__check_output(const bst_function *f, int place, const DLTensor *tensor, bool fresh,
                             const bst_attribute *attributes, bst_view *views, bst_symbols *s) {
    const bst_argument *a = &f->arguments[place];
    bst_view *v = &views[place];
    BST_TRY(check_presence(f, place, tensor, views));
    if (!tensor) return BST_OK;
    if (fresh) { /* made by this table */
        BST_TRY(bst__view(f->name, a->name, a->types, tensor, v));
        return read_rows(f, place, v);
    }
    BST_TRY(check_one(f, place, tensor, attributes, views, s));
    if (!v->count) return BST_OK;
    if (!bst__is_contiguous(v)) BST_TRY(bst__need_distinct(f->name, a->name, v));
    for (int i = 0; a->may_be >> i; i++) /* first, for this says more than that they share memory */
        if ((a->may_be >> i & 1) && v->data != views[i].data && bst__overlap(v, &views[i]))
            return bst__error(BST_INVALID, "%s: %s and %s share memory, but do not begin together", f->name, a->name,
                              f->arguments[i].name);
    for (int i = 0; f->arguments[i].name; i++) {
        bool output = f->arguments[i].flags & BST_OUT;
        if ((output && i >= place) || !views[i].count) continue;
        if ((a->may_be & 1u << i) && bst__same_memory(v, &views[i])) continue;
        if (output)
            BST_TRY(bst__need_apart(f->name, f->arguments[i].name, &views[i], a->name, v));
        else
            BST_TRY(bst__need_apart(f->name, a->name, v, f->arguments[i].name, &views[i]));
    }
    return BST_OK;
}

bst_status bst__run(const bst_function *f, const bst_exec *exec, const DLTensor *const *tensors,
                    const bst_attribute *attributes) {
    bst_exec own;
    bst_view views[BST_MOST_ARGUMENTS];
    bst_symbols symbols;
    BST_TRY(bst__options(f->name, "exec", exec, &own, sizeof own));
    BST_TRY(bst__check_inputs(f, tensors, attributes, views, &symbols));
    for (int i = 0; f->arguments[i].name; i++)
        if (f->arguments[i].flags & BST_OUT)
            BST_TRY(bst__check_output(f, i, tensors[i], false, attributes, views, &symbols));
    return f->run(&own, f->name, views, attributes);
}

/* ---- structs that callers fill ----------------------------------------------------------------------------------- */

static void read_option(const bst_attribute_rule *r, const void *at, bst_attribute *out) {
    int32_t narrow;
    const int64_t *pointer;
    memcpy(r->bytes == sizeof narrow ? (void *)&narrow : out, at, r->bytes);
    if (r->bytes == sizeof narrow) out->i = narrow;
    if (r->type == 'b') out->i = out->i != 0;
    if (r->type == 'd' && out->d == 0) out->d = r->usual;
    if (!r->pointed) return;
    memcpy(&pointer, at, sizeof pointer);
    out->i = pointer ? *pointer : (int64_t)r->usual;
}

bst_status bst__call(const bst_function *f, const bst_exec *exec, const DLTensor *const *places, const void *options,
                     bst_attribute *attributes) {
    unsigned char given[BST_MOST_GIVEN];
    bst_attribute own[BST_MOST_ATTRIBUTES] = {{0}};
    if (!attributes) attributes = own;
    BST_TRY(bst__options(f->name, "options", options, given, f->options));
    for (const bst_attribute_rule *r = f->attributes; r && r->name; r++)
        if (r->at) read_option(r, given + r->at, &attributes[r - f->attributes]);
    return bst__run(f, exec, places, attributes);
}

bst_status bst__call_struct(const bst_function *f, const bst_exec *exec, const void *tensors, const void *options,
                            bst_attribute *attributes) {
    unsigned char given[BST_MOST_GIVEN];
    const DLTensor *places[BST_MOST_ARGUMENTS] = {NULL};
    BST_TRY(bst__options(f->name, "tensors", tensors, given, f->tensors));
    for (int i = 0; f->arguments[i].name; i++)
        if (f->arguments[i].at) memcpy(&places[i], given + f->arguments[i].at, sizeof *places);
    return bst__call(f, exec, places, options, attributes);
}
