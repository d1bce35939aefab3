/* reference_divergence.c - a student's divergence from a teacher, by plain loops. */
#include "reference.h"

/* The teacher's logits, however they are given, to be freed; -inf: of a class that is left out. */
static double *teachers_logits(const fuzz_call *c, int64_t rows, int64_t classes, double *most) {
    if (numbers(c, "teacher_hidden"))
        return fuzz_logits_of(c, "teacher_hidden", "teacher_weight", "teacher_bias", most);
    const double *given = numbers(c, "teacher_logits"), *indices = numbers(c, "teacher_indices");
    double *logits = calloc((size_t)(rows * classes + 1), sizeof *logits);
    if (!logits) abort();
    int64_t count = last(input(c, "teacher_logits"));
    for (int64_t i = 0; indices && i < rows * classes; i++) logits[i] = -INFINITY;
    for (int64_t i = 0; i < rows * count; i++) {
        logits[i / count * classes + (indices ? (int64_t)indices[i] : i % count)] = given[i];
        *most = fmax(*most, fabs(given[i]));
    }
    return logits;
}

/* z, and then its logarithm of the softmax, of a row of logits in their place; the largest |z| and scaled logit. */
static double normalise(double *z, int64_t classes, double scale, double cap, double t) {
    double top = -INFINITY, sum = 0, largest = 1;
    for (int64_t j = 0; j < classes; j++) {
        if (z[j] == -INFINITY) continue;
        largest = fmax(largest, fabs(scale * z[j] / t));
        z[j] = (cap > 0 ? cap * tanh(scale * z[j] / cap) : scale * z[j]) / t;
        top = fmax(top, z[j]);
    }
    for (int64_t j = 0; j < classes; j++) sum += exp(z[j] - top);
    for (int64_t j = 0; j < classes; j++) z[j] -= top + log(sum);
    return largest;
}

static double part(double a, double log_a, double log_b) { return a == 0 ? 0 : a * (log_a - log_b); }

void fuzz_linear_divergence_forward(fuzz_call *c) {
    int64_t rows = input(c, "hidden")->shape[0], classes = input(c, "weight")->shape[0], kind = whole(c, "kind");
    double most = 1, mine, *student = fuzz_logits_of(c, "hidden", "weight", "bias", &mine),
           *teacher = teachers_logits(c, rows, classes, &most);
    double t = real(c, "temperature"), beta = real(c, "beta"), scale = fabs(real(c, "logit_scale"));
    const double *mask = numbers(c, "mask");
    fuzz_tensor *divergence = output(c, "divergence"), *entropy = output(c, "entropy");
    most = fmax(most, mine) * fmax(1, fmax(scale, fabs(real(c, "teacher_logit_scale"))) / t);
    for (int64_t r = 0; r < rows; r++) {
        double *z = student + r * classes, *y = teacher + r * classes, value = 0, own = 0;
        double largest = normalise(z, classes, real(c, "logit_scale"), real(c, "softcap"), t);
        largest = fmax(largest, normalise(y, classes, real(c, "teacher_logit_scale"), real(c, "teacher_softcap"), t));
        for (int64_t j = 0; j < classes; j++) {
            double p = exp(z[j]), q = exp(y[j]), m = log(beta * q + (1 - beta) * p);
            own -= part(p, z[j], 0);
            value += kind == 0   ? part(q, y[j], z[j])
                     : kind == 1 ? part(p, z[j], y[j])
                                 : beta * part(q, y[j], m) + (1 - beta) * part(p, z[j], m);
        }
        bool counts = !mask || mask[r] != 0;
        /* An error of a logit counts as often as logits differ. */
        double size = most * largest * largest;
        bool lost = !isfinite(value) || !isfinite(own) || !(size < 1e20);
        want(divergence, r, counts ? value : 0, lost ? INFINITY : size);
        want(entropy, r, counts ? own : 0, lost ? INFINITY : size);
    }
    free(student);
    free(teacher);
}
