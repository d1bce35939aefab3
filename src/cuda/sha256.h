/* sha256.h - SHA-256 (NIST FIPS 180-4): names cache entries and tells damaged ones. */
#ifndef BST_SHA256_H
#define BST_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct bst_digest {
    uint8_t bytes[32];
} bst_digest;

typedef struct bst_sha256 {
    uint32_t state[8];
    uint64_t length; /* bytes so far */
    uint8_t block[64];
} bst_sha256;

void bst__sha256_begin(bst_sha256 *h);
void bst__sha256_add(bst_sha256 *h, const void *data, size_t bytes);
bst_digest bst__sha256_end(bst_sha256 *h);

#endif
