/* reference_low_rank.c - what layers with adapters must be, in float64. */
#include "reference.h"

/* What an adapter adds to a number of a row of x and a column of b, whose size is added to `size`; infinite where
 * float32 does not hold what is summed up on the way. */
static double added(const fuzz_tensor *x, const fuzz_tensor *a, const double *b, double scale, int64_t row,
                    int64_t column, double *size) {
    const int64_t width = last(x), ranks = a->shape[0];
    double sum = 0, sizes = 0, most = 0; /* the scale comes after the sum */
    for (int64_t r = 0; r < ranks; r++) {
        double thin = 0, of_thin = 0, factor = b[column * ranks + r];
        for (int64_t k = 0; k < width; k++) {
            double product = x->numbers[row * width + k] * a->numbers[r * width + k];
            thin += product, of_thin += fabs(product);
        }
        /* A number below float32's least normal one is off by a part of that. */
        sum += thin * factor, sizes += (of_thin + 0x1p-126) * fabs(factor);
        most = fmax(most, of_thin);
    }
    *size += most < 0x1p127 && sizes < 0x1p127 ? fabs(scale) * sizes : INFINITY; /* NaN is neither */
    return scale * sum;
}

/* One layer of low_rank_add. */
static void add_to_result(fuzz_call *c, const char *const names[4]) {
    const fuzz_tensor *x = input(c, "x"), *before = input(c, names[0]), *a = input(c, names[1]);
    fuzz_tensor *y = output(c, names[0]);
    if (!y) return;
    for (int64_t e = 0; e < y->count; e++) {
        double size = fabs(before->numbers[e]);
        double sum = added(x, a, numbers(c, names[2]), real(c, names[3]), e / last(y), e % last(y), &size);
        want(y, e, before->numbers[e] + sum, size);
    }
}

void fuzz_low_rank_add(fuzz_call *c) {
    static const char *const layers[][4] = {
        {"y_0", "a_0", "b_0", "scale_0"}, {"y_1", "a_1", "b_1", "scale_1"}, {"y_2", "a_2", "b_2", "scale_2"}};
    for (int i = 0; i < 3; i++) add_to_result(c, layers[i]);
}

void fuzz_low_rank_backward(fuzz_call *c) {
    const fuzz_tensor *dy = input(c, "dy"), *thin = input(c, "thin");
    const double *b = numbers(c, "b");
    double scale = c->attributes[fuzz_attribute(c->function, "scale")].d;
    fuzz_tensor *g = output(c, "g"), *db = output(c, "db");
    int64_t columns = last(dy), rank = last(thin);
    for (int64_t t = 0; t < dy->shape[0]; t++)
        for (int64_t n = 0; n < columns; n++)
            for (int64_t r = 0; r < rank; r++) {
                double x = dy->numbers[t * columns + n];
                double of_g = x * b[n * rank + r], of_db = x * thin->numbers[t * rank + r];
                g->numbers[t * rank + r] += of_g, g->size[t * rank + r] += fabs(of_g);
                db->numbers[n * rank + r] += of_db, db->size[n * rank + r] += fabs(of_db);
            }
    fuzz_tensor *results[] = {g, db};
    for (int i = 0; i < 2; i++)
        for (int64_t e = 0; e < results[i]->count; e++) {
            double size = results[i]->size[e]; /* the scale comes after the sum, which float32 may not hold */
            want(results[i], e, scale * results[i]->numbers[e], size > 0x1p127 ? INFINITY : fabs(scale) * size);
        }
}

void fuzz_low_rank_linear(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x"), *thin = input(c, "thin");
    const double *weight = numbers(c, "weight"), *b = numbers(c, "b"), *bias = numbers(c, "bias");
    double scale = c->attributes[fuzz_attribute(c->function, "scale")].d;
    fuzz_tensor *y = output(c, "y");
    int64_t width = last(x), rank = last(thin), columns = last(y);
    for (int64_t e = 0; e < y->count; e++) {
        int64_t row = e / columns, column = e % columns;
        double small = 0, large = 0, size = 0, before = 0; /* the scale comes after the sum */
        for (int64_t r = 0; r < rank; r++) {
            double product = thin->numbers[row * rank + r] * b[column * rank + r];
            small += scale * product, size += fabs(scale * product), before += fabs(product);
        }
        if (bias) small += bias[column], size += fabs(bias[column]);
        for (int64_t k = 0; k < width; k++) {
            double product = x->numbers[row * width + k] * weight[column * width + k];
            large += product, size += fabs(product);
        }
        /* The first product may be rounded before the second is added to it. */
        double rounded = size + fabs(small) * fuzz_roundoff(y->type) / fuzz_roundoff(BST_F32);
        bool fits = before < 0x1p127 && fabs(small) < (y->type == BST_F16 ? 65504 : 0x1p127);
        want(y, e, small + large, fits ? rounded : INFINITY);
    }
}

/* Adds row `row` of x times the columns of weight to sums, and the terms' sizes to sizes. */
static void add_product(const fuzz_tensor *x, const fuzz_tensor *weight, int64_t row, double *sums, double *sizes) {
    int64_t depth = last(x), columns = last(weight);
    for (int64_t k = 0; k < depth; k++)
        for (int64_t n = 0; n < columns; n++) {
            double product = x->numbers[row * depth + k] * weight->numbers[k * columns + n];
            sums[n] += product, sizes[n] += fabs(product);
        }
}

void fuzz_low_rank_dx(fuzz_call *c) {
    static const char *const pairs[][2] = {
        {"g", "a"}, {"dy_0", "weight_0"}, {"dy_1", "weight_1"}, {"dy_2", "weight_2"}, {"dy_3", "weight_3"}};
    fuzz_tensor *dx = output(c, "dx");
    int64_t columns = last(dx);
    double ratio = fuzz_roundoff(dx->type) / fuzz_roundoff(BST_F32), most = dx->type == BST_F16 ? 65504 : 0x1p127;
    for (int64_t row = 0; row < dx->shape[0]; row++) {
        double *sums = dx->numbers + row * columns, *sizes = dx->size + row * columns;
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
            const fuzz_tensor *x = input(c, pairs[i][0]);
            if (!x) continue;
            /* The sum so far may be rounded before the next product is added to it. */
            for (int64_t n = 0; n < columns; n++) sizes[n] += fabs(sums[n]) * ratio;
            add_product(x, input(c, pairs[i][1]), row, sums, sizes);
            for (int64_t n = 0; n < columns; n++)
                if (!(fabs(sums[n]) < most && sizes[n] < 0x1p127)) sizes[n] = INFINITY;
        }
    }
}

void fuzz_moe_linear(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x"), *matrices = input(c, "matrices"), *thin = input(c, "thin"),
                      *ends = input(c, "ends");
    const double *b = numbers(c, "b");
    double scale = real(c, "scale");
    fuzz_tensor *y = output(c, "y");
    int64_t width = last(x), rank = thin ? last(thin) : 0, columns = last(y), expert = 0;
    double ratio = fuzz_roundoff(y->type) / fuzz_roundoff(BST_F32), most = y->type == BST_F16 ? 65504 : 0x1p127;
    for (int64_t e = 0; e < y->count; e++) {
        int64_t row = e / columns, column = e % columns;
        double small = 0, large = 0, size = 0, before = 0; /* the scale comes after the sum */
        while (expert < ends->count && row >= (int64_t)ends->numbers[expert]) expert++;
        for (int64_t r = 0; r < rank; r++) {
            double product = thin->numbers[row * rank + r] * b[(expert * rank + r) * columns + column];
            small += scale * product, size += fabs(scale * product), before += fabs(product);
        }
        for (int64_t k = 0; k < width; k++) {
            double product = x->numbers[row * width + k] * matrices->numbers[(expert * width + k) * columns + column];
            large += product, size += fabs(product);
        }
        /* The first product may be rounded before the second is added to it. */
        bool fits = before < 0x1p127 && fabs(small) < most;
        want(y, e, small + large, fits ? size + fabs(small) * ratio : INFINITY);
    }
}

void fuzz_low_rank_layers(fuzz_call *c) {
    static const char *const layers[][6] = {{"weight_0", "bias_0", "y_0", "a_0", "b_0", "scale_0"},
                                            {"weight_1", "bias_1", "y_1", "a_1", "b_1", "scale_1"},
                                            {"weight_2", "bias_2", "y_2", "a_2", "b_2", "scale_2"}};
    const fuzz_tensor *x = input(c, "x");
    for (int i = 0; i < 3; i++) {
        fuzz_tensor *y = output(c, layers[i][2]);
        if (!y) continue;
        const double *weight = numbers(c, layers[i][0]), *bias = numbers(c, layers[i][1]);
        const fuzz_tensor *a = input(c, layers[i][3]);
        const int64_t width = last(x), columns = last(y);
        const double most = y->type == BST_F16 ? 65504 : 0x1p127;
        const double ratio = fuzz_roundoff(y->type) / fuzz_roundoff(BST_F32);
        for (int64_t e = 0; e < y->count; e++) {
            double first = bias ? bias[e % columns] : 0, sum = 0, size = 0, more = 0;
            for (int64_t k = 0; k < width; k++) {
                double product = x->numbers[e / columns * width + k] * weight[e % columns * width + k];
                sum += product, size += fabs(product);
            }
            bool fits = size < most && fabs(first) < most;
            if (a) { /* y may be rounded before that is added */
                size += fabs(first + sum) * ratio;
                more = added(x, a, numbers(c, layers[i][4]), real(c, layers[i][5]), e / columns, e % columns, &size);
            }
            want(y, e, first + sum + more, fits ? size + fabs(first) : INFINITY);
        }
    }
}

/* sum and repeated; pieces, which must be what they are to the bit, are looked at in tests/c. */
void fuzz_low_rank_split(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    fuzz_tensor *sum = output(c, "sum"), *repeated = output(c, "repeated");
    const int64_t parts = x->shape[2], ranks = x->shape[3];
    const double scale = real(c, "scale");
    for (int64_t group = 0; group < x->shape[0] * x->shape[1]; group++)
        for (int64_t rank = 0; rank < ranks; rank++) {
            double number = 0, size = 0;
            for (int64_t p = 0; p < parts; p++) {
                const double part = x->numbers[(group * parts + p) * ranks + rank];
                number += part, size += fabs(part);
            }
            size = size > 0x1p127 ? INFINITY : fabs(scale) * size; /* the scale comes after the sum */
            want(sum, group * ranks + rank, scale * number, size);
            for (int64_t p = 0; p < 3; p++) want(repeated, (group * 3 + p) * ranks + rank, scale * number, size);
        }
}
