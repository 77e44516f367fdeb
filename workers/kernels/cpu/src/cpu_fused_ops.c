/* The small operations between a decoder's matmuls, one pass each, for CPUs. See cpu_fused_ops.py for their meaning. */
#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384 /* below this a second thread costs more than it brings */

INLINE float inverse_rms(const element *x, long size, float eps) {
  floats squares = {};
  for (long i = 0; i < size; i += LANES) {
    const floats v = load(x + i);
    squares += v * v;
  }
  return 1.0f / sqrtf(sum_lanes(squares) / size + eps);
}

/* residual += x where x is given; out = residual / rms(residual) * weight. */
void add_rms_norm(const element *x, element *residual, const element *weight, element *out, long tokens, long size,
                  float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * size >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    element *row = residual + t * size;
    if (x)
      for (long i = 0; i < size; i += LANES) store(row + i, load(row + i) + load(x + t * size + i));
    const float factor = inverse_rms(row, size, eps);
    for (long i = 0; i < size; i += LANES)
      store(out + t * size + i, rounded(load(row + i) * factor) * load(weight + i));
  }
}

/* Every head of q and k: RMSNorm by its row of weight, where given; then rotation by its token's angles, where given. */
void norm_rotate(const element *qk, long stride, const element *weight, const element *cosines, const element *sines,
                 element *out, long tokens, long heads, long dim, float eps, int threads) {
  const long half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * heads * dim >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < heads; h++) {
      const element *from = qk + t * stride + h * dim;
      element *to = out + (t * heads + h) * dim;
      if (weight) {
        const float factor = inverse_rms(from, dim, eps);
        for (long i = 0; i < dim; i += LANES)
          store(to + i, rounded(load(from + i) * factor) * load(weight + h * dim + i));
        from = to;
      }
      if (!cosines) {
        if (!weight) memcpy(to, from, dim * sizeof(element));
        continue;
      }
      const element *cosine = cosines + t * dim, *sine = sines + t * dim;
      for (long i = 0; i < half; i += LANES) {
        const floats a = load(from + i), b = load(from + half + i);
        store(to + i, a * load(cosine + i) + b * load(sine + i));
        store(to + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
      }
    }
}

/* out = silu(gate) * up, of rows [gate | up]. */
void silu_mul(const element *gate_up, long stride, element *out, long tokens, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * width >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    const element *gate = gate_up + t * stride, *up = gate + width;
    for (long i = 0; i < width; i += LANES) {
      const floats x = load(gate + i);
      store(out + t * width + i, rounded(x / (1.0f + exponential(-x))) * load(up + i));
    }
  }
}
