/* ptx.cuh - the words of src/cuda/device/ptx.cuh for a kernel that runs on the CPU: same names, same meaning.
 *
 * What is checked here rather than on a chip: alignment and address space of each access, barriers and shuffles that
 * not all threads reach, copies read before they were waited for. Approximate instructions give what libm gives. */
#ifndef BST_PTX_CUH
#define BST_PTX_CUH

#include "emu_device.h"
#include "emu_types.h"

#ifndef BST_DEVICE_CODE
#define BST_DEVICE_CODE 1
#endif

extern "C" {
__attribute__((visibility("default"))) extern const emu_runtime *emu_current;
const emu_runtime *emu_current;
}

#define EMU_TEXT_(x) #x
#define EMU_TEXT(x)  EMU_TEXT_(x)
#define EMU_HERE     __FILE__ ":" EMU_TEXT(__LINE__)

struct alignas(16) bst_raw {
    uint32_t w[4];
};

/* ---- functions and memory ---------------------------------------------------------------------------------------- */

#define BST_KERNEL(name, argument_struct, threads, min_blocks)                                              \
    static_assert((threads) >= 1 && (threads) <= 1024 && (min_blocks) >= 0, "the launch bounds of " #name); \
    extern "C" void name(const argument_struct &a);                                                         \
    static void emu_run_##name(const void *emu_given_) { name(*(const argument_struct *)emu_given_); }      \
    extern "C" {                                                                                            \
    extern __attribute__((visibility("default"))) const emu_kernel emu_kernel_##name;                       \
    const emu_kernel emu_kernel_##name = {emu_run_##name, sizeof(argument_struct), threads};                \
    }                                                                                                       \
    extern "C" void name(const argument_struct &a)

#define BST_DEVICE static inline
#define BST_INLINE BST_DEVICE
#define BST_UNROLL
#define BST_UNROLL_TWICE
#define BST_UNROLL_FOUR
#define BST_ROLLED
#define BST_EACH(i, n) for (int i = 0; i < (n); i++)

#define BST_SHARED(type, name, count) \
    static char name##_site_;         \
    type(&name)[count] = *(type(*)[count])emu_current->shared(&name##_site_, sizeof(type) * (count), EMU_HERE)
#define BST_DYNAMIC_SHARED(name) unsigned char *const name = emu_current->dynamic_shared

/* ---- where this thread is ---------------------------------------------------------------------------------------- */

BST_DEVICE unsigned bst_thread(void) { return emu_current->thread; }
BST_DEVICE unsigned bst_block(void) { return emu_current->block_x; }
BST_DEVICE unsigned bst_block_y(void) { return emu_current->block_y; }
BST_DEVICE unsigned bst_threads(void) { return emu_current->threads; }
BST_DEVICE unsigned bst_blocks(void) { return emu_current->blocks_x; }
BST_DEVICE unsigned bst_blocks_y(void) { return emu_current->blocks_y; }
BST_DEVICE unsigned bst_lane(void) { return emu_current->thread & 31u; }

/* ---- conversions ------------------------------------------------------------------------------------------------- */

BST_DEVICE uint32_t bst_bits(float v) { return emu_bits(v); }
BST_DEVICE float bst_from_bits(uint32_t v) { return emu_from_bits(v); }
BST_DEVICE float bst_f32_from_bf16(uint32_t low16) { return emu_f32_from_bf16(low16); }
BST_DEVICE float bst_f32_from_f16(uint32_t low16) { return emu_f32_from_f16(low16 & 0xffffu); }
BST_DEVICE uint32_t bst_bf16x2(float low, float high) { return emu_bf16_from_f32(low) | emu_bf16_from_f32(high) << 16; }
BST_DEVICE uint32_t bst_f16x2(float low, float high) { return emu_f16_from_f32(low) | emu_f16_from_f32(high) << 16; }

/* ---- barriers and shuffles ----------------------------------------------------------------------------------------
 */

#define bst_sync()                   emu_current->sync(EMU_HERE)
#define bst_sync_warp()              ((void)emu_current->warp(EMU_SYNC_WARP, 0, 0, EMU_HERE))
#define bst_shuffle_xor_u32(v, mask) ((uint32_t)emu_current->warp(EMU_SHUFFLE_XOR, v, mask, EMU_HERE))
#define bst_shuffle_xor(v, mask)     emu_from_bits(emu_current->warp(EMU_SHUFFLE_XOR, emu_bits(v), mask, EMU_HERE))

BST_DEVICE uint32_t emu_warp_max(uint32_t v, const char *where) {
    const emu_words own = {{v}}, *all = emu_current->gather(&own, where);
    for (int lane = 0; lane < 32; lane++) v = all[lane].w[0] > v ? all[lane].w[0] : v;
    return v;
}
#define bst_warp_max_u32(v) emu_warp_max(v, EMU_HERE)
BST_DEVICE uint32_t emu_warp_sum(uint32_t v, const char *where) {
    const emu_words own = {{v}}, *all = emu_current->gather(&own, where);
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += all[lane].w[0];
    return sum;
}
#define bst_warp_sum_u32(v) emu_warp_sum(v, EMU_HERE)
BST_DEVICE uint32_t emu_match_any(uint32_t v, const char *where) {
    const emu_words own = {{v}}, *all = emu_current->gather(&own, where);
    uint32_t same = 0;
    for (int lane = 0; lane < 32; lane++) same |= (uint32_t)(all[lane].w[0] == v) << lane;
    return same;
}
#define bst_match_any(v) emu_match_any(v, EMU_HERE)

/* ---- reading and writing ----------------------------------------------------------------------------------------- */

BST_DEVICE bst_raw emu_read(const char *name, const void *p, int bytes, int space, const char *where) {
    emu_current->access(name, p, bytes, space, where);
    bst_raw v = {{0, 0, 0, 0}};
    if (bytes == 16) __builtin_memcpy(v.w, p, 16);
    if (bytes == 8) __builtin_memcpy(v.w, p, 8);
    if (bytes == 4) __builtin_memcpy(v.w, p, 4);
    if (bytes == 2) __builtin_memcpy(v.w, p, 2);
    return v;
}
BST_DEVICE void emu_write(const char *name, void *p, bst_raw v, int bytes, int space, const char *where) {
    emu_current->access(name, p, bytes, space, where);
    if (bytes == 16) __builtin_memcpy(p, v.w, 16);
    if (bytes == 8) __builtin_memcpy(p, v.w, 8);
    if (bytes == 4) __builtin_memcpy(p, v.w, 4);
    if (bytes == 2) __builtin_memcpy(p, v.w, 2);
}
#define bst_read(p, bytes)          emu_read("bst_read", p, bytes, EMU_ANY, EMU_HERE)
#define bst_read_once(p, bytes)     emu_read("bst_read_once", p, bytes, EMU_GLOBAL, EMU_HERE)
#define bst_write(p, v, bytes)      emu_write("bst_write", p, v, bytes, EMU_ANY, EMU_HERE)
#define bst_write_once(p, v, bytes) emu_write("bst_write_once", p, v, bytes, EMU_GLOBAL, EMU_HERE)

/* ---- arithmetic -------------------------------------------------------------------------------------------------- */

#define BST_INFINITY __builtin_inff()
#define BST_NAN      emu_from_bits(0x7fffffffu)

/* What .ftz does: a subnormal becomes a zero of its sign. */
BST_DEVICE float emu_flush(float v) {
    return (emu_bits(v) & 0x7f800000u) ? v : emu_from_bits(emu_bits(v) & 0x80000000u);
}
BST_DEVICE float bst_exp2(float v) { return emu_flush(__builtin_exp2f(emu_flush(v))); }
BST_DEVICE float bst_log2(float v) { return __builtin_log2f(v); }
BST_DEVICE float bst_divide(float a, float b) { return a / b; }
BST_DEVICE float bst_reciprocal(float v) { return emu_flush(bst_divide(1.0f, emu_flush(v))); }
BST_DEVICE float bst_sqrt(float v) { return __builtin_sqrtf(v); }
BST_DEVICE float bst_sqrt_near(float v) { return __builtin_sqrtf(emu_flush(v)); }
BST_DEVICE double bst_sqrt_double(double v) { return __builtin_sqrt(v); }
BST_DEVICE float bst_rsqrt(float v) { return (float)(1.0 / __builtin_sqrt((double)v)); }
BST_DEVICE float bst_rsqrt_near(float v) { return bst_rsqrt(v); }
BST_DEVICE float bst_tanh(float v) { return __builtin_tanhf(v); }
BST_DEVICE float bst_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
BST_DEVICE float bst_product(float a, float b) { return a * b; }
BST_DEVICE float bst_max(float a, float b) { return __builtin_fmaxf(a, b); }
BST_DEVICE float bst_min(float a, float b) { return __builtin_fminf(a, b); }
BST_DEVICE float bst_abs(float v) { return __builtin_fabsf(v); }

BST_DEVICE uint32_t bst_max_bf16x2(uint32_t a, uint32_t b) {
    return bst_bf16x2(bst_max(bst_f32_from_bf16(a & 0xffffu), bst_f32_from_bf16(b & 0xffffu)),
                      bst_max(bst_f32_from_bf16(a >> 16), bst_f32_from_bf16(b >> 16)));
}
BST_DEVICE int bst_count_bits(uint32_t v) { return __builtin_popcount(v); }
BST_DEVICE uint32_t bst_permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return v;
}
BST_DEVICE uint32_t bst_max_f16x2(uint32_t a, uint32_t b) {
    return bst_f16x2(bst_max(bst_f32_from_f16(a), bst_f32_from_f16(b)),
                     bst_max(bst_f32_from_f16(a >> 16), bst_f32_from_f16(b >> 16)));
}

/* ---- asynchronous copies of 16 bytes -------------------------------------------------------------------------------
 */

#define bst_copy_async16(shared, global) emu_current->copy_async16(shared, global, EMU_HERE)
#define bst_copy_async_commit()          emu_current->copy_commit()
#define bst_copy_async_wait(newest)                                \
    do {                                                           \
        static_assert((newest) >= 0, "a constant, at least zero"); \
        emu_current->copy_wait(newest);                            \
    } while (0)

/* ---- products of small matrices ---------------------------------------------------------------------------------- */

BST_DEVICE void emu_load_matrices(uint32_t v[4], const void *row, bool transposed, const char *where) {
    const int lane = (int)bst_lane();
    emu_current->access("bst_load_matrices", row, 16, EMU_SHARED, where);
    emu_words own = {};
    __builtin_memcpy(own.w, row, 16);
    const emu_words *rows = emu_current->gather(&own, where);
    for (int m = 0; m < 4; m++) {
        uint16_t pair[2];
        for (int i = 0; i < 2; i++) {
            const int of_row = transposed ? 2 * (lane % 4) + i : lane / 4,
                      column = transposed ? lane / 4 : 2 * (lane % 4) + i;
            __builtin_memcpy(&pair[i], (const char *)rows[8 * m + of_row].w + 2 * column, 2);
        }
        v[m] = (uint32_t)pair[1] << 16 | pair[0];
    }
}
#define bst_load_matrices(v, row)            emu_load_matrices(v, row, false, EMU_HERE)
#define bst_load_matrices_transposed(v, row) emu_load_matrices(v, row, true, EMU_HERE)

BST_DEVICE void emu_multiply_add(float d[4], const uint32_t a[4], const uint32_t b[2], bool is_f16, const char *where) {
    const emu_words factors = {{a[0], a[1], a[2], a[3], b[0], b[1]}};
    float sums[4] = {d[0], d[1], d[2], d[3]};
    emu_current->multiply_add(sums, &factors, is_f16, where);
    for (int j = 0; j < 4; j++) d[j] = sums[j];
}
#define bst_multiply_add(d, a, b, is_f16) emu_multiply_add(d, a, b, is_f16, EMU_HERE)

/* ---- between launches and blocks --------------------------------------------------------------------------------- */

#define bst_wait_for_previous() emu_current->waited_for_previous()
#define bst_let_next_start()    ((void)0)

BST_DEVICE uint32_t emu_atomic_add_u32(uint32_t *global, uint32_t v, const char *where) {
    emu_current->access("bst_atomic_add_u32", global, 4, EMU_GLOBAL, where);
    const uint32_t before = *global;
    *global = before + v;
    return before;
}
#define bst_atomic_add_u32(global, v) emu_atomic_add_u32(global, v, EMU_HERE)
#define bst_fence_device()            ((void)0)

/* ---- mbarriers and bulk copies: from sm_90 on, which is checked where they run -------------------
 */

BST_DEVICE void *emu_barrier(uint64_t *b) { return b; }
#define bst_barrier_init(b, arrivals)           emu_current->barrier_init(emu_barrier(b), arrivals, EMU_HERE)
#define bst_barrier_fence_init()                ((void)0)
#define bst_barrier_expect(b, bytes)            emu_current->barrier_arrive(emu_barrier(b), bytes, EMU_HERE)
#define bst_barrier_arrive(b)                   emu_current->barrier_arrive(emu_barrier(b), 0, EMU_HERE)
#define bst_barrier_wait(b, parity)             emu_current->barrier_wait(emu_barrier(b), parity, EMU_HERE)
#define bst_barrier_wait_cluster(b, parity)     emu_current->barrier_wait(emu_barrier(b), parity, EMU_HERE)
#define bst_bulk_read(shared, global, bytes, b) emu_current->bulk_read(shared, global, bytes, emu_barrier(b), EMU_HERE)
#define bst_bulk_write(global, shared, bytes)   emu_current->bulk_write(global, shared, bytes, EMU_HERE)
#define bst_bulk_commit()                       emu_current->bulk_commit()
#define bst_bulk_wait(newest)                                      \
    do {                                                           \
        static_assert((newest) >= 0, "a constant, at least zero"); \
        emu_current->bulk_wait(newest, 0);                         \
    } while (0)
#define bst_bulk_wait_read(newest)                                 \
    do {                                                           \
        static_assert((newest) >= 0, "a constant, at least zero"); \
        emu_current->bulk_wait(newest, 1);                         \
    } while (0)
#define bst_fence_async() ((void)0)

/* ---- clusters -----------------------------------------------------------------------------------------------------
 */

BST_DEVICE unsigned bst_cluster_rank(void) { return emu_current->cluster_rank; }
#define bst_cluster_arrive() emu_current->cluster_arrive(EMU_HERE)
#define bst_cluster_wait()   emu_current->cluster_wait(EMU_HERE)
#define bst_cluster_sync()   (emu_current->cluster_arrive(EMU_HERE), emu_current->cluster_wait(EMU_HERE))
#define bst_cluster_send(shared, b, rank, first, second) \
    emu_current->cluster_send(shared, emu_barrier(b), rank, first, second, EMU_HERE)

#endif
