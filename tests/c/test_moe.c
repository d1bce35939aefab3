/* test_moe.c - a mixture of experts through the C API: the whole of it around products of plain loops, against plain
 * loops in double; what is left out, errors, its kernels on every chip. */
#include <math.h>

#include "chips.h"
#include "moe_calls.h"

/* 70 rows are several blocks of the backward pass, on CPU and CUDA; expert 2 has no token, and experts end inside
 * blocks. */
enum { T = 35, K = 2, E = 5, H = 12, I = 9, N = T * K };
static const double alpha = 1.702, limit = 1.5;
static const bst_glu_options oai = {sizeof oai, .activation = BST_SWIGLU_OAI, .interleaved = 1, .alpha = 1.702,
                                    .limit = 1.5};

static int64_t pairs[] = {T, K}, tokens[] = {T, H}, sorted[] = {N}, experts[] = {E}, rows_h[] = {N, H},
               rows_i[] = {N, I}, rows_2i[] = {N, 2 * I}, bias_2i[] = {E, 2 * I}, bias_h[] = {E, H};

static int64_t indices[T][K];
static int32_t order[N], position[T][K], ends[E];
static float hidden[T][H], weights[T][K], gate_up[E][H][2 * I], gate_up_bias[E][2 * I], down[E][I][H], down_bias[E][H];
static float x[N][H], h[N][2 * I], y[N][I], z[N][H], out[T][H];

static DLTensor integers(void *data, int dims, int64_t *shape) {
    return bst_tensor(data, dims, shape, NULL, (DLDataType){kDLInt, 32, 1});
}

/* All of them; a test uses some. */
#define UNUSED __attribute__((unused)) DLTensor
#define TENSORS                                                                                             \
    UNUSED t_indices = bst_tensor(indices, 2, pairs, NULL, bst_test_i64);                                   \
    UNUSED t_order = integers(order, 1, sorted), t_position = integers(position, 2, pairs);                 \
    UNUSED t_places = integers(position, 1, sorted);                                                        \
    UNUSED t_ends = integers(ends, 1, experts), t_hidden = bst_f32(hidden, 2, tokens);                      \
    UNUSED t_weights = bst_f32(weights, 2, pairs), t_gub = bst_f32(gate_up_bias, 2, bias_2i);               \
    UNUSED t_db = bst_f32(down_bias, 2, bias_h), t_x = bst_f32(x, 2, rows_h), t_h = bst_f32(h, 2, rows_2i); \
    UNUSED t_y = bst_f32(y, 2, rows_i), t_z = bst_f32(z, 2, rows_h), t_out = bst_f32(out, 2, tokens)

static void fill(void) {
    unsigned seed = 7;
    for (int t = 0; t < T; t++) {
        for (int k = 0; k < K; k++) {
            seed = seed * 1664525u + 1013904223u;
            indices[t][k] = (seed >> 16) % (E - 1);
            if (indices[t][k] >= 2) indices[t][k]++;
        }
    }
    bst_fill(&hidden[0][0], T * H, 1, 1);
    bst_fill(&weights[0][0], T * K, 2, 1);
    bst_fill(&gate_up[0][0][0], E * H * 2 * I, 3, 1);
    bst_fill(&gate_up_bias[0][0], E * 2 * I, 4, 1);
    bst_fill(&down[0][0][0], E * I * H, 5, 1);
    bst_fill(&down_bias[0][0], E * H, 6, 1);
}

static int expert_of(int row) { return (int)indices[order[row] / K][order[row] % K]; }

/* What the gate makes of a pair of h and its biases, and its derivatives. */
typedef struct gate {
    double y, dgate, dup;
} gate;

static gate gate_of(double g, double u) {
    double clamped_g = g > limit ? limit : g, clamped_u = fmax(fmin(u, limit), -limit) + 1;
    double s = 1 / (1 + exp(-alpha * clamped_g));
    return (gate){clamped_u * clamped_g * s, g > limit ? 0 : clamped_u * s * (1 + alpha * clamped_g * (1 - s)),
                  fabs(u) > limit ? 0 : clamped_g * s};
}

static gate gate_at(int row, int column) {
    const float *b = gate_up_bias[expert_of(row)];
    return gate_of((double)h[row][2 * column] + b[2 * column], (double)h[row][2 * column + 1] + b[2 * column + 1]);
}

TEST(sorts_by_expert_and_keeps_the_order) {
    TENSORS;
    fill();
    CHECK_OK(bst_moe_sort(NULL, &t_indices, &t_order, &t_position, &t_ends));
    int row = 0;
    for (int e = 0; e < E; e++) {
        for (int pair = 0; pair < N; pair++) {
            if (indices[pair / K][pair % K] != e) continue;
            CHECK_EQ_I(order[row], pair);
            CHECK_EQ_I(position[pair / K][pair % K], row);
            row++;
        }
        CHECK_EQ_I(ends[e], row);
    }
    CHECK_EQ_I(ends[1], ends[2]);
}

TEST(forward) {
    TENSORS;
    CHECK_OK(bst_moe_gather(NULL, &t_hidden, &t_places, &t_x));
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < H; c++) CHECK(x[n][c] == hidden[order[n] / K][c]);
        for (int c = 0; c < 2 * I; c++) {
            h[n][c] = 0;
            for (int j = 0; j < H; j++) h[n][c] += x[n][j] * gate_up[expert_of(n)][j][c];
        }
    }
    CHECK_OK(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &oai, &t_y));
    for (int n = 0; n < N; n++) {
        for (int c = 0; c < I; c++) CHECK_CLOSE(y[n][c], gate_at(n, c).y, 2e-6);
        for (int c = 0; c < H; c++) {
            z[n][c] = 0;
            for (int j = 0; j < I; j++) z[n][c] += y[n][j] * down[expert_of(n)][j][c];
        }
    }
    CHECK_OK(bst_moe_combine_forward(NULL, &t_z, &t_position, &t_weights, &t_db, &t_indices, &t_out));
    for (int t = 0; t < T; t++) {
        for (int c = 0; c < H; c++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += weights[t][k] * ((double)z[position[t][k]][c] + down_bias[indices[t][k]][c]);
            CHECK_CLOSE(out[t][c], sum, 4e-6);
        }
    }
}

static float dout[T][H], dx[N][H], dots[N], ddown_bias[E][H], dy[N][I], dh[N][2 * I], wy[N][I], dweights[T][K],
    dgate_up_bias[E][2 * I];

TEST(backward) {
    TENSORS;
    bst_fill(&dout[0][0], T * H, 8, 1);
    bst_fill(&dy[0][0], N * I, 9, 1);
    DLTensor t_dout = bst_f32(dout, 2, tokens), t_dx = bst_f32(dx, 2, rows_h), t_dots = bst_f32(dots, 1, sorted);
    DLTensor t_ddb = bst_f32(ddown_bias, 2, bias_h), t_dy = bst_f32(dy, 2, rows_i), t_dh = bst_f32(dh, 2, rows_2i);
    DLTensor t_wy = bst_f32(wy, 2, rows_i), t_dw = bst_f32(dweights, 2, pairs),
             t_dgub = bst_f32(dgate_up_bias, 2, bias_2i);
    CHECK_OK(bst_moe_combine_backward(NULL, &t_dout, &t_order, &t_ends, &t_weights, &t_db, &t_dx, &t_dots, &t_ddb));
    CHECK_OK(moe_glu_backward(NULL, &t_dy, &t_h, &t_gub, &t_ends, &t_order, &t_weights, &t_dots, &oai, &t_dh, &t_wy,
                              &t_dw, &t_dgub));
    double sum_h[E][H] = {{0}}, sum_2i[E][2 * I] = {{0}};
    for (int n = 0; n < N; n++) {
        int e = expert_of(n), token = order[n] / K;
        double w = weights[token][order[n] % K], dot = 0;
        for (int c = 0; c < H; c++) {
            CHECK(dx[n][c] == dout[token][c]);
            dot += (double)dout[token][c] * down_bias[e][c];
            sum_h[e][c] += w * dout[token][c];
        }
        CHECK_CLOSE(dots[n], dot, 4e-6);
        for (int c = 0; c < I; c++) {
            gate g = gate_at(n, c);
            dot += dy[n][c] * g.y;
            CHECK_CLOSE(wy[n][c], w * g.y, 2e-6);
            CHECK_CLOSE(dh[n][2 * c], w * dy[n][c] * g.dgate, 4e-6);
            CHECK_CLOSE(dh[n][2 * c + 1], w * dy[n][c] * g.dup, 4e-6);
            sum_2i[e][2 * c] += w * dy[n][c] * g.dgate;
            sum_2i[e][2 * c + 1] += w * dy[n][c] * g.dup;
        }
        CHECK_CLOSE(dweights[token][order[n] % K], dot, 1e-5);
    }
    for (int e = 0; e < E; e++) {
        for (int c = 0; c < H; c++) CHECK_CLOSE(ddown_bias[e][c], sum_h[e][c], 1e-5);
        for (int c = 0; c < 2 * I; c++) CHECK_CLOSE(dgate_up_bias[e][c], sum_2i[e][c], 1e-5);
    }
}

/* Every activation of gates in their half, with a limit and without one, against a quotient of differences of the same
 * formula; then the bits of the same numbers interleaved. */
static double unit(int activation, double cap, double g, double u) {
    if (cap > 0) g = fmin(g, cap), u = fmax(fmin(u, cap), -cap);
    switch (activation) {
        case BST_SILU:
            return u * g / (1 + exp(-g));
        case BST_GELU_TANH:
            return u * g / (1 + exp(-2 * sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
        case BST_GELU:
            return u * g * 0.5 * (1 + erf(g / sqrt(2)));
        case BST_RELU:
            return u * fmax(g, 0);
        case BST_RELU2:
            return u * fmax(g, 0) * fmax(g, 0);
        default:
            return (u + 1) * g / (1 + exp(-alpha * g));
    }
}

static void turn(float *to, const float *from, int64_t rows) { /* halves to pairs */
    for (int64_t r = 0; r < rows; r++)
        for (int c = 0; c < I; c++)
            for (int up = 0; up < 2; up++) to[r * 2 * I + 2 * c + up] = from[r * 2 * I + up * I + c];
}

TEST(every_unit_in_either_layout) {
    TENSORS;
    static float turned_h[N][2 * I], turned_bias[E][2 * I], own_dh[N][2 * I], own_dbias[E][2 * I], other_y[N][I],
        other_wy[N][I], other_dw[T][K], want[N][2 * I], want_bias[E][2 * I];
    DLTensor t_dy = bst_f32(dy, 2, rows_i), t_wy = bst_f32(wy, 2, rows_i), t_dw = bst_f32(dweights, 2, pairs);
    DLTensor t_dh = bst_f32(dh, 2, rows_2i), t_dbias = bst_f32(dgate_up_bias, 2, bias_2i);
    DLTensor o_h = bst_f32(turned_h, 2, rows_2i), o_bias = bst_f32(turned_bias, 2, bias_2i);
    DLTensor o_y = bst_f32(other_y, 2, rows_i), o_wy = bst_f32(other_wy, 2, rows_i);
    DLTensor o_dh = bst_f32(own_dh, 2, rows_2i), o_dbias = bst_f32(own_dbias, 2, bias_2i),
             o_dw = bst_f32(other_dw, 2, pairs);
    turn(&turned_h[0][0], &h[0][0], N);
    turn(&turned_bias[0][0], &gate_up_bias[0][0], E);
    for (int activation = BST_SILU; activation <= BST_SWIGLU_OAI; activation++) {
        for (int limited = 0; limited < 2; limited++) {
            bst_glu_options options = {sizeof options, .activation = (bst_activation)activation, .alpha = alpha,
                                       .limit = limited ? limit : 0};
            CHECK_OK(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &options, &t_y));
            CHECK_OK(moe_glu_backward(NULL, &t_dy, &t_h, &t_gub, &t_ends, &t_order, &t_weights, NULL, &options, &t_dh,
                                      &t_wy, &t_dw, &t_dbias));
            for (int n = 0; n < N; n++) {
                double dot = 0, w = weights[order[n] / K][order[n] % K], near = 1e-6;
                for (int c = 0; c < I; c++) {
                    const float *b = gate_up_bias[expert_of(n)];
                    double g = (double)h[n][c] + b[c], u = (double)h[n][I + c] + b[I + c];
                    double value = unit(activation, options.limit, g, u), wdy = w * dy[n][c];
                    dot += dy[n][c] * value;
                    CHECK_CLOSE(y[n][c], value, 2e-6 * fmax(1, fabs(value)));
                    CHECK_CLOSE(wy[n][c], w * value, 2e-6 * fmax(1, fabs(value)));
                    /* float32's rounding of g is far from a kink */
                    double dg =
                        unit(activation, options.limit, g + near, u) - unit(activation, options.limit, g - near, u);
                    double du =
                        unit(activation, options.limit, g, u + near) - unit(activation, options.limit, g, u - near);
                    CHECK_CLOSE(dh[n][c], wdy * dg / (2 * near), 2e-6 * fmax(1, fabs(u * g)));
                    CHECK_CLOSE(dh[n][I + c], wdy * du / (2 * near), 2e-6 * fmax(1, g * g));
                }
                CHECK_CLOSE(dweights[order[n] / K][order[n] % K], dot, 1e-5 * fmax(1, fabs(dot)));
            }
            options.interleaved = 1;
            CHECK_OK(bst_moe_glu_forward(NULL, &o_h, &o_bias, &t_ends, &options, &o_y));
            CHECK_OK(moe_glu_backward(NULL, &t_dy, &o_h, &o_bias, &t_ends, &t_order, &t_weights, NULL, &options, &o_dh,
                                      &o_wy, &o_dw, &o_dbias));
            turn(&want[0][0], &dh[0][0], N);
            turn(&want_bias[0][0], &dgate_up_bias[0][0], E);
            CHECK(!memcmp(y, other_y, sizeof y) && !memcmp(wy, other_wy, sizeof wy));
            CHECK(!memcmp(want, own_dh, sizeof want) && !memcmp(want_bias, own_dbias, sizeof want_bias));
        }
    }
}

/* dh over h and wy over dy, then one of them alone: the bits of the call that has memory for all. */
TEST(backward_in_place) {
    TENSORS;
    static float own_h[N][2 * I], own_dy[N][I], own_dw[T][K], own_dgub[E][2 * I];
    DLTensor t_own_h = bst_f32(own_h, 2, rows_2i), t_own_dy = bst_f32(own_dy, 2, rows_i);
    DLTensor t_own_dw = bst_f32(own_dw, 2, pairs), t_own_dgub = bst_f32(own_dgub, 2, bias_2i);
    DLTensor t_dots = bst_f32(dots, 1, sorted);
    for (int wanted = 1; wanted < 4; wanted++) {
        bool want_dh = wanted & 1, want_wy = wanted & 2;
        memcpy(own_h, h, sizeof h);
        memcpy(own_dy, dy, sizeof dy);
        CHECK_OK(moe_glu_backward(NULL, &t_own_dy, &t_own_h, &t_gub, &t_ends, &t_order, &t_weights, &t_dots, &oai,
                                  want_dh ? &t_own_h : NULL, want_wy ? &t_own_dy : NULL, &t_own_dw, &t_own_dgub));
        CHECK(!memcmp(own_h, want_dh ? dh : h, sizeof h));
        CHECK(!memcmp(own_dy, want_wy ? wy : dy, sizeof dy));
        CHECK(!memcmp(own_dw, dweights, sizeof dweights));
        CHECK(!memcmp(own_dgub, dgate_up_bias, sizeof dgate_up_bias));
    }
}

/* h, its gradients and what they share memory with begin between two pairs: the bits of tensors that do not. */
TEST(h_may_begin_between_pairs) {
    TENSORS;
    for (size_t t = 0; t < sizeof bst_test_types / sizeof *bst_test_types; t++) {
        enum { MOST = N * 2 * I + 8 };
        int64_t size = bst_test_types[t].bits / 8;
        static char from[MOST * 4], near_h[MOST * 4], near_dh[MOST * 4], near_y[MOST * 4], far_h[MOST * 4],
            far_dh[MOST * 4], far_y[MOST * 4];
        for (int64_t i = 0; i < N * 2 * I;
             i++) { /* numbers that all types hold, of which their top bits are the first */
            uint32_t bits;
            float value = (float)(int)(h[i / (2 * I)][i % (2 * I)] * 64) / 64;
            memcpy(&bits, &value, 4);
            if (size == 4) memcpy(from + 4 * i, &bits, 4);
            uint16_t half = (uint16_t)(t == 1 ? bits >> 16 : (bits >> 16 & 0x8000u) | 0x3c00u | (bits >> 13 & 0x3ffu));
            if (size == 2) memcpy(from + 2 * i, &half, 2);
        }
        memcpy(near_h, from, (size_t)(N * 2 * I * size));
        memcpy(far_h + size, from, (size_t)(N * 2 * I * size));
        DLTensor t_near_h = bst_tensor(near_h, 2, rows_2i, NULL, bst_test_types[t]);
        DLTensor t_far_h = bst_tensor(far_h + size, 2, rows_2i, NULL, bst_test_types[t]);
        DLTensor t_near_y = bst_tensor(near_y, 2, rows_i, NULL, bst_test_types[t]);
        DLTensor t_far_y = bst_tensor(far_y + size, 2, rows_i, NULL, bst_test_types[t]);
        CHECK_OK(bst_moe_glu_forward(NULL, &t_near_h, NULL, &t_ends, &oai, &t_near_y));
        CHECK_OK(bst_moe_glu_forward(NULL, &t_far_h, NULL, &t_ends, &oai, &t_far_y));
        CHECK(!memcmp(near_y, far_y + size, (size_t)(N * I * size)));
        DLTensor t_dh = bst_tensor(near_dh, 2, rows_2i, NULL, bst_test_types[t]);
        DLTensor t_far_dh = bst_tensor(far_dh + size, 2, rows_2i, NULL, bst_test_types[t]);
        CHECK_OK(moe_glu_backward(NULL, &t_near_y, &t_near_h, NULL, &t_ends, &t_order, &t_weights, NULL, &oai, &t_dh,
                                  NULL, NULL, NULL));
        CHECK_OK(moe_glu_backward(NULL, &t_near_y, &t_near_h, NULL, &t_ends, &t_order, &t_weights, NULL, &oai,
                                  &t_far_dh, NULL, NULL, NULL));
        CHECK(!memcmp(near_dh, far_dh + size, (size_t)(N * 2 * I * size)));
        CHECK_OK(moe_glu_backward(NULL, &t_near_y, &t_far_h, NULL, &t_ends, &t_order, &t_weights, NULL, &oai, &t_far_h,
                                  NULL, NULL, NULL));
        CHECK(!memcmp(near_dh, far_h + size, (size_t)(N * 2 * I * size)));
    }
}

/* A call of which one index tensor is wrong. On CPU it is refused, by name, before anything is written; on CUDA, where
 * nobody looks before the kernels do, these read and write nothing beyond the tensors (the emulator would say so), and
 * the rows or tokens concerned are NaN. */
#ifdef BST_EMULATE
#define CHECK_REFUSED(call, message) \
    do {                             \
        (void)(message);             \
        CHECK_OK(call);              \
    } while (0)
#else
#define CHECK_REFUSED(call, message)                                                          \
    do {                                                                                      \
        CHECK_EQ_I(call, BST_INVALID);                                                        \
        CHECK_STR(bst_last_error(), message);                                                 \
        for (size_t i = 0; i < sizeof written / sizeof *written; i++) CHECK(written[i] == 7); \
    } while (0)
#endif

TEST(index_tensors_are_not_believed) {
    TENSORS;
    static float written[N * 2 * I], more[N * 2 * I], dots_out[N], pairs_out[T][K];
    for (size_t i = 0; i < sizeof written / sizeof *written; i++) written[i] = 7;
    DLTensor o_rows_h = bst_f32(written, 2, rows_h), o_i = bst_f32(written, 2, rows_i);
    DLTensor o_2i = bst_f32(written, 2, rows_2i), o_tokens = bst_f32(written, 2, tokens);
    DLTensor o_more_i = bst_f32(more, 2, rows_i), o_bias_h = bst_f32(more, 2, bias_h),
             o_dots = bst_f32(dots_out, 1, sorted);
    DLTensor o_bias_2i = bst_f32(more + N * I, 2, bias_2i), o_pairs = bst_f32(pairs_out, 2, pairs);
    const int32_t wrong[] = {N, -1, INT32_MAX, INT32_MIN};
    const int32_t kept_order = order[3], kept_position = position[4][1];
    const int64_t kept_index = indices[4][1];
    for (size_t w = 0; w < sizeof wrong / sizeof *wrong; w++) {
        char message[100];
        order[3] = wrong[w];
        snprintf(message, sizeof message, "order, of shape [70], has %d; 0 to 69, the pairs, are needed", wrong[w]);
        CHECK_REFUSED(
            bst_moe_combine_backward(NULL, &t_out, &t_order, &t_ends, &t_weights, &t_db, &o_rows_h, &o_dots, &o_bias_h),
            message);
#ifdef BST_EMULATE
        CHECK(isnan(written[3 * H]) && isnan(dots_out[3]) && written[4 * H] == out[order[4] / K][0]);
#endif
        CHECK_REFUSED(moe_glu_backward(NULL, &t_y, &t_h, &t_gub, &t_ends, &t_order, &t_weights, NULL, &oai, &o_2i,
                                       &o_more_i, &o_pairs, &o_bias_2i),
                      message);
#ifdef BST_EMULATE
        CHECK(isnan(more[3 * I]) && !isnan(more[4 * I]));
#endif
        order[3] = kept_order;
        position[4][1] = wrong[w];
        snprintf(message, sizeof message, "position, of shape [70], has %d; 0 to 69, the rows, are needed", wrong[w]);
        for (int c = 0; c < H; c++) written[kept_position * H + c] = 7;
        CHECK_REFUSED(bst_moe_gather(NULL, &t_hidden, &t_places, &o_rows_h), message);
#ifdef BST_EMULATE
        for (int c = 0; c < H; c++) CHECK(written[kept_position * H + c] == 7); /* a row of no pair is left alone */
        CHECK(written[position[4][0] * H] == hidden[4][0] && written[position[5][1] * H] == hidden[5][0]);
#endif
        snprintf(message, sizeof message, "position, of shape [35, 2], has %d; 0 to 69, the rows of y, are needed",
                 wrong[w]);
        CHECK_REFUSED(bst_moe_combine_forward(NULL, &t_z, &t_position, &t_weights, &t_db, &t_indices, &o_tokens),
                      message);
#ifdef BST_EMULATE
        CHECK(isnan(written[4 * H]) && !isnan(written[5 * H]));
#endif
        position[4][1] = kept_position;
        indices[4][1] = wrong[w] == N ? E : wrong[w];
        snprintf(message, sizeof message, "indices, of shape [35, 2], has %d; 0 to 4, the experts, are needed",
                 (int)indices[4][1]);
        CHECK_REFUSED(bst_moe_combine_forward(NULL, &t_z, &t_position, &t_weights, &t_db, &t_indices, &o_tokens),
                      message);
#ifdef BST_EMULATE
        CHECK(isnan(written[4 * H]) && !isnan(written[5 * H]));
#endif
        indices[4][1] = kept_index;
    }
    /* Ends that fall, that lie before the first row or behind the last, and the rows of no expert that a CPU never
     * has. */
    const int32_t kept_ends[E] = {ends[0], ends[1], ends[2], ends[3], ends[4]};
    const int32_t wrong_ends[][2] = {{0, ends[1] + 1}, {0, -5}, {3, INT32_MIN}, {4, INT32_MAX}, {4, N - 1}, {4, -1}};
    for (size_t w = 0; w < sizeof wrong_ends / sizeof *wrong_ends; w++) {
        ends[wrong_ends[w][0]] = wrong_ends[w][1];
        const char *message = "ends, of shape [5], has ";
        CHECK_REFUSED(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &oai, &o_i), message);
        CHECK_REFUSED(moe_glu_backward(NULL, &t_y, &t_h, &t_gub, &t_ends, &t_order, &t_weights, NULL, &oai, &o_2i,
                                       &o_more_i, &o_pairs, &o_bias_2i),
                      message);
        CHECK_REFUSED(
            bst_moe_combine_backward(NULL, &t_out, &t_order, &t_ends, &t_weights, &t_db, &o_rows_h, &o_dots, &o_bias_h),
            message);
        memcpy(ends, kept_ends, sizeof ends);
    }
}

TEST(without_biases_and_weights) {
    TENSORS;
    static float no_bias[E][2 * I], y_zeros[N][I], sums[T][H];
    const bst_glu_options free = {sizeof free, .activation = BST_SWIGLU_OAI}; /* alpha and limit: the usual */
    const bst_glu_options infinite = {sizeof infinite, .activation = BST_SWIGLU_OAI, .alpha = alpha,
                                      .limit = (double)INFINITY};
    DLTensor t_none = bst_f32(no_bias, 2, bias_2i), t_y_zeros = bst_f32(y_zeros, 2, rows_i),
             t_sums = bst_f32(sums, 2, tokens);
    CHECK_OK(bst_moe_glu_forward(NULL, &t_h, NULL, &t_ends, &free, &t_y));
    CHECK_OK(bst_moe_glu_forward(NULL, &t_h, &t_none, &t_ends, &infinite, &t_y_zeros));
    CHECK(!memcmp(y, y_zeros, sizeof y));
    CHECK_OK(bst_moe_combine_forward(NULL, &t_z, &t_position, NULL, NULL, NULL, &t_sums));
    for (int t = 0; t < T; t++)
        for (int c = 0; c < H; c++) CHECK(sums[t][c] == z[position[t][0]][c] + z[position[t][1]][c]);
}

TEST(errors_name_the_argument_and_write_nothing) {
    TENSORS;
    static float other[N][2 * I];
    int64_t odd[] = {N, 2 * I - 1}, short_pairs[] = {T, K - 1}, few[] = {E - 1}, many[] = {1024};
    DLTensor t_few_ends = integers(ends, 1, few), t_many_ends = integers(other, 1, many);
    DLTensor t_odd = bst_f32(other, 2, odd), t_few = bst_f32(weights, 2, short_pairs);
    DLTensor t_other_i = bst_f32(other, 2, rows_i), t_other_h = bst_f32(other, 2, tokens),
             t_other_2i = bst_f32(other, 2, rows_2i);
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_odd, NULL, &t_ends, &oai, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_glu_forward: h has shape [70, 17]; columns in pairs");
    const bst_glu_options negative = {sizeof negative, .limit = -1}, unsized = {.limit = 1},
                          unknown = {sizeof unknown, .activation = BST_SWIGLU_OAI + 1};
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &negative, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "limit -1");
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &unsized, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "options->size is 0");
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_ends, &unknown, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "activation is 6; 0 (silu), 1 (gelu_tanh)");
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, &t_db, &t_ends, &oai, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "bias");
    CHECK_EQ_I(bst_moe_combine_forward(NULL, &t_z, &t_position, &t_few, NULL, NULL, &t_other_h), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_combine_forward: weights has shape [35, 1]; 70 elements, one a sorted row");
    CHECK_EQ_I(bst_moe_combine_forward(NULL, &t_z, &t_position, NULL, &t_db, NULL, &t_other_h), BST_INVALID);
    CHECK_STR(bst_last_error(), "indices is NULL");
    CHECK_EQ_I(bst_moe_combine_backward(NULL, &t_out, &t_order, &t_ends, &t_weights, NULL, &t_z, NULL, &t_db),
               BST_INVALID);
    CHECK_STR(bst_last_error(), "dots or dbias is wanted, but bias is NULL");
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, NULL, &t_ends, &oai, &t_x), BST_INVALID);
    CHECK_STR(bst_last_error(), "y has shape [70, 12]; dimension 1 must be 9, half the last dimension of h");
    CHECK_EQ_I(bst_moe_glu_forward(NULL, &t_h, &t_gub, &t_few_ends, &oai, &t_other_i), BST_INVALID);
    CHECK_STR(bst_last_error(), "bias has shape [5, 18]; dimension 0 must be 4, the experts");
    CHECK_EQ_I(bst_moe_sort(NULL, &t_indices, &t_few_ends, &t_position, &t_ends), BST_INVALID);
    CHECK_STR(bst_last_error(), "order has shape [4]; 70 elements, one an element of indices, are needed");
    CHECK_EQ_I(bst_moe_sort(NULL, &t_indices, &t_order, &t_position, &t_many_ends), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "ends has 1024 elements, one an expert; 1 to 1023 are supported");
    CHECK_EQ_I(bst_moe_sort(NULL, &t_indices, &t_order, &t_position, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_sort: ends is NULL");
    CHECK_EQ_I(bst_moe_sort(NULL, &t_indices, &t_order, &t_position, &t_position), BST_INVALID);
    CHECK_STR(bst_last_error(), "ends has shape [35, 2]; 1 dimensions are needed");
    struct {
        DLTensor dy, dh, wy;
        const char *message;
    } shared[] = {
        {t_y, bst_f32(h[1], 2, rows_2i), t_other_i, "dh and h share memory, but do not begin together"},
        {t_y, t_h, bst_f32(y[1], 2, rows_i), "wy and dy share memory, but do not begin together"},
        {t_other_i, t_other_2i, t_y, "dh and dy share memory"},
        {t_y, t_other_2i, bst_f32(h, 2, rows_i), "wy and h share memory"},
        {t_y, t_other_2i, t_other_i, "wy and dh share memory"},
    };
    memcpy(dh, h, sizeof h);
    memcpy(wy, y, sizeof y);
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        CHECK_EQ_I(moe_glu_backward(NULL, &shared[i].dy, &t_h, NULL, &t_ends, &t_order, &t_weights, NULL, &oai,
                                    &shared[i].dh, &shared[i].wy, NULL, NULL),
                   BST_INVALID);
        CHECK_STR(bst_last_error(), shared[i].message);
    }
    CHECK(!memcmp(dh, h, sizeof h) && !memcmp(wy, y, sizeof y));
    CHECK_EQ_I(bst_moe_gather(NULL, &t_z, &t_places, &t_z), BST_INVALID);
    CHECK_STR(bst_last_error(), "rows and x share memory");
#ifndef BST_EMULATE
    int64_t kept = indices[4][1];
    indices[4][1] = E;
    int32_t first = order[0];
    CHECK_EQ_I(bst_moe_sort(NULL, &t_indices, &t_order, &t_position, &t_ends), BST_INVALID);
    CHECK_STR(bst_last_error(), "moe_sort: indices, of shape [35, 2], has 5; 0 to 4, the experts, are needed");
    CHECK_EQ_I(order[0], first);
    indices[4][1] = kept;
#endif
    for (int n = 0; n < N; n++)
        for (int c = 0; c < 2 * I; c++) CHECK(other[n][c] == 0);
}

/* GPT-OSS's sizes, and in bfloat16 a width that no vector divides; all gradients, and those with frozen experts. */
static void compile_calls(void) {
    for (size_t t = 0; t < 3; t++) {
        for (int64_t width = 2880; width >= (t == 1 ? 2879 : 2880); width--) {
            DLDataType type = bst_test_types[t], i32 = {kDLInt, 32, 1};
            int64_t n = 4096, e = 32;
            bst_shape s[17];
            DLTensor *d_indices = bst_device_tensor(&s[0], bst_test_i64, 2, (int64_t[]){n / 4, 4});
            DLTensor *d_order = bst_device_tensor(&s[1], i32, 1, &n);
            DLTensor *d_position = bst_device_tensor(&s[2], i32, 2, (int64_t[]){n / 4, 4});
            DLTensor *d_ends = bst_device_tensor(&s[3], i32, 1, &e);
            DLTensor *d_hidden = bst_device_tensor(&s[4], type, 2, (int64_t[]){n / 4, width});
            DLTensor *d_weights = bst_device_tensor(&s[5], type, 2, (int64_t[]){n / 4, 4});
            DLTensor *d_rows = bst_device_tensor(&s[6], type, 2, (int64_t[]){n, width});
            DLTensor *d_out = bst_device_tensor(&s[7], type, 2, (int64_t[]){n / 4, width});
            DLTensor *d_h = bst_device_tensor(&s[8], type, 2, (int64_t[]){n, 2 * width});
            DLTensor *d_dh = bst_device_tensor(&s[9], type, 2, (int64_t[]){n, 2 * width});
            DLTensor *d_gub = bst_device_tensor(&s[10], type, 2, (int64_t[]){e, 2 * width});
            DLTensor *d_db = bst_device_tensor(&s[11], type, 2, (int64_t[]){e, width});
            DLTensor *d_dots = bst_device_tensor(&s[12], bst_test_types[0], 1, &n);
            DLTensor *d_wy = bst_device_tensor(&s[13], type, 2, (int64_t[]){n, width});
            DLTensor *d_dweights = bst_device_tensor(&s[14], type, 2, (int64_t[]){n / 4, 4});
            DLTensor *d_dgub = bst_device_tensor(&s[15], type, 2, (int64_t[]){e, 2 * width});
            DLTensor *d_ddb = bst_device_tensor(&s[16], type, 2, (int64_t[]){e, width});
            const bst_exec *exec = &bst_fake_exec;
            if (width != 2880) { /* and h and dh between two pairs */
                d_h->data = (char *)d_h->data + type.bits / 8;
                d_dh->data = (char *)d_dh->data + type.bits / 8;
            }
            CHECK_OK(bst_moe_sort(exec, d_indices, d_order, d_position, d_ends));
            CHECK_OK(bst_moe_gather(exec, d_hidden, d_order, d_rows)); /* of any order */
            for (int of_y = 0; of_y < 3; of_y++) {
                bst_shape turned[2];
                DLTensor *d_x = bst_device_tensor(&turned[0], type, 3, (int64_t[]){1, n, width});
                DLTensor *d_y = bst_device_tensor(&turned[1], bst_test_types[of_y], 3, (int64_t[]){width, 1, n});
                CHECK_OK(bst_moe_transpose(exec, d_x, d_y));
            }
            CHECK_OK(bst_moe_glu_forward(exec, d_h, d_gub, d_ends, &oai, d_rows));
            CHECK_OK(bst_moe_combine_forward(exec, d_rows, d_position, d_weights, d_db, d_indices, d_out));
            CHECK_OK(bst_moe_combine_forward(exec, d_rows, d_position, NULL, NULL, NULL, d_out));
            for (int frozen = 0; frozen < 2; frozen++) {
                CHECK_OK(bst_moe_combine_backward(exec, d_out, d_order, d_ends, d_weights, d_db, d_rows, d_dots,
                                                  frozen ? NULL : d_ddb));
                CHECK_OK(moe_glu_backward(exec, d_rows, d_h, d_gub, d_ends, d_order, d_weights, d_dots, &oai, d_dh,
                                          frozen ? NULL : d_wy, d_dweights, frozen ? NULL : d_dgub));
            }
            /* SwiGLU of halves, as most have it. */
            CHECK_OK(bst_moe_glu_forward(exec, d_h, NULL, d_ends, NULL, d_rows));
            for (int frozen = 0; frozen < 2; frozen++)
                CHECK_OK(moe_glu_backward(exec, d_rows, d_h, NULL, d_ends, d_order, d_weights, NULL, NULL, d_dh,
                                          frozen ? NULL : d_wy, d_dweights, NULL));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("moe", compile_calls); }

int main(void) {
    RUN(sorts_by_expert_and_keeps_the_order);
    RUN(forward);
    RUN(backward);
    RUN(backward_in_place);
    RUN(every_unit_in_either_layout);
    RUN(h_may_begin_between_pairs);
    RUN(index_tensors_are_not_believed);
    RUN(without_biases_and_weights);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
