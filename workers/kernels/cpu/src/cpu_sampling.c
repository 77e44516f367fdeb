/* From logits to tokens, for CPUs: the best token of each row, and a draw from what min-p, top-k and top-p leave: the token
   whose exponent and noise together are the greatest. One thread works on a row, which stays in its cache. Nothing is
   sorted but samples of 128 values: a cut is found by partitions around two pivots of such a sample (Floyd and Rivest,
   "Expected time bounds for selection", 1975). See workers/kernels/sampling_ops.py for the definitions. Everything that
   decides is float32, rounded once and not fused, or a sum that is exact, so the twin in torch draws the same tokens. */
#include <omp.h>

#include "cpu_vector.h"

#include "cpu_gumbel.h"

#define SAMPLE 128   /* values from which pivots are chosen */
#define FEW 64       /* candidates among which a cut is searched one by one */
#define PARALLEL_ELEMENTS 16384

typedef double doubles __attribute__((vector_size(64)));

INLINE floats all_lanes(float x) { return (floats){} + x; }
INLINE floats load_floats(const float *at) { floats x; memcpy(&x, at, sizeof x); return x; }
INLINE void store_floats(float *at, floats x) { memcpy(at, &x, sizeof x); }

INLINE floats greater_of(floats x, floats y) { /* y where x is NaN */
#ifdef __AVX512F__
  return (floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return choose_lanes(x > y, x, y);
#endif
}

INLINE words lesser_of(words x, words y) {
#ifdef __AVX512F__
  return (words)_mm512_min_epu32((__m512i)x, (__m512i)y);
#else
  const words less = (words)(x < y);
  return (x & less) | (y & ~less);
#endif
}

INLINE int any_lane(ints mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  const longs m = (longs)mask;
  return ((m[0] | m[1]) | (m[2] | m[3]) | (m[4] | m[5]) | (m[6] | m[7])) != 0;
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

/* e^x as a multiple of 2^-34, for x from NO_WEIGHT to 0: sums of up to 2^19 of them are exact in float64. */
INLINE floats weight_of(floats x) {
  const floats shifter = all_lanes(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the lowest bits */
  const floats power = x * 1.44269504f, whole = power + shifter, f = power - (whole - shifter);
  floats p = f * 1.32647273e-3f + 9.67151279e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
  const floats w = (floats)((ints)p + ((ints)whole << 23));
  return choose_lanes((ints)(w >= 0x1p-11f), w, (w + 0x1p-11f) - 0x1p-11f);
}
#define NO_WEIGHT -25.0f /* an exponent whose weight is 0 */

/* A partition of values: how many there are, and their sum. */
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

/* Adds the values, none of which is negative, in any order: sums of weights are exact. */
static double sum_of(const float *from, long count) {
  doubles low = {}, high = {};
  long i = 0;
  for (; i + LANES <= count; i += LANES) add_lanes(&low, &high, load_floats(from + i));
  double sum = sum_doubles(low, high);
  for (; i < count; i++) sum += from[i];
  return sum;
}

/* Copies the values from low to high, both included, to `into`, which has room for 16 more; also says what lies above,
   if asked. Sums are made only if by_mass. */
INLINE part partition(const float *from, long count, float low, float high, float *into, part *above, int by_mass) {
  long inside = 0, num_above = 0, i = 0;
  double mass_above = 0;
#ifdef __AVX512F__
  const __m512 lows = _mm512_set1_ps(low), highs = _mm512_set1_ps(high);
  doubles up_low = {}, up_high = {};
  for (; i + LANES <= count; i += LANES) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __mmask16 up = _mm512_cmp_ps_mask(x, highs, _CMP_GT_OQ);
    const __mmask16 in = _mm512_mask_cmp_ps_mask(_mm512_knot(up), x, lows, _CMP_GE_OQ);
    if (above) { /* no branch by value: half of them would be guessed wrong */
      if (by_mass) add_lanes(&up_low, &up_high, (floats)_mm512_maskz_mov_ps(up, x));
      num_above += __builtin_popcount(up);
    }
    _mm512_storeu_ps(into + inside, _mm512_maskz_compress_ps(in, x));
    inside += __builtin_popcount(in);
  }
  mass_above = sum_doubles(up_low, up_high);
#endif
  for (; i < count; i++) {
    const float x = from[i];
    const int up = x > high, in = !up & (x >= low);
    into[inside] = x;
    inside += in;
    num_above += up;
    if (by_mass) mass_above += up ? x : 0.0f;
  }
  if (above) *above = (part){num_above, mass_above};
  return (part){inside, by_mass ? sum_of(into, inside) : 0.0};
}

/* Sorts at most SAMPLE values, the greatest first, by counting for each those before it. */
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
INLINE void choose_pivots(const float *from, long count, double spare, int by_mass, int one, float *low, float *high) {
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
INLINE float cut(const float *from, part all, double target, int by_mass, float *a, float *b) {
  double reached = 0; /* by weights above the candidates */
  int one = 0;
  while (all.count > FEW) {
    float low, high;
    choose_pivots(from, all.count, reached + (by_mass ? all.mass : all.count) - target, by_mass, one, &low, &high);
    float *into = from == a ? b : a;
    part above, inside = partition(from, all.count, low, high, into, &above, by_mass);
    const double up = by_mass ? above.mass : above.count, in = by_mass ? inside.mass : inside.count;
    const long before = all.count;
    if (above.count && reached + up >= target) {
      all = partition(from, all.count, nextafterf(high, INFINITY), INFINITY, into, NULL, by_mass);
    } else if (low == -INFINITY || reached + up + in >= target) {
      if (low == high) return low;
      all = inside;
      reached += up;
    } else {
      const long below = all.count - above.count - inside.count;
      if (below == 0) return low;
      all = partition(from, all.count, -INFINITY, nextafterf(low, -INFINITY), into, NULL, by_mass);
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

/* What a draw from a row is: exponents (x - best) * factor of its logits, and those kept are at least `lowest`. */
typedef struct {
  const float *logits;
  long vocab;
  float best, factor, lowest;
} draw;

INLINE floats exponents_of(const draw *d, floats x) { return (x - d->best) * d->factor; }

/* Up to 16 logits from id i on, and minus infinities behind the last one. */
INLINE floats some_logits(const draw *d, long i) {
  if (i + LANES <= d->vocab) return load_floats(d->logits + i);
  floats x = all_lanes(-INFINITY);
  if (i < d->vocab) memcpy(&x, d->logits + i, (d->vocab - i) * sizeof(float));
  return x;
}

/* The exponent of the k-th best logit. a, b: room for vocab + 16 values each. */
static float kth_exponent(const draw *d, long k, float *a, float *b) {
  const part all = {d->vocab, 0.0};
  return (cut(d->logits, all, k, 0, a, b) - d->best) * d->factor;
}

/* The weights of what is kept, without those that are 0, to `into`, which has room for 16 more. */
static part weigh(const draw *d, float *into) {
  part found = {0, 0.0};
  const floats least = all_lanes(fmaxf(d->lowest, NO_WEIGHT));
  doubles low = {}, high = {};
  for (long i = 0; i < d->vocab; i += LANES) {
    const floats x = exponents_of(d, some_logits(d, i));
    if (!any_lane((ints)(x >= least))) continue;
    const floats w = (floats)((ints)weight_of(x) & (ints)(x >= least));
    add_lanes(&low, &high, w);
#ifdef __AVX512F__
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)w, _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm512_storeu_ps(into + found.count, _mm512_maskz_compress_ps(some, (__m512)w));
    found.count += __builtin_popcount(some);
#else
    for (int k = 0; k < LANES; k++) {
      into[found.count] = w[k];
      found.count += w[k] > 0;
    }
#endif
  }
  found.mass = sum_doubles(low, high);
  return found;
}

/* The least exponent of those kept whose weight is at least `least`, which one has. */
static float exponent_of(const draw *d, float least) {
  const float half = 0x1.1p-35f, slack = 0.001f; /* more than the roundings of weights to multiples, and of exp */
  const float from = fmaxf(d->lowest, logf(least - half) - slack), to = logf(least + half) + slack;
  floats found = all_lanes(INFINITY);
  for (long i = 0; i < d->vocab; i += LANES) {
    const floats x = exponents_of(d, some_logits(d, i));
    const ints near = (ints)(x >= from) & (ints)(x <= to);
    if (any_lane(near)) found = choose_lanes(near & (ints)(weight_of(x) >= least) & (ints)(x < found), x, found);
  }
  return -max_lanes(-found);
}

/* The least exponent that min-p, then top-k, then top-p leave. a, b and c: room for vocab + 16 values each. */
float lowest_of(const float *logits, long vocab, float best, float factor, float lowest, long top_k, double top_p,
                float *a, float *b, float *c) {
  draw d = {logits, vocab, best, factor, lowest};
  if (top_k > 0 && top_k < vocab) d.lowest = fmaxf(lowest, kth_exponent(&d, top_k, a, b));
  if (top_p >= 1) return d.lowest;
  const part all = weigh(&d, c);
  return exponent_of(&d, cut(c, all, top_p * all.mass, 1, a, b));
}

/* The noise of ids from `first` on, a multiple of 64, for the tests. */
void gumbel_noise(uint64_t seed, uint32_t choice, uint32_t position, long first, long count, float *into) {
  for (long i = first; i < first + count; i += BLOCK) {
    words random[4];
    floats noise[4];
    random_words(i, (noise_key){seed, choice, position}, random);
    for (int w = 0; w < 4; w++) noise[w] = noise_of(random[w]);
    const long rest = first + count - i;
    memcpy(into + (i - first), noise, (rest < BLOCK ? rest : BLOCK) * sizeof(float));
  }
}

/* The best sum of exponent and noise so far, and its id. */
typedef struct {
  float score;
  long id;
} winner;

/* Compares with the ids from `first` on, given their 64 words. */
static void compare(const draw *d, long first, const words random[4], winner *best) {
  floats scores[4];
  for (int w = 0; w < 4; w++) {
    const floats x = exponents_of(d, some_logits(d, first + w * LANES));
    scores[w] = choose_lanes((ints)(x >= d->lowest), x + noise_of(random[w]), all_lanes(-INFINITY));
  }
  const float *score = (const float *)scores;
  for (int i = 0; i < BLOCK; i++)
    if (score[i] > best->score || (score[i] == best->score && first + i < best->id))
      *best = (winner){score[i], first + i};
}

/* The id whose exponent and noise together are the greatest, the lower one of two; `likely` is one that is kept. Most ids
   cannot win whatever their number is, and of the others most have too great a number: noise is at most -ln v, so only
   v <= e^(exponent - best score) can, which is compared as an integer below the next power of two. */
static long noisiest(const draw *d, noise_key key, long likely) {
  const float log2e = 1.44269504f, slack = 0.01f; /* more than the roundings of noise and sums */
  words random[4];
  winner best = {-INFINITY, d->vocab};
  random_words(likely / BLOCK * BLOCK, key, random);
  compare(d, likely / BLOCK * BLOCK, random, &best);
  const float per_logit = d->factor * log2e, lowest = d->lowest * log2e, floor = lowest - slack - 1e-5f * fabsf(lowest);
  for (long i = 0; i < d->vocab; i += BLOCK) {
    floats most = greater_of(greater_of(some_logits(d, i), some_logits(d, i + LANES)),
                             greater_of(some_logits(d, i + 2 * LANES), some_logits(d, i + 3 * LANES)));
    floats power = (most - d->best) * per_logit; /* of 2, of the weight */
    if (!any_lane((ints)(power >= fmaxf(floor, best.score * log2e - 33.0f - slack)))) continue;
    random_words(i, key, random);
    power += 32.0f + slack - best.score * log2e;
    power = choose_lanes(power > 0.0f, power, (floats){});
    power = choose_lanes(power < 31.0f, power, all_lanes(31.0f));
    const words limit = (((words){} + 2u) << (words)__builtin_convertvector(power, ints)) - 1u;
    const words fewest = lesser_of(lesser_of(random[0], random[1]), lesser_of(random[2], random[3]));
    if (any_lane((ints)(fewest <= limit))) compare(d, i, random, &best);
  }
  return best.id;
}

/* Draws a token for each given row of the logits. Rows whose best logit is not finite keep their ids. ids: the first of
   the best ones of each row. scratch: 3 * vocab + 48 floats for each thread. */
void draw_tokens(const float *logits, long stride, long vocab, const float *best, int64_t *ids, const int64_t *places,
                 long rows, const float *factor, const float *lowest, const int64_t *top_k, const double *top_p,
                 const uint64_t *seeds, const int64_t *choices, const int64_t *positions, float *scratch, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows * vocab >= PARALLEL_ELEMENTS)
  for (long r = 0; r < rows; r++) {
    const long place = places[r], room = vocab + LANES;
    if (!isfinite(best[place])) continue;
    float *a = scratch + omp_get_thread_num() * 3 * room;
    draw d = {logits + place * stride, vocab, best[place], factor[r], 0.0f};
    d.lowest = lowest_of(d.logits, vocab, d.best, d.factor, lowest[r], top_k[r], top_p[r], a, a + room, a + 2 * room);
    const noise_key key = {seeds[r], (uint32_t)choices[r], (uint32_t)positions[place]};
    ids[place] = noisiest(&d, key, ids[place]);
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
