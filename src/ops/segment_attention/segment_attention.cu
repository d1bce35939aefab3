/* segment_attention.cu - attention within segments of a batch's tokens, forward, on Hopper's tensor cores: y_i = sum
 * over the keys j that i sees of exp(scale q_i . k_j - lse_i) v_j.
 *
 * Macros: those of segment_attention_pieces.cuh.
 *
 * A block takes every so many tiles of 128 queries. A thread copies them, and their keys and values tile by tile,
 * while two warp groups have 64 queries each. These have the scores of the next keys made while they make weights of
 * the last ones, and the values' sums while they make weights of the next (Shah et al., "FlashAttention-3", 2024, have
 * both).
 * Bytes: q once, k and v once for each tile of queries, most of it from the L2, y and lse once. What limits it is the
 * tensor cores, and with short sequences that tiles are not whole ones. Measured on an H200, bf16, causal, us, beside
 * PyTorch's flash attention and cuDNN: a row of 8192, 32 heads of 128 on 8, 842, 1804 and 913 (653 TFLOP/s), in a
 * window of 4096 663 and 1571; four rows of 1024, 16 heads on 8, 46, 107 and 50, of 265 to 995 tokens 36 and 80; a row
 * of 8192 of 32 heads of 64 616, 1013 and 631, 8 of 256 430, 1065 and 491. 168 registers. */
#include "segment_attention_pieces.cuh"

/* Scores become weights relative to the largest score so far, `top`. factor: what weights before are to be multiplied
 * by; total: this thread's part of the sum of all so far. */
BST_DEVICE void weigh(float *scores, float top[2], float total[2], float factor[2], float scale) {
    BST_EACH(half, 2) {
        float most = top[half], sums[2] = {0, 0};
        BST_EACH(i, KEYS / 4) most = bst_max(most, scores[i / 2 * 4 + 2 * half + i % 2]);
        most = bst_max(most, bst_shuffle_xor(most, 1));
        most = bst_max(most, bst_shuffle_xor(most, 2));
        const float reference = most == -BST_INFINITY ? 0.0f : most * scale;
        factor[half] = bst_exp2(bst_fma(top[half], scale, -reference));
        top[half] = most;
        BST_EACH(i, KEYS / 4) {
            float *weight = scores + i / 2 * 4 + 2 * half + i % 2;
            *weight = bst_exp2(bst_fma(*weight, scale, -reference));
            sums[i % 2] += *weight;
        }
        total[half] = bst_fma(total[half], factor[half], sums[0] + sums[1]);
    }
}

BST_DEVICE void store(const attention_forward_args *a, const tile *t, int worker, float *sums, const float top[2],
                      const float total[2]) {
    BST_EACH(half, 2) {
        const int row = t->first + worker * HALF + own_row() + 8 * half;
        const bool is_row = row < t->end;
        float sum = total[half];
        sum += bst_shuffle_xor(sum, 1);
        sum += bst_shuffle_xor(sum, 2);
        const float inverse = sum > 0.0f ? bst_divide(1.0f, sum) : 0.0f;
        BST_EACH(i, DIM / 4) sums[i / 2 * 4 + 2 * half + i % 2] *= inverse;
        bst_tile_store_row(a->y, ((int64_t)row * a->of.heads + t->head) * WIDTH, sums, half, 0, WIDTH, DIM, is_row,
                           TYPE);
        const float lse = bst_fma(top[half], a->of.scale, bst_log2(sum)) * (1.0f / LOG2_E);
        if (is_row && bst_lane() % 4 == 0)
            a->lse[(int64_t)t->head * a->of.queries + row] = sum > 0.0f ? lse : BST_INFINITY;
    }
}

BST_DEVICE void copy(const attention_forward_args *a, const tile *t, own *queries, ring *r) {
    const span keys = span_of(t, t->first, ROWS, a->of.window);
    const int tiles = keys.end - keys.begin, group = t->head / (a->of.heads / a->of.groups);
    if (!tiles) return;
    bst_barrier_wait(queries->empty, queries->parity ^ 1);
    bst_barrier_expect(queries->full, QUERY_PIECE);
    copy_rows(queries->memory, &a->q, t->head, t->first, ROWS, queries->full);
    queries->parity ^= 1;
    BST_ROLLED
    for (int i = 0; i <= tiles; i++) /* the keys of one tile come before the values of the one before */
        BST_EACH(side, 2) {
            const int at = side ? tiles - i : tiles - 1 - i;
            if (at < 0 || at >= tiles) continue;
            uint64_t *full = r->full + r->at.index;
            wait_for_room(r);
            bst_barrier_expect(full, KEY_PIECE);
            copy_rows(stage_of(r, KEY_PIECE), side ? &a->v : &a->k, group, t->key + (keys.begin + at) * KEYS, KEYS,
                      full);
            bst_next_stage(&r->at, ATTENTION_STAGES);
        }
}

/* A half without rows: stages are left as they come. */
BST_DEVICE void sit_out(int tiles, own *queries, ring *r) {
    bst_barrier_wait(queries->full, queries->parity);
    leave(queries->empty);
    BST_ROLLED
    for (int i = 0; i < 2 * tiles; i++) {
        wait_for_stage(r);
        leave(r->empty + r->at.index);
        bst_next_stage(&r->at, ATTENTION_STAGES);
    }
}

BST_DEVICE void begin_scores(float *scores, const unsigned char *rows, const ring *r) {
    wait_for_stage(r);
    bst_hold_some(scores, KEYS / 2);
    bst_products_begin();
    multiply_heads(scores, KEYS, rows, ROWS, stage_of(r, KEY_PIECE));
    bst_products_commit();
}

BST_DEVICE void begin_values(float *sums, uint32_t *words, const ring *r, int add) {
    wait_for_stage(r);
    bst_hold_some(sums, DIM / 2);
    bst_hold_words(words, KEYS / 4);
    bst_products_begin();
    multiply_tokens(sums, words, stage_of(r, KEY_PIECE), KEYS, add);
    bst_products_commit();
}

BST_DEVICE void work(const attention_forward_args *a, const tile *t, int worker, own *queries, ring *r) {
    float sums[DIM / 2], scores[KEYS / 2], top[2] = {-BST_INFINITY, -BST_INFINITY}, total[2] = {0, 0}, factor[2];
    uint32_t words[KEYS / 4];
    const int first = t->first + worker * HALF, window = a->of.window;
    const span keys = span_of(t, t->first, ROWS, window), own_keys = span_of(t, first, HALF, window);
    const int tiles = keys.end - keys.begin;
    sight seen[2];
    own_sight(t, first, window, seen);
    const unsigned char *rows = queries->memory + worker * HALF * 128;
    if (tiles && first >= t->end) {
        sit_out(tiles, queries, r);
        queries->parity ^= 1;
        return;
    }
    BST_EACH(i, DIM / 2) sums[i] = 0.0f;
    if (tiles) {
        bst_barrier_wait(queries->full, queries->parity);
        begin_scores(scores, rows, r);
        bst_products_wait(0);
        bst_hold_some(scores, KEYS / 2);
        leave(r->empty + r->at.index);
        bst_next_stage(&r->at, ATTENTION_STAGES);
        hide(scores, (keys.end - 1) * KEYS, seen, -BST_INFINITY);
        weigh(scores, top, total, factor, a->of.scale);
        round_words(words, scores, KEYS / 4);
        BST_ROLLED
        for (int i = keys.end - 2; i >= keys.begin; i--) {
            uint64_t *left = r->empty + r->at.index;
            begin_scores(scores, rows, r);
            bst_next_stage(&r->at, ATTENTION_STAGES);
            begin_values(sums, words, r, i < keys.end - 2);
            bst_products_wait(1);
            bst_hold_some(scores, KEYS / 2);
            leave(left);
            if (i >= own_keys.all_end || (WINDOW && i < own_keys.all_begin))
                hide(scores, i * KEYS, seen, -BST_INFINITY);
            weigh(scores, top, total, factor, a->of.scale);
            bst_products_wait(0);
            bst_hold_some(sums, DIM / 2);
            bst_hold_words(words, KEYS / 4);
            leave(r->empty + r->at.index);
            bst_next_stage(&r->at, ATTENTION_STAGES);
            BST_EACH(j, DIM / 2) sums[j] *= factor[j / 2 % 2];
            round_words(words, scores, KEYS / 4);
        }
        leave(queries->empty);
        queries->parity ^= 1;
        begin_values(sums, words, r, tiles > 1);
        bst_products_wait(0);
        bst_hold_some(sums, DIM / 2);
        bst_hold_words(words, KEYS / 4);
        leave(r->empty + r->at.index);
        bst_next_stage(&r->at, ATTENTION_STAGES);
    }
    store(a, t, worker, sums, top, total);
}

BST_KERNEL(segment_attention_forward, attention_forward_args, ATTENTION_THREADS, 1) {
    OVER_QUERIES(a, QUERY_PIECE, ATTENTION_STAGES, copy, work);
}
