/* The cpu backend's products with 16-bit activations: what test_kn_linear.c asks of quantised weights, on every instruction
 * set, against rule 4 of kn_int8.h. */
#define OPEN_SET kc_open_wide
#define REF_LINEAR kn_ref_linear_q16
#define OUTS 1, 65
#define VOCABS 65, 600
#define QUANTISED_ONLY true
#include "test_kn_linear.c"
