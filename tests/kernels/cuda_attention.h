/* cuda_attention.h: attention of the GPU backend against doubles, in every way that it can run: one made-up cache after the
 * other. Two programs draw their cases: test_cuda_attention.c, and test_cuda_attention_long.c, which takes minutes. */
#ifndef BACKCAST_CUDA_ATTENTION_H
#define BACKCAST_CUDA_ATTENTION_H
#include "kernels_attention.h"
#include "kernels_device.h"

static struct kca_world world;
static double *want; /* [rows][heads][d] */

static void truth(void)
{
    size_t width = (size_t)world.n_heads * world.s.d;
    double *p = malloc(world.s.n * sizeof *p);
    want = malloc(width * world.n_rows * sizeof *want);
    assert_true(p && want);
    for (uint32_t r = 0; r < world.n_rows; r++)
        for (uint32_t h = 0; h < world.n_heads; h++)
            kca_attend(&world, r, h, p, want + r * width + h * world.s.d);
    free(p);
}

static void check_rows(const float *got, uint32_t first, uint32_t n)
{
    size_t width = (size_t)world.n_heads * world.s.d;
    float top = kc_max_abs(world.v, (size_t)world.s.n * world.s.n_kv * world.s.d);
    double tol = (world.s.type != KN_F32 ? (double)KC_HALVES : 5e-6) * (double)top;
    for (size_t i = 0; i < n * width; i++) {
        size_t row = first + i / width;
        bool blind = world.lo[row] == world.hi[row];
        if (!(fabs((double)got[i] - want[first * width + i]) <= (blind ? 0 : tol)))
            fail_msg("%s: %s, d %u, kv heads %u, group %u, n %u: row %zu [%u, %u) value %zu is "
                     "%.9g, expected %.9g",
                     kd_label(), kn_kv_type_find(world.s.type)->name, world.s.d, world.s.n_kv,
                     world.s.group, world.s.n, row, world.lo[row], world.hi[row], i % width,
                     (double)got[i], want[first * width + i]);
    }
}

static uint32_t first_row, n_of_rows; /* of the batch; all if 0 */

static void check_world(struct kn *kn)
{
    uint32_t n = n_of_rows ? n_of_rows : world.n_rows;
    size_t width = (size_t)world.n_heads * world.s.d;
    float *got = malloc(n * width * sizeof *got);
    struct kc_pool pool;
    struct kn_seq seq;
    assert_non_null(got);
    kca_pool(&world, &pool, kn, &seq);
    struct kn_batch b = kca_batch(&world, &seq, first_row, n);
    kc_attention(kn, &b,
                 (struct kc_queries){1, world.n_heads, world.scale,
                                     world.q + (size_t)first_row * width},
                 got);
    check_rows(got, first_row, n);
    kc_pool_close(&pool);
    free(got);
}

/* Rows first .. first + n of a prompt under a view; n = 0: all of them. */
static void run(struct kca_shape s, enum kca_view view, uint32_t first, uint32_t n)
{
    world = kca_make(s);
    kca_look(&world, view);
    truth();
    first_row = first;
    n_of_rows = n;
    kd_each(check_world);
    free(want);
    kca_free(&world);
}
#endif
