/* low_rank_split.c - thin matrices of float32 as products of bfloat16 take them, and sums of what these make of their
 * pieces: checks, then a loop on CPU and a kernel on CUDA. */
#include <assert.h>

#include "core/describe.h"
#include "cuda/cuda.h"
#include "ops/low_rank/low_rank.h"
#include "ops/low_rank/low_rank_args.h"

typedef bst_low_rank_split_tensors given_tensors;
/* The scale lies in the same struct. */
typedef bst_low_rank_split_tensors given_options;

/* ---- description ------------------------------------------------------------------------------------------------- */

enum { SCALE };
enum { X, SUM_INTO, PIECES_INTO, REPEATED_INTO, SUM, PIECES, REPEATED };

static const char *const meanings[] = {"Tthe rows of x", "Gthe groups of x", "Pthe parts of x", "Rthe ranks of x",
                                       NULL};

#define OPTIONAL (BST_IN | BST_OPTIONAL)
#define RESULT   (BST_OUT | BST_OPTIONAL)
#define FLOAT    (1u << BST_F32)
#define HALF     (1u << BST_BF16)

static const bst_argument arguments[] = {
    [X] = {"x", BST_IN, FLOAT, "TGPR", BST_LAST, BST_AT(x)},
    /* PyTorch's way to say where results are to be. */
    [SUM_INTO] = {"sum", OPTIONAL, FLOAT, "TGR", BST_LAST},
    [PIECES_INTO] = {"pieces", OPTIONAL, HALF, "TG3R", BST_LAST},
    [REPEATED_INTO] = {"repeated", OPTIONAL, HALF, "TG3R", BST_LAST},
    [SUM] = {"sum", RESULT, FLOAT, "TGR", BST_LAST, BST_AT(sum), BST_MAY_BE(1u << SUM_INTO)},
    [PIECES] = {"pieces", RESULT, HALF, "TG3R", BST_LAST, BST_AT(pieces), BST_MAY_BE(1u << PIECES_INTO)},
    [REPEATED] = {"repeated", RESULT, HALF, "TG3R", BST_LAST, BST_AT(repeated), BST_MAY_BE(1u << REPEATED_INTO)},
    {NULL},
};

static bst_status check_parts(const char *op, const bst_view *v, const bst_attribute *attributes) {
    (void)attributes;
    if (v[X].size[2] == 1 || v[X].size[2] == LOW_RANK_PIECES) return BST_OK;
    return bst__error(BST_INVALID, "%s: x has %lld parts, its dimension 2; 1 or %d are needed", op,
                      (long long)v[X].size[2], LOW_RANK_PIECES);
}

static const bst_attribute_rule rules[] = {BST_OPTION('d', scale, BST_USUAL(1)), {NULL}};

/* ---- on CUDA ----------------------------------------------------------------------------------------------------- */

static const bst_kernel split_kernel = {"low_rank_split.cu", "low_rank_split", {"VEC", NULL}};

/* Numbers that a thread has: four, where they lie together and every access may be as wide. */
static int64_t vector_of(const bst_view *v) {
    int64_t vector = v[X].size[3] % LOW_RANK_SPLIT_VECTOR ? 1 : LOW_RANK_SPLIT_VECTOR;
    for (int i = X; i <= REPEATED; i++)
        if (bst__given(&v[i]) && bst__alignment(&v[i], LOW_RANK_SPLIT_VECTOR) < vector) vector = 1;
    return vector;
}

static bst_status run_cuda(const bst_exec *exec, const char *op, const bst_view *v, const low_rank_split_args *a) {
    const int64_t vector = vector_of(v), blocks = bst__divided_up(a->count, vector * LOW_RANK_THREADS);
    BST_TRY(bst__cuda_need_rows(op, blocks, 1));
    bst_launch l = {.kernel = &split_kernel,
                    .values = {vector},
                    .grid_x = (unsigned)blocks,
                    .block = LOW_RANK_THREADS,
                    .overlap = true};
    return bst__cuda_launch(exec, op, v[X].device.device_id, &l, a, sizeof *a);
}

/* ---- the function ------------------------------------------------------------------------------------------------ */

static bst_status run(const bst_exec *exec, const char *op, const bst_view *v, const bst_attribute *attributes) {
    const bst_view *x = &v[X];
    low_rank_split_args a = {.x = x->data,
                             .sum = v[SUM].data,
                             .pieces = v[PIECES].data,
                             .repeated = v[REPEATED].data,
                             .count = x->size[0] * x->size[1] * x->size[3],
                             .groups = x->size[1],
                             .ranks = x->size[3],
                             .parts = (int32_t)x->size[2],
                             .scale = (float)attributes[SCALE].d};
    for (int i = 0; i < 3; i++) {
        a.x_stride[i] = x->stride[i];
        a.pieces_stride[i] = v[PIECES].stride[i];
        a.repeated_stride[i] = v[REPEATED].stride[i];
        if (i < 2) a.sum_stride[i] = v[SUM].stride[i];
    }
    if (!a.count) return BST_OK;
    if (x->device.device_type == kDLCUDA) return run_cuda(exec, op, v, &a);
    const int64_t rows = x->size[0] * x->size[1], tiles = bst__divided_up(a.ranks, BST_TILE);
    return BST_CPU_RUN(exec, rows * tiles, bst__lesser(a.ranks, BST_TILE), bst__low_rank_split_cpu, &a);
}

const bst_function bst__low_rank_split = {
    .name = "low_rank_split",
    .meanings = meanings,
    .arguments = arguments,
    .attributes = rules,
    .check = check_parts,
    .run = run,
    BST_GIVEN,
    BST_TORCH("low_rank_split: x sum pieces repeated scale -> sum=sum pieces=pieces repeated=repeated"),
};

bst_status bst_low_rank_split(const bst_exec *exec, const bst_low_rank_split_tensors *tensors) {
    return bst__call_struct(&bst__low_rank_split, exec, tensors, tensors, NULL);
}
