/* Activations, row by row, so that an element's result does not depend on where it stands among others. See
   cpu_activations.py. */
#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384 /* below this a second thread costs more than it brings */
enum { SILU, GELU, GELU_TANH };

INLINE floats sigmoid_times(floats x, floats y) { return y / (1.0f + exponential(-x)); }

/* x Phi(x): Phi by libm's erff, element by element. */
INLINE floats gelu(floats x) {
  floats phi;
  for (int i = 0; i < LANES; i++) phi[i] = 0.5f * (1.0f + erff(x[i] * 0.70710678118654752f));
  return x * phi;
}
/* 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3) */
INLINE floats gelu_tanh(floats x) { return sigmoid_times(1.5957691216057308f * (x + 0.044715f * x * x * x), x); }

INLINE floats activated(floats x, int kind) {
  return kind == SILU ? sigmoid_times(x, x) : kind == GELU ? gelu(x) : gelu_tanh(x);
}

void activate(const element *x, long stride, element *out, long rows, long width, int kind, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= PARALLEL_ELEMENTS)
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < width; i += LANES) {
      const long left = width - i < LANES ? width - i : LANES;
      element part[LANES] = {0};
      memcpy(part, x + row * stride + i, left * sizeof *part);
      store(part, activated(load(part), kind));
      memcpy(out + row * width + i, part, left * sizeof *part);
    }
}
