/* kn_turn.h: the turn that takes a stored key from one position to another, for backends whose device memory is ordinary
 * memory.
 *
 *   stored at position a:  R(a w) k      wanted at b:  R(b w) k = R(b w - a w) R(a w) k       one rotation, not two
 *
 * a w and b w are the f32 products that `rope` rotates by, so their difference is taken in double precision: at position 8000 the
 * product alone is rounded by up to 2.4e-4, which a turn by (b - a) w would leave in the key. */
#ifndef BACKCAST_KN_TURN_H
#define BACKCAST_KN_TURN_H
#include <math.h>
#include "kn.h"

/* ret_cos, ret_sin: [r->n_rot / 2] */
static inline void kn_turn_angles(const struct kn_rope *r, int32_t from, int32_t to, float *ret_cos,
                                  float *ret_sin)
{
    for (uint32_t i = 0; i < r->n_rot / 2; i++) {
        float a = (float)from * r->inv_freq[i], b = (float)to * r->inv_freq[i];
        double angle = (double)b - (double)a;
        ret_cos[i] = (float)cos(angle);
        ret_sin[i] = (float)sin(angle);
    }
}
#endif
