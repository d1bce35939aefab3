/* selftest.cu - small kernels, right and wrong, that show what the emulator sees. A macro takes out the piece that
 * makes each one right: RIGHT is 1 for the correct kernel. */
#include "ptx.cuh"
#include "warpgroup.cuh"

#define BST_F16_CODE 2

struct arguments {
    const float *x;
    float *y;
    uint32_t *counter;
    int64_t count;
};

/* y[block] = sum of the block's x. */
BST_KERNEL(reduce, arguments, 128, 1) {
    BST_SHARED(float, parts, 4);
    float v = a.x[bst_block() * bst_threads() + bst_thread()];
    BST_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) v += bst_shuffle_xor(v, mask);
    if (bst_lane() == 0) parts[bst_thread() / 32] = v;
#if RIGHT
    bst_sync();
#endif
    if (bst_thread() == 0) a.y[bst_block()] = parts[0] + parts[1] + parts[2] + parts[3];
}

/* y = x turned by one place within the block, twice through one buffer: the barrier between the two rounds keeps a
 * thread from overwriting what another has yet to read. */
BST_KERNEL(reuse, arguments, 128, 1) {
    BST_DYNAMIC_SHARED(memory);
    float *const buffer = (float *)memory;
    const unsigned t = bst_thread(), next = (t + 1) % bst_threads();
    float v = a.x[t];
    for (int round = 0; round < 2; ++round) {
        buffer[t] = v;
        bst_sync();
        v = buffer[next];
#if RIGHT
        bst_sync();
#endif
    }
    a.y[t] = v;
}

/* y = x by 16-byte asynchronous copies. */
BST_KERNEL(async, arguments, 32, 1) {
    BST_DYNAMIC_SHARED(memory);
    unsigned char *const mine = memory + 16 * bst_thread();
    bst_copy_async16(mine, a.x + 4 * bst_thread());
    bst_copy_async_commit();
    bst_copy_async16(memory + 512 + 16 * bst_thread(), a.x);
    bst_copy_async_commit();
#if RIGHT
    bst_copy_async_wait(1);
#else
    bst_copy_async_wait(2);
#endif
    bst_write_once(a.y + 4 * bst_thread(), bst_read(mine, 16), 16);
    bst_copy_async_wait(0);
}

/* y = x turned by one place, while the next data is on its way into the same buffer: no thread may issue its copy
 * before its neighbour has read. Only the garbage that a copy in flight leaves in its destination shows a missing
 * barrier. */
BST_KERNEL(prefetch, arguments, 32, 1) {
    BST_DYNAMIC_SHARED(memory);
    const unsigned t = bst_thread(), next = (t + 1) % bst_threads();
    bst_write(memory + 16 * t, bst_read(a.x + 4 * t, 16), 16);
    bst_sync();
    const bst_raw v = bst_read(memory + 16 * next, 16);
#if RIGHT
    bst_sync();
#endif
    bst_copy_async16(memory + 16 * t, a.x + 512 + 4 * t);
    bst_copy_async_commit();
    bst_sync();
    bst_copy_async_wait(0);
    bst_write(a.y + 4 * t, v, 16);
}

BST_KERNEL(divergent, arguments, 64, 1) {
#if RIGHT
    bst_sync();
#else
    if (bst_thread() < 40) bst_sync();
#endif
    a.y[bst_thread()] = 1.0f;
}

BST_KERNEL(two_places, arguments, 64, 1) {
#if RIGHT
    bst_sync();
#else
    if (bst_thread() < 32) {
        bst_sync();
    } else {
        bst_sync();
    }
#endif
    a.y[bst_thread()] = 1.0f;
}

BST_KERNEL(lost_lane, arguments, 64, 1) {
#if !RIGHT
    if (bst_thread() == 37) return;
#endif
    a.y[bst_thread()] = bst_shuffle_xor(a.x[bst_thread()], 3);
}

BST_KERNEL(misaligned, arguments, 32, 1) {
    const int shift = RIGHT ? 4 : 1;
    bst_write(a.y, bst_read(a.x + shift, 16), 16);
}

BST_KERNEL(wrong_space, arguments, 32, 1) {
    BST_SHARED(float, s, 32);
    s[bst_thread()] = 1.0f;
    a.y[bst_thread()] =
        bst_from_bits(RIGHT ? bst_read(&s[bst_thread()], 4).w[0] : bst_read_once(&s[bst_thread()], 4).w[0]);
}

/* ASan ends this one: a write one element beyond a shared array. */
BST_KERNEL(overflow, arguments, 32, 1) {
    BST_SHARED(float, first, 32);
    BST_SHARED(float, second, 32);
    second[bst_thread()] = 0.0f;
    float *const p = first;
    p[bst_thread() + (RIGHT ? 0 : 1)] = 1.0f;
    a.y[bst_thread()] = p[bst_thread()] + second[bst_thread()];
}

/* The block that finishes last adds up what each one wrote: y[blocks] = sum of y[0, blocks), and
 * y[blocks + 1] its number. */
BST_KERNEL(last_block, arguments, 32, 1) {
    BST_SHARED(uint32_t, before, 1);
    if (bst_thread() == 0) {
        a.y[bst_block()] = a.x[bst_block()];
        bst_fence_device();
        before[0] = bst_atomic_add_u32(a.counter, 1);
    }
    bst_sync();
    if (before[0] != bst_blocks() - 1 || bst_thread() != 0) return;
    float sum = 0.0f;
    for (unsigned i = 0; i < bst_blocks(); ++i) sum += a.y[i];
    a.y[bst_blocks()] = sum;
    a.y[bst_blocks() + 1] = (float)bst_block();
}

BST_KERNEL(overlapping, arguments, 32, 1) {
#if RIGHT
    bst_wait_for_previous();
#endif
    bst_write(a.y + 4 * bst_thread(), bst_read(a.x + 4 * bst_thread(), 16), 16);
    bst_let_next_start();
}

/* Each word of arithmetic on x, for comparison with the host's. */
BST_KERNEL(arithmetic, arguments, 32, 1) {
    if (bst_thread() != 0) return;
    const float x = a.x[0];
    int n = 0;
    a.y[n++] = bst_exp2(x);
    a.y[n++] = bst_log2(x);
    a.y[n++] = bst_rsqrt(x);
    a.y[n++] = bst_sqrt(x);
    a.y[n++] = bst_reciprocal(x);
    a.y[n++] = bst_divide(x, 3.0f);
    a.y[n++] = bst_tanh(x);
    a.y[n++] = bst_max(x, BST_NAN);
    a.y[n++] = bst_min(x, -BST_INFINITY);
    a.y[n++] = bst_abs(-x);
    a.y[n++] = bst_fma(x, x, 1.0f);
    a.y[n++] = bst_f32_from_bf16(bst_bf16x2(x, 2.0f) >> 16);
    a.y[n++] = bst_f32_from_f16(bst_f16x2(2.0f, x));
    a.y[n++] = bst_exp2(-140.0f);
}

/* WRONG: 0 nothing, 1 a cluster barrier in place of the wait for what was sent, 2 no barrier before it is sent, 3 the
 * block ends without that wait, 4 without the barrier. For clusters of 4: y[block] = sum of x over its cluster, each x
 * sent as x and 2 x. */
BST_KERNEL(send, arguments, 32, 1) {
    BST_SHARED(float, parts, 8);
    BST_SHARED(uint64_t, met, 1);
    if (bst_thread() == 0) {
        bst_barrier_init(met, 1);
        bst_barrier_fence_init();
        bst_barrier_expect(met, 8 * 4);
    }
    bst_sync();
#if WRONG != 2
    bst_cluster_sync();
#endif
#if WRONG == 4
    if (bst_cluster_rank() == 0) return;
    bst_cluster_sync(); /* which goes on without those that have exited */
#endif
    const float x = a.x[bst_block()];
    if (bst_thread() < 4) {
        bst_cluster_send(&parts[2 * bst_cluster_rank()], met, bst_thread(), bst_bits(x), bst_bits(2.0f * x));
    }
#if WRONG == 3
    return;
#endif
#if WRONG != 1
    bst_barrier_wait_cluster(met, 0);
#endif
    bst_cluster_arrive();
    bst_cluster_wait();
    if (bst_thread() == 0) {
        float sum = 0.0f;
        for (int i = 0; i < 4; ++i) sum += parts[2 * i + 1] - parts[2 * i];
        a.y[bst_block()] = sum;
    }
#if WRONG == 1
    bst_barrier_wait_cluster(met, 0);
#endif
}

/* WRONG: 0 nothing, 1 a barrier in place of the wait for the read, 2 the source of a write reused at once, 3 no wait
 * before the end. y = 2 x by bulk copies of 512 bytes in two rounds of one buffer. */
BST_KERNEL(bulk, arguments, 128, 1) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(uint64_t, arrived, 1);
    float *const buffer = (float *)memory;
    if (bst_thread() == 0) {
        bst_barrier_init(arrived, 1);
        bst_barrier_fence_init();
    }
    bst_sync();
    for (unsigned round = 0; round < 2; ++round) {
        if (bst_thread() == 0) {
            bst_barrier_expect(arrived, 512);
            bst_bulk_read(buffer, a.x + 128 * round, 512, arrived);
        }
#if WRONG == 1
        bst_sync();
#else
        bst_barrier_wait(arrived, round & 1u);
#endif
        buffer[bst_thread()] *= 2.0f;
        bst_fence_async();
        bst_sync();
        if (bst_thread() == 0) {
            bst_bulk_write(a.y + 128 * round, buffer, 512);
            bst_bulk_commit();
#if WRONG == 2
            if (round == 1) bst_bulk_wait(0);
#elif WRONG != 3
            bst_bulk_wait_read(0);
#endif
        }
        bst_sync();
    }
}

/* WRONG: 0 nothing, 1 sums read before they are waited for, 2 a factor reused before, 3 by two warps, 4 no wait at all.
 * Row r of A is x's r-th sixteen numbers, of B those of r % 64, in bfloat16, swizzled: y[r] = A_r . B_0. */
BST_KERNEL(product, arguments, 128, 1) {
    BST_DYNAMIC_SHARED(memory);
    unsigned char *const left = memory + (1024 - bst_shared_address(memory) % 1024) % 1024, *const right =
                                                                                                left + 64 * 128;
    float sums[128];
    for (unsigned i = bst_thread(); i < 320 * 16; i += bst_threads()) {
        const unsigned row = i / 16 < 64 ? i / 16 : i / 16 - 64, to = row * 128 + i % 16 * 2;
        bst_raw raw = {{bst_bf16x2(a.x[row % 64 * 16 + i % 16], 0.0f), 0, 0, 0}};
        bst_write((i / 16 < 64 ? left : right) + (to ^ (row & 7) << 4), raw, 2);
    }
    bst_fence_async();
    bst_sync();
#if WRONG == 3
    if (bst_thread() >= 64) return;
#endif
    bst_hold_sums(sums);
    bst_products_begin();
    bst_product_64(sums, 256, bst_tile(left), bst_tile(right), 0, 1, false);
    bst_products_commit();
#if WRONG == 2
    const bst_raw zeros = {{0, 0, 0, 0}};
    bst_write(left + 2 * bst_thread(), zeros, 2);
#endif
#if WRONG == 1
    const float early[] = {sums[0], sums[2]};
#endif
#if WRONG != 4
    bst_products_wait(0);
#endif
#if WRONG != 1
    const float early[] = {sums[0], sums[2]};
#endif
    if (bst_lane() % 4 == 0)
        BST_EACH(half, 2) a.y[bst_thread() / 32 * 16 + bst_lane() / 4 + 8 * half] = early[half];
}

/* WRONG: 0 nothing, 1 words changed before they are waited for, 2 the second sums read while only the first are there.
 * Two sums under way at once: y[r] = sum over k of x[16 r + k] x[k], by a factor in registers and across, and behind
 * them x[16 r] as the product with a one. */
BST_KERNEL(kept_product, arguments, 128, 1) {
    BST_DYNAMIC_SHARED(memory);
    unsigned char *const tile = memory + (1024 - bst_shared_address(memory) % 1024) % 1024, *const ones =
                                                                                                tile + 64 * 128;
    const unsigned row = bst_thread() / 32 * 16 + bst_lane() / 4, column = bst_lane() % 4 * 2;
    float sums[64], firsts[32];
    uint32_t words[4];
    BST_EACH(i, 4) {
        const float *x = a.x + (row + i % 2 * 8) * 16 + column + i / 2 * 8;
        words[i] = bst_bf16x2(x[0], x[1]);
    }
    /* Of two boxes of 16 rows by 64 columns: row k is x[k] all along; and 64 rows whose first number is 1. */
    for (unsigned i = bst_thread(); i < 64 * 64; i += bst_threads()) {
        const unsigned r = i / 64, to = r * 128 + i % 64 * 2;
        const bst_raw all = {{bst_bf16x2(a.x[r % 16], 0.0f), 0, 0, 0}},
                      one = {{bst_bf16x2(i % 64 == 0, 0.0f), 0, 0, 0}};
        if (r < 32) bst_write(tile + (to ^ (r & 7) << 4), all, 2);
        bst_write(ones + (to ^ (r & 7) << 4), one, 2);
    }
    bst_fence_async();
    bst_sync();
    bst_hold_some(sums, 64);
    bst_hold_some(firsts, 32);
    bst_products_begin();
    bst_product_kept(sums, 128, words, bst_tile_across_of(tile, 16), 0, 1, true);
    bst_products_commit();
    bst_product_kept(firsts, 64, words, bst_tile(ones), 0, 1, false);
    bst_products_commit();
    bst_products_wait(1);
    const float early[] = {sums[4 * 15], sums[4 * 15 + 2]};
#if WRONG == 1
    words[0] = 0;
#endif
#if WRONG != 2
    bst_products_wait(0);
#endif
    const float others[] = {firsts[0], firsts[2]};
#if WRONG == 2
    bst_products_wait(0);
#endif
    bst_hold_words(words, 4);
    if (bst_lane() % 4 == 0)
        BST_EACH(half, 2) a.y[row + 8 * half] = early[half], a.y[64 + row + 8 * half] = others[half];
}

/* WRONG: 0 as many as there are, 1 more: a multiplying group would wait for ever. */
BST_KERNEL(registers, arguments, 384, 1) {
    if (bst_thread() < 128)
        bst_registers_less(40);
    else
        bst_registers_more(WRONG ? 240 : 232);
    if (bst_thread() == 0) a.y[0] = a.x[0];
}

/* WRONG: which word a chip older than Hopper has not, 0 to 2. */
BST_KERNEL(too_new, arguments, 32, 1) {
    BST_SHARED(uint64_t, barrier, 1);
    BST_DYNAMIC_SHARED(memory);
    if (bst_thread() != 0) return;
#if WRONG == 0
    bst_barrier_init(barrier, 1);
#elif WRONG == 1
    bst_bulk_write(a.y, memory, 16);
#else
    bst_cluster_arrive();
#endif
    a.y[0] = (float)*barrier;
}
