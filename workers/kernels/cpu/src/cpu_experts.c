/* What is around the products of a mixture of experts: routing, sorting by expert, adding up. See cpu_experts.py. */
#include "cpu_grouped.h"

#define TILE 4 /* rows and experts whose logits are computed at a time */
#define PARALLEL_ELEMENTS 16384 /* below this a second thread costs more than it brings */
enum { SOFTMAX, TOP_SOFTMAX, SIGMOID };

/* Logits of R rows and up to TILE experts; each sums its inputs in one order, whatever is beside it. */
INLINE void dot(const element *x, long x_stride, const float *router, const float *bias, float *logits, long experts,
                long hidden, long count, const int R) {
  floats sum[TILE][TILE] = {0};
  const float *w[TILE];
  for (int e = 0; e < TILE; e++) w[e] = router + (e < count ? e : count - 1) * hidden;
  for (long i = 0; i < hidden; i += LANES) {
    floats weights[TILE];
    UNROLLED for (int e = 0; e < TILE; e++) memcpy(&weights[e], w[e] + i, sizeof weights[e]);
    UNROLLED for (int r = 0; r < R; r++) {
      const floats input = load(x + r * x_stride + i);
      UNROLLED for (int e = 0; e < TILE; e++) sum[r][e] += input * weights[e];
    }
  }
  for (int r = 0; r < R; r++)
    for (int e = 0; e < count; e++) logits[r * experts + e] = sum_lanes(sum[r][e]) + (bias ? bias[e] : 0);
}

static void softmax(float *x, long count) {
  float most = x[0], sum = 0;
  for (long i = 1; i < count; i++) most = x[i] > most ? x[i] : most;
  for (long i = 0; i < count; i++) sum += x[i] = expf(x[i] - most);
  for (long i = 0; i < count; i++) x[i] /= sum;
}

/* The greatest of those not taken; the first of equal ones. */
INLINE long next_best(const float *x, const char *taken, long count) {
  long best = -1;
  for (long i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
  return best;
}

/* Sets the scores of experts outside of the `kept` groups with the greatest sums of their `best` greatest to -inf. */
static void keep_groups(float *scores, long experts, long groups, long kept, long best) {
  const long size = experts / groups;
  float sums[groups];
  char taken[size], keeps[groups];
  memset(keeps, 0, groups);
  for (long g = 0; g < groups; g++) {
    memset(taken, 0, size);
    sums[g] = 0;
    for (long i = 0; i < best; i++) {
      const long at = next_best(scores + g * size, taken, size);
      taken[at] = 1;
      sums[g] += scores[g * size + at];
    }
  }
  for (long i = 0; i < kept; i++) keeps[next_best(sums, keeps, groups)] = 1;
  for (long e = 0; e < experts; e++)
    if (!keeps[e / size]) scores[e] = -INFINITY;
}

/* logits: of one row; they are overwritten by scores. */
static void choose(float *logits, const float *correction, float *weights, int64_t *chosen, long experts, long top_k,
                   int scoring, int renormalize, float scale, long groups, long kept, long best) {
  float scores[experts];
  char taken[experts];
  memset(taken, 0, experts);
  if (scoring == SOFTMAX) softmax(logits, experts);
  if (scoring == SIGMOID)
    for (long e = 0; e < experts; e++) logits[e] = 1 / (1 + expf(-logits[e]));
  for (long e = 0; e < experts; e++) scores[e] = logits[e] + (correction && scoring != TOP_SOFTMAX ? correction[e] : 0);
  if (groups) keep_groups(scores, experts, groups, kept, best);
  float sum = 0;
  for (long k = 0; k < top_k; k++) {
    const long e = next_best(scores, taken, experts);
    taken[e] = 1;
    chosen[k] = e;
    sum += weights[k] = logits[e];
  }
  if (scoring == TOP_SOFTMAX) softmax(weights, top_k);
  else if (renormalize)
    for (long k = 0; k < top_k; k++) weights[k] /= sum + 1e-20f;
  for (long k = 0; k < top_k; k++) weights[k] *= scale;
}

/* logits: [tokens][experts], to work in. groups 0: experts are in none. */
void route(const element *x, long x_stride, const float *router, const float *bias, const float *correction,
           float *logits, float *weights, int64_t *chosen, long tokens, long hidden, long experts, long top_k, int scoring,
           int renormalize, float scale, long groups, long kept, long best, int threads) {
  const long tiles = (experts + TILE - 1) / TILE;
#pragma omp parallel num_threads(threads) if (tokens * experts * hidden >= PARALLEL_ELEMENTS)
  {
#pragma omp for schedule(static)
    for (long tile = 0; tile < tiles; tile++) {
      const long e = tile * TILE, count = experts - e < TILE ? experts - e : TILE;
      const float *w = router + e * hidden, *b = bias ? bias + e : 0;
      long t = 0;
      for (; t + TILE <= tokens; t += TILE)
        dot(x + t * x_stride, x_stride, w, b, logits + t * experts + e, experts, hidden, count, TILE);
      for (; t < tokens; t++) dot(x + t * x_stride, 0, w, b, logits + t * experts + e, experts, hidden, count, 1);
    }
#pragma omp for schedule(static)
    for (long t = 0; t < tokens; t++)
      choose(logits + t * experts, correction, weights + t * top_k, chosen + t * top_k, experts, top_k, scoring,
             renormalize, scale, groups, kept, best);
  }
}

/* Sorts pairs by expert: those of experts [first, first + count) by these, all others behind. loads: [experts], counts
   what each of all experts gets. */
void group_pairs(const int64_t *chosen, long pairs, long first, long count, int32_t *order, int32_t *place, int32_t *ends,
                 int64_t *loads) {
  int32_t next[count + 1];
  memset(next, 0, sizeof next);
  for (long p = 0; p < pairs; p++) {
    const long e = chosen[p] - first;
    loads[chosen[p]]++;
    next[e >= 0 && e < count ? e : count]++;
  }
  for (long e = 0, total = 0; e <= count; e++) {
    const long own = next[e];
    next[e] = total;
    total += own;
    if (e < count) ends[e] = total;
  }
  for (long p = 0; p < pairs; p++) {
    const long e = chosen[p] - first;
    place[p] = next[e >= 0 && e < count ? e : count]++;
    order[place[p]] = p;
  }
}

/* out = g * sigmoid(alpha * g) * (u + 1) of rows [gate | up], g = min(gate, limit), u within limits. */
void clamped_swiglu(const element *gate_up, element *out, long rows, long width, float alpha, float limit, int threads) {
  const floats most = (floats){} + limit, least = -most;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width >= PARALLEL_ELEMENTS)
  for (long row = 0; row < rows; row++)
    for (long i = 0; i < width; i += LANES) {
      floats gate = load(gate_up + row * 2 * width + i), up = load(gate_up + row * 2 * width + width + i);
      gate = choose_lanes(gate > most, most, gate);
      up = choose_lanes(up > most, most, choose_lanes(up < least, least, up));
      store(out + row * width + i, gate / (1.0f + exponential(-alpha * gate)) * (up + 1.0f));
    }
}

/* out = base * sigmoid(gate), where they are given, + the outputs of a token's experts times their weights. here: the
   number of pairs that this rank has computed. */
void combine(const element *y, const float *weights, const int32_t *place, const int32_t *here, const element *base,
             const element *gate, element *out, long tokens, long hidden, long top_k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * hidden * top_k >= PARALLEL_ELEMENTS)
  for (long t = 0; t < tokens; t++) {
    const floats opened = (floats){} + (gate ? 1 / (1 + expf(-load_one(gate + t))) : 1);
    for (long i = 0; i < hidden; i += LANES) {
      floats sum = base ? load(base + t * hidden + i) * opened : (floats){};
      for (long k = 0; k < top_k; k++) {
        const long at = place[t * top_k + k];
        if (at < *here) sum += load(y + at * hidden + i) * weights[t * top_k + k];
      }
      store(out + t * hidden + i, sum);
    }
  }
}
