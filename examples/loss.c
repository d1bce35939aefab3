/* loss.c - Bastile from C, without Python: a norm, then the output head with its loss and gradients, on the CPU.
 *
 *     cc loss.c $(pkg-config --cflags --libs bastile) -o loss && ./loss
 *
 * once the library is installed where the linker and the loader look: meson install, then ldconfig. A library built
 * with -Ddefault_library=static does by the same line, and no loader is asked.
 *
 * The same calls work on CUDA: give the tensors device memory and {kDLCUDA, 0}, and a stream in bst_exec. */
#include <bastile.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 8, HIDDEN = 16, VOCABULARY = 32 };

static DLTensor tensor(void *data, int dims, int64_t *shape, DLDataType type) {
    return (DLTensor){.data = data, .device = {kDLCPU, 0}, .ndim = dims, .dtype = type, .shape = shape};
}

static void check(bst_status status) {
    if (status == BST_OK) return;
    fprintf(stderr, "%s: %s\n", bst_status_name(status), bst_last_error());
    exit(1);
}

int main(void) {
    static float x[TOKENS][HIDDEN], gain[HIDDEN], normed[TOKENS][HIDDEN], rstd[TOKENS];
    static float head[VOCABULARY][HIDDEN], loss, dnormed[TOKENS][HIDDEN], dhead[VOCABULARY][HIDDEN];
    static int64_t target[TOKENS];
    for (int i = 0; i < TOKENS * HIDDEN; i++) x[i / HIDDEN][i % HIDDEN] = (float)(i * 37 % 101) / 50.0f - 1.0f;
    for (int i = 0; i < VOCABULARY * HIDDEN; i++) head[i / HIDDEN][i % HIDDEN] = (float)(i * 53 % 89) / 44.0f - 1.0f;
    for (int i = 0; i < HIDDEN; i++) gain[i] = 1.0f;
    for (int i = 0; i < TOKENS; i++) target[i] = i % 3 ? i : -100; /* -100: this token counts for nothing */

    const DLDataType f32 = {kDLFloat, 32, 1}, i64 = {kDLInt, 64, 1};
    int64_t tokens[] = {TOKENS}, hidden[] = {HIDDEN}, activations[] = {TOKENS, HIDDEN},
            weights[] = {VOCABULARY, HIDDEN};
    DLTensor tx = tensor(x, 2, activations, f32), tgain = tensor(gain, 1, hidden, f32);
    DLTensor tnormed = tensor(normed, 2, activations, f32), trstd = tensor(rstd, 1, tokens, f32);
    DLTensor thead = tensor(head, 2, weights, f32), ttarget = tensor(target, 1, tokens, i64);
    DLTensor tloss = tensor(&loss, 0, NULL, f32);
    DLTensor tdnormed = tensor(dnormed, 2, activations, f32), tdhead = tensor(dhead, 2, weights, f32);

    check(bst_norm_forward(NULL, &tx, NULL, &tgain, NULL, 1e-6, NULL, &tnormed, NULL, NULL, &trstd));
    bst_linear_cross_entropy_tensors tensors = {.size = sizeof tensors,
                                                .hidden = &tnormed,
                                                .weight = &thead,
                                                .target = &ttarget,
                                                .loss = &tloss,
                                                .dhidden = &tdnormed,
                                                .dweight = &tdhead};
    check(bst_linear_cross_entropy_forward(NULL, &tensors, NULL, 0)); /* no options: the mean, -100 ignored */

    /* One step down the gradient must lower the loss. */
    float before = loss;
    for (int i = 0; i < VOCABULARY; i++)
        for (int j = 0; j < HIDDEN; j++) head[i][j] -= 0.1f * dhead[i][j];
    tensors.dhidden = tensors.dweight = NULL;
    check(bst_linear_cross_entropy_forward(NULL, &tensors, NULL, 0));
    printf("bastile %s: loss %.4f, after a step %.4f\n", bst_version(), before, loss);
    return loss < before ? 0 : 1;
}
