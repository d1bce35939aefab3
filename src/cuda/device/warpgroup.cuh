/* warpgroup.cuh - words for products on tensor cores, four warps at a time, of tiles that boxes are copied into.
 *
 * Hopper's alone (sm_90a): what uses them asks the chip first (bst_chip, warpgroups), and has another way. Section
 * names are those of NVIDIA's "Parallel Thread Execution ISA". */
#ifndef BST_WARPGROUP_CUH
#define BST_WARPGROUP_CUH

#include "ptx.cuh"

#include "tensor_map.h"

BST_DEVICE uint32_t bst_shared_address(const void *shared) { return (uint32_t)__cvta_generic_to_shared(shared); }

/* ---- boxes: one thread ---------------------------------------------------------------------------------------------
 * "cp.async.bulk.tensor". A box of BST_BOX_ROWS rows, swizzled in pieces of 128 bytes, to an address that 1024 divides;
 * what lies outside the matrix comes as zeros. Completes on the barrier's byte count. */

BST_DEVICE void bst_box_read(void *shared, const bst_tensor_map *map, int column, int row, uint64_t *b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            bst_shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(bst_shared_address(b))
        : "memory");
}
/* Of matrix `which` of several, one behind another. */
BST_DEVICE void bst_box_read_of(void *shared, const bst_tensor_map *map, int column, int row, int which, uint64_t *b) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(bst_shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(which), "r"(bst_shared_address(b))
        : "memory");
}
/* Into both blocks of a cluster of two, and completes on the barrier of each. */
BST_DEVICE void bst_box_read_both(void *shared, const bst_tensor_map *map, int column, int row, uint64_t *b) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(bst_shared_address(shared)),
        "l"(map), "r"(column), "r"(row), "r"(bst_shared_address(b)), "h"((uint16_t)3)
        : "memory");
}

/* Arrives at the barrier that lies there in block `rank` of the cluster. "mapa", "mbarrier.arrive". */
BST_DEVICE void bst_barrier_arrive_at(uint64_t *b, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(bst_shared_address(b)),
        "r"(rank)
        : "memory");
}

/* ---- products: all four warps of a group ---------------------------------------------------------------------------
 * "Asynchronous Warpgroup Level Matrix Instructions". */

/* Registers of a thread from here on: `count`, a constant. "setmaxnreg". */
#define bst_registers_less(count) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count))
#define bst_registers_more(count) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count))

/* Rows of 64 numbers in a box, from an address that 1024 divides, or 32, 64, 96 bytes behind one. "Matrix Descriptor
 * Format": swizzled by 128 bytes, 1024 between eight rows and the next. */
BST_DEVICE uint64_t bst_tile(const void *shared) {
    return (uint64_t)((bst_shared_address(shared) & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
#define BST_TILE_STEP 2 /* added to what bst_tile returned: the next 16 columns */

/* The same of rows that are summed over, from an address that 1024 divides: the boxes of all columns, 64 of them each
 * and of so many rows, lie behind one another. */
BST_DEVICE uint64_t bst_tile_across_of(const void *shared, int rows) {
    const uint64_t from_box_to_box = (uint64_t)rows * BST_BOX_COLUMNS * 2 / 16;
    return (uint64_t)((bst_shared_address(shared) & 0x3ffff) >> 4) | from_box_to_box << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}
BST_DEVICE uint64_t bst_tile_across(const void *shared) { return bst_tile_across_of(shared, BST_BOX_ACROSS); }
#define BST_TILE_STEP_ACROSS 128 /* the next 16 rows */

/* Before the first product, and after a wait for the last, of all of their `count` sums: they are where they are said
 * to be. Words that a product has read (bst_product_kept) likewise: they are still there. */
BST_DEVICE void bst_hold_some(float *sums, int count) {
    BST_EACH(i, count) asm volatile("" : "+f"(sums[i])::"memory");
}
BST_DEVICE void bst_hold_sums(float *sums) { bst_hold_some(sums, 128); }
BST_DEVICE void bst_hold_words(uint32_t *words, int count) {
    BST_EACH(i, count) asm volatile("" : "+r"(words[i])::"memory");
}
BST_DEVICE void bst_products_begin(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
BST_DEVICE void bst_products_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Until at most the `newest` (a constant) latest commits are under way. */
#define bst_products_wait(newest) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newest) : "memory")

#define BST_SUMS_8(s, i)                                                                                        \
    "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), \
        "+f"(s[i + 7])
#define BST_SUMS_32(s, i) BST_SUMS_8(s, i), BST_SUMS_8(s, i + 8), BST_SUMS_8(s, i + 16), BST_SUMS_8(s, i + 24)
#define BST_LIST_32                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define BST_LIST_64                                                                        \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"  \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
    "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define BST_LIST_128                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"  \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43," \
    "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64," \
    "%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
    "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,"    \
    "%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"     \
    "%121,%122,%123,%124,%125,%126,%127}"
#define BST_PRODUCT(columns, list, a, b, add_to, rest, type, sums, ...)                             \
    asm volatile(                                                                                   \
        "{\n"                                                                                       \
        ".reg .pred add;\n"                                                                         \
        "setp.ne.b32 add, " add_to                                                                  \
        ", 0;\n"                                                                                    \
        "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " list ", " a ", " b \
        ", add, "                                                                                   \
        "1, 1, " rest                                                                               \
        ";\n"                                                                                       \
        "}"                                                                                         \
        : sums                                                                                      \
        : __VA_ARGS__)
#define BST_SUMS_64(s)  BST_SUMS_32(s, 0), BST_SUMS_32(s, 32)
#define BST_SUMS_128(s) BST_SUMS_64(s), BST_SUMS_32(s, 64), BST_SUMS_32(s, 96)
#define BST_BY_TYPE(product)             \
    if (type == BST_BF16_CODE && across) \
        product("bf16", "1");            \
    else if (type == BST_BF16_CODE)      \
        product("bf16", "0");            \
    else if (across)                     \
        product("f16", "1");             \
    else                                 \
        product("f16", "0")

/* sums [64, columns] (+)= a [64, 16] b [columns, 16]^T, or across: a b [16, columns], of bfloat16 or float16; columns,
 * a constant, is 64, 128 or 256. Begins, and is to be waited for; products of other sums may be under way. Lane l of
 * warp w has of rows 16 w + l / 4 (sums 4 j, 4 j + 1) and 8 more (4 j + 2, 4 j + 3) columns 8 j + l % 4 * 2 and the
 * next. "Register Fragments: wgmma.mma_async.m64nNk16". */
BST_DEVICE void bst_product_64(float *sums, int columns, uint64_t a, uint64_t b, int add, int type, bool across) {
#define BST_TILES "l"(a), "l"(b), "r"(add)
#define BST_OF_64(type, across) \
    BST_PRODUCT("64", BST_LIST_32, "%32", "%33", "%34", "0, " across, type, BST_SUMS_32(sums, 0), BST_TILES)
#define BST_OF_128(type, across) \
    BST_PRODUCT("128", BST_LIST_64, "%64", "%65", "%66", "0, " across, type, BST_SUMS_64(sums), BST_TILES)
#define BST_OF_256(type, across) \
    BST_PRODUCT("256", BST_LIST_128, "%128", "%129", "%130", "0, " across, type, BST_SUMS_128(sums), BST_TILES)
    if (columns == 64) {
        BST_BY_TYPE(BST_OF_64);
    } else if (columns == 128) {
        BST_BY_TYPE(BST_OF_128);
    } else {
        BST_BY_TYPE(BST_OF_256);
    }
}

/* Likewise, a being in registers, which are not written until it has been waited for: lane l of warp w has of rows
 * 16 w + l / 4 (words 0, 2) and 8 more (1, 3) columns l % 4 * 2 and the next (0, 1), and those 8 further (2, 3). So
 * sums that are rounded in pairs, 8 j to 8 j + 7, are its words of columns 16 j to 16 j + 15. */
BST_DEVICE void bst_product_kept(float *sums, int columns, const uint32_t *a, uint64_t b, int add, int type,
                                 bool across) {
#define BST_WORDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add)
#define BST_KEPT_64(type, across) \
    BST_PRODUCT("64", BST_LIST_32, "{%32,%33,%34,%35}", "%36", "%37", across, type, BST_SUMS_32(sums, 0), BST_WORDS)
#define BST_KEPT_128(type, across) \
    BST_PRODUCT("128", BST_LIST_64, "{%64,%65,%66,%67}", "%68", "%69", across, type, BST_SUMS_64(sums), BST_WORDS)
#define BST_KEPT_256(type, across)                                                                              \
    BST_PRODUCT("256", BST_LIST_128, "{%128,%129,%130,%131}", "%132", "%133", across, type, BST_SUMS_128(sums), \
                BST_WORDS)
    if (columns == 64) {
        BST_BY_TYPE(BST_KEPT_64);
    } else if (columns == 128) {
        BST_BY_TYPE(BST_KEPT_128);
    } else {
        BST_BY_TYPE(BST_KEPT_256);
    }
}

#endif
