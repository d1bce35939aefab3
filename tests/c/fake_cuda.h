/* fake_cuda.h - what a test sets in, and reads from, the driver that is none. */
#ifndef BST_FAKE_CUDA_H
#define BST_FAKE_CUDA_H

#include <stdbool.h>

typedef struct fake_cuda {
    /* How long cuBLASLt's algorithms take; negative: it does not run; 0: there are no more. Algorithm n needs 64 (n +
     * 1) bytes of workspace. */
    double product_ms[8];
    bool refuses;        /* to launch kernels */
    bool capturing;      /* the stream is being captured */
    bool out_of_memory;  /* for workspace */
    bool forked;         /* this process is a fork of one that has used the driver */
    int clusters;        /* that the device holds at once */
    int start_error;     /* what cuInit returns */
    int nvrtc_major;     /* of NVRTC's version; 0: 13 */
    const char *failing; /* the function of NVRTC that returns `failure` */
    int failure;
    const char *log;                      /* of a compilation that fails */
    void (*within)(const char *function); /* called by functions that take long: a test may hold a thread up in them */

    int products;       /* so far */
    int waits;          /* for the device */
    int last_device;    /* whose context was current when a kernel was launched last */
    unsigned last_grid; /* its blocks */
    int occupancies;    /* how often it was asked how many clusters it holds */
    int last_algorithm; /* of the product likewise */
    int live;           /* events and pieces of workspace that have not been freed */
} fake_cuda;

#endif
