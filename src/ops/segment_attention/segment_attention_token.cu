/* segment_attention_token.cu - attention of one query a row, y = softmax(scale q k^T + bias) v, over keys of the row's
 * own, of which heads of queries share some: token_attention reads keys and values, a part of a row's a block, and
 * token_attention_sum puts parts together, if there are several.
 *
 * token_attention: a block has up to eight heads of queries that share keys, and each of its warps takes STEP keys in
 * its turn, by tensor cores: heads by keys, whose eight rows more are zeros, and heads by elements of values. Which
 * elements make a step of the first product is nobody's concern as long as both factors agree, and which of the second
 * one a tile's columns are is known where they are written: so a lane reads 16 bytes of a key or a value at a time, and
 * nothing goes through shared memory. The largest score so far, the weights' sum and what they weigh go along, as
 * online softmax has it (Milakov and Gimelshein, 2018); the warps' are put together at the end, in their order.
 *
 * Macros: TYPE (bf16 or f16), DIM (a multiple of 8 up to 256), HAS_BIAS, IN_PARTS. token_attention_sum has the first
 * two.
 *
 * Bytes: k and v once (again for each eight of more heads, from the L2), q, bias and y; in parts, 8 DIM + 16 a part and
 * head more, within the L2. H200, bf16, 8 rows, 16 heads of 128 that share 8, us within a CUDA graph (2026-11-30): 192
 * keys 5.6 (cuDNN 10.8; the bytes 1.3), 1024 14.7 (26.9; 7.0), 4096 40.1 (86.8; 28.0). */
#include "pack.cuh"

#include "segment_attention_args.h"

#define LOG2E 1.44269504f

/* exp(score - top), zero where neither is anything. */
BST_DEVICE float weight_of(float score, float top) {
    return bst_exp2((score - (top == -BST_INFINITY ? 0 : top)) * LOG2E);
}

#ifdef HAS_BIAS
#define WARPS  (TOKEN_THREADS / 32)
#define HEADS  TOKEN_HEADS
#define STEP   16                /* keys */
#define PIECES ((DIM + 31) / 32) /* of a key: four lanes have 8 elements of each */
#define CHUNKS ((DIM + 63) / 64) /* of a value: eight lanes have 8 elements of each */
#define EARLY  (DIM <= 128)      /* values are read before scores are made, and q stays, as far as registers go */

/* Of the values of a lane's four keys the elements of a chunk that it has. */
BST_DEVICE void load_values(bst_raw v[4], const token_attention_args *a, int64_t at, const int64_t *keys,
                            const float *bias, int element) {
    const bst_raw zeros = {{0, 0, 0, 0}};
    BST_EACH(i, 4) {
        const bool there = bias[i] != -BST_INFINITY && element < DIM;
        v[i] = there ? bst_raw_at(a->v, at + keys[i] * a->v_key + element, TYPE, 8) : zeros;
    }
}

/* A product whose first factor has eight rows: the others' sums, zeros, take no registers. */
BST_DEVICE void add_product(float sum[2], uint32_t low, uint32_t high, const uint32_t right[2]) {
    const uint32_t left[4] = {low, 0, high, 0};
    float all[4] = {sum[0], sum[1], 0, 0};
    bst_multiply_add(all, left, right, TYPE == BST_F16_CODE);
    sum[0] = all[0], sum[1] = all[1];
}

BST_KERNEL(token_attention, token_attention_args, TOKEN_THREADS, 1) {
    BST_SHARED(float, sums, WARPS * HEADS * DIM);
    BST_SHARED(float, tops, WARPS *HEADS);
    BST_SHARED(float, totals, WARPS *HEADS);
    BST_SHARED(bst_raw, all_q, EARLY ? 1 : PIECES * 32);
    const int thread = (int)bst_thread(), warp = thread / 32, lane = (int)bst_lane();
    const int own = lane / 4, quarter = lane % 4; /* own: a head, a key of eight, or eight elements of a value */
    const int part = (int)(bst_block() % (unsigned)a.parts), block = (int)(bst_block() / (unsigned)a.parts);
    const int chunk = block % a.chunks, group = block / a.chunks % a.groups;
    const int64_t row = block / a.chunks / a.groups;
    const int first = group * a.shared + chunk * HEADS, behind = (group + 1) * a.shared;
    const int64_t begin = part * a.each, end = begin + a.each < a.keys ? begin + a.each : a.keys;
    const int64_t k_at = row * a.k_row + group * a.k_head, v_at = row * a.v_row + group * a.v_head;
    const bst_raw zeros = {{0, 0, 0, 0}};
    bst_raw q[PIECES];
    float out[CHUNKS][8][2] = {}, top = -BST_INFINITY, total = 0;
    bst_wait_for_previous();
    bst_let_next_start();
    BST_EACH(p, PIECES) {
        const bool there = first + own < behind && 32 * p + 8 * quarter < DIM;
        const int64_t at = row * a.q_row + (first + own) * a.q_head + 32 * p + 8 * quarter;
        q[p] = there ? bst_raw_at(a.q, at, TYPE, 8) : zeros;
        if (!EARLY && !warp) all_q[p * 32 + lane] = q[p];
    }
    if (!EARLY) bst_sync();
    BST_ROLLED
    for (int64_t turn = begin + warp * STEP; turn < end; turn += WARPS * STEP) {
        bst_raw k[2][PIECES], v[CHUNKS][4];
        float bias[4], score[2][2] = {};
        int64_t keys[4];             /* whose scores a lane has, and whose values */
        if (!EARLY) bst_sync_warp(); /* else q would be read but once, into registers */
        BST_EACH(i, 4) {
            keys[i] = turn + i / 2 * 8 + 2 * quarter + i % 2;
            bias[i] = keys[i] < end ? 0 : -BST_INFINITY;
            if (HAS_BIAS && keys[i] < end) bst_load(&bias[i], a.bias, row * a.bias_row + keys[i], TYPE, 1);
        }
        BST_EACH(half, 2)
            BST_EACH(p, PIECES) {
                const int64_t key = turn + 8 * half + own;
                const bool there = key < end && 32 * p + 8 * quarter < DIM;
                k[half][p] = there ? bst_raw_at(a.k, k_at + key * a.k_key + 32 * p + 8 * quarter, TYPE, 8) : zeros;
            }
        if (EARLY)
            BST_EACH(c, CHUNKS) load_values(v[c], &a, v_at, keys, bias, 64 * c + 8 * own);
        BST_EACH(half, 2)
            BST_EACH(p, PIECES) {
                const bst_raw of_q = EARLY ? q[p] : all_q[p * 32 + lane];
                BST_EACH(pair, 2)
                    add_product(score[half], of_q.w[2 * pair], of_q.w[2 * pair + 1], k[half][p].w + 2 * pair);
            }
        float weight[4], most = top;
        BST_EACH(i, 4) {
            /* What is not seen may be anything. */
            weight[i] = bias[i] == -BST_INFINITY ? bias[i] : score[i / 2][i % 2] * a.scale + bias[i];
            most = bst_max(most, weight[i]);
        }
        most = bst_max(most, bst_shuffle_xor(most, 1));
        most = bst_max(most, bst_shuffle_xor(most, 2));
        const float factor = weight_of(top, most);
        top = most, total *= factor;
        BST_EACH(i, 4) {
            weight[i] = weight_of(weight[i], top);
            total += weight[i];
        }
        const uint32_t low = bst_half_pair(weight[0], weight[1], TYPE);
        const uint32_t high = bst_half_pair(weight[2], weight[3], TYPE);
        BST_EACH(c, CHUNKS) {
            if (!EARLY) load_values(v[c], &a, v_at, keys, bias, 64 * c + 8 * own);
            BST_EACH(e, 8) {
                const uint32_t select = e % 2 ? 0x7632 : 0x5410; /* this element of two keys */
                const uint32_t right[2] = {bst_permute_bytes(v[c][0].w[e / 2], v[c][1].w[e / 2], select),
                                           bst_permute_bytes(v[c][2].w[e / 2], v[c][3].w[e / 2], select)};
                out[c][e][0] *= factor, out[c][e][1] *= factor;
                add_product(out[c][e], low, high, right);
            }
        }
    }
    total += bst_shuffle_xor(total, 1);
    total += bst_shuffle_xor(total, 2);
    if (!quarter) tops[warp * HEADS + own] = top, totals[warp * HEADS + own] = total;
    BST_EACH(c, CHUNKS)
        BST_EACH(e, 8)
            BST_EACH(i, 2) {
                const int at = 64 * c + 8 * (2 * quarter + i) + e;
                if (at < DIM) sums[(warp * HEADS + own) * DIM + at] = out[c][e][i];
            }
    bst_sync();
    for (int i = thread; i < HEADS * DIM; i += TOKEN_THREADS) {
        const int h = i / DIM, at = i % DIM;
        float most = -BST_INFINITY, all = 0, sum = 0;
        BST_EACH(w, WARPS) most = bst_max(most, tops[w * HEADS + h]);
        BST_EACH(w, WARPS) {
            const float factor = weight_of(tops[w * HEADS + h], most);
            all += totals[w * HEADS + h] * factor;
            sum += sums[w * HEADS * DIM + i] * factor;
        }
        if (first + h >= behind) continue;
        if (IN_PARTS) {
            const int64_t to = (part * (int64_t)a.rows + row) * a.heads + first + h;
            a.sums[to * DIM + at] = sum;
            if (!at) a.top[to] = most, a.total[to] = all;
        } else {
            sum = all > 0 ? bst_divide(sum, all) : all; /* NaN stays what it is */
            bst_store(a.y, (row * a.heads + first + h) * DIM + at, &sum, TYPE, 1);
        }
    }
}

#else

BST_KERNEL(token_attention_sum, token_attention_args, TOKEN_THREADS, 1) {
    const int64_t at = bst_block(), all_heads = (int64_t)a.rows * a.heads;
    float most = -BST_INFINITY, all = 0;
    bst_wait_for_previous();
    bst_let_next_start();
    for (int part = 0; part < a.parts; part++) most = bst_max(most, a.top[part * all_heads + at]);
    for (int part = 0; part < a.parts; part++)
        all += a.total[part * all_heads + at] * weight_of(a.top[part * all_heads + at], most);
    for (int e = (int)bst_thread(); e < DIM; e += TOKEN_THREADS) {
        float sum = 0;
        for (int part = 0; part < a.parts; part++)
            sum += a.sums[(part * all_heads + at) * DIM + e] * weight_of(a.top[part * all_heads + at], most);
        sum = all > 0 ? bst_divide(sum, all) : all;
        bst_store(a.y, at * DIM + e, &sum, TYPE, 1);
    }
}
#endif
