/* sha256.h: SHA-256 (FIPS 180-4), for the sum of a fetched model.
 *
 * Our own rather than the sha256sum program: the sum is taken over the very bytes that are written
 * to the place of installation, in the same pass, so there is no moment between the check and the
 * use, and no second program to find. */
#ifndef BACKCAST_SHA256_H
#define BACKCAST_SHA256_H
#include <stddef.h>
#include <stdint.h>

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[64];
};
void sha256_start(struct sha256 *s);
void sha256_add(struct sha256 *s, const void *data, size_t len);
void sha256_hex(struct sha256 *s, char ret[65]); /* ends it; lower case, NUL-terminated */
#endif
