/* segment_attention_backward.cu - gradients of attention within segments, on Hopper's tensor cores. With p the weights
 * of segment_attention.cu, dp_ij = dy_i . v_j and delta_i = dy_i . y_i:
 *   ds_ij = p_ij (dp_ij - delta_i),
 *   dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i,  dv_j = sum_i p_ij dy_i
 *
 * Macros: those of segment_attention_pieces.cuh.
 *
 * Two kernels, one after the other: dq (and delta) by tiles of queries, which pass over their keys; dk and dv by tiles
 * of keys, which pass over the queries of all heads that read them (a warp group has both of 64 keys, or of wide heads
 * one). Each makes p and dp for itself, seven products in the place of five, and so nothing is added up in memory: no
 * atomics, no float32 sums that are cleared and converted, and every sum has a fixed order. Weights are made again
 * from lse. Where tiles of keys are too few for the chip, a group's heads are shared out among several blocks, whose
 * parts a third kernel adds up.
 * Bytes: q, dy, k, v, y once, and most of them some more times from the L2; dq, dk, dv once. Measured on an H200,
 * bf16, causal, us, both together, beside PyTorch's flash attention and cuDNN: a row of 8192, 32 heads of 128 on 8,
 * 2823, 5109 and 2718 (682 TFLOP/s of seven products); four rows of 1024, 16 heads on 8, 137, 296 and 182, of 265 to
 * 995 tokens 109 and 218; a row of 8192 of 32 heads of 64 1831, 2688 and 1692, 8 of 256 1652, 2856 and 1669; 64 heads
 * of 64 on 8 in a window of 128, four rows of 728 to 1642 tokens, 188 and 333. 168 registers. */
#include "segment_attention_pieces.cuh"

/* ---- dq ---------------------------------------------------------------------------------------------------------- */

BST_DEVICE void copy_for_dq(const attention_dq_args *a, const tile *t, own *queries, ring *r) {
    const span keys = span_of(t, t->first, ROWS, a->of.window);
    const int group = t->head / (a->of.heads / a->of.groups);
    if (keys.begin == keys.end) return;
    bst_barrier_wait(queries->empty, queries->parity ^ 1);
    bst_barrier_expect(queries->full, 2 * QUERY_PIECE);
    copy_rows(queries->memory, &a->q, t->head, t->first, ROWS, queries->full);
    copy_rows(queries->memory + QUERY_PIECE, &a->dy, t->head, t->first, ROWS, queries->full);
    queries->parity ^= 1;
    BST_ROLLED
    for (int i = 2 * keys.begin; i < 2 * keys.end; i++) {
        uint64_t *full = r->full + r->at.index;
        wait_for_room(r);
        bst_barrier_expect(full, KEY_PIECE);
        copy_rows(stage_of(r, KEY_PIECE), i % 2 ? &a->v : &a->k, group, t->key + i / 2 * KEYS, KEYS, full);
        bst_next_stage(&r->at, ATTENTION_DQ_STAGES(DIM));
    }
}

/* sum of dy y over a row's head, of which each of four lanes has every fourth eight numbers. */
BST_DEVICE float delta_of(const attention_dq_args *a, int row, int head) {
    float sum = 0.0f;
    BST_EACH(i, DIM / 32) {
        const int at = (i * 4 + (int)bst_lane() % 4) * 8;
        float y[8], dy[8];
        if (at >= WIDTH) continue;
        bst_load(y, a->y, row * a->y_token + head * a->y_head + at, TYPE, 8);
        bst_load(dy, a->rows, row * a->dy_token + head * a->dy_head + at, TYPE, 8);
        BST_EACH(j, 8) sum = bst_fma(y[j], dy[j], sum);
    }
    return sum;
}

BST_DEVICE void work_on_dq(const attention_dq_args *a, const tile *t, int worker, own *queries, ring *r) {
    float sums[DIM / 2], scores[KEYS / 2], products[KEYS / 2], lse[2], delta[2];
    uint32_t words[KEYS / 4];
    const int row = t->first + worker * HALF, window = a->of.window;
    const span keys = span_of(t, t->first, ROWS, window), own_keys = span_of(t, row, HALF, window);
    sight seen[2];
    own_sight(t, row, window, seen);
    const unsigned char *rows = queries->memory + worker * HALF * 128;
    BST_EACH(half, 2) {
        const int i = row + own_row() + 8 * half;
        const int64_t place = (int64_t)t->head * a->of.queries + i;
        lse[half] = i < t->end ? a->lse[place] * LOG2_E : BST_INFINITY;
        float sum = i < t->end ? delta_of(a, i, t->head) : 0.0f;
        sum += bst_shuffle_xor(sum, 1);
        delta[half] = sum + bst_shuffle_xor(sum, 2);
        if (i < t->end && bst_lane() % 4 == 0) a->delta[place] = delta[half];
    }
    BST_EACH(i, DIM / 2) sums[i] = 0.0f;
    const bool sees = keys.begin < keys.end;
    if (sees) bst_barrier_wait(queries->full, queries->parity);
    BST_ROLLED
    for (int i = keys.begin; i < keys.end; i++) {
        const ring of_keys = *r;
        wait_for_stage(r);
        bst_hold_some(scores, KEYS / 2);
        bst_hold_some(products, KEYS / 2);
        bst_products_begin();
        multiply_heads(scores, KEYS, rows, ROWS, stage_of(r, KEY_PIECE));
        bst_products_commit();
        bst_next_stage(&r->at, ATTENTION_DQ_STAGES(DIM));
        wait_for_stage(r);
        bst_products_begin();
        multiply_heads(products, KEYS, rows + QUERY_PIECE, ROWS, stage_of(r, KEY_PIECE));
        bst_products_commit();
        bst_products_wait(1);
        bst_hold_some(scores, KEYS / 2);
        BST_EACH(j, KEYS / 2) scores[j] = bst_exp2(bst_fma(scores[j], a->of.scale, -lse[j / 2 % 2]));
        if (i >= own_keys.all_end || (WINDOW && i < own_keys.all_begin)) hide(scores, i * KEYS, seen, 0.0f);
        bst_products_wait(0);
        bst_hold_some(products, KEYS / 2);
        leave(r->empty + r->at.index);
        bst_next_stage(&r->at, ATTENTION_DQ_STAGES(DIM));
        BST_EACH(j, KEYS / 2) scores[j] *= products[j] - delta[j / 2 % 2];
        round_words(words, scores, KEYS / 4);
        bst_hold_some(sums, DIM / 2);
        bst_hold_words(words, KEYS / 4);
        bst_products_begin();
        multiply_tokens(sums, words, stage_of(&of_keys, KEY_PIECE), KEYS, i > keys.begin);
        bst_products_commit();
        bst_products_wait(0);
        bst_hold_some(sums, DIM / 2);
        bst_hold_words(words, KEYS / 4);
        leave(of_keys.empty + of_keys.at.index);
    }
    if (sees) {
        leave(queries->empty);
        queries->parity ^= 1;
    }
    BST_EACH(i, DIM / 2) sums[i] *= a->dq_scale;
    BST_EACH(half, 2) {
        const int i = row + own_row() + 8 * half;
        const int64_t begin = ((int64_t)i * a->of.heads + t->head) * WIDTH;
        bst_tile_store_row(a->dq, begin, sums, half, 0, WIDTH, DIM, i < t->end, TYPE);
    }
}

BST_KERNEL(segment_attention_dq, attention_dq_args, ATTENTION_THREADS, 1) {
    OVER_QUERIES(a, 2 * QUERY_PIECE, ATTENTION_DQ_STAGES(DIM), copy_for_dq, work_on_dq);
}

/* ---- dk, dv ------------------------------------------------------------------------------------------------------ */

#define STEP       ATTENTION_STEP
#define STEP_PIECE ATTENTION_BYTES(STEP, DIM)
#define STEP_BYTES (2 * STEP_PIECE)

/* A stage's numbers beside its boxes: of each query lse, in units of ln 2, and delta. */
typedef struct numbers {
    float lse[STEP], delta[STEP];
} numbers;

/* Steps of a segment's queries in which any sees one of a tile's keys, or of so many of them. */
typedef struct steps {
    int begin, end;
} steps;

/* Where a key of a segment stands among its queries. */
BST_DEVICE int query_of(const tile *t, int key) { return key - (t->keys - t->queries); }

BST_DEVICE steps steps_of(const tile *t, int window) {
    const int first = query_of(t, t->first - t->key), last = first + KEYS - 1;
    const int from = CAUSAL ? first : WINDOW ? first - window + 1 : 0;
    const int end = WINDOW && last + window < t->queries ? last + window : t->queries;
    steps s = {from > 0 ? from / STEP : 0, end > 0 ? (end + STEP - 1) / STEP : 0};
    if (s.end < s.begin) s.end = s.begin;
    return s;
}

/* Of queries, that a block passes over. */
BST_DEVICE int heads_of(const attention_dkv_args *a) { return a->of.heads / (a->of.groups * a->parts); }

BST_DEVICE void copy_steps(const attention_dkv_args *a, const tile *t, int first_head, ring *r, numbers *stages) {
    const int each = heads_of(a), warp = (int)bst_thread() / 32, lane = (int)bst_lane();
    const steps all = steps_of(t, a->of.window);
    BST_ROLLED
    for (int head = first_head; head < first_head + each; head++) BST_ROLLED
    for (int step = all.begin; step < all.end; step++) {
        uint64_t *full = r->full + r->at.index;
        const int row = t->query + step * STEP;
        wait_for_room(r);
        if (warp == 0) {
            unsigned char *to = stage_of(r, STEP_BYTES);
            bst_barrier_expect(full, STEP_BYTES);
            copy_rows(to, &a->q, head, row, STEP, full);
            copy_rows(to + STEP_PIECE, &a->dy, head, row, STEP, full);
        } else {
            numbers *to = stages + r->at.index;
            BST_EACH(i, STEP / 32) { /* a query behind its segment has no weights */
                const int at = lane + 32 * i;
                const bool is_row = row + at < t->query + t->queries;
                const int64_t place = (int64_t)head * a->of.queries + row + at;
                to->lse[at] = is_row ? a->lse[place] * LOG2_E : BST_INFINITY;
                to->delta[at] = is_row ? a->delta[place] : 0.0f;
            }
            bst_barrier_arrive(full);
        }
        bst_next_stage(&r->at, ATTENTION_STEP_STAGES(DIM));
    }
}

/* Of a tile's 64 keys by a step's 64 queries: weights and what they multiply. Row i of scores is key i. ahead: how far
 * this thread's first key stands before the step's first query. */
BST_DEVICE void weigh_step(float *scores, const numbers *n, float scale, int ahead, int window, bool hides) {
    BST_EACH(i, 32) {
        const int column = own_column(i), before = ahead + column - i / 2 % 2 * 8; /* the key, where it is not behind */
        scores[i] = bst_exp2(bst_fma(scores[i], scale, -n->lse[column]));
        if (!hides) continue;
        if (CAUSAL && before < 0) scores[i] = 0.0f;
        if (WINDOW && (before >= window || (!CAUSAL && -before >= window))) scores[i] = 0.0f;
    }
}

/* Whether any of 64 keys is not seen by any of a step's queries. ahead: of the first key. */
BST_DEVICE bool hides_any(int ahead, int window) {
    const int least = ahead - (HALF - 1), most = ahead + STEP - 1;
    return (CAUSAL && least < 0) || (WINDOW && (most >= window || (!CAUSAL && -least >= window)));
}

/* A row of one gradient, or of a part of it in float32. */
BST_DEVICE void store_row(const attention_dkv_args *a, void *to, int64_t begin, const float *sums, int half,
                          bool is_row) {
    if (a->parts == 1) {
        bst_tile_store_row(to, begin, sums, half, 0, WIDTH, DIM, is_row, TYPE);
        return;
    }
    BST_EACH(i, DIM / 8) {
        const int column = 8 * i + (int)bst_lane() % 4 * 2;
        if (is_row && column < WIDTH) bst_store(to, begin + column, sums + 4 * i + 2 * half, BST_F32_CODE, 2);
    }
}

/* dk, without its scale, and dv of the 64 keys that are `at` rows into the tile's, or one of the two, as constants say.
 */
BST_DEVICE void sum_dkv(const attention_dkv_args *a, const tile *t, int at, const unsigned char *memory, ring *r,
                        const numbers *stages, float *dk, float *dv, bool wants_dk, bool wants_dv) {
    float scores[32], products[32];
    uint32_t words[16], others[16];
    const steps all = steps_of(t, a->of.window);
    const unsigned char *keys = memory + at * 128, *values = keys + KEY_PIECE;
    const int key = query_of(t, t->first + at - t->key); /* the first of the 64 */
    int step = all.begin;
    BST_EACH(i, DIM / 2) dk[i] = dv[i] = 0.0f;
    BST_ROLLED
    for (int left = (all.end - all.begin) * heads_of(a); left > 0; left--) {
        const unsigned char *queries = stage_of(r, STEP_BYTES), *dy = queries + STEP_PIECE;
        const numbers *n = stages + r->at.index;
        wait_for_stage(r);
        bst_hold_some(scores, 32);
        bst_products_begin();
        multiply_heads(scores, STEP, keys, KEYS, queries);
        bst_products_commit();
        if (wants_dk) {
            bst_hold_some(products, 32);
            multiply_heads(products, STEP, values, KEYS, dy);
            bst_products_commit();
            bst_products_wait(1);
        } else {
            bst_products_wait(0);
        }
        bst_hold_some(scores, 32);
        const int ahead = step * STEP - key;
        weigh_step(scores, n, a->of.scale, ahead - own_row(), a->of.window, hides_any(ahead, a->of.window));
        if (wants_dv) {
            round_words(words, scores, 16);
            bst_hold_some(dv, DIM / 2);
            bst_hold_words(words, 16);
            bst_products_begin();
            multiply_tokens(dv, words, dy, STEP, 1);
            bst_products_commit();
        }
        if (wants_dk) {
            if (wants_dv)
                bst_products_wait(1);
            else
                bst_products_wait(0);
            bst_hold_some(products, 32);
            BST_EACH(i, 32) scores[i] *= products[i] - n->delta[own_column(i)];
            round_words(others, scores, 16);
            bst_hold_some(dk, DIM / 2);
            bst_hold_words(others, 16);
            bst_products_begin();
            multiply_tokens(dk, others, queries, STEP, 1);
            bst_products_commit();
        }
        bst_products_wait(0);
        if (wants_dv) {
            bst_hold_some(dv, DIM / 2);
            bst_hold_words(words, 16);
        }
        if (wants_dk) {
            bst_hold_some(dk, DIM / 2);
            bst_hold_words(others, 16);
        }
        leave(r->empty + r->at.index);
        bst_next_stage(&r->at, ATTENTION_STEP_STAGES(DIM));
        if (++step == all.end) step = all.begin;
    }
}

/* Of 64 keys, `at` rows into the tile's. */
BST_DEVICE void store(const attention_dkv_args *a, const int32_t found[2], int at, void *to, float *sums, float scale) {
    /* Found again: kept meanwhile, it would take registers that are not there. */
    const int number = (int)bst_block() / a->parts, part = (int)bst_block() % a->parts;
    tile t;
    set_tile(&a->of, OF_KEYS, found[0], found[1], number % a->of.groups, &t);
    BST_EACH(i, DIM / 2) sums[i] *= scale;
    BST_EACH(half, 2) {
        const int i = t.first + at + own_row() + 8 * half;
        const int64_t begin = ((part * (int64_t)a->of.keys + i) * a->of.groups + t.head) * WIDTH;
        store_row(a, to, begin, sums, half, i < t.end);
    }
}

BST_KERNEL(segment_attention_dkv, attention_dkv_args, ATTENTION_THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(uint64_t, barriers, 2 * ATTENTION_STEP_STAGES(DIM) + 1);
    BST_SHARED(int32_t, before, ATTENTION_SEGMENTS + 1);
    BST_SHARED(numbers, stages, ATTENTION_STEP_STAGES(DIM));
    BST_SHARED(int32_t, found, 2);
    unsigned char *tiles = aligned(memory);
    ring r = {tiles + 2 * KEY_PIECE, barriers + 1, barriers + 1 + ATTENTION_STEP_STAGES(DIM), {0, 0}};
    const int worker = (int)bst_thread() / 128 - 1;
    if (bst_thread() == 0) {
        bst_barrier_init(barriers, 1);
        init(r.full, r.empty, ATTENTION_STEP_STAGES(DIM), 33,
             GROUPS); /* the copying thread, and a warp for the numbers */
        bst_barrier_fence_init();
    }
    count_tiles(&a.of, OF_KEYS, before);
    const int number = (int)bst_block() / a.parts, part = (int)bst_block() % a.parts;
    if (number >= before[a.of.segments] * a.of.groups) return;
    tile t;
    if (bst_thread() < 32) {
        int own[2];
        find_tile(&a.of, before, number / a.of.groups, own);
        if (bst_thread() == 0) found[0] = own[0], found[1] = own[1];
    }
    bst_sync();
    set_tile(&a.of, OF_KEYS, found[0], found[1], number % a.of.groups, &t);
    if (worker < 0) {
        bst_registers_less(40);
        if (bst_thread() == 0) {
            bst_barrier_expect(barriers, 2 * KEY_PIECE);
            copy_rows(tiles, &a.k, t.head, t.first, KEYS, barriers);
            copy_rows(tiles + KEY_PIECE, &a.v, t.head, t.first, KEYS, barriers);
        }
        if (bst_thread() == 0 || bst_thread() / 32 == 1)
            copy_steps(&a, &t, (t.head * a.parts + part) * heads_of(&a), &r, stages);
    } else {
        bst_registers_more(232);
        bst_barrier_wait(barriers, 0);
        const int at = worker * HALF;
        float dk[DIM / 2], dv[DIM / 2];
        if (KEYS > HALF) {
            sum_dkv(&a, &t, at, tiles, &r, stages, dk, dv, true, true);
            store(&a, found, at, a.dk, dk, a.dk_scale);
            store(&a, found, at, a.dv, dv, 1.0f);
        } else if (worker == 0) { /* both have the same keys: two gradients would not fit */
            sum_dkv(&a, &t, 0, tiles, &r, stages, dk, dv, true, false);
            store(&a, found, 0, a.dk, dk, a.dk_scale);
        } else {
            sum_dkv(&a, &t, 0, tiles, &r, stages, dk, dv, false, true);
            store(&a, found, 0, a.dv, dv, 1.0f);
        }
    }
}

/* What the blocks of a group's heads have of a gradient, added up in their order: four numbers a thread. */
BST_KERNEL(segment_attention_sum, attention_sum_args, ATTENTION_SUM_THREADS, 1) {
    const int64_t at = ((int64_t)bst_block() * ATTENTION_SUM_THREADS + bst_thread()) * 4;
    float sums[4] = {0, 0, 0, 0};
    if (at >= a.count) return;
    for (int part = 0; part < a.parts; part++) {
        float own[4];
        bst_load(own, a.partial, part * a.count + at, BST_F32_CODE, 4);
        BST_EACH(i, 4) sums[i] += own[i];
    }
    bst_store(a.y, at, sums, TYPE, 4);
}
