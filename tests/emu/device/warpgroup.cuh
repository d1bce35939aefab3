/* warpgroup.cuh - the words of src/cuda/device/warpgroup.cuh for a kernel that runs on the CPU: same names, same
 * meaning. A box comes at a random later time, swizzled as on the chip. Products are made when they are waited for, and
 * until then sums are garbage: what is read, or let go of, too early shows. */
#ifndef BST_WARPGROUP_CUH
#define BST_WARPGROUP_CUH

#include "ptx.cuh"

BST_DEVICE uint32_t bst_shared_address(const void *shared) { return (uint32_t)(uintptr_t)shared; }

/* ---- boxes ------------------------------------------------------------------------------------------------------- */

#define bst_box_read(shared, map, column, row, b) \
    emu_current->box_read(shared, map, column, row, 0, emu_barrier(b), 0, EMU_HERE)
#define bst_box_read_of(shared, map, column, row, which, b) \
    emu_current->box_read(shared, map, column, row, which, emu_barrier(b), 0, EMU_HERE)
#define bst_box_read_both(shared, map, column, row, b) \
    emu_current->box_read(shared, map, column, row, 0, emu_barrier(b), 1, EMU_HERE)
#define bst_barrier_arrive_at(b, rank) emu_current->barrier_arrive_at(emu_barrier(b), rank, EMU_HERE)

/* ---- products ---------------------------------------------------------------------------------------------------- */

#define bst_registers_less(count)                                                  \
    do {                                                                           \
        static_assert((count) >= 24 && (count) % 8 == 0, "registers of a thread"); \
        emu_current->registers(count, EMU_HERE);                                   \
    } while (0)
#define bst_registers_more(count)                                                   \
    do {                                                                            \
        static_assert((count) <= 240 && (count) % 8 == 0, "registers of a thread"); \
        emu_current->registers(count, EMU_HERE);                                    \
    } while (0)

/* An address, in units of 16 bytes; above, the rows of a box that is read across. */
BST_DEVICE uint64_t bst_tile(const void *shared) { return (uint64_t)(uintptr_t)shared >> 4; }
#define BST_TILE_STEP 2
BST_DEVICE uint64_t bst_tile_across_of(const void *shared, int rows) {
    return bst_tile(shared) | (uint64_t)rows << EMU_ADDRESS_BITS;
}
BST_DEVICE uint64_t bst_tile_across(const void *shared) { return bst_tile_across_of(shared, 64); }
#define BST_TILE_STEP_ACROSS         128

#define bst_hold_sums(sums)          ((void)(sums))
#define bst_hold_some(sums, count)   ((void)(sums))
#define bst_hold_words(words, count) ((void)(words))
#define bst_products_begin()         ((void)0)
#define bst_product_64(sums, columns, a, b, add, type, across) \
    emu_current->product(sums, columns, a, nullptr, b, (add) != 0, (type) == BST_F16_CODE, across, EMU_HERE)
#define bst_product_kept(sums, columns, a, b, add, type, across) \
    emu_current->product(sums, columns, 0, a, b, (add) != 0, (type) == BST_F16_CODE, across, EMU_HERE)
#define bst_products_commit() emu_current->products_commit()
#define bst_products_wait(newest)                                  \
    do {                                                           \
        static_assert((newest) >= 0, "a constant, at least zero"); \
        emu_current->products_wait(newest, EMU_HERE);              \
    } while (0)

#endif
