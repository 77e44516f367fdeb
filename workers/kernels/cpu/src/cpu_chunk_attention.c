/* Softmax of a block of causal scores, in place, for CPUs. See cpu_chunk_attention.py for its meaning. */
#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384

/* Lanes 0..count of the vector at `at`, the rest zero. */
INLINE floats load_some(const element *at, long count) {
  if (count >= LANES) return load(at);
  element part[LANES] = {0};
  memcpy(part, at, count * sizeof(element));
  return load(part);
}

INLINE void store_some(element *at, floats x, long count) {
  if (count >= LANES) {
    store(at, x);
    return;
  }
  element part[LANES];
  store(part, x);
  memcpy(at, part, count * sizeof(element));
}

INLINE ints seen_lanes(long at, long begin, long end) {
  const ints lane = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)at;
  return (lane >= (int32_t)begin) & (lane < (int32_t)end);
}

INLINE void softmax_row(element *row, long begin, long end, long width, float scale) {
  const floats nothing = (floats){} - INFINITY;
  const long first = begin / LANES * LANES;
  floats most = nothing, weight = {};
  for (long j = first; j < end; j += LANES) {
    const floats x = load_some(row + j, width - j) * scale;
    most = choose_lanes(seen_lanes(j, begin, end) & ~(x <= most), x, most);
  }
  most = (floats){} + max_lanes(most);
  for (long j = first; j < end; j += LANES) {
    const floats x = exponential(load_some(row + j, width - j) * scale - most);
    weight += choose_lanes(seen_lanes(j, begin, end), x, (floats){});
  }
  const float factor = 1.0f / sum_lanes(weight);
  for (long j = first; j < end; j += LANES) {
    const floats x = exponential(load_some(row + j, width - j) * scale - most) * factor;
    store_some(row + j, choose_lanes(seen_lanes(j, begin, end), x, (floats){}), width - j);
  }
  memset(row, 0, first * sizeof(element));
  const long after = (end + LANES - 1) / LANES * LANES;
  if (after < width) memset(row + after, 0, (width - after) * sizeof(element));
}

/* Rows are [.., queries]: query t sees positions up to first_end + t, of them the last `window` where that is positive. */
void causal_softmax(element *scores, long rows, long width, long queries, long first_end, long window, float scale,
                    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    const long end = first_end + r % queries;
    const long begin = window > 0 && end > window ? end - window : 0;
    softmax_row(scores + r * width, begin, end, width, scale);
  }
}
