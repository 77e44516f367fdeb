/* Softmax of a block of causal scores, in place, for CPUs. See cpu_chunk_attention.py for its meaning. */
#include "cpu_vector.h"

#define PARALLEL_ELEMENTS 16384

INLINE ints seen_lanes(long at, long begin, long end) {
  const ints lane = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)at;
  return (lane >= (int32_t)begin) & (lane < (int32_t)end);
}

/* How scores of one head become weights. softcap: 0 for none; slope: 0 for none; sink: -infinity for none. */
typedef struct {
  float scale, softcap, slope, sink;
} rule;

/* Scores from column j on; the query stands at column `query`. */
INLINE floats scores_at(const element *row, long j, long width, long query, const rule *rule, const int plain) {
  const floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  floats x = load_some(row + j, width - j) * rule->scale;
  if (plain) return x;
  if (rule->softcap > 0) x = capped(x, rule->softcap);
  return x + rule->slope * (lane + (float)(j - query));
}

/* Columns begin..end are seen, the last one is the query's own. */
INLINE void softmax_row(element *row, long begin, long end, long width, const rule *rule, const int plain) {
  const long first = begin / LANES * LANES;
  floats most = (floats){} + rule->sink, weight = {};
  for (long j = first; j < end; j += LANES) {
    const floats x = scores_at(row, j, width, end - 1, rule, plain);
    most = choose_lanes(seen_lanes(j, begin, end) & ~(x <= most), x, most);
  }
  most = (floats){} + max_lanes(most);
  for (long j = first; j < end; j += LANES) {
    const floats x = exponential(scores_at(row, j, width, end - 1, rule, plain) - most);
    weight += choose_lanes(seen_lanes(j, begin, end), x, (floats){});
  }
  const float factor = 1.0f / (sum_lanes(weight) + (rule->sink > -INFINITY ? expf(rule->sink - most[0]) : 0));
  for (long j = first; j < end; j += LANES) {
    const floats x = exponential(scores_at(row, j, width, end - 1, rule, plain) - most) * factor;
    store_some(row + j, choose_lanes(seen_lanes(j, begin, end), x, (floats){}), width - j);
  }
  memset(row, 0, first * sizeof(element));
  const long after = (end + LANES - 1) / LANES * LANES;
  if (after < width) memset(row + after, 0, (width - after) * sizeof(element));
}

/* Rows are [heads, queries]: query t sees positions up to first_end + t, of them the last `window` where that is
   positive. slopes, sinks: of the heads, or null. */
void causal_softmax(element *scores, long rows, long width, long queries, long first_end, long window, float scale,
                    float softcap, const float *slopes, const float *sinks, int threads) {
  const int plain = !(softcap > 0) && !slopes;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    const long head = r / queries, end = first_end + r % queries;
    const long begin = window > 0 && end > window ? end - window : 0;
    const rule own = {scale, softcap, slopes ? slopes[head] : 0, sinks ? sinks[head] : -INFINITY};
    if (plain)
      softmax_row(scores + r * width, begin, end, width, &own, 1);
    else
      softmax_row(scores + r * width, begin, end, width, &own, 0);
  }
}
