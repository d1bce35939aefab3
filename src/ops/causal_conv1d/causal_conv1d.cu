/* causal_conv1d.cu - the causal convolution of each channel with a window of its own, with SiLU after it or without,
 * and its gradients. Tensors are [tokens, channels] with channels side by side.
 *
 * Macros: X_TYPE, W_TYPE (codes of dtype.h; all but weight, bias and their gradients have x's); CHANNELS; TAPS of a
 * window; SILU, HAS_BIAS, HAS_SEQ_IDX; VEC elements of an access, which divide CHANNELS; W_VEC of one to weight and
 * bias; THREADS of a block; FOLDED: one stride describes all rows of each tensor; backward: DX, DW, DB what is wanted.
 *
 * With seq_idx [batch, tokens] the tokens of a row of the batch are of several sequences one after the other, of which
 * each begins where seq_idx is not what it is at the token before. A window that gets there is emptied.
 *
 * A thread takes VEC channels of `run` tokens one after the other and keeps the window in registers; neighbouring
 * threads have neighbouring channels, so that each row is read in whole lines.
 *
 * forward   reads x, and TAPS - 1 rows of each run's neighbour once more, mostly from the L2; writes y. Bytes: x + y, 2
 *           * size an element. At 16384 x 8192 in bf16 537 MB: 160 us at 3.35 TB/s (H100), 112 us at 4.8 TB/s (H200),
 *           as calculated. Measured on an H100 in a step of Qwen3.5-4B's shape, 8192 x 8192: 92 us, by bytes 80.
 * backward  computes the convolution again where SiLU's slope needs it; reads x and dy, and 2 (TAPS - 1) and TAPS - 1
 *           rows of the neighbours' once more; writes dx, and for each run a row of float32 sums, which column_sums
 *           adds up in a fixed order. Bytes: x + dy + dx, 3 * size an element; 4 (TAPS + 1) CHANNELS a run, written
 *           and read back, 5 % more for runs of 128 tokens in bf16. Without the latter 240 us and 168 us there, as
 *           calculated. Measured at 8192 x 8192: 153 us, by bytes 120.
 * seq_idx:  4 bytes a token more, and TAPS - 1 of each run's neighbours'; one number for all channels, from the L1 but
 *           for the first warp that asks. */
#include "gated_unit.cuh"
#include "pack.cuh"

#include "causal_conv1d_args.h"

#define VECTORS   (CHANNELS / VEC)
#define UNIT_TYPE (X_TYPE == BST_F32_CODE || W_TYPE == BST_F32_CODE ? BST_F32_CODE : X_TYPE)

/* Tokens whose loads are in flight together. With seq_idx, where an exact exp takes registers too, more would spill. */
#ifdef FORWARD
#define GROUP (HAS_SEQ_IDX && UNIT_TYPE == BST_F32_CODE ? 4 : 8)
#else
#define GROUP 4
#endif

/* What a thread works on: `count` tokens from `first` on of a sequence whose rows begin at row `rows`. */
typedef struct place {
    int64_t run, rows, first, count;
    int column;
} place;

BST_DEVICE bool find_place(place *p, const causal_conv1d_args *a) {
    const int64_t id = (int64_t)bst_block() * THREADS + bst_thread();
    p->run = id / VECTORS;
    if (p->run >= a->all_runs) return false;
    p->column = (int)(id % VECTORS) * VEC;
    p->rows = p->run / a->runs * a->tokens;
    p->first = p->run % a->runs * a->run;
    p->count = a->tokens - p->first < a->run ? a->tokens - p->first : a->run;
    return true;
}

/* The elements of a tensor at this place's first token, at this thread's channels, and how far apart tokens are. */
typedef struct rows {
    const void *at;
    int64_t step;
} rows;

BST_DEVICE rows rows_at(const void *base, const bst_row_map *map, const place *p) {
    const int64_t start = bst_row_start(map, p->rows + p->first, FOLDED) + p->column;
    return {bst_at(base, start, X_TYPE), map->inner_stride};
}

/* The token `t` after this place's first, or before; zeros where there is none. */
BST_DEVICE bst_raw token(const rows *r, int64_t t, bool is_there) {
    bst_raw none = {{0, 0, 0, 0}};
    return is_there ? bst_raw_at(r->at, t * r->step, X_TYPE, VEC) : none;
}

BST_DEVICE void load_taps(float (*w)[VEC], float *bias, const causal_conv1d_args *a, int column) {
    float packed[TAPS * VEC];
    BST_EACH(i, TAPS * VEC / W_VEC)
        bst_load(packed + i * W_VEC, a->weight, (int64_t)column * TAPS + i * W_VEC, W_TYPE, W_VEC);
    BST_EACH(k, TAPS) {
        BST_EACH(j, VEC) w[k][j] = packed[j * TAPS + k];
    }
    BST_EACH(j, VEC) bias[j] = 0;
    BST_EACH(i, HAS_BIAS ? VEC / W_VEC : 0) bst_load(bias + i * W_VEC, a->bias, column + i * W_VEC, W_TYPE, W_VEC);
}

/* A window moves on by one token, whose place is then free. */
BST_DEVICE void move_on(float (*window)[VEC]) {
    BST_EACH(k, TAPS - 1) {
        BST_EACH(j, VEC) window[k][j] = window[k + 1][j];
    }
}

/* The tokens before a place's first, of which move_on will push out the foremost. */
BST_DEVICE void load_before(float (*window)[VEC], const rows *x, const place *p) {
    BST_EACH(k, TAPS) {
        const int64_t t = k - TAPS;
        bst_unpack(window[k], token(x, t, k > 0 && p->first + t >= 0), X_TYPE, VEC);
    }
}

/* Where seq_idx has the number of this place's first token. */
BST_DEVICE const int32_t *ids_at(const causal_conv1d_args *a, const place *p) {
    return HAS_SEQ_IDX ? a->seq_idx + p->rows + p->first : nullptr;
}

/* The tokens of a group, from `t` on, at which a sequence begins, a bit for each, which takes fewer registers than
 * their numbers. `last`: the number before them, and then the last of theirs. */
BST_DEVICE uint32_t starts_of(const int32_t *ids, int64_t t, int64_t end, int32_t *last) {
    uint32_t starts = 0;
    int32_t id[GROUP];
    BST_EACH(i, GROUP) id[i] = t + i < end ? ids[t + i] : 0;
    BST_EACH(i, GROUP) starts |= (uint32_t)(id[i] != (i ? id[i - (i > 0)] : *last)) << i;
    *last = id[GROUP - 1];
    return starts;
}

BST_DEVICE void empty(float (*window)[VEC]) {
    BST_EACH(k, TAPS) {
        BST_EACH(j, VEC) window[k][j] = 0;
    }
}

/* Of the tokens before a place's first, leaves those of the last one's sequence, whose number it returns; any number
 * where there is none. */
BST_DEVICE int32_t keep_last_sequence(float (*window)[VEC], const int32_t *ids, const place *p) {
    int32_t id[TAPS];
    bool is_same = true;
    BST_EACH(k, TAPS) id[k] = k > 0 && p->first + k - TAPS >= 0 ? ids[k - TAPS] : 0;
    BST_EACH(back, TAPS - 2) {
        const int k = TAPS - 2 - back;
        is_same = is_same && id[k] == id[k + 1];
        BST_EACH(j, VEC) window[k][j] = is_same ? window[k][j] : 0.0f;
    }
    return id[TAPS - 1];
}

BST_DEVICE void convolve(float *z, float (*window)[VEC], float (*w)[VEC], const float *bias) {
    BST_EACH(j, VEC) z[j] = bias[j];
    BST_EACH(k, TAPS) {
        BST_EACH(j, VEC) z[j] = bst_fma(w[k][j], window[k][j], z[j]);
    }
}

#ifdef FORWARD
/* Three blocks a multiprocessor: left alone, the compiler works on so many tokens at once that two have room. */
BST_KERNEL(causal_conv1d_forward, causal_conv1d_args, THREADS, 3) {
    place p;
    if (!find_place(&p, &a)) return;
    const rows x = rows_at(a.x, &a.x_map, &p);
    const int32_t *const ids = ids_at(&a, &p);
    const int64_t y = (p.rows + p.first) * CHANNELS + p.column;
    float w[TAPS][VEC], bias[VEC], window[TAPS][VEC], z[VEC];
    bst_wait_for_previous();
    load_taps(w, bias, &a, p.column);
    load_before(window, &x, &p);
    int32_t last = HAS_SEQ_IDX ? keep_last_sequence(window, ids, &p) : 0;
    for (int64_t t = 0; t < p.count; t += GROUP) {
        bst_raw next[GROUP];
        const uint32_t starts = HAS_SEQ_IDX ? starts_of(ids, t, p.count, &last) : 0;
        BST_EACH(i, GROUP) next[i] = token(&x, t + i, t + i < p.count);
        BST_EACH(i, GROUP) {
            if (HAS_SEQ_IDX && starts >> i & 1) empty(window);
            move_on(window);
            bst_unpack(window[TAPS - 1], next[i], X_TYPE, VEC);
            convolve(z, window, w, bias);
            BST_EACH(j, SILU ? VEC : 0) z[j] = bst_sigmoid_gate(z[j], z[j], z[j], UNIT_TYPE).value;
            if (t + i < p.count) bst_store(a.y, y + (t + i) * CHANNELS, z, X_TYPE, VEC);
        }
    }
}
#endif

#ifdef BACKWARD
#define READS_X       (SILU || DW)
#define READS_SEQ_IDX (HAS_SEQ_IDX && (READS_X || DX))
#define AFTER         (DX ? TAPS - 1 : 0) /* tokens behind a run whose windows reach into it */
#define WIDTH         ((DW ? TAPS * CHANNELS : 0) + (DB ? CHANNELS : 0))
#define S_VEC         (VEC < 4 ? VEC : 4)

/* This run's row of sums: dweight as weight lies, then dbias. */
BST_DEVICE void store_sums(const causal_conv1d_args *a, const place *p, float (*dw)[VEC], const float *db) {
    float packed[TAPS * VEC];
    const int64_t row = p->run * WIDTH;
    BST_EACH(k, TAPS) {
        BST_EACH(j, VEC) packed[j * TAPS + k] = dw[k][j];
    }
    BST_EACH(i, DW ? TAPS * VEC / S_VEC : 0)
        bst_store(a->partial, row + (int64_t)p->column * TAPS + i * S_VEC, packed + i * S_VEC, BST_F32_CODE, S_VEC);
    BST_EACH(i, DB ? VEC / S_VEC : 0)
        bst_store(a->partial, row + WIDTH - CHANNELS + p->column + i * S_VEC, db + i * S_VEC, BST_F32_CODE, S_VEC);
}

/* sum += v w. In float32, where each rounding of a long sum shows, `lost` keeps what it has rounded away. */
BST_DEVICE void add_to(float *sum, float *lost, float v, float w) {
    if (UNIT_TYPE != BST_F32_CODE) {
        *sum = bst_fma(v, w, *sum);
        return;
    }
    const float more = bst_fma(v, w, -*lost), total = *sum + more;
    *lost = (total - *sum) - more;
    *sum = total;
}

/* With g = dy SiLU'(z), or dy: dx of a token is the sum over its windows of w g, dweight that over tokens of g x, dbias
 * that of g. dx of a token is complete TAPS - 1 tokens later.
 *
 * starts: bit k says whether a sequence begins at the token of gradients[k]. */
BST_KERNEL(causal_conv1d_backward, causal_conv1d_args, THREADS, 1) {
    place p;
    if (!find_place(&p, &a)) return;
    const rows x = rows_at(a.x, &a.x_map, &p), dy = rows_at(a.dy, &a.dy_map, &p);
    const int32_t *const ids = ids_at(&a, &p);
    const int64_t dx = (p.rows + p.first) * CHANNELS + p.column, steps = p.count + AFTER, left = a.tokens - p.first;
    float w[TAPS][VEC], bias[VEC], window[TAPS][VEC], gradients[TAPS][VEC], dw[TAPS][VEC], db[VEC], z[VEC];
    float dw_lost[TAPS][VEC], db_lost[VEC];
    BST_EACH(j, VEC) {
        db[j] = db_lost[j] = 0;
        BST_EACH(k, TAPS) window[k][j] = gradients[k][j] = dw[k][j] = dw_lost[k][j] = 0;
    }
    bst_wait_for_previous();
    bst_let_next_start(); /* the sum of the runs' rows */
    load_taps(w, bias, &a, p.column);
    if (READS_X) load_before(window, &x, &p);
    int32_t last = READS_SEQ_IDX ? keep_last_sequence(window, ids, &p) : 0;
    uint32_t starts = 0;
    for (int64_t t = 0; t < steps; t += GROUP) {
        bst_raw next_x[GROUP], next_dy[GROUP];
        const int64_t end = steps < left ? steps : left;
        const uint32_t next_starts = READS_SEQ_IDX ? starts_of(ids, t, end, &last) : 0;
        BST_EACH(i, GROUP) {
            const bool is_there = t + i < steps && t + i < left;
            next_x[i] = token(&x, t + i, READS_X && is_there);
            next_dy[i] = token(&dy, t + i, is_there);
        }
        BST_EACH(i, GROUP) {
            float g[VEC];
            if (READS_SEQ_IDX) {
                const uint32_t is_start = next_starts >> i & 1;
                if (is_start) empty(window);
                starts = starts >> 1 | is_start << (TAPS - 1);
            }
            move_on(window);
            move_on(gradients);
            bst_unpack(window[TAPS - 1], next_x[i], X_TYPE, VEC);
            bst_unpack(g, next_dy[i], X_TYPE, VEC);
            if (SILU) convolve(z, window, w, bias);
            BST_EACH(j, SILU ? VEC : 0) {
                const bst_gate gate = bst_sigmoid_gate(z[j], z[j], z[j], UNIT_TYPE);
                /* In this order: many slopes are just above a power of two, where a product's rounding weighs most. And
                 * whatever z is behind the last token. */
                g[j] = t + i < left ? g[j] * gate.factor * gate.slope : 0.0f;
            }
            if (t + i < p.count) {
                BST_EACH(j, VEC) {
                    BST_EACH(k, DW ? TAPS : 0) add_to(&dw[k][j], &dw_lost[k][j], g[j], window[k][j]);
                    if (DB) add_to(&db[j], &db_lost[j], g[j], 1.0f);
                }
            }
            BST_EACH(j, VEC) gradients[TAPS - 1][j] = g[j];
            if (DX && t + i >= AFTER && t + i < steps) {
                BST_EACH(j, VEC) z[j] = 0;
                BST_EACH(k, TAPS) {
                    /* Whether no sequence has begun since the token that dx is of, at gradients[0]. */
                    const bool is_same = !READS_SEQ_IDX || !(starts & ((2u << (TAPS - 1 - k)) - 2u));
                    BST_EACH(j, VEC) z[j] = bst_fma(w[k][j], is_same ? gradients[TAPS - 1 - k][j] : 0.0f, z[j]);
                }
                bst_store(a.y, dx + (t + i - AFTER) * CHANNELS, z, X_TYPE, VEC);
            }
        }
    }
    store_sums(&a, &p, dw, db);
}
#endif
