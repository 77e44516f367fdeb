/* Paged attention of rows with one query each, for CPUs. See cpu_decode_attention.py for shapes and meaning. */
#include <omp.h>

#include "cpu_stored.h"

#define MAX_DIM 256
#define MAX_TILE 4
#define SPAN 4 /* tokens that all heads read before the next ones: they are contiguous, so the reads stream */
#define LINE (64 / (int)sizeof(stored)) /* elements of a cache line */

/* A product of q and k: pairs of bf16 where the CPU multiplies them, floats elsewhere. `left`: elements to the end. */
#if ELEMENT == 1 && STORED == 0 && defined(__AVX512BF16__)
#define WIDE 32
typedef __m512i operand;
INLINE operand load_query(const element *at, int left) {
  return left < WIDE ? _mm512_maskz_loadu_epi16(0xffff, at) : _mm512_loadu_si512(at);
}
INLINE operand load_key(const stored *at, int left) { return load_query(at, left); }
INLINE floats multiply_add(floats sum, operand a, operand b) {
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
#define WIDE LANES
typedef floats operand;
INLINE operand load_query(const element *at, int left) { return (void)left, load(at); }
INLINE operand load_key(const stored *at, int left) { return (void)left, load_stored(at); }
INLINE floats multiply_add(floats sum, operand a, operand b) { return sum + a * b; }
#endif

/* Two vectors of values. For bf16 the even and the odd ones, split by a shift and a mask; `in_order` restores the
   order in the sums. */
#if STORED == 3 || (STORED == 0 && ELEMENT == 1)
INLINE void load_two(floats *value, const stored *at, int vectors) {
  if (vectors == 1) {
    value[0] = load_bf16(at);
    return;
  }
  words pairs;
  memcpy(&pairs, at, sizeof pairs);
  value[0] = (floats)(pairs << 16);
  value[1] = (floats)(pairs & 0xffff0000u);
}
INLINE void in_order(floats *sum, int vectors) {
  for (int i = 0; i + 1 < vectors; i += 2) {
    const floats even = sum[i], odd = sum[i + 1];
    sum[i] = __builtin_shuffle(even, odd, (ints){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    sum[i + 1] = __builtin_shuffle(even, odd, (ints){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
  }
}
#else
INLINE void load_two(floats *value, const stored *at, int vectors) {
  value[0] = load_stored(at);
  if (vectors > 1) value[1] = load_stored(at + LANES);
}
INLINE void in_order(floats *sum, int vectors) { (void)sum, (void)vectors; }
#endif

/* The sum of each of four vectors' lanes. */
INLINE void sum_four(const floats *x, float *sums) {
  const ints low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
  const ints first = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  const floats a = __builtin_shuffle(x[0], x[1], low) + __builtin_shuffle(x[0], x[1], low + 2);
  const floats b = __builtin_shuffle(x[2], x[3], low) + __builtin_shuffle(x[2], x[3], low + 2);
  floats c = __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + 2); /* four sums in each quarter */
  c += __builtin_shuffle(c, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  c += __builtin_shuffle(c, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  memcpy(sums, &c, 4 * sizeof *sums);
}

typedef struct {
  const stored *keys, *values;
  const float *key_scales, *value_scales; /* of each token and KV head, where SCALED */
} cache;

INLINE long slot_of(const int32_t *blocks, long block_size, long position) {
  return blocks[position / block_size] * block_size + position % block_size;
}
/* The end of the span that starts here: within one block. */
INLINE long span_end(long position, long last, long block_size) {
  const long block_end = position - position % block_size + block_size;
  const long stop = position + SPAN < block_end ? position + SPAN : block_end;
  return stop < last ? stop : last;
}

/* One partition of one row's context, all heads, G query heads of one KV head at a time.
   partial: per query head D sums, then the maximum, then the weight. */
INLINE void attend_partition(const element *q, const cache *kv, float *partial, float *scores, const int32_t *blocks,
                             long first, long last, long heads, long kv_heads, const int D, const int G,
                             long block_size, float scale) {
  const int V = D / LANES, O = (D + WIDE - 1) / WIDE, J = MAX_TILE / G; /* J tokens make four scores or nearly */
  const long tiles = heads / kv_heads / G;
  const long token = kv_heads * D;
  const long length = (last - first + LANES - 1) / LANES * LANES; /* of a head's scores, padded */
  for (long position = first; position < last;) {
    const long stop = span_end(position, last, block_size), slot = slot_of(blocks, block_size, position);
    const stored *from = kv->keys + slot * token;
    const stored *next = stop < last ? kv->keys + slot_of(blocks, block_size, stop) * token
                                     : kv->values + slot_of(blocks, block_size, first) * token;
    for (long h = 0; h < kv_heads * tiles; h++) {
      operand query[MAX_TILE * MAX_DIM / LANES];
      UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < O; i++) query[g * O + i] = load_query(q + (h * G + g) * D + i * WIDE, D - i * WIDE);
      float *score = scores + h * G * length + position - first;
      const long count = stop - position;
      for (long j = 0; j < count; j += J) {
        floats dot[4] = {};
        UNROLLED for (int k = 0; k < J; k++) {
          const long offset = (j + k < count ? j + k : count - 1) * token + h / tiles * D;
          for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 3);
          UNROLLED for (int i = 0; i < O; i++) {
            const operand key = load_key(from + offset + i * WIDE, D - i * WIDE);
            UNROLLED for (int g = 0; g < G; g++) dot[k * G + g] = multiply_add(dot[k * G + g], query[g * O + i], key);
          }
        }
        float sums[4];
        sum_four(dot, sums);
        UNROLLED for (int k = 0; k < J; k++) {
          const long at = j + k < count ? j + k : count - 1;
          const float factor = SCALED ? scale * UNIT * kv->key_scales[(slot + at) * kv_heads + h / tiles] : scale;
          UNROLLED for (int g = 0; g < G; g++) score[g * length + at] = sums[k * G + g] * factor;
        }
      }
    }
    position = stop;
  }
  for (long n = 0; n < heads; n++) {
    float *row = scores + n * length, *mine = partial + n * (D + 2);
    for (long j = last - first; j < length; j++) row[j] = -INFINITY;
    floats x, most = {}, weight = {};
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
    memset(mine, 0, D * sizeof(float));
    mine[D] = most[0];
    mine[D + 1] = sum_lanes(weight);
  }
  for (long position = first; position < last;) {
    const long stop = span_end(position, last, block_size), slot = slot_of(blocks, block_size, position);
    const stored *from = kv->values + slot * token;
    const stored *next = stop < last ? kv->values + slot_of(blocks, block_size, stop) * token : from;
    for (long h = 0; h < kv_heads * tiles; h++) {
      const float *score = scores + h * G * length + position - first;
      float *mine = partial + h * G * (D + 2);
      floats sum[MAX_TILE * MAX_DIM / LANES];
      UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < V; i++) memcpy(sum + g * V + i, mine + g * (D + 2) + i * LANES, sizeof *sum);
      for (long j = 0; j < stop - position; j++) {
        const long offset = j * token + h / tiles * D;
        for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 3);
        const float factor = SCALED ? UNIT * kv->value_scales[(slot + j) * kv_heads + h / tiles] : 1.0f;
        UNROLLED for (int i = 0; i < V; i += 2) {
          floats value[2] = {};
          load_two(value, from + offset + i * LANES, V - i);
          UNROLLED for (int g = 0; g < G; g++) {
            sum[g * V + i] += score[g * length + j] * factor * value[0];
            if (i + 1 < V) sum[g * V + i + 1] += score[g * length + j] * factor * value[1];
          }
        }
      }
      UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < V; i++) memcpy(mine + g * (D + 2) + i * LANES, sum + g * V + i, sizeof *sum);
    }
    position = stop;
  }
}

typedef void partition_function(const element *, const cache *, float *, float *, const int32_t *, long, long, long,
                                long, int, long, float);

/* Constants for the shapes in use, so that sums stay in registers. */
#define FIXED(name, dim, group)                                                                                 \
  static void name##_##group(const element *q, const cache *kv, float *p, float *s, const int32_t *b, long f, long l, \
                             long n, long m, int d, long z, float c) {                                          \
    (void)d;                                                                                                    \
    attend_partition(q, kv, p, s, b, f, l, n, m, dim, group, z, c);                                             \
  }
#define FIXED_DIM(name, dim) FIXED(name, dim, 1) FIXED(name, dim, 2) FIXED(name, dim, 3) FIXED(name, dim, 4)
FIXED_DIM(attend_64, 64)
FIXED_DIM(attend_128, 128)
FIXED_DIM(attend_any, d)

#define CHOOSE(name) (tile == 1 ? name##_1 : tile == 2 ? name##_2 : tile == 3 ? name##_3 : name##_4)
static partition_function *choose(long dim, long group) {
  const int tile = group % 4 == 0 ? 4 : group % 3 == 0 ? 3 : group % 2 == 0 ? 2 : 1;
  return dim == 64 ? CHOOSE(attend_64) : dim == 128 ? CHOOSE(attend_128) : CHOOSE(attend_any);
}

void decode_attention(const element *q, long q_stride, const stored *keys, const stored *values,
                      const float *key_scales, const float *value_scales, element *out, const int32_t *table,
                      long table_stride, const int32_t *tasks, long num_tasks, const int32_t *rows, long num_rows,
                      float *partials, float *scores, long scores_stride, long heads, long kv_heads, long dim,
                      long block_size, float scale, int threads) {
  const cache kv = {keys, values, key_scales, value_scales};
  partition_function *attend = choose(dim, heads / kv_heads);
  const long partial_size = heads * (dim + 2);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (long t = 0; t < num_tasks; t++) {
      const int32_t *task = tasks + 4 * t; /* row of the table, token, first position, last position + 1 */
      attend(q + task[1] * q_stride, &kv, partials + t * partial_size, scores + omp_get_thread_num() * scores_stride,
             table + task[0] * table_stride, task[2], task[3], heads, kv_heads, dim, block_size, scale);
    }
#pragma omp for schedule(static) collapse(2)
    for (long r = 0; r < num_rows; r++)
      for (long n = 0; n < heads; n++) {
        const int32_t *row = rows + 3 * r; /* token, first task, last task + 1 */
        float most = -INFINITY, weight = 0;
        floats sum[MAX_DIM / LANES];
        memset(sum, 0, sizeof sum);
        for (long t = row[1]; t < row[2]; t++) {
          const float m = partials[t * partial_size + n * (dim + 2) + dim];
          most = m > most ? m : most;
        }
        for (long t = row[1]; t < row[2]; t++) {
          const float *part = partials + t * partial_size + n * (dim + 2);
          const float factor = expf(part[dim] - most);
          weight += part[dim + 1] * factor;
          for (long i = 0; i < dim / LANES; i++) {
            floats x;
            memcpy(&x, part + i * LANES, sizeof x);
            sum[i] += x * factor;
          }
        }
        in_order(sum, dim / LANES);
        for (long i = 0; i < dim / LANES; i++) store(out + (row[0] * heads + n) * dim + i * LANES, sum[i] / weight);
      }
  }
}
