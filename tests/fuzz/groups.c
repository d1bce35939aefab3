/* groups.c - random calls of the functions that take several calls of another one at once, each of which a description
 * draws: weights of 4 bits. What is asked: the bits of each call by itself, nothing else written, and a sentence where
 * one of them has a rule broken. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { MOST = 6 };
static const char op[] = "dequantize_4bit_group";

typedef struct group {
    int64_t count;
    fuzz_call call[MOST];
    fuzz_raw raw[MOST];
    bst_4bit_weight parts[MOST];
    const bst_4bit_weight *quantised[MOST];
    DLTensor *weights[MOST];
} group;

static const bst_function *the_one(void) {
    for (const bst_function *const *const *room = fuzz_rooms; *room; room++)
        for (const bst_function *const *f = *room; *f; f++)
            if (!strcmp((*f)->name, "dequantize_4bit")) return *f;
    return NULL;
}

static const DLTensor *given(const group *g, int64_t i, const char *name, unsigned direction) {
    return g->raw[i].given[fuzz_place(g->call[i].function, name, direction)];
}

static void write(group *g, int64_t i) {
    const bst_attribute *a = g->raw[i].attributes;
    const bst_function *f = g->call[i].function;
    g->parts[i] = (bst_4bit_weight){.size = sizeof *g->parts,
                                    .packed = given(g, i, "packed", BST_IN),
                                    .absmax = given(g, i, "absmax", BST_IN),
                                    .code = given(g, i, "code", BST_IN),
                                    .nested_code = given(g, i, "nested_code", BST_IN),
                                    .nested_absmax = given(g, i, "nested_absmax", BST_IN),
                                    .offset = given(g, i, "offset", BST_IN),
                                    .blocksize = a[fuzz_attribute(f, "blocksize")].i,
                                    .nested_blocksize = a[fuzz_attribute(f, "nested_blocksize")].i};
    g->quantised[i] = &g->parts[i];
    g->weights[i] = (DLTensor *)(uintptr_t)given(g, i, "weight", BST_OUT);
}

/* A call that the one-weight function takes; its results are kept. */
static void draw_one(group *g, int64_t i, const bst_exec *exec) {
    for (;;) {
        fuzz_call *c = &g->call[i];
        fuzz_draw(c, the_one());
        fuzz_place_in_memory(c);
        fuzz_fill(c);
        fuzz_write_raw(c, &g->raw[i]);
        write(g, i);
        if (bst_dequantize_4bit(exec, g->quantised[i], g->weights[i]) == BST_OK) break;
        fuzz_free(c);
    }
    fuzz_read(&g->call[i]);
}

/* Whether its weight has other numbers than `first`. */
static bool differs(fuzz_tensor *t, fuzz_call *c) {
    double *first = t->results;
    t->results = malloc((size_t)(t->count + 1) * sizeof *first);
    if (!t->results) abort();
    fuzz_read(c);
    bool same = !memcmp(first, t->results, (size_t)t->count * sizeof *first);
    free(first);
    return !same;
}

static int judge(group *g, const bst_exec *exec) {
    for (int64_t i = 0; i < g->count; i++) fuzz_restore(&g->call[i], 0x5a);
    if (bst_dequantize_4bit_group(exec, g->count, g->quantised, g->weights) != BST_OK)
        return printf("fuzz: %s: a legal call was refused: %s\n", op, bst_last_error()), 1;
    for (int64_t i = 0; i < g->count; i++) {
        fuzz_call *c = &g->call[i];
        const char *changed = fuzz_changed(c, true);
        if (changed) return printf("fuzz: %s: wrote beside weights[%lld], at %s\n", op, (long long)i, changed), 1;
        if (differs(&c->of[fuzz_place(c->function, "weight", BST_OUT)], c))
            return printf("fuzz: %s: weights[%lld] has other bits than alone\n", op, (long long)i), 1;
    }
    return 0;
}

static int judge_illegal(group *g, const bst_exec *exec) {
    char what[128], place[32];
    const char *name, *text;
    int64_t i = fuzz_below(g->count);
    if (!fuzz_spoil(&g->call[i], &g->raw[i], what, &name)) return 0;
    /* Of what the C function is not given there is nothing to break, and its weight says how large it is. */
    if (!strcmp(name, "weight") || memcmp(g->raw[i].attributes, g->call[i].attributes, sizeof g->raw[i].attributes))
        return 0;
    write(g, i);
    for (int64_t k = 0; k < g->count; k++) fuzz_restore(&g->call[k], 0x5a);
    if (bst_dequantize_4bit_group(exec, g->count, g->quantised, g->weights) == BST_OK)
        return printf("fuzz: %s: in quantised[%lld] %s, and it was accepted\n", op, (long long)i, what), 1;
    text = bst_last_error();
    snprintf(place, sizeof place, "quantised[%lld]: ", (long long)i);
    if (strncmp(text, op, sizeof op - 1) || !strstr(text, place) || !strstr(text, name))
        return printf("fuzz: %s: in quantised[%lld] %s, and the message is '%s'\n", op, (long long)i, what, text), 1;
    for (int64_t k = 0; k < g->count; k++)
        if (fuzz_changed(&g->call[k], false))
            return printf("fuzz: %s: was refused, and weights[%lld] has changed\n", op, (long long)k), 1;
    return 0;
}

int fuzz_groups(const bst_exec *exec, void (*cut)(uint64_t)) {
    group *g = calloc(1, sizeof *g);
    if (!g) abort();
    g->count = 1 + fuzz_below(MOST);
    cut(1);
    for (int64_t i = 0; i < g->count; i++) draw_one(g, i, exec);
    cut(fuzz_bits());
    int failures = judge(g, exec);
    if (!failures && fuzz_chance(2)) failures = judge_illegal(g, exec);
    for (int64_t i = 0; i < g->count; i++) fuzz_free(&g->call[i]);
    free(g);
    return failures;
}
