/* segment_attention_token.c - attention of one query a row: description, and what runs. */
#include <inttypes.h>
#include <math.h>

#include "core/options.h"
#include "cuda/cuda.h"
#include "ops/segment_attention/segment_attention.h"

typedef bst_token_attention_tensors given_tensors;
typedef bst_token_attention_options given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { Q, K, V, BIAS, Y };

static const char *const meanings[] = {"Bthe rows of q",  "Hthe heads of q", "Dthe size of q's heads",
                                       "Gthe heads of k", "Sthe keys of k",  NULL};

static const bst_attribute_rule rules[] = {
    BST_OPTION('d', scale, 0, FLT_MAX, "a finite number, 0 or above,"),
    {NULL},
};

#define LIKE_Q BST_TYPE_OF(Q, "the type of q")

static const bst_argument arguments[] = {
    [Q] = {"q", BST_IN, BST_FLOATS, "BHD", BST_LAST, BST_AT(q)},
    [K] = {"k", BST_IN, BST_FLOATS, "BGSD", BST_LAST, LIKE_Q, BST_AT(k), .check = bst__attention_heads},
    [V] = {"v", BST_IN, BST_FLOATS, "BGSD", BST_LAST, LIKE_Q, BST_AT(v)},
    [BIAS] = {"bias", BST_IN | BST_OPTIONAL, BST_FLOATS, "BS", BST_LAST, LIKE_Q, BST_AT(bias)},
    [Y] = {"y", BST_OUT, BST_FLOATS, "BHD", BST_CONTIGUOUS, LIKE_Q, BST_AT(y)},
    {NULL},
};

/* ---- on CUDA ----------------------------------------------------------------------------------------------------- */

static const bst_kernel attend = {
    "segment_attention_token.cu", "token_attention", {"TYPE", "DIM", "HAS_BIAS", "IN_PARTS", NULL}};
static const bst_kernel put_together = {"segment_attention_token.cu", "token_attention_sum", {"TYPE", "DIM", NULL}};

/* Whether a tensor's rows of D elements can be read 16 bytes at a time. */
static bst_status need_aligned(const char *op, const char *name, const bst_view *v) {
    bool fits = (uintptr_t)v->data % 16 == 0;
    for (int i = 0; i + 1 < v->dims; i++) fits = fits && (v->size[i] < 2 || v->stride[i] % 8 == 0);
    if (fits) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: rows of %s do not begin at multiples of 16 bytes; make it contiguous", op,
                      name);
}

static bst_status need_served(const char *op, const token_attention_call *c) {
    if (c->q.dtype == BST_F32 || c->dim > TOKEN_DIM || c->dim % 8)
        return bst__error(BST_UNSUPPORTED,
                          "%s: heads have %" PRId64
                          " elements of %s; on CUDA multiples of 8 up to %d of bfloat16 or float16 are supported",
                          op, c->dim, bst__dtype_name(c->q.dtype), TOKEN_DIM);
    BST_TRY(need_aligned(op, "q", &c->q));
    BST_TRY(need_aligned(op, "k", &c->k));
    BST_TRY(need_aligned(op, "v", &c->v));
    return bst__cuda_need_rows(op, c->rows, c->heads * TOKEN_PARTS);
}

/* A row's keys are cut up until there are two blocks a multiprocessor, each with some turns of its loop to make: fewer
 * take longer to put together than to read. */
static int64_t parts_of(const token_attention_call *c, int64_t blocks, int64_t processors) {
    const int64_t most = bst__lesser(bst__divided_up(c->keys, 256), TOKEN_PARTS);
    const int64_t parts = bst__lesser(bst__divided_up(2 * processors, blocks), most);
    return parts > 1 ? parts : 1;
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const token_attention_call *c) {
    const int device = c->q.device.device_id;
    bst_chip chip;
    BST_TRY(need_served(op, c));
    BST_TRY(bst__cuda_chip(op, device, &chip));
    const int64_t shared = c->heads / c->groups, chunks = bst__divided_up(shared, TOKEN_HEADS);
    const int64_t blocks = c->rows * c->groups * chunks;
    const int64_t parts = parts_of(c, blocks, chip.processors);
    token_attention_args a = {.q = c->q.data,
                              .k = c->k.data,
                              .v = c->v.data,
                              .bias = c->bias.data,
                              .y = c->y.data,
                              .q_row = c->q.stride[0],
                              .q_head = c->q.stride[1],
                              .k_row = c->k.stride[0],
                              .k_head = c->k.stride[1],
                              .k_key = c->k.stride[2],
                              .v_row = c->v.stride[0],
                              .v_head = c->v.stride[1],
                              .v_key = c->v.stride[2],
                              .bias_row = c->bias.stride[0],
                              .keys = c->keys,
                              .each = bst__divided_up(c->keys, parts),
                              .rows = (int32_t)c->rows,
                              .heads = (int32_t)c->heads,
                              .groups = (int32_t)c->groups,
                              .shared = (int32_t)shared,
                              .chunks = (int32_t)chunks,
                              .parts = (int32_t)parts,
                              .scale = c->scale};
    void *memory = NULL;
    const int64_t results = parts * c->rows * c->heads;
    if (parts > 1) {
        const size_t bytes = (size_t)(results * (c->dim + 2)) * sizeof(float);
        BST_TRY(bst__allocate(exec, op, c->q.device, bytes, &memory));
        a.sums = memory, a.top = a.sums + results * c->dim, a.total = a.top + results;
    }
    const bst_launch first = {
        .kernel = &attend,
        .values = {c->q.dtype, c->dim, c->bias.dims > 0, parts > 1},
        .grid_x = (unsigned)(blocks * parts),
        .block = TOKEN_THREADS,
        .overlap = true,
    };
    const bst_launch second = {.kernel = &put_together,
                               .values = {c->q.dtype, c->dim},
                               .grid_x = (unsigned)(c->rows * c->heads),
                               .block = TOKEN_THREADS,
                               .overlap = true};
    bst_status status = bst__cuda_launch(exec, op, device, &first, &a, sizeof a);
    if (status == BST_OK && parts > 1) status = bst__cuda_launch(exec, op, device, &second, &a, sizeof a);
    if (memory) bst__release(exec, c->q.device, memory);
    return status;
}

/* ---- what runs --------------------------------------------------------------------------------------------------- */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const double scale = attributes[0].d;
    token_attention_call c = {.q = v[Q],
                              .k = v[K],
                              .v = v[V],
                              .bias = v[BIAS],
                              .y = v[Y],
                              .rows = v[Q].size[0],
                              .heads = v[Q].size[1],
                              .groups = v[K].size[1],
                              .keys = v[K].size[2],
                              .dim = v[Q].size[2],
                              .scale = (float)(scale != 0 ? scale : 1 / sqrt((double)v[Q].size[2]))};
    if (!v[Y].count) return BST_OK;
    if (!c.keys) return bst__zero(exec, op, &c.y);
    if (c.q.device.device_type == kDLCUDA) return run_cuda(exec, op, &c);
    c.strips = bst__lesser(c.rows * c.heads, bst__processors());
    void *memory;
    BST_TRY(bst__allocate(exec, op, c.q.device, (size_t)(c.strips * (2 * c.dim + c.keys)) * sizeof(float), &memory));
    c.work = memory;
    bst__parallel_for(exec, c.strips, 1, BST_CPU_SELECT(bst__token_attention_cpu), &c);
    bst__release(exec, c.q.device, memory);
    return BST_OK;
}

const bst_function bst__token_attention = {
    .name = "token_attention",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .run = run,
    BST_GIVEN,
    BST_TORCH("token_attention: q k v bias scale -> y"),
};

bst_status bst_token_attention(const bst_exec *exec, const bst_token_attention_tensors *tensors,
                               const bst_token_attention_options *options) {
    return bst__call_struct(&bst__token_attention, exec, tensors, options, NULL);
}
