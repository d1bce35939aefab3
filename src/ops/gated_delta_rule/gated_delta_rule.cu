/* gated_delta_rule.cu - the gated delta rule over chunks of tokens: what each chunk has by itself, then a scan over the
 * chunks of each head. With S the state before a chunk, G_i the sum of g from its beginning to token i, D_ij =
 * exp(G_i - G_j) for j <= i, k and q of length 1 if they are normalised, c the chunk's last token:
 *
 *     A_ij = beta_i D_ij k_i . k_j for j < i,   T = (1 + A)^-1,   P_ij = scale D_ij q_i . k_j for j <= i
 *     R = k S,   V = T beta (v - exp(G) R)
 *     y = scale exp(G) q S + P V + skip v,   S' = exp(G_c) S + sum over i of exp(G_c - G_i) k_i V_i^T
 *
 * Yang et al., "Gated Delta Networks", 2024, whose W and U are not made here: T multiplies once, after the state was
 * read. ADDITIVE: T is 1 and R is 0, and neither is made.
 *
 * delta_prepare: a block has a chunk of a head, makes sums of g, T and P. T by substitution, four threads a column.
 * delta_scan: a block has BV columns of a head's values, and of the state, which stays in registers, and in shared
 * memory as what is multiplied; MAKE_Y: y; else the states before each chunk are written, for the backward pass.
 *
 * PACKED: one row has several sequences, and chunks begin at each one's first token. A block of the scan has a
 * sequence, as else a row. Where chunks are, the host does not know: delta_prepare's blocks have a slot each
 * (gated_delta_rule_args.h), look for the sequence that it belongs to, and end where no chunk has it.
 *
 * Macros: those of gated_delta_rule_pieces.cuh; of the scan BV, SLICES (of BV columns, all of DV) and MAKE_Y.
 *
 * Bytes, of a token and head of values with 16-bit inputs: T and P 512, written once and read once a slice; q, k, v and
 * y 2 an element. Operations: 3 times, for the parts, 2 (3 DK DV + 128 (DK + DV)): they decide, and that chunks follow
 * each other. Measured on an H100, 4 x 2048 tokens, 16 heads of keys and 32 of values of 128, in bf16: delta_prepare
 * 0.39 ms, delta_scan 0.65; as one sequence of 8192 tokens, which leaves half of the chip idle, 1.1. PACKED, four
 * sequences in 8192 tokens: both as long as of four rows. */
#include "gated_delta_rule_pieces.cuh"

#ifndef BV
/* Element (row, column) of a matrix of float32, four rows of which lie in different banks. */
#define AT(matrix, row, column) matrix[(row) * DELTA_SYSTEM_PITCH + (column)]

/* t = (1 + a)^-1, a strictly lower triangular. */
BST_DEVICE void invert(float *t, const float *a) {
    const int column = (int)bst_thread() / 4, part = (int)bst_thread() % 4;
    if (part == 0) AT(t, 0, column) = column == 0;
    bst_sync_warp();
    for (int row = 1; row < CHUNK; row++) {
        float sum = 0;
        BST_UNROLL_FOUR
        for (int i = column / 4 * 4 + part; i < row; i += 4) sum = bst_fma(AT(a, row, i), AT(t, i, column), sum);
        sum += bst_shuffle_xor(sum, 1);
        sum += bst_shuffle_xor(sum, 2);
        if (part == 0) AT(t, row, column) = (row == column) - sum;
        bst_sync_warp();
    }
}

BST_KERNEL(delta_prepare, delta_args, THREADS, PREPARE_BLOCKS) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(float, g, CHUNK);
    BST_SHARED(float, sum, CHUNK);
    BST_SHARED(float, beta, CHUNK);
    const tile k = tile_at(memory, PLANES, CHUNK, DKP), q = tile_at(end_of(k), PLANES, CHUNK, DKP);
    float *const system = (float *)memory, *const inverse = system + CHUNK * DELTA_SYSTEM_PITCH; /* over k and q */
    const int64_t block = bst_block(), chunk = block % a.chunks, of_all = block / a.chunks;
    const int64_t batch = of_all / a.heads, head = of_all % a.heads, key_head = head / (a.heads / a.key_heads);
    const int thread = (int)bst_thread();
    int64_t first = chunk * CHUNK;
    int count = tokens_of(&a, {}, first);
    bst_wait_for_previous();
    if (PACKED) {
        find_tokens(&a, chunk, &first, &count);
        if (!count) return;
    }
    if (thread < CHUNK) {
        g[thread] = thread < count ? number_at(&a.g, batch, first + thread, head, G_TYPE) : 0;
        beta[thread] = thread < count ? number_at(&a.beta, batch, first + thread, head, BETA_TYPE) : 0;
    }
    load_keys(k, &a.k, batch, first, key_head, count, a.eps, 0, 0);
    load_keys(q, &a.q, batch, first, key_head, count, a.eps, 0, 0);
    bst_sync();
    if (thread < CHUNK) {
        double so_far = 0; /* rounded once: what two of them differ by becomes an exponent */
        for (int i = 0; i <= thread; i++) so_far += (double)g[i];
        sum[thread] = (float)so_far;
        a.sums[block * CHUNK + thread] = (float)so_far;
    }
    float of_k[SUMS(CHUNK, CHUNK)] = {}, of_q[SUMS(CHUNK, CHUNK)] = {};
    if (!ADDITIVE) multiply(of_k, CHUNK, CHUNK, DKP, k, false, k, true);
    multiply(of_q, CHUNK, CHUNK, DKP, q, false, k, true);
    bst_sync();
    char *const scores = (char *)square_of(a.scores, block);
    EACH_PLACE(p, CHUNK, CHUNK) {
        float score[2];
        BST_EACH(i, 2) {
            const int column = p.column + i;
            const float decay = column <= p.row ? exponential(sum[p.row] - sum[column]) : 0;
            if (!ADDITIVE) AT(system, p.row, column) = column < p.row ? beta[p.row] * decay * of_k[p.at + i] : 0;
            score[i] = a.scale * decay * of_q[p.at + i];
        }
        BST_EACH(plane, PLANES) {
            const bst_raw raw = {{take_rounded(&score[0], &score[1]), 0, 0, 0}};
            bst_write(scores + 2 * ((plane * CHUNK + p.row) * CHUNK + p.column), raw, 4);
        }
    }
    if (ADDITIVE) return;
    bst_sync();
    invert(inverse, system);
    bst_sync();
    char *const to = (char *)square_of(a.inverse, block);
    for (int i = thread; i < CHUNK * CHUNK / 2; i += THREADS) {
        const int row = i / (CHUNK / 2), column = i % (CHUNK / 2) * 2;
        float x = AT(inverse, row, column), y = AT(inverse, row, column + 1);
        BST_EACH(plane, PLANES) {
            const bst_raw raw = {{take_rounded(&x, &y), 0, 0, 0}};
            bst_write(to + 2 * ((plane * CHUNK + row) * CHUNK + column), raw, 4);
        }
    }
}

#else
BST_KERNEL(delta_scan, delta_scan_args, THREADS, SCAN_BLOCKS) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(chunk_numbers, shared_numbers, 1);
    chunk_numbers *const numbers = shared_numbers;
    const tile keys = tile_at(memory, PLANES, CHUNK, DKP), state = tile_at(end_of(keys), PLANES, DKP, BV);
    const tile square = tile_at(end_of(state), PLANES, CHUNK, CHUNK);
    const tile values = tile_at(end_of(square), PLANES, CHUNK, BV);
    const int64_t slice = bst_block() % SLICES, of_all = bst_block() / SLICES;
    const int64_t sequence = of_all / a.of.heads, batch = PACKED ? 0 : sequence, head = of_all % a.of.heads;
    const int64_t key_head = head / (a.of.heads / a.of.key_heads);
    float s[SUMS(DKP, BV)] = {};
    bst_wait_for_previous();
    const span tokens = span_of(&a.of, sequence);
    const float skip = MAKE_Y ? skip_of(&a.of, head) : 0;
    if (a.initial) EACH_PLACE(p, DKP, BV)
    BST_EACH(i, 2) {
        const int64_t column = slice * BV + p.column + i;
        if (p.row < DK && column < DV) s[p.at + i] = a.initial[(of_all * DK + p.row) * DV + column];
    }
    for (int64_t chunk = 0; chunk < chunks_of(&a.of, tokens); chunk++) {
        const int64_t first = tokens.begin + chunk * CHUNK, slot = tokens.slot + chunk;
        const int64_t of_chunk = (PACKED ? head : of_all) * a.of.chunks + slot;
        const int count = tokens_of(&a.of, tokens, first);
        float y[SUMS(CHUNK, BV)] = {}, r[SUMS(CHUNK, BV)] = {}, v[SUMS(CHUNK, BV)] = {};
        if (!ADDITIVE) ask_for_tile(square, square_of(a.of.inverse, of_chunk), CHUNK);
        if (ADDITIVE && MAKE_Y) ask_for_tile(square, square_of(a.of.scores, of_chunk), CHUNK);
        load_numbers(numbers, &a.of, batch, head, slot, first, count);
        EACH_PLACE(p, DKP, BV) write_pair(state, p.row, p.column, s[p.at], s[p.at + 1]);
        if (MAKE_Y) {
            load_keys(keys, &a.of.q, batch, first, key_head, count, a.of.eps, 0, 0);
            bst_sync();
            multiply(y, CHUNK, BV, DKP, keys, false, state, false);
            bst_sync();
        }
        load_keys(keys, &a.of.k, batch, first, key_head, count, a.of.eps, 0, 0);
        bst_sync();
        if (!ADDITIVE) multiply(r, CHUNK, BV, DKP, keys, false, state, false);
        if (!MAKE_Y)
            store_tile(state, (char *)a.states + 2 * (of_chunk * (PLANES * DKP) * (SLICES * BV) + slice * BV),
                       SLICES * BV);
        EACH_PLACE(p, CHUNK, BV) {
            float pair[2];
            load_values(pair, &a.of.v, batch, first + p.row, head, (int)slice * BV + p.column, p.row < count, TYPE);
            const float beta = numbers->beta[p.row], rise = numbers->rise[p.row];
            BST_EACH(i, 2) v[p.at + i] = ADDITIVE ? beta * pair[i] : beta * (pair[i] - rise * r[p.at + i]);
            if (!ADDITIVE) write_pair(values, p.row, p.column, v[p.at], v[p.at + 1]);
        }
        if (!ADDITIVE) {
            bst_copy_async_wait(0);
            bst_sync();
            clear(v, SUMS(CHUNK, BV));
            multiply(v, CHUNK, BV, CHUNK, square, false, values, false);
            bst_sync();
        }
        if (MAKE_Y) {
            if (!ADDITIVE) ask_for_tile(square, square_of(a.of.scores, of_chunk), CHUNK);
            EACH_PLACE(p, CHUNK, BV) {
                write_pair(values, p.row, p.column, v[p.at], v[p.at + 1]);
                BST_EACH(i, 2) y[p.at + i] *= a.of.scale * numbers->rise[p.row];
            }
            bst_copy_async_wait(0);
            bst_sync();
            multiply(y, CHUNK, BV, CHUNK, square, false, values, false);
            EACH_PLACE(p, CHUNK, BV) {
                const int column = (int)slice * BV + p.column;
                const int64_t at = ((batch * a.of.tokens + first + p.row) * a.of.heads + head) * DV;
                float pair[2];
                if (a.of.skip) {
                    load_values(pair, &a.of.v, batch, first + p.row, head, column, p.row < count, TYPE);
                    BST_EACH(i, 2) y[p.at + i] += skip * pair[i];
                }
                if (p.row < count) store_pair(a.y, at, column, DV, y + p.at, Y_TYPE);
            }
            bst_sync();
        }
        EACH_PLACE(p, CHUNK, BV) {
            const float fall = numbers->fall[p.row];
            write_pair(values, p.row, p.column, fall * v[p.at], fall * v[p.at + 1]);
        }
        const float whole = numbers->rise[CHUNK - 1];
        BST_EACH(i, SUMS(DKP, BV)) s[i] *= whole;
        bst_sync();
        multiply(s, DKP, BV, CHUNK, keys, true, values, false);
        bst_sync();
    }
    if (a.final) EACH_PLACE(p, DKP, BV)
    if (p.row < DK)
        store_pair(a.final, (of_all * DK + p.row) * DV, (int)slice * BV + p.column, DV, s + p.at, BST_F32_CODE);
}
#endif
