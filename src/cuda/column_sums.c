/* column_sums.c - see device/column_sums_args.h. */
#include <assert.h>

#include "column_sums_args.h"
#include "cuda/cuda.h"

static const bst_kernel kernel = {"column_sums.cu", "column_sums", {"COLUMNS", "SPLIT", "TYPE", NULL}};

bst_status bst__column_sums(const bst_exec *exec, const char *op, int device, const float *partial, int64_t parts,
                            int64_t columns, int64_t split, bst_dtype dtype, void *const out[2]) {
    bst_launch l = {.kernel = &kernel, .values = {columns, split, (int64_t)dtype}, .block = 1024, .overlap = true};
    l.grid_x = (unsigned)((columns + 31) / 32);
    bst_column_sums_args args = {partial, {out[0], out[1]}, parts};
    return bst__cuda_launch(exec, op, device, &l, &args, sizeof args);
}
