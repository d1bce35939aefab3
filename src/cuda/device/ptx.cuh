/* ptx.cuh - the words our kernels are written in: everything that needs PTX or a CUDA builtin, and nothing else.
 *
 * Kernels include only the headers of this folder, by bare file name. The emulator (tests/emu/device/ptx.cuh) supplies
 * a file of this name with the same words, so a kernel that uses only them also runs on the CPU; a word added here is
 * added there. Compiled by NVRTC 12 and 13, which know no header, or by nvcc, for sm_80 and later. Section names in the
 * comments are those of NVIDIA's "Parallel Thread Execution ISA". */
#ifndef BST_PTX_CUH
#define BST_PTX_CUH

/* ---- types ------------------------------------------------------------------------------------------------------- */

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

/* Headers shared with the host leave out what only the host can compile. */
#ifndef BST_DEVICE_CODE
#define BST_DEVICE_CODE 1
#endif

/* The chip: 80, 86, 89, 90, 100, 120. nvcc reads a kernel for the host too, where only the plainest path is needed. */
#ifdef __CUDA_ARCH__
#define BST_ARCH (__CUDA_ARCH__ / 10)
#else
#define BST_ARCH 80
#endif

/* Up to 16 bytes on their way through registers, in the order in which they lie in memory. */
struct __align__(16) bst_raw {
    uint32_t w[4];
};

/* ---- functions and memory ---------------------------------------------------------------------------------------- */

/* The head of a kernel with one argument, `a`. Blocks have at most `threads` threads. */
#define BST_KERNEL(name, argument_struct, threads, min_blocks) \
    extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ argument_struct a)

#define BST_DEVICE       static __device__ __forceinline__
#define BST_INLINE       BST_DEVICE /* in texts that serve CPU and CUDA alike (core/cpu_kernel.h) */
#define BST_UNROLL       _Pragma("unroll")
#define BST_UNROLL_TWICE _Pragma("unroll 2")
#define BST_UNROLL_FOUR  _Pragma("unroll 4")
#define BST_ROLLED       _Pragma("unroll 1") /* stays a loop: fewer registers */
/* For each i from 0 to below n, a constant: unrolled. */
#define BST_EACH(i, n) BST_UNROLL for (int i = 0; i < (n); i++)

/* Inside a function: an array that the threads of a block share, 16-byte aligned, with undefined contents. */
#define BST_SHARED(type, name, count) __shared__ __align__(16) type name[count]
/* Inside a function: the launch's dynamic shared memory, 128-byte aligned, with undefined contents. */
#define BST_DYNAMIC_SHARED(name)                                   \
    extern __shared__ __align__(128) unsigned char bst_dynamic_[]; \
    unsigned char *const name = bst_dynamic_

/* ---- where this thread is ---------------------------------------------------------------------------------------- */

BST_DEVICE unsigned bst_thread(void) { return threadIdx.x; }
BST_DEVICE unsigned bst_block(void) { return blockIdx.x; }
BST_DEVICE unsigned bst_block_y(void) { return blockIdx.y; }
BST_DEVICE unsigned bst_threads(void) { return blockDim.x; }
BST_DEVICE unsigned bst_blocks(void) { return gridDim.x; }
BST_DEVICE unsigned bst_blocks_y(void) { return gridDim.y; }
BST_DEVICE unsigned bst_lane(void) { return threadIdx.x & 31u; }

/* ---- barriers and shuffles: every thread of the block, every lane of the warp takes part --------------------------
 */

BST_DEVICE void bst_sync(void) { __syncthreads(); }
BST_DEVICE void bst_sync_warp(void) { __syncwarp(); }
BST_DEVICE float bst_shuffle_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
BST_DEVICE uint32_t bst_shuffle_xor_u32(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
/* The lanes, as bits, that have the same number as this one. */
BST_DEVICE uint32_t bst_match_any(uint32_t v) { return __match_any_sync(0xffffffffu, v); }
/* The largest of a warp's numbers, and their sum, by one instruction. */
BST_DEVICE uint32_t bst_warp_max_u32(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }
BST_DEVICE uint32_t bst_warp_sum_u32(uint32_t v) { return __reduce_add_sync(0xffffffffu, v); }

/* ---- reading and writing 2, 4, 8 or 16 bytes (a constant) at an address aligned to them ----------------------------
 */

/* Any memory. What lies beyond `bytes` in the result is zero. */
BST_DEVICE bst_raw bst_read(const void *p, int bytes) {
    bst_raw v = {{0, 0, 0, 0}};
    if (bytes == 16) {
        const uint4 u = *(const uint4 *)p;
        v.w[0] = u.x, v.w[1] = u.y, v.w[2] = u.z, v.w[3] = u.w;
    } else if (bytes == 8) {
        const uint2 u = *(const uint2 *)p;
        v.w[0] = u.x, v.w[1] = u.y;
    } else if (bytes == 4) {
        v.w[0] = *(const uint32_t *)p;
    } else {
        v.w[0] = *(const uint16_t *)p;
    }
    return v;
}

/* Global memory that nothing writes while the kernel runs, read once: not kept in L1. Volatile, so that it stays behind
 * bst_wait_for_previous. "Data Movement and Conversion Instructions: ld.global.nc". */
BST_DEVICE bst_raw bst_read_once(const void *p, int bytes) {
    bst_raw v = {{0, 0, 0, 0}};
    if (bytes == 16) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                     : "l"(__cvta_generic_to_global(p)));
    } else if (bytes == 8) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(v.w[0]), "=r"(v.w[1])
                     : "l"(__cvta_generic_to_global(p)));
    } else if (bytes == 4) {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.w[0]) : "l"(__cvta_generic_to_global(p)));
    } else {
        uint16_t h;
        asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(h) : "l"(__cvta_generic_to_global(p)));
        v.w[0] = h;
    }
    return v;
}

/* Any memory. */
BST_DEVICE void bst_write(void *p, bst_raw v, int bytes) {
    if (bytes == 16) {
        *(uint4 *)p = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
    } else if (bytes == 8) {
        *(uint2 *)p = make_uint2(v.w[0], v.w[1]);
    } else if (bytes == 4) {
        *(uint32_t *)p = v.w[0];
    } else {
        *(uint16_t *)p = (uint16_t)v.w[0];
    }
}

/* Global memory that this kernel does not read again: first to leave the caches.
 * "Data Movement and Conversion Instructions: Cache Operators", "st". */
BST_DEVICE void bst_write_once(void *p, bst_raw v, int bytes) {
    if (bytes == 16) {
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.w[0]),
                     "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
                     : "memory");
    } else if (bytes == 8) {
        asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(v.w[0]), "r"(v.w[1])
                     : "memory");
    } else if (bytes == 4) {
        asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(v.w[0]) : "memory");
    } else {
        asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "h"((uint16_t)v.w[0]) : "memory");
    }
}

/* ---- conversions ------------------------------------------------------------------------------------------------- */

BST_DEVICE uint32_t bst_bits(float v) { return __float_as_uint(v); }
BST_DEVICE float bst_from_bits(uint32_t v) { return __uint_as_float(v); }

/* From the low 16 bits; the high ones are ignored. */
BST_DEVICE float bst_f32_from_bf16(uint32_t low16) { return __uint_as_float(low16 << 16); }
BST_DEVICE float bst_f32_from_f16(uint32_t low16) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((uint16_t)low16));
    return v;
}

/* Two numbers in one word, rounded to nearest even; NaN becomes 0x7fff. The first source of the instruction goes into
 * the upper half. "Data Movement and Conversion Instructions: cvt". */
BST_DEVICE uint32_t bst_bf16x2(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
BST_DEVICE uint32_t bst_f16x2(float low, float high) {
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

/* The larger of each of two pairs; a number wins over NaN. "Half Precision Floating-Point Instructions: max". */
BST_DEVICE uint32_t bst_max_bf16x2(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}
BST_DEVICE uint32_t bst_max_f16x2(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("max.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

BST_DEVICE int bst_count_bits(uint32_t v) { return __popc(v); }

/* Four of the eight bytes of b and a: byte i of the result is byte (selector >> 4 i) & 7, those of a being 0 to 3.
 * "Data Movement and Conversion Instructions: prmt". */
BST_DEVICE uint32_t bst_permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

#define BST_INFINITY __uint_as_float(0x7f800000u)
#define BST_NAN      __uint_as_float(0x7fffffffu)

/* One operation of the special-function unit each, with an error of about 2^-22, relative (log2 near 1: absolute); 1
 * ulp for the reciprocal. "Floating Point Instructions: ex2, lg2, rcp". */
BST_DEVICE float bst_exp2(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
BST_DEVICE float bst_log2(float v) {
    float r;
    asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
BST_DEVICE float bst_reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

/* 1 / sqrt(v) to 2^-22 of itself, by one instruction instead of some twenty: for what is rounded to 16 bits.
 * "Floating Point Instructions: rsqrt". */
BST_DEVICE float bst_rsqrt_near(float v) {
    float r;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

/* sqrt(v) to 2^-22 of itself: likewise; of a subnormal 0. "Floating Point Instructions: sqrt". */
BST_DEVICE float bst_sqrt_near(float v) {
    float r;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

/* Correctly rounded, but for tanh (2 ulp). */
BST_DEVICE float bst_rsqrt(float v) { return __frsqrt_rn(v); }
BST_DEVICE float bst_sqrt(float v) { return __fsqrt_rn(v); }
BST_DEVICE double bst_sqrt_double(double v) { return __dsqrt_rn(v); }
BST_DEVICE float bst_divide(float a, float b) { return __fdiv_rn(a, b); }
BST_DEVICE float bst_tanh(float v) { return tanhf(v); }
BST_DEVICE float bst_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
/* Rounded, whatever is added to it. */
BST_DEVICE float bst_product(float a, float b) { return __fmul_rn(a, b); }
/* Where one of the two is NaN, the other. */
BST_DEVICE float bst_max(float a, float b) { return fmaxf(a, b); }
BST_DEVICE float bst_min(float a, float b) { return fminf(a, b); }
BST_DEVICE float bst_abs(float v) { return fabsf(v); }

/* ---- asynchronous copies of 16 bytes, global to shared ------------------------------------------------------------
 * "Data Movement and Conversion Instructions: Asynchronous copy: cp.async". A group is what one thread issued between
 * two commits; only that thread may wait for it, and other threads see the data after a barrier that follows. */

BST_DEVICE void bst_copy_async16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
}
BST_DEVICE void bst_copy_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until at most the `newest` (a constant) latest groups of this thread are in flight. */
#define bst_copy_async_wait(newest) asm volatile("cp.async.wait_group %0;" ::"n"(newest) : "memory")

/* ---- products of small matrices: every lane of the warp takes part ------------------------------------------------
 * "Warp Level Matrix Instructions: ldmatrix, mma". Of 16-bit elements, two in a word, the lower first. */

/* Four matrices of 8 x 8 in shared memory, whose row i of matrix m begins where lane 8 m + i says, 16-byte aligned.
 * Lane l gets elements 2 (l % 4) and the next of row l / 4 of each; transposed: of column l / 4. */
BST_DEVICE void bst_load_matrices(uint32_t v[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}
BST_DEVICE void bst_load_matrices_transposed(uint32_t v[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* d += a b, a of 16 x 16, b of 16 x 8, d of 16 x 8 in float32; bf16 or (is_f16, a constant) f16. Lane l has of a, as
 * 8 x 8 matrices, upper left, lower left, upper right, lower right: of each row l / 4, elements 2 (l % 4) and the next;
 * of b, upper and lower: of each column l / 4, those rows; of d, upper and lower: of each row l / 4, those columns. */
BST_DEVICE void bst_multiply_add(float d[4], const uint32_t a[4], const uint32_t b[2], bool is_f16) {
    if (is_f16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

/* ---- programmatic dependent launch ---------------------------------------------------------------------------------
 * "Parallel Synchronization and Communication Instructions: griddepcontrol". A kernel launched with `overlap` touches
 * no global memory before bst_wait_for_previous. */

BST_DEVICE void bst_wait_for_previous(void) {
#if BST_ARCH >= 90
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
BST_DEVICE void bst_let_next_start(void) {
#if BST_ARCH >= 90
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- between blocks ---------------------------------------------------------------------------------------------- */

/* Returns what was there before. */
BST_DEVICE uint32_t bst_atomic_add_u32(uint32_t *global, uint32_t v) { return atomicAdd(global, v); }
/* What this thread wrote before is seen by every thread of the device that sees what it writes after. */
BST_DEVICE void bst_fence_device(void) { __threadfence(); }

#if BST_ARCH >= 90

/* ---- mbarriers in shared memory -------------------------------------------------------------------------------------
 * "Parallel Synchronization and Communication Instructions: mbarrier". A phase ends when all arrivals came and all
 * expected bytes were copied; phases are numbered from 0, and a wait names the parity of its phase's number. */

BST_DEVICE void bst_barrier_init(uint64_t *b, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(b)), "r"(arrivals)
                 : "memory");
}
/* After the inits, by the thread that made them, before the bst_sync that shows them to the others: orders them before
 * the other threads' use and before bulk copies (the asynchronous proxy). "fence.mbarrier_init", "fence.proxy.async".
 */
BST_DEVICE void bst_barrier_fence_init(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Arrives, and says how many bytes of bulk copies belong to this phase. */
BST_DEVICE void bst_barrier_expect(uint64_t *b, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((uint32_t)__cvta_generic_to_shared(b)),
                 "r"(bytes)
                 : "memory");
}
BST_DEVICE void bst_barrier_arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((uint32_t)__cvta_generic_to_shared(b)) : "memory");
}
#define BST_BARRIER_WAIT(name, order)                                     \
    BST_DEVICE void name(uint64_t *b, unsigned parity) {                  \
        uint32_t done;                                                    \
        do {                                                              \
            asm volatile(                                                 \
                "{\n"                                                     \
                ".reg .pred ended;\n"                                     \
                "mbarrier.try_wait.parity" order                          \
                ".shared::cta.b64 ended, [%1], %2;\n"                     \
                "selp.u32 %0, 1, 0, ended;\n"                             \
                "}"                                                       \
                : "=r"(done)                                              \
                : "r"((uint32_t)__cvta_generic_to_shared(b)), "r"(parity) \
                : "memory");                                              \
        } while (!done);                                                  \
    }
BST_BARRIER_WAIT(bst_barrier_wait, "")
/* For a phase that bst_cluster_send ends: what other blocks sent is then seen. */
BST_BARRIER_WAIT(bst_barrier_wait_cluster, ".acquire.cluster")

/* ---- bulk copies: one thread, multiples of 16 bytes, 16-byte aligned ------------------------------------------------
 * "Data Movement and Conversion Instructions: Asynchronous copy: cp.async.bulk". */

/* Completes on the barrier's byte count. */
BST_DEVICE void bst_bulk_read(void *shared, const void *global, unsigned bytes, uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"((uint32_t)__cvta_generic_to_shared(b))
                 : "memory");
}
BST_DEVICE void bst_bulk_write(void *global, const void *shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}
BST_DEVICE void bst_bulk_commit(void) { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* Waits until at most the `newest` (a constant) latest groups of this thread's bulk writes are in flight; wait_read
 * only until their source may be overwritten, which also must be so before the block ends. */
#define bst_bulk_wait(newest)      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(newest) : "memory")
#define bst_bulk_wait_read(newest) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(newest) : "memory")
/* Between ordinary accesses to shared memory and bulk copies of it: by each thread that made them, before the barrier
 * that precedes the copy. "membar / fence: fence.proxy.async". */
BST_DEVICE void bst_fence_async(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- clusters -------------------------------------------------------------------------------------------------------
 * "Special Registers: %cluster_ctarank", "barrier.cluster", "mapa". A cluster barrier must come before the first word
 * is sent to another block (it may not have begun) and between the last one's arrival and that block's end. */

BST_DEVICE unsigned bst_cluster_rank(void) {
    unsigned v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}
BST_DEVICE void bst_cluster_arrive(void) { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
BST_DEVICE void bst_cluster_wait(void) { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
BST_DEVICE void bst_cluster_sync(void) {
    bst_cluster_arrive();
    bst_cluster_wait();
}

/* Sends two words to where `shared` (8-byte aligned) lies in block `rank`, and 8 bytes' completion to its barrier at
 * `b`. The sender goes on at once. "Data Movement and Conversion Instructions: st.async". */
BST_DEVICE void bst_cluster_send(void *shared, uint64_t *b, unsigned rank, uint32_t first, uint32_t second) {
    asm volatile(
        "{\n"
        ".reg .b32 there, barrier;\n"
        "mapa.shared::cluster.u32 there, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [there], {%3, %4}, [barrier];\n"
        "}" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
        "r"((uint32_t)__cvta_generic_to_shared(b)), "r"(rank), "r"(first), "r"(second)
        : "memory");
}

#endif

#endif
