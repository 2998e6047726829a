/* kn_backends.h: the doors of the backends, for registry.c (and tests that want one by name).
 *
 * An open function checks opt->isa and opt->threads, returns KN_OK and *ret, or a negative kn_code
 * with a sentence in why (never NULL here; why_len >= 160) and *ret untouched. opt->backend is not
 * looked at. */
#ifndef BACKCAST_KN_BACKENDS_H
#define BACKCAST_KN_BACKENDS_H
#include "kn.h"

typedef int kn_open_fn(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);

/* Scalar truth: any machine; isa NULL or "scalar"; one thread whatever opt->threads says. */
int kn_ref_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);

/* Threads and AVX2 / AVX-512, in kernels/cpu/. In the build (KN_HAVE_CPU) once kernels/cpu/cpu.c is
 * there. */
int kn_cpu_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);
/* Names as in kn_isa_name; the full ones too, and those for tests. */
const char *kn_cpu_isa_name(unsigned i);
bool kn_cpu_isa_known(const char *isa);

/* A GPU, in kernels/cuda/: the one symbol of libbackcast-cuda.so (and of libbackcast-simt.so, the same sources on a CPU). */
int kn_cuda_open(struct kn **ret, const struct kn_options *opt, char *why, size_t why_len);
#endif
