/* spill.h: a whole sequence as flat bytes: what it caches (K, V, hidden rows, ids, positions, stream
 * indices), with some bytes of its owner's beside it, byte-equal when it comes back. The same bytes
 * lie in host memory (the host tier), in a file without a name (the disk tier) or in one that was
 * saved. Format, no I/O, no threads.
 *
 *   0         | magic, version, sizes, model, arithmetic, shape, two sums | 128 bytes
 *   128       | owner's bytes | ids | positions | stream | slots | block sums | zeros
 *   head      | block 0 | block 1 | ...      blocks of whole pages, as they lie in the pool
 *   total
 *
 * Every byte is under one of three sums (CRC-32C): the first 124 bytes, the rest of the head, each
 * block. A slot here counts pages from 0 in the order of the file; which pages of a pool they become
 * is of no consequence.
 *
 *   spill_make -> for each block: spill_block_copy, spill_block_seal -> spill_head
 *   spill_read -> spill_fits -> spill_place -> for each block: spill_block_check, spill_block_place
 *
 * The copies run in the engine's thread (they ask the backend), seal and check in any one thread.
 * Nothing that is read is believed: sizes are checked before they are used, slots and order before
 * they enter a sequence. */
#ifndef BACKCAST_SPILL_H
#define BACKCAST_SPILL_H
#include "seqcache.h"

#define SPILL_FIXED_BYTES 128u
#define SPILL_VERSION 1u
#define SPILL_BLOCK_BYTES (1u << 20) /* as many whole pages as fit, at least one */
#define SPILL_STATE_MAX (64u << 20)
#define SPILL_ALIGN 4096u

struct spill;

/* Who made it: the model's weights, and the arithmetic (build, backend, instruction set). */
struct spill_origin {
    uint64_t model, arithmetic;
};

/* Notes what s holds now; the pages must stay as they are until the last block was copied. state:
 * copied. */
int spill_make(struct spill **ret, const struct seqcache *s, const struct spill_origin *from,
               const void *state, size_t n_state, struct err *e);
/* The head of a file of file_bytes; n is what of it stands in bytes. n < spill_head_bytes of it is
 * fine for a first look: *ret_need says how many bytes it must be (0: *ret is made). BC_ECORRUPT,
 * BC_EVERSION name the place. */
int spill_read(struct spill **ret, const void *bytes, size_t n, uint64_t file_bytes,
               size_t *ret_need, struct err *e);
void spill_free(struct spill **sp);

uint64_t spill_bytes(const struct spill *sp); /* of all: head and blocks */
size_t spill_head_bytes(const struct spill *sp);
uint32_t spill_rows(const struct spill *sp);
uint32_t spill_pages(const struct spill *sp);
uint32_t spill_blocks(const struct spill *sp);
uint64_t spill_block_at(const struct spill *sp, uint32_t block); /* place in the file */
size_t spill_block_bytes(const struct spill *sp, uint32_t block);
struct spill_origin spill_origin(const struct spill *sp);
const void *spill_state(const struct spill *sp, size_t *ret_n);
const int32_t *spill_ids(const struct spill *sp);   /* [rows] */
uint64_t spill_last_stream(const struct spill *sp); /* of the newest row; 0: there is none */

/* ---- going out */
void spill_block_copy(const struct spill *sp, uint32_t block, const struct seqcache *s, void *to);
void spill_block_seal(struct spill *sp, uint32_t block, const void *bytes);
/* After the last block was sealed: the head's bytes, which sp owns. */
const void *spill_head(struct spill *sp);

/* ---- coming back */
/* Model and page layout are s's: BC_ESTATE says what differs. */
int spill_fits(const struct spill *sp, const struct kn_kv *kv, uint64_t model, struct err *e);
/* An empty s takes its pages and becomes the sequence, keys and values still to come. All or
 * nothing: BC_EBUDGET, BC_ENOMEM. */
int spill_place(const struct spill *sp, struct seqcache *s, struct err *e);
int spill_block_check(const struct spill *sp, uint32_t block, const void *bytes, struct err *e);
void spill_block_place(const struct spill *sp, uint32_t block, struct seqcache *s,
                       const void *bytes);
#endif
