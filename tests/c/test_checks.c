/* test_checks.c - what operators refuse alike: tensors that no memory can hold, outputs that share memory with anything
 * they may not, sizes beyond what a kernel counts. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bastile/torch.h"
#include "chips.h"
#include "moe_calls.h"
#include "rope_calls.h"

enum { T = 70, H = 6, V = 6, E = 2, K = 2, N = T * K };

static const bst_cross_entropy_options mean = {.size = sizeof mean};

/* Every tensor of a test is a piece of this, and no call here may write to it. */
static _Alignas(64) unsigned char arena[1 << 16];
static const unsigned char zeros[sizeof arena];
static size_t used;

static void clear(void) {
    used = 0;
    memset(arena, 0, sizeof arena);
}

/* A new contiguous tensor. */
static bst_shape *make(bst_shape *s, DLDataType type, int dims, int64_t rows, int64_t columns) {
    bst_device_tensor(s, type, dims, (int64_t[]){rows, columns});
    s->tensor.device = bst_test_device;
    s->tensor.data = arena + used;
    used += ((size_t)(rows * (dims > 1 ? columns : 1) * type.bits / 8) + 63) / 64 * 64;
    if (used > sizeof arena) abort();
    return s;
}

static void check_refused(bst_status status, bst_status expected, const char *message) {
    CHECK_EQ_I(status, expected);
    if (status == expected) CHECK_STR(bst_last_error(), message);
    CHECK(!memcmp(arena, zeros, sizeof arena));
    memset(arena, 0, sizeof arena);
}

/* ---- one tensor -------------------------------------------------------------------------------------------------- */

static bst_status half_of(void *data, int dims, int64_t *shape, int64_t *strides, DLDataType type) {
    DLTensor x = bst_tensor(data, dims, shape, strides, type);
    return bst_glu_forward(NULL, &x, &x, NULL, &x);
}

TEST(tensors_that_cannot_be) {
    clear();
    const DLDataType f32 = bst_test_types[0], bf16 = bst_test_types[1];
    int64_t large = (int64_t)1 << 40, huge[] = {large, large}, empty[] = {0, large, large}, late[] = {large, large, 0};
    int64_t rows[] = {2, 4}, far[] = {INT64_MAX / 2, 1}, back[] = {INT64_MIN, 1}, repeated[] = {0, 0};
    const char *message = "glu_forward: a has a shape or strides that 63 bits cannot address";
    check_refused(half_of(arena, 2, huge, NULL, f32), BST_INVALID, message);
    check_refused(half_of(arena, 2, huge, repeated, f32), BST_INVALID, message);
    check_refused(half_of(arena, 3, empty, NULL, f32), BST_INVALID, message);
    check_refused(half_of(arena, 3, late, NULL, f32), BST_INVALID, message);
    check_refused(half_of(arena, 2, rows, far, f32), BST_INVALID, message);
    check_refused(half_of(arena, 2, rows, back, f32), BST_INVALID, message);
    int64_t nine[] = {1, 1, 1, 1, 1, 1, 1, 2, 4};
    check_refused(half_of(arena, 9, nine, NULL, f32), BST_UNSUPPORTED,
                  "glu_forward: a has 9 dimensions; 0 to 8 are supported");
    check_refused(half_of(arena, -1, rows, NULL, f32), BST_INVALID, "a has -1 dimensions");
    check_refused(half_of(arena, 2, NULL, NULL, f32), BST_INVALID, "a has 2 dimensions, but its shape is NULL");
    message = "glu_forward: a does not begin at a multiple of its elements' ";
    check_refused(half_of(arena + 2, 2, rows, NULL, f32), BST_UNSUPPORTED, message);
    check_refused(half_of(arena + 1, 2, rows, NULL, bf16), BST_UNSUPPORTED, message);
}

#ifndef BST_EMULATE /* where each kernel would be compiled first */
/* Frameworks leave any number as the stride of a dimension of one element: it is neither multiplied nor negated. */
TEST(strides_that_say_nothing) {
    clear();
    const int64_t wild[] = {INT64_MIN, INT64_MAX, INT64_MIN + 1, (int64_t)1 << 62};
    for (int i = 0; i < 4; i++) {
        int64_t wild_rows[] = {wild[i], wild[3 - i], 1}, last[] = {2, 1}, wild_last[] = {1, wild[i]};
        /* da and db lie side by side in one buffer's rows, apart from what is read. */
        int64_t two[] = {2, 1, H}, beside[] = {2 * H, wild[i], 1};
        float *at = (float *)(void *)arena;
        DLTensor a = bst_tensor(at, 3, two, NULL, bst_test_types[0]),
                 b = bst_tensor(at + 64, 3, two, NULL, bst_test_types[0]);
        DLTensor da = bst_tensor(at + 128, 3, two, beside, bst_test_types[0]);
        DLTensor db = bst_tensor(at + 128 + H, 3, two, beside, bst_test_types[0]);
        CHECK_OK(bst_glu_backward(NULL, &a, &a, &b, NULL, &da, &db, NULL));
        int64_t head[] = {1, 1, 1, H}, wild_head[] = {wild[i], wild[3 - i], wild[i], 1}, table[] = {1, 1, H};
        DLTensor q = bst_tensor(at, 4, head, wild_head, bst_test_types[0]);
        DLTensor k = bst_tensor(at + 64, 4, head, wild_head, bst_test_types[0]);
        DLTensor c = bst_tensor(at + 128, 3, table, wild_rows, bst_test_types[0]);
        CHECK_OK(rope_forward(NULL, &q, &k, &c, &c, 0, &q, &k));
        DLTensor x = bst_tensor(at, 2, last, wild_last, bst_test_types[0]);
        DLTensor y = bst_tensor(at + 64, 2, last, wild_last, bst_test_types[0]);
        CHECK_OK(bst_norm_forward(NULL, &x, NULL, NULL, NULL, 1e-6, NULL, &y, NULL, NULL, NULL));
    }
}
#endif

/* What this library was not told of, by the names that frameworks give them. */
TEST(types_and_devices_by_name) {
    clear();
    int64_t rows[] = {2, 4};
    const char *need = "; float32, bfloat16 or float16 is needed";
    const struct {
        DLDataType type;
        const char *name;
    } given[] = {{{kDLInt, 16, 1}, "int16"},
                 {{kDLUInt, 8, 1}, "uint8"},
                 {{kDLFloat, 64, 1}, "float64"},
                 {{kDLComplex, 64, 1}, "complex64"},
                 {{kDLBool, 8, 1}, "bool"},
                 {{kDLFloat, 32, 4}, "float32 in vectors of 4"},
                 {{kDLOpaqueHandle, 8, 1}, "no. 3 in DLPack"},
                 {{200, 8, 1}, "no. 200 in DLPack"}};
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        char message[128];
        snprintf(message, sizeof message, "glu_forward: a has elements of type %s%s", given[i].name, need);
        check_refused(half_of(arena, 2, rows, NULL, given[i].type), BST_UNSUPPORTED, message);
    }
    DLTensor metal = bst_tensor(arena, 2, rows, NULL, bst_test_types[0]);
    metal.device.device_type = kDLMetal;
    check_refused(bst_glu_forward(NULL, &metal, &metal, NULL, &metal), BST_UNSUPPORTED,
                  "a is on a device of DLPack type 8");
}

#ifndef BST_EMULATE
/* The variable is read once, so a process for each value. */
TEST(vector_units_by_name) {
    const struct {
        const char *value;
        bst_status status;
    } cases[] = {{"baseline", BST_OK}, {"v3", BST_OK}, {"", BST_OK}, {"avx2", BST_INVALID}, {"V3", BST_INVALID}};
    int64_t rows[] = {2, 4};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pid_t child = fork();
        if (!child) {
            char message[96];
            setenv("BASTILE_CPU", cases[i].value, 1);
            snprintf(message, sizeof message, "norm_forward: BASTILE_CPU is \"%s\"; baseline or v3", cases[i].value);
            DLTensor x = bst_tensor(arena, 2, rows, NULL, bst_test_types[0]);
            DLTensor y = bst_tensor(arena + 64, 2, rows, NULL, bst_test_types[0]);
            bst_status status = bst_norm_forward(NULL, &x, NULL, NULL, NULL, 1, NULL, &y, NULL, NULL, NULL);
            _exit(status == cases[i].status && (status == BST_OK || strstr(bst_last_error(), message)) ? 0 : 1);
        }
        int ended = -1;
        CHECK_EQ_I(waitpid(child, &ended, 0), child);
        CHECK_EQ_I(ended, 0);
    }
}
#endif

/* ---- memory that outputs share ----------------------------------------------------------------------------------- */

#define SHARED(call, message) check_refused((call), BST_INVALID, message)

TEST(norm_outputs_are_apart) {
    clear();
    bst_shape x, w, y, r, s, rs;
    const DLDataType f = bst_test_types[0];
    DLTensor *tx = &make(&x, f, 2, T, H)->tensor, *tw = &make(&w, f, 1, H, 0)->tensor,
             *ty = &make(&y, f, 2, T, H)->tensor, *tr = &make(&r, f, 2, T, H)->tensor,
             *ts = &make(&s, f, 2, T, H)->tensor, *trs = &make(&rs, f, 1, T, 0)->tensor;
    DLTensor weight_in_y = *tw, weight_in_sum = *tw, rstd_in_x = *trs, rstd_in_y = *trs;
    weight_in_y.data = ty->data, weight_in_sum.data = ts->data, rstd_in_x.data = tx->data, rstd_in_y.data = ty->data;
#define FORWARD(w, rstd) bst_norm_forward(NULL, tx, tr, w, NULL, 1e-6, NULL, ty, ts, NULL, rstd)
    SHARED(FORWARD(&weight_in_y, trs), "y and weight share memory");
    SHARED(FORWARD(&weight_in_sum, trs), "sum and weight share memory");
    SHARED(FORWARD(tw, &rstd_in_x), "rstd and x share memory");
    SHARED(FORWARD(tw, &rstd_in_y), "y and rstd share memory");
#define BACKWARD(w, r, dw) \
    bst_norm_backward(NULL, BST_NORM_TENSORS(.dy = tr, .x = tx, .weight = w, .rstd = r, .dx = ty, .dweight = dw), NULL)
    SHARED(BACKWARD(&weight_in_y, trs, NULL), "dx and weight share memory");
    SHARED(BACKWARD(tw, &rstd_in_y, NULL), "dx and rstd share memory");
    SHARED(BACKWARD(tw, trs, &weight_in_y), "dx and dweight share memory");
    SHARED(BACKWARD(tw, trs, tw), "dweight and weight share memory");
#undef FORWARD
#undef BACKWARD
}

TEST(glu_results_have_places_of_their_own) {
    clear();
    bst_shape a, b, d;
    const DLDataType f = bst_test_types[0];
    DLTensor *ta = &make(&a, f, 2, T, H)->tensor, *tb = &make(&b, f, 2, T, H)->tensor,
             *td = &make(&d, f, 2, T, H)->tensor;
    int64_t all_one[] = {0, 1};
    td->strides = all_one; /* an expanded gradient is a fine input, and no place for a result */
    SHARED(bst_glu_backward(NULL, td, ta, tb, NULL, NULL, NULL, td), "rows of y lie over each other");
}

TEST(heads_have_places_of_their_own) {
    clear();
    const DLDataType f = bst_test_types[0];
    int64_t shape[] = {1, 2, T, H}, one[] = {T * H, 0, H, 1}, table[] = {1, T, H}, weight[] = {H}, lots = T * H * 2;
    float *at = (float *)(void *)arena;
    DLTensor q = bst_tensor(at, 4, shape, NULL, f), out = bst_tensor(at + lots, 4, shape, one, f);
    DLTensor c = bst_tensor(at + 2 * lots, 3, table, NULL, f), w = bst_tensor(at + 3 * lots, 1, weight, NULL, f);
    DLTensor whole = bst_tensor(at + lots, 4, shape, NULL, f), w_in_out = bst_tensor(at + lots, 1, weight, NULL, f);
    SHARED(rope_forward(NULL, &q, NULL, &c, &c, 0, &out, NULL), "rows of q_out lie over each other");
    SHARED(normed_forward(NULL, &q, NULL, &w, NULL, &c, &c, 1e-6, BST_CASTING_LLAMA, 0, &out, NULL),
           "rows of q_out lie over each other");
    SHARED(normed_forward(NULL, &q, NULL, &w_in_out, NULL, &c, &c, 1e-6, BST_CASTING_LLAMA, 0, &whole, NULL),
           "q_out and q_weight share memory");
#define BACKWARD(dq, dw) \
    normed_backward(NULL, &q, NULL, &q, NULL, &w, NULL, &c, &c, 1e-6, BST_CASTING_LLAMA, 0, dq, NULL, dw, NULL)
    SHARED(BACKWARD(&out, NULL), "rows of dq lie over each other");
    SHARED(BACKWARD(NULL, &w), "dq_weight and q_weight share memory");
    SHARED(BACKWARD(&whole, &w_in_out), "dq and dq_weight share memory");
#undef BACKWARD
}

TEST(losses_are_apart) {
    clear();
    bst_shape z, t, l, s, d, g, n;
    const DLDataType f = bst_test_types[0];
    DLTensor *tz = &make(&z, f, 2, T, V)->tensor, *tt = &make(&t, bst_test_i64, 1, T, 0)->tensor,
             *tl = &make(&l, f, 1, 1, 0)->tensor, *ts = &make(&s, f, 1, T, 0)->tensor,
             *td = &make(&d, f, 2, T, V)->tensor, *tg = &make(&g, f, 1, 1, 0)->tensor,
             *tn = &make(&n, f, 1, 1, 0)->tensor;
    DLTensor lse_in_logits = *ts, target_in_d = *tt, loss_in_lse = *tl, lse_in_d = *ts, expanded = *tz;
    lse_in_logits.data = tz->data, target_in_d.data = td->data, loss_in_lse.data = ts->data, lse_in_d.data = td->data;
    int64_t all_one[] = {0, 1};
    expanded.strides = all_one;
#define FORWARD(z, t, n, l, s, d) bst_cross_entropy_forward(NULL, z, t, NULL, n, &mean, l, s, d)
    SHARED(FORWARD(tz, tt, NULL, tl, &lse_in_logits, NULL), "lse and logits share memory");
    SHARED(FORWARD(tz, &target_in_d, NULL, tl, ts, td), "dlogits and target share memory");
    SHARED(FORWARD(tz, tt, NULL, &loss_in_lse, ts, NULL), "loss and lse share memory");
    SHARED(FORWARD(tz, tt, tl, tl, ts, NULL), "loss and num_items share memory");
    SHARED(FORWARD(&expanded, tt, NULL, tl, ts, &expanded), "rows of dlogits lie over each other");
    SHARED(bst_cross_entropy_backward(NULL, tg, tz, tt, NULL, tn, &lse_in_d, &mean, td),
           "dlogits and lse share memory");
    DLTensor grad_in_d = *tg;
    grad_in_d.data = td->data;
    SHARED(bst_cross_entropy_backward(NULL, &grad_in_d, tz, tt, NULL, tn, ts, &mean, td),
           "dlogits and grad_loss share memory");
    DLTensor first = *tl;
    first.data = tz->data;
    SHARED(bst_scale(NULL, tz, &first), "tensor and scale share memory");
#undef FORWARD
}

TEST(fused_losses_are_apart) {
    clear();
    bst_shape h, w, t, b, l, s, z, dw;
    const DLDataType f = bst_test_types[0];
    DLTensor *th = &make(&h, f, 2, T, H)->tensor, *tw = &make(&w, f, 2, V, H)->tensor,
             *tt = &make(&t, bst_test_i64, 1, T, 0)->tensor, *tb = &make(&b, f, 1, V, 0)->tensor,
             *tl = &make(&l, f, 1, 1, 0)->tensor, *ts = &make(&s, f, 2, T, 2)->tensor,
             *tz = &make(&z, f, 2, T, V)->tensor, *tdw = &make(&dw, f, 2, V, H)->tensor;
    DLTensor hidden_in_lse = *ts, bias_in_dweight = *tb;
    hidden_in_lse.data = th->data, bias_in_dweight.data = tdw->data;
#define FORWARD(l, s, z, dh, dw, db)                                                                             \
    bst_linear_cross_entropy_forward(NULL,                                                                       \
                                     LOSS_OF(.hidden = th, .weight = tw, .target = tt, .bias = tb, .loss = l,    \
                                             .lse = s, .dlogits = z, .dhidden = dh, .dweight = dw, .dbias = db), \
                                     &mean, 0)
    SHARED(FORWARD(tl, ts, NULL, th, tdw, NULL), "dhidden and hidden share memory");
    SHARED(FORWARD(tl, ts, NULL, NULL, tw, NULL), "dweight and weight share memory");
    SHARED(FORWARD(tl, ts, NULL, NULL, NULL, tb), "dbias and bias share memory");
    SHARED(FORWARD(tl, &hidden_in_lse, NULL, NULL, NULL, NULL), "lse and hidden share memory");
    SHARED(FORWARD(tl, ts, th, NULL, NULL, NULL), "dlogits and hidden share memory");
    SHARED(FORWARD(tl, ts, NULL, NULL, tdw, &bias_in_dweight), "dweight and dbias share memory");
#define BACKWARD(z, dh, dw)                                                                                          \
    bst_linear_cross_entropy_backward(NULL,                                                                          \
                                      LOSS_OF(.grad_loss = tl, .hidden = th, .weight = tw, .target = tt, .bias = tb, \
                                              .lse = ts, .dlogits = z, .dhidden = dh, .dweight = dw),                \
                                      &mean, 0)
    SHARED(BACKWARD(NULL, th, tdw), "dhidden and hidden share memory");
    SHARED(BACKWARD(NULL, NULL, tw), "dweight and weight share memory");
    SHARED(BACKWARD(tz, tz, NULL), "dhidden and dlogits share memory");
#undef FORWARD
#undef BACKWARD
}

TEST(experts_outputs_are_apart) {
    clear();
    bst_shape i, o, p, e, x, r, w, b, h, y, d;
    const DLDataType f = bst_test_types[0], i32 = {kDLInt, 32, 1};
    DLTensor *ti = &make(&i, bst_test_i64, 2, T, K)->tensor, *to = &make(&o, i32, 1, N, 0)->tensor,
             *tp = &make(&p, i32, 2, T, K)->tensor, *te = &make(&e, i32, 1, E, 0)->tensor,
             *tx = &make(&x, f, 2, T, H)->tensor, *tr = &make(&r, f, 2, N, H)->tensor,
             *tw = &make(&w, f, 2, T, K)->tensor, *tb = &make(&b, f, 2, E, H)->tensor,
             *th = &make(&h, f, 2, N, H)->tensor, *ty = &make(&y, f, 2, N, H / 2)->tensor,
             *td = &make(&d, f, 1, N, 0)->tensor;
    DLTensor order_in_indices = *to, ends_in_order = *te, order_in_rows = *to, bias_in_y = *tb, weights_in_out = *tw,
             dots_in_rows = *td, ends_in_dh = *te, indices_in_out = *ti;
    order_in_indices.data = ti->data, ends_in_order.data = to->data, order_in_rows.data = tr->data;
    bias_in_y.data = ty->data, weights_in_out.data = tx->data, dots_in_rows.data = tr->data;
    ends_in_dh.data = tr->data, indices_in_out.data = tx->data;
    SHARED(bst_moe_sort(NULL, ti, &order_in_indices, tp, te), "order and indices share memory");
    SHARED(bst_moe_sort(NULL, ti, to, tp, &ends_in_order), "order and ends share memory");
    SHARED(bst_moe_gather(NULL, tx, &order_in_rows, tr), "rows and position share memory");
    SHARED(bst_moe_glu_forward(NULL, th, &bias_in_y, te, NULL, ty), "y and bias share memory");
#define GLU(ends, dh, dweights, dbias) \
    moe_glu_backward(NULL, ty, th, tb, ends, to, tw, NULL, NULL, dh, NULL, dweights, dbias)
    SHARED(GLU(&ends_in_dh, tr, NULL, NULL), "dh and ends share memory");
    SHARED(GLU(te, NULL, tw, NULL), "dweights and weights share memory");
    SHARED(GLU(te, NULL, NULL, tb), "dbias and bias share memory");
#undef GLU
    SHARED(bst_moe_combine_forward(NULL, th, tp, &weights_in_out, NULL, NULL, tx), "out and weights share memory");
    SHARED(bst_moe_combine_forward(NULL, th, tp, tw, tb, &indices_in_out, tx), "out and indices share memory");
    SHARED(bst_moe_combine_backward(NULL, tx, to, te, tw, tb, tr, &dots_in_rows, NULL), "rows and dots share memory");
    SHARED(bst_moe_combine_backward(NULL, tx, to, te, tw, tb, tr, NULL, tb), "dbias and bias share memory");
}

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

/* Shapes without memory: whatever is not refused would be a launch with a grid cut to 32 bits. */
TEST(more_than_a_grid_holds) {
    clear();
    const DLDataType f = bst_test_types[0], half = bst_test_types[1];
    const int64_t rows = ((int64_t)1 << 32) + 1, one = 1;
    bst_shape z, t, l, a, b, y, h, w, tt;
    bst_exec nowhere = bst_fake_exec;
#ifndef BST_EMULATE
    bst_compile_only collector = {.arch = 90};
    bst__cuda_compile_only(&collector);
#endif
    check_refused(bst_cross_entropy_forward(&nowhere, bst_device_tensor(&z, half, 2, (int64_t[]){rows, 1}),
                                            bst_device_tensor(&t, bst_test_i64, 1, &rows), NULL, NULL, &mean,
                                            bst_device_tensor(&l, f, 1, &one), NULL, NULL),
                  BST_UNSUPPORTED,
                  "cross_entropy_forward: 4294967297 rows are given; at most 2147483647 are supported");
    DLTensor *strided = bst_device_tensor(&a, half, 2, (int64_t[]){rows, 2});
    strided->shape[1] = 1;
    check_refused(bst_glu_forward(&nowhere, strided, bst_device_tensor(&b, half, 2, (int64_t[]){rows, 1}), NULL,
                                  bst_device_tensor(&y, half, 2, (int64_t[]){rows, 1})),
                  BST_UNSUPPORTED, "glu_forward: 4294967297 rows are given; at most 2147483647 are supported");
#ifndef BST_EMULATE
    bst__cuda_compile_only(NULL);
#endif
    const int64_t none = 0;
    check_refused(
        bst_linear_cross_entropy_forward(&nowhere,
                                         LOSS_OF(.hidden = bst_device_tensor(&h, half, 2, (int64_t[]){0, 1}),
                                                 .weight = bst_device_tensor(&w, half, 2, (int64_t[]){INT32_MAX, 1}),
                                                 .target = bst_device_tensor(&tt, bst_test_i64, 1, &none),
                                                 .loss = bst_device_tensor(&l, f, 1, &one)),
                                         &mean, 0),
        BST_UNSUPPORTED, "linear_cross_entropy_forward: weight has 2147483647 rows; 1 to 1073741823 are supported");
}

/* The largest of what is bounded, one more, and none. */
TEST(sizes_that_are_not_served) {
    clear();
    const DLDataType f = bst_test_types[0];
    float *at = (float *)(void *)arena;
    int64_t head[] = {1, 1, 1, 2050}, table[] = {1, 1, 4}, weight[] = {2050}, none[] = {2, 0}, rows[] = {2};
    int64_t classes[] = {0, (int64_t)1 << 30};
    DLTensor q = bst_tensor(at, 4, head, NULL, f), c = bst_tensor(at, 3, table, NULL, f),
             w = bst_tensor(at, 1, weight, NULL, f);
    const char *message = "q has heads of 2050 elements; at most 2048 are supported";
    check_refused(rope_forward(NULL, &q, NULL, &c, &c, 0, &q, NULL), BST_UNSUPPORTED, message);
    check_refused(normed_forward(NULL, &q, NULL, &w, NULL, &c, &c, 1e-6, BST_CASTING_LLAMA, 0, &q, NULL),
                  BST_UNSUPPORTED, message);
    DLTensor x = bst_tensor(at, 2, none, NULL, f), t = bst_tensor(at, 1, rows, NULL, bst_test_i64);
    DLTensor z = bst_tensor(at, 2, classes, NULL, f), l = bst_tensor(at, 0, NULL, NULL, f);
    check_refused(bst_norm_forward(NULL, &x, NULL, NULL, NULL, 1e-6, NULL, &x, NULL, NULL, NULL), BST_UNSUPPORTED,
                  "x has rows of 0 elements; 1 to 65536 are supported");
    message = "logits has rows of 1073741824 elements; 1 to 1073741823 are supported";
    check_refused(bst_cross_entropy_forward(NULL, &z, &t, NULL, NULL, &mean, &l, NULL, NULL), BST_UNSUPPORTED, message);
    check_refused(
        bst_linear_cross_entropy_forward(NULL, LOSS_OF(.hidden = &x, .weight = &x, .target = &t, .loss = &l), &mean, 0),
        BST_UNSUPPORTED, "weight has shape [2, 0]; both dimensions must be at least 1");
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

TEST(numbers_out_of_their_range) {
    clear();
    const DLDataType f = bst_test_types[0];
    bst_shape x, y, w, q, c, t, l;
    DLTensor *tx = &make(&x, f, 2, T, H)->tensor, *ty = &make(&y, f, 2, T, H)->tensor,
             *tw = &make(&w, f, 1, H, 0)->tensor, *tq = &make(&q, f, 2, 2, H)->tensor,
             *tc = &make(&c, f, 2, 2, H)->tensor, *tt = &make(&t, bst_test_i64, 1, T, 0)->tensor,
             *tl = &make(&l, f, 1, 1, 0)->tensor;
    int64_t head[] = {1, 1, 2, H}, table[] = {1, 2, H};
    DLTensor heads = bst_tensor(tq->data, 4, head, NULL, f), tables = bst_tensor(tc->data, 3, table, NULL, f);
    DLTensor out = bst_tensor(ty->data, 4, head, NULL, f);
    const double wrong[] = {-1e-6, NAN, INFINITY, 1e300};
    for (int i = 0; i < 4; i++) {
        char message[96];
        snprintf(message, sizeof message, "norm_forward: eps is %g; a finite number, 0 or above, is needed", wrong[i]);
        check_refused(bst_norm_forward(NULL, tx, NULL, tw, NULL, wrong[i], NULL, ty, NULL, NULL, NULL), BST_INVALID,
                      message);
        check_refused(
            normed_forward(NULL, &heads, NULL, tw, NULL, &tables, &tables, wrong[i], BST_CASTING_LLAMA, 0, &out, NULL),
            BST_INVALID, strchr(message, ':'));
        check_refused(normed_backward(NULL, &heads, NULL, &heads, NULL, tw, NULL, &tables, &tables, wrong[i],
                                      BST_CASTING_LLAMA, 0, &out, NULL, NULL, NULL),
                      BST_INVALID, strchr(message, ':'));
    }
    const char *budget = "chunk_bytes is -1; a positive number, or 0 for the default, is needed";
    check_refused(bst_linear_cross_entropy_forward(NULL, LOSS_OF(.hidden = tx, .weight = ty, .target = tt, .loss = tl),
                                                   &mean, -1),
                  BST_INVALID, budget);
    check_refused(bst_linear_cross_entropy_backward(
                      NULL, LOSS_OF(.grad_loss = tl, .hidden = tx, .weight = ty, .target = tt, .lse = tt), &mean, -1),
                  BST_INVALID, budget);
}

#ifndef BST_EMULATE
/* What may be NULL, and what a scalar may be: any tensor of one element. */
TEST(what_may_be_left_out) {
    clear();
    const DLDataType f = bst_test_types[0];
    bst_shape x, y, t, l, s;
    DLTensor *tx = &make(&x, f, 2, T, H)->tensor, *ty = &make(&y, f, 2, T, H)->tensor,
             *tt = &make(&t, bst_test_i64, 1, T, 0)->tensor, *tl = &make(&l, f, 1, 1, 0)->tensor,
             *ts = &make(&s, f, 2, T, 2)->tensor;
    int64_t ones[] = {1, 1, 1}, two[] = {2};
    CHECK_OK(bst_norm_forward(NULL, tx, NULL, NULL, NULL, 1e-6, NULL, ty, NULL, NULL, NULL));
    CHECK_EQ_I(bst_norm_backward(NULL, BST_NORM_TENSORS(.dy = tx, .x = tx, .dx = ty), NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "norm_backward: rstd is NULL");
    for (int dims = 0; dims <= 3; dims++) {
        DLTensor loss = bst_tensor(tl->data, dims, ones, NULL, f);
        CHECK_OK(bst_cross_entropy_forward(NULL, tx, tt, NULL, NULL, &mean, &loss, NULL, NULL));
        CHECK_OK(bst_linear_cross_entropy_forward(
            NULL, LOSS_OF(.hidden = tx, .weight = ty, .target = tt, .loss = &loss), &mean, 0));
        CHECK_OK(bst_linear_cross_entropy_backward(
            NULL, LOSS_OF(.grad_loss = &loss, .hidden = tx, .weight = ty, .target = tt, .lse = ts), &mean, 0));
    }
    memset(arena, 0, sizeof arena);
    DLTensor pair = bst_tensor(tl->data, 1, two, NULL, f);
    check_refused(bst_cross_entropy_forward(NULL, tx, tt, NULL, NULL, &mean, &pair, NULL, NULL), BST_INVALID,
                  "loss has shape [2]; one element is needed");
    check_refused(bst_cross_entropy_backward(NULL, tl, tx, tt, NULL, NULL, NULL, &mean, ty), BST_INVALID,
                  "lse is NULL");
    check_refused(
        bst_linear_cross_entropy_backward(
            NULL, LOSS_OF(.grad_loss = tl, .hidden = tx, .weight = ty, .target = tt, .dlogits = tx), &mean, 0),
        BST_INVALID, "lse is NULL");
}
#endif

/* Pairs are counted in 32 bits. */
TEST(more_pairs_than_can_be_counted) {
    clear();
    const DLDataType f = bst_test_types[1], i32 = {kDLInt, 32, 1};
    const int64_t n = (int64_t)1 << 31, e = 1;
    bst_shape x, y, o, p, w, r, h, ends;
    DLTensor *to = bst_device_tensor(&o, i32, 1, &n), *tx = bst_device_tensor(&x, f, 2, (int64_t[]){n, 1}),
             *ty = bst_device_tensor(&y, f, 2, (int64_t[]){n, 1}), *te = bst_device_tensor(&ends, i32, 1, &e),
             *tp = bst_device_tensor(&p, i32, 2, (int64_t[]){n, 1}),
             *tw = bst_device_tensor(&w, f, 2, (int64_t[]){n, 1}), *tr = bst_device_tensor(&r, f, 2, (int64_t[]){n, 1}),
             *th = bst_device_tensor(&h, f, 2, (int64_t[]){n, 2});
#ifndef BST_EMULATE
    bst_compile_only collector = {.arch = 90};
    bst__cuda_compile_only(&collector);
#endif
    const char *message = "has 2147483648 elements; at most 2147483647 are supported";
    check_refused(bst_moe_gather(&bst_fake_exec, tx, to, tr), BST_UNSUPPORTED, message);
    check_refused(bst_moe_combine_backward(&bst_fake_exec, tx, to, te, tw, NULL, tr, NULL, NULL), BST_UNSUPPORTED,
                  message);
    check_refused(bst_moe_combine_forward(&bst_fake_exec, tx, tp, NULL, NULL, NULL, tr), BST_UNSUPPORTED, message);
    message = "h has 2147483648 rows; at most 2147483647 are supported";
    check_refused(bst_moe_glu_forward(&bst_fake_exec, th, NULL, te, NULL, ty), BST_UNSUPPORTED, message);
    check_refused(moe_glu_backward(&bst_fake_exec, ty, th, NULL, te, to, tw, NULL, NULL, NULL, tr, NULL, NULL),
                  BST_UNSUPPORTED, message);
#ifndef BST_EMULATE
    bst__cuda_compile_only(NULL);
#endif
}

/* Where nothing can be looked up, the argument is named, and not a file "(null)". */
TEST(no_folder_of_pytorch) {
    CHECK_EQ_I(bst_torch_register(NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "bst_torch_register: folder is NULL");
}

int main(void) {
#ifndef BST_EMULATE
    RUN(vector_units_by_name); /* before any other call */
    RUN(strides_that_say_nothing);
    RUN(what_may_be_left_out);
#endif
    RUN(tensors_that_cannot_be);
    RUN(types_and_devices_by_name);
    RUN(norm_outputs_are_apart);
    RUN(glu_results_have_places_of_their_own);
    RUN(heads_have_places_of_their_own);
    RUN(losses_are_apart);
    RUN(fused_losses_are_apart);
    RUN(experts_outputs_are_apart);
    RUN(more_than_a_grid_holds);
    RUN(sizes_that_are_not_served);
    RUN(numbers_out_of_their_range);
    RUN(more_pairs_than_can_be_counted);
    RUN(no_folder_of_pytorch);
    return bst_test_report();
}
