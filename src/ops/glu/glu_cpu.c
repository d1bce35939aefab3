/* glu_cpu.c - gated units on CPU, in float32: for gate and up apart one loop for each activation and element type, from
 * memory to memory; all others, and activations alone, by the tiles that the experts have too. */
#include "ops/glu/glu_cpu.h"

#include "core/gated_unit.h"

/* The elements of y from e on that lie in one row. */
static int64_t run_length(const glu_cpu *a, int64_t e, int64_t end) {
    int64_t left = a->columns - e % a->columns;
    return left < end - e ? left : end - e;
}

/* Where a tensor has element e of y, or the pair that it is made of. */
static void *element(const glu_cpu *a, int tensor, int64_t e) {
    const glu_matrix *m = &a->of[tensor];
    if (!m->data) return NULL;
    int64_t column = e % a->columns;
    if (a->unit.interleaved && (tensor == GLU_GATE || tensor == GLU_DGATE)) column *= 2;
    return bst_at(m->data, bst__row_start(&m->rows, e / a->columns) + column, a->dtype);
}

/* `dtype` and `activation` are constants in what follows: each branch folds away. Types of 16 bits travel two to a
 * word, so that all vectors in a loop have as many lanes: the compiler then needs no shuffles. */
static inline float low_half(uint32_t word, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_from_bits(word << 16) : bst_from_f16((uint16_t)word);
}

static inline float high_half(uint32_t word, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_from_bits(word & 0xffff0000u) : bst_from_f16((uint16_t)(word >> 16));
}

static inline uint32_t half_of(float value, bst_dtype dtype) {
    return dtype == BST_BF16 ? bst_to_bf16(value) : bst_to_f16(value);
}

static inline uint32_t word_at(const void *from, int64_t i) {
    uint32_t word;
    memcpy(&word, (const char *)from + 4 * i, sizeof word);
    return word;
}

static inline void put_word(void *to, int64_t i, uint32_t word) { memcpy((char *)to + 4 * i, &word, sizeof word); }

static inline void put_float(void *to, int64_t i, float value) { put_word(to, i, bst_bits(value)); }

/* A part of one row. */
typedef struct glu_part {
    const void *dy, *gate, *up;
    void *dgate, *dup, *y;
    int64_t n;
} glu_part;

static glu_part part_at(const glu_cpu *a, int64_t e, int64_t n) {
    return (glu_part){.gate = element(a, GLU_GATE, e),
                      .up = element(a, GLU_UP, e),
                      .y = element(a, GLU_Y, e),
                      .dy = element(a, GLU_DY, e),
                      .dgate = element(a, GLU_DGATE, e),
                      .dup = element(a, GLU_DUP, e),
                      .n = n};
}

/* ---- tiles: units of any layout, with limits, without up --------------------------------------------------------- */

static bool in_tiles(const glu_cpu *a) {
    return a->unit.interleaved || a->unit.limited || a->unit.activation == BST_SWIGLU_OAI_CODE || !a->of[GLU_UP].data;
}

static void load_tile(const glu_cpu *a, const glu_part *part, float pairs[2][BST_PAIRS]) {
    if (part->up || a->unit.interleaved) {
        bst_load_pairs(pairs, part->gate, part->up, a->unit.interleaved, a->dtype, part->n);
        return;
    }
    bst_load(pairs[0], part->gate, a->dtype, part->n);
    for (int64_t i = 0; i < part->n; i++) pairs[1][i] = bst_no_up(a->unit.activation);
}

static void forward_tile(const glu_cpu *a, const glu_part *part) {
    float pairs[2][BST_PAIRS], y[BST_PAIRS];
    load_tile(a, part, pairs);
    bst_unit_tile(&a->unit, pairs, y, part->n);
    bst_store(part->y, y, a->dtype, part->n);
}

static void backward_tile(const glu_cpu *a, const glu_part *part) {
    float pairs[2][BST_PAIRS], dy[BST_PAIRS], y[BST_PAIRS];
    load_tile(a, part, pairs);
    bst_load(dy, part->dy, a->dtype, part->n);
    bst_unit_backward_tile(&a->unit, pairs, dy, y, 1.0f, part->n);
    if (part->dgate || part->dup)
        bst_store_pairs(pairs, part->dgate, part->dup, a->unit.interleaved, a->dtype, part->n);
    if (part->y) bst_store(part->y, y, a->dtype, part->n);
}

/* ---- from memory to memory: gate and up apart, no limits --------------------------------------------------------- */

/* All loops are compiled from these two, so they must be inlined whatever the compiler thinks of their number. */
#define LOOP BST_LOOP void

/* In these loops an output may be an input: each iteration reads its elements before it writes there. */
LOOP forward_run(const glu_part *part, bst_dtype dtype, int activation) {
    const void *gate = part->gate, *up = part->up;
    void *y = part->y;
    const int64_t n = part->n;
    if (dtype == BST_F32) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            put_float(y, i,
                      bst_gated(bst_from_bits(word_at(gate, i)), bst_from_bits(word_at(up, i)), activation, dtype));
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t g = word_at(gate, i), u = word_at(up, i);
        float low = bst_gated(low_half(g, dtype), low_half(u, dtype), activation, dtype);
        float high = bst_gated(high_half(g, dtype), high_half(u, dtype), activation, dtype);
        put_word(y, i, half_of(low, dtype) | half_of(high, dtype) << 16);
    }
    if (n % 2) {
        float g, u, last;
        bst_load(&g, bst_at(gate, n - 1, dtype), dtype, 1);
        bst_load(&u, bst_at(up, n - 1, dtype), dtype, 1);
        last = bst_gated(g, u, activation, dtype);
        bst_store(bst_at(y, n - 1, dtype), &last, dtype, 1);
    }
}

/* want_y: a constant too. */
LOOP backward_run(const glu_part *part, bst_dtype dtype, int activation, bool want_y) {
    const void *dy = part->dy, *gate = part->gate, *up = part->up;
    void *dgate = part->dgate, *dup = part->dup, *y = part->y;
    const int64_t n = part->n;
    if (dtype == BST_F32) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float g = bst_from_bits(word_at(gate, i)), u = bst_from_bits(word_at(up, i));
            bst_gated_gradients d = bst_gated_backward(bst_from_bits(word_at(dy, i)), g, u, activation, dtype);
            put_float(dgate, i, d.dgate);
            put_float(dup, i, d.dup);
            if (want_y) put_float(y, i, d.y);
        }
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) {
        uint32_t d = word_at(dy, i), g = word_at(gate, i), u = word_at(up, i);
        bst_gated_gradients low =
            bst_gated_backward(low_half(d, dtype), low_half(g, dtype), low_half(u, dtype), activation, dtype);
        bst_gated_gradients high =
            bst_gated_backward(high_half(d, dtype), high_half(g, dtype), high_half(u, dtype), activation, dtype);
        put_word(dgate, i, half_of(low.dgate, dtype) | half_of(high.dgate, dtype) << 16);
        put_word(dup, i, half_of(low.dup, dtype) | half_of(high.dup, dtype) << 16);
        if (want_y) put_word(y, i, half_of(low.y, dtype) | half_of(high.y, dtype) << 16);
    }
    if (n % 2) {
        float d, g, u;
        bst_load(&d, bst_at(dy, n - 1, dtype), dtype, 1);
        bst_load(&g, bst_at(gate, n - 1, dtype), dtype, 1);
        bst_load(&u, bst_at(up, n - 1, dtype), dtype, 1);
        bst_gated_gradients last = bst_gated_backward(d, g, u, activation, dtype);
        bst_store(bst_at(dgate, n - 1, dtype), &last.dgate, dtype, 1);
        bst_store(bst_at(dup, n - 1, dtype), &last.dup, dtype, 1);
        if (want_y) bst_store(bst_at(y, n - 1, dtype), &last.y, dtype, 1);
    }
}

LOOP backward_wanted(const glu_part *part, bst_dtype dtype, int activation) {
    if (part->y)
        backward_run(part, dtype, activation, true);
    else
        backward_run(part, dtype, activation, false);
}

/* A loop for each type of each activation. */
#define EACH_TYPE(run, activation)                              \
    if (a->dtype == BST_F32) run(&part, BST_F32, activation);   \
    if (a->dtype == BST_BF16) run(&part, BST_BF16, activation); \
    if (a->dtype == BST_F16) run(&part, BST_F16, activation);
#define FORWARD(name, code)          \
    case code:                       \
        EACH_TYPE(forward_run, code) \
        break;
#define BACKWARD(name, code)             \
    case code:                           \
        EACH_TYPE(backward_wanted, code) \
        break;

void BST_CPU(bst__glu_forward_cpu)(void *context, int64_t begin, int64_t end) {
    const glu_cpu *a = context;
    const bool tiles = in_tiles(a);
    for (int64_t e = begin, n; e < end; e += n) {
        n = run_length(a, e, end);
        if (tiles && n > BST_PAIRS) n = BST_PAIRS;
        const glu_part part = part_at(a, e, n);
        if (tiles)
            forward_tile(a, &part);
        else
            switch (a->unit.activation) { BST_GATE_ACTIVATIONS(FORWARD) }
    }
}

/* From memory to memory a gradient that is not wanted goes into `scratch`: two loops, with y and without, serve all
 * that may be wanted. */
void BST_CPU(bst__glu_backward_cpu)(void *context, int64_t begin, int64_t end) {
    const glu_cpu *a = context;
    float scratch[BST_TILE];
    const bool tiles = in_tiles(a), some_unwanted = !a->of[GLU_DGATE].data || !a->of[GLU_DUP].data;
    const int64_t most = tiles ? BST_PAIRS : some_unwanted ? BST_TILE : INT64_MAX;
    for (int64_t e = begin, n; e < end; e += n) {
        n = run_length(a, e, end);
        if (n > most) n = most;
        glu_part part = part_at(a, e, n);
        if (tiles) {
            backward_tile(a, &part);
            continue;
        }
        if (!part.dgate) part.dgate = scratch;
        if (!part.dup) part.dup = scratch;
        switch (a->unit.activation) { BST_GATE_ACTIVATIONS(BACKWARD) }
    }
}
