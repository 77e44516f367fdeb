/* Softmax of a block of causal scores, in place, for CPUs. See cpu_chunk_attention.py for its meaning. */
#include <omp.h>

#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384
/* No sum of values notices what is less, beside weights of which one is 1 / width or more. ALiBi has many such weights,
   and with values they make products below the normal floats, which some CPUs compute a hundred times slower. */
#define LEAST_WEIGHT 0x1p-100f

/* Whether products of bf16 are better computed as products of float32: on x86 without products of bf16 pairs. */
#if defined(__x86_64__) && !defined(__AVX512BF16__)
const int chunk_float32_is_faster = 1;
#else
const int chunk_float32_is_faster = 0;
#endif

INLINE ints seen_lanes(long at, long begin, long end) {
  const ints lane = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)at;
  return (lane >= (int32_t)begin) & (lane < (int32_t)end);
}

/* How scores of one head become weights. softcap: 0 for none; slope: 0 for none; sink: -infinity for none. */
typedef struct {
  float scale, softcap, slope, sink;
} rule;

/* Columns begin..end are seen, the last one is the query's own. own: as many floats as columns, in whole vectors.
   Weights below LEAST_WEIGHT become 0; those that are no number stay so. */
INLINE void softmax_row(element *row, float *own, long begin, long end, long width, const rule *rule, const int plain) {
  const floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, nothing = (floats){} - INFINITY;
  const long first = begin / LANES * LANES;
  floats x, most = (floats){} + rule->sink, weight = {};
  for (long j = first; j < end; j += LANES) {
    x = load_some(row + j, width - j) * rule->scale;
    if (!plain && rule->softcap > 0) x = capped(x, rule->softcap);
    if (!plain) x += rule->slope * (lane + (float)(j - end + 1));
    if (j < begin || j + LANES > end) x = choose_lanes(seen_lanes(j, begin, end), x, nothing);
    memcpy(own + j, &x, sizeof x);
    most = choose_lanes(~(x <= most), x, most);
  }
  most = (floats){} + max_lanes(most);
  for (long j = first; j < end; j += LANES) {
    memcpy(&x, own + j, sizeof x);
    x = exponential(x - most);
    if (j < begin || j + LANES > end) x = choose_lanes(seen_lanes(j, begin, end), x, (floats){});
    memcpy(own + j, &x, sizeof x);
    weight += x;
  }
  const float factor = 1.0f / (sum_lanes(weight) + (rule->sink > -INFINITY ? expf(rule->sink - most[0]) : 0));
  for (long j = first; j < end; j += LANES) {
    memcpy(&x, own + j, sizeof x);
    x *= factor;
    store_some(row + j, choose_lanes(x < LEAST_WEIGHT, (floats){}, x), width - j);
  }
  memset(row, 0, first * sizeof(element));
  const long after = (end + LANES - 1) / LANES * LANES;
  if (after < width) memset(row + after, 0, (width - after) * sizeof(element));
}

/* Rows are [heads, queries]: query t sees positions up to first_end + t, of them the last `window` where that is
   positive. slopes, sinks: of the heads, or null. scratch: of each thread. */
void causal_softmax(element *scores, long rows, long width, long queries, long first_end, long window, float scale,
                    float softcap, const float *slopes, const float *sinks, float *scratch, long scratch_stride,
                    int threads) {
  const int plain = !(softcap > 0) && !slopes;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    const long head = r / queries, end = first_end + r % queries;
    const long begin = window > 0 && end > window ? end - window : 0;
    const rule how = {scale, softcap, slopes ? slopes[head] : 0, sinks ? sinks[head] : -INFINITY};
    float *own = scratch + omp_get_thread_num() * scratch_stride;
    if (plain)
      softmax_row(scores + r * width, own, begin, end, width, &how, 1);
    else
      softmax_row(scores + r * width, own, begin, end, width, &how, 0);
  }
}
