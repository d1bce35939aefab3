/* reference_gated_norm.c - what the RMS norm with a gate must be, and its gradients, in float64. */
#include "reference.h"

/* Infinite where float32 has no number for a part of a product, or hardly one. */
static double lost(double part) { return (part != 0 && fabs(part) < 1e-36) || fabs(part) > 1e36 ? INFINITY : 0; }

typedef struct gated_norm {
    const double *x, *gate, *weight, *dy; /* dy: of the backward pass */
    int64_t rows, columns, width;         /* width: of a group */
    bool sigmoid, first;
    double eps;
    fuzz_tensor *y, *dx, *dgate, *dweight;
} gated_norm;

/* An element, with the sizes that errors are relative to: act(gate) and its slope, what is normed, and the gradient of
 * what the norm returns. */
typedef struct element {
    double act, act_size, slope, slope_size, u, u_size, m, m_size;
} element;

static gated_norm read_call(fuzz_call *c) {
    const fuzz_tensor *x = input(c, "x");
    gated_norm a = {.x = x->numbers,
                    .gate = numbers(c, "gate"),
                    .weight = numbers(c, "weight"),
                    .dy = numbers(c, "dy"),
                    .columns = last(x),
                    .width = whole(c, "group") ? whole(c, "group") : last(x),
                    .sigmoid = whole(c, "activation"),
                    .first = whole(c, "gate_first"),
                    .eps = real(c, "eps"),
                    .y = output(c, "y"),
                    .dx = output(c, "dx"),
                    .dgate = output(c, "dgate"),
                    .dweight = output(c, "dweight")};
    a.rows = a.columns ? x->count / a.columns : 0;
    return a;
}

static element element_at(const gated_norm *a, int64_t at) {
    double x = a->x[at], g = a->gate[at], w = a->weight[at % a->columns], dy = a->dy ? a->dy[at] : 0;
    double s = 1 / (1 + exp(-g)), dyw = dy * w;
    element e = {.act = a->sigmoid ? s : g * s, .slope = a->sigmoid ? s * (1 - s) : s * (1 + g * (1 - s))};
    e.act_size = fabs(e.act) + lost(e.act) + lost(s) + (fabs(g) > 1e18 ? INFINITY : 0);
    /* Near one the sigmoid's own rounding is all that is left of its slope. */
    e.slope_size = s * (1 + (a->sigmoid ? 0 : fabs(g))) + lost(s) + lost(e.slope);
    e.u = a->first ? x * e.act : x;
    e.u_size = a->first ? fabs(x) * e.act_size + lost(e.u) : fabs(x);
    e.m = a->first ? dyw : dyw * e.act;
    e.m_size = (a->first ? fabs(dyw) : fabs(dyw) * e.act_size) + lost(dyw) + lost(e.m);
    return e;
}

/* 1 / sqrt(mean(u^2) + eps) of the group that begins there; infinite where float32 overflows on the way, or has no
 * number for one of them. */
static double inverse_of(const gated_norm *a, int64_t begin) {
    double sum = 0;
    for (int64_t at = begin; at < begin + a->width; at++) {
        element e = element_at(a, at);
        sum += isfinite(e.u_size) ? e.u * e.u : INFINITY;
    }
    return sum < 1e37 && (sum > 1e-30 || a->eps > 1e-12) ? 1 / sqrt(sum / (double)a->width + a->eps) : INFINITY;
}

void fuzz_gated_rms_norm_forward(fuzz_call *c) {
    const gated_norm a = read_call(c);
    for (int64_t begin = 0; begin < a.rows * a.columns; begin += a.width) {
        double inverse = inverse_of(&a, begin);
        for (int64_t at = begin; at < begin + a.width; at++) {
            element e = element_at(&a, at);
            double w = a.weight[at % a.columns], n = e.u * inverse, scaled = n * w;
            double size = e.u_size * inverse * fabs(w) + lost(n) + lost(scaled) + lost(w * inverse);
            want(a.y, at, a.first ? scaled : scaled * e.act, a.first ? size : size * e.act_size);
        }
    }
}

static void backward_element(const gated_norm *a, int64_t at, double inverse, double dot, double dot_size) {
    element e = element_at(a, at);
    double x = a->x[at], dy = a->dy[at], dyw = dy * a->weight[at % a->columns];
    double n = e.u * inverse, n_size = e.u_size * inverse + lost(n), du = inverse * (e.m - n * dot);
    double du_size = inverse * (e.m_size + n_size * dot_size) + lost(n * dot) + lost(n * inverse) + lost(du);
    double of_gate = a->first ? du * x : dyw * n;
    double of_gate_size = a->first ? du_size * fabs(x) : fabs(dyw) * n_size + lost(dyw);
    want(a->dx, at, a->first ? du * e.act : du, a->first ? du_size * e.act_size : du_size);
    want(a->dgate, at, of_gate * e.slope, (of_gate_size + lost(of_gate)) * e.slope_size);
    if (!a->dweight) return;
    double upstream = a->first ? dy : dy * e.act;
    a->dweight->numbers[at % a->columns] += upstream * n;
    a->dweight->size[at % a->columns] +=
        fabs(dy) * (a->first ? 1 : e.act_size) * n_size + lost(upstream) + (fabs(upstream * n) > 1e36 ? INFINITY : 0);
}

void fuzz_gated_rms_norm_backward(fuzz_call *c) {
    const gated_norm a = read_call(c);
    for (int64_t begin = 0; begin < a.rows * a.columns; begin += a.width) {
        double inverse = inverse_of(&a, begin), dot = 0, dot_size = 0;
        for (int64_t at = begin; at < begin + a.width; at++) {
            element e = element_at(&a, at);
            bool overflows = fabs(e.m * e.u) > 1e36 || fabs(e.m * e.u) * inverse * inverse > 1e36;
            dot += e.m * e.u * inverse / (double)a.width;
            /* What is too small for float32 is lost; how small, is relative to nothing. */
            dot_size += overflows ? INFINITY : (e.m_size * e.u_size + 1e-32) * inverse / (double)a.width;
        }
        for (int64_t at = begin; at < begin + a.width; at++) backward_element(&a, at, inverse, dot, dot_size);
    }
}
