/* From logits to tokens, for CPUs: the best token of each row, and a draw from weights cut by min-p, top-k and top-p.
   One thread works on a row, which stays in its cache. Nothing is sorted but samples of 128 weights: a cut is found by
   partitions around two pivots of such a sample (Floyd and Rivest, "Expected time bounds for selection", 1975). See
   workers/kernels/sampling_ops.py for the definitions. */
#include <omp.h>

#include "cpu_vector.h"

#define CHUNK 128    /* weights whose sum is one entry of the first level of a draw */
#define SAMPLE 128   /* weights from which pivots are chosen */
#define FEW 64       /* candidates among which a cut is searched one by one */
#define PARALLEL_ELEMENTS 16384

typedef double doubles __attribute__((vector_size(64)));

INLINE floats all_lanes(float x) { return (floats){} + x; }
INLINE floats load_floats(const float *at) { floats x; memcpy(&x, at, sizeof x); return x; }
INLINE void store_floats(float *at, floats x) { memcpy(at, &x, sizeof x); }

/* x where it is at least `least`, else 0. */
INLINE floats at_least(floats x, floats least) {
#ifdef __AVX512F__
  return (floats)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GE_OQ), (__m512)x);
#else
  return (floats)((ints)x & (ints)(x >= least));
#endif
}

INLINE floats greater_of(floats x, floats y) { /* y where x is NaN */
#ifdef __AVX512F__
  return (floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return choose_lanes(x > y, x, y);
#endif
}

INLINE int any_lane(ints mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  for (int i = 0; i < LANES; i++)
    if (mask[i]) return 1;
  return 0;
#endif
}

static float best_of(const float *row, long vocab) {
  floats most = all_lanes(-INFINITY), more = most;
  ints nan = {};
  long i = 0;
  for (; i + 2 * LANES <= vocab; i += 2 * LANES) {
    const floats x = load_floats(row + i), y = load_floats(row + i + LANES);
    nan |= (ints)(x != x) | (ints)(y != y);
    most = greater_of(x, most);
    more = greater_of(y, more);
  }
  float best = max_lanes(greater_of(more, most));
  for (; i < vocab; i++) {
    if (row[i] != row[i]) return NAN;
    best = row[i] > best ? row[i] : best;
  }
  return any_lane(nan) ? NAN : best;
}

static long first_of(const float *row, long vocab, float value) {
  long i = 0;
  for (; i + LANES <= vocab; i += LANES)
    if (any_lane((ints)(load_floats(row + i) == value))) break;
  for (; i < vocab; i++)
    if (row[i] == value) return i;
  return 0;
}

/* The greatest logit of each row and its first id; NaN, and some id, for a row that has NaN. */
void best_tokens(const float *logits, long stride, long rows, long vocab, float *best, int64_t *ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * vocab >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    best[r] = best_of(logits + r * stride, vocab);
    ids[r] = first_of(logits + r * stride, vocab, best[r]);
  }
}

/* Logits to weights exp((x - best) * factor) in place, 0 below min_p and where the exponent is below `lowest`; sums of
   chunks into `sums`. */
static void weigh(float *row, long vocab, float best, float factor, float min_p, float lowest, double *sums) {
  const floats least = all_lanes(min_p);
  for (long begin = 0; begin < vocab; begin += CHUNK) {
    const long end = begin + CHUNK < vocab ? begin + CHUNK : vocab;
    floats sum = {};
    long i = begin;
    for (; i + LANES <= end; i += LANES) {
      const floats x = (load_floats(row + i) - best) * factor;
      floats w = {};
      if (any_lane((ints)(x >= lowest)))
        w = (floats)((ints)at_least(exponential(x), least) & (ints)(x >= lowest));
      store_floats(row + i, w);
      sum += w;
    }
    float total = sum_lanes(sum);
    for (; i < end; i++) {
      const float x = (row[i] - best) * factor;
      const float w = x >= lowest ? exponential(all_lanes(x))[0] : 0.0f;
      row[i] = w >= min_p ? w : 0.0f;
      total += row[i];
    }
    sums[begin / CHUNK] = total;
  }
}

/* Sums of chunks of the weights that are at least `least`. */
static void sum_chunks(const float *row, long vocab, float least, double *sums) {
  const floats floor = all_lanes(least);
  for (long begin = 0; begin < vocab; begin += CHUNK) {
    const long end = begin + CHUNK < vocab ? begin + CHUNK : vocab;
    floats sum = {};
    long i = begin;
    for (; i + LANES <= end; i += LANES) sum += at_least(load_floats(row + i), floor);
    float total = sum_lanes(sum);
    for (; i < end; i++) total += row[i] >= least ? row[i] : 0.0f;
    sums[begin / CHUNK] = total;
  }
}

/* A partition of weights: how many there are, and their sum. */
typedef struct {
  long count;
  double mass;
} part;

INLINE void add_lanes(doubles *low, doubles *high, floats x) {
#ifdef __AVX512F__
  *low += (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
  *high += (doubles)_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
#else
  for (int i = 0; i < 8; i++) (*low)[i] += x[i], (*high)[i] += x[i + 8];
#endif
}

INLINE double sum_doubles(doubles low, doubles high) {
  low += high;
  return ((low[0] + low[4]) + (low[2] + low[6])) + ((low[1] + low[5]) + (low[3] + low[7]));
}

/* Copies the weights from low to high, both included, to `into`, which has room for 16 more; also says what lies above.
*/
static part partition(const float *from, long count, float low, float high, float *into, part *above) {
  part inside = {0, 0.0};
  *above = inside;
  long i = 0;
#ifdef __AVX512F__
  const __m512 lows = _mm512_set1_ps(low), highs = _mm512_set1_ps(high);
  long num_above = 0;
  doubles in_low = {}, in_high = {}, up_low = {}, up_high = {};
  while (i + LANES <= count) {
    const long end = i + CHUNK < count ? i + CHUNK : count;
    floats in_sum = {}, up_sum = {};
    for (; i + LANES <= end; i += LANES) {
      const __m512 x = _mm512_loadu_ps(from + i);
      const __mmask16 up = _mm512_cmp_ps_mask(x, highs, _CMP_GT_OQ);
      const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_knot(up), x, lows, _CMP_GE_OQ);
      up_sum += (floats)_mm512_maskz_mov_ps(up, x); /* no branch: half of them would be guessed wrong */
      in_sum += (floats)_mm512_maskz_mov_ps(in, x);
      _mm512_storeu_ps(into + inside.count, _mm512_maskz_compress_ps(in, x));
      inside.count += __builtin_popcount(in);
      num_above += __builtin_popcount(up);
    }
    add_lanes(&in_low, &in_high, in_sum);
    add_lanes(&up_low, &up_high, up_sum);
  }
  inside.mass = sum_doubles(in_low, in_high);
  above->mass = sum_doubles(up_low, up_high);
  above->count = num_above;
#endif
  for (; i < count; i++) {
    const float x = from[i];
    const int up = x > high, in = !up & (x >= low);
    above->count += up;
    above->mass += up ? x : 0.0f;
    into[inside.count] = x;
    inside.count += in;
    inside.mass += in ? x : 0.0f;
  }
  return inside;
}

/* Sorts at most SAMPLE weights, the greatest first, by counting for each those before it. */
static void sort_few(const float *from, long count, float *sorted) {
  for (long i = 0; i < count; i++) {
    int rank = 0;
    for (long j = 0; j < i; j++) rank += from[j] >= from[i];
    for (long j = i + 1; j < count; j++) rank += from[j] > from[i];
    sorted[rank] = from[i];
  }
}

/* Two values between which the cut probably lies; an infinity where there is none on that side. `spare`: what may
   lie below the cut. Equal pivots when `one`, so that every partition makes progress. */
static void choose_pivots(const float *from, long count, double spare, int by_mass, int one, float *low, float *high) {
  float taken[SAMPLE], sorted[SAMPLE];
  for (long i = 0; i < SAMPLE; i++) taken[i] = from[i * count / SAMPLE];
  sort_few(taken, SAMPLE, sorted);
  long at = SAMPLE - 1;
  double below = 0;
  for (; at >= 0; at--) {
    below += (by_mass ? sorted[at] : 1.0) * count / SAMPLE;
    if (below > spare) break;
  }
  if (one) {
    *low = *high = sorted[at < 0 ? 0 : at];
    return;
  }
  const long place = at < 0 ? 0 : at;
  const long margin = 2 + (long)(2 * sqrt((double)place * (SAMPLE - place) / SAMPLE));
  *high = at - margin >= 0 ? sorted[at - margin] : INFINITY;
  *low = at + margin < SAMPLE ? sorted[at + margin] : -INFINITY;
}

/* The greatest value such that those of at least this value reach `target`, in number or in mass; the least value if they
   never do. a and b: room for `count` + 16 values each. all: the count and mass of `from`. */
static float cut(const float *from, part all, double target, int by_mass, float *a, float *b) {
  double reached = 0; /* by weights above the candidates */
  int one = 0;
  while (all.count > FEW) {
    float low, high;
    choose_pivots(from, all.count, reached + (by_mass ? all.mass : all.count) - target, by_mass, one, &low, &high);
    float *into = from == a ? b : a;
    part above, inside = partition(from, all.count, low, high, into, &above);
    const double up = by_mass ? above.mass : above.count, in = by_mass ? inside.mass : inside.count;
    const long before = all.count;
    part ignored;
    if (above.count && reached + up >= target) {
      all = partition(from, all.count, nextafterf(high, INFINITY), INFINITY, into, &ignored);
    } else if (low == -INFINITY || reached + up + in >= target) {
      if (low == high) return low;
      all = inside;
      reached += up;
    } else {
      const long below = all.count - above.count - inside.count;
      if (below == 0) return low;
      all = partition(from, all.count, -INFINITY, nextafterf(low, -INFINITY), into, &ignored);
      reached += up + in;
    }
    from = into;
    one = all.count > before / 2;
  }
  float sorted[FEW];
  sort_few(from, all.count, sorted);
  for (long i = 0; i < all.count; i++) {
    reached += by_mass ? sorted[i] : 1.0;
    if (reached >= target) return sorted[i];
  }
  return sorted[all.count - 1];
}

/* The least weight that top-k, then top-p leave, 0 where both keep all. sparse: many weights are 0. total: of all
   weights. a, b and c: room for vocab + 16 weights each. */
float floor_of(const float *row, long vocab, int sparse, long top_k, double top_p, double total, float *a, float *b,
               float *c) {
  part all = {vocab, total}, ignored;
  float least = 0.0f;
  if (sparse) {
    all = partition(row, vocab, 0x1p-149f, INFINITY, c, &ignored);
    row = c;
  }
  if (top_k > 0 && top_k < all.count) least = cut(row, all, top_k, 0, a, b);
  if (top_p >= 1) return least;
  if (least > 0) {
    all = partition(row, all.count, least, INFINITY, a, &ignored);
    row = a;
  }
  const float edge = cut(row, all, top_p * all.mass, 1, a, b);
  return edge > least ? edge : least;
}

/* An exponent below which no weight can be kept. Found among the logits, since most weights then need no exp. */
static float lowest_exponent(const float *row, long vocab, float best, float factor, float min_p, long top_k, float *a,
                             float *b) {
  const float slack = 0.001f; /* more than the rounding of exp */
  float lowest = -87.0f;
  if (min_p > 0) lowest = fmaxf(lowest, logf(min_p) - slack);
  if (top_k > 0 && top_k < vocab) {
    const part all = {vocab, 0.0};
    lowest = fmaxf(lowest, (cut(row, all, top_k, 0, a, b) - best) * factor - slack);
  }
  return lowest;
}

/* The first id whose cumulative weight, of weights of at least `least`, exceeds u times their sum. */
static long draw_one(const float *row, long vocab, float least, double u, const double *sums) {
  const long chunks = (vocab + CHUNK - 1) / CHUNK;
  double total = 0, before = 0;
  for (long c = 0; c < chunks; c++) total += sums[c];
  double target = u * total;
  if (target > total * (1 - 0x1p-52)) target = total * (1 - 0x1p-52);
  long chunk = 0;
  for (; chunk < chunks - 1 && before + sums[chunk] <= target; chunk++) before += sums[chunk];
  const long end = (chunk + 1) * CHUNK < vocab ? (chunk + 1) * CHUNK : vocab;
  long last = chunk * CHUNK;
  double reached = before;
  for (long i = chunk * CHUNK; i < end; i++) {
    if (row[i] <= 0 || row[i] < least) continue;
    last = i; /* rounding between the levels must not leave the chunk */
    reached += row[i];
    if (reached > target) break;
  }
  return last;
}

/* Draws a token for each given row of the logits, which become weights. Rows whose best logit is not finite keep their
   ids. scratch: 4 * vocab + 80 floats for each thread. */
void draw_tokens(float *logits, long stride, long vocab, const float *best, int64_t *ids, const int64_t *places,
                 long rows, const float *temperature, const int64_t *top_k, const double *top_p, const float *min_p,
                 const double *uniforms, float *scratch, int threads) {
  const long room = (4 * vocab + 79) / 16 * 16;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * vocab >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    const long place = places[r];
    if (!isfinite(best[place])) continue;
    float *row = logits + place * stride;
    double *sums = (double *)(scratch + omp_get_thread_num() * room);
    float *a = (float *)sums + vocab + 16, *b = a + vocab + 16, *c = b + vocab + 16;
    const float factor = 1.0f / temperature[r];
    const float lowest = lowest_exponent(row, vocab, best[place], factor, min_p[r], top_k[r], a, b);
    weigh(row, vocab, best[place], factor, min_p[r], lowest, sums);
    double total = 0;
    for (long c = 0; c < (vocab + CHUNK - 1) / CHUNK; c++) total += sums[c];
    const float least = floor_of(row, vocab, lowest > -87.0f, top_k[r], top_p[r], total, a, b, c);
    if (least > 0) sum_chunks(row, vocab, least, sums);
    ids[place] = draw_one(row, vocab, least, uniforms[r], sums);
  }
}

/* Makes minus infinity of the logits whose bits are 0, in the rows `places`. A row of bits has `words` words. */
void keep_tokens(float *logits, long stride, long vocab, const int64_t *places, long rows, const uint32_t *bits,
                 long words, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * vocab >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    float *row = logits + places[r] * stride;
    const uint32_t *kept = bits + r * words;
    long i = 0;
    for (; i + 32 <= vocab; i += 32) {
      const uint32_t word = kept[i / 32];
      if (word == 0xffffffffu) continue;
      for (long k = 0; k < 32; k++) row[i + k] = word >> k & 1 ? row[i + k] : -INFINITY;
    }
    for (; i < vocab; i++)
      if (!(kept[i / 32] >> (i % 32) & 1)) row[i] = -INFINITY;
  }
}
