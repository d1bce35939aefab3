/* reference_causal_conv1d.c - what causal convolutions and their gradients must be, in float64. */
#include "reference.h"

/* A call, and what z and its slope are at one of its elements. */
typedef struct convolution {
    const double *x, *weight, *bias, *seq_idx, *dy;
    int64_t tokens, channels, taps;
    bool silu;
} convolution;

typedef struct element {
    double y, size, g, g_size;
} element;

static convolution convolution_of(const fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x"), *weight = input(c, "weight");
    return (convolution){x->numbers,  weight->numbers, numbers(c, "bias"), numbers(c, "seq_idx"), numbers(c, "dy"),
                         x->shape[1], x->shape[2],     weight->shape[1],   whole(c, "silu")};
}

static int64_t at(const convolution *v, int64_t row, int64_t token, int64_t channel) {
    return (row * v->tokens + token) * v->channels + channel;
}

/* Whether two tokens of a row, the first not behind the second, are there, and of one sequence. */
static bool is_same(const convolution *v, int64_t row, int64_t first, int64_t second) {
    if (first < 0 || second >= v->tokens) return false;
    for (int64_t t = row * v->tokens + first + 1; v->seq_idx && t <= row * v->tokens + second; t++)
        if (v->seq_idx[t] != v->seq_idx[t - 1]) return false;
    return true;
}

/* What the window of `token` has at `from`: tokens before its sequence are zeros, which are multiplied with. */
static double x_at(const convolution *v, int64_t row, int64_t from, int64_t token, int64_t channel) {
    return is_same(v, row, from, token) ? v->x[at(v, row, from, channel)] : 0;
}

/* SiLU's slope is off by at most half of what z is off by. What is lost below the least numbers of float32 is worth
 * 1e-30 here, and of what passes 1e37 on the way nothing is asked. */
static element element_at(const convolution *v, int64_t row, int64_t token, int64_t channel) {
    double z = v->bias ? v->bias[channel] : 0, size = fabs(z) + 1e-30;
    double dy = v->dy ? v->dy[at(v, row, token, channel)] : 0;
    for (int64_t k = 0; k < v->taps; k++) {
        double term = v->weight[channel * v->taps + k] * x_at(v, row, token - (v->taps - 1) + k, token, channel);
        z += term, size += fabs(term);
    }
    double s = 1 / (1 + exp(-z)), slope = v->silu ? s * (1 + z * (1 - s)) : 1;
    double of_slope = v->silu ? 1 + size / 2 : 1;
    double g_size = fabs(dy) * of_slope + 1e-30;
    bool is_lost = size > 1e37, g_is_lost = is_lost || g_size > 1e37;
    return (element){v->silu ? z * s : z, is_lost ? INFINITY : 1.1 * size, dy * slope, g_is_lost ? INFINITY : g_size};
}

void fuzz_causal_conv1d_forward(fuzz_call *c) {
    convolution v = convolution_of(c);
    fuzz_tensor *y = output(c, "y");
    for (int64_t e = 0; e < y->count; e++) {
        int64_t row = e / v.channels / v.tokens;
        element z = element_at(&v, row, e / v.channels % v.tokens, e % v.channels);
        want(y, e, z.y, z.size);
    }
}

/* Adds a product of an element's gradient, of such a size, with another number. */
static void add(fuzz_tensor *t, int64_t e, double g, double g_size, double other) {
    double size = isinf(g_size) ? INFINITY : g_size * fabs(other); /* of zero, too */
    if (!t) return;
    t->numbers[e] += g * other;
    t->size[e] += size > 1e37 ? INFINITY : size;
}

void fuzz_causal_conv1d_backward(fuzz_call *c) {
    convolution v = convolution_of(c);
    fuzz_tensor *dx = output(c, "dx"), *dweight = output(c, "dweight"), *dbias = output(c, "dbias");
    int64_t count = input(c, "x")->count;
    for (int64_t e = 0; e < count; e++) {
        int64_t row = e / v.channels / v.tokens, token = e / v.channels % v.tokens, channel = e % v.channels;
        element z = element_at(&v, row, token, channel);
        add(dbias, channel, z.g, z.g_size, 1);
        for (int64_t k = 0; k < v.taps; k++) {
            int64_t from = token - (v.taps - 1) + k, tap = channel * v.taps + k;
            double x = x_at(&v, row, from, token, channel), w = v.weight[tap];
            add(dweight, tap, z.g, z.g_size, x);
            if (is_same(&v, row, from, token)) add(dx, at(&v, row, from, channel), z.g, z.g_size, w);
        }
        /* Behind the sequence gradients are zeros, which are multiplied with. */
        for (int64_t k = 0; dx && k < v.taps - 1; k++)
            if (!is_same(&v, row, token, token + (v.taps - 1) - k)) add(dx, e, 0, 0, v.weight[channel * v.taps + k]);
    }
}
