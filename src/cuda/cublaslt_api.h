/* cublaslt_api.h - the part of cuBLASLt's interface that we use, as in NVIDIA's cuBLAS documentation (12.0 and later).
 */
#ifndef BST_CUBLASLT_API_H
#define BST_CUBLASLT_API_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/driver_api.h"

typedef int cublasStatus_t;
typedef struct cublasLtContext *cublasLtHandle_t;
typedef struct cublasLtMatmulDescOpaque *cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixLayoutOpaque *cublasLtMatrixLayout_t;
typedef struct cublasLtMatmulPreferenceOpaque *cublasLtMatmulPreference_t;

typedef struct cublasLtMatmulAlgo_t {
    uint64_t data[8];
} cublasLtMatmulAlgo_t;

typedef struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
} cublasLtMatmulHeuristicResult_t;

enum { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
/* cudaDataType */
enum { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
/* cublasComputeType_t: products of float32 inputs are float32 products, not TF32. */
enum { CUBLAS_COMPUTE_32F = 68 };
/* cublasOperation_t */
enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
/* cublasLtPointerMode_t */
enum { CUBLASLT_POINTER_MODE_DEVICE = 1 };
/* cublasLtMatmulDescAttributes_t */
enum { CUBLASLT_MATMUL_DESC_POINTER_MODE = 2, CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4 };
/* cublasLtReductionScheme_t */
enum { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
/* cublasLtMatmulPreferenceAttributes_t */
enum {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};

/* cublasLtMatmulAlgoConfigAttributes_t */
enum { CUBLASLT_ALGO_CONFIG_TILE_ID = 1 };

/* X(name, result, arguments) */
#define BST_CUBLASLT_FUNCTIONS(X)                                                                                \
    X(cublasLtGetStatusString, const char *, (cublasStatus_t status))                                            \
    X(cublasLtGetVersion, size_t, (void))                                                                        \
    X(cublasLtCreate, cublasStatus_t, (cublasLtHandle_t * handle))                                               \
    X(cublasLtMatmulDescCreate, cublasStatus_t, (cublasLtMatmulDesc_t * desc, int compute_type, int scale_type)) \
    X(cublasLtMatmulDescDestroy, cublasStatus_t, (cublasLtMatmulDesc_t desc))                                    \
    X(cublasLtMatmulDescSetAttribute, cublasStatus_t,                                                            \
      (cublasLtMatmulDesc_t desc, int attribute, const void *value, size_t bytes))                               \
    X(cublasLtMatrixLayoutCreate, cublasStatus_t,                                                                \
      (cublasLtMatrixLayout_t * layout, int type, uint64_t rows, uint64_t columns, int64_t ld))                  \
    X(cublasLtMatrixLayoutDestroy, cublasStatus_t, (cublasLtMatrixLayout_t layout))                              \
    X(cublasLtMatmulPreferenceCreate, cublasStatus_t, (cublasLtMatmulPreference_t * preference))                 \
    X(cublasLtMatmulPreferenceDestroy, cublasStatus_t, (cublasLtMatmulPreference_t preference))                  \
    X(cublasLtMatmulPreferenceSetAttribute, cublasStatus_t,                                                      \
      (cublasLtMatmulPreference_t preference, int attribute, const void *value, size_t bytes))                   \
    X(cublasLtMatmulAlgoGetHeuristic, cublasStatus_t,                                                            \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,   \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted,    \
       cublasLtMatmulHeuristicResult_t *results, int *count))                                                    \
    X(cublasLtMatmulAlgoConfigGetAttribute, cublasStatus_t,                                                      \
      (const cublasLtMatmulAlgo_t *algo, int attribute, void *value, size_t bytes, size_t *written))             \
    X(cublasLtMatmul, cublasStatus_t,                                                                            \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,                     \
       cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,        \
       const void *c, cublasLtMatrixLayout_t c_layout, void *d, cublasLtMatrixLayout_t d_layout,                 \
       const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, CUstream stream))

typedef struct bst_cublaslt_api {
#define BST_DECLARE(name, result, arguments) result(*name) arguments;
    BST_CUBLASLT_FUNCTIONS(BST_DECLARE)
#undef BST_DECLARE
} bst_cublaslt_api;

#endif
