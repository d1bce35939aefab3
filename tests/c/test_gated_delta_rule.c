/* test_gated_delta_rule.c - the gated delta rule through the C API: values and gradients against its definition, a
 * token at a time in double; states; errors; its kernels on every chip. */
#include <math.h>

#include "chips.h"

/* Three chunks, the last with a few tokens; two heads of values for each of keys; sizes that fill no tile. */
enum { B = 2, T = 135, H = 1, N = 2, K = 19, V = 21 };

static int64_t of_keys[] = {B, T, H, K}, of_values[] = {B, T, N, V}, of_numbers[] = {B, T, N},
               of_states[] = {B, N, K, V}, of_heads[] = {N};

typedef struct numbers {
    float q[B][T][H][K], k[B][T][H][K], v[B][T][N][V], g[B][T][N], beta[B][T][N], initial[B][N][K][V], skip[N];
} numbers;

static numbers in, gradient;
static float y[B][T][N][V], final[B][N][K][V], dy[B][T][N][V], dfinal[B][N][K][V];

static void fill(void) {
    bst_fill(&in.q[0][0][0][0], B * T * H * K, 1, 1);
    bst_fill(&in.k[0][0][0][0], B * T * H * K, 2, 1);
    bst_fill(&in.v[0][0][0][0], B * T * N * V, 3, 1);
    bst_fill(&in.g[0][0][0], B * T * N, 4, 0.5f);
    bst_fill(&in.beta[0][0][0], B * T * N, 5, 0.5f);
    bst_fill(&in.initial[0][0][0][0], B * N * K * V, 6, 1);
    bst_fill(in.skip, N, 9, 1);
    bst_fill(&dy[0][0][0][0], B * T * N * V, 7, 1);
    bst_fill(&dfinal[0][0][0][0], B * N * K * V, 8, 1);
    for (int i = 0; i < B * T * N; i++) {
        (&in.g[0][0][0])[i] -= 0.5f;
        (&in.beta[0][0][0])[i] += 0.5f;
    }
}

/* The rule, the same of keys of any length, and Mamba-2's, with a skip. */
static const bst_gated_delta_rule_options variants[] = {
    {sizeof *variants, .normalize = 1}, {sizeof *variants}, {sizeof *variants, .scale = 0.5, .additive = 1}};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* The sum of all results, each times its upstream gradient: its derivatives are the gradients. */
static double weighted(const numbers *n, const bst_gated_delta_rule_options *options) {
    static double s[K][V];
    double sum = 0, scale = options->scale != 0 ? options->scale : 1 / sqrt(K);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < N; h++) {
            for (int i = 0; i < K; i++)
                for (int j = 0; j < V; j++) s[i][j] = n->initial[b][h][i][j];
            for (int t = 0; t < T; t++) {
                double of_q = 0, of_k = 0, q[K], k[K];
                for (int i = 0; i < K; i++) {
                    q[i] = n->q[b][t][h / (N / H)][i], k[i] = n->k[b][t][h / (N / H)][i];
                    of_q += q[i] * q[i], of_k += k[i] * k[i];
                }
                for (int i = 0; i < K && options->normalize; i++) q[i] /= sqrt(of_q + 1e-6), k[i] /= sqrt(of_k + 1e-6);
                for (int j = 0; j < V; j++) {
                    double seen = 0, read = 0, v = n->v[b][t][h][j];
                    for (int i = 0; i < K; i++) seen += (s[i][j] *= exp(n->g[b][t][h])) * k[i];
                    if (options->additive) seen = 0, read = (double)n->skip[h] * v;
                    for (int i = 0; i < K; i++) {
                        s[i][j] += (double)n->beta[b][t][h] * k[i] * (v - seen);
                        read += s[i][j] * q[i] * scale;
                    }
                    sum += read * (double)dy[b][t][h][j];
                    if (n == &in) CHECK_CLOSE(y[b][t][h][j], read, 1e-5);
                }
            }
            for (int i = 0; i < K; i++)
                for (int j = 0; j < V; j++) {
                    sum += s[i][j] * (double)dfinal[b][h][i][j];
                    if (n == &in) CHECK_CLOSE(final[b][h][i][j], s[i][j], 1e-5);
                }
        }
    return sum;
}

typedef struct tensors {
    DLTensor q, k, v, g, beta, initial, skip;
} tensors;

static tensors tensors_of(numbers *n) {
    return (tensors){bst_f32(n->q, 4, of_keys),    bst_f32(n->k, 4, of_keys),       bst_f32(n->v, 4, of_values),
                     bst_f32(n->g, 3, of_numbers), bst_f32(n->beta, 3, of_numbers), bst_f32(n->initial, 4, of_states),
                     bst_f32(n->skip, 1, of_heads)};
}

/* Central differences of some elements of an input. */
static void check_gradients(float *x, const float *of_x, int64_t count, const bst_gated_delta_rule_options *options) {
    static numbers near;
    const float step = 1.0f / 256;
    float *moved = (float *)((char *)&near + ((char *)x - (char *)&in));
    for (int64_t i = count > 3 ? 3 : 0; i < count; i += count > 7 ? count / 7 : 1) {
        near = in;
        moved[i] = x[i] + step;
        double above = weighted(&near, options);
        moved[i] = x[i] - step;
        CHECK_CLOSE(of_x[i], (above - weighted(&near, options)) / (2 * (double)step), 2e-3);
    }
}

TEST(values_and_gradients) {
    fill();
    for (int i = 0; i < VARIANTS; i++) {
        const bst_gated_delta_rule_options *options = &variants[i];
        tensors t = tensors_of(&in), d = tensors_of(&gradient);
        DLTensor ty = bst_f32(y, 4, of_values), tf = bst_f32(final, 4, of_states);
        DLTensor tdy = bst_f32(dy, 4, of_values), tdf = bst_f32(dfinal, 4, of_states);
        DLTensor *skip = options->additive ? &t.skip : NULL;
        if (i == 1) /* longer keys would make states that grow without end */
            for (int e = 0; e < B * T * H * K; e++) (&in.k[0][0][0][0])[e] *= 0.25f;
        bst_gated_delta_rule_tensors given = {sizeof given, &t.q, &t.k,       &t.v, &t.g,
                                              &t.beta,      skip, &t.initial, &ty,  &tf};
        CHECK_OK(bst_gated_delta_rule_forward(NULL, &given, options));
        weighted(&in, options);
        given = (bst_gated_delta_rule_tensors){sizeof given,
                                               &t.q,
                                               &t.k,
                                               &t.v,
                                               &t.g,
                                               &t.beta,
                                               skip,
                                               &t.initial,
                                               .dy = &tdy,
                                               .dfinal = &tdf,
                                               .dq = &d.q,
                                               .dk = &d.k,
                                               .dv = &d.v,
                                               .dg = &d.g,
                                               .dbeta = &d.beta,
                                               .dskip = skip ? &d.skip : NULL,
                                               .dinitial = &d.initial};
        CHECK_OK(bst_gated_delta_rule_backward(NULL, &given, options));
        check_gradients(&in.q[0][0][0][0], &gradient.q[0][0][0][0], B * T * H * K, options);
        check_gradients(&in.k[0][0][0][0], &gradient.k[0][0][0][0], B * T * H * K, options);
        check_gradients(&in.v[0][0][0][0], &gradient.v[0][0][0][0], B * T * N * V, options);
        check_gradients(&in.g[0][0][0], &gradient.g[0][0][0], B * T * N, options);
        check_gradients(&in.beta[0][0][0], &gradient.beta[0][0][0], B * T * N, options);
        check_gradients(&in.initial[0][0][0][0], &gradient.initial[0][0][0][0], B * N * K * V, options);
        if (skip) check_gradients(in.skip, gradient.skip, N, options);
    }
}

/* A call ends where the next one begins, whose chunks then lie elsewhere. */
TEST(states_are_handed_on) {
    static float first[B][50][N][V], second[B][T - 50][N][V], between[B][N][K][V], last[B][N][K][V];
    bst_gated_delta_rule_options options = {sizeof options, .normalize = 1};
    int64_t strides[3][4] = {{T * H * K, H * K, K, 1}, {T * N * V, N * V, V, 1}, {T * N, N, 1}};
    fill();
    tensors t = tensors_of(&in);
    DLTensor ty = bst_f32(y, 4, of_values), tf = bst_f32(final, 4, of_states);
    bst_gated_delta_rule_tensors given = {sizeof given, &t.q, &t.k, &t.v, &t.g, &t.beta, NULL, &t.initial, &ty, &tf};
    CHECK_OK(bst_gated_delta_rule_forward(NULL, &given, &options));
    for (int half = 0; half < 2; half++) {
        int64_t tokens = half ? T - 50 : 50, begin = half ? 50 : 0;
        int64_t keys[] = {B, tokens, H, K}, values[] = {B, tokens, N, V}, numbers_of[] = {B, tokens, N};
        DLTensor q = bst_tensor(&in.q[0][begin], 4, keys, strides[0], bst_test_types[0]), k = q, v = q, g = q, beta;
        k.data = &in.k[0][begin];
        v = bst_tensor(&in.v[0][begin], 4, values, strides[1], bst_test_types[0]);
        g = bst_tensor(&in.g[0][begin], 3, numbers_of, strides[2], bst_test_types[0]), beta = g;
        beta.data = &in.beta[0][begin];
        DLTensor state = bst_f32(between, 4, of_states), end = bst_f32(last, 4, of_states);
        DLTensor out = bst_f32(half ? (void *)second : (void *)first, 4, values);
        bst_gated_delta_rule_tensors part = {
            sizeof part, &q, &k, &v, &g, &beta, NULL, half ? &state : &t.initial, &out, half ? &end : &state};
        CHECK_OK(bst_gated_delta_rule_forward(NULL, &part, &options));
    }
    for (int i = 0; i < B * N * K * V; i++) CHECK_CLOSE((&last[0][0][0][0])[i], (&final[0][0][0][0])[i], 1e-6);
    for (int b = 0; b < B; b++)
        for (int i = 0; i < N * V; i++) {
            CHECK_CLOSE((&first[b][49][0][0])[i], (&y[b][49][0][0])[i], 1e-6);
            CHECK_CLOSE((&second[b][T - 51][0][0])[i], (&y[b][T - 1][0][0])[i], 1e-6);
        }
}

/* All of `in` as one row of B T tokens, or a part of it; what a call of it writes. */
typedef struct written {
    float y[B * T][N][V], dq[B * T][H][K], dk[B * T][H][K], dv[B * T][N][V], dg[B * T][N], dbeta[B * T][N], dskip[N];
} written;

static bst_status call_row(int64_t first, int64_t tokens, int32_t *boundaries, int64_t sequences,
                           const bst_gated_delta_rule_options *options, written *to) {
    int64_t keys[] = {1, tokens, H, K}, values[] = {1, tokens, N, V}, some[] = {1, tokens, N}, ends[] = {sequences + 1};
    DLTensor q = bst_f32((*in.q)[first], 4, keys), k = bst_f32((*in.k)[first], 4, keys);
    DLTensor v = bst_f32((*in.v)[first], 4, values), g = bst_f32((*in.g)[first], 3, some);
    DLTensor beta = bst_f32((*in.beta)[first], 3, some), skip = bst_f32(in.skip, 1, of_heads);
    DLTensor ty = bst_f32(to->y[first], 4, values), tdy = bst_f32((*dy)[first], 4, values);
    DLTensor dq = bst_f32(to->dq[first], 4, keys), dk = bst_f32(to->dk[first], 4, keys);
    DLTensor dv = bst_f32(to->dv[first], 4, values), dg = bst_f32(to->dg[first], 3, some);
    DLTensor dbeta = bst_f32(to->dbeta[first], 3, some), dskip = bst_f32(to->dskip, 1, of_heads);
    DLTensor cu_seqlens = bst_tensor(boundaries, 1, ends, NULL, (DLDataType){kDLInt, 32, 1});
    bst_gated_delta_rule_tensors given = {
        sizeof given, &q, &k, &v, &g, &beta, &skip, .y = &ty, .cu_seqlens = boundaries ? &cu_seqlens : NULL};
    bst_status status = bst_gated_delta_rule_forward(NULL, &given, options);
    if (status != BST_OK) return status;
    given.y = NULL, given.dy = &tdy;
    given.dq = &dq, given.dk = &dk, given.dv = &dv, given.dg = &dg, given.dbeta = &dbeta, given.dskip = &dskip;
    return bst_gated_delta_rule_backward(NULL, &given, options);
}

/* Its results are those of a call for each sequence: the same bits, for each has the chunks that it has there. */
static void check_packed(int32_t *boundaries, int64_t sequences, const bst_gated_delta_rule_options *options) {
    static written packed, alone;
    float dskip[N] = {0};
    memset(&packed, 0xff, sizeof packed), memset(&alone, 0xff, sizeof alone);
    CHECK_OK(call_row(0, boundaries[sequences], boundaries, sequences, options, &packed));
    for (int64_t i = 0; i < sequences; i++) {
        CHECK_OK(call_row(boundaries[i], boundaries[i + 1] - boundaries[i], NULL, 0, options, &alone));
        for (int n = 0; n < N; n++) dskip[n] += alone.dskip[n];
    }
    CHECK(!memcmp(packed.y, alone.y, sizeof alone.y));
    CHECK(!memcmp(packed.dq, alone.dq, sizeof alone.dq) && !memcmp(packed.dk, alone.dk, sizeof alone.dk));
    CHECK(!memcmp(packed.dv, alone.dv, sizeof alone.dv) && !memcmp(packed.dg, alone.dg, sizeof alone.dg));
    CHECK(!memcmp(packed.dbeta, alone.dbeta, sizeof alone.dbeta));
    for (int n = 0; n < N; n++) CHECK_CLOSE(packed.dskip[n], dskip[n], 1e-5);
}

TEST(sequences_of_a_packed_row) {
    fill();
    const bool slow = bst_test_device.device_type == kDLCUDA; /* emulated: seconds for each chunk */
    /* None, shorter than a chunk, a chunk, a token more, a token, two chunks; empty ones at the end, as of a list that
     * was rounded up. Then more than a warp looks for at once. */
    int32_t all[] = {0, 0, 5, 5, 69, 134, 135, 263, 263, 263}, some[] = {0, 0, 5, 70, 70}, many[45] = {0},
            one[] = {0, 70};
    for (int i = 1; i < 45; i++) many[i] = many[i - 1] + (slow ? 9 * (i == 2) + 70 * (i == 37) : i * 7 % 13);
    for (int i = 0; i < VARIANTS; i++) {
        if (i == 1)
            for (int e = 0; e < B * T * H * K; e++) (&in.k[0][0][0][0])[e] *= 0.25f;
        if (!slow) check_packed(all, 9, &variants[i]);
        if (!slow) check_packed(one, 1, &variants[i]);
        if (!slow || i != 1) check_packed(some, 4, &variants[i]);
        if (!slow || i == 1) check_packed(many, 44, &variants[i]);
    }
}

/* Boundaries that are none. On a GPU nobody looks at them before they are used: the call ends, and no access is out of
 * bounds. On CPU they are refused. */
TEST(boundaries_that_are_wrong) {
    static written to, before;
    enum { END = 70 };
    const struct {
        int32_t at[5];
        const char *said;
    } wrong[] = {{{1, 5, 6, 65, END}, "cu_seqlens begins with 1; 0 is needed"},
                 {{0, 66, 6, 66, END}, "cu_seqlens has 6 behind 66; numbers that do not fall are needed"},
                 {{0, 5, 6, 66, END - 1}, "cu_seqlens ends with 69; 70 is needed"},
                 {{-1, 5, 6, 65, END}, "cu_seqlens begins with -1; 0 is needed"},
                 {{0, 5, END + 1, END + 65, END + 65}, "cu_seqlens ends with 135; 70 is needed"},
                 {{INT32_MAX, INT32_MIN, INT32_MAX, -64, INT32_MAX}, "cu_seqlens begins with 2147483647; 0 is needed"},
                 {{60, 0, 60, 0, 60}, "cu_seqlens begins with 60; 0 is needed"}};
    fill();
    for (size_t i = bst_test_device.device_type == kDLCPU ? 0 : 4; i < sizeof wrong / sizeof *wrong; i++) {
        int32_t at[5];
        memcpy(at, wrong[i].at, sizeof at);
        memset(&to, 0xff, sizeof to), before = to;
        bst_status status = call_row(0, END, at, 4, &variants[0], &to);
        CHECK_EQ_I(status, bst_test_device.device_type == kDLCPU ? BST_INVALID : BST_OK);
        if (status == BST_OK) continue;
        CHECK_STR(bst_last_error(), wrong[i].said);
        CHECK(!memcmp(&to, &before, sizeof to));
    }
}

/* No tokens: the state is what it was. */
TEST(nothing_to_do) {
    fill();
    int64_t keys[] = {B, 0, H, K}, values[] = {B, 0, N, V}, none[] = {B, 0, N};
    DLTensor q = bst_f32(NULL, 4, keys), v = bst_f32(NULL, 4, values), g = bst_f32(NULL, 3, none);
    DLTensor initial = bst_f32(in.initial, 4, of_states), tf = bst_f32(final, 4, of_states);
    bst_gated_delta_rule_tensors given = {sizeof given, &q, &q, &v, &g, &g, NULL, &initial, &v, &tf};
    CHECK_OK(bst_gated_delta_rule_forward(NULL, &given, NULL));
    CHECK(!memcmp(final, in.initial, sizeof final));
    given = (bst_gated_delta_rule_tensors){
        sizeof given,       &q,       &q,       &v,       &g,       &g,          .initial = &initial, .dy = &v,
        .dfinal = &initial, .dq = &q, .dk = &q, .dv = &v, .dg = &g, .dbeta = &g, .dinitial = &tf};
    memset(final, 0, sizeof final);
    CHECK_OK(bst_gated_delta_rule_backward(NULL, &given, NULL));
    CHECK(!memcmp(final, in.initial, sizeof final));
    /* Nor does a packed row of none have anything. */
    static written to;
    int32_t boundaries[] = {0, 0, 0};
    CHECK_OK(call_row(0, 0, boundaries, 2, NULL, &to));
    for (int n = 0; n < N; n++) CHECK(to.dskip[n] == 0);
}

TEST(errors_name_the_argument_and_write_nothing) {
    fill();
    memset(y, 0, sizeof y);
    tensors t = tensors_of(&in);
    DLTensor ty = bst_f32(y, 4, of_values), other = t.q, wide = t.q;
    bst_gated_delta_rule_tensors given = {sizeof given, &t.q, &t.k, &t.v, &t.g, &t.beta, .y = &ty};
    int64_t few[] = {B, T, H, K - 1}, many[] = {B, T, N, 257}, three[] = {B, T, 3, K};
    bst_gated_delta_rule_options below = {sizeof below, .eps = -1};
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, &below), BST_INVALID);
    CHECK_STR(bst_last_error(), "gated_delta_rule_forward: eps is -1; a finite number, 0 or above, is needed");
    other.shape = few;
    given.k = &other;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "gated_delta_rule_forward: k has shape [2, 135, 1, 18]");
    given.k = &t.k;
    wide = t.v, wide.shape = many;
    given.v = &wide;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "gated_delta_rule_forward: v has heads of 257 elements; 1 to 256 are supported");
    wide = t.q, wide.shape = three;
    given.v = &t.v, given.q = &wide, given.k = &wide;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "gated_delta_rule_forward: v has 2 heads and q 3; a multiple is needed");
    int32_t boundaries[] = {0, T};
    int64_t two = 2, single = 1;
    DLTensor cu_seqlens = bst_tensor(boundaries, 1, &two, NULL, (DLDataType){kDLInt, 32, 1}), state = t.initial;
    given.q = &t.q, given.k = &t.k, given.cu_seqlens = &cu_seqlens;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "cu_seqlens is given and q has 2 rows; one, of all sequences, is needed");
    of_keys[0] = of_values[0] = of_numbers[0] = of_states[0] = 1;
    cu_seqlens.shape = &single;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "cu_seqlens has 1 elements; two or more, 0 first, are needed");
    cu_seqlens.shape = &two;
    given.initial = &t.initial;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "cu_seqlens and initial are given; one of them alone is supported");
    given.initial = NULL, state.data = final, given.final = &state;
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "cu_seqlens and final are given; one of them alone is supported");
    cu_seqlens = bst_tensor(boundaries, 1, &single, NULL, bst_test_i64);
    CHECK_EQ_I(bst_gated_delta_rule_forward(NULL, &given, NULL), BST_UNSUPPORTED);
    CHECK_STR(bst_last_error(), "cu_seqlens has elements of type int64");
    of_keys[0] = of_values[0] = of_numbers[0] = of_states[0] = B;
    for (int i = 0; i < B * T * N * V; i++) CHECK((&y[0][0][0][0])[i] == 0);
}

/* Heads of Qwen3.5 in each type, of OLMo-Hybrid, of Mamba-2, and sizes and strides that need narrow accesses; rows of
 * one sequence, and packed ones (odd calls). float16 takes the kernels of bfloat16 but for the conversions. Of float32
 * the widest do not fit smaller chips, which must be said and nothing else. */
static void compile_calls(void) {
    static const int64_t sizes[][2] = {{128, 128}, {96, 192}, {19, 21}, {128, 64}};
    static const size_t calls[][2] = {{0, 5}, {2, 3}, {3, 4}, {2, 4}}; /* two of each type */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t call = calls[i][0]; call < calls[i][1]; call++) {
            size_t type = call / 2;
            bst_shape s[18];
            int64_t keys[] = {1, 256, 2, sizes[i][0]}, values[] = {1, 256, 4, sizes[i][1]}, some[] = {1, 256, 4};
            int64_t states[] = {1, 4, sizes[i][0], sizes[i][1]}, ends[] = {9};
            DLDataType of = bst_test_types[type], f32 = bst_test_types[0];
            DLTensor *q = bst_device_tensor(&s[0], of, 4, keys), *k = bst_device_tensor(&s[1], of, 4, keys);
            DLTensor *v = bst_device_tensor(&s[2], of, 4, values), *g = bst_device_tensor(&s[3], f32, 3, some);
            DLTensor *beta = bst_device_tensor(&s[4], of, 3, some), *to = bst_device_tensor(&s[5], of, 4, values);
            DLTensor *state = bst_device_tensor(&s[6], f32, 4, states), *end = bst_device_tensor(&s[7], f32, 4, states);
            bst_gated_delta_rule_options options = {sizeof options, .additive = i == 3, .normalize = i < 2};
            DLTensor *skip = i == 3 ? bst_device_tensor(&s[13], of, 1, &values[2]) : NULL;
            DLTensor *dskip = skip ? bst_device_tensor(&s[14], of, 1, &values[2]) : NULL;
            DLTensor *cu_seqlens = call % 2 ? bst_device_tensor(&s[15], (DLDataType){kDLInt, 32, 1}, 1, ends) : NULL;
            bst_gated_delta_rule_tensors given = {sizeof given, q, k, v, g, beta, skip, state, to, end};
            if (cu_seqlens) given.initial = NULL, given.final = NULL, given.cu_seqlens = cu_seqlens;
            bst_status result = bst_gated_delta_rule_forward(&bst_fake_exec, &given, &options);
            if (type) CHECK_OK(result);
            given = (bst_gated_delta_rule_tensors){sizeof given,
                                                   q,
                                                   k,
                                                   v,
                                                   g,
                                                   beta,
                                                   skip,
                                                   .dskip = dskip,
                                                   .dy = to,
                                                   .dq = bst_device_tensor(&s[8], of, 4, keys),
                                                   .dk = bst_device_tensor(&s[9], of, 4, keys),
                                                   .dv = bst_device_tensor(&s[10], of, 4, values),
                                                   .dg = bst_device_tensor(&s[11], f32, 3, some),
                                                   .dbeta = bst_device_tensor(&s[12], of, 3, some),
                                                   .cu_seqlens = cu_seqlens};
            result = bst_gated_delta_rule_backward(&bst_fake_exec, &given, &options);
            if (type) CHECK_OK(result);
            if (result != BST_OK) CHECK_STR(bst_last_error(), "take more shared memory than this GPU has");
        }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("gated_delta_rule", compile_calls); }

int main(void) {
    RUN(values_and_gradients);
    RUN(states_are_handed_on);
    RUN(sequences_of_a_packed_row);
    RUN(boundaries_that_are_wrong);
    RUN(nothing_to_do);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
