/* What the kernels of paged attention share: products of queries with keys, pairs of vectors of values, the softmax of a
   row of scores, and the merge of a context's parts. */
#include "cpu_stored.h"

#define LINE (64 / (int)sizeof(stored)) /* elements of a cache line */
#define PAIR (2 * LANES)

/* sum + a * b, rounded once where the CPU can. Compilers do so by themselves in some loops and not in others, and a query's
   bits must not depend on the loop. */
INLINE floats fused(floats sum, floats a, floats b) {
#if defined(SIXTEEN)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

/* A product of q and k: pairs of bf16 where the CPU multiplies them, floats elsewhere. */
#if ELEMENT == 1 && STORED == 0 && defined(SIXTEEN) && defined(__AVX512BF16__)
#define PAIRED
#define WIDE 32
typedef __m512i operand;
typedef element query_part;
INLINE operand load_query(const query_part *at) { return _mm512_loadu_si512(at); }
INLINE operand load_key(const stored *at, int left) {
  return left < WIDE ? _mm512_maskz_loadu_epi16((1u << left) - 1, at) : _mm512_loadu_si512(at);
}
INLINE floats multiply_add(floats sum, operand a, operand b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
INLINE void copy_query(query_part *to, const element *q, long dim, long padded) {
  memset(to + dim, 0, (padded - dim) * sizeof *to);
  memcpy(to, q, dim * sizeof *to);
}
#else
#define WIDE LANES
typedef floats operand;
typedef float query_part;
INLINE operand load_query(const query_part *at) { floats x; memcpy(&x, at, sizeof x); return x; }
INLINE operand load_key(const stored *at, int left) { return load_stored_some(at, left); }
INLINE floats multiply_add(floats sum, operand a, operand b) { return fused(sum, a, b); }
INLINE void copy_query(query_part *to, const element *q, long dim, long padded) {
  for (long i = 0; i < padded; i += LANES) {
    const floats x = i < dim ? load_some(q + i, dim - i) : (floats){};
    memcpy(to + i, &x, sizeof x);
  }
}
#endif

/* Two vectors, of which `left` elements exist, the rest zero. Of bf16 the even and the odd ones, split by a shift and a
   mask; `even_odd_in_order` restores the order in their sums. */
INLINE void load_even_odd(floats *value, const uint16_t *at, int left) {
  words pairs;
#ifdef MASKED
  pairs = (words)(left < PAIR ? _mm512_maskz_loadu_epi16((1u << left) - 1, at) : _mm512_loadu_si512(at));
#else
  if (left < PAIR) pairs = (words){};
  memcpy(&pairs, at, left < PAIR ? left * sizeof *at : sizeof pairs);
#endif
  value[0] = (floats)(pairs << 16);
  value[1] = (floats)(pairs & 0xffff0000u);
}
INLINE void even_odd_in_order(floats *sum, int vectors) {
  for (int i = 0; i + 1 < vectors; i += 2) {
    const floats even = sum[i], odd = sum[i + 1];
#if LANES == 8
    sum[i] = __builtin_shuffle(even, odd, (ints){0, 8, 1, 9, 2, 10, 3, 11});
    sum[i + 1] = __builtin_shuffle(even, odd, (ints){4, 12, 5, 13, 6, 14, 7, 15});
#else
    sum[i] = __builtin_shuffle(even, odd, (ints){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    sum[i + 1] = __builtin_shuffle(even, odd, (ints){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
  }
}

/* The same of what the cache has. One vector of bf16 is in order, as its sums are. */
#if STORED == 3 || (STORED == 0 && ELEMENT == 1)
INLINE void load_two(floats *value, const stored *at, int left) {
  if (left <= LANES) {
    value[0] = load_stored_some(at, left);
    value[1] = (floats){};
  } else {
    load_even_odd(value, at, left);
  }
}
INLINE void in_order(floats *sum, int vectors) { even_odd_in_order(sum, vectors); }
#else
INLINE void load_two(floats *value, const stored *at, int left) {
  value[0] = load_stored_some(at, left);
  value[1] = left > LANES ? load_stored_some(at + LANES, left - LANES) : (floats){};
}
INLINE void in_order(floats *sum, int vectors) { (void)sum, (void)vectors; }
#endif

/* The sum of each of four vectors' lanes. */
INLINE void sum_four(const floats *x, float *sums) {
#if LANES == 8
  const ints low = {0, 8, 2, 10, 4, 12, 6, 14}, first = {0, 1, 8, 9, 4, 5, 12, 13};
  const floats a = __builtin_shuffle(x[0], x[1], low) + __builtin_shuffle(x[0], x[1], low + 1);
  const floats b = __builtin_shuffle(x[2], x[3], low) + __builtin_shuffle(x[2], x[3], low + 1);
  floats c = __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + 2); /* four sums in each half */
  c += __builtin_shuffle(c, (ints){4, 5, 6, 7, 0, 1, 2, 3});
#else
  const ints low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
  const ints first = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const floats a = __builtin_shuffle(x[0], x[1], low) + __builtin_shuffle(x[0], x[1], low + 2);
  const floats b = __builtin_shuffle(x[2], x[3], low) + __builtin_shuffle(x[2], x[3], low + 2);
  floats c = __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + 2); /* four sums in each quarter */
  c += __builtin_shuffle(c, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  c += __builtin_shuffle(c, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
#endif
  memcpy(sums, &c, 4 * sizeof *sums);
}

INLINE long slot_of(const int32_t *blocks, long block_size, long position) {
  return blocks[position / block_size] * block_size + position % block_size;
}

/* Asks for what is read after this place, while this is computed. */
INLINE void prefetch(const stored *next, int elements) {
  for (int i = 0; i < elements; i += LINE) __builtin_prefetch(next + i, 0, 3);
}

/* Scores to weights, their maximum and their sum. count: of scores; length: with padding. */
INLINE void softmax_row(float *row, long count, long length, float *stats) {
  floats x, most = {}, weight = {};
  for (long j = count; j < length; j++) row[j] = -INFINITY;
  most -= INFINITY;
  for (long j = 0; j < length; j += LANES) {
    memcpy(&x, row + j, sizeof x);
    most = choose_lanes(x > most, x, most);
  }
  most = (floats){} + max_lanes(most);
  for (long j = 0; j < length; j += LANES) {
    memcpy(&x, row + j, sizeof x);
    x = exponential(x - most);
    memcpy(row + j, &x, sizeof x);
    weight += x;
  }
  stats[0] = most[0];
  stats[1] = sum_lanes(weight);
}

/* Adds up a head's sums over the parts of a context and returns their weight. part, size: the first part, and what lies
   between two; sums, stats: where a part has the head's sums of `dim` elements, and their maximum and weight; sink: its
   score, or null. */
INLINE float merge_parts(floats *sum, const float *part, long size, long parts, long sums, long stats, long dim,
                         const float *sink) {
  float most = sink ? *sink : -INFINITY;
  for (long t = 0; t < parts; t++) {
    const float m = part[t * size + stats];
    most = m > most ? m : most;
  }
  float weight = sink ? expf(*sink - most) : 0;
  memset(sum, 0, (dim + LANES - 1) / LANES * sizeof *sum);
  for (long t = 0; t < parts; t++, part += size) {
    const float factor = expf(part[stats] - most);
    weight += part[stats + 1] * factor;
    for (long i = 0; i < dim; i += LANES) {
      floats x;
      memcpy(&x, part + sums + i, sizeof x);
      sum[i / LANES] += x * factor;
    }
  }
  return weight;
}
