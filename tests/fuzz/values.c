/* values.c - the elements: numbers that say something, and integers as the functions need them, which no table says. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

/* ---- types ------------------------------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(mantissa, -24)
                                   : ldexp(1024 + mantissa, exponent - 25);
    return bits >> 15 ? -value : value;
}

/* The numbers are drawn, so that rounding down serves as well as any other. */
static uint16_t to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    int exponent;
    if (isnan(value)) return 0x7e00;
    if (size >= 65536) return sign | (isinf(value) ? 0x7c00 : 0x7bff);
    frexp(size, &exponent);
    if (exponent < -13) return sign | (uint16_t)ldexp(size, 24);
    return (uint16_t)(sign | (exponent + 14) << 10 | ((int)ldexp(size, 11 - exponent) & 1023));
}

double fuzz_roundoff(bst_dtype type) { return type == BST_F32 ? 0x1p-24 : type == BST_F16 ? 0x1p-11 : 0x1p-8; }

double fuzz_load(const char *data, bst_dtype type) {
    uint16_t half;
    int32_t narrow;
    int64_t wide;
    float single;
    switch (type) {
        case BST_F32:
            memcpy(&single, data, sizeof single);
            return (double)single;
        case BST_BF16:
            memcpy(&half, data, sizeof half);
            return (double)from_bits((uint32_t)half << 16);
        case BST_F16:
            memcpy(&half, data, sizeof half);
            return from_half(half);
        case BST_U8:
            return (double)(uint8_t)*data;
        case BST_I32:
            memcpy(&narrow, data, sizeof narrow);
            return narrow;
        default:
            memcpy(&wide, data, sizeof wide);
            return (double)wide;
    }
}

void fuzz_store(char *data, bst_dtype type, double value) {
    float single = (float)value;
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &single, sizeof bits);
    if (type == BST_F32) memcpy(data, &single, sizeof single);
    if (type == BST_BF16) half = (uint16_t)(isnan(value) ? 0x7fc0 : bits >> 16), memcpy(data, &half, sizeof half);
    if (type == BST_F16) half = to_half(value), memcpy(data, &half, sizeof half);
    if (type == BST_I32) memcpy(data, &(int32_t){(int32_t)value}, sizeof(int32_t));
    if (type == BST_U8) *data = (char)(uint8_t)value;
    if (type == BST_I64) memcpy(data, &(int64_t){(int64_t)value}, sizeof(int64_t));
}

/* ---- floats ------------------------------------------------------------------------------------------------------ */

static double draw_extreme(bst_dtype type) {
    double largest = type == BST_F16 ? 65504 : type == BST_BF16 ? 0x1.fep127 : 0x1.fffffep127;
    double least = type == BST_F16 ? 0x1p-24 : type == BST_BF16 ? 0x1p-133 : 0x1p-149;
    const double numbers[] = {INFINITY, -INFINITY, NAN, largest, -largest, least, -least, 0.0, -0.0, largest / 4};
    return numbers[fuzz_below(sizeof numbers / sizeof *numbers)];
}

static double draw_number(double scale) { return scale * ((double)(fuzz_bits() >> 11) * 0x1p-52 - 1.0); }

/* ---- integers ---------------------------------------------------------------------------------------------------- */

static void permute(double *numbers, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int64_t with = fuzz_below(i + 1);
        numbers[i] = numbers[with];
        numbers[with] = (double)i;
    }
}

/* Numbers that do not fall; the last is the number of rows. */
static void draw_ends(double *numbers, int64_t count, int64_t rows) {
    for (int64_t i = 0; i < count; i++) {
        int64_t least = i ? (int64_t)numbers[i - 1] : 0;
        numbers[i] = (double)(i == count - 1 ? rows : least + (fuzz_chance(3) ? 0 : fuzz_below(rows - least + 1)));
    }
}

static int64_t last_dimension(const fuzz_call *c, const char *name) {
    int place = fuzz_place(c->function, name, BST_IN);
    const fuzz_tensor *t = place < 0 ? NULL : &c->of[place];
    return t && t->dims ? t->shape[t->dims - 1] : 0;
}

static int64_t first_dimension(const fuzz_call *c, const char *name) {
    int place = fuzz_place(c->function, name, BST_IN);
    return place < 0 || !c->of[place].dims ? 0 : c->of[place].shape[0];
}

/* Classes, of which some are ignored. */
static void draw_targets(const fuzz_call *c, const fuzz_tensor *t) {
    int64_t classes = last_dimension(c, "logits");
    if (fuzz_place(c->function, "logits", BST_IN) < 0) classes = first_dimension(c, "weight");
    int ignore = fuzz_attribute(c->function, "ignore_index");
    int64_t ignored = ignore < 0 ? -100 : c->attributes[ignore].i;
    for (int64_t i = 0; i < t->count; i++)
        t->numbers[i] = (double)(!classes || fuzz_chance(6) ? ignored : fuzz_below(classes));
}

static void draw_integers(const fuzz_call *c, int place) {
    const fuzz_tensor *t = &c->of[place];
    const char *name = c->function->arguments[place].name;
    if (strcmp(name, "target") == 0) {
        draw_targets(c, t);
    } else if (strcmp(name, "teacher_indices") == 0) { /* none twice in a row */
        int64_t classes = first_dimension(c, "weight"), first = fuzz_below(classes ? classes : 1);
        for (int64_t i = 0; i < t->count; i++) t->numbers[i] = (double)((first + i % t->shape[1]) % classes);
    } else if (t->type == BST_U8) {
        for (int64_t i = 0; i < t->count; i++) t->numbers[i] = (double)fuzz_below(256);
    } else if (strcmp(name, "order") == 0 || strcmp(name, "position") == 0) {
        permute(t->numbers, t->count);
    } else if (strcmp(name, "seed") == 0) { /* as many bits as a double has */
        for (int64_t i = 0; i < t->count; i++) t->numbers[i] = (double)(fuzz_bits() >> 11) - 0x1p52;
    } else if (strcmp(name, "seq_idx") == 0) { /* of sequences side by side, any number for each, some of one token */
        for (int64_t i = 0; i < t->count; i++)
            t->numbers[i] = i && !fuzz_chance(4) ? t->numbers[i - 1] : (double)fuzz_below(5) - 2;
    } else if (strcmp(name, "ends") == 0) {
        int order = fuzz_place(c->function, "order", BST_IN);
        const char *rows = fuzz_place(c->function, "h", BST_IN) < 0 ? "x" : "h";
        draw_ends(t->numbers, t->count, order < 0 ? first_dimension(c, rows) : c->of[order].count);
    } else if (strcmp(name, "cu_seqlens") == 0) {
        int q = fuzz_place(c->function, "q", BST_IN);
        draw_ends(t->numbers, t->count, c->of[q].shape[1]);
        t->numbers[0] = 0;
    } else if (strcmp(name, "cuts") == 0) { /* of queries, and of keys */
        int64_t count = t->shape[1];
        draw_ends(t->numbers, count, first_dimension(c, "q"));
        draw_ends(t->numbers + count, count, first_dimension(c, "k"));
        t->numbers[0] = t->numbers[count] = 0;
    } else {
        int bias = fuzz_place(c->function, "bias", BST_IN);
        int64_t most = bias >= 0 && c->of[bias].given ? c->of[bias].shape[0] : c->experts;
        for (int64_t i = 0; i < t->count; i++) t->numbers[i] = (double)(most ? fuzz_below(most) : 0);
    }
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

static double *doubles(int64_t count) {
    double *numbers = malloc((size_t)(count ? count : 1) * sizeof *numbers);
    if (!numbers) abort();
    return numbers;
}

void fuzz_fill(fuzz_call *c) {
    static const double scales[] = {2, 2, 2, 1e-3, 100};
    for (int i = 0; i < c->count; i++) {
        fuzz_tensor *t = &c->of[i];
        if (!t->given) continue;
        if (c->function->arguments[i].flags & BST_OUT) {
            t->results = doubles(t->count);
            continue;
        }
        t->numbers = doubles(t->count);
        double scale = scales[fuzz_below(sizeof scales / sizeof *scales)];
        bool whole = t->type >= BST_I64;
        if (whole) draw_integers(c, i);
        int64_t bytes = bst__dtype_size(t->type);
        for (int64_t e = 0; e < t->count; e++) {
            if (!whole) t->numbers[e] = c->extreme && fuzz_chance(40) ? draw_extreme(t->type) : draw_number(scale);
            fuzz_store(t->data + fuzz_offset(t, e) * bytes, t->type, t->numbers[e]);
        }
        /* As stored: rounded, and one where elements lie over each other. */
        for (int64_t e = 0; e < t->count; e++) t->numbers[e] = fuzz_load(t->data + fuzz_offset(t, e) * bytes, t->type);
    }
    for (int i = 0; i < c->count; i++)
        if (c->of[i].block) memcpy(c->of[i].before, c->of[i].block, c->of[i].bytes);
}

void fuzz_read(fuzz_call *c) {
    for (int i = 0; i < c->count; i++) {
        fuzz_tensor *t = &c->of[i];
        if (!t->results) continue;
        int64_t bytes = bst__dtype_size(t->type);
        for (int64_t e = 0; e < t->count; e++) t->results[e] = fuzz_load(t->data + fuzz_offset(t, e) * bytes, t->type);
    }
}
