/* moe.cu - what a mixture of experts does around its grouped products: the sort of (token, expert) pairs by expert, the
 * gather of tokens into sorted rows, the gated unit on them, the weighted sum back into tokens; and their gradients.
 *
 * Macros: TYPE, W_TYPE (codes of dtype.h: of the rows, of the routing weights); COLUMNS of a row; VEC elements of an
 * access, BIAS_VEC to the unit's biases, H_VEC to h and dh; THREADS of a block; CHOICES experts a token; BIAS, WEIGHTS
 * what is given; DH, WY, DWEIGHTS, DBIAS, DOTS what is wanted; UNIT (an activation of activation.h), HALVES, LIMITED
 * the unit.
 * How much a block takes is an argument, so that no kernel depends on lengths.
 *
 * Bytes, with N rows of T tokens, s bytes an element, H = COLUMNS, but for the unit, where 2I = COLUMNS:
 *   sort      16 N read, 8 N written: two kernels, of which neither waits for the host
 *   gather    s H N written, s H T read
 *   transpose each element read once and written once
 *   glu       forward 3 s I N; backward 5 s I N, 6 with wy
 *   combine   forward s H (N + T); backward as gather
 *   bias      sums over an expert's rows, in registers while the rows pass: 8 bytes a column for each chunk of rows
 * Measured on an H200, bf16, at GPT-OSS-20B's shape (4096 tokens, 4 of 32 experts, H = I = 2880): all of them, forward
 * and backward, 0.30 ms beside 4.67 ms of products: no more than their 1.4 GB take at the copy's speed (0.34 ms).
 * A float32 matrix of 2048 x 2048 transposed to bf16: 21 us; by PyTorch's permuted copy and a cast 44.
 * At Qwen3-30B-A3B's (8192 tokens, 8 of 128 experts, H = 2048, I = 768), us: sort 10, gather 78 (what it writes, at
 * the speed of a fill), unit 71 forward and 150 backward, weighted sum 72, beside 3.3 ms of products.
 * Each sum over rows: first the rows of a block, then the blocks, in that order, in float32. Pairs whose index is no
 * expert sort behind all others, into rows that nothing reads; their tokens' output is NaN. What else an index tensor
 * may hold: no kernel reads or writes where it should not for it; a row of no pair is NaN.
 */
#include "gated_unit.cuh"
#include "pack.cuh"
#include "reduce.cuh"

#include "moe_args.h"

#define PER_TILE (THREADS * VEC)
#define TILES    ((COLUMNS + PER_TILE - 1) / PER_TILE)
#define WARPS    (THREADS / 32)

BST_DEVICE int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether an entry of an index tensor lies in [0, most). */
BST_DEVICE bool within(int64_t entry, int64_t most) { return (uint64_t)entry < (uint64_t)most; }

#ifdef COMBINE_BACKWARD
/* An access of NaNs. */
BST_DEVICE bst_raw not_numbers(void) {
    float x[VEC];
    BST_EACH(j, VEC) x[j] = BST_NAN;
    return bst_pack(x, TYPE, VEC);
}
#endif

/* ---- sort -------------------------------------------------------------------------------------------------------- */

#if defined(COUNT) || defined(PLACE)
/* A warp has 32 pairs that follow one another, of which those of one expert find each other; the warps of a block
 * follow one another, and so do its rounds and the blocks. So a pair's place among its expert's is found without
 * atomics, and the sort is stable. */
#define MOST_WIDTH (BST_MOE_MOST_EXPERTS + 1)
#define NOBODY     0xffffffffu

/* A round of THREADS pairs: the expert of this thread's, a.experts where it is none, NOBODY behind the last pair; how
 * many of the warp's before it have the same; and in `found` how many of each warp's each expert has. */
struct ranked {
    uint32_t expert;
    int rank;
};

BST_DEVICE ranked rank_round(uint16_t *found, const moe_sort_args *a, int64_t first, int64_t end) {
    const int width = a->experts + 1;
    for (int i = (int)bst_thread(); i < WARPS * width; i += THREADS) found[i] = 0;
    bst_sync();
    ranked r = {NOBODY, 0};
    const int64_t pair = first + bst_thread();
    if (pair < end) {
        const int64_t expert = a->indices[pair];
        r.expert = within(expert, a->experts) ? (uint32_t)expert : (uint32_t)a->experts;
    }
    const uint32_t same = bst_match_any(r.expert), before = same & ((1u << bst_lane()) - 1);
    r.rank = bst_count_bits(before);
    if (!before && r.expert != NOBODY) found[bst_thread() / 32 * width + r.expert] = (uint16_t)bst_count_bits(same);
    bst_sync();
    return r;
}

/* Of an expert, makes of each warp's pairs those of the warps before it; all pairs of the round. */
BST_DEVICE int add_up_warps(uint16_t *found, int width, int expert) {
    int sum = 0;
    BST_EACH(w, WARPS) {
        const int here = found[w * width + expert];
        found[w * width + expert] = (uint16_t)sum;
        sum += here;
    }
    return sum;
}
#endif

#ifdef COUNT
BST_KERNEL(moe_sort_count, moe_sort_args, THREADS, 1) {
    BST_SHARED(uint16_t, found, WARPS *MOST_WIDTH);
    const int width = a.experts + 1;
    const int64_t begin = (int64_t)bst_block() * a.chunk, end = earlier(begin + a.chunk, a.pairs);
    int32_t *counts = a.counts + (int64_t)bst_block() * width;
    bst_wait_for_previous();
    bst_let_next_start();
    for (int64_t first = begin; first < end; first += THREADS) {
        rank_round(found, &a, first, end);
        for (int e = (int)bst_thread(); e < width; e += THREADS) {
            const int here = add_up_warps(found, width, e);
            counts[e] = first == begin ? here : counts[e] + here;
        }
        bst_sync();
    }
}
#endif

#ifdef PLACE
#define AT_ONCE 8 /* blocks whose counts are in flight at once */
BST_KERNEL(moe_sort_place, moe_sort_args, THREADS, 1) {
    BST_SHARED(uint16_t, found, WARPS *MOST_WIDTH);
    BST_SHARED(int32_t, next, MOST_WIDTH);   /* the next row of each expert */
    BST_SHARED(int32_t, totals, MOST_WIDTH); /* its pairs in all */
    BST_SHARED(int32_t, parts, 2 * MOST_WIDTH);
    const int width = a.experts + 1, of_blocks = width < THREADS ? THREADS / width : 1;
    const int64_t begin = (int64_t)bst_block() * a.chunk, end = earlier(begin + a.chunk, a.pairs);
    /* The indices were there before the kernel that counts began. */
    ranked r = rank_round(found, &a, begin, end);
    bst_wait_for_previous();
    /* Pairs of each expert in the blocks before this one, and in all; several threads an expert. */
    for (int i = (int)bst_thread(); i < of_blocks * width; i += THREADS) {
        const int expert = i % width, part = i / width;
        int32_t before = 0, total = 0;
        for (int64_t b = part; b < bst_blocks(); b += AT_ONCE * of_blocks) {
            int32_t count[AT_ONCE];
            BST_EACH(k, AT_ONCE) {
                const int64_t block = b + k * of_blocks;
                count[k] = block < bst_blocks() ? a.counts[block * width + expert] : 0;
            }
            BST_EACH(k, AT_ONCE) {
                if (b + k * of_blocks < bst_block()) before += count[k];
                total += count[k];
            }
        }
        parts[2 * i] = before;
        parts[2 * i + 1] = total;
    }
    bst_sync();
    for (int e = (int)bst_thread(); e < width; e += THREADS) {
        int32_t before = 0, total = 0;
        for (int part = 0; part < of_blocks; part++) {
            before += parts[2 * (part * width + e)];
            total += parts[2 * (part * width + e) + 1];
        }
        next[e] = before;
        totals[e] = total;
    }
    bst_sync();
    for (int e = (int)bst_thread(); e < width; e += THREADS) {
        int32_t start = 0;
        for (int i = 0; i < e; i++) start += totals[i];
        if (bst_block() == 0 && e < a.experts) a.ends[e] = start + totals[e];
        next[e] += start;
    }
    for (int64_t first = begin;;) {
        for (int e = (int)bst_thread(); e < width; e += THREADS) parts[e] = add_up_warps(found, width, e);
        bst_sync();
        if (r.expert != NOBODY) {
            const int32_t row = next[r.expert] + found[bst_thread() / 32 * width + r.expert] + r.rank;
            const int64_t pair = first + bst_thread();
            a.order[row] = (int32_t)pair;
            a.position[pair] = r.expert < (uint32_t)a.experts ? row : -1;
        }
        first += THREADS;
        if (first >= end) break;
        bst_sync();
        for (int e = (int)bst_thread(); e < width; e += THREADS) next[e] += parts[e];
        r = rank_round(found, &a, first, end);
    }
}
#endif

/* ---- gather ------------------------------------------------------------------------------------------------------ */

#ifdef GATHER
/* A thread reads one access of a token and writes it to each of the token's rows: so x is read once, where a walk over
 * the rows would read it CHOICES times, from memory again where the rows have pushed it out of the second-level
 * cache. */
#define VECTORS (COLUMNS / VEC)
BST_KERNEL(moe_gather, moe_gather_args, THREADS, 1) {
    int64_t at = (int64_t)bst_block() * THREADS + bst_thread(), token = at / VECTORS;
    int column = (int)(at % VECTORS) * VEC;
    bst_wait_for_previous();
    if (token >= a.tokens) return;
    bst_raw raw = bst_raw_at(a.x, token * a.x_stride + column, TYPE, VEC);
    BST_EACH(i, CHOICES) {
        int32_t row = a.position[token * CHOICES + i];
        if (within(row, a.pairs))
            bst_write_once(bst_at_out(a.rows, (int64_t)row * COLUMNS + column, TYPE), raw, VEC * bst_type_size(TYPE));
    }
}
#endif

/* ---- transposed matrices ----------------------------------------------------------------------------------------- */

#ifdef TRANSPOSE
#define SIDE MOE_TRANSPOSE_SIDE
BST_KERNEL(moe_transpose, moe_transpose_args, THREADS, 1) {
    BST_SHARED(float, tile, SIDE *(SIDE + 1)); /* one more a row, so that a column has all banks */
    /* In 32 bits, for divisions in 64 take longer than the memory. */
    const int across = (a.columns + SIDE - 1) / SIDE, thread = (int)bst_thread();
    const int row = (int)bst_block() / across * SIDE, column = (int)bst_block() % across * SIDE;
    const int rows = a.rows - row < SIDE ? a.rows - row : SIDE;
    const int columns = a.columns - column < SIDE ? a.columns - column : SIDE;
    bst_wait_for_previous();
    BST_EACH(k, SIDE * SIDE / THREADS) {
        const int down = (k * THREADS + thread) / SIDE, to_right = thread % SIDE, r = row + down;
        const int64_t begin = r / a.inner * a.outer_stride + r % a.inner * a.inner_stride;
        if (down < rows && to_right < columns)
            bst_load(&tile[down * (SIDE + 1) + to_right], a.x, begin + column + to_right, TYPE, 1);
    }
    bst_sync();
    BST_EACH(k, SIDE * SIDE / THREADS) {
        const int down = thread % SIDE, to_right = (k * THREADS + thread) / SIDE;
        if (down < rows && to_right < columns)
            bst_store(a.y, (int64_t)(column + to_right) * a.rows + row + down, &tile[down * (SIDE + 1) + to_right],
                      W_TYPE, 1);
    }
}
#endif

/* ---- the gated unit ---------------------------------------------------------------------------------------------- */

#if defined(GLU_FORWARD) || defined(GLU_BACKWARD)
/* A thread has some gates, as many ups and elements of y. COLUMNS is 2I. In HALVES they are VEC of each, that lie
 * COLUMNS / 2 apart, else VEC / 2 pairs of gate and up, that lie together. */
#define PAIRS        (HALVES ? VEC : VEC / 2)
#define PARTS        (HALVES ? 2 : 1)
#define UP           (HALVES ? COLUMNS / 2 : 1) /* from a gate to its up */
#define ROW_OF_PAIRS (COLUMNS / 2)

/* Of a row of h, or of biases, this thread's first element. */
BST_DEVICE int64_t pair_at(int64_t row, int pair) { return row * COLUMNS + (HALVES ? pair : 2 * pair); }

/* Its elements in accesses of `vec`: fewer where the memory begins between two pairs. */
BST_DEVICE void read_pairs(bst_raw *raw, const void *from, int64_t at, int vec) {
    BST_EACH(p, PARTS) {
        if (vec == VEC) {
            raw[p] = bst_raw_at(from, at + p * UP, TYPE, VEC);
            continue;
        }
        float x[VEC];
        BST_UNROLL
        for (int j = 0; j < VEC; j += vec) bst_load(x + j, from, at + p * UP + j, TYPE, vec);
        raw[p] = bst_pack(x, TYPE, VEC);
    }
}

/* Gates and ups in the order in which they lie: element j of x is gate_of(j) or up_of(j). */
BST_DEVICE int gate_of(int j) { return HALVES ? j : 2 * j; }
BST_DEVICE int up_of(int j) { return HALVES ? VEC + j : 2 * j + 1; }

BST_DEVICE void unpack_pairs(float *x, const bst_raw *raw) {
    BST_EACH(p, PARTS) bst_unpack(x + p * VEC, raw[p], TYPE, VEC);
}

/* This thread's biases, zeros where there are none. They may be aligned less than h. */
BST_DEVICE void load_bias(float *b, const moe_glu_args *a, int expert, int pair) {
    BST_EACH(j, 2 * PAIRS) b[j] = 0;
    if (!BIAS) return;
    BST_EACH(p, PARTS) {
        BST_UNROLL
        for (int j = 0; j < VEC; j += BIAS_VEC)
            bst_load(b + p * VEC + j, a->bias, pair_at(expert, pair) + p * UP + j, TYPE, BIAS_VEC);
    }
}
#endif

#ifdef GLU_FORWARD
#define AT_ONCE 4 /* rows whose loads are in flight at once */
BST_KERNEL(moe_glu_forward, moe_glu_args, THREADS, 1) {
    int pair = ((int)bst_block_y() * THREADS + (int)bst_thread()) * PAIRS;
    if (pair >= ROW_OF_PAIRS) return;
    int64_t row = (int64_t)bst_block() * a.chunk, last = earlier(row + a.chunk, a.rows);
    bst_wait_for_previous();
    if (BIAS) last = earlier(last, a.ends[a.experts - 1]);
    while (row < last) {
        int expert = BIAS ? expert_of(a.ends, a.experts, row) : 0;
        int64_t stop = BIAS ? earlier(last, a.ends[expert]) : last;
        float b[2 * PAIRS], h[2 * PAIRS], y[PAIRS];
        load_bias(b, &a, expert, pair);
        for (; row < stop; row += AT_ONCE) {
            bst_raw raw[AT_ONCE][PARTS];
            BST_EACH(i, AT_ONCE)
                if (row + i < stop) read_pairs(raw[i], a.h, pair_at(row + i, pair), H_VEC);
            BST_EACH(i, AT_ONCE) {
                if (row + i >= stop) continue;
                unpack_pairs(h, raw[i]);
                BST_EACH(j, PAIRS)
                    y[j] = bst_gated_within(h[gate_of(j)] + b[gate_of(j)], h[up_of(j)] + b[up_of(j)], UNIT, a.alpha,
                                            LIMITED, a.limit, TYPE);
                bst_store_once(a.y, (row + i) * ROW_OF_PAIRS + pair, y, TYPE, PAIRS);
            }
        }
        row = stop;
    }
}
#endif

#if defined(GLU_BACKWARD) || defined(COMBINE_BACKWARD)
/* One number a row, from what its warps found, in their order. Shared: [MOE_MOST_ROWS][WARPS]. */
BST_DEVICE void add_dot(float *dots, int in_chunk, int tile, float dot) {
    dot = bst_warp_reduce(dot, 32, false);
    if (bst_lane() != 0) return;
    float *mine = dots + in_chunk * WARPS + bst_thread() / 32;
    *mine = tile ? *mine + dot : dot;
}

BST_DEVICE float dot_of_row(const float *dots, int in_chunk) {
    float dot = 0;
    for (int w = 0; w < WARPS; w++) dot += dots[in_chunk * WARPS + w];
    return dot;
}

/* What this block found for VEC of an expert's biases. (block, expert) grows along the rows, so block + expert is a
 * place of its own. */
BST_DEVICE void store_partial(float *partial, int expert, int column, const float *sum) {
    BST_EACH(j, VEC) partial[((int64_t)bst_block() + expert) * COLUMNS + column + j] = sum[j];
}

/* The pair of each row of the block, and its weight; -1 and NaN where `order` has no pair. */
BST_DEVICE void load_pairs(int32_t *pair, float *weight, const int32_t *order, const void *weights, int64_t first,
                           int64_t end, int64_t pairs) {
    for (int i = (int)bst_thread(); i < end - first; i += THREADS) {
        int32_t found = order[first + i];
        bool good = within(found, pairs);
        pair[i] = good ? found : -1;
        weight[i] = BST_NAN;
        if (good) bst_load(weight + i, weights, found, W_TYPE, 1);
    }
    bst_sync();
}
#endif

#ifdef GLU_BACKWARD
#define AT_ONCE 2
/* dh and wy count w times, the row's weight; dweight = sum of dy y over the row.
 * dh may be h, and wy dy: a thread reads its elements, which no other reads, before it writes them. So neither may be
 * read by bst_read_once, which is for memory that the kernel does not write. */
BST_KERNEL(moe_glu_backward, moe_glu_args, THREADS, 1) {
    BST_SHARED(int32_t, pair, MOE_MOST_ROWS);
    BST_SHARED(float, weight, MOE_MOST_ROWS);
    BST_SHARED(float, dots, DWEIGHTS ? MOE_MOST_ROWS * WARPS : 1);
    int64_t first = (int64_t)bst_block() * a.chunk, end = earlier(first + a.chunk, a.rows);
    bst_wait_for_previous();
    bst_let_next_start();
    load_pairs(pair, weight, a.order, a.weights, first, end, a.rows);
    int64_t last = earlier(end, a.ends[a.experts - 1]);
    for (int tile = 0; tile * THREADS * PAIRS < ROW_OF_PAIRS; tile++) {
        int pair_of_row = (tile * THREADS + (int)bst_thread()) * PAIRS;
        bool live = pair_of_row < ROW_OF_PAIRS;
        for (int64_t row = first; row < last;) {
            int expert = BIAS || DBIAS ? expert_of(a.ends, a.experts, row) : 0;
            int64_t stop = BIAS || DBIAS ? earlier(last, a.ends[expert]) : last;
            float b[2 * PAIRS], sum[2 * PAIRS], h[2 * PAIRS], y[PAIRS], dy[PAIRS];
            if (live) load_bias(b, &a, expert, pair_of_row);
            BST_EACH(j, 2 * PAIRS) sum[j] = 0;
            for (; row < stop; row += AT_ONCE) {
                bst_raw h_raw[AT_ONCE][PARTS], dy_raw[AT_ONCE];
                BST_EACH(i, AT_ONCE) {
                    if (row + i >= stop || !live) continue;
                    read_pairs(h_raw[i], a.h, pair_at(row + i, pair_of_row), H_VEC);
                    dy_raw[i] = bst_raw_at(a.dy, (row + i) * ROW_OF_PAIRS + pair_of_row, TYPE, PAIRS);
                }
                BST_EACH(i, AT_ONCE) {
                    if (row + i >= stop) continue;
                    float w = weight[row + i - first], dot = 0;
                    if (live) {
                        unpack_pairs(h, h_raw[i]);
                        bst_unpack(dy, dy_raw[i], TYPE, PAIRS);
                        BST_EACH(j, PAIRS) {
                            int g = gate_of(j), u = up_of(j);
                            bst_gated_gradients d = bst_gated_within_backward(w * dy[j], h[g] + b[g], h[u] + b[u], UNIT,
                                                                              a.alpha, LIMITED, a.limit, TYPE);
                            dot = bst_fma(dy[j], d.y, dot);
                            y[j] = d.y * w;
                            h[g] = d.dgate;
                            h[u] = d.dup;
                            sum[g] += h[g];
                            sum[u] += h[u];
                        }
                        BST_EACH(p, DH ? PARTS : 0) {
                            BST_UNROLL
                            for (int j = 0; j < VEC; j += H_VEC)
                                bst_store_once(a.dh, pair_at(row + i, pair_of_row) + p * UP + j, h + p * VEC + j, TYPE,
                                               H_VEC);
                        }
                        if (WY) bst_store_once(a.wy, (row + i) * ROW_OF_PAIRS + pair_of_row, y, TYPE, PAIRS);
                    }
                    if (DWEIGHTS) add_dot(dots, (int)(row + i - first), tile, dot);
                }
            }
            if (DBIAS && live) {
                BST_EACH(p, PARTS)
                    store_partial(a.partial, expert, (int)pair_at(0, pair_of_row) + p * UP, sum + p * VEC);
            }
            row = stop;
        }
    }
#if DWEIGHTS
    bst_sync();
    for (int i = (int)bst_thread(); i < end - first; i += THREADS) {
        float dot = 0;
        if (pair[i] < 0) continue;
        if (first + i < last) dot = dot_of_row(dots, i) + (a.dots ? a.dots[first + i] : 0.0f);
        bst_store(a.dweights, pair[i], &dot, W_TYPE, 1);
    }
#endif
}
#endif

/* ---- the weighted sum -------------------------------------------------------------------------------------------- */

#ifdef COMBINE_FORWARD
#define VECTORS (COLUMNS / VEC)
#define AT_ONCE (CHOICES < 8 ? CHOICES : 8)
/* out = sum over choices of weight (y + bias), in their order. Without WEIGHTS a plain sum, which leaves out the pairs
 * of no expert. */
BST_KERNEL(moe_combine_forward, moe_combine_args, THREADS, 1) {
    int64_t at = (int64_t)bst_block() * THREADS + bst_thread(), token = at / VECTORS;
    int column = (int)(at % VECTORS) * VEC;
    if (token >= a.tokens) return;
    float sum[VEC], y[VEC], b[VEC];
    BST_EACH(j, VEC) sum[j] = 0;
    bst_wait_for_previous();
    for (int start = 0; start < CHOICES; start += AT_ONCE) {
        bst_raw y_raw[AT_ONCE], b_raw[AT_ONCE];
        int32_t row[AT_ONCE];
        BST_EACH(i, AT_ONCE) {
            int64_t pair = token * CHOICES + start + i;
            row[i] = start + i < CHOICES ? a.position[pair] : -1;
            if (!within(row[i], a.tokens * CHOICES)) row[i] = -1;
            if (BIAS && row[i] >= 0 && !within(a.indices[pair], a.experts)) row[i] = -1;
            if (row[i] < 0) continue;
            y_raw[i] = bst_raw_at(a.y, (int64_t)row[i] * COLUMNS + column, TYPE, VEC);
            if (BIAS) b_raw[i] = bst_raw_at(a.bias, a.indices[pair] * COLUMNS + column, TYPE, VEC);
        }
        BST_EACH(i, AT_ONCE) {
            if (start + i >= CHOICES) continue;
            if (row[i] < 0) {
                BST_EACH(j, VEC) sum[j] = WEIGHTS ? BST_NAN : sum[j];
                continue;
            }
            float w = 1.0f;
            if (WEIGHTS) bst_load(&w, a.weights, token * CHOICES + start + i, W_TYPE, 1);
            bst_unpack(y, y_raw[i], TYPE, VEC);
            if (BIAS) bst_unpack(b, b_raw[i], TYPE, VEC);
            BST_EACH(j, VEC) sum[j] = bst_fma(w, BIAS ? y[j] + b[j] : y[j], sum[j]);
        }
    }
    bst_store_once(a.out, token * COLUMNS + column, sum, TYPE, VEC);
}
#endif

#ifdef COMBINE_BACKWARD
#define AT_ONCE 4
/* rows = dout of the row's token; dots = its product with the expert's bias; dbias = sum over rows of weight dout. */
BST_KERNEL(moe_combine_backward, moe_combine_backward_args, THREADS, 1) {
    BST_SHARED(int32_t, pair, MOE_MOST_ROWS);
    BST_SHARED(float, weight, MOE_MOST_ROWS);
    BST_SHARED(float, dots, DOTS ? MOE_MOST_ROWS * WARPS : 1);
    int64_t first = (int64_t)bst_block() * a.chunk, end = earlier(first + a.chunk, a.count);
    bst_wait_for_previous();
    bst_let_next_start();
    load_pairs(pair, weight, a.order, a.weights, first, end, a.count);
    int64_t last = earlier(end, a.ends[a.experts - 1]);
    for (int tile = 0; tile < TILES; tile++) {
        int column = (tile * THREADS + (int)bst_thread()) * VEC;
        bool live = column < COLUMNS;
        for (int64_t row = first; row < last;) {
            int expert = expert_of(a.ends, a.experts, row);
            int64_t stop = earlier(last, a.ends[expert]);
            float b[VEC], sum[VEC], x[VEC];
            if (DOTS && live) bst_load(b, a.bias, (int64_t)expert * COLUMNS + column, TYPE, VEC);
            BST_EACH(j, VEC) sum[j] = 0;
            for (; row < stop; row += AT_ONCE) {
                bst_raw raw[AT_ONCE];
                BST_EACH(i, AT_ONCE) {
                    if (row + i >= stop || !live) continue;
                    int32_t found = pair[row + i - first];
                    int64_t token = found / CHOICES;
                    raw[i] = found < 0 ? not_numbers() : bst_raw_at(a.dout, token * a.dout_stride + column, TYPE, VEC);
                }
                BST_EACH(i, AT_ONCE) {
                    if (row + i >= stop) continue;
                    float dot = 0;
                    if (live) {
                        bst_write_once(bst_at_out(a.rows, (row + i) * COLUMNS + column, TYPE), raw[i],
                                       VEC * bst_type_size(TYPE));
                        bst_unpack(x, raw[i], TYPE, VEC);
                        BST_EACH(j, VEC) {
                            if (DOTS) dot = bst_fma(x[j], b[j], dot);
                            sum[j] = bst_fma(weight[row + i - first], x[j], sum[j]);
                        }
                    }
                    if (DOTS) add_dot(dots, (int)(row + i - first), tile, dot);
                }
            }
            if (DBIAS && live) store_partial(a.partial, expert, column, sum);
            row = stop;
        }
    }
#if DOTS
    bst_sync();
    for (int i = (int)bst_thread(); i < last - first; i += THREADS) a.dots[first + i] = dot_of_row(dots, i);
#endif
}
#endif

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

#ifdef BIAS_SUM
/* A block takes an expert (blockIdx.y) and 32 columns; each of its warps every WARPS-th of the blocks that had rows of
 * that expert. */
BST_KERNEL(moe_bias_sum, moe_bias_args, THREADS, 1) {
    BST_SHARED(float, sums, THREADS);
    int expert = (int)bst_block_y(), warp = (int)bst_thread() / 32, column = (int)(bst_block() * 32 + bst_lane());
    bst_wait_for_previous();
    int64_t begin = expert ? a.ends[expert - 1] : 0, end = earlier(a.ends[expert], a.rows);
    if (begin < 0) begin = 0;
    float sum = 0;
    if (column < COLUMNS && begin < end)
        for (int64_t block = begin / a.chunk + warp; block <= (end - 1) / a.chunk; block += WARPS)
            sum += a.partial[(block + expert) * COLUMNS + column];
    sums[bst_thread()] = sum;
    bst_sync();
    if (warp != 0 || column >= COLUMNS) return;
    for (int w = 1; w < WARPS; w++) sum += sums[w * 32 + bst_lane()];
    bst_store(a.dbias, (int64_t)expert * COLUMNS + column, &sum, TYPE, 1);
}
#endif
