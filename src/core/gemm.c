/* gemm.c - matrix products on CPU: the caller's, else a CBLAS found at run time, else blocked loops of our own.
 *
 * The last two are for C programs without a framework. They work in float32: other types are converted panel by panel.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>

#include "core/cpu_kernel.h"

typedef void (*cblas_sgemm_function)(int order, int a_transposed, int b_transposed, int m, int n, int k, float alpha,
                                     const float *a, int lda, const float *b, int ldb, float beta, float *out, int ldo);

static cblas_sgemm_function cblas_sgemm;

static void find_cblas(void) {
    static const char *const names[] = {"libopenblas.so.0", "libmkl_rt.so.2", "libmkl_rt.so", "libblis.so.4",
                                        "libcblas.so.3"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !cblas_sgemm; i++) {
        void *library = dlopen(names[i], RTLD_LAZY | RTLD_LOCAL);
        if (library) *(void **)&cblas_sgemm = dlsym(library, "cblas_sgemm");
    }
}

/* Block sizes of our own product: a row block of `a` (64 KiB) and a panel of `b` (128 KiB) stay in the second-level
 * cache. */
enum { BLOCK_M = 64, BLOCK_N = 128, BLOCK_K = 256 };

/* Blocks as float32: the workspace of one strip. */
typedef struct workspace {
    float a[BLOCK_M][BLOCK_K], b[BLOCK_K][BLOCK_N], sum[BLOCK_M][BLOCK_N];
} workspace;

/* The blocks of the output lie in strips, one after the other, each worked off by one thread. */
typedef struct product {
    const bst_gemm *g;
    bst_dtype input, output;
    float alpha;
    int64_t column_blocks, blocks, strips;
    workspace *of_strip;
} product;

/* Element (row, column) of op(matrix) as float32. */
static float element(const void *matrix, int64_t row, int64_t column, int64_t leading, int transposed,
                     bst_dtype dtype) {
    float value;
    bst_load(&value, bst_at(matrix, transposed ? column * leading + row : row * leading + column, dtype), dtype, 1);
    return value;
}

static void multiply_block(const product *p, workspace *restrict w, int64_t row, int64_t column) {
    const bst_gemm g = *p->g; /* as its own, so that the stores below cannot change it */
    const bst_dtype input = p->input;
    int64_t m = g.m - row < BLOCK_M ? g.m - row : BLOCK_M, n = g.n - column < BLOCK_N ? g.n - column : BLOCK_N;
    memset(w->sum, 0, (size_t)m * sizeof *w->sum);
    for (int64_t depth = 0; depth < g.k; depth += BLOCK_K) {
        int64_t k = g.k - depth < BLOCK_K ? g.k - depth : BLOCK_K;
        for (int64_t i = 0; i < m; i++)
            for (int64_t l = 0; l < k; l++) w->a[i][l] = element(g.a, row + i, depth + l, g.lda, g.a_transposed, input);
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++)
                w->b[l][j] = element(g.b, depth + l, column + j, g.ldb, g.b_transposed, input);
        for (int64_t i = 0; i < m; i++)
            for (int64_t l = 0; l < k; l++)
                for (int64_t j = 0; j < n; j++) w->sum[i][j] += w->a[i][l] * w->b[l][j];
    }
    for (int64_t i = 0; i < m; i++) {
        void *out = bst_at(g.out, (row + i) * g.ldo + column, p->output);
        float old[BLOCK_N] = {0};
        if (g.beta != 0) bst_load(old, out, p->output, n);
        for (int64_t j = 0; j < n; j++) w->sum[i][j] = p->alpha * w->sum[i][j] + (g.beta != 0 ? g.beta * old[j] : 0);
        bst_store(out, w->sum[i], p->output, n);
    }
}

static void multiply_strips(void *context, int64_t begin, int64_t end) {
    const product *p = context;
    for (int64_t strip = begin; strip < end; strip++)
        for (int64_t block = p->blocks * strip / p->strips; block < p->blocks * (strip + 1) / p->strips; block++)
            multiply_block(p, &p->of_strip[strip], block / p->column_blocks * BLOCK_M,
                           block % p->column_blocks * BLOCK_N);
}

/* The caller's product. Whatever of ours it calls may leave a message; else there is one in general terms. */
static bst_status multiply_by_caller(const bst_exec *exec, const char *op, const bst_gemm *g) {
    const bst_thread *thread = bst__thread();
    unsigned before = thread ? thread->errors : 0;
    bst_status status = exec->gemm(exec->user, g);
    if (status == BST_OK) return BST_OK;
    if (thread && thread->errors != before) {
        bst_message reason = bst__message();
        return bst__error(status, "%s: %s", op, reason.text);
    }
    return bst__error(status,
                      "%s: bst_exec.gemm returned %d (%s) for a product of [%" PRId64 ", %" PRId64 "] and [%" PRId64
                      ", %" PRId64 "]",
                      op, (int)status, bst_status_text(status), g->m, g->k, g->k, g->n);
}

static bst_dtype dtype_of(DLDataType type) {
    return type.code == kDLBfloat ? BST_BF16 : type.bits == 16 ? BST_F16 : BST_F32;
}

bst_status bst__cpu_gemm(const bst_exec *exec, const char *op, const bst_gemm *g) {
    if (!g->m || !g->n) return BST_OK;
    if (exec && exec->gemm) return multiply_by_caller(exec, op, g);
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_cblas);
    product p = {.g = g,
                 .input = dtype_of(g->input_type),
                 .output = dtype_of(g->output_type),
                 .alpha = g->device_alpha ? *g->device_alpha : g->alpha,
                 .column_blocks = (g->n + BLOCK_N - 1) / BLOCK_N};
    bool fits = g->m <= INT32_MAX && g->n <= INT32_MAX && g->k <= INT32_MAX && g->lda <= INT32_MAX &&
                g->ldb <= INT32_MAX && g->ldo <= INT32_MAX;
    if (cblas_sgemm && fits && p.input == BST_F32 && p.output == BST_F32) {
        enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };
        cblas_sgemm(ROW_MAJOR, g->a_transposed ? TRANSPOSED : PLAIN, g->b_transposed ? TRANSPOSED : PLAIN, (int)g->m,
                    (int)g->n, (int)g->k, p.alpha, g->a, (int)g->lda, g->b, (int)g->ldb, g->beta, g->out, (int)g->ldo);
        return BST_OK;
    }
    p.blocks = (g->m + BLOCK_M - 1) / BLOCK_M * p.column_blocks;
    p.strips = p.blocks < bst__processors() ? p.blocks : bst__processors();
    void *memory;
    BST_TRY(bst__allocate(exec, op, g->device, (size_t)p.strips * sizeof(workspace), &memory));
    p.of_strip = memory;
    bst__parallel_for(exec, p.strips, 1, multiply_strips, &p);
    bst__release(exec, g->device, memory);
    return BST_OK;
}
