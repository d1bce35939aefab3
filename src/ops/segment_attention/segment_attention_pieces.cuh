/* segment_attention_pieces.cuh - what the attention's kernels share on Hopper's tensor cores: tiles of segments, the
 * stages that one thread copies ahead, and products of a tile with what lies in a stage.
 *
 * Macros: WIDTH (of a head, a multiple of 8 up to 256), TYPE (code of dtype.h: bf16 or f16), CAUSAL, WINDOW (whether
 * there is one).
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

/* Columns that are computed: what a head has none of, boxes have zeros in. */
#define DIM         ATTENTION_DIM(WIDTH)
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
    const int most = side == OF_KEYS ? s->keys : s->queries;
    if (!s->cuts) return most / s->segments * i;
    const int cut = s->cuts[side * (s->segments + 1) + i];
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

BST_DEVICE int tiles_of(const int32_t *before, int segment) { return before[segment + 1] - before[segment]; }

/* Tiles of all segments, of each so many at most. By all lanes of a warp, as the next. */
BST_DEVICE int tiles_below(const int32_t *before, int segments, int most) {
    uint32_t own = 0;
    for (int i = (int)bst_lane(); i < segments; i += 32) {
        const int tiles = tiles_of(before, i);
        own += (uint32_t)(tiles < most ? tiles : most);
    }
    return (int)bst_warp_sum_u32(own);
}

/* found: the segment of tile number `place`, and which of its tiles that is. All segments' first tiles come first, then
 * all second ones. */
BST_DEVICE void find_tile(const attention_segments *s, const int32_t *before, int place, int found[2]) {
    const int segments = s->segments, lane = (int)bst_lane();
    uint32_t own = 0, all, next = 0; /* next: the segment's number and 1, in the lane that has it */
    if (!s->cuts) {                  /* all are as long */
        found[0] = place % segments, found[1] = place / segments;
        return;
    }
    for (int i = lane; i < segments; i += 32)
        if (tiles_of(before, i) > (int)own) own = (uint32_t)tiles_of(before, i);
    int level = 0, above = (int)bst_warp_max_u32(own);
    BST_ROLLED
    while (above - level > 1) {
        const int middle = level + (above - level) / 2;
        if (tiles_below(before, segments, middle) <= place)
            level = middle;
        else
            above = middle;
    }
    const int in = place - tiles_below(before, segments, level); /* of those that have so many tiles */
    own = 0;
    for (int i = lane; i < segments; i += 32) own += tiles_of(before, i) > level;
    int left = in - (int)bst_lanes_before(own, &all);
    for (int i = lane; i < segments; i += 32)
        if (tiles_of(before, i) > level && left-- == 0) next = (uint32_t)i + 1;
    found[0] = (int)bst_warp_max_u32(next) - 1, found[1] = level;
}

/* The keys that a query sees, of its segment's from `from` to below `end`: query i of a segment's, of which the last
 * stands where the last key does. */
typedef struct sight {
    int from, end;
} sight;

BST_DEVICE int place_of(const tile *t, int i) { return CAUSAL || WINDOW ? i + t->keys - t->queries : 0; }

BST_DEVICE sight sight_of(const tile *t, int i, int window) {
    const int place = place_of(t, i), end = CAUSAL ? place + 1 : WINDOW ? place + window : t->keys;
    const int from = WINDOW ? place + 1 - window : 0;
    const sight s = {from > 0 ? from : 0, end < 0 ? 0 : end < t->keys ? end : t->keys};
    return s;
}

/* Tiles of keys, of a tile of queries or of a part of it: those that any query sees, and of them those that all do. */
typedef struct span {
    int begin, end, all_begin, all_end;
} span;

BST_DEVICE span span_of(const tile *t, int first, int rows, int window) {
    const int begin = first - t->query, end = first + rows < t->end ? begin + rows : t->end - t->query;
    const sight low = sight_of(t, begin, window), high = sight_of(t, end - 1, window);
    span s = {low.from / KEYS, (high.end + KEYS - 1) / KEYS, (high.from + KEYS - 1) / KEYS, low.end / KEYS};
    if (s.end < s.begin) s.end = s.begin;
    return s;
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

#define GROUPS 2 /* of warps that multiply, which each leave what they have read */

/* arrivals, leaves: of each `full` and of each `empty`. By one thread, before bst_sync. */
BST_DEVICE void init(uint64_t *full, uint64_t *empty, int count, unsigned arrivals, unsigned leaves) {
    for (int i = 0; i < count; i++) {
        bst_barrier_init(full + i, arrivals);
        bst_barrier_init(empty + i, leaves);
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
BST_DEVICE void hide(float *scores, int first, const sight seen[2], float value) {
    BST_EACH(i, KEYS / 2) {
        const int key = first + own_column(i);
        if (key >= seen[i / 2 % 2].end || (WINDOW && key < seen[i / 2 % 2].from)) scores[i] = value;
    }
}

/* Of the two rows that this thread has sums of, `first` being the first of its warp group's. */
BST_DEVICE void own_sight(const tile *t, int first, int window, sight seen[2]) {
    BST_EACH(half, 2) seen[half] = sight_of(t, first - t->query + own_row() + 8 * half, window);
}

/* ---- which tiles a block takes -------------------------------------------------------------------------------------
 *
 * Every so many, in turns. All segments' last tiles come first, which have most to do beneath a causal mask; and what a
 * block has more of than others in one turn, it has less of in the next. To find a tile takes a microsecond, so a warp
 * does that one turn ahead of those that copy and multiply. */

typedef struct turns {
    tile *tiles; /* [2]; the last one of a block has a segment below 0 */
    uint64_t *known, *taken;
    bst_stage at;
} turns;

/* Warps that take a tile, by leave_tile: a thread that copies, and those that multiply. */
#define LEAVES_A_TILE (1 + 4 * GROUPS)

/* Of tiles of queries. By all lanes of a warp. */
BST_DEVICE void find_tiles(const attention_segments *s, const int32_t *before, turns *next) {
    const int blocks = (int)bst_blocks(), block = (int)bst_block(), all = before[s->segments] * s->heads;
    bool is_tile = true;
    BST_ROLLED
    for (int turn = 0; is_tile; turn++) {
        const int number = turn * blocks + (turn % 2 ? blocks - 1 - block : block);
        tile t = {-1, 0, 0, 0, 0, 0, 0, 0};
        is_tile = number < all;
        if (is_tile) {
            int found[2];
            find_tile(s, before, before[s->segments] - 1 - number / s->heads, found);
            set_tile(s, OF_QUERIES, found[0], found[1], number % s->heads, &t);
        }
        bst_barrier_wait(next->taken + next->at.index, next->at.parity ^ 1);
        if (bst_lane() == 0) {
            next->tiles[next->at.index] = t;
            bst_barrier_arrive(next->known + next->at.index);
        }
        bst_next_stage(&next->at, 2);
    }
}

/* The tile that is next, or none; it is there until leave_tile. */
BST_DEVICE const tile *take_tile(const turns *next) {
    const tile *t = next->tiles + next->at.index;
    bst_barrier_wait(next->known + next->at.index, next->at.parity);
    return t->segment < 0 ? (const tile *)0 : t;
}

/* By the thread that copies, or all lanes of a warp. */
BST_DEVICE void leave_tile(turns *next, bool is_alone) {
    if (!is_alone) bst_sync_warp();
    if (is_alone || bst_lane() == 0) bst_barrier_arrive(next->taken + next->at.index);
    bst_next_stage(&next->at, 2);
}

/* The body of a kernel whose blocks take tiles of queries, of arguments a: copy(&a, tile, &queries, &ring) in one
 * thread, and work(&a, tile, worker, &queries, &ring) in two warp groups. bytes: of what stays for a tile's time,
 * before the ring's `stages` (constants). */
#define OVER_QUERIES(a, bytes, stages, copy, work)                                                    \
    BST_DYNAMIC_SHARED(memory);                                                                       \
    BST_SHARED(uint64_t, barriers, 2 * (stages) + 2 + 4);                                             \
    BST_SHARED(int32_t, before, ATTENTION_SEGMENTS + 1);                                              \
    BST_SHARED(tile, tiles, 2);                                                                       \
    own queries = {aligned(memory), barriers, barriers + 1, 0};                                       \
    turns next = {tiles, barriers + 2, barriers + 4, {0, 0}};                                         \
    ring r = {queries.memory + (bytes), barriers + 6, barriers + 6 + (stages), {0, 0}};               \
    const int worker = (int)bst_thread() / 128 - 1;                                                   \
    const tile *t;                                                                                    \
    if (bst_thread() == 0) {                                                                          \
        init(queries.full, queries.empty, 1, 1, GROUPS);                                              \
        init(next.known, next.taken, 2, 1, LEAVES_A_TILE);                                            \
        init(r.full, r.empty, stages, 1, GROUPS);                                                     \
        bst_barrier_fence_init();                                                                     \
    }                                                                                                 \
    count_tiles(&(a).of, OF_QUERIES, before);                                                         \
    if (worker < 0) {                                                                                 \
        bst_registers_less(40);                                                                       \
        if (bst_thread() / 32 == 1) find_tiles(&(a).of, before, &next);                               \
        if (bst_thread() == 0) BST_ROLLED                                                             \
        for (; (t = take_tile(&next)); leave_tile(&next, true)) copy(&(a), t, &queries, &r);          \
    } else {                                                                                          \
        bst_registers_more(232);                                                                      \
        BST_ROLLED                                                                                    \
        for (; (t = take_tile(&next)); leave_tile(&next, false)) work(&(a), t, worker, &queries, &r); \
    }

#endif
