/* gemm.c - bst__cuda_gemm on the CPU: plain loops, sums in double, one rounding at the end. */
#include <stdlib.h>
#include <string.h>

#include "cuda/compile_only.h"
#include "device/emu_types.h"
#include "emu.h"

typedef enum element { F32, BF16, F16, OTHER } element;

static element element_of(DLDataType t) {
    if (t.lanes == 1 && t.code == kDLFloat && t.bits == 32) return F32;
    if (t.lanes == 1 && t.code == kDLBfloat && t.bits == 16) return BF16;
    if (t.lanes == 1 && t.code == kDLFloat && t.bits == 16) return F16;
    return OTHER;
}

static float get(const void *p, element type, int64_t i) {
    if (type == F32) return ((const float *)p)[i];
    const uint16_t h = ((const uint16_t *)p)[i];
    return type == BF16 ? emu_f32_from_bf16(h) : emu_f32_from_f16(h);
}

static void put(void *p, element type, int64_t i, float v) {
    if (type == F32) {
        ((float *)p)[i] = v;
    } else {
        ((uint16_t *)p)[i] = (uint16_t)(type == BF16 ? emu_bf16_from_f32(v) : emu_f16_from_f32(v));
    }
}

/* Row r, column c of op(x) as float32, packed with `columns` the length of a row. */
static float *packed(const void *x, element type, int64_t rows, int64_t columns, int64_t ld, bool transposed) {
    float *out = malloc((size_t)(rows * columns) * sizeof *out);
    for (int64_t r = 0; out != NULL && r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) out[r * columns + c] = get(x, type, transposed ? c * ld + r : r * ld + c);
    }
    return out;
}

static bst_status check(const char *op, const bst_gemm *g, element in, element out) {
    const int64_t least_a = g->a_transposed ? g->m : g->k, least_b = g->b_transposed ? g->k : g->n;
    if (in == OTHER || (out != in && out != F32)) {
        return bst__error(BST_CUDA, "%s: a matrix product of unsupported element types", op);
    }
    if (g->m < 0 || g->n < 0 || g->k < 0 || g->lda < least_a || g->ldb < least_b || g->ldo < g->n) {
        return bst__error(BST_CUDA,
                          "%s: a matrix product with m %lld, n %lld, k %lld and leading dimensions %lld, %lld, %lld; "
                          "needed are at least %lld, %lld, %lld",
                          op, (long long)g->m, (long long)g->n, (long long)g->k, (long long)g->lda, (long long)g->ldb,
                          (long long)g->ldo, (long long)least_a, (long long)least_b, (long long)g->n);
    }
    return BST_OK;
}

bst_status bst__cuda_gemm(const bst_exec *exec, const char *op, const bst_gemm *g) {
    (void)exec;
    bst_chip chip;
    BST_TRY(bst__cuda_chip(op, g->device.device_id, &chip));
    const element in = element_of(g->input_type), out = element_of(g->output_type);
    BST_TRY(check(op, g, in, out));
    bst_collector collector;
    if (g->m == 0 || g->n == 0 || bst__compiling_only(&collector)) return BST_OK;
    float *a = packed(g->a, in, g->m, g->k, g->lda, g->a_transposed);
    float *b = packed(g->b, in, g->n, g->k, g->ldb, !g->b_transposed); /* as [n, k]: both rows run along k */
    if (g->k > 0 && (a == NULL || b == NULL)) {
        free(a);
        free(b);
        return bst__error(BST_NO_MEMORY, "%s: no memory for a matrix product", op);
    }
    const double alpha = g->device_alpha != NULL ? *g->device_alpha : g->alpha;
    for (int64_t i = 0; i < g->m; ++i) {
        for (int64_t j = 0; j < g->n; ++j) {
            double sum = 0;
            for (int64_t p = 0; p < g->k; ++p) sum += (double)a[i * g->k + p] * b[j * g->k + p];
            sum *= alpha;
            /* As cuBLAS: where beta is 0, the output is not read, whatever it holds. */
            if (g->beta != 0.0f) sum += (double)g->beta * get(g->out, out, i * g->ldo + j);
            put(g->out, out, i * g->ldo + j, (float)sum);
        }
    }
    free(a);
    free(b);
    return BST_OK;
}
