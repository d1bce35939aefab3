/* test_memory.c - memory that cannot be had: each allocation of a call fails in turn. Where the library's own do not go
 * through the caller's functions, the linker puts ours in place of calloc. */
#include <pthread.h>
#include <stdbool.h>

#include "moe_calls.h"
#include "rope_calls.h"
#include "tensors.h"

/* ---- the caller's allocator -------------------------------------------------------------------------------------- */

static int allocations, to_fail, outstanding;

static void *allocate(void *user, DLDevice device, size_t bytes) {
    (void)user, (void)device;
    if (++allocations == to_fail) return NULL;
    outstanding++;
    return aligned_alloc(256, (bytes + 255) / 256 * 256);
}

static void release(void *user, DLDevice device, void *memory) {
    (void)user, (void)device;
    outstanding--;
    free(memory);
}

static const bst_exec exec = {.size = sizeof exec, .allocate = allocate, .release = release};

/* ---- calls that allocate ----------------------------------------------------------------------------------------- */

enum { T = 20, H = 4, V = 5, MOST = 160 };

static const bst_cross_entropy_options mean = {.size = sizeof mean};
static float in[8][MOST], out[8][MOST], one[1];
static int64_t target[T], rows[] = {T, H}, classes[] = {V, H}, logits[] = {T, V}, heads[] = {1, 2, T, H};
static int64_t table[] = {1, T, H}, width[] = {H}, gate[] = {2 * T, 2 * H}, half[] = {2 * T, H}, choices[] = {T, 2};
static int64_t pairs[] = {2 * T}, experts[] = {1, 2 * H};
static int32_t order[2 * T], ends[1] = {2 * T};

static DLTensor f32(void *data, int dims, int64_t *shape) { return bst_f32(data, dims, shape); }

static bst_status norm(void) {
    DLTensor dy = f32(in[0], 2, rows), x = f32(in[1], 2, rows), w = f32(in[2], 1, width), rstd = f32(in[3], 1, rows);
    DLTensor dx = f32(out[0], 2, rows), dw = f32(out[1], 1, width);
    return bst_norm_backward(
        &exec, BST_NORM_TENSORS(.dy = &dy, .x = &x, .weight = &w, .rstd = &rstd, .dx = &dx, .dweight = &dw), NULL);
}

static bst_status qk_norm_rope(void) {
    DLTensor dq = f32(in[0], 4, heads), q = f32(in[1], 4, heads), w = f32(in[2], 1, width), c = f32(in[3], 3, table);
    DLTensor dx = f32(out[0], 4, heads), dw = f32(out[1], 1, width);
    return normed_backward(&exec, &dq, NULL, &q, NULL, &w, NULL, &c, &c, 1e-6, BST_CASTING_LLAMA, 0, &dx, NULL, &dw,
                           NULL);
}

static bst_status cross_entropy(void) {
    DLTensor z = f32(in[0], 2, logits), t = bst_tensor(target, 1, rows, NULL, bst_test_i64), loss = f32(one, 0, NULL);
    return bst_cross_entropy_forward(&exec, &z, &t, NULL, NULL, &mean, &loss, NULL, NULL);
}

static bst_status linear_cross_entropy(void) {
    DLTensor h = f32(in[0], 2, rows), w = f32(in[1], 2, classes), b = f32(in[2], 1, classes);
    DLTensor t = bst_tensor(target, 1, rows, NULL, bst_test_i64), loss = f32(one, 0, NULL);
    DLTensor dh = f32(out[0], 2, rows), dw = f32(out[1], 2, classes), db = f32(out[2], 1, classes);
    return bst_linear_cross_entropy_forward(&exec,
                                            LOSS_OF(.hidden = &h, .weight = &w, .target = &t, .bias = &b, .loss = &loss,
                                                    .dhidden = &dh, .dweight = &dw, .dbias = &db),
                                            &mean, 1);
}

/* In halves, which the default product converts, and whose gradients are summed in float32. */
static bst_status linear_cross_entropy_halves(void) {
    enum { ROWS = 640 }; /* ten chunks of 64 rows */
    static uint16_t h[ROWS * H], w[V * H], dw[V * H];
    static int64_t labels[ROWS];
    int64_t shape[] = {ROWS, H};
    DLDataType half_type = bst_test_types[1];
    DLTensor th = bst_tensor(h, 2, shape, NULL, half_type), tw = bst_tensor(w, 2, classes, NULL, half_type);
    DLTensor t = bst_tensor(labels, 1, shape, NULL, bst_test_i64), loss = f32(one, 0, NULL);
    DLTensor tdw = bst_tensor(dw, 2, classes, NULL, half_type);
    return bst_linear_cross_entropy_forward(
        &exec, LOSS_OF(.hidden = &th, .weight = &tw, .target = &t, .loss = &loss, .dweight = &tdw), &mean, 1);
}

static bst_status moe_glu(void) {
    DLTensor dy = f32(in[0], 2, half), h = f32(in[1], 2, gate), b = f32(in[3], 2, experts), w = f32(in[4], 2, choices);
    DLTensor e = bst_tensor(ends, 1, (int64_t[]){1}, NULL, (DLDataType){kDLInt, 32, 1});
    DLTensor o = bst_tensor(order, 1, pairs, NULL, (DLDataType){kDLInt, 32, 1}), db = f32(out[0], 2, experts);
    bst_glu_options oai = {
        .size = sizeof oai, .activation = BST_SWIGLU_OAI, .interleaved = 1, .alpha = 1.7, .limit = 7};
    return moe_glu_backward(&exec, &dy, &h, &b, &e, &o, &w, NULL, &oai, NULL, NULL, NULL, &db);
}

static const struct {
    const char *name;
    bst_status (*call)(void);
    int least; /* allocations */
} calls[] = {
    {"norm_backward", norm, 1},
    {"rope_backward", qk_norm_rope, 1},
    {"cross_entropy_forward", cross_entropy, 1},
    {"linear_cross_entropy_forward", linear_cross_entropy, 4}, /* divisors, losses, logits, dbias; our own product */
    {"linear_cross_entropy_forward", linear_cross_entropy_halves, 6},
    {"moe_glu_backward", moe_glu, 1},
};

TEST(workspace_that_cannot_be_had) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        char message[96];
        snprintf(message, sizeof message, "%s: ", calls[i].name);
        allocations = to_fail = 0;
        CHECK_OK(calls[i].call());
        int most = allocations;
        CHECK(most >= calls[i].least);
        for (to_fail = 1; to_fail <= most; to_fail++) {
            allocations = 0;
            CHECK_EQ_I(calls[i].call(), BST_NO_MEMORY);
            CHECK_STR(bst_last_error(), message);
            CHECK_STR(bst_last_error(), " bytes of workspace could not be allocated");
            CHECK_EQ_I(outstanding, 0);
        }
    }
}

static _Alignas(256) unsigned char arena[4096];

static void *from_arena(void *user, DLDevice device, size_t bytes) {
    (void)user, (void)device;
    return bytes <= sizeof arena ? arena : NULL;
}

/* Memory of an arena needs no release; and what the library allocated itself is none of the caller's to release. */
TEST(allocate_or_release_alone) {
    DLTensor dy = f32(in[0], 2, rows), x = f32(in[1], 2, rows), w = f32(in[2], 1, width), rstd = f32(in[3], 1, rows);
    DLTensor dw = f32(out[1], 1, width);
    const bst_exec only[] = {{.size = sizeof *only, .allocate = from_arena},
                             {.size = sizeof *only, .release = release}};
    memset(arena, 255, sizeof arena);
    for (int i = 0; i < 2; i++)
        CHECK_OK(bst_norm_backward(
            &only[i], BST_NORM_TENSORS(.dy = &dy, .x = &x, .weight = &w, .rstd = &rstd, .dweight = &dw), NULL));
    CHECK(arena[0] != 255);
    CHECK_EQ_I(outstanding, 0);
}

/* ---- the error's text -------------------------------------------------------------------------------------------- */

static bool no_calloc;

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes) { return no_calloc ? NULL : __real_calloc(count, bytes); }

static void *fail_without_memory(void *context) {
    (void)context;
    no_calloc = true;
    CHECK_EQ_I(strlen(bst_last_error()), 0);
    CHECK_EQ_I(bst_glu_forward(NULL, NULL, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "the call failed, and there was no memory to keep the reason");
    no_calloc = false;
    CHECK_EQ_I(bst_glu_forward(NULL, NULL, NULL, NULL, NULL), BST_INVALID);
    CHECK_STR(bst_last_error(), "glu_forward: a is NULL");
    return NULL;
}

TEST(messages_that_cannot_be_kept) {
    pthread_t thread; /* a new one has no room for a message yet */
    CHECK_EQ_I(pthread_create(&thread, NULL, fail_without_memory, NULL), 0);
    pthread_join(thread, NULL);
}

int main(void) {
    RUN(workspace_that_cannot_be_had);
    RUN(allocate_or_release_alone);
    RUN(messages_that_cannot_be_kept);
    return bst_test_report();
}
