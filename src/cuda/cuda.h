/* cuda.h - the CUDA side as operators see it: describe a kernel, launch it, multiply matrices.
 *
 * Two implementations stand behind these functions: src/cuda (driver, NVRTC, cuBLASLt, all opened at run time) and
 * tests/emu (the same kernels on the CPU). Operators cannot tell which one they run on. */
#ifndef BST_CUDA_H
#define BST_CUDA_H

#include "core/core.h"

#define BST_MAX_MACROS 20

/* One __global__ function: the text it is in, its name, and the macros that specialise it. */
typedef struct bst_kernel {
    const char *file;                       /* "norm.cu": an embedded source */
    const char *entry;                      /* the extern "C" function */
    const char *macros[BST_MAX_MACROS + 1]; /* names, ended by NULL; each becomes -DNAME=value */
} bst_kernel;

/* One launch: the kernel, a value for each of its macros, and its geometry. The kernel takes one argument, a struct
 * passed by value. */
typedef struct bst_launch {
    const bst_kernel *kernel;
    int64_t values[BST_MAX_MACROS];
    unsigned grid_x, grid_y; /* grid_y: 0 means 1 */
    unsigned block;          /* threads of a block */
    unsigned cluster;        /* blocks of a cluster; 0 or 1: none */
    unsigned shared;         /* bytes of dynamic shared memory */
    bool overlap;            /* programmatic dependent launch: may begin before the kernel before it has ended */
    bool resident;           /* clusters that stay until all is done: no more of them than the chip holds at once */
} bst_launch;

/* What configurations depend on. */
typedef struct bst_chip {
    int arch;          /* 80, 86, 89, 90, 100, 120 */
    int processors;    /* multiprocessors */
    int shared_memory; /* bytes a block may use */
    int64_t l2;        /* bytes */
    int arguments;     /* bytes that a kernel's arguments may take: of the driver */
    bool warpgroups;   /* the words of warpgroup.cuh: Hopper */
    int64_t memory;    /* bytes; 0: not known, as while kernels are only compiled */
} bst_chip;

/* The chip behind a device index; opens the driver at the first call. While kernels are only compiled, the chip that is
 * compiled for. */
bst_status bst__cuda_chip(const char *op, int device, bst_chip *out);
/* BST_UNSUPPORTED where rows that take a block each, or several, are more than a grid has blocks. */
static inline bst_status bst__cuda_need_rows(const char *op, int64_t rows, int64_t blocks_each) {
    int64_t most = INT32_MAX / blocks_each;
    if (rows <= most) return BST_OK;
    return bst__error(BST_UNSUPPORTED, "%s: %lld rows are given; at most %lld are supported: split them", op,
                      (long long)rows, (long long)most);
}
/* Queues a kernel on exec's stream, compiling it first where this process has not yet done so. A grid of zero blocks
 * does nothing. */
bst_status bst__cuda_launch(const bst_exec *exec, const char *op, int device, const bst_launch *launch,
                            const void *arguments, size_t bytes);

/* Queues a matrix product on exec's stream. */
bst_status bst__cuda_gemm(const bst_exec *exec, const char *op, const bst_gemm *problem);
/* One on the problem's own device. */
static inline bst_status bst__gemm(const bst_exec *exec, const char *op, const bst_gemm *problem) {
    bool on_cuda = problem->device.device_type == kDLCUDA;
    return on_cuda ? bst__cuda_gemm(exec, op, problem) : bst__cpu_gemm(exec, op, problem);
}
/* How boxes of matrices of 16-bit numbers are copied (tensor_map.h): where the chip has warpgroups. */
struct bst_tensor_map;
typedef struct bst_boxes {
    void *data;
    bst_dtype dtype;
    uint32_t dims, rows; /* 2, or 3 for matrices one behind another; rows of a box, which is of one of these */
    uint64_t sizes[3];   /* the innermost first, whose elements are contiguous */
    uint64_t strides[2]; /* of the others, in elements; these, and the address, are multiples of 16 bytes */
} bst_boxes;
/* While kernels are only compiled: nothing. */
bst_status bst__cuda_map_boxes(const char *op, int device, const bst_boxes *boxes, struct bst_tensor_map *out);
static inline bst_status bst__cuda_tensor_map(const char *op, int device, const bst_view *matrix, uint32_t box_rows,
                                              struct bst_tensor_map *out) {
    /* That of one row says nothing. */
    const int64_t stride = matrix->size[0] > 1 ? matrix->stride[0] : bst__divided_up(matrix->size[1], 8) * 8;
    const bst_boxes boxes = {.data = matrix->data,
                             .dtype = matrix->dtype,
                             .dims = 2,
                             .rows = box_rows,
                             .sizes = {(uint64_t)matrix->size[1], (uint64_t)matrix->size[0]},
                             .strides = {(uint64_t)stride}};
    return bst__cuda_map_boxes(op, device, &boxes, out);
}
/* Copies to the host what exec's stream has left there, and waits for it. Not within a graph's capture:
 * BST_UNSUPPORTED. While kernels are only compiled: zeros. */
bst_status bst__cuda_read(const bst_exec *exec, const char *op, int device, const void *from, void *to, size_t bytes);
/* Queues a fill with zeros. */
bst_status bst__cuda_zero(const bst_exec *exec, const char *op, int device, void *memory, size_t bytes);
/* The default workspace: stream-ordered allocation. */
bst_status bst__cuda_allocate(const bst_exec *exec, const char *op, int device, size_t bytes, void **out);
void bst__cuda_release(const bst_exec *exec, int device, void *memory);

/* An embedded source by its file name ("norm.cu", "ptx.cuh", "norm_args.h"); NULL where there is none. */
typedef struct bst_source {
    const char *name, *text;
} bst_source;
extern const bst_source bst__sources[]; /* ended by a NULL name; generated by the build */

/* Tests only: while a collector is set, bst__cuda_chip describes `arch`, launches compile for it and run nothing, and
 * each compiled kernel's ptxas report goes to `report`. Where `known` is given and true of a launch, that is not
 * compiled. NULL ends it. */
typedef struct bst_compile_only {
    int arch;
    void (*report)(void *context, const bst_launch *launch, const char *options, const char *log);
    void *context;
    bool (*known)(void *context, const bst_launch *launch);
} bst_compile_only;
void bst__cuda_compile_only(const bst_compile_only *collector);

#endif
