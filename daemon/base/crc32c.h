/* crc32c.h: CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of bytes: what the files in the
 * state folder are checked with. It finds every burst of errors up to 32 bits, so every changed byte.
 *
 *     uint32_t sum = crc32c(0, part, n);
 *     sum = crc32c(sum, next, m);          the same as over both in one piece
 *
 * Uses the processor's instruction where there is one. Any thread. */
#ifndef BACKCAST_CRC32C_H
#define BACKCAST_CRC32C_H
#include <stddef.h>
#include <stdint.h>

uint32_t crc32c(uint32_t sum, const void *bytes, size_t n);
/* The same without the instruction: for processors that lack it, and for the tests. */
uint32_t crc32c_plain(uint32_t sum, const void *bytes, size_t n);
#endif
