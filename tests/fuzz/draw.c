/* draw.c - legal arguments out of a table: what is given, sizes, types, attributes. */
#include <math.h>
#include <string.h>

#include "fuzz.h"

#define BST_OP(name) extern const bst_function *const bst__##name[];
#include "ops.def"
#undef BST_OP
#define BST_OP(name) bst__##name,
const bst_function *const *const fuzz_rooms[] = {
#include "ops.def"
    NULL};
#undef BST_OP

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

static uint64_t state;

/* SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014. */
uint64_t fuzz_bits(void) {
    uint64_t z = state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void fuzz_seed(uint64_t seed, uint64_t call) {
    state = seed;
    state = fuzz_bits() + call;
    fuzz_bits();
}

int64_t fuzz_below(int64_t count) { return (int64_t)(fuzz_bits() >> 1) % count; }
bool fuzz_chance(int64_t in) { return fuzz_below(in) == 0; }

/* ---- names ------------------------------------------------------------------------------------------------------- */

int fuzz_place(const bst_function *f, const char *name, unsigned direction) {
    for (int i = 0; f->arguments[i].name; i++)
        if ((f->arguments[i].flags & BST_OUT) == direction && strcmp(f->arguments[i].name, name) == 0) return i;
    return -1;
}

int fuzz_attribute(const bst_function *f, const char *name) {
    for (int i = 0; f->attributes && f->attributes[i].name; i++)
        if (strcmp(f->attributes[i].name, name) == 0) return i;
    return -1;
}

int fuzz_checked(const bst_function *f, int order[BST_MOST_ARGUMENTS]) {
    int count = 0;
    for (unsigned direction = BST_IN; direction <= BST_OUT; direction++)
        for (int i = 0; f->arguments[i].name; i++)
            if ((f->arguments[i].flags & BST_OUT) == direction) order[count++] = i;
    return count;
}

/* ---- attributes -------------------------------------------------------------------------------------------------- */

static double draw_double(const bst_attribute_rule *r) {
    static const double usual[] = {0, 1, 0.5, 0.1, 1e-6, 1e-5, 2, 30, -1, 7};
    if (r->low < r->high && fuzz_chance(16)) return fuzz_chance(2) ? r->low : r->high;
    for (;;) {
        double value = usual[fuzz_below(sizeof usual / sizeof *usual)];
        if (!(r->low < r->high) || (value >= r->low && value <= r->high)) return value;
    }
}

static int64_t draw_integer(const bst_attribute_rule *r) {
    if (!(r->low < r->high)) return fuzz_chance(4) ? -100 : 1 + fuzz_below(9);
    if (r->high - r->low < 64) return (int64_t)r->low + fuzz_below((int64_t)(r->high - r->low) + 1);
    static const int64_t usual[] = {0, 0, 1, 100, 5000, 1 << 20};
    return (int64_t)r->low + usual[fuzz_below(sizeof usual / sizeof *usual)];
}

static void draw_attributes(fuzz_call *c) {
    const bst_attribute_rule *rules = c->function->attributes;
    for (int i = 0; rules && rules[i].name; i++) {
        if (rules[i].type == 'd')
            c->attributes[i].d = draw_double(&rules[i]);
        else
            c->attributes[i].i = rules[i].type == 'b' ? fuzz_below(2) : draw_integer(&rules[i]);
    }
}

/* ---- shapes ------------------------------------------------------------------------------------------------------ */

typedef struct symbols {
    int64_t size[26], budget; /* how many elements what is still to be drawn may multiply to */
    uint32_t bound;
    bool leading_bound, large; /* large: so much work that it is cut into pieces */
    int leading, most_leading;
    int64_t leading_size[BST_MAX_DIMS], rows;
} symbols;

static int64_t draw_size(symbols *s) {
#ifdef BST_EMULATE
    static const int64_t edges[] = {1, 2, 3, 8, 33, 64}; /* few, for each is compiled */
#else
    static const int64_t edges[] = {1,  2,  3,  4,   5,   7,   8,   9,   15,  16,  17,  24,  31,   32,   33,   63,
                                    64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 515, 640, 1023, 1025, 2048, 4100};
#endif
    enum { EDGES = sizeof edges / sizeof *edges };
    if (fuzz_chance(50)) return 0;
    int64_t size = edges[fuzz_below(s->large ? EDGES : 1 + fuzz_below(EDGES))];
    if (size > s->budget) size = 1 + fuzz_below(s->budget);
    s->budget /= size;
    return size;
}

static int64_t size_of(symbols *s, char letter) {
    int at = letter - 'A';
    if (!(s->bound & 1u << at)) s->size[at] = draw_size(s);
    s->bound |= 1u << at;
    return s->size[at];
}

static void bind(symbols *s, char letter, int64_t size) {
    s->size[letter - 'A'] = size;
    s->bound |= 1u << (letter - 'A');
}

static void bind_leading(symbols *s) {
    if (s->leading_bound) return;
    int most = s->most_leading < 3 || fuzz_chance(8) ? s->most_leading : 3;
    s->leading_bound = true;
    s->leading = (int)fuzz_below(most + 1);
    s->rows = 1;
    for (int i = 0; i < s->leading; i++) s->rows *= s->leading_size[i] = draw_size(s);
}

/* What tables leave to functions beside them: sizes that would hardly ever fit together by chance. */
static void bind_related(const fuzz_call *c, symbols *s) {
    const bst_function *f = c->function;
    int half_tables = fuzz_attribute(f, "half_tables");
    if (fuzz_place(f, "cos", BST_IN) >= 0) { /* a table of rotations is no wider than a head, and even; or than half */
        int64_t dim = 2 + draw_size(s);
        bind(s, 'D', dim);
        int64_t pairs = fuzz_chance(2) ? dim / 2 : 1 + fuzz_below(dim / 2);
        bind(s, 'R', half_tables >= 0 && c->attributes[half_tables].i ? pairs : 2 * pairs);
    }
    if (fuzz_place(f, "order", BST_IN) >= 0 || fuzz_place(f, "position", BST_IN) >= 0) { /* pairs: tokens by choices */
        int64_t tokens = draw_size(s), choices = 1 + fuzz_below(4);
        bind(s, 'T', tokens), bind(s, 'P', tokens);
        bind(s, 'K', choices), bind(s, 'Q', choices);
        bind(s, 'N', tokens * choices);
    }
    if (fuzz_place(f, "teacher_indices", BST_IN) >= 0) { /* a teacher's logits of all classes, or of some */
        int64_t classes = draw_size(s);
        bind(s, 'V', classes), bind(s, 'K', fuzz_chance(2) || !classes ? classes : 1 + fuzz_below(classes));
    }
    for (int i = 0; f->arguments[i].name; i++) { /* halves of what is even */
        const char *half = f->arguments[i].shape ? strchr(f->arguments[i].shape, '-') : NULL;
        if (half) bind(s, half[1], 2 * draw_size(s));
    }
    if (fuzz_attribute(f, "silu") >= 0) bind(s, 'K', 1 + fuzz_below(fuzz_chance(20) ? 12 : 8)); /* short windows */
    if (fuzz_attribute(f, "normalize") >= 0) { /* heads of values for each of keys, which are not wide */
        int64_t most = s->large ? 2048 : 256;  /* of each token a state of K x V is read, which costs a thousandfold */
        if (s->budget > most) s->budget = most;
        int64_t heads = draw_size(s);
        bind(s, 'H', heads), bind(s, 'N', heads * (1 + fuzz_below(3)));
        bind(s, 'K', 1 + fuzz_below(fuzz_chance(20) ? 150 : 40)),
            bind(s, 'V', 1 + fuzz_below(fuzz_chance(20) ? 300 : 40));
        if (fuzz_chance(2)) bind(s, 'B', 1); /* a row may be packed, of sequences that have two ends and more */
        bind(s, 'S', 2 + draw_size(s));
    }
    if (fuzz_place(f, "cuts", BST_IN) >= 0) { /* heads that share keys, which are not none; segments */
        int64_t groups = 1 + fuzz_below(3), most = s->large ? 1 << 14 : 1 << 11; /* queries times keys */
        if (s->budget > most) s->budget = most;
        bind(s, 'G', groups), bind(s, 'H', groups * (fuzz_chance(50) ? 0 : 1 + fuzz_below(3)));
#ifdef BST_EMULATE /* what CUDA serves */
        static const int64_t widths[] = {8, 64, 96, 128};
        bind(s, 'D', widths[fuzz_below(4)]);
#else
        bind(s, 'D', 1 + fuzz_below(fuzz_chance(20) ? 150 : 40));
#endif
        bind(s, 'C', 2 + fuzz_below(9));
    }
    int experts = fuzz_attribute(f, "experts");
    if (experts >= 0) { /* sorted are pairs, in two dimensions */
        s->leading_bound = true;
        s->leading = 2;
        s->rows = 1;
        for (int i = 0; i < 2; i++) s->rows *= s->leading_size[i] = draw_size(s);
    }
}

/* Logits are kept of no more rows than there are. */
static void bind_kept(fuzz_call *c, symbols *s) {
    int kept = fuzz_attribute(c->function, "kept_rows");
    if (kept < 0) return;
    int64_t rows = draw_size(s);
    bind(s, 'T', rows);
    c->attributes[kept].i = rows && !fuzz_chance(2) ? 1 + fuzz_below(rows) : rows;
}

/* A matrix of codes: two to a byte, and so many to a block; the latter to blocks of their own. */
static void bind_quantised(fuzz_call *c, symbols *s) {
    const bst_function *f = c->function;
    int blocksize = fuzz_attribute(f, "blocksize");
    if (blocksize < 0) return;
    int64_t rows = draw_size(s), columns = draw_size(s), count = rows * columns;
    int64_t block = INT64_C(8) << fuzz_below(4), nested = INT64_C(1) << fuzz_below(4),
            blocks = (count + block - 1) / block;
    c->attributes[fuzz_attribute(f, "rows")].i = rows;
    c->attributes[fuzz_attribute(f, "columns")].i = columns;
    c->attributes[blocksize].i = block;
    c->attributes[fuzz_attribute(f, "nested_blocksize")].i = nested;
    s->leading_bound = true;
    s->leading = 1;
    s->rows = s->leading_size[0] = (count + 1) / 2;
    bind(s, 'A', blocks), bind(s, 'S', (blocks + nested - 1) / nested);
    bind(s, 'C', 16), bind(s, 'D', 256);
}

/* Columns in groups, or all in one. */
static void bind_groups(fuzz_call *c, symbols *s) {
    int group = fuzz_attribute(c->function, "group");
    if (group < 0) return;
    int64_t width = draw_size(s), count = fuzz_chance(2) ? 1 : 1 + fuzz_below(s->budget < 9 ? s->budget : 9);
    bind(s, 'H', width * count);
    c->attributes[group].i = count == 1 && fuzz_chance(2) ? 0 : width;
}

/* Segments that are all as long, without cuts, or those that cuts make; and a window. */
static void bind_segments(fuzz_call *c, symbols *s) {
    int window = fuzz_attribute(c->function, "window");
    if (window < 0) return;
    int64_t rows = fuzz_chance(3) ? 1 + fuzz_below(4) : 0;
    c->attributes[fuzz_attribute(c->function, "rows")].i = rows;
    c->attributes[window].i = fuzz_chance(2) ? 0 : 1 + fuzz_below(fuzz_chance(4) ? INT32_MAX : 70);
    if (rows) bind(s, 'T', rows * draw_size(s)), bind(s, 'S', rows * draw_size(s));
}

static void add(fuzz_tensor *t, int64_t size) { t->shape[t->dims++] = size; }

static void draw_shape(fuzz_call *c, int place, symbols *s) {
    const bst_argument *a = &c->function->arguments[place];
    fuzz_tensor *t = &c->of[place];
    if (a->like) {
        const fuzz_tensor *like = &c->of[a->like - 1];
        t->dims = like->dims;
        memcpy(t->shape, like->shape, sizeof t->shape);
        return;
    }
    const char *shape = a->reduced && c->attributes[a->reduced - 1].i != BST_REDUCTION_NONE ? "." : a->shape;
    if (*shape == '.') {
        for (int64_t ones = fuzz_below(3); ones > 0; ones--) add(t, 1);
        return;
    }
    if (*shape == '#') {
        bind_leading(s);
        switch (fuzz_below(3)) {
            case 0:
                add(t, s->rows);
                break;
            case 1:
                for (int i = 0; i < s->leading; i++) add(t, s->leading_size[i]);
                break;
            default:
                add(t, 1);
                add(t, s->rows);
        }
        if (shape[1]) add(t, shape[1] - '0');
        return;
    }
    for (; *shape; shape++) {
        if (*shape == '*') {
            bind_leading(s);
            for (int i = 0; i < s->leading; i++) add(t, s->leading_size[i]);
        } else if (*shape == '~') {
            int64_t size = size_of(s, *++shape);
            add(t, fuzz_chance(3) ? 1 : size);
        } else if (*shape == '-') {
            add(t, size_of(s, *++shape) / 2);
        } else if (*shape >= 'a') {
            int i = 0;
            while (c->function->attributes[i].type != 'i' || *c->function->attributes[i].name != *shape) i++;
            add(t, c->attributes[i].i);
        } else {
            add(t, *shape <= '9' ? *shape - '0' : size_of(s, *shape));
        }
    }
}

/* ---- what is given, and of which types --------------------------------------------------------------------------- */

static bool draw_given(const fuzz_call *c, int place) {
    const bst_argument *a = &c->function->arguments[place];
    if (a->with) return c->of[a->with - 1].given;
    if (a->like && !c->of[a->like - 1].given) return false;
    int other = fuzz_place(c->function, "teacher_hidden", BST_IN);
    if (other >= 0 && !strcmp(a->name, "teacher_logits") && !fuzz_chance(8)) return !c->of[other].given;
    if (other >= 0 && !strcmp(a->name, "teacher_bias") && !c->of[other].given) return fuzz_chance(8);
    int boundaries = fuzz_place(c->function, "cu_seqlens", BST_IN),
        initial = fuzz_place(c->function, "initial", BST_IN);
    if (place == boundaries && (c->of[0].shape[0] != 1 || c->of[initial].given)) return fuzz_chance(16);
    if (boundaries >= 0 && c->of[boundaries].given && strchr(a->shape ? a->shape : "", 'K') && place > boundaries)
        return fuzz_chance(16); /* states */
    if (!strcmp(a->name, "cuts")) return !c->attributes[fuzz_attribute(c->function, "rows")].i && !fuzz_chance(8);
    return !(a->flags & BST_OPTIONAL) || fuzz_chance(2);
}

static bst_dtype draw_type(const fuzz_call *c, int place, const bst_view *views) {
    const bst_argument *a = &c->function->arguments[place];
    if (a->type_of || a->type_rule) return bst__output_type(c->function, place, views, c->attributes);
    for (;;) {
        unsigned type = (unsigned)fuzz_below(BST_DTYPES);
        if (a->types & 1u << type) return (bst_dtype)type;
    }
}

void fuzz_draw(fuzz_call *c, const bst_function *f) {
    *c = (fuzz_call){.function = f, .extreme = fuzz_chance(8), .experts = 1 + fuzz_below(9)};
    int order[BST_MOST_ARGUMENTS];
    bst_view views[BST_MOST_ARGUMENTS] = {0};
    symbols s = {.budget = INT64_C(1) << (2 + fuzz_below(12)), .most_leading = BST_MAX_DIMS};
    c->count = fuzz_checked(f, order);
    for (int i = 0; i < c->count; i++) {
        const char *shape = f->arguments[i].shape;
        /* After "*" come letters and their signs; a "#" may add a dimension to the leading ones. */
        int fixed = shape && (*shape == '*' || *shape == '#') ? (int)strlen(shape) - 1 : 0;
        if (BST_MAX_DIMS - fixed < s.most_leading) s.most_leading = BST_MAX_DIMS - fixed;
    }
#ifndef BST_EMULATE
    s.large = fuzz_chance(50);
    if (s.large) s.budget = 1 << 16;
#endif
    draw_attributes(c);
    int experts = fuzz_attribute(f, "experts");
    if (experts >= 0) c->attributes[experts].i = c->experts;
    bind_related(c, &s);
    bind_quantised(c, &s);
    bind_kept(c, &s);
    bind_groups(c, &s);
    bind_segments(c, &s);
    for (int i = 0; i < c->count; i++) {
        int place = order[i];
        fuzz_tensor *t = &c->of[place];
        t->over = -1;
        t->given = draw_given(c, place);
        t->type = t->given ? draw_type(c, place, views) : views[0].dtype;
        views[place] = (bst_view){.dtype = t->type, .dims = t->given};
        if (!t->given) continue;
        draw_shape(c, place, &s);
        t->count = 1;
        for (int d = 0; d < t->dims; d++) t->count *= t->shape[d];
    }
    if (fuzz_place(f, "ends", BST_IN) >= 0 && (s.bound & 1u << ('E' - 'A'))) c->experts = s.size['E' - 'A'];
}
