/* hash.h - names cache entries and tells damaged ones: FNV-1a in 128 bits (Fowler, Noll and Vo). Not cryptographic, and
 * need not be: all that is hashed is this library's own, and whoever could put a forged entry into the cache's folder
 * could write its checksum as well (folder.c sees to it that nobody else can). It must tell apart what differs by
 * chance; a change of a single byte never goes unnoticed. */
#ifndef BST_HASH_H
#define BST_HASH_H

#include <stddef.h>
#include <stdint.h>

typedef struct bst_digest {
    uint8_t bytes[16]; /* the most significant first */
} bst_digest;

typedef unsigned __int128 bst_hash;

static const bst_hash BST_HASH_BEGIN = (bst_hash)0x6c62272e07bb0142 << 64 | 0x62b821756295c58d;

static inline void bst__hash_add(bst_hash *h, const void *data, size_t bytes) {
    const bst_hash prime = (bst_hash)1 << 88 | 0x13b;
    for (size_t i = 0; i < bytes; i++) *h = (*h ^ ((const uint8_t *)data)[i]) * prime;
}

static inline bst_digest bst__hash_end(bst_hash h) {
    bst_digest out;
    for (int i = 0; i < 16; i++) out.bytes[i] = (uint8_t)(h >> (120 - 8 * i));
    return out;
}

#endif
