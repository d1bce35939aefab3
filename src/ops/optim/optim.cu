/* optim.cu - AdamW over lists of tensors, the norm of a list of gradients, and their scale.
 *
 * optim_begin    a thread a tensor: its step, and what of it is the same for all elements. Bytes: none to speak of.
 * optim_adamw    reads and writes parameter and moments, reads the gradient, once. Bytes: 14 an element where all are
 *                bfloat16, 10.06 with moments of 8 bits, 22 with moments in float32 or 22 with a float32 master and
 *                bfloat16 moments, 28 in float32.
 * optim_squares  reads the gradients, leaves a sum a block. Bytes: 2 or 4 an element.
 * optim_norm     one block: their sum in float64, always in the same order; its root, and the clip's coefficient.
 * optim_scale    gradients times the coefficient, in place; nothing where that is 1. Bytes: 4 or 8 an element.
 * Measured on an H200, 8.19e9 elements in bfloat16: optim_adamw 27.8 ms (0.96 of the copy bandwidth), with moments of 8
 *                bits 27.4 (0.70: its instructions decide), optim_squares 3.6.
 *
 * Macros: TABLE tensors in the arguments; CHUNK elements of a block, THREADS of it; TYPE of parameters and gradients,
 * MOMENTS (codes of dtype.h); MASTER: whether the parameter lies in float32 beside; STOCHASTIC
 * rounding of what is bfloat16; MAXIMIZE; WRITE_GRADIENT: gradients are written back as they were used. */
#include "pack.cuh"
#include "reduce.cuh"

#include "optim_args.h"
#include "optim_math.h"

/* The last tensor whose first block is at most `block`. */
BST_DEVICE uint32_t tensor_of(const uint32_t *first, uint32_t tensors, uint32_t block) {
    uint32_t low = 0, high = tensors;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (first[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Eight elements in registers: one access of 16 bytes, or two; single ones where an array does not
 * begin at a multiple of that, and behind its last whole eight. */
struct eight {
    bst_raw raw[2];
};

BST_DEVICE eight read_eight(const void *base, int64_t at, int n, bool whole, int type) {
    eight e;
    if (whole) {
        e.raw[0] = bst_raw_at(base, at, type, type == BST_F32_CODE ? 4 : 8);
        if (type == BST_F32_CODE) e.raw[1] = bst_raw_at(base, at + 4, type, 4);
        return e;
    }
    BST_EACH(j, 8) {
        const uint32_t one = j < n ? bst_raw_at(base, at + j, type, 1).w[0] : 0;
        if (type == BST_F32_CODE)
            e.raw[j / 4].w[j & 3] = one;
        else
            e.raw[0].w[j / 2] = j & 1 ? e.raw[0].w[j / 2] | one << 16 : one;
    }
    return e;
}

BST_DEVICE void unpack_eight(float out[8], const eight *e, int type) {
    bst_unpack(out, e->raw[0], type, type == BST_F32_CODE ? 4 : 8);
    if (type == BST_F32_CODE) bst_unpack(out + 4, e->raw[1], type, 4);
}

BST_DEVICE void write_eight(void *base, int64_t at, const eight *e, int n, bool whole, int type) {
    if (whole) {
        const int each = type == BST_F32_CODE ? 4 : 8;
        bst_write_once(bst_at_out(base, at, type), e->raw[0], 16);
        if (type == BST_F32_CODE) bst_write_once(bst_at_out(base, at + each, type), e->raw[1], 16);
        return;
    }
    BST_EACH(j, 8) {
        bst_raw one = {{0, 0, 0, 0}};
        one.w[0] = type == BST_F32_CODE ? e->raw[j / 4].w[j & 3] : e->raw[0].w[j / 2] >> (j & 1 ? 16 : 0) & 0xffffu;
        if (j < n) bst_write(bst_at_out(base, at + j, type), one, bst_type_size(type));
    }
}

BST_DEVICE eight pack_eight(const float v[8], int type) {
    eight e;
    e.raw[0] = bst_pack(v, type, type == BST_F32_CODE ? 4 : 8);
    if (type == BST_F32_CODE) e.raw[1] = bst_pack(v + 4, type, 4);
    return e;
}

#ifdef BEGIN
BST_KERNEL(optim_begin, optim_begin_args, THREADS, 1) {
    const int64_t i = (int64_t)bst_block() * THREADS + bst_thread();
    bst_wait_for_previous();
    if (i >= a.tensors) return;
    const optim_coefficients c = optim_begin_tensor(a.step[i], a.lr, a.beta1, a.beta2, a.eps, a.weight_decay,
                                                    a.device_lr, a.grad_scale, a.found_inf, a.clip);
    bst_raw low, high = {{0, 0, 0, 0}};
    low.w[0] = bst_bits(c.step_size), low.w[1] = bst_bits(c.eps), low.w[2] = bst_bits(c.decay);
    low.w[3] = bst_bits(c.factor), high.w[0] = bst_bits(c.skip), high.w[1] = bst_bits(c.step);
    bst_write(a.coefficient + i * OPTIM_COEFFICIENT, low, 16);
    bst_write(a.coefficient + i * OPTIM_COEFFICIENT + 4, high, 16);
}
#endif

#ifdef ADAMW
OPTIM_ADAMW_ARGS(optim_adamw_args, TABLE);

BST_DEVICE optim_coefficients coefficients_of(const float *from) {
    const bst_raw low = bst_read(from, 16), high = bst_read(from + 4, 16);
    optim_coefficients c;
    c.step_size = bst_from_bits(low.w[0]), c.eps = bst_from_bits(low.w[1]), c.decay = bst_from_bits(low.w[2]);
    c.factor = bst_from_bits(low.w[3]), c.skip = bst_from_bits(high.w[0]), c.step = bst_from_bits(high.w[1]);
    return c;
}

/* The random bits of one kind, two elements a word. */
BST_DEVICE uint32_t random_of(const uint32_t random[4], int j) {
    return j & 1 ? random[j / 2] >> 16 : random[j / 2] & 0xffffu;
}

BST_DEVICE eight pack_stochastic(const float v[8], const uint32_t random[4]) {
    eight e;
    BST_UNROLL
    for (int j = 0; j < 8; j += 2)
        e.raw[0].w[j / 2] = optim_bf16_stochastic(v[j], random_of(random, j)) |
                            optim_bf16_stochastic(v[j + 1], random_of(random, j + 1)) << 16;
    return e;
}

/* The largest magnitude of a warp's 256 elements. Of roots of second moments NaN where one is: its bits are the
 * largest. */
BST_DEVICE float block_scale(const float v[8], bool first) {
    uint32_t most = 0;
    float largest = 0;
    BST_EACH(j, 8) {
        if (first) largest = bst_max(largest, bst_abs(v[j]));
        const uint32_t bits = bst_bits(v[j]);
        most = bits > most ? bits : most;
    }
    return bst_from_bits(bst_warp_max_u32(first ? bst_bits(largest) : most & 0x7fffffffu));
}

/* 2^23 plus byte j of two words, or plus the random 16 bits of element j: `exchanged`, with their bytes so. */
BST_DEVICE float shifted_byte(const uint32_t *words, int j) {
    return bst_from_bits(bst_permute_bytes(words[j / 4], OPTIM_BYTE_BITS >> 16, 0x5440u | (j & 3)));
}
BST_DEVICE float shifted_random(const uint32_t random[4], int j, bool exchanged) {
    const uint32_t bytes = exchanged ? j & 1 ? 0x5423u : 0x5401u : j & 1 ? 0x5432u : 0x5410u;
    return bst_from_bits(bst_permute_bytes(random[j / 2], OPTIM_BYTE_BITS >> 16, bytes));
}

/* Codes of eight moments, of the second ones by their roots. */
BST_DEVICE void write_codes(void *base, float *scales, int64_t at, float v[8], int n, bool first,
                            const uint32_t random[4]) {
    if (n < OPTIM_EACH) {
        BST_EACH(j, 8) v[j] = j < n ? v[j] : 0.0f;
    }
    const float scale = block_scale(v, first), inverse = optim_inverse(scale);
    if (n <= 0) return;
    uint32_t code[8];
    BST_EACH(j, 8) {
        const float uniform = optim_uniform(shifted_random(random, j, !first));
        code[j] = first ? optim_encode_first(v[j], inverse, uniform) : optim_encode_second(v[j], inverse, uniform);
    }
    if (n < OPTIM_EACH) {
        BST_EACH(j, 8) code[j] = j < n ? code[j] : 0;
    }
    bst_raw codes = {{0, 0, 0, 0}};
    BST_UNROLL
    for (int j = 0; j < 8; j += 4)
        codes.w[j / 4] = bst_permute_bytes(bst_permute_bytes(code[j], code[j + 1], 0x40),
                                           bst_permute_bytes(code[j + 2], code[j + 3], 0x40), 0x5410);
    bst_write_once((char *)base + at, codes, 8);
    if (bst_lane() == 0) scales[at / OPTIM_BLOCK] = first ? scale : scale * scale;
}

BST_DEVICE void write_moment(void *base, float *scales, int64_t at, float v[8], int n, bool whole, bool first,
                             const uint32_t random[4]) {
    if (MOMENTS == OPTIM_U8_CODE) {
        write_codes(base, scales, at, v, n, first, random);
        return;
    }
    const eight e = STOCHASTIC && MOMENTS == BST_BF16_CODE ? pack_stochastic(v, random) : pack_eight(v, MOMENTS & 3);
    write_eight(base, at, &e, n, whole, MOMENTS & 3);
}

BST_DEVICE void moment_of(float out[8], const eight *raw, float scale, bool first) {
    if (MOMENTS != OPTIM_U8_CODE) {
        unpack_eight(out, raw, MOMENTS & 3);
        return;
    }
    const uint32_t top = first ? 0x80808080u : 0, words[2] = {raw->raw[0].w[0] ^ top, raw->raw[0].w[1] ^ top};
    BST_EACH(j, 8)
        out[j] = first ? optim_decode_first(shifted_byte(words, j), scale)
                       : optim_decode_second(shifted_byte(words, j), scale);
}

BST_DEVICE eight read_moment(const void *base, int64_t at, int n, bool whole) {
    if (MOMENTS != OPTIM_U8_CODE) return read_eight(base, at, n, whole, MOMENTS & 3);
    eight e;
    if (n > 0)
        e.raw[0] = bst_read((const char *)base + at, 8); /* arrays of whole blocks */
    else
        e.raw[0].w[0] = e.raw[0].w[1] = 0;
    return e;
}

BST_KERNEL(optim_adamw, optim_adamw_args, THREADS, MIN_BLOCKS) {
    const uint32_t i = tensor_of(a.first, a.head.tensors, bst_block());
    const optim_tensor *t = &a.tensor[i];
    const int64_t begin = (int64_t)(bst_block() - a.first[i]) * CHUNK, left = t->count - begin;
    const uint32_t end = left < CHUNK ? (uint32_t)left : CHUNK;
    const bool aligned = t->aligned;
    /* Codes: from the block's part of each array on, where 32 bits count, which saves instructions; else from the whole
     * array on, which saves registers. */
    const int64_t part = MOMENTS == OPTIM_U8_CODE ? begin : 0, within = begin - part;
    void *parameter = bst_at_out(t->parameter, part, TYPE), *gradient = bst_at_out(t->gradient, part, TYPE);
    void *master = MASTER ? t->master + part : nullptr;
    void *exp_avg = (char *)t->exp_avg + part, *exp_avg_sq = (char *)t->exp_avg_sq + part;
    float *m_scales = t->exp_avg_scale + part / OPTIM_BLOCK, *v_scales = t->exp_avg_sq_scale + part / OPTIM_BLOCK;
    bst_wait_for_previous();
    const optim_coefficients c = coefficients_of(a.head.coefficient + t->number * OPTIM_COEFFICIENT);
    if (c.skip != 0.0f) return;
    const uint32_t number = a.head.first_number + t->number, step = (uint32_t)c.step;
    const float first_rest = a.head.beta1_rest * (MAXIMIZE ? -c.factor : c.factor);
    const float root_rest = bst_sqrt(a.head.beta2_rest) * c.factor;
    const bool draw_p = STOCHASTIC && !MASTER && TYPE == BST_BF16_CODE;
    const bool draw_m = MOMENTS == OPTIM_U8_CODE || (STOCHASTIC && MOMENTS == BST_BF16_CODE);
    BST_ROLLED
    for (uint32_t base = 0; base < end; base += THREADS * OPTIM_EACH) {
        const uint32_t mine = base + bst_thread() * OPTIM_EACH;
        const int n = mine + OPTIM_EACH <= end ? OPTIM_EACH : (int)(end - mine);
        const int64_t at = within + mine;
        const bool whole = aligned && n == OPTIM_EACH;
        /* What all lanes of a warp do together is done by those without elements too. */
        if (MOMENTS != OPTIM_U8_CODE && n <= 0) break;
        eight p_raw = read_eight(MASTER ? master : parameter, at, n, whole, MASTER ? 0 : TYPE);
        eight g_raw = read_eight(gradient, at, n, whole, TYPE);
        eight m_raw = read_moment(exp_avg, at, n, whole), v_raw = read_moment(exp_avg_sq, at, n, whole);
        float m_scale = 0, v_scale = 0;
        if (MOMENTS == OPTIM_U8_CODE && n > 0) {
            m_scale = m_scales[at / OPTIM_BLOCK];
            v_scale = v_scales[at / OPTIM_BLOCK];
        }
        /* While these loads are in flight. */
        const uint64_t eight_of = (uint64_t)(part + at) / OPTIM_EACH;
        uint32_t random[4] = {0, 0, 0, 0};
        const bool draw_now = MOMENTS == OPTIM_U8_CODE && !draw_p;
        if (draw_now) optim_philox(random, a.head.seed, eight_of, OPTIM_OF_MOMENTS, number, step);
        float p[8], g[8], m[8], v[8];
        unpack_eight(g, &g_raw, TYPE);
        if (WRITE_GRADIENT) {
            float used[8];
            BST_EACH(j, 8) used[j] = g[j] * c.factor;
            const eight written = pack_eight(used, TYPE);
            write_eight(gradient, at, &written, n, whole, TYPE);
        }
        if (MOMENTS == OPTIM_U8_CODE) {
            /* A beta goes into its scale, so that a term is one product each. */
            moment_of(m, &m_raw, m_scale * (1 - a.head.beta1_rest), true);
            moment_of(v, &v_raw, v_scale * (1 - a.head.beta2_rest), false);
            BST_EACH(j, 8) {
                const float part = root_rest * g[j];
                m[j] = bst_fma(first_rest, g[j], m[j]);
                v[j] = bst_fma(part, part, v[j]);
            }
        } else {
            moment_of(m, &m_raw, 0, true);
            moment_of(v, &v_raw, 0, false);
            BST_EACH(j, 8) {
                const float used = (MAXIMIZE ? -g[j] : g[j]) * c.factor;
                m[j] = optim_exp_avg(m[j], used, a.head.beta1_rest);
                v[j] = optim_exp_avg_sq(v[j], used, a.head.beta2_rest);
            }
        }
        unpack_eight(p, &p_raw, MASTER ? 0 : TYPE);
        BST_EACH(j, 8) {
            const bool exact = MASTER || TYPE == BST_F32_CODE;
            const float root = optim_root(v[j], exact);
            p[j] = optim_parameter(p[j], m[j], root, &c, exact);
            if (MOMENTS == OPTIM_U8_CODE) v[j] = root; /* what its code is made of */
        }
        if (MASTER) {
            const eight full = pack_eight(p, 0);
            write_eight(master, at, &full, n, whole, 0);
        }
        if (draw_p) optim_philox(random, a.head.seed, eight_of, OPTIM_OF_PARAMETER, number, step);
        const eight rounded = draw_p ? pack_stochastic(p, random) : pack_eight(p, TYPE);
        write_eight(parameter, at, &rounded, n, whole, TYPE);
        if (draw_m && !draw_now) optim_philox(random, a.head.seed, eight_of, OPTIM_OF_MOMENTS, number, step);
        write_moment(exp_avg, m_scales, at, m, n, whole, true, random);
        BST_EACH(j, MOMENTS == OPTIM_U8_CODE ? 0 : 4) random[j] = optim_exchanged(random[j]);
        write_moment(exp_avg_sq, v_scales, at, v, n, whole, false, random);
    }
}
#endif

#if defined(SQUARES) || defined(SCALE)
OPTIM_GRADIENTS_ARGS(optim_gradients_args, TABLE);
#endif

#ifdef SQUARES
/* Each thread's elements are added up in eight sums, which are far shorter than the whole. */
BST_KERNEL(optim_squares, optim_gradients_args, THREADS, 1) {
    BST_SHARED(float, scratch, 32);
    const uint32_t i = tensor_of(a.first, a.head.tensors, bst_block());
    const optim_gradient *t = &a.tensor[i];
    const int64_t begin = (int64_t)(bst_block() - a.first[i]) * CHUNK, count = t->count;
    const int64_t end = count - begin < CHUNK ? count : begin + CHUNK;
    const bool aligned = (uint64_t)t->data % 16 == 0;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    bst_wait_for_previous();
    int64_t base = begin;
    if (aligned && end - begin == CHUNK) {
        BST_ROLLED
        for (; base < end; base += 4 * THREADS * OPTIM_EACH) {
            eight e[4];
            BST_EACH(k, 4) e[k] = read_eight(t->data, base + (k * THREADS + bst_thread()) * OPTIM_EACH, 8, true, TYPE);
            BST_EACH(k, 4) {
                float g[8];
                unpack_eight(g, &e[k], TYPE);
                BST_EACH(j, 8) sum[j] = bst_fma(g[j], g[j], sum[j]);
            }
        }
    }
    BST_ROLLED
    for (; base < end; base += THREADS * OPTIM_EACH) {
        const int64_t at = base + bst_thread() * OPTIM_EACH;
        const int n = at + OPTIM_EACH <= end ? OPTIM_EACH : (int)(end - at);
        if (n <= 0) break;
        const eight e = read_eight(t->data, at, n, aligned && n == OPTIM_EACH, TYPE);
        float g[8];
        unpack_eight(g, &e, TYPE);
        BST_EACH(j, 8) sum[j] = bst_fma(g[j], g[j], sum[j]);
    }
    const float all = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
    const float total = bst_group_sum(all, THREADS, scratch);
    if (bst_thread() == 0) a.head.partial[bst_block()] = total;
}
#endif

#ifdef NORM
BST_KERNEL(optim_norm, optim_norm_args, THREADS, 1) {
    BST_SHARED(double, sums, THREADS);
    double sum = 0;
    bst_wait_for_previous();
    BST_UNROLL_TWICE
    for (int64_t i = bst_thread(); i < a.parts; i += THREADS) sum += (double)a.partial[i];
    sums[bst_thread()] = sum;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        bst_sync();
        if (bst_thread() < half) sums[bst_thread()] += sums[bst_thread() + half];
    }
    if (bst_thread()) return;
    const double scale = a.grad_scale ? (double)*a.grad_scale : 1.0, norm = bst_sqrt_double(sums[0]) / scale;
    *a.norm = (float)norm;
    /* As torch has it; NaN stays NaN. */
    const double coefficient = a.max_norm / (norm + 1e-6);
    if (a.coefficient) *a.coefficient = coefficient > 1 ? 1.0f : (float)coefficient;
}
#endif

#ifdef SCALE
BST_KERNEL(optim_scale, optim_gradients_args, THREADS, 1) {
    const uint32_t i = tensor_of(a.first, a.head.tensors, bst_block());
    const optim_gradient *t = &a.tensor[i];
    const int64_t begin = (int64_t)(bst_block() - a.first[i]) * CHUNK, count = t->count;
    const int64_t end = count - begin < CHUNK ? count : begin + CHUNK;
    const bool aligned = (uint64_t)t->data % 16 == 0;
    bst_wait_for_previous();
    const float coefficient = *a.head.coefficient;
    if (coefficient == 1.0f) return;
    BST_ROLLED
    for (int64_t base = begin; base < end; base += THREADS * OPTIM_EACH) {
        const int64_t at = base + bst_thread() * OPTIM_EACH;
        const int n = at + OPTIM_EACH <= end ? OPTIM_EACH : (int)(end - at);
        if (n <= 0) break;
        const bool whole = aligned && n == OPTIM_EACH;
        eight e = read_eight(t->data, at, n, whole, TYPE);
        float g[8];
        unpack_eight(g, &e, TYPE);
        BST_EACH(j, 8) g[j] *= coefficient;
        e = pack_eight(g, TYPE);
        write_eight(t->data, at, &e, n, whole, TYPE);
    }
}
#endif
