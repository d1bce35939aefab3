/* reference.h - what the references read of a call and write of its outputs. */
#ifndef BST_FUZZ_REFERENCE_H
#define BST_FUZZ_REFERENCE_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

static inline const fuzz_tensor *input(const fuzz_call *c, const char *name) {
    int place = fuzz_place(c->function, name, BST_IN);
    return place < 0 || !c->of[place].given ? NULL : &c->of[place];
}

static inline const double *numbers(const fuzz_call *c, const char *name) {
    const fuzz_tensor *t = input(c, name);
    return t ? t->numbers : NULL;
}

/* An output with room for what it should be; NULL where it is not wanted. */
static inline fuzz_tensor *output(fuzz_call *c, const char *name) {
    int place = fuzz_place(c->function, name, BST_OUT);
    /* Of two of one name the last is the one that the formulas tell of. */
    for (int i = place + 1; place >= 0 && i < c->count; i++)
        if ((c->function->arguments[i].flags & BST_OUT) && !strcmp(c->function->arguments[i].name, name)) place = i;
    if (place < 0 || !c->of[place].given) return NULL;
    fuzz_tensor *t = &c->of[place];
    size_t count = (size_t)(t->count ? t->count : 1);
    t->numbers = calloc(count, sizeof *t->numbers);
    t->size = calloc(count, sizeof *t->size);
    if (!t->numbers || !t->size) abort();
    return t;
}

static inline void want(fuzz_tensor *t, int64_t at, double value, double size) {
    if (!t) return;
    t->numbers[at] = value;
    t->size[at] = size;
}

static inline double real(const fuzz_call *c, const char *name) {
    int at = fuzz_attribute(c->function, name);
    return at < 0 ? 0 : (double)(float)c->attributes[at].d;
}

static inline int64_t whole(const fuzz_call *c, const char *name) {
    int at = fuzz_attribute(c->function, name);
    return at < 0 ? 0 : c->attributes[at].i;
}

static inline int64_t last(const fuzz_tensor *t) { return t->shape[t->dims - 1]; }

/* The logits of a head, to be freed; *most: the size that their errors are relative to. */
double *fuzz_logits_of(const fuzz_call *c, const char *of_hidden, const char *of_weight, const char *of_bias,
                       double *most);
void fuzz_causal_conv1d_forward(fuzz_call *c);
void fuzz_causal_conv1d_backward(fuzz_call *c);
void fuzz_gated_rms_norm_forward(fuzz_call *c);
void fuzz_gated_rms_norm_backward(fuzz_call *c);
void fuzz_linear_divergence_forward(fuzz_call *c);
void fuzz_low_rank_add(fuzz_call *c);
void fuzz_low_rank_backward(fuzz_call *c);
void fuzz_low_rank_dx(fuzz_call *c);
void fuzz_low_rank_layers(fuzz_call *c);
void fuzz_low_rank_linear(fuzz_call *c);
void fuzz_low_rank_split(fuzz_call *c);
void fuzz_moe_linear(fuzz_call *c);
void fuzz_token_attention(fuzz_call *c);
void fuzz_segment_attention_forward(fuzz_call *c);
void fuzz_segment_attention_backward(fuzz_call *c);

#endif
