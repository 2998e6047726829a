/* budget.c: the ceiling. A cache holds at most `budget` tokens, in prefill and in decode. It may be
 * full; a prune is due only when it is full and something waits to be appended, so a caller appends
 * min(what waits, budget_room) rows and prunes when that is 0. Where a prompt is cut therefore
 * changes nothing. */
#include "evict.h"

uint32_t budget_room(const struct evict_params *p, uint32_t cached)
{
    if (p->budget == 0)
        return UINT32_MAX;
    return cached < p->budget ? p->budget - cached : 0;
}

uint64_t budget_bytes(const struct evict_params *p, size_t page_bytes)
{
    uint64_t pages = ((uint64_t)p->budget + KN_PAGE_ROWS - 1) / KN_PAGE_ROWS;
    return pages * page_bytes;
}
