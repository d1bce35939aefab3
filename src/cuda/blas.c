/* blas.c - matrix products by cuBLASLt.
 *
 * Ours are row-major and cuBLASLt's column-major: a row-major matrix is its transpose column-major, so out = a b is
 * asked for as out^T = b^T a^T, with the operands and m and n swapped.
 *
 * Workspace is what the chosen algorithm needs (at most WORKSPACE bytes), taken from the caller's allocator at each
 * call: stream-ordered, so no two streams share it, it belongs to a graph that is being captured, and nothing is kept
 * that the caller does not see. The choice of algorithm is remembered by everything that it depends on: the
 * heuristic's, or, with autotuning, the fastest of its candidates.
 *
 * Large products of 16-bit numbers that would miss cuBLASLt's fast kernels are queued in parts (blas_cut.h), each of
 * which has a choice of its own. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "cuda/blas_choice.h"
#include "cuda/blas_cut.h"
#include "cuda/compile_only.h"
#include "cuda/cublaslt_api.h"
#include "cuda/driver.h"
#include "cuda/fork.h"
#include "cuda/library.h"
#include "cuda/stopwatch.h"

enum {
    WORKSPACE = 32 << 20,             /* with less, Hopper and Blackwell silently lose algorithms */
    REMEMBERED = 1024,                /* choices; a step has a few for each length of its sequences */
    CANDIDATES = BST_MOST_CANDIDATES, /* answers of the heuristic to choose from */
    CELL = 256,                       /* the alignment of workspace, and the room that a scalar gets in it */
};

static const bst_library_name cublaslt = {
    "cuBLASLt", "BASTILE_CUBLASLT", "nvidia-cublas", {"libcublasLt.so.13", "libcublasLt.so.12"}};

/* What the choice of an algorithm depends on. Compared as bytes: cleared before it is filled. */
typedef struct problem_key {
    int64_t m, n, k, lda, ldb, ldo;
    int64_t generation; /* of measured choices (autotune.h); 0: the heuristic's */
    int32_t device, input, output, a_transposed, b_transposed, beta_is_zero, device_alpha;
    uint32_t a_alignment, b_alignment, out_alignment;
} problem_key;

typedef struct choice {
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
} choice;

typedef struct descriptors {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, out; /* of our operands; cuBLASLt's first one is b */
} descriptors;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bst_cublaslt_api api;
static bool opened;
static cublasLtHandle_t handles[BST_MAX_DEVICES];
/* One slot for each hash: a newer choice replaces an older one, so that lengths that never come back cost nothing. */
static struct {
    bool used;
    problem_key key;
    choice choice;
} remembered[REMEMBERED];

static void in_child(void) {
    if (bst__free_lock(&lock)) memset(remembered, 0, sizeof remembered); /* one may be half written */
}
BST_IN_CHILD(in_child)

static bst_status blas_error(const char *op, const char *call, cublasStatus_t result) {
    return bst__error(BST_CUDA, "%s: %s failed: %s (%d)", op, call, api.cublasLtGetStatusString(result), (int)result);
}

#define BLAS_TRY(op, name, ...)                                              \
    do {                                                                     \
        cublasStatus_t r_ = api.name(__VA_ARGS__);                           \
        if (r_ != CUBLAS_STATUS_SUCCESS) return blas_error((op), #name, r_); \
    } while (0)

/* The device's handle. The lock is held, the device's context current. */
static bst_status open_handle(const char *op, int device, cublasLtHandle_t *out) {
    if (!opened) {
        void *library;
        BST_TRY(bst__library_open(op, &cublaslt, &library));
        const bst_symbol symbols[] = {
#define SYMBOL(name, result, arguments) {#name, &api.name},
            BST_CUBLASLT_FUNCTIONS(SYMBOL)
#undef SYMBOL
        };
        const char *missing = bst__library_symbols(library, symbols, sizeof symbols / sizeof *symbols);
        if (missing) return bst__error(BST_NO_CUDA, "%s: cuBLASLt lacks %s; 12.0 or later is needed", op, missing);
        opened = true;
    }
    if (!handles[device]) {
        int mode = bst__capture_relax();
        cublasStatus_t result = api.cublasLtCreate(&handles[device]);
        bst__capture_restore(mode);
        if (result != CUBLAS_STATUS_SUCCESS) {
            handles[device] = NULL;
            return blas_error(op, "cublasLtCreate", result);
        }
    }
    *out = handles[device];
    return BST_OK;
}

/* ---- describing -------------------------------------------------------------------------------------------------- */

static bst_status type_of(const char *op, const char *name, DLDataType type, int *out) {
    if (type.lanes == 1 && type.code == kDLFloat && type.bits == 32)
        *out = CUDA_R_32F;
    else if (type.lanes == 1 && type.code == kDLFloat && type.bits == 16)
        *out = CUDA_R_16F;
    else if (type.lanes == 1 && type.code == kDLBfloat && type.bits == 16)
        *out = CUDA_R_16BF;
    else
        return bst__error(BST_UNSUPPORTED,
                          "%s: %s of a matrix product has type code %d with %d bits; float32, bfloat16 "
                          "or float16 is needed",
                          op, name, type.code, type.bits);
    return BST_OK;
}

/* The largest power of two, up to 256, that divides an address. */
static uint32_t alignment_of(const void *address) {
    uintptr_t bits = (uintptr_t)address | CELL;
    return (uint32_t)(bits & (~bits + 1));
}

static bst_status key_of(const char *op, const bst_gemm *p, problem_key *key) {
    memset(key, 0, sizeof *key);
    BST_TRY(type_of(op, "the input", p->input_type, &key->input));
    BST_TRY(type_of(op, "the output", p->output_type, &key->output));
    if (key->output != key->input && key->output != CUDA_R_32F)
        return bst__error(BST_UNSUPPORTED, "%s: the output of a matrix product must be of its inputs' type or float32",
                          op);
    key->m = p->m, key->n = p->n, key->k = p->k;
    key->lda = p->lda, key->ldb = p->ldb, key->ldo = p->ldo;
    key->device = p->device.device_id;
    key->a_transposed = p->a_transposed != 0;
    key->b_transposed = p->b_transposed != 0;
    key->beta_is_zero = p->beta == 0.0f;
    key->device_alpha = p->device_alpha != NULL;
    key->a_alignment = alignment_of(p->a);
    key->b_alignment = alignment_of(p->b);
    key->out_alignment = alignment_of(p->out);
    return BST_OK;
}

static bst_status describe(const char *op, const problem_key *p, descriptors *d) {
    int32_t a_op = p->a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, b_op = p->b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    BLAS_TRY(op, cublasLtMatmulDescCreate, &d->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    BLAS_TRY(op, cublasLtMatmulDescSetAttribute, d->product, CUBLASLT_MATMUL_DESC_TRANSA, &b_op, sizeof b_op);
    BLAS_TRY(op, cublasLtMatmulDescSetAttribute, d->product, CUBLASLT_MATMUL_DESC_TRANSB, &a_op, sizeof a_op);
    if (p->device_alpha) {
        int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
        BLAS_TRY(op, cublasLtMatmulDescSetAttribute, d->product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof mode);
    }
    /* Columns of ours are rows of theirs. */
    uint64_t m = (uint64_t)p->m, n = (uint64_t)p->n, k = (uint64_t)p->k;
    BLAS_TRY(op, cublasLtMatrixLayoutCreate, &d->a, p->input, p->a_transposed ? m : k, p->a_transposed ? k : m, p->lda);
    BLAS_TRY(op, cublasLtMatrixLayoutCreate, &d->b, p->input, p->b_transposed ? k : n, p->b_transposed ? n : k, p->ldb);
    BLAS_TRY(op, cublasLtMatrixLayoutCreate, &d->out, p->output, n, m, p->ldo);
    return BST_OK;
}

static void destroy(const descriptors *d) {
    if (d->product) api.cublasLtMatmulDescDestroy(d->product);
    if (d->a) api.cublasLtMatrixLayoutDestroy(d->a);
    if (d->b) api.cublasLtMatrixLayoutDestroy(d->b);
    if (d->out) api.cublasLtMatrixLayoutDestroy(d->out);
}

/* ---- choosing ---------------------------------------------------------------------------------------------------- */

/* The heuristic's answers, the one to take without measuring first. */
typedef struct answers {
    int count;
    uint32_t tiles[CANDIDATES]; /* cublasLtMatmulTile_t */
    choice choices[CANDIDATES];
} answers;

static void swap_first(answers *a, int with) {
    choice c = a->choices[with];
    uint32_t tile = a->tiles[with];
    a->choices[with] = a->choices[0], a->tiles[with] = a->tiles[0];
    a->choices[0] = c, a->tiles[0] = tile;
}

static void take(const problem_key *p, const bst_chip *chip, const cublasLtMatmulHeuristicResult_t *results, int count,
                 answers *out) {
    out->count = count;
    for (int i = 0; i < count; i++) {
        size_t written;
        if (api.cublasLtMatmulAlgoConfigGetAttribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &out->tiles[i],
                                                     sizeof out->tiles[i], &written) != CUBLAS_STATUS_SUCCESS)
            out->tiles[i] = 0; /* CUBLASLT_MATMUL_TILE_UNDEFINED */
        out->choices[i] = (choice){results[i].algo, results[i].workspaceSize};
    }
    bst_product product = {chip->arch,      chip->processors,      p->m, p->n, p->k, p->a_transposed,
                           p->b_transposed, p->input != CUDA_R_32F};
    swap_first(out, bst__preferred_candidate(&product, out->tiles, count));
}

static bst_status ask(const char *op, cublasLtHandle_t handle, const bst_chip *chip, const problem_key *p,
                      const descriptors *d, cublasLtMatmulPreference_t preference, answers *out) {
    size_t workspace = WORKSPACE;
    /* Partial sums in float32 only: in the output's type they would be rounded once for each part of k. */
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const struct {
        int attribute;
        const void *value;
        size_t bytes;
    } wanted[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p->b_alignment, sizeof p->b_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p->a_alignment, sizeof p->a_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &p->out_alignment, sizeof p->out_alignment},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p->out_alignment, sizeof p->out_alignment},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        BLAS_TRY(op, cublasLtMatmulPreferenceSetAttribute, preference, wanted[i].attribute, wanted[i].value,
                 wanted[i].bytes);
    cublasLtMatmulHeuristicResult_t results[CANDIDATES];
    int count = 0;
    cublasStatus_t status = api.cublasLtMatmulAlgoGetHeuristic(handle, d->product, d->b, d->a, d->out, d->out,
                                                               preference, CANDIDATES, results, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0))
        return bst__error(BST_UNSUPPORTED,
                          "%s: cuBLASLt has no algorithm for a product of m=%lld n=%lld k=%lld with leading dimensions "
                          "%lld, %lld, %lld",
                          op, (long long)p->m, (long long)p->n, (long long)p->k, (long long)p->lda, (long long)p->ldb,
                          (long long)p->ldo);
    if (status != CUBLAS_STATUS_SUCCESS) return blas_error(op, "cublasLtMatmulAlgoGetHeuristic", status);
    take(p, chip, results, count, out);
    return BST_OK;
}

static bst_status candidates(const char *op, cublasLtHandle_t handle, const bst_chip *chip, const problem_key *p,
                             const descriptors *d, answers *out) {
    cublasLtMatmulPreference_t preference;
    BLAS_TRY(op, cublasLtMatmulPreferenceCreate, &preference);
    bst_status status = ask(op, handle, chip, p, d, preference, out);
    api.cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

/* FNV-1a over the key's words. */
static size_t place_of(const problem_key *p) {
    uint64_t h = UINT64_C(0xcbf29ce484222325), word;
    for (size_t i = 0; i + sizeof word <= sizeof *p; i += sizeof word) {
        memcpy(&word, (const char *)p + i, sizeof word);
        h = (h ^ word) * UINT64_C(0x100000001b3);
        h ^= h >> 32;
    }
    return h % REMEMBERED;
}

static bool recall(const problem_key *p, choice *out) {
    size_t at = place_of(p);
    pthread_mutex_lock(&lock);
    bool hit = remembered[at].used && memcmp(&remembered[at].key, p, sizeof *p) == 0;
    if (hit) *out = remembered[at].choice;
    pthread_mutex_unlock(&lock);
    return hit;
}

static void remember(const problem_key *p, const choice *c) {
    size_t at = place_of(p);
    pthread_mutex_lock(&lock);
    remembered[at].used = true;
    remembered[at].key = *p;
    remembered[at].choice = *c;
    pthread_mutex_unlock(&lock);
}

/* ---- multiplying ------------------------------------------------------------------------------------------------- */

/* A product that is being queued. */
typedef struct product {
    const bst_exec *exec;
    const char *op;
    const bst_device *device;
    const bst_gemm *g;
    cublasLtHandle_t handle;
    descriptors descriptors;
} product;

static bst_status run(const product *t, const choice *c) {
    const bst_exec *exec = t->exec;
    const bst_gemm *g = t->g;
    const descriptors *d = &t->descriptors;
    const char *op = t->op;
    CUstream stream = exec ? exec->stream : NULL;
    const void *alpha = &g->alpha, *beta = &g->beta;
    /* Where alpha is on the device, beta must be too: at the end of the workspace. */
    size_t beta_at = (c->workspace + CELL - 1) / CELL * CELL;
    char *workspace = NULL;
    BST_TRY(bst__allocate(exec, op, g->device, g->device_alpha ? beta_at + CELL : c->workspace, (void **)&workspace));
    CUresult written = CUDA_SUCCESS;
    cublasStatus_t result = CUBLAS_STATUS_SUCCESS;
    if (g->device_alpha) {
        alpha = g->device_alpha;
        beta = workspace + beta_at;
        unsigned bits;
        memcpy(&bits, &g->beta, sizeof bits);
        written = bst__driver()->cuMemsetD32Async((CUdeviceptr)(uintptr_t)beta, bits, 1, stream);
    }
    if (written == CUDA_SUCCESS)
        result = api.cublasLtMatmul(t->handle, d->product, alpha, g->b, d->b, g->a, d->a, beta, g->out, d->out, g->out,
                                    d->out, &c->algo, workspace, c->workspace, stream);
    bst__release(exec, g->device, workspace);
    if (written != CUDA_SUCCESS) return bst__driver_error(op, "cuMemsetD32Async", written);
    return result == CUBLAS_STATUS_SUCCESS ? BST_OK : blas_error(op, "cublasLtMatmul", result);
}

/* ---- measuring --------------------------------------------------------------------------------------------------- */

typedef struct contest {
    const product *product;
    const answers *answers;
} contest;

static bst_status queue(void *context, int candidate) {
    const contest *c = context;
    return run(c->product, &c->answers->choices[candidate]);
}

static bst_status choice_key(const product *t, const problem_key *p, const answers *a, bst_digest *out) {
    bst_machine machine;
    problem_key anywhere = *p;
    anywhere.device = 0; /* what counts is the machine, not the device's number */
    anywhere.generation = 0;
    BST_TRY(bst__stopwatch_machine(t->op, t->device, (int)api.cublasLtGetVersion(), &machine));
    bst_hash h;
    bst__choice_key(&h, &machine);
    bst__hash_add(&h, "cuBLASLt", sizeof "cuBLASLt");
    bst__hash_add(&h, &anywhere, sizeof anywhere);
    bst__hash_add(&h, a->tiles, (size_t)a->count * sizeof *a->tiles);
    *out = bst__hash_end(h);
    return BST_OK;
}

/* The fastest of the answers: the first where nothing is known. */
static bst_status fastest(const product *t, const problem_key *p, const answers *a, const choice **out) {
    *out = &a->choices[0];
    if (a->count < 2) return BST_OK;
    bst_digest key;
    char what[96];
    snprintf(what, sizeof what, "matrix product m=%lld n=%lld k=%lld", (long long)p->m, (long long)p->n,
             (long long)p->k);
    contest c = {t, a};
    bst_stopwatch watch = {t->exec, t->op, t->device, a->count, queue, &c};
    bst_race race = {a->count, what, bst__stopwatch_round, &watch};
    BST_TRY(choice_key(t, p, a, &key));
    int mode = bst__capture_relax();
    int won = bst__choice(&key, &race);
    bst__stopwatch_end(&watch);
    bst__capture_restore(mode);
    if (won > 0) *out = &a->choices[won];
    return BST_OK;
}

/* The choice for a problem, remembered or made. What is added to cannot be run twice, and so is never measured. */
static bst_status plan(const product *t, problem_key *p, choice *out) {
    if (bst__tuning() && p->beta_is_zero) p->generation = bst__tuning_generation();
    if (recall(p, out)) return BST_OK;
    if (p->generation && !bst__stopwatch_allowed(t->exec)) {
        p->generation = 0; /* for this call alone */
        if (recall(p, out)) return BST_OK;
    }
    answers a;
    const choice *best = &a.choices[0];
    BST_TRY(candidates(t->op, t->handle, &t->device->chip, p, &t->descriptors, &a));
    if (p->generation) BST_TRY(fastest(t, p, &a, &best));
    *out = *best;
    remember(p, out);
    return BST_OK;
}

static bst_status multiply_part(const bst_exec *exec, const char *op, const bst_device *device, const bst_gemm *g,
                                problem_key *p) {
    product t = {exec, op, device, g};
    choice c;
    pthread_mutex_lock(&lock);
    bst_status status = open_handle(op, p->device, &t.handle);
    pthread_mutex_unlock(&lock);
    BST_TRY(status);
    status = describe(op, p, &t.descriptors);
    if (status == BST_OK) status = plan(&t, p, &c);
    if (status == BST_OK) status = run(&t, &c);
    destroy(&t.descriptors);
    return status;
}

/* p: the whole product's key; of parts each has its own. */
static bst_status multiply(const bst_exec *exec, const char *op, const bst_device *device, const bst_gemm *g,
                           problem_key *p) {
    if (!bst__cutting_pays(g)) return multiply_part(exec, op, device, g, p);
    bst_gemm parts[BST_MOST_PARTS];
    int count = bst__cut_product(g, parts);
    for (int i = 0; i < count; i++) {
        BST_TRY(key_of(op, &parts[i], p));
        BST_TRY(multiply_part(exec, op, device, &parts[i], p));
    }
    return BST_OK;
}

/* k = 0: a sum of nothing. cuBLASLt wants at least one product. */
static bst_status multiply_nothing(const bst_exec *exec, const char *op, const bst_gemm *g) {
    if (g->beta == 1.0f) return BST_OK;
    if (g->beta != 0.0f)
        return bst__error(BST_UNSUPPORTED, "%s: a matrix product with k = 0 and beta = %g; 0 or 1 is needed", op,
                          (double)g->beta);
    size_t element = g->output_type.bits / 8u;
    BST_DRIVER_TRY(op, cuMemsetD2D8Async, (CUdeviceptr)(uintptr_t)g->out, (size_t)g->ldo * element, 0,
                   (size_t)g->n * element, (size_t)g->m, exec ? exec->stream : NULL);
    return BST_OK;
}

bst_status bst__cuda_gemm(const bst_exec *exec, const char *op, const bst_gemm *problem) {
    problem_key key;
    BST_TRY(key_of(op, problem, &key));
    bst_collector collector;
    if (!problem->m || !problem->n || bst__compiling_only(&collector)) return BST_OK;
    bst_scope scope;
    BST_TRY(bst__enter(op, problem->device.device_id, &scope));
    bst_status status =
        problem->k ? multiply(exec, op, scope.device, problem, &key) : multiply_nothing(exec, op, problem);
    bst__leave(scope);
    return status;
}
