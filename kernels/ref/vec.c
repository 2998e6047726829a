/* vec.c: the small ops that work row by row: norm, rotary embedding, gate, gather. */
#include "ref.h"
#include <math.h>
#include <string.h>

static void rmsnorm_row(float *out, const float *x, const float *gain, uint32_t d, float eps)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < d; i++)
        sum += (double)x[i] * x[i];
    float scale = 1.0f / sqrtf((float)(sum / d) + eps);
    for (uint32_t i = 0; i < d; i++)
        out[i] = x[i] * scale * gain[i];
}

void ref_rmsnorm(struct kn *kn, float *out, const float *x, const float *gain, uint32_t rows,
                 uint32_t d, float eps)
{
    (void)kn;
    for (size_t r = 0; r < rows; r++)
        rmsnorm_row(out + r * d, x + r * d, gain, d, eps);
}

void ref_swiglu(struct kn *kn, float *out, const float *gate, const float *up, size_t n)
{
    (void)kn;
    for (size_t i = 0; i < n; i++)
        out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

void ref_gather_rows(struct kn *kn, float *out, const float *x, const uint32_t *rows, uint32_t n,
                     uint32_t d)
{
    (void)kn;
    for (size_t i = 0; i < n; i++)
        memcpy(out + i * d, x + (size_t)rows[i] * d, d * sizeof *out);
}

/* Turns the pair (x[a], x[b]) of dim pair i by its angle. */
static void rotate(float *x, uint32_t a, uint32_t b, float sin, float cos)
{
    float x0 = x[a], x1 = x[b];
    x[a] = x0 * cos - x1 * sin;
    x[b] = x0 * sin + x1 * cos;
}

void ref_rope_head(const struct kn_rope *r, const float *cos, const float *sin, float *x)
{
    uint32_t half = r->n_rot / 2;
    for (uint32_t i = 0; i < half; i++)
        if (r->style == KN_ROPE_PAIRS)
            rotate(x, 2 * i, 2 * i + 1, sin[i], cos[i]);
        else
            rotate(x, i, i + half, sin[i], cos[i]);
}

void ref_rope(struct kn *kn, const struct kn_batch *b, const struct kn_rope *r, float *x)
{
    (void)kn;
    uint32_t half = r->n_rot / 2;
    kn_assert(r->n_rot % 2 == 0 && r->n_rot <= r->head_dim && r->head_dim <= KN_HEAD_DIM_MAX);
    for (uint32_t row = 0; row < b->n_rows; row++) {
        float sin[KN_HEAD_DIM_MAX / 2], cos[KN_HEAD_DIM_MAX / 2];
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)b->positions[row] * r->inv_freq[i];
            sin[i] = sinf(angle);
            cos[i] = cosf(angle);
        }
        for (uint32_t h = 0; h < r->n_heads; h++, x += r->head_dim) {
            if (r->norm)
                rmsnorm_row(x, x, r->norm, r->head_dim, r->norm_eps);
            ref_rope_head(r, cos, sin, x);
        }
    }
}
