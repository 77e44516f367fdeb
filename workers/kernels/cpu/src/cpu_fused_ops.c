/* The small operations between a decoder's matmuls, one pass each, for CPUs. See cpu_fused_ops.py for their meaning. */
#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384 /* below this a second thread costs more than it brings */

/* Whole vectors, and then what is left of a row. */
#define EACH(i, size) for (long i = 0; i < (size); i += LANES)

INLINE float inverse_rms(const element *x, long size, float eps) {
  floats squares = {};
  EACH(i, size) {
    const floats v = load_some(x + i, size - i);
    squares += v * v;
  }
  return 1.0f / sqrtf(sum_lanes(squares) / size + eps);
}

/* The mean, and one over the deviation from it. */
INLINE float mean_and_inverse(const element *x, long size, float eps, float *inverse) {
  const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  floats sum = {}, squares = {};
  EACH(i, size) sum += load_some(x + i, size - i);
  const float mean = sum_lanes(sum) / size;
  EACH(i, size) {
    const floats v = choose_lanes(lane < (int32_t)(size - i), load_some(x + i, size - i) - mean, (floats){});
    squares += v * v;
  }
  *inverse = 1.0f / sqrtf(sum_lanes(squares) / size + eps);
  return mean;
}

INLINE void add_row(element *row, const element *x, long size) {
  EACH(i, size) store_some(row + i, load_some(row + i, size - i) + load_some(x + i, size - i), size - i);
}

/* residual += x where x is given; out = residual / rms(residual) * weight. */
void add_rms_norm(const element *x, element *residual, const element *weight, element *out, long tokens, long size,
                  float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * size >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    element *row = residual + t * size;
    if (x) add_row(row, x + t * size, size);
    const float factor = inverse_rms(row, size, eps);
    EACH(i, size) {
      const long left = size - i;
      store_some(out + t * size + i, rounded(load_some(row + i, left) * factor) * load_some(weight + i, left), left);
    }
  }
}

/* The same with LayerNorm: (residual - mean) / deviation * weight + bias, each where given. */
void add_layer_norm(const element *x, element *residual, const element *weight, const element *bias, element *out,
                    long tokens, long size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * size >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    element *row = residual + t * size;
    if (x) add_row(row, x + t * size, size);
    float factor;
    const float mean = mean_and_inverse(row, size, eps, &factor);
    EACH(i, size) {
      const long left = size - i;
      floats y = (load_some(row + i, left) - mean) * factor;
      if (weight) y *= load_some(weight + i, left);
      if (bias) y += load_some(bias + i, left);
      store_some(out + t * size + i, y, left);
    }
  }
}

/* Norms of q and k: of each head where `together` is 0, else of the first `together` heads at once and of the others at
   once. centered: with LayerNorm's mean. */
void norm_heads(const element *qk, long stride, const element *weight, element *out, long tokens, long heads, long dim,
                long together, int centered, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * heads * dim >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++)
    for (long h = 0, count; h < heads; h += count) {
      count = together == 0 ? 1 : h == 0 ? together : heads - together;
      const long size = count * dim;
      const element *from = qk + t * stride + h * dim;
      element *to = out + (t * heads + h) * dim;
      float mean = 0, factor;
      if (centered)
        mean = mean_and_inverse(from, size, eps, &factor);
      else
        factor = inverse_rms(from, size, eps);
      EACH(i, size) {
        const long left = size - i;
        const floats y = (load_some(from + i, left) - mean) * factor * load_some(weight + h * dim + i, left);
        store_some(to + i, y, left);
      }
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
        EACH(i, dim) {
          const floats y = rounded(load_some(from + i, dim - i) * factor);
          store_some(to + i, y * load_some(weight + h * dim + i, dim - i), dim - i);
        }
        from = to;
      }
      if (!cosines) {
        if (!weight) memcpy(to, from, dim * sizeof(element));
        continue;
      }
      const element *cosine = cosines + t * dim, *sine = sines + t * dim;
      EACH(i, half) {
        const long left = half - i;
        const floats a = load_some(from + i, left), b = load_some(from + half + i, left);
        const floats x = a * load_some(cosine + i, left) + b * load_some(sine + i, left);
        const floats y = b * load_some(cosine + half + i, left) + a * load_some(sine + half + i, left);
        store_some(to + i, x, left);
        store_some(to + half + i, y, left);
      }
    }
}

INLINE floats silu(floats x) { return x / (1.0f + exponential(-x)); }

/* x times the normal distribution's share below x. The error function after Abramowitz and Stegun 7.1.26, 1.5e-7. */
INLINE floats gelu(floats x) {
  const floats size = choose_lanes(x < 0, -x, x) * 0.707106781186547524f;
  const floats t = 1.0f / (size * 0.3275911f + 1.0f);
  floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const floats above = 0.5f * p * t * exponential(-size * size);
  return x * choose_lanes(x < 0, above, 1.0f - above);
}

INLINE floats gelu_tanh(floats x) { return x / (1.0f + exponential(-1.59576912160573f * (x + 0.044715f * x * x * x))); }

INLINE floats relu(floats x) { return choose_lanes(x < 0, (floats){}, x); }

/* out = function(gate) * up of rows [gate | up], or function(gate). */
INLINE void activate_rows(floats function(floats), const element *rows, long stride, element *out, long tokens,
                          long width, int gated, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * width >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    const element *gate = rows + t * stride;
    EACH(i, width) {
      floats y = rounded(function(load_some(gate + i, width - i)));
      if (gated) y *= load_some(gate + width + i, width - i);
      store_some(out + t * width + i, y, width - i);
    }
  }
}

void silu_mul(const element *gate_up, long stride, element *out, long tokens, long width, int threads) {
  activate_rows(silu, gate_up, stride, out, tokens, width, 1, threads);
}

/* kind: 0 silu, 1 gelu, 2 gelu with tanh, 3 relu. */
void activate(const element *rows, long stride, element *out, long tokens, long width, int kind, int gated,
              int threads) {
  switch (kind) {
    case 0: activate_rows(silu, rows, stride, out, tokens, width, gated, threads); break;
    case 1: activate_rows(gelu, rows, stride, out, tokens, width, gated, threads); break;
    case 2: activate_rows(gelu_tanh, rows, stride, out, tokens, width, gated, threads); break;
    default: activate_rows(relu, rows, stride, out, tokens, width, gated, threads);
  }
}
