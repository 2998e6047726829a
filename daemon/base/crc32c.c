/* crc32c.c: see crc32c.h.
 *
 * The instruction takes 8 bytes in 3 cycles but can begin one a cycle, so three runs of LANE bytes
 * are summed side by side and joined: the sum of a run followed by k zero bytes is a linear function
 * of the sum, one table look-up for each of its four bytes.
 *
 *     | lane 0 | lane 1 | lane 2 |     sum = zeros(zeros(s0) ^ s1) ^ s2,  zeros: LANE more zero bytes
 *
 * Without the instruction: eight tables, 8 bytes a round. */
#include "crc32c.h"
#include <pthread.h>
#include <string.h>

#define POLYNOMIAL 0x82f63b78u
#define LANE 2048

/* Made once, constant afterwards. */
static uint32_t table[8][256]; /* [k][b]: the sum of byte b followed by k zero bytes */
static uint32_t zeros[4][256]; /* [k][b]: b at byte k of a sum, LANE zero bytes later */

static uint32_t eight_bytes(uint32_t sum, const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, 8);
    w ^= sum;
    return table[7][w & 255] ^ table[6][w >> 8 & 255] ^ table[5][w >> 16 & 255] ^
           table[4][w >> 24 & 255] ^ table[3][w >> 32 & 255] ^ table[2][w >> 40 & 255] ^
           table[1][w >> 48 & 255] ^ table[0][w >> 56];
}

static void tables_make(void)
{
    static const uint8_t nothing[8];
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t sum = b;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
        table[0][b] = sum;
    }
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 1; k < 8; k++)
            table[k][b] = table[k - 1][b] >> 8 ^ table[0][table[k - 1][b] & 255];
    for (uint32_t b = 0; b < 256; b++)
        for (int k = 0; k < 4; k++) {
            uint32_t sum = b << 8 * k;
            for (int i = 0; i < LANE / 8; i++)
                sum = eight_bytes(sum, nothing);
            zeros[k][b] = sum;
        }
}

static void tables_ready(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, tables_make);
}

uint32_t crc32c_plain(uint32_t sum, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    tables_ready();
    sum = ~sum;
    for (; n >= 8; n -= 8, p += 8)
        sum = eight_bytes(sum, p);
    for (; n > 0; n--, p++)
        sum = sum >> 8 ^ table[0][(sum ^ *p) & 255];
    return ~sum;
}

#ifdef __x86_64__
static inline uint64_t word(const uint8_t *p)
{
    uint64_t w;
    memcpy(&w, p, 8);
    return w;
}

static uint32_t zeros_after(uint32_t sum)
{
    return zeros[0][sum & 255] ^ zeros[1][sum >> 8 & 255] ^ zeros[2][sum >> 16 & 255] ^
           zeros[3][sum >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_fast(uint32_t sum, const uint8_t *p,
                                                              size_t n)
{
    uint64_t a = ~sum;
    for (; n >= 3 * LANE; n -= 3 * LANE, p += 3 * LANE) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < LANE; i += 8) {
            a = __builtin_ia32_crc32di(a, word(p + i));
            b = __builtin_ia32_crc32di(b, word(p + LANE + i));
            c = __builtin_ia32_crc32di(c, word(p + 2 * LANE + i));
        }
        a = zeros_after(zeros_after((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    for (; n >= 8; n -= 8, p += 8)
        a = __builtin_ia32_crc32di(a, word(p));
    for (; n > 0; n--, p++)
        a = __builtin_ia32_crc32qi((uint32_t)a, *p);
    return ~(uint32_t)a;
}
#endif

uint32_t crc32c(uint32_t sum, const void *bytes, size_t n)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2")) {
        tables_ready();
        return crc32c_fast(sum, bytes, n);
    }
#endif
    return crc32c_plain(sum, bytes, n);
}
