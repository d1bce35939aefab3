/* bastile.h - the public C API of Bastile: training operators for language models, forward and backward, on CPU and
 * on CUDA.
 *
 * Tensors are DLPack's DLTensor: any framework's arrays can be passed, on kDLCPU or kDLCUDA. From call to call the
 * library keeps compiled kernels and measured choices; which kernels did not compile; the driver, NVRTC, cuBLASLt and
 * CBLAS that it opened, one handle of cuBLASLt a device, and the device's primary context; and of each thread whose
 * call failed the message. It never prints, never aborts and never waits for the device, except where bst_set_autotune
 * makes it measure. It raises no signal and touches no handler or mask: where the cache's folder would need a file
 * beyond RLIMIT_FSIZE, which ends in SIGXFSZ, it is not written.
 * Every operator returns a status; bst_last_error() then holds a sentence that names the operator, the argument, what
 * was given and what is needed. A call that fails because of its arguments has written to none of its outputs.
 *
 * A struct that the caller fills begins with `size`, to be set to its sizeof. Of the other members zero means the
 * usual, and so does NULL in place of a struct of options: {.size = sizeof(bst_exec)} and NULL are the same. A program
 * so goes on to work with a later library, whose structs are longer; and with an earlier one, which refuses it
 * (BST_UNSUPPORTED) only where it sets what that one does not know. A size of zero is BST_INVALID. Tensors are read
 * during the call alone, and so are structs.
 *
 * Element types are float32, bfloat16 and float16 unless an argument says otherwise; sums are in float32. Shapes
 * are written [rows, columns]; `...` stands for any number of leading dimensions, of at most 8 in all. "One float32" is
 * a tensor of any rank with one element. Inputs of rows may have any strides as long as their last dimension is
 * contiguous and their leading dimensions fold into at most two; outputs are contiguous unless an argument says
 * otherwise, and their elements never share a place; so are weights of one dimension, labels, and what is saved of each
 * row (rstd, lse). An output may not overlap an input, unless an argument says so, nor another output. Data begins at a
 * multiple of its element's size. On CUDA 2^31 rows and more may be refused.
 *
 * On CUDA a call works in its device's primary context, which is also the CUDA runtime's: streams and memory are that
 * context's. Whatever context was current when the call began, or none, is current again when it returns.
 *
 * All functions may be called from several threads at once. A thread without calls costs nothing; a call takes up to
 * 128 KiB of its thread's stack. PyTorch's entry is in bastile/torch.h. */
#ifndef BASTILE_H
#define BASTILE_H

#include <stddef.h>
#include <stdint.h>

#ifdef BST_SYSTEM_DLPACK /* a build with -Ddlpack=system: pkg-config says so */
#include <dlpack/dlpack.h>
#else
#include "bastile/dlpack.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* BST_API: a compiler warns where the result, a status mostly, is not looked at. */
#define BST_EXPORT __attribute__((visibility("default")))
#define BST_API    BST_EXPORT __attribute__((warn_unused_result))

/* The version of this header. It stands here alone: Meson, pkg-config and Python read it. Before 1.0 a new minor
 * version may change the interface, and then changes the name that programs are linked with, libbastile.so.0.1; from
 * 1.0 on only a new major version does. */
#define BST_VERSION_MAJOR  0
#define BST_VERSION_MINOR  1
#define BST_VERSION_PATCH  0
#define BST_VERSION_NUMBER (BST_VERSION_MAJOR * 10000 + BST_VERSION_MINOR * 100 + BST_VERSION_PATCH)
#define BST_VERSION        BST_VERSION_TEXT_(BST_VERSION_MAJOR, BST_VERSION_MINOR, BST_VERSION_PATCH)
#define BST_VERSION_TEXT_(major, minor, patch)  BST_VERSION_TEXT__(major, minor, patch)
#define BST_VERSION_TEXT__(major, minor, patch) #major "." #minor "." #patch

/* Every status: name, value, text.
 *
 * BST_INVALID: arguments that mean nothing. One is missing or out of its range; shapes, types or devices do not go
 * together; an output shares memory or does not lie as it must. BST_UNSUPPORTED: they mean something, but lie beyond
 * what is served, which this header states: the element type, the kind of device or chip, a size, the number of
 * dimensions, the strides of an input that may have strides, the alignment. A copy or a conversion often helps. */
#define BST_STATUS_MAP(X)                                                                   \
    X(BST_OK, 0, "success")                                                                 \
    X(BST_INVALID, 1, "an argument is invalid")                                             \
    X(BST_UNSUPPORTED, 2, "the arguments are valid, but this operator does not serve them") \
    X(BST_NO_MEMORY, 3, "memory could not be allocated")                                    \
    X(BST_NO_CUDA, 4, "CUDA, or a library it needs, is missing or too old")                 \
    X(BST_CUDA, 5, "a CUDA call failed")                                                    \
    X(BST_COMPILE, 6, "a kernel did not compile")                                           \
    X(BST_HOST, 7, "a call into the host framework failed")

typedef enum bst_status {
#define BST_STATUS_ENUM(name, value, text) name = value,
    BST_STATUS_MAP(BST_STATUS_ENUM)
#undef BST_STATUS_ENUM
} bst_status;

/* The version of the library that runs, "major.minor.patch" and as a number that grows: BST_VERSION and
 * BST_VERSION_NUMBER of the header that it was built with. */
BST_API const char *bst_version(void);
BST_API int bst_version_number(void);
/* A status's name ("BST_INVALID") and its general meaning. Never NULL. */
BST_API const char *bst_status_name(bst_status status);
BST_API const char *bst_status_text(bst_status status);
/* What went wrong in the last failed call of this thread; "" if none failed. Valid until the thread's next call. */
BST_API const char *bst_last_error(void);

/* Adds a folder in which NVRTC and cuBLASLt are searched before the system's places: for libraries that a Python
 * package brought, say. An absolute path; it need not exist. Calls before the first use of a GPU count. */
BST_API bst_status bst_add_library_path(const char *folder);

/* How many CUDA kernels this process has made ready since it began: those that it compiled, and those that it read from
 * the cache on disk. Each counts once. Either may be NULL. */
BST_EXPORT void bst_kernel_counts(int64_t *compiled, int64_t *cached);

/* 1: on CUDA, the first matrix product of its kind measures which of cuBLASLt's algorithms is the fastest, waiting for
 * the device, and stores the choice on disk for this chip, driver and version; later ones take it. Anything but the
 * default is taken only if it was clearly faster; it may sum in another order. 0: choices are a pure function of shape
 * and chip. -1: as the environment says, BASTILE_AUTOTUNE=1 or not, as at first. It holds for calls from now on. */
BST_API bst_status bst_set_autotune(int on);
/* Forgets all measured choices, on disk too, and returns how many there were. Other processes keep what they have read.
 * What lies in a folder that cannot be written to stays, and is not counted. */
BST_EXPORT int bst_autotune_clear(void);

/* ---- Where a call runs ------------------------------------------------------------------------------------------ */

/* One matrix product, row-major: out[m, n] = alpha * op(a) op(b) + beta * out, with op(a) [m, k] and op(b) [k, n].
 * a_transposed says that a is stored [k, m], b_transposed that b is stored [n, k]. Leading dimensions in elements. The
 * library fills it; a later one may add members at its end. */
typedef struct bst_gemm {
    DLDevice device;
    int64_t m, n, k;
    const void *a, *b;
    void *out;
    int64_t lda, ldb, ldo;
    int a_transposed, b_transposed;
    DLDataType input_type, output_type; /* output_type: input_type or float32 */
    float alpha, beta;
    const float *device_alpha; /* where not NULL, a scalar in the device's memory that takes the place of alpha */
} bst_gemm;

/* What a call may use of its caller. Pass NULL, or leave members zero, for the defaults given with each. The functions
 * are called with the CUDA context current that was so when the call began, or with the device's primary one. */
typedef struct bst_exec {
    size_t size;  /* sizeof(bst_exec) */
    void *user;   /* passed to each function below */
    void *stream; /* CUDA stream; default: the legacy default stream */
    /* Workspace on a device, at least 256-byte aligned, or NULL where there is none (BST_NO_MEMORY). It is released
     * before the call returns; on CUDA the work that uses it may still be queued on `stream` then. Where allocate is
     * given, release may be NULL, for memory that needs none; without allocate, release is not called. Both are called
     * by the thread of the call. Default: aligned_alloc, cuMemAllocAsync. */
    void *(*allocate)(void *user, DLDevice device, size_t bytes);
    void (*release)(void *user, DLDevice device, void *memory);
    /* CPU: runs body over disjoint ranges that cover [0, count), each at least `grain` long but for the last.
     * Default: threads of our own, one a core. */
    void (*parallel_for)(void *user, int64_t count, int64_t grain,
                         void (*body)(void *context, int64_t begin, int64_t end), void *context);
    /* CPU: a matrix product. What it returns, unless BST_OK, is what the call returns. Default: a CBLAS found at run
     * time (float32), else a plain blocked kernel, for which `allocate` is asked. */
    bst_status (*gemm)(void *user, const bst_gemm *problem);
} bst_exec;

/* ---- norm -------------------------------------------------------------------------------------------------------- */

/* How n weight is rounded; n = x / sqrt(mean(x^2) + eps) is computed in float32, with eps finite and not below 0:
 *   LLAMA  y = round_x(n) * weight, in the promoted type of x and weight   (Llama, Qwen, Mistral)
 *   GEMMA  y = round_x(n * (1 + weight))                                   (Gemma)
 *   NONE   y = round_x(n * weight)                                         (torch.nn.functional.rms_norm)
 *   FLOAT32  y = n * weight, in float32; not where rope norms              (layer_norm under autocast on CUDA) */
typedef enum bst_casting { BST_CASTING_LLAMA, BST_CASTING_GEMMA, BST_CASTING_NONE, BST_CASTING_FLOAT32 } bst_casting;

/* RMS as above; LAYER: n = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps), LLAMA as NONE: y is rounded once. */
typedef enum bst_norm_kind { BST_NORM_RMS = 0, BST_NORM_LAYER = 1 } bst_norm_kind;

typedef struct bst_norm_options {
    size_t size; /* sizeof(bst_norm_options) */
    bst_casting casting;
    bst_norm_kind kind;
    const DLTensor *after; /* forward alone: added to y; NULL: nothing is */
} bst_norm_options;

/* y = norm(x) * weight + bias, or, where residual is given, sum = x + residual, rounded, and y that of the sum.
 * x [..., H], 1 <= H <= 65536; residual of x's shape and type, or of any where x is float32, and sum as x; or both
 * NULL; weight [H] or NULL (ones; zeros for GEMMA), of any of the three types; bias [H] or NULL (zeros), of weight's
 * type, or without one of x's; y as x, but of the type that casting gives; mean, of LAYER alone, and rstd, float32, one
 * a row, saved for the backward pass, or NULL. options NULL: RMS and LLAMA; its after, of x's shape and y's type, is
 * added to y before that is rounded, and its gradient is dy. eps is no option: 0 is a number too.
 * Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba et al., "Layer Normalization", 2016. */
BST_API bst_status bst_norm_forward(const bst_exec *exec, const DLTensor *x, const DLTensor *residual,
                                    const DLTensor *weight, const DLTensor *bias, double eps,
                                    const bst_norm_options *options, DLTensor *y, DLTensor *sum, DLTensor *mean,
                                    DLTensor *rstd);
/* What the gradients of the above are made of: dy [..., H] of y's type; x as forward had it, or its sum where there was
 * one; dsum as x, the gradient that reaches x (or the sum) from elsewhere, is added to dx before that is rounded; NULL:
 * none; weight as forward had it; mean (RMS: NULL) and rstd as forward wrote them. And where they go, each
 * NULL where not wanted: dx as x, with a residual the gradient of both terms; dweight and dbias as weight and bias,
 * summed in float32 in a fixed order. options as for forward. */
typedef struct bst_norm_backward_tensors {
    size_t size; /* sizeof(bst_norm_backward_tensors) */
    const DLTensor *dy, *x, *dsum, *weight, *mean, *rstd;
    DLTensor *dx, *dweight, *dbias;
} bst_norm_backward_tensors;

BST_API bst_status bst_norm_backward(const bst_exec *exec, const bst_norm_backward_tensors *tensors,
                                     const bst_norm_options *options);

/* ---- glu --------------------------------------------------------------------------------------------------------- */

/* What a gated unit makes of its gate g. */
typedef enum bst_activation {
    BST_SILU = 0,      /* g / (1 + exp(-g)): SwiGLU */
    BST_GELU_TANH = 1, /* g / 2 (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))): GeGLU as Gemma has it */
    BST_GELU = 2,      /* g / 2 (1 + erf(g / sqrt(2))) */
    BST_RELU = 3,      /* max(g, 0) */
    BST_RELU2 = 4,     /* max(g, 0)^2 */
    BST_SWIGLU_OAI = 5 /* g / (1 + exp(-alpha g)), and up is one more: GPT-OSS, whose limit is 7 */
} bst_activation;

typedef struct bst_glu_options {
    size_t size; /* sizeof(bst_glu_options) */
    bst_activation activation;
    int interleaved; /* of tensors that hold gate and up: not 0: in their even and odd columns, not their halves */
    double alpha;    /* of BST_SWIGLU_OAI; 0: 1.702 */
    double limit;    /* above 0; 0 or infinity: none. The gate is at most this, up between -limit and limit */
    int open_limit;  /* 0: gradients pass at the limit itself, as torch.clamp's to PyTorch 2.13; else not, as since */
} bst_glu_options;

/* y = act(a) * b, of the gate a and up b within the limit, in float32 and rounded once. a, b, y [..., I] of one type.
 * b NULL: y = act(a), without a limit. options NULL: SwiGLU, or SiLU. Shazeer, "GLU Variants Improve Transformer",
 * 2020; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025. */
BST_API bst_status bst_glu_forward(const bst_exec *exec, const DLTensor *a, const DLTensor *b,
                                   const bst_glu_options *options, DLTensor *y);
/* Its gradients, recomputed from a and b: da, db [..., I], of any strides that an input may have; either may be NULL,
 * as db is without b. y likewise, or NULL: the output once more, with the bits that forward gave, for the gradient of a
 * weight that y is multiplied with. Each of the three may take the place of dy, a or b, element for element. */
BST_API bst_status bst_glu_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *a, const DLTensor *b,
                                    const bst_glu_options *options, DLTensor *da, DLTensor *db, DLTensor *y);
/* The same of gate and up joined in h [..., 2I]. dh as h, which it may be, y [..., I], which may be dy; or NULL. */
BST_API bst_status bst_glu_joined_forward(const bst_exec *exec, const DLTensor *h, const bst_glu_options *options,
                                          DLTensor *y);
BST_API bst_status bst_glu_joined_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *h,
                                           const bst_glu_options *options, DLTensor *dh, DLTensor *y);

/* ---- rope -------------------------------------------------------------------------------------------------------- */

/* Which elements of a head are pair i, of the R / 2 pairs that turn, where it comes from and where it goes to:
 *   HALVES                 x1, x2 = x[i], x[i + R/2]       y likewise                        (Llama, Qwen)
 *   INTERLEAVED            x1, x2 = x[2 i], x[2 i + 1]     y likewise                        (Cohere, GLM)
 *   INTERLEAVED_TO_HALVES  x1, x2 = x[2 i], x[2 i + 1]     y1, y2 = y[i], y[i + R/2]         (DeepSeek) */
typedef enum bst_rope_layout {
    BST_ROPE_HALVES = 0,
    BST_ROPE_INTERLEAVED = 1,
    BST_ROPE_INTERLEAVED_TO_HALVES = 2
} bst_rope_layout;

typedef struct bst_rope_options {
    size_t size; /* sizeof(bst_rope_options) */
    bst_rope_layout layout;
    int half_tables;     /* not 0: cos and sin have an element a pair and are R / 2 wide, as GPT-OSS has them */
    int keep_type;       /* not 0: the results have q's type, whatever the tables' and weights' */
    bst_casting casting; /* of the norm: which factor a weight is, and whether its type counts for the results' */
    /* Of the norm. 0: 1e-6, for zero in a struct is the usual; bst_norm_forward takes its eps by itself, as it is. */
    double eps;
} bst_rope_options;

/* Rotary position embedding of q [B, heads, S, D] and k [B, kv_heads, S, D] (NULL: q alone), any strides with a
 * contiguous last dimension; with q_weight [D], and k_weight where there is k, after an RMSNorm of each head:
 *   z = x                                                    without weights
 *   z = x / sqrt(mean(x^2) + eps) * weight                   with them; GEMMA: * (1 + weight)
 *   y1 = z1 * cos1 - z2 * sin1,   y2 = z2 * cos2 + z1 * sin2
 * in float32 throughout and rounded once. cos, sin [B or 1, S, R], R even, R <= D: the first R elements of each head
 * turn, the others are z as they are. cos1 and cos2 lie in a table as y1 and y2 in y; with half_tables both are
 * element i of [B or 1, S, R/2]. q and k are of one type, cos and sin too, and the weights; the results have the
 * promoted type of q, cos and, LLAMA, the weights (float32 unless all are alike), or with keep_type that of q. They
 * are shaped as q and k, of any strides with a contiguous last dimension. Without a norm they may be q and k
 * themselves, but for INTERLEAVED_TO_HALVES (BST_INVALID); with one they overlap no input. D <= 2048 on both devices;
 * on CUDA B S (heads + kv_heads + 2) < 2^32 is enough. Su et al., "RoFormer", 2021; with a norm as in
 * Qwen3: Yang et al., "Qwen3 Technical Report", 2025. */
BST_API bst_status bst_rope_forward(const bst_exec *exec, const DLTensor *q, const DLTensor *k, const DLTensor *cos,
                                    const DLTensor *sin, const DLTensor *q_weight, const DLTensor *k_weight,
                                    const bst_rope_options *options, DLTensor *q_out, DLTensor *k_out);

/* The tensors of the backward pass. q, k, the weights and their gradients are NULL where there was no norm. */
typedef struct bst_rope_backward_tensors {
    size_t size;                                             /* sizeof(bst_rope_backward_tensors) */
    const DLTensor *dq_out, *dk_out;                         /* shaped as q and k, of the results' type */
    const DLTensor *q, *k, *cos, *sin, *q_weight, *k_weight; /* as forward had them */
    DLTensor *dq, *dk;               /* out, as q and k, any strides with a contiguous last dimension */
    DLTensor *dq_weight, *dk_weight; /* out, as the weights, summed in float32 in a fixed order */
} bst_rope_backward_tensors;

/* The gradients of the above: with dz1 = dy1 * cos1 + dy2 * sin2, dz2 = dy2 * cos2 - dy1 * sin1, rotated back,
 *   dx = dz                                                  without a norm; dq may be dq_out as q_out may be q
 *   dx = rstd * (m - n * mean(m * n)),  m = dz * weight,  n = x * rstd,  dweight = sum of dz * n  (GEMMA: 1 + weight)
 * and mean(x^2) computed anew. Each gradient may be NULL, but not all; where both of q's are, dq_out is not read. */
BST_API bst_status bst_rope_backward(const bst_exec *exec, const bst_rope_backward_tensors *tensors,
                                     const bst_rope_options *options);

/* ---- cross_entropy ----------------------------------------------------------------------------------------------- */

typedef enum bst_reduction { BST_REDUCTION_MEAN = 0, BST_REDUCTION_SUM = 1, BST_REDUCTION_NONE = 2 } bst_reduction;

/* With z = logit_scale * logits, then z = softcap * tanh(z / softcap) where softcap > 0; lse = log(sum_j exp(z_j));
 * w = class_weight (ones if NULL); e = label_smoothing; t = target:
 *   loss_i = (1 - e) w_t (lse - z_t) + e/V sum_j w_j (lse - z_j) + lse_square_scale * lse^2
 * and 0 where t = ignore_index. MEAN divides the first two terms by the sum of w_t over the rows not ignored, the last
 * by their number (nothing left: NaN, as torch.nn.functional.cross_entropy); where num_items is given, MEAN and SUM
 * divide the sum by it instead. All in float32 from the logits' own type. A target outside [0, V) that is not
 * ignore_index: BST_INVALID on CPU; on CUDA a NaN loss and a zero gradient row.
 *
 * ignore_index is a pointer, for every number may be one, 0 as well (a padding token): .ignore_index = &padding. */
typedef struct bst_cross_entropy_options {
    size_t size;                 /* sizeof(bst_cross_entropy_options) */
    const int64_t *ignore_index; /* NULL: -100 */
    bst_reduction reduction;
    double label_smoothing; /* [0, 1] */
    double softcap;         /* 0: none */
    double logit_scale;     /* 0: 1 */
    double lse_square_scale;
} bst_cross_entropy_options;

/* logits [..., V], T rows, 1 <= V < 2^30; target, of T elements, int64; class_weight [V] float32 or NULL; num_items:
 * one float32, or NULL; loss: one float32 (NONE: T of them). lse, float32, or NULL: [T], 0 on rows that do not count;
 * or, for the backward pass alone, [T, 2]: in place of lse the reference of a row's exponentials and their sum but for
 * the target's, which spare the gradient the rounding of lse, and p - 1 that of p. dlogits [..., V] of the logits' type
 * or NULL: the gradient for an upstream gradient of one (MEAN and SUM only). It is contiguous, or logits itself: one
 * read and one write per logit. */
BST_API bst_status bst_cross_entropy_forward(const bst_exec *exec, const DLTensor *logits, const DLTensor *target,
                                             const DLTensor *class_weight, const DLTensor *num_items,
                                             const bst_cross_entropy_options *options, DLTensor *loss, DLTensor *lse,
                                             DLTensor *dlogits);
/* The gradient for any upstream gradient. grad_loss: one float32 (NONE: T of them); lse as forward wrote it, either
 * way, and not NULL; dlogits may be logits itself. */
BST_API bst_status bst_cross_entropy_backward(const bst_exec *exec, const DLTensor *grad_loss, const DLTensor *logits,
                                              const DLTensor *target, const DLTensor *class_weight,
                                              const DLTensor *num_items, const DLTensor *lse,
                                              const bst_cross_entropy_options *options, DLTensor *dlogits);
/* tensor *= scale, scale being one float32 on the tensor's device. Where it is 1, CUDA reads and writes nothing. */
BST_API bst_status bst_scale(const bst_exec *exec, DLTensor *tensor, const DLTensor *scale);

/* ---- linear_cross_entropy ---------------------------------------------------------------------------------------- */

/* The cross_entropy of logits = hidden times weight transposed, plus bias. One struct serves both passes; what a pass
 * does not name it does not look at. 1 <= V < 2^30. */
typedef struct bst_linear_cross_entropy_tensors {
    size_t size;                              /* sizeof(bst_linear_cross_entropy_tensors) */
    const DLTensor *hidden, *weight, *target; /* [T, H]; [V, H] of hidden's type; [T] int64 */
    const DLTensor *bias;                     /* [V] of hidden's type, or NULL */
    const DLTensor *class_weight;             /* [V] float32, or NULL */
    const DLTensor *num_items;                /* one float32, or NULL */
    const DLTensor *grad_loss;                /* backward: one float32; NONE: [T] */
    DLTensor *loss;                           /* forward: one float32; NONE: [T] */
    DLTensor *lse;                            /* [T, 2] float32, saved for the backward pass as cross_entropy's: forward
                                                     NULL, or written; backward not NULL, though with dlogits it is not
                                                     read */
    DLTensor *dlogits;                        /* [T, V] of hidden's type, rows at any stride, or NULL: see below */
    DLTensor *dhidden, *dweight, *dbias;      /* as hidden, weight (or float32), bias; NULL where not wanted */
} bst_linear_cross_entropy_tensors;

/* Logits of the inputs' type are made a chunk of rows at a time, as many as `chunk_bytes` of workspace hold: all at
 * once where they fit. Fewer than 64 rows count as 64; chunks are then evened out. Below 0: BST_INVALID. 0: on CUDA a
 * 64th of its memory, 256 to 1664 MiB; where it is too little for all rows up to 4096 or an eighth of them, for dhidden
 * alone 1024 to 2048, for none 1024; on CPU 256 MiB and, but for dweight of 16 bits, an eighth, at least 512, or 256.
 *
 * Three ways to the gradients (for an upstream gradient g):
 *   - dlogits: all the logits at once, replaced by their gradient, not yet divided nor multiplied by g; backward reads
 *     it, and does both in its two products. MEAN and SUM only.
 *   - dhidden, dweight, dbias in the forward pass: made chunk by chunk for g = 1, for the caller to multiply by g
 *     (bst_scale). MEAN and SUM only, and not with dlogits.
 *   - none of these: backward makes the logits again, chunk by chunk.
 * dweight is rounded at each chunk, up to eight chunks; beyond, and where it is float32 itself, it is summed in float32
 * (on CPU each chunk's part is rounded to weight's type). dbias is summed in float64 and rounded once. */
BST_API bst_status bst_linear_cross_entropy_forward(const bst_exec *exec,
                                                    const bst_linear_cross_entropy_tensors *tensors,
                                                    const bst_cross_entropy_options *options, int64_t chunk_bytes);
BST_API bst_status bst_linear_cross_entropy_backward(const bst_exec *exec,
                                                     const bst_linear_cross_entropy_tensors *tensors,
                                                     const bst_cross_entropy_options *options, int64_t chunk_bytes);

/* ---- linear_logprobs --------------------------------------------------------------------------------------------- */

/* What trainers ask of the softmax of z, with z = logit_scale * (hidden weight^T + bias), then z = softcap * tanh(z /
 * softcap) where softcap > 0, then z / temperature; p = exp(z - lse), t = target:
 *   log_probs         log p_t: of the others' sum where that is less than p_t, so that no margin loses it
 *   entropy           -sum_j p_j log p_j
 *   lse               log(sum_j exp(z_j))
 *   log_sum_sq_probs  log(sum_j p_j^2)
 *   mean_logits       the mean of z
 *   is_top1           1 where t is the first of the largest, else 0
 * all float32 [T] but is_top1, int32 [T]; 0 where t = ignore_index. In float32 from logits of the inputs' type. A
 * target outside [0, V) that is not ignore_index: BST_INVALID on CPU; on CUDA log p is NaN, and the row's gradients
 * zero. 1 <= V < 2^30. One struct serves both passes; what a pass does not name it does not look at. */
typedef struct bst_linear_logprobs_tensors {
    size_t size;                              /* sizeof(bst_linear_logprobs_tensors) */
    const DLTensor *hidden, *weight, *target; /* [T, H]; [V, H] of hidden's type; [T] int64 */
    const DLTensor *bias;                     /* [V] of hidden's type, or NULL */
    DLTensor *log_probs;                      /* forward */
    DLTensor *pairs; /* [T, 2] float32, for backward: the largest z of a row (of 16-bit types on CUDA times log2 e) and
                        the sum of exponentials relative to it but for the target's; may be left out, as what follows */
    DLTensor *entropy; /* forward writes it, backward reads it where grad_entropy is given */
    DLTensor *lse, *log_sum_sq_probs, *mean_logits, *is_top1; /* forward */
    DLTensor *logits; /* [K, V] of hidden's type, 1 <= K <= T, rows at any stride: see below */
    const DLTensor *grad_log_probs, *grad_entropy, *grad_lse; /* backward: [T] float32, or NULL: zeros */
    DLTensor *dhidden, *dweight, *dbias, *jacobian; /* as hidden, weight, bias, or NULL; [T, H] float32: see below */
} bst_linear_logprobs_tensors;

typedef struct bst_linear_logprobs_options {
    size_t size;                 /* sizeof(bst_linear_logprobs_options) */
    const int64_t *ignore_index; /* NULL: -100 */
    double temperature;          /* 1e-6 to 1e6; 0: 1 */
    double logit_scale;          /* 0: 1 */
    double softcap;              /* 0: none */
    int64_t chunk_bytes;         /* as linear_cross_entropy's */
    /* 1: dweight of several chunks is summed in float32 and rounded once. 2: dweight is that sum, float32 whatever
     * weight's type is (on CPU each chunk's part is rounded to weight's type). 0: as 1 on CPU, on CUDA from the ninth
     * chunk on, as linear_cross_entropy's. */
    int float32_dweight;
} bst_linear_logprobs_options;

/* Logits are made by chunks of rows; forward multiplies once. Given `logits`, chunks have K rows at most, and it leaves
 * the last K there; backward, given them, uses them up, and makes the others again: three products, but for K rows two.
 * Given `jacobian` (chunk_bytes count it) and `pairs`, forward multiplies twice: row i is log_probs[i]'s gradient. */
BST_API bst_status bst_linear_logprobs_forward(const bst_exec *exec, const bst_linear_logprobs_tensors *tensors,
                                               const bst_linear_logprobs_options *options);
BST_API bst_status bst_linear_logprobs_backward(const bst_exec *exec, const bst_linear_logprobs_tensors *tensors,
                                                const bst_linear_logprobs_options *options);

/* ---- linear_divergence ------------------------------------------------------------------------------------------- */

typedef enum bst_divergence { BST_DIVERGENCE_FORWARD, BST_DIVERGENCE_REVERSE, BST_DIVERGENCE_JSD } bst_divergence;

/* How far a student's p = softmax(z), with z as linear_logprobs has it, is from a teacher's q, made likewise:
 *   forward  KL(q || p)        reverse  KL(p || q)
 *   jsd      beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p
 * Agarwal et al., "On-Policy Distillation of Language Models", 2024. Logits are float32 whatever the inputs' type, and
 * what a class adds is never negative, so that small divergences keep their digits. The teacher has no gradients. */
typedef struct bst_linear_divergence_tensors {
    size_t size;                            /* sizeof(bst_linear_divergence_tensors) */
    const DLTensor *hidden, *weight, *bias; /* [T, H]; [V, H], V < 2^30, and [V] of hidden's type; bias may be NULL */
    /* [T, G]; [V, G] and [V] of teacher_hidden's type. Or the teacher's logits [T, V], before scale and softcap; or,
     * with indices [T, K] int64, no two the same in a row, those of K classes that have all its probability. An index
     * outside [0, V): BST_INVALID on CPU; on CUDA its row is NaN. */
    const DLTensor *teacher_hidden, *teacher_weight, *teacher_bias, *teacher_logits, *teacher_indices;
    const DLTensor *mask;                /* [T] uint8, or NULL: rows of 0 give 0 and have no gradient */
    DLTensor *divergence, *entropy;      /* forward: [T] float32; the student's -sum p log p may be NULL */
    DLTensor *sums;                      /* [T, 5] float32, or NULL: forward saves it for the backward pass */
    DLTensor *dlogits;                   /* [T, V] of hidden's type, or NULL: see below */
    const DLTensor *grad, *scale;        /* backward: [T] float32; one float32 */
    DLTensor *dhidden, *dweight, *dbias; /* as hidden, weight, bias; forward: float32; NULL where not wanted */
} bst_linear_divergence_tensors;

typedef struct bst_linear_divergence_options {
    size_t size; /* sizeof(bst_linear_divergence_options) */
    bst_divergence kind;
    double beta;                 /* of jsd, between 0 and 1; 0: 0.5 */
    double temperature;          /* 1e-6 to 1e6; 0: 1 */
    double logit_scale, softcap; /* 0: 1, none */
    double teacher_logit_scale, teacher_softcap;
    int64_t chunk_bytes; /* of both logits and dlogits, as linear_cross_entropy's */
    int float32_dweight; /* as linear_logprobs' */
} bst_linear_divergence_options;

/* For a `grad` of ones forward leaves the student's logits' gradient in `dlogits`, for two products of backward's that
 * `scale` multiplies, or makes dhidden, dweight and dbias itself; else backward makes both logits again. */
BST_API bst_status bst_linear_divergence_forward(const bst_exec *exec, const bst_linear_divergence_tensors *tensors,
                                                 const bst_linear_divergence_options *options);
BST_API bst_status bst_linear_divergence_backward(const bst_exec *exec, const bst_linear_divergence_tensors *tensors,
                                                  const bst_linear_divergence_options *options);

/* ---- dequantize_4bit --------------------------------------------------------------------------------------------- */

/* A matrix of N rows and K columns whose elements, row by row, are numbers of 4 bits in blocks of `blocksize`: of two
 * in a byte the first has the upper half. packed: uint8, ceil(N K / 2) bytes of any shape; code [16] float32, what each
 * number stands for; absmax [blocks], the blocks' factors: float32, or, where nested_code is given, uint8, which stands
 * for nested_code[absmax] * nested_absmax[block / nested_blocksize] + offset, product and sum each rounded to float32;
 * nested_code [256], nested_absmax [ceil(blocks / nested_blocksize)], offset one float32: all three or none. All are
 * contiguous. Block sizes: powers of two to 65536, blocksize from 8; 0: 64 and 256. Dettmers et al., "QLoRA", 2023. */
typedef struct bst_4bit_weight {
    size_t size; /* sizeof(bst_4bit_weight) */
    const DLTensor *packed, *absmax, *code, *nested_code, *nested_absmax, *offset;
    int64_t blocksize, nested_blocksize;
} bst_4bit_weight;

/* weight [N, K], float32, bfloat16 or float16: code[number] * absmax[block] in float32, rounded once. */
BST_API bst_status bst_dequantize_4bit(const bst_exec *exec, const bst_4bit_weight *quantised, DLTensor *weight);
/* `count` weights by their place, on one device and apart in memory: on CUDA four alike in one launch. */
BST_API bst_status bst_dequantize_4bit_group(const bst_exec *exec, int64_t count,
                                             const bst_4bit_weight *const *quantised, DLTensor *const *weights);

/* ---- dropout ----------------------------------------------------------------------------------------------------- */

/* y = x * f, rounded, plus addend, or NULL, in float32; all [..., C] of one type, y with strides as the others, whose
 * place it may take. f is 0 for an element whose random word is less than 2^32 p, to nearest, or p is 1, else 1 / (1 -
 * p). Element e, row by row, has word e % 4 of Philox 4x32, of seven rounds, of the key seed[0] and the counter e / 4
 * + 2^64 seed[1]; seed [2], int64. Of y's gradient it makes that of x. Srivastava et al., "Dropout", 2014. */
BST_API bst_status bst_dropout(const bst_exec *exec, const DLTensor *x, const DLTensor *seed, const DLTensor *addend,
                               double p, DLTensor *y);

/* ---- low_rank ---------------------------------------------------------------------------------------------------- */

/* A linear layer with its adapter, y [T, N] = x weight^T + scale thin b^T + bias: x [T, K], weight [N, K], thin [T, R],
 * b [N, R], in rows with gaps or without, bias [N] or NULL, of one type. On Hopper, in 16 bits, for large layers, R to
 * 64 and sizes of multiples of 8, in one product, rounded once; else the large product is added to the rounded sum of
 * the others. */
BST_API bst_status bst_low_rank_linear(const bst_exec *exec, const DLTensor *x, const DLTensor *weight,
                                       const DLTensor *thin, const DLTensor *b, const DLTensor *bias, double scale,
                                       DLTensor *y);

/* What layers of one input, each y_i = x weight_i^T, and their adapters leave to it: dx [T, K] = g a + sum of
 * dy_i weight_i: dy_i [T, N_i], weight_i [N_i, K], g [T, R], a [R, K], of one type, in rows with gaps or without.
 * As one product where low_rank_linear is, R as large as it may be, rounded once; else each is added to those before,
 * which were rounded. */
typedef struct bst_low_rank_dx_tensors {
    size_t size;                       /* sizeof(bst_low_rank_dx_tensors) */
    const DLTensor *dy[4], *weight[4]; /* from the second on NULL: no such layer */
    const DLTensor *g, *a;             /* NULL: no adapter */
    DLTensor *dx;
} bst_low_rank_dx_tensors;

BST_API bst_status bst_low_rank_dx(const bst_exec *exec, const bst_low_rank_dx_tensors *tensors);

/* What the adapters of up to three linear layers of one input add to their results, in place: y_i [T, N_i] becomes
 * y_i + scale_i (x a_i^T) b_i^T, with x [T, K], a_i [R_i, K] and b_i [N_i, R_i]. x and all y are of one type, in rows
 * with gaps or without; all a and b are of x's type or float32, and contiguous. Sums are in float32, x a_i^T is kept
 * in it, and y_i is rounded once: of adapters in float32 beside a model in 16 bits the result of PEFT, which turns x
 * into float32. For few rows. Hu et al., "LoRA", 2021. */
typedef struct bst_low_rank_add_tensors {
    size_t size; /* sizeof(bst_low_rank_add_tensors) */
    const DLTensor *x;
    DLTensor *y[3]; /* from the second on NULL: no such layer */
    const DLTensor *a[3], *b[3];
    double scale[3]; /* 0 is that number: nothing is added */
} bst_low_rank_add_tensors;

BST_API bst_status bst_low_rank_add(const bst_exec *exec, const bst_low_rank_add_tensors *tensors);

/* Up to three linear layers of one input, for few rows: y_i [T, N_i] = x weight_i^T + bias_i, x [T, K], weight_i
 * [N_i, K], all in rows with gaps or without, bias_i [N_i] or NULL, of one type. Summed in float32, rounded once. On
 * CUDA in 16 bits, for up to 32 rows and K of a multiple of 8, each in rows that begin at multiples of 16 bytes, all
 * weights are read in one launch; else it is a product a layer, where a bias is rounded to be added to.
 *
 * A layer may have an adapter, whose scale_i (x a_i^T) b_i^T is then added as by bst_low_rank_add: a_i [R_i, K] and b_i
 * [N_i, R_i], contiguous, all of x's type or all of float32. Where all weights are read in one launch it makes
 * x a_i^T, too, of a_i that begin at multiples of 16 bytes. */
typedef struct bst_low_rank_layers_tensors {
    size_t size; /* sizeof(bst_low_rank_layers_tensors) */
    const DLTensor *x;
    const DLTensor *weight[3], *bias[3]; /* weights from the second on NULL: no such layer */
    DLTensor *y[3];
    const DLTensor *a[3], *b[3]; /* NULL: no adapter */
    double scale[3];             /* 0 is that number: nothing is added */
} bst_low_rank_layers_tensors;

BST_API bst_status bst_low_rank_layers(const bst_exec *exec, const bst_low_rank_layers_tensors *tensors);

/* A thin matrix of float32 as products of bfloat16 take it, so that an adapter of float32 beside a model of bfloat16
 * loses nothing: x [T, G, P, R], float32, P being 1 or, of the products with all three pieces of a matrix, 3, which are
 * summed up, times scale. sum [T, G, R]: those numbers in float32. pieces [T, G, 3, R], bfloat16: three that are added
 * up to each, to its 24 bits unless they pass bfloat16's exponent, each the upper half of what the ones before it
 * leave; of a number that is infinite the second is NaN. repeated [T, G, 3, R]: each rounded to bfloat16, three times
 * over, for products with the pieces of another. T rows of G groups, one beside the other or further apart: the last
 * dimension of each is contiguous. Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype",
 * 2019. */
typedef struct bst_low_rank_split_tensors {
    size_t size; /* sizeof(bst_low_rank_split_tensors) */
    const DLTensor *x;
    DLTensor *sum, *pieces, *repeated; /* NULL: not wanted */
    double scale;                      /* 0: 1 */
} bst_low_rank_split_tensors;

BST_API bst_status bst_low_rank_split(const bst_exec *exec, const bst_low_rank_split_tensors *tensors);

/* What the gradient dy [T, N] of y = scale thin b^T (thin [T, R], b [N, R]: an adapter's second product) leaves, read
 * once on CUDA in 16 bits for R of 8, 16, 24, 32 and N of a multiple of 8, each in rows that begin at multiples of 16
 * bytes: g [T, R] = scale dy b, its rows with gaps or without, and db [N, R] = scale dy^T thin, float32. The others are
 * of one type; b is contiguous. Summed in float32 in a fixed order. Hu et al., "LoRA", 2021. */
BST_API bst_status bst_low_rank_backward(const bst_exec *exec, const DLTensor *dy, const DLTensor *thin,
                                         const DLTensor *b, double scale, DLTensor *g, DLTensor *db);

/* Of a gated unit y = act(gate) * up (options as of bst_glu_forward) whose gate and up have adapters of rank R, and
 * whose y is read by a layer that may have one: from dy, gate and up [T, N], each in rows, dgate and dup as of
 * bst_glu_backward, in the places of gate and up or elsewhere, and, made of each within the same pass on CUDA where
 * low_rank above is, with W = 2 R, gate's columns first:
 *   g [T, W]       scale_gate dgate b_gate, scale_up dup b_up                        rows with gaps or without
 *   db_gate, db_up scale dgate^T and dup^T times its half of thin                    [N, R], float32
 *   da_down        g_down^T y, where g_down [T, R] is given                          [R, N], float32
 *   thin_down      y a_down^T, where a_down [R, N] is given                          [T, R]
 * y may be written, too, in the place of dy or elsewhere. What is multiplied has been rounded. thin [T, W], b_gate,
 * b_up [N, R], and all but the float32 results are of one type. Hu et al., "LoRA", 2021. */
typedef struct bst_low_rank_glu_tensors {
    size_t size; /* sizeof(bst_low_rank_glu_tensors) */
    const DLTensor *dy, *gate, *up, *thin, *b_gate, *b_up;
    const DLTensor *g_down, *a_down; /* either or both may be NULL */
    DLTensor *dgate, *dup, *g, *db_gate, *db_up;
    DLTensor *da_down, *thin_down, *y; /* NULL: not wanted */
} bst_low_rank_glu_tensors;

BST_API bst_status bst_low_rank_glu_backward(const bst_exec *exec, const bst_low_rank_glu_tensors *tensors,
                                             double scale_gate, double scale_up, const bst_glu_options *options);

#ifdef __cplusplus
}
#endif

#include "bastile/attention.h"
#include "bastile/causal_conv1d.h"
#include "bastile/gated_delta_rule.h"
#include "bastile/gated_rms_norm.h"
#include "bastile/moe.h"
#include "bastile/optim.h"

#endif
