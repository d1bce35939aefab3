/* boxes.c - tensor maps and the copies of their boxes: of 64 numbers of 16 bits by some rows, pieces of 16 bytes
 * exchanged within rows of 128 by the row's number, zeros for what lies outside ("PTX ISA: Tensors, Swizzling Modes").
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "emu.h"

#include "cuda/device/tensor_map.h"

static const uint64_t mark = UINT64_C(0x626f786573206d61);

/* ---- the map ----------------------------------------------------------------------------------------------------- */

bst_status bst__cuda_map_boxes(const char *op, int device, const bst_boxes *boxes, struct bst_tensor_map *out) {
    emu_tensor_map map = {.mark = mark, .data = boxes->data, .dims = boxes->dims, .rows = boxes->rows};
    bst_chip chip;
    static_assert(sizeof map <= sizeof *out, "a map of the emulator has room in a CUtensorMap");
    BST_TRY(bst__cuda_chip(op, device, &chip));
    /* "CUDA Driver API: cuTensorMapEncodeTiled". */
    bool holds = (uintptr_t)boxes->data % 16 == 0 && boxes->rows >= 1 && boxes->rows <= 256;
    for (uint32_t i = 0; i < boxes->dims; ++i) {
        map.sizes[i] = boxes->sizes[i];
        holds = holds && boxes->sizes[i] >= 1 && boxes->sizes[i] <= UINT64_C(1) << 32;
        if (i == 0) continue;
        map.strides[i - 1] = boxes->strides[i - 1];
        holds = holds && boxes->strides[i - 1] % 8 == 0 && boxes->strides[i - 1] < UINT64_C(1) << 39;
    }
    if (!holds) return bst__error(BST_CUDA, "%s: a tensor map that cuTensorMapEncodeTiled refuses", op);
    memset(out, 0, sizeof *out);
    memcpy(out, &map, sizeof map);
    return BST_OK;
}

/* ---- a box ------------------------------------------------------------------------------------------------------- */

enum { COLUMNS = BST_BOX_COLUMNS, ROW = 2 * COLUMNS, PIECE = 16 };

static bool is_within(int64_t at, uint64_t size) { return at >= 0 && (uint64_t)at < size; }

/* To be freed. */
static unsigned char *made(const emu_tensor_map *map, int column, int row, int which, const char *where) {
    unsigned char *box = calloc(map->rows, ROW), line[ROW];
    if (box == NULL) emu_fail(where, "no memory for a box");
    if (map->dims > 2 && !is_within(which, map->sizes[2])) return box;
    for (unsigned r = 0; r < map->rows; ++r) {
        if (!is_within((int64_t)row + r, map->sizes[1]) || !is_within(column, map->sizes[0])) continue;
        const uint64_t left = map->sizes[0] - (uint64_t)column, count = left < COLUMNS ? left : COLUMNS;
        const uint64_t begin = (uint64_t)which * map->strides[1] + ((uint64_t)row + r) * map->strides[0];
        const unsigned char *from = (const unsigned char *)map->data + 2 * (begin + (uint64_t)column);
        emu_need("bst_box_read", "the matrix", from, 2 * count, 2, EMU_GLOBAL, where);
        emu_touch(from, 2 * count);
        memset(line, 0, sizeof line);
        memcpy(line, from, 2 * count);
        for (unsigned p = 0; p < ROW / PIECE; ++p) {
            memcpy(box + r * ROW + (p ^ (r & 7)) * PIECE, line + p * PIECE, PIECE);
        }
    }
    return box;
}

void emu_box_read(void *to, const void *map, int column, int row, int which, void *barrier, int both,
                  const char *where) {
    static const char name[] = "bst_box_read";
    emu_tensor_map given;
    memcpy(&given, map, sizeof given);
    emu_need_hopper(name, where);
    if (given.mark != mark) emu_fail(where, "%s: that is no tensor map", name);
    const unsigned bytes = given.rows * ROW, first = both ? 0 : emu.current->block->rank, last = both ? 1 : first;
    emu_need(name, "shared", to, bytes, 1024, EMU_SHARED, where);
    for (unsigned rank = first; rank <= last; ++rank) {
        emu_bulk_bring(name, rank, to, made(&given, column, row, which, where), bytes, barrier, where);
    }
    emu_yield();
}
