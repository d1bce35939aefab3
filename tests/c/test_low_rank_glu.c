/* test_low_rank_glu.c - a gated unit's backward pass with adapters around it, through the C API: dgate, dup and y as
 * glu_backward has them, to the bit, and products of these against float64; errors; its kernels on every chip. */
#include "chips.h"
#include "matrices.h"

static float dys[MOST], gates[MOST], ups[MOST], thins[MOST], b_gates[MOST], b_ups[MOST], g_downs[MOST], a_downs[MOST];
static float dgates[MOST], dups[MOST], ys[MOST], gs[MOST], db_gates[MOST], db_ups[MOST], da_downs[MOST],
    thin_downs[MOST];
static float want_dgates[MOST], want_dups[MOST], want_ys[MOST];
static float *const results[] = {dgates, dups, ys, gs, db_gates, db_ups, da_downs, thin_downs};
static float firsts[8][MOST];

typedef struct shape {
    int64_t rows, columns, rank;
    int type;
    int64_t gap, at; /* between rows, and before the first */
    bool down, late, with_y, in_place;
    bst_glu_options options;
} shape;

static void check(const shape *given) {
    shape own = *given, *const s = &own;
    own.options.size = sizeof own.options;
    const int64_t rows = s->rows, columns = s->columns, rank = s->rank;
    matrix dy = filled(dys, rows, columns, s->gap, s->at, s->type, 3);
    matrix gate = filled(gates, rows, columns, s->gap, s->at, s->type, 4);
    matrix up = filled(ups, rows, columns, s->gap, s->at, s->type, 5);
    matrix thin = filled(thins, rows, 2 * rank, s->gap, s->at, s->type, 6);
    matrix b_gate = filled(b_gates, columns, rank, 0, s->at, s->type, 7);
    matrix b_up = filled(b_ups, columns, rank, 0, s->at, s->type, 8);
    matrix g_down = filled(g_downs, rows, rank, s->gap, s->at, s->type, 9);
    matrix a_down = filled(a_downs, rank, columns, 0, s->at, s->type, 10);
    matrix dgate = filled(dgates, rows, columns, s->gap, s->at, s->type, 0);
    matrix dup = filled(dups, rows, columns, s->gap, s->at, s->type, 0);
    matrix y = filled(ys, rows, columns, s->gap, s->at, s->type, 0);
    matrix g = filled(gs, rows, 2 * rank, s->gap, s->at, s->type, 0);
    matrix db_gate = filled(db_gates, columns, rank, 0, s->at, 0, 0),
           db_up = filled(db_ups, columns, rank, 0, s->at, 0, 0);
    matrix da_down = filled(da_downs, rank, columns, 0, s->at, 0, 0);
    matrix thin_down = filled(thin_downs, rows, rank, s->gap, s->at, s->type, 0);
    matrix want_dgate = filled(want_dgates, rows, columns, s->gap, s->at, s->type, 0);
    matrix want_dup = filled(want_dups, rows, columns, s->gap, s->at, s->type, 0);
    matrix want_y = filled(want_ys, rows, columns, s->gap, s->at, s->type, 0);
    DLTensor t_dy = tensor_of(&dy), t_gate = tensor_of(&gate), t_up = tensor_of(&up), t_thin = tensor_of(&thin);
    DLTensor t_b_gate = tensor_of(&b_gate), t_b_up = tensor_of(&b_up), t_g_down = tensor_of(&g_down);
    DLTensor t_a_down = tensor_of(&a_down), t_dgate = tensor_of(&dgate), t_dup = tensor_of(&dup), t_y = tensor_of(&y);
    DLTensor t_g = tensor_of(&g), t_db_gate = tensor_of(&db_gate), t_db_up = tensor_of(&db_up);
    DLTensor t_da_down = tensor_of(&da_down), t_thin_down = tensor_of(&thin_down);
    DLTensor wants[] = {tensor_of(&want_dgate), tensor_of(&want_dup), tensor_of(&want_y)};
    CHECK_OK(bst_glu_backward(NULL, &t_dy, &t_gate, &t_up, &s->options, &wants[0], &wants[1], &wants[2]));
    bst_low_rank_glu_tensors t = {
        .size = sizeof t,
        .dy = &t_dy,
        .gate = &t_gate,
        .up = &t_up,
        .thin = &t_thin,
        .b_gate = &t_b_gate,
        .b_up = &t_b_up,
        .g_down = s->down ? &t_g_down : NULL,
        .a_down = s->late ? &t_a_down : NULL,
        .dgate = &t_dgate,
        .dup = &t_dup,
        .g = &t_g,
        .db_gate = &t_db_gate,
        .db_up = &t_db_up,
        .da_down = s->down ? &t_da_down : NULL,
        .thin_down = s->late ? &t_thin_down : NULL,
        .y = s->with_y ? &t_y : NULL,
    };
    for (int again = 0; again < 2; again++) {
        CHECK_OK(bst_low_rank_glu_backward(NULL, &t, 0.75, -1.5, &s->options));
        for (int i = 0; i < 8; i++) {
            if (again) CHECK(!memcmp(firsts[i], results[i], sizeof firsts[i]));
            memcpy(firsts[i], results[i], sizeof firsts[i]);
        }
    }
    /* The gaps too: nothing is written there. */
    CHECK(!memcmp(dgates, want_dgates, sizeof dgates) && !memcmp(dups, want_dups, sizeof dups));
    if (s->with_y) CHECK(!memcmp(ys, want_ys, sizeof ys));
    matrix thin_gate = part_of(&thin, 0, rank), thin_up = part_of(&thin, rank, rank);
    matrix g_gate = part_of(&g, 0, rank), g_up = part_of(&g, rank, rank);
    matrix gate_across = transposed(&want_dgate), up_across = transposed(&want_dup);
    matrix g_across = transposed(&g_down), a_across = transposed(&a_down);
    compare("g of gate", &g_gate, &want_dgate, &b_gate, 0.75);
    compare("g of up", &g_up, &want_dup, &b_up, -1.5);
    compare("db_gate", &db_gate, &gate_across, &thin_gate, 0.75);
    compare("db_up", &db_up, &up_across, &thin_up, -1.5);
    if (s->down) compare("da_down", &da_down, &g_across, &want_y, 1);
    if (s->late) compare("thin_down", &thin_down, &want_y, &a_across, 1);
    int64_t beside = 0, size = s->type ? 2 : 4;
    for (int64_t i = 0; i < s->at + rows * g.strides[0]; i++)
        if (i < s->at || (i - s->at) % g.strides[0] >= 2 * rank)
            beside += memcmp((char *)gs + i * size, "\xff\xff\xff\xff", 2) != 0;
    CHECK_EQ_I(beside, 0);
    if (!s->in_place) return;
    t.dgate = &t_gate, t.dup = &t_up, t.y = s->with_y ? &t_dy : NULL;
    CHECK_OK(bst_low_rank_glu_backward(NULL, &t, 0.75, -1.5, &s->options));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            CHECK(number(&gate, r, c) == number(&want_dgate, r, c) && number(&up, r, c) == number(&want_dup, r, c));
            if (s->with_y) CHECK(number(&dy, r, c) == number(&want_y, r, c));
        }
    for (int i = 3; i < 8; i++) CHECK(!memcmp(firsts[i], results[i], sizeof firsts[i]));
}

/* Less than a tile and more than one of rows and columns; each rank; what is wanted of the layer behind; units. Between
 * rows is NaN. */
TEST(what_the_kernel_serves) {
    for (int type = 1; type < 3; type++) {
        check(&(shape){37, 40, 16, type, .down = true, .in_place = true});
        check(&(shape){1, 8, 8, type, .late = true, .with_y = true});
        check(&(shape){70, 136, 8, type, .gap = 8, .at = 8, .down = true, .late = true, .in_place = true});
        check(&(shape){100, 264, 24, type, .with_y = true, .in_place = true});
        check(&(shape){65, 520, 32, type, .gap = 16, .down = true, .late = true, .with_y = true});
        check(&(shape){130, 600, 16, type, .down = true, .late = true});
        check(&(shape){400, 264, 32, type, .down = true, .late = true}); /* a block with several tiles of rows */
    }
    for (int activation = BST_SILU; activation <= BST_SWIGLU_OAI; activation++) {
        shape s = {40, 72, 16, 1, .down = true, .with_y = true};
        s.options =
            (bst_glu_options){.size = sizeof s.options, .activation = (bst_activation)activation, .limit = 1.25};
        check(&s);
    }
}

/* float32; ranks and columns that are no multiple of eight; rows and addresses that are not aligned; many ranks. */
TEST(what_products_do) {
    for (int type = 0; type < 3; type++) {
        check(&(shape){37, 40, 5, type, .down = true, .late = true, .with_y = true, .in_place = true});
        check(&(shape){37, 39, 16, type, .down = true, .late = true});
        check(&(shape){20, 40, 16, type, .gap = 3, .with_y = true});
        check(&(shape){20, 40, 16, type, .at = 1, .late = true});
        check(&(shape){33, 72, 40, type, .gap = 8, .down = true});
        check(&(shape){1, 1, 1, type, .down = true, .late = true});
    }
    check(&(shape){50, 136, 16, 0, .gap = 8, .down = true, .late = true, .in_place = true});
}

/* No rows: the adapters' gradients are zero; no columns: g is, and thin_down. */
TEST(nothing_sums_up_to_zero) {
    for (int type = 0; type < 3; type++) {
        check(&(shape){0, 40, 16, type, .down = true, .late = true, .with_y = true});
        check(&(shape){37, 0, 16, type, .gap = 8, .down = true, .late = true});
        check(&(shape){37, 40, 0, type, .down = true, .late = true});
    }
}

TEST(errors_name_the_argument_and_write_nothing) {
    matrix dy = filled(dys, 6, 8, 0, 0, 1, 3), gate = filled(gates, 6, 8, 0, 0, 1, 4);
    matrix thin = filled(thins, 6, 4, 0, 0, 1, 6), b = filled(b_gates, 8, 2, 0, 0, 1, 7),
           odd = filled(ups, 6, 5, 0, 0, 1, 5);
    matrix a_down = filled(a_downs, 2, 8, 0, 0, 1, 10);
    matrix dgate = filled(dgates, 6, 8, 0, 0, 1, 0), dup = filled(dups, 6, 8, 0, 0, 1, 0),
           g = filled(gs, 6, 4, 0, 0, 1, 0);
    matrix db_gate = filled(db_gates, 8, 2, 0, 0, 0, 0), db_up = filled(db_ups, 8, 2, 0, 0, 0, 0);
    DLTensor t_dy = tensor_of(&dy), t_gate = tensor_of(&gate), t_thin = tensor_of(&thin), t_b = tensor_of(&b);
    DLTensor t_odd = tensor_of(&odd), t_a = tensor_of(&a_down), t_dgate = tensor_of(&dgate), t_dup = tensor_of(&dup);
    DLTensor t_g = tensor_of(&g), t_db_gate = tensor_of(&db_gate), t_db_up = tensor_of(&db_up);
    const bst_low_rank_glu_tensors good = {.size = sizeof good,
                                           .dy = &t_dy,
                                           .gate = &t_gate,
                                           .up = &t_gate,
                                           .thin = &t_thin,
                                           .b_gate = &t_b,
                                           .b_up = &t_b,
                                           .dgate = &t_dgate,
                                           .dup = &t_dup,
                                           .g = &t_g,
                                           .db_gate = &t_db_gate,
                                           .db_up = &t_db_up};
    const bst_glu_options pairs = {.size = sizeof pairs, .interleaved = 1};
    bst_low_rank_glu_tensors t;
#define REFUSED(status, options, text, ...)                                 \
    t = good;                                                               \
    __VA_ARGS__;                                                            \
    CHECK_EQ_I(bst_low_rank_glu_backward(NULL, &t, 1, 1, options), status); \
    CHECK_STR(bst_last_error(), "low_rank_glu_backward: " text);            \
    for (int i = 0; i < 48; i++) CHECK(((uint16_t *)dgates)[i] == 0xffff && ((uint16_t *)gs)[i] == 0xffff)
    REFUSED(BST_INVALID, NULL, "dy is NULL", t.dy = NULL);
    REFUSED(BST_INVALID, NULL, "g is NULL", t.g = NULL);
    REFUSED(BST_INVALID, NULL, "b_gate has shape [8, 2]", t.b_gate = t.b_up = &t_b, t.thin = &t_gate);
    REFUSED(BST_INVALID, NULL, "thin has shape [6, 5]; columns of gate", t.thin = t.g = &t_odd);
    REFUSED(BST_INVALID, NULL, "thin_down", t.a_down = &t_a);
    REFUSED(BST_INVALID, NULL, "dup and gate share memory", t.dup = &t_gate);
    REFUSED(BST_INVALID, &pairs, "interleaved is 1");
    CHECK_OK(bst_low_rank_glu_backward(NULL, &good, 1, 1, NULL));
}

/* What models have: each rank, wide and narrow layers, many rows and few. float16 takes the kernels of bfloat16 but for
 * the conversions: one width shows those. */
static void compile_calls(void) {
    const int64_t widths[] = {3072, 12288, 40}, ranks[] = {8, 16, 24, 32, 64};
    for (int type = 1; type < 3; type++)
        for (int w = 0; w < (type == 1 ? 3 : 1); w++)
            for (int r = 0; r < 5; r++)
                for (int kind = 0; kind < (type == 1 ? 4 : 1); kind++) {
                    const int64_t rows = kind % 2 ? 100 : 8192, width = widths[w], rank = ranks[r];
                    const int64_t sizes[][2] = {
                        {rows, width}, {rows, 2 * rank}, {width, rank}, {rows, rank}, {rank, width}};
                    enum { UNIT, THIN, B, G_DOWN, A_DOWN };
                    const int shapes[] = {UNIT, UNIT, UNIT, THIN, B, B, G_DOWN, A_DOWN, THIN, B, B, A_DOWN, G_DOWN};
                    bst_shape s[13];
                    DLTensor *t[13];
                    for (int i = 0; i < 13; i++)
                        t[i] =
                            bst_device_tensor(&s[i], bst_test_types[i < 9 || i == 12 ? type : 0], 2, sizes[shapes[i]]);
                    bst_low_rank_glu_tensors call = {sizeof call, t[0], t[1], t[2], t[3],  t[4],  t[5], t[6], NULL,
                                                     t[1],        t[2], t[8], t[9], t[10], t[11], NULL, NULL};
                    if (kind == 1) call.a_down = t[7], call.thin_down = t[12];
                    if (kind > 1) call.g_down = call.da_down = NULL, call.y = t[0];
                    bst_glu_options options = {.size = sizeof options,
                                               .activation = kind == 3 ? BST_GELU_TANH : BST_SILU};
                    CHECK_OK(bst_low_rank_glu_backward(&bst_fake_exec, &call, 2, 2, &options));
                }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("low_rank_glu", compile_calls); }

int main(void) {
    RUN(what_the_kernel_serves);
    RUN(what_products_do);
    RUN(nothing_sums_up_to_zero);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
