/* linear.h: staging of rows and dot products with groups of a packed weight, for linear.c and head.c. */
#ifndef BACKCAST_CPU_LINEAR_H
#define BACKCAST_CPU_LINEAR_H
#include "cpu.h"
#include "pack.h"

/* Rows that the staging room holds at `cols` columns; at least CPU_ROWS. */
uint32_t stage_fit(uint32_t cols);
/* Stages x [rows][cols] (rows <= stage_fit) in the forms that these weights need. */
void stage_fill(struct kn_cpu *c, uint32_t n_w, const struct kn_weight *const *w, const float *x,
                uint32_t rows);

/* Around a thread's dot_runs over `rows` staged rows: the tiles are its own, where the instruction set has any. */
void products_begin(struct kn_cpu *c, unsigned thread, uint32_t rows);
void products_end(struct kn_cpu *c, unsigned thread);

/* Staged rows row .. row + n_rows against groups group .. group + n_groups (<= CPU_FLOAT_GROUPS; of floats: of one bundle) of
 * w. acc is overwritten. */
struct dot {
    const struct kn_weight *w;
    uint32_t group, n_groups, row, n_rows;
    float *acc; /* group g, row r: acc + g * acc_group + r * acc_stride, 16 floats */
    size_t acc_stride, acc_group;
};
void dot_run(struct kn_cpu *c, unsigned thread, const struct dot *d);
#endif
