/* test_dequantize_4bit.c - weights out of codes of 4 bits through the C API: values to the bit, in each type, odd
 * sizes, bytes at any address, errors, its kernel on every chip. */
#include <math.h>

#include "chips.h"
#include "core/cpu_kernel.h"

static const DLDataType u8 = {kDLUInt, 8, 1};

enum { MOST = 4200, CODES = 16, NESTED_CODES = 256 };
static float code[CODES], nested_code[NESTED_CODES], absmax[MOST], nested_absmax[MOST], offset[1];
static uint8_t packed[MOST + 1], absmax_bytes[MOST];
static float wide[MOST + 16];

static void fill(void) {
    unsigned seed = 1;
    bst_fill(code, CODES, 2, 1);
    bst_fill(nested_code, NESTED_CODES, 3, 1);
    bst_fill(absmax, MOST, 4, 3);
    bst_fill(nested_absmax, MOST, 5, 3);
    offset[0] = 0.7321f;
    for (int i = 0; i < MOST; i++) {
        seed = seed * 1664525u + 1013904223u;
        packed[i] = (uint8_t)(seed >> 24);
        absmax_bytes[i] = (uint8_t)(seed >> 16);
    }
}

static float scale_of(int64_t block, int64_t inner, bool nested) {
    if (!nested) return absmax[block];
    volatile float product = nested_code[absmax_bytes[block]] * nested_absmax[block / inner];
    return product + offset[0];
}

/* Sizes: whole vectors and blocks; a part of a vector and of a block; an odd number, whose last byte is half used; one
 * element; rows that end within a block. `at`: the byte that packed begins at. */
static void check_values(int64_t rows, int64_t columns, int64_t block, int64_t inner, bool nested, int type, int at) {
    int64_t shape[] = {rows, columns}, count = rows * columns, bytes = (count + 1) / 2;
    int64_t blocks = (count + block - 1) / block, outer = (blocks + inner - 1) / inner;
    DLTensor tpacked = bst_tensor(packed + at, 1, &bytes, NULL, u8);
    DLTensor tabsmax = bst_tensor(absmax, 1, &blocks, NULL, bst_test_types[0]);
    DLTensor tbytes = bst_tensor(absmax_bytes, 1, &blocks, NULL, u8);
    DLTensor tcode = bst_f32(code, 1, (int64_t[]){CODES}), toffset = bst_f32(offset, 0, NULL);
    DLTensor tnested_code = bst_f32(nested_code, 1, (int64_t[]){NESTED_CODES});
    DLTensor tnested_absmax = bst_f32(nested_absmax, 1, &outer);
    DLTensor weight = bst_tensor(wide, 2, shape, NULL, bst_test_types[type]);
    bst_4bit_weight given = {.size = sizeof given,
                             .packed = &tpacked,
                             .absmax = nested ? &tbytes : &tabsmax,
                             .code = &tcode,
                             .nested_code = nested ? &tnested_code : NULL,
                             .nested_absmax = nested ? &tnested_absmax : NULL,
                             .offset = nested ? &toffset : NULL,
                             .blocksize = block,
                             .nested_blocksize = inner};
    memset(wide, 0xff, sizeof wide);
    CHECK_OK(bst_dequantize_4bit(NULL, &given, &weight));
    int64_t wrong = 0;
    for (int64_t e = 0; e < count; e++) {
        int number = e % 2 ? packed[at + e / 2] & 15 : packed[at + e / 2] >> 4;
        float want = code[number] * scale_of(e / block, inner, nested);
        uint16_t half;
        memcpy(&half, (char *)wide + 2 * e, sizeof half);
        wrong += type == 0   ? memcmp(&wide[e], &want, sizeof want) != 0
                 : type == 1 ? half != bst_to_bf16(want)
                             : half != bst_to_f16(want);
    }
    if (wrong) FAILED("%d of %d elements are wrong", (int)wrong, (int)count);
    const unsigned char *behind = (const unsigned char *)wide + count * (type ? 2 : 4);
    for (int i = 0; i < 16; i++) CHECK(behind[i] == 0xff);
}

TEST(values_to_the_bit) {
    fill();
    for (int type = 0; type < 3; type++) {
        for (int nested = 0; nested < 2; nested++) {
            check_values(4, 1024, 64, 16, nested, type, 0);
            check_values(3, 37, 8, 4, nested, type, 0);
            check_values(1, 1, 64, 256, nested, type, 0);
            check_values(5, 43, 16, 1, nested, type, 1);
        }
    }
}

/* One launch of several blocks of threads, and the accesses of one byte. */
TEST(sizes_beyond_one_block) {
    fill();
    check_values(33, 127, 4096, 256, true, 0, 1);
    check_values(3, 1365, 32, 2, true, 0, 0);
}

TEST(nothing_is_no_error) { check_values(0, 64, 64, 256, true, 1, 0); }

TEST(errors_name_the_argument_and_write_nothing) {
    int64_t shape[] = {4, 32}, bytes = 64, blocks = 2, one = 1;
    DLTensor tpacked = bst_tensor(packed, 1, &bytes, NULL, u8), tabsmax = bst_f32(absmax, 1, &blocks);
    DLTensor tbytes = bst_tensor(absmax_bytes, 1, &blocks, NULL, u8), tcode = bst_f32(code, 1, (int64_t[]){CODES});
    DLTensor tnested_code = bst_f32(nested_code, 1, (int64_t[]){NESTED_CODES}), tone = bst_f32(nested_absmax, 1, &one);
    DLTensor weight = bst_f32(wide, 2, shape), flat = bst_f32(wide, 1, shape);
    const bst_4bit_weight good = {.size = sizeof good, .packed = &tpacked, .absmax = &tabsmax, .code = &tcode};
    bst_4bit_weight bad = good;
    memset(wide, 0, sizeof wide);
#define REFUSED(status, text)                                     \
    CHECK_EQ_I(bst_dequantize_4bit(NULL, &bad, &weight), status); \
    CHECK_STR(bst_last_error(), "dequantize_4bit: " text);        \
    for (int i = 0; i < 128; i++) CHECK(wide[i] == 0);            \
    bad = good
    bad.blocksize = 48;
    REFUSED(BST_INVALID, "blocksize is 48; a power of two from 8 to 65536 is needed");
    bad.blocksize = 4;
    REFUSED(BST_INVALID, "blocksize is 4; a power of two");
    bad.blocksize = 32;
    REFUSED(BST_INVALID, "absmax has shape [2]; 4 elements, one a block, are needed");
    bad.packed = &tbytes;
    REFUSED(BST_INVALID, "packed has shape [2]; 64 elements");
    bad.absmax = &tbytes;
    REFUSED(BST_INVALID, "absmax is uint8; float32 is needed");
    bad.code = &tnested_code;
    REFUSED(BST_INVALID, "code has shape [256]; 16 elements");
    bad.nested_code = &tnested_code;
    REFUSED(BST_INVALID, "nested_absmax is NULL");
    bad.nested_code = &tnested_code, bad.nested_absmax = &tone, bad.offset = &tone;
    REFUSED(BST_INVALID, "absmax is float32; uint8 is needed");
    bad.nested_code = &tnested_code, bad.nested_absmax = &tone, bad.offset = &tone, bad.absmax = &tbytes;
    bad.nested_blocksize = 1;
    REFUSED(BST_INVALID, "nested_absmax has shape [1]; 2 elements");
    bad.packed = NULL;
    REFUSED(BST_INVALID, "packed is NULL");
    CHECK_EQ_I(bst_dequantize_4bit(NULL, &good, &flat), BST_INVALID);
    CHECK_STR(bst_last_error(), "dequantize_4bit: weight has shape [4]; 2 dimensions are needed");
}

/* ---- several ----------------------------------------------------------------------------------------------------- */

enum { WEIGHTS = 6 };

/* Weights of different sizes, the last three of another type, the last two nested: three launches on CUDA, of accesses
 * as wide as the least aligned weight allows. */
typedef struct group {
    int64_t shape[WEIGHTS][2], bytes[WEIGHTS], blocks[WEIGHTS], outer[WEIGHTS], codes[2];
    DLTensor packed[WEIGHTS], absmax[WEIGHTS], code, nested_code, nested_absmax[WEIGHTS], offset, weight[WEIGHTS];
    bst_4bit_weight given[WEIGHTS];
    const bst_4bit_weight *quantised[WEIGHTS];
    DLTensor *weights[WEIGHTS];
} group;

static void make_group(group *g) {
    static const int64_t rows[WEIGHTS] = {8, 3, 0, 5, 70, 2}, columns[WEIGHTS] = {64, 33, 64, 41, 33, 64};
    int64_t at = 0;
    *g = (group){.codes = {CODES, NESTED_CODES}, .offset = bst_f32(offset, 0, NULL)};
    g->code = bst_f32(code, 1, &g->codes[0]);
    g->nested_code = bst_f32(nested_code, 1, &g->codes[1]);
    for (int i = 0; i < WEIGHTS; i++) {
        bool nested = i >= 4, half = i >= 3;
        int64_t count = rows[i] * columns[i];
        g->shape[i][0] = rows[i], g->shape[i][1] = columns[i];
        g->bytes[i] = (count + 1) / 2, g->blocks[i] = (count + 31) / 32, g->outer[i] = (g->blocks[i] + 3) / 4;
        g->packed[i] = bst_tensor(packed + i, 1, &g->bytes[i], NULL, u8);
        g->absmax[i] =
            bst_tensor(nested ? (void *)absmax_bytes : absmax, 1, &g->blocks[i], NULL, nested ? u8 : bst_test_types[0]);
        g->nested_absmax[i] = bst_f32(nested_absmax, 1, &g->outer[i]);
        g->weight[i] = bst_tensor((char *)wide + at, 2, g->shape[i], NULL, bst_test_types[half]);
        at += count * (half ? 2 : 4);
        g->given[i] = (bst_4bit_weight){.size = sizeof g->given[i],
                                        .packed = &g->packed[i],
                                        .absmax = &g->absmax[i],
                                        .code = &g->code,
                                        .blocksize = 32,
                                        .nested_blocksize = 4};
        if (nested) g->given[i].nested_code = &g->nested_code, g->given[i].offset = &g->offset;
        if (nested) g->given[i].nested_absmax = &g->nested_absmax[i];
        g->quantised[i] = &g->given[i];
        g->weights[i] = &g->weight[i];
    }
}

TEST(a_group_has_the_bits_of_each) {
    static float each[MOST + 16];
    group g;
    fill();
    make_group(&g);
    memset(wide, 0xff, sizeof wide);
    for (int i = 0; i < WEIGHTS; i++) CHECK_OK(bst_dequantize_4bit(NULL, &g.given[i], &g.weight[i]));
    memcpy(each, wide, sizeof each);
    memset(wide, 0xff, sizeof wide);
    CHECK_OK(bst_dequantize_4bit_group(NULL, WEIGHTS, g.quantised, g.weights));
    CHECK(memcmp(each, wide, sizeof each) == 0);
    CHECK_OK(bst_dequantize_4bit_group(NULL, 0, NULL, NULL));
}

TEST(errors_of_a_group_name_the_weight_and_write_nothing) {
    group g;
    fill();
#define REFUSED_GROUP(text)                                                                    \
    memset(wide, 0, sizeof wide);                                                              \
    CHECK_EQ_I(bst_dequantize_4bit_group(NULL, WEIGHTS, g.quantised, g.weights), BST_INVALID); \
    CHECK_STR(bst_last_error(), "dequantize_4bit_group: " text);                               \
    for (int i = 0; i < 128; i++) CHECK(wide[i] == 0)
    make_group(&g);
    g.given[5].blocksize = 48;
    REFUSED_GROUP("quantised[5]: blocksize is 48; a power of two");
    make_group(&g);
    g.quantised[1] = NULL;
    REFUSED_GROUP("quantised[1]: packed is NULL");
    make_group(&g);
    g.weights[3] = NULL;
    REFUSED_GROUP("quantised[3]: weight is NULL");
    make_group(&g);
    g.weight[3].data = wide;
    REFUSED_GROUP("weights[3] and weight share memory");
    make_group(&g);
    g.packed[4].data = wide;
    REFUSED_GROUP("weights[0] and packed share memory");
    make_group(&g);
    CHECK_EQ_I(bst_dequantize_4bit_group(NULL, -1, g.quantised, g.weights), BST_INVALID);
    CHECK_STR(bst_last_error(), "dequantize_4bit_group: count is -1; the number of weights");
    CHECK_EQ_I(bst_dequantize_4bit_group(NULL, 1, NULL, g.weights), BST_INVALID);
    CHECK_STR(bst_last_error(), "dequantize_4bit_group: quantised is NULL; a list of 1");
}

/* What models have: blocks of 64 of NF4, nested or not, in each type; bytes at an odd address. */
static void compile_calls(void) {
    for (int t = 0; t < 3; t++) {
        for (int nested = 0; nested < 2; nested++) {
            bst_shape s[7];
            int64_t count = 4096 * 4096, bytes = count / 2, blocks = count / 64, outer = blocks / 256;
            DLTensor *given[] = {bst_device_tensor(&s[0], u8, 1, &bytes),
                                 bst_device_tensor(&s[1], nested ? u8 : bst_test_types[0], 1, &blocks),
                                 bst_device_tensor(&s[2], bst_test_types[0], 1, (int64_t[]){CODES}),
                                 bst_device_tensor(&s[3], bst_test_types[0], 1, (int64_t[]){NESTED_CODES}),
                                 bst_device_tensor(&s[4], bst_test_types[0], 1, &outer),
                                 bst_device_tensor(&s[5], bst_test_types[0], 1, (int64_t[]){1})};
            DLTensor *weight = bst_device_tensor(&s[6], bst_test_types[t], 2, (int64_t[]){4096, 4096});
            bst_4bit_weight q = {.size = sizeof q, .packed = given[0], .absmax = given[1], .code = given[2]};
            if (nested) q.nested_code = given[3], q.nested_absmax = given[4], q.offset = given[5];
            CHECK_OK(bst_dequantize_4bit(&bst_fake_exec, &q, weight));
            DLTensor second = *weight;
            second.data = (char *)second.data + count * 4;
            CHECK_OK(bst_dequantize_4bit_group(&bst_fake_exec, 2, (const bst_4bit_weight *[]){&q, &q},
                                               (DLTensor *[]){weight, &second}));
            given[0]->byte_offset = 1;
            if (t == 1) CHECK_OK(bst_dequantize_4bit(&bst_fake_exec, &q, weight));
        }
    }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("dequantize_4bit", compile_calls); }

int main(void) {
    RUN(values_to_the_bit);
    RUN(sizes_beyond_one_block);
    RUN(nothing_is_no_error);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(a_group_has_the_bits_of_each);
    RUN(errors_of_a_group_name_the_weight_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
