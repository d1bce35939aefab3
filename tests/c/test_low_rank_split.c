/* test_low_rank_split.c - numbers of float32 and their pieces, through the C API: to the bit, against a plain loop, of
 * matrices that are aligned and that are not, of one part and of three; errors; its kernel on every chip. */
#include "chips.h"
#include "matrices.h"

static float xs[MOST], sums[MOST], untouched[MOST];
static uint16_t pieces[MOST], repeated[MOST], half_before[MOST];

typedef struct shape {
    int64_t rows, groups, parts, ranks;
    int64_t gap, at; /* behind each row, and before the first of each tensor */
} shape;

/* [rows, groups, parts, ranks], or without parts where there are none. */
typedef struct four {
    int64_t size[4], stride[4];
    DLTensor tensor;
} four;

static DLTensor *four_of(four *f, const shape *s, void *data, int64_t parts, int type) {
    const int64_t row = s->groups * (parts ? parts : 1) * s->ranks + s->gap;
    const int64_t size[] = {s->rows, s->groups, parts, s->ranks};
    const int64_t stride[] = {row, (parts ? parts : 1) * s->ranks, s->ranks, 1};
    int dims = 0;
    for (int i = 0; i < 4; i++)
        if (i != 2 || parts) f->size[dims] = size[i], f->stride[dims++] = stride[i];
    f->tensor = bst_tensor((char *)data + s->at * (type ? 2 : 4), dims, f->size, f->stride, bst_test_types[type]);
    return &f->tensor;
}

static int64_t offset(const shape *s, int64_t parts, int64_t row, int64_t group, int64_t part, int64_t rank) {
    return s->at + row * (s->groups * parts * s->ranks + s->gap) + (group * parts + part) * s->ranks + rank;
}

/* wants: a bit each for sum, pieces, repeated. */
static void check_wanted(const shape *s, double scale, int wants) {
    four x, sum, in_pieces, in_repeated;
    bst_low_rank_split_tensors t = {.size = sizeof t, .x = four_of(&x, s, xs, s->parts, 0), .scale = scale};
    memset(sums, 0xee, sizeof sums), memset(untouched, 0xee, sizeof untouched);
    memset(pieces, 0xee, sizeof pieces), memset(repeated, 0xee, sizeof repeated);
    memset(half_before, 0xee, sizeof half_before);
    if (wants & 1) t.sum = four_of(&sum, s, sums, 0, 0);
    if (wants & 2) t.pieces = four_of(&in_pieces, s, pieces, 3, 1);
    if (wants & 4) t.repeated = four_of(&in_repeated, s, repeated, 3, 1);
    CHECK_OK(bst_low_rank_split(NULL, &t));
    int64_t wrong = 0;
    for (int64_t row = 0; row < s->rows; row++)
        for (int64_t group = 0; group < s->groups; group++)
            for (int64_t rank = 0; rank < s->ranks; rank++) {
                volatile float number = xs[offset(s, s->parts, row, group, 0, rank)];
                for (int64_t p = 1; p < s->parts; p++) number += xs[offset(s, s->parts, row, group, p, rank)];
                number *= (float)(scale ? scale : 1);
                float added = 0, rest = number;
                for (int64_t p = 0; p < 3; p++) {
                    int64_t at = offset(s, 3, row, group, p, rank);
                    const float piece = bst_from_bf16(pieces[at]);
                    if (wants & 2) wrong += bst_bits(piece) != (bst_bits(rest) & 0xffff0000u);
                    if (wants & 4) wrong += repeated[at] != bst_to_bf16(number);
                    added += piece, rest -= piece;
                    memset(&pieces[at], 0xee, 2), memset(&repeated[at], 0xee, 2);
                }
                if (wants & 2) wrong += added != number;
                int64_t at = offset(s, 1, row, group, 0, rank);
                if (wants & 1) wrong += bst_bits(sums[at]) != bst_bits(number);
                memset(&sums[at], 0xee, 4);
            }
    CHECK_EQ_I(wrong, 0);
    /* All around the results, and of those that were not wanted, is as it was. */
    CHECK(!memcmp(sums, untouched, sizeof sums) && !memcmp(pieces, half_before, sizeof pieces));
    CHECK(!memcmp(repeated, half_before, sizeof repeated));
}

static void check(shape s) {
    bst_fill(xs, MOST, 7, 2);
    for (int wants = 0; wants < 8; wants++) check_wanted(&s, wants % 2 ? 0 : -0.75, wants);
}

TEST(what_is_aligned) {
    check((shape){64, 3, 1, 16, .gap = 0});
    check((shape){64, 3, 3, 16, .gap = 16});
    check((shape){1, 1, 1, 16 * 1024, .gap = 0});
    check((shape){1, 2, 3, 4 * 3000, .gap = 0});
    check((shape){33, 1, 3, 64, .gap = 8, .at = 8});
    check((shape){300, 1, 1, 4, .gap = 4});
}

TEST(what_is_read_one_by_one) {
    check((shape){7, 3, 1, 5, .gap = 1});
    check((shape){64, 2, 3, 16, .gap = 3});
    check((shape){64, 1, 3, 8, .gap = 0, .at = 1});
    check((shape){5, 1, 1, 4099, .gap = 0});
    check((shape){1, 1, 1, 1, .gap = 0});
}

TEST(nothing) {
    check((shape){0, 1, 1, 16, .gap = 0});
    check((shape){4, 0, 3, 16, .gap = 0});
    check((shape){4, 1, 3, 0, .gap = 4});
}

/* Small numbers have exact pieces as far as bfloat16 goes; what is infinite or NaN does not reach its neighbours. */
TEST(special_numbers) {
    const float numbers[] = {0.0f, -0.0f, 0x1p-100f, -0x1.fffffep-90f, 0x1.fffffep127f, INFINITY, NAN, 1.0f};
    const shape s = {1, 1, 1, 8, .gap = 0};
    four x, sum, in_pieces;
    memcpy(xs, numbers, sizeof numbers);
    bst_low_rank_split_tensors t = {sizeof t, four_of(&x, &s, xs, 1, 0), four_of(&sum, &s, sums, 0, 0),
                                    four_of(&in_pieces, &s, pieces, 3, 1)};
    CHECK_OK(bst_low_rank_split(NULL, &t));
    CHECK(!memcmp(sums, numbers, 6 * sizeof *numbers) && isnan(sums[6]) && sums[7] == 1.0f);
    for (int i = 0; i < 8; i++) {
        float added = 0;
        for (int p = 0; p < 3; p++) added += bst_from_bf16(pieces[8 * p + i]);
        CHECK(i == 5 || i == 6 ? isnan(added) : added == numbers[i]);
    }
}

TEST(errors_name_the_argument_and_write_nothing) {
    const shape s = {4, 2, 3, 8, .gap = 0}, two = {4, 2, 2, 8, .gap = 0}, narrow = {4, 2, 3, 7, .gap = 0};
    four f[8];
    bst_fill(xs, MOST, 7, 2);
    memset(sums, 0xff, sizeof sums), memset(pieces, 0xff, sizeof pieces);
    DLTensor *x = four_of(&f[0], &s, xs, 3, 0), *sum = four_of(&f[1], &s, sums, 0, 0);
    DLTensor *in_pieces = four_of(&f[2], &s, pieces, 3, 1);
    const bst_low_rank_split_tensors good = {sizeof good, x, sum, in_pieces};
    bst_low_rank_split_tensors t;
#define REFUSED(change, text)                              \
    t = good;                                              \
    change;                                                \
    CHECK_EQ_I(bst_low_rank_split(NULL, &t), BST_INVALID); \
    CHECK_STR(bst_last_error(), "low_rank_split: " text);  \
    for (int i = 0; i < 64; i++) CHECK(pieces[i] == 0xffff && bst_bits(sums[i]) == 0xffffffffu)
    REFUSED(t.size = 0, "tensors");
    REFUSED(t.x = NULL, "x is NULL");
    REFUSED(t.x = four_of(&f[3], &two, xs, 2, 0), "x has 2 parts, its dimension 2; 1 or 3 are needed");
    REFUSED(t.x = sum, "x has shape [4, 2, 8]; 4 dimensions are needed");
    REFUSED(t.pieces = four_of(&f[4], &narrow, pieces, 3, 1), "pieces has shape [4, 2, 3, 7]");
    REFUSED(t.sum = x, "sum has shape [4, 2, 3, 8]; 3 dimensions are needed");
    REFUSED(t.repeated = in_pieces, "pieces and repeated share memory");
    REFUSED(t.sum = four_of(&f[5], &s, xs, 0, 0), "sum and x share memory");
    f[6] = f[2];
    f[6].tensor.shape = f[6].size, f[6].tensor.strides = f[6].stride, f[6].stride[0] = 0;
    REFUSED(t.pieces = &f[6].tensor, "");
    f[6].tensor.dtype = bst_test_types[2];
    t = good;
    t.pieces = &f[6].tensor;
    CHECK(bst_low_rank_split(NULL, &t) != BST_OK);
    CHECK_STR(bst_last_error(), "low_rank_split: pieces has elements of type float16; bfloat16 is needed");
}

/* Adapters' factors and thin results, read four at a time and one by one. */
static void compile_calls(void) {
    for (int64_t rank = 15; rank <= 16; rank++)
        for (int64_t parts = 1; parts <= 3; parts += 2) {
            bst_shape s[4];
            bst_low_rank_split_tensors t = {sizeof t};
            t.x = bst_device_tensor(&s[0], bst_test_types[0], 4, (const int64_t[]){4096, 1, parts, rank});
            t.sum = bst_device_tensor(&s[1], bst_test_types[0], 3, (const int64_t[]){4096, 1, rank});
            t.pieces = bst_device_tensor(&s[2], bst_test_types[1], 4, (const int64_t[]){4096, 1, 3, rank});
            t.repeated = bst_device_tensor(&s[3], bst_test_types[1], 4, (const int64_t[]){4096, 1, 3, rank});
            CHECK_OK(bst_low_rank_split(&bst_fake_exec, &t));
        }
}

TEST(kernels_compile_for_every_chip) { bst_for_every_chip("low_rank_split", compile_calls); }

int main(void) {
    RUN(what_is_aligned);
    RUN(what_is_read_one_by_one);
    RUN(nothing);
    RUN(special_numbers);
    RUN(errors_name_the_argument_and_write_nothing);
    RUN(kernels_compile_for_every_chip);
    return bst_test_report();
}
