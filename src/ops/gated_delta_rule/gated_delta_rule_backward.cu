/* gated_delta_rule_backward.cu - the gradients of gated_delta_rule.cu, whose names these are, from its T and P and from
 * the states before each chunk. d before a name: its gradient; dS' is that of the state after the chunk.
 *
 *     dV = P^T dy + exp(G_c - G) k dS'         dX = T^T dV, of X = beta (v - exp(G) R)
 *     dv = beta dX                             dS = exp(G_c) dS' + (scale exp(G) q)^T dy - (beta exp(G) k)^T dX
 *     dA = -dX V^T, below the diagonal         dP = dy V^T, on it and below
 *     dk = exp(G_c - G) V dS'^T - beta exp(G) dX S^T + M k + M^T k + N^T q,   M_ij = dA_ij beta_i D_ij
 *     dq = scale exp(G) dy S^T + N k,   N_ij = scale dP_ij D_ij
 *
 * With a skip dv has skip dy beside. ADDITIVE: T is 1; R, A and what comes of them are 0.
 *
 * The gradients of beta and G are sums over rows and columns of the same products. dg_i is the sum of dG from i on.
 *
 * PACKED: as in gated_delta_rule.cu.
 *
 * delta_scan_back: a block has BV columns of a head's values, writes dv and, before each chunk, dS', which stays in
 * registers. delta_gradients: a block has a chunk of a head of keys, and goes through its heads of values and their
 * slices; in an order that is always the same.
 *
 * Macros: those of gated_delta_rule_pieces.cuh, BV, SLICES; DSCAN for delta_scan_back.
 *
 * Bytes, of a token and head of values with DK = DV = 128 and 16-bit inputs: states and their gradients, 1024 each, are
 * written once and read once; T and P 512, read twice. Operations: 3 times, for the parts, 2 (8 DK DV + 64 (5 DK +
 * 7 DV)): they decide. Measured as in gated_delta_rule.cu: delta_scan_back 0.75 ms, delta_gradients 2.2, which at 250
 * registers a thread has one block a multiprocessor, and waits for shared memory and for its own results. */
#include "gated_delta_rule_pieces.cuh"

BST_DEVICE int64_t states_at(int64_t of_chunk, int64_t slice) {
    return 2 * (of_chunk * (PLANES * DKP) * (SLICES * BV) + slice * BV);
}

/* A chunk's rows of a slice of dy, each times its factor, if any. */
BST_DEVICE void write_values(tile t, const delta_input *in, int64_t batch, int64_t first, int64_t head, int slice,
                             int count, const float *factors) {
    EACH_PLACE(p, CHUNK, BV) {
        float pair[2];
        const float factor = factors ? factors[p.row] : 1.0f;
        load_values(pair, in, batch, first + p.row, head, slice * BV + p.column, p.row < count, Y_TYPE);
        write_pair(t, p.row, p.column, factor * pair[0], factor * pair[1]);
    }
}

#ifdef DSCAN
BST_KERNEL(delta_scan_back, delta_backward_args, THREADS, SCAN_BLOCKS) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(chunk_numbers, shared_numbers, 1);
    BST_SHARED(float, factors, CHUNK);
    BST_SHARED(float, scratch, 32);
    chunk_numbers *const numbers = shared_numbers;
    const tile keys = tile_at(memory, PLANES, CHUNK, DKP), state = tile_at(end_of(keys), PLANES, DKP, BV);
    const tile square = tile_at(end_of(state), PLANES, CHUNK, CHUNK);
    const tile values = tile_at(end_of(square), PLANES, CHUNK, BV);
    const tile dy = tile_at(end_of(values), DY_PLANES, CHUNK, BV);
    const int64_t slice = bst_block() % SLICES, of_all = bst_block() / SLICES;
    const int64_t sequence = of_all / a.of.heads, batch = PACKED ? 0 : sequence, head = of_all % a.of.heads;
    const int64_t key_head = head / (a.of.heads / a.of.key_heads);
    float ds[SUMS(DKP, BV)] = {}, skipped = 0;
    bst_wait_for_previous();
    const span tokens = span_of(&a.of, sequence);
    const float skip = skip_of(&a.of, head);
    if (a.dfinal) EACH_PLACE(p, DKP, BV)
    BST_EACH(i, 2) {
        const int64_t column = slice * BV + p.column + i;
        if (p.row < DK && column < DV) ds[p.at + i] = a.dfinal[(of_all * DK + p.row) * DV + column];
    }
    for (int64_t chunk = chunks_of(&a.of, tokens) - 1; chunk >= 0; chunk--) {
        const int64_t first = tokens.begin + chunk * CHUNK, slot = tokens.slot + chunk;
        const int64_t of_chunk = (PACKED ? head : of_all) * a.of.chunks + slot;
        const int count = tokens_of(&a.of, tokens, first);
        float dv[SUMS(CHUNK, BV)] = {}, dx[SUMS(CHUNK, BV)] = {};
        ask_for_tile(square, square_of(a.of.scores, of_chunk), CHUNK);
        load_numbers(numbers, &a.of, batch, head, slot, first, count);
        EACH_PLACE(p, DKP, BV) write_pair(state, p.row, p.column, ds[p.at], ds[p.at + 1]);
        write_values(dy, &a.dy, batch, first, head, (int)slice, count, 0);
        load_keys(keys, &a.of.k, batch, first, key_head, count, a.of.eps, 0, 0);
        bst_copy_async_wait(0);
        bst_sync();
        store_tile(state, (char *)a.dstates + states_at(of_chunk, slice), SLICES * BV);
        if (bst_thread() < CHUNK) factors[bst_thread()] = a.of.scale * numbers->rise[bst_thread()];
        multiply(dv, CHUNK, BV, DKP, keys, false, state, false);
        EACH_PLACE(p, CHUNK, BV)
        BST_EACH(i, 2) dv[p.at + i] *= numbers->fall[p.row];
        multiply(dv, CHUNK, BV, CHUNK, square, true, dy, false);
        bst_sync();
        if (ADDITIVE) {
            BST_EACH(i, SUMS(CHUNK, BV)) dx[i] = dv[i];
        } else {
            ask_for_tile(square, square_of(a.of.inverse, of_chunk), CHUNK);
            EACH_PLACE(p, CHUNK, BV) write_pair(values, p.row, p.column, dv[p.at], dv[p.at + 1]);
            bst_copy_async_wait(0);
            bst_sync();
            multiply(dx, CHUNK, BV, CHUNK, square, true, values, false);
            bst_sync();
        }
        EACH_PLACE(p, CHUNK, BV) {
            const float beta = numbers->beta[p.row], less = -numbers->rise[p.row];
            float pair[2] = {beta * dx[p.at], beta * dx[p.at + 1]};
            if (!ADDITIVE) write_pair(values, p.row, p.column, less * pair[0], less * pair[1]);
            if (a.of.skip) {
                float of_v[2], of_dy[2];
                const int column = (int)slice * BV + p.column;
                load_values(of_v, &a.of.v, batch, first + p.row, head, column, p.row < count, TYPE);
                load_values(of_dy, &a.dy, batch, first + p.row, head, column, p.row < count, Y_TYPE);
                BST_EACH(i, 2) pair[i] += skip * of_dy[i], skipped += of_v[i] * of_dy[i];
            }
            if (p.row < count)
                store_pair(a.dv, ((batch * a.of.tokens + first + p.row) * a.of.heads + head) * DV,
                           (int)slice * BV + p.column, DV, pair, TYPE);
        }
        const float whole = numbers->rise[CHUNK - 1];
        BST_EACH(i, SUMS(DKP, BV)) ds[i] *= whole;
        if (!ADDITIVE) {
            bst_sync();
            multiply(ds, DKP, BV, CHUNK, keys, true, values, false);
            bst_sync();
        }
        load_keys(keys, &a.of.q, batch, first, key_head, count, a.of.eps, factors, 0);
        bst_sync();
        multiply(ds, DKP, BV, CHUNK, keys, true, dy, false);
        bst_sync();
    }
    if (a.dskip) {
        skipped = bst_group_sum(skipped, THREADS, scratch);
        if (bst_thread() == 0) a.dskip[(sequence * SLICES + slice) * a.of.heads + head] = skipped;
    }
    if (a.dinitial) EACH_PLACE(p, DKP, BV)
    if (p.row < DK)
        store_pair(a.dinitial, (of_all * DK + p.row) * DV, (int)slice * BV + p.column, DV, ds + p.at, BST_F32_CODE);
}

#else
/* Sums over the rows and the columns of matrices whose places a block's threads have: of a row ACROSS parts
 * of the warps have something, of a column four. */
struct chunk_sums {
    float rows[ACROSS][CHUNK], columns[4][CHUNK];
};

/* To each row's sum what the thread has of it: rows of a matrix of CHUNK rows, upper and lower. */
BST_DEVICE void add_rows(float rows[ACROSS][CHUNK], float upper, float lower) {
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    BST_EACH(i, 2) {
        float v = i ? lower : upper;
        v += bst_shuffle_xor(v, 1);
        v += bst_shuffle_xor(v, 2);
        if (lane % 4 == 0) rows[warp / 4][16 * (warp % 4) + 8 * i + lane / 4] += v;
    }
}

BST_DEVICE float sum_of_row(const float rows[ACROSS][CHUNK], int row) {
    float sum = 0;
    BST_EACH(i, ACROSS) sum += rows[i][row];
    return sum;
}

/* Likewise to each column's, of a matrix [CHUNK, CHUNK]. */
BST_DEVICE void add_columns(float columns[4][CHUNK], const float v[PAIRS_ACROSS(CHUNK)][2][2]) {
    const int lane = (int)bst_lane(), warp = (int)bst_thread() / 32;
    BST_EACH(across, PAIRS_ACROSS(CHUNK))
        BST_EACH(half, 2)
            BST_EACH(i, 2) {
                float sum = v[across][half][i];
                BST_EACH(bit, 3) sum += bst_shuffle_xor(sum, 4 << bit);
                if (lane < 4) columns[warp % 4][16 * (warp / 4 + ACROSS * across) + 8 * half + 2 * lane + i] += sum;
            }
}

/* A gradient with respect to rows of length 1, which a tile has, as one with respect to what was normalised; then to
 * memory, `count` rows of DK elements. */
BST_DEVICE void store_keys(void *out, int64_t row_at, int64_t row_pitch, float *sums, tile t, const float *inverses,
                           float rows[ACROSS][CHUNK], int count) {
    if (NORMALIZE) {
        float along[2] = {0, 0};
        EACH_PLACE(p, CHUNK, DKP) {
            float pair[2];
            read_pair(pair, t, p.row, p.column);
            along[p.lower] += pair[0] * sums[p.at] + pair[1] * sums[p.at + 1];
        }
        if (bst_thread() < CHUNK)
            BST_EACH(i, ACROSS) rows[i][bst_thread()] = 0;
        bst_sync();
        add_rows(rows, along[0], along[1]);
        bst_sync();
        EACH_PLACE(p, CHUNK, DKP) {
            float pair[2];
            const float of_row = sum_of_row(rows, p.row), inverse = inverses[p.row];
            read_pair(pair, t, p.row, p.column);
            BST_EACH(i, 2) sums[p.at + i] = inverse * (sums[p.at + i] - pair[i] * of_row);
        }
    }
    EACH_PLACE(p, CHUNK, DKP)
    if (p.row < count) store_pair(out, row_at + p.row * row_pitch, p.column, DK, sums + p.at, TYPE);
}

/* What values have left of the state's, v - exp(G) R, at a place. */
BST_DEVICE void load_left_over(float left[2], const delta_input *v, int64_t batch, int64_t first, int64_t head,
                               int slice, int count, place p, float rise, const float *r) {
    load_values(left, v, batch, first + p.row, head, slice * BV + p.column, p.row < count, TYPE);
    BST_EACH(i, 2) left[i] -= rise * r[p.at + i];
}

/* The first token of a block's chunk, and how many it has. Of packed sequences they are in shared memory, from where
 * they are read each time: no registers are left for them. */
#define FIRST (PACKED ? (int64_t)found[0] : first)
#define COUNT (PACKED ? found[1] : count)

BST_KERNEL(delta_gradients, delta_backward_args, THREADS, 1) {
    BST_DYNAMIC_SHARED(memory);
    BST_SHARED(chunk_numbers, shared_numbers, 1);
    BST_SHARED(chunk_sums, shared_sums, 1);
    BST_SHARED(float, of_beta, ACROSS *CHUNK);
    BST_SHARED(float, inverses, 2 * CHUNK);
    BST_SHARED(float, factors, CHUNK);
    BST_SHARED(float, scratch, 32);
    BST_SHARED(int, found, 2);
    chunk_numbers *const numbers = shared_numbers;
    chunk_sums *const of_g = shared_sums;
    float (*const beta_rows)[CHUNK] = (float (*)[CHUNK])of_beta;
    const tile keys = tile_at(memory, PLANES, CHUNK, DKP), state = tile_at(end_of(keys), PLANES, DKP, BV);
    const tile dstate = tile_at(end_of(state), PLANES, DKP, BV);
    const tile square = tile_at(end_of(dstate), PLANES, CHUNK, CHUNK);
    const tile values = tile_at(end_of(square), PLANES, CHUNK, BV);
    const tile dvalues = tile_at(end_of(values), PLANES, CHUNK, BV);
    const tile dy = tile_at(end_of(dvalues), DY_PLANES, CHUNK, BV);
    const tile scaled_dy = tile_at(dy.memory, PLANES, CHUNK, BV); /* in its place */
    const int chunk = (int)bst_block() % a.of.chunks, of_keys = (int)bst_block() / a.of.chunks;
    const int batch = PACKED ? 0 : of_keys / a.of.key_heads, key_head = of_keys % a.of.key_heads;
    int64_t first = (int64_t)chunk * CHUNK;
    const int group = a.of.heads / a.of.key_heads;
    int count = tokens_of(&a.of, {}, first);
    const int thread = (int)bst_thread();
    float dq[SUMS(CHUNK, DKP)] = {}, dk[SUMS(CHUNK, DKP)] = {};
    float along[2] = {0, 0}; /* of q . dq, what the heads so far have of it */
    bst_wait_for_previous();
    if (PACKED) {
        find_tokens(&a.of, chunk, &first, &count);
        if (!count) return;
        if (thread == 0) found[0] = (int)first, found[1] = count;
        bst_sync();
    }
    for (int member = 0; member < group; member++) {
        const int head = key_head * group + member, of_chunk = (batch * a.of.heads + head) * a.of.chunks + chunk;
        float da[SUMS(CHUNK, CHUNK)] = {}, dp[SUMS(CHUNK, CHUNK)] = {};
        float at_end = 0; /* of dG_c: what the state after the chunk has of it */
        bst_sync();
        load_numbers(numbers, &a.of, batch, head, chunk, FIRST, COUNT);
        if (thread < CHUNK) {
            factors[thread] = a.of.scale * numbers->rise[thread]; /* the thread's own */
            BST_EACH(i, ACROSS) of_g->rows[i][thread] = beta_rows[i][thread] = 0;
            BST_EACH(i, 4) of_g->columns[i][thread] = 0;
        }
        load_keys(keys, &a.of.k, batch, FIRST, key_head, COUNT, a.of.eps, 0, inverses);
        BST_ROLLED
        for (int slice = 0; slice < SLICES; slice++) {
            float r[SUMS(CHUNK, BV)] = {}, read[SUMS(CHUNK, BV)] = {}, dv[SUMS(CHUNK, BV)] = {};
            float v[SUMS(CHUNK, BV)] = {}, dx[SUMS(CHUNK, BV)] = {};
            ask_for_tile(state, (const char *)a.states + states_at(of_chunk, slice), SLICES * BV);
            ask_for_tile(dstate, (const char *)a.dstates + states_at(of_chunk, slice), SLICES * BV);
            ask_for_tile(square, square_of(a.of.scores, of_chunk), CHUNK);
            write_values(dy, &a.dy, batch, FIRST, head, slice, COUNT, 0);
            bst_copy_async_wait(0);
            bst_sync();
            if (!ADDITIVE) multiply(r, CHUNK, BV, DKP, keys, false, state, false);
            multiply(read, CHUNK, BV, DKP, keys, false, dstate, false);
            EACH_PLACE(p, CHUNK, BV) {
                float left[2];
                const float beta = numbers->beta[p.row];
                load_left_over(left, &a.of.v, batch, FIRST, head, slice, COUNT, p, numbers->rise[p.row], r);
                BST_EACH(i, 2) dv[p.at + i] = read[p.at + i] *= numbers->fall[p.row];
                if (ADDITIVE)
                    BST_EACH(i, 2) v[p.at + i] = beta * left[i];
                else
                    write_pair(values, p.row, p.column, beta * left[0], beta * left[1]);
            }
            multiply(dv, CHUNK, BV, CHUNK, square, true, dy, false);
            if (ADDITIVE) {
                BST_EACH(i, SUMS(CHUNK, BV)) dx[i] = dv[i];
            } else {
                bst_sync();
                ask_for_tile(square, square_of(a.of.inverse, of_chunk), CHUNK);
                EACH_PLACE(p, CHUNK, BV) write_pair(dvalues, p.row, p.column, dv[p.at], dv[p.at + 1]);
                bst_copy_async_wait(0);
                bst_sync();
                multiply(v, CHUNK, BV, CHUNK, square, false, values, false);
                multiply(dx, CHUNK, BV, CHUNK, square, true, dvalues, false);
                bst_sync();
            }
            float to_g[2] = {0, 0}, to_beta[2] = {0, 0};
            EACH_PLACE(p, CHUNK, BV) {
                float left[2]; /* made again: it would take registers that there are not */
                const float factor = numbers->beta[p.row] * numbers->rise[p.row];
                load_left_over(left, &a.of.v, batch, FIRST, head, slice, COUNT, p, numbers->rise[p.row], r);
                BST_EACH(i, 2) {
                    const float kept = v[p.at + i] * read[p.at + i];
                    to_beta[p.lower] += dx[p.at + i] * left[i];
                    to_g[p.lower] -= factor * dx[p.at + i] * r[p.at + i] + kept;
                    at_end += kept;
                }
                write_pair(values, p.row, p.column, v[p.at], v[p.at + 1]);
                if (!ADDITIVE) write_pair(dvalues, p.row, p.column, dx[p.at], dx[p.at + 1]);
            }
            add_rows(of_g->rows, to_g[0], to_g[1]);
            add_rows(beta_rows, to_beta[0], to_beta[1]);
            /* What the state before the chunk has of dG_c. */
            for (int i = thread; i < DKP * BV / 2; i += THREADS) {
                float s[2], ds[2];
                read_pair(s, state, i / (BV / 2), i % (BV / 2) * 2);
                read_pair(ds, dstate, i / (BV / 2), i % (BV / 2) * 2);
                at_end += numbers->rise[CHUNK - 1] * (s[0] * ds[0] + s[1] * ds[1]);
            }
            bst_sync();
            multiply(dp, CHUNK, CHUNK, BV, dy, false, values, true);
            if (!ADDITIVE) multiply(da, CHUNK, CHUNK, BV, dvalues, false, values, true);
            bst_sync();
            EACH_PLACE(p, CHUNK, BV) {
                const float fall = numbers->fall[p.row], less = -numbers->beta[p.row] * numbers->rise[p.row];
                write_pair(values, p.row, p.column, fall * v[p.at], fall * v[p.at + 1]);
                if (!ADDITIVE) write_pair(dvalues, p.row, p.column, less * dx[p.at], less * dx[p.at + 1]);
            }
            write_values(scaled_dy, &a.dy, batch, FIRST, head, slice, COUNT, factors);
            bst_sync();
            multiply(dq, CHUNK, DKP, BV, scaled_dy, false, state, true);
            multiply(dk, CHUNK, DKP, BV, values, false, dstate, true);
            if (!ADDITIVE) multiply(dk, CHUNK, DKP, BV, dvalues, false, state, true);
            bst_sync();
        }
        /* Within the chunk: M, then N, in the place of T. */
        float of_k[SUMS(CHUNK, CHUNK)] = {}, to_g[2] = {0, 0}, to_beta[2] = {0, 0};
        float from_g[PAIRS_ACROSS(CHUNK)][2][2] = {};
        const char *const scores = (const char *)square_of(a.of.scores, of_chunk);
        if (!ADDITIVE) multiply(of_k, CHUNK, CHUNK, DKP, keys, false, keys, true);
        EACH_PLACE(p, CHUNK, CHUNK) {
            float score[2] = {0, 0}, m[2];
            BST_EACH(plane, PLANES)
                add_pair(score, bst_read(scores + 2 * ((plane * CHUNK + p.row) * CHUNK + p.column), 4).w[0]);
            BST_EACH(i, 2) {
                const int column = p.column + i;
                const float decay = column <= p.row ? exponential(numbers->sum[p.row] - numbers->sum[column]) : 0;
                const float of_a = column < p.row ? -decay * da[p.at + i] : 0, both = of_a * of_k[p.at + i];
                const float change = numbers->beta[p.row] * both;
                m[i] = numbers->beta[p.row] * of_a;
                to_beta[p.lower] += both;
                to_g[p.lower] += change;
                from_g[p.across][p.half][i] -= change + dp[p.at + i] * score[i];
                dp[p.at + i] *= a.of.scale * decay;
            }
            if (ADDITIVE)
                BST_EACH(i, 2) m[i] = dp[p.at + i];
            write_pair(square, p.row, p.column, m[0], m[1]);
        }
        add_rows(beta_rows, to_beta[0], to_beta[1]);
        add_columns(of_g->columns, from_g);
        bst_sync();
        if (!ADDITIVE) {
            multiply(dk, CHUNK, DKP, CHUNK, square, false, keys, false);
            multiply(dk, CHUNK, DKP, CHUNK, square, true, keys, false);
            bst_sync();
            EACH_PLACE(p, CHUNK, CHUNK) write_pair(square, p.row, p.column, dp[p.at], dp[p.at + 1]);
            bst_sync();
        }
        multiply(dq, CHUNK, DKP, CHUNK, square, false, keys, false);
        bst_sync();
        load_keys(keys, &a.of.q, batch, FIRST, key_head, COUNT, a.of.eps, 0, inverses + CHUNK);
        bst_sync();
        multiply(dk, CHUNK, DKP, CHUNK, square, true, keys, false);
        /* P and y grow with exp(G_i) as q_i does: their gradient with respect to G_i is q_i . dq_i. */
        BST_EACH(i, 2) to_g[i] -= along[i], along[i] = 0;
        EACH_PLACE(p, CHUNK, DKP) {
            float pair[2];
            read_pair(pair, keys, p.row, p.column);
            along[p.lower] += pair[0] * dq[p.at] + pair[1] * dq[p.at + 1];
        }
        BST_EACH(i, 2) to_g[i] += along[i];
        add_rows(of_g->rows, to_g[0], to_g[1]);
        at_end = bst_group_sum(at_end, THREADS, scratch);
        bst_sync();
        if (thread < COUNT) {
            const int64_t at = (batch * a.of.tokens + FIRST + thread) * a.of.heads + head;
            float dg = at_end;
            const float dbeta = sum_of_row(beta_rows, thread);
            for (int i = CHUNK - 1; i >= thread; i--) {
                dg += sum_of_row(of_g->rows, i);
                BST_EACH(j, 4) dg += of_g->columns[j][i];
            }
            bst_store(a.dg, at, &dg, G_TYPE, 1);
            bst_store(a.dbeta, at, &dbeta, BETA_TYPE, 1);
        }
    }
    const int64_t row_at = ((batch * a.of.tokens + FIRST) * a.of.key_heads + key_head) * DK;
    const int64_t row_pitch = (int64_t)a.of.key_heads * DK;
    bst_sync();
    store_keys(a.dq, row_at, row_pitch, dq, keys, inverses + CHUNK, of_g->rows, COUNT); /* q is there */
    bst_sync();
    load_keys(keys, &a.of.k, batch, FIRST, key_head, COUNT, a.of.eps, 0, 0);
    bst_sync();
    store_keys(a.dk, row_at, row_pitch, dk, keys, inverses, of_g->rows, COUNT);
}
#endif
