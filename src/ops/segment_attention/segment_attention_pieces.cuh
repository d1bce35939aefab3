/* segment_attention_pieces.cuh - what the attention's kernels share on Hopper's tensor cores: tiles of segments, the
 * stages that one thread copies ahead, and products of a tile with what lies in a stage.
 *
 * Macros: DIM (64, 128 or 256: of a head), TYPE (code of dtype.h: bf16 or f16), CAUSAL.
 *
 * A tile is 128 queries of one segment and one head, or as many keys, of wide heads half as many. Boxes are copied
 * whole: what a tile has behind its segment is rows of the next one, which nothing is written for, and whose weights
 * are 0. They are multiplied by 0, though, so that a number that is not finite in one sequence may show in the
 * sequence before it. */
#ifndef BST_SEGMENT_ATTENTION_CUH
#define BST_SEGMENT_ATTENTION_CUH

#include "fragment.cuh"
#include "prefix.cuh"
#include "ring.cuh"
#include "warpgroup.cuh"

#include "segment_attention_args.h"

#define BOXES       (DIM / BST_BOX_COLUMNS)
#define ROWS        ATTENTION_QUERIES
#define HALF        (ROWS / 2) /* of a warp group */
#define KEYS        ATTENTION_KEYS(DIM)
#define QUERY_PIECE ATTENTION_BYTES(ROWS, DIM)
#define KEY_PIECE   ATTENTION_BYTES(KEYS, DIM)
#define LOG2_E      1.4426950408889634f

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

enum { OF_QUERIES, OF_KEYS };

typedef struct tile {
    int segment, head; /* head: of queries, or of keys */
    int first, end;    /* of its rows the first, and where its segment's end, among all tokens */
    int queries, keys; /* how many its segment has */
    int query, key;    /* and the first of each */
} tile;

/* Cuts are not believed. */
BST_DEVICE int cut_of(const attention_segments *s, int side, int i) {
    const int most = side == OF_KEYS ? s->keys : s->queries, cut = s->cuts[side * (s->segments + 1) + i];
    return cut < 0 ? 0 : cut < most ? cut : most;
}

BST_DEVICE int rows_of(int side) { return side == OF_KEYS ? KEYS : ROWS; }

/* before[i]: the tiles of all segments before i. By all threads. */
BST_DEVICE void count_tiles(const attention_segments *s, int side, int32_t *before) {
    for (int i = (int)bst_thread(); i < s->segments; i += ATTENTION_THREADS) {
        const int rows = cut_of(s, side, i + 1) - cut_of(s, side, i);
        before[i + 1] = rows > 0 ? (rows + rows_of(side) - 1) / rows_of(side) : 0;
    }
    bst_sync();
    if (bst_thread() < 32) bst_prefix_sums(before, s->segments);
    bst_sync();
}

/* A segment's tile `in`. */
BST_DEVICE void set_tile(const attention_segments *s, int side, int segment, int in, int head, tile *t) {
    t->segment = segment, t->head = head;
    t->query = cut_of(s, OF_QUERIES, segment), t->key = cut_of(s, OF_KEYS, segment);
    t->queries = cut_of(s, OF_QUERIES, segment + 1) - t->query;
    t->keys = cut_of(s, OF_KEYS, segment + 1) - t->key;
    t->keys = t->keys > 0 ? t->keys : 0, t->queries = t->queries > 0 ? t->queries : 0;
    const int begin = side == OF_KEYS ? t->key : t->query;
    t->end = begin + (side == OF_KEYS ? t->keys : t->queries);
    t->first = begin + in * rows_of(side);
}

/* Tile number `number` of queries, not less than the one that `t` was: all heads of a tile, then the next one. A
 * segment's last tile comes first, which has most to do beneath a causal mask. */
BST_DEVICE void find_queries(const attention_segments *s, const int32_t *before, int number, tile *t) {
    const int place = number / s->heads;
    int segment = t->segment;
    while (before[segment + 1] <= place) segment++;
    set_tile(s, OF_QUERIES, segment, before[segment + 1] - 1 - place, number % s->heads, t);
}

/* Tiles of all segments, of each so many at most, of which a lane has the segments from first to below last. */
BST_DEVICE int tiles_below(const int32_t *before, int first, int last, int most) {
    uint32_t own = 0, all;
    for (int i = first; i < last; i++) {
        const int tiles = before[i + 1] - before[i];
        own += (uint32_t)(tiles < most ? tiles : most);
    }
    bst_lanes_before(own, &all);
    return (int)all;
}

/* found: the segment of tile number `place` of keys, and which of its tiles that is. All segments' first tiles come
 * first, then all second ones: beneath a causal mask those that have most to do. By all lanes of a warp. */
BST_DEVICE void find_keys(const int32_t *before, int segments, int place, int32_t found[2]) {
    const int each = (segments + 31) / 32, first = (int)bst_lane() * each;
    const int last = first + each < segments ? first + each : segments;
    int level = 0, above = before[segments];
    uint32_t own = 0, all;
    BST_ROLLED
    while (above - level > 1) {
        const int middle = level + (above - level) / 2;
        if (tiles_below(before, first, last, middle) <= place)
            level = middle;
        else
            above = middle;
    }
    const int in = place - tiles_below(before, first, last, level); /* of those that have so many tiles */
    for (int i = first; i < last; i++) own += before[i + 1] - before[i] > level;
    int left = in - (int)bst_lanes_before(own, &all);
    for (int i = first; i < last; i++)
        if (before[i + 1] - before[i] > level && left-- == 0) found[0] = i, found[1] = level;
}

/* How many of its segment's keys a query sees, the first of which it sees: query i of a segment's. */
BST_DEVICE int seen_by(const tile *t, int i) {
    const int most = CAUSAL ? i + 1 + t->keys - t->queries : t->keys;
    return most < 0 ? 0 : most < t->keys ? most : t->keys;
}

/* Tiles of keys that any query of a tile of queries sees. */
BST_DEVICE int key_tiles(const tile *t) {
    const int last = t->first + ROWS < t->end ? t->first + ROWS : t->end;
    return (seen_by(t, last - 1 - t->query) + KEYS - 1) / KEYS;
}

/* ---- stages ------------------------------------------------------------------------------------------------------ */

typedef struct ring {
    unsigned char *memory;
    uint64_t *full, *empty;
    bst_stage at;
} ring;

/* What stays for all of a tile's time: full once a tile, and empty when it has been read for the last time. */
typedef struct own {
    unsigned char *memory;
    uint64_t *full, *empty;
    unsigned parity;
} own;

BST_DEVICE unsigned char *aligned(unsigned char *shared) {
    return shared + (1024 - bst_shared_address(shared) % 1024) % 1024;
}

/* arrivals: at each `full`. Two warp groups leave what they have read. By one thread, before bst_sync. */
BST_DEVICE void init(uint64_t *full, uint64_t *empty, int count, unsigned arrivals) {
    for (int i = 0; i < count; i++) {
        bst_barrier_init(full + i, arrivals);
        bst_barrier_init(empty + i, 2);
    }
}

/* A head's columns of so many rows, as boxes behind one another. */
BST_DEVICE void copy_rows(unsigned char *to, const bst_tensor_map *map, int head, int row, int rows, uint64_t *full) {
    BST_EACH(i, BOXES) bst_box_read_of(to + i * rows * BST_BOX_COLUMNS * 2, map, i * BST_BOX_COLUMNS, row, head, full);
}

BST_DEVICE unsigned char *stage_of(const ring *r, int bytes) { return r->memory + r->at.index * bytes; }
BST_DEVICE void wait_for_stage(const ring *r) { bst_barrier_wait(r->full + r->at.index, r->at.parity); }
BST_DEVICE void wait_for_room(const ring *r) { bst_barrier_wait(r->empty + r->at.index, r->at.parity ^ 1); }

/* By all four warps of a group. */
BST_DEVICE void leave(uint64_t *empty) {
    if (bst_thread() % 128 == 0) bst_barrier_arrive(empty);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Begins sums [64, columns] = a b^T over a head's numbers. a: 64 rows of boxes of `a_rows`, b: boxes of `columns` rows.
 */
BST_DEVICE void multiply_heads(float *sums, int columns, const unsigned char *a, int a_rows, const unsigned char *b) {
    const uint64_t left = bst_tile(a), right = bst_tile(b);
    BST_EACH(i, DIM / 16) {
        const uint64_t l = left + (uint64_t)(i / 4 * (a_rows * 8) + i % 4 * BST_TILE_STEP);
        bst_product_64(sums, columns, l, right + (uint64_t)(i / 4 * (columns * 8) + i % 4 * BST_TILE_STEP), i, TYPE,
                       false);
    }
}

/* Begins sums [64, DIM] (+)= words b over `rows` tokens. words: in registers; b: boxes of that many rows. */
BST_DEVICE void multiply_tokens(float *sums, const uint32_t *words, const unsigned char *b, int rows, int add) {
    const uint64_t right = bst_tile_across_of(b, rows);
    BST_EACH(i, rows / 16)
        bst_product_kept(sums, DIM, words + 4 * i, right + (uint64_t)(i * BST_TILE_STEP_ACROSS), add | i, TYPE, true);
}

/* What this thread's words of a first factor are, of sums [64, columns] that it has. */
BST_DEVICE void round_words(uint32_t *words, const float *sums, int count) {
    BST_EACH(i, count) words[i] = bst_half_pair(sums[2 * i], sums[2 * i + 1], TYPE);
}

/* Which column this thread's sum number i is of. */
BST_DEVICE int own_column(int i) { return i / 4 * 8 + (int)bst_lane() % 4 * 2 + i % 2; }

/* Of the rows of this thread's warp group the first of the two that it has sums of, the other being 8 below. */
BST_DEVICE int own_row(void) { return (int)bst_thread() / 32 % 4 * 16 + (int)bst_lane() / 4; }

/* Scores of keys that a row does not see become this. first: of the keys, within the segment. */
BST_DEVICE void hide(float *scores, int first, const int seen[2], float value) {
    BST_EACH(i, KEYS / 2)
        if (first + own_column(i) >= seen[i / 2 % 2]) scores[i] = value;
}

/* ---- a kernel ---------------------------------------------------------------------------------------------------- */

/* The body of one whose blocks take every so many tiles of queries, of arguments a: copy(&a, &tile, &queries, &ring) in
 * one thread, and work(&a, &tile, worker, &queries, &ring) in two warp groups. bytes: of what stays for a tile's time,
 * before the ring's `stages` (constants). */
#define OVER_QUERIES(a, bytes, stages, copy, work)                                                \
    BST_DYNAMIC_SHARED(memory);                                                                   \
    BST_SHARED(uint64_t, barriers, 2 * (stages) + 2);                                             \
    BST_SHARED(int32_t, before, ATTENTION_SEGMENTS + 1);                                          \
    own queries = {aligned(memory), barriers, barriers + 1, 0};                                   \
    ring r = {queries.memory + (bytes), barriers + 2, barriers + 2 + (stages), {0, 0}};           \
    const int worker = (int)bst_thread() / 128 - 1, apart = (int)bst_blocks();                    \
    if (bst_thread() == 0) {                                                                      \
        init(queries.full, queries.empty, 1, 1);                                                  \
        init(r.full, r.empty, stages, 1);                                                         \
        bst_barrier_fence_init();                                                                 \
    }                                                                                             \
    count_tiles(&(a).of, OF_QUERIES, before);                                                     \
    const int all = before[(a).of.segments] * (a).of.heads;                                       \
    tile t = {0, 0, 0, 0, 0, 0, 0, 0};                                                            \
    if (worker < 0) {                                                                             \
        bst_registers_less(40);                                                                   \
        BST_ROLLED                                                                                \
        for (int number = (int)bst_block(); number < all && bst_thread() == 0; number += apart) { \
            find_queries(&(a).of, before, number, &t);                                            \
            copy(&(a), &t, &queries, &r);                                                         \
        }                                                                                         \
    } else {                                                                                      \
        bst_registers_more(232);                                                                  \
        BST_ROLLED                                                                                \
        for (int number = (int)bst_block(); number < all; number += apart) {                      \
            find_queries(&(a).of, before, number, &t);                                            \
            work(&(a), &t, worker, &queries, &r);                                                 \
        }                                                                                         \
    }

#endif
