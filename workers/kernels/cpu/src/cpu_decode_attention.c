/* Paged attention of rows with few queries each, for CPUs. See cpu_decode_attention.py for shapes and meaning.
   HEAD_DIM: elements of a head, so that loops over them are unrolled; 0 for any number. */
#include <omp.h>

#ifndef __AVX512F__
#define LANES 8
#endif
#include "cpu_attention.h"

#define MAX_DIM 256
#define MAX_TILE 4
#define SPAN (LANES == 8 ? 16 : 4) /* tokens that all heads read before the next ones: contiguous, so the reads stream */

/* What all tasks of a call share. padded: a head's elements in scratch memory. slopes, sinks: of query heads, or null;
   softcap: 0 for none. */
typedef struct {
  const stored *keys, *values;
  const float *key_scales, *value_scales; /* of each token and KV head, where SCALED */
  long heads, kv_heads, dim, padded, block_size, window; /* window: 0 for none */
  float scale, softcap;
  const float *slopes, *sinks;
} work;

/* Tokens of one block that are read together. */
typedef struct {
  const stored *from, *next; /* the first token's first head; what is read after these tokens */
  const float *scales;
  long count, token; /* elements of one token */
} span;

/* The end of the span that starts here: within one block. */
INLINE long span_end(long position, long last, long block_size) {
  const long block_end = position - position % block_size + block_size;
  const long stop = position + SPAN < block_end ? position + SPAN : block_end;
  return stop < last ? stop : last;
}

/* Adds to the products of J tokens' keys with G heads' queries those of `left` elements from element i on; query: there;
   P: elements of a query. */
INLINE void multiply_vectors(floats *dot, const query_part *query, const stored *const *key, int i, int left,
                             const int J, const int P, const int G) {
  UNROLLED for (int k = 0; k < J; k++) {
    const operand x = load_key(key[k] + i, left);
    UNROLLED for (int g = 0; g < G; g++) dot[k * G + g] = multiply_add(dot[k * G + g], load_query(query + g * P), x);
  }
}

/* Scores of a span's tokens, of G query heads of D elements that share KV head h. */
INLINE void span_scores(const work *w, const span *s, long h, const query_part *query, float *score, long length,
                        const int D, const int G) {
  const int J = G > 1 ? 2 : 4; /* tokens at once: enough sums that none waits for another */
  const int P = (D + PAIR - 1) / PAIR * PAIR, whole = D - D % WIDE;
  for (long j = 0; j < s->count; j += J) {
    floats dot[8] = {};
    const stored *key[4];
    UNROLLED for (int k = 0; k < J; k++) {
      const long offset = (j + k < s->count ? j + k : s->count - 1) * s->token + h * D;
      key[k] = s->from + offset;
      prefetch(s->next + offset, D);
    }
    if (__builtin_constant_p(D))
      UNROLLED for (int i = 0; i < whole; i += WIDE) multiply_vectors(dot, query + i, key, i, WIDE, J, P, G);
    else
      for (int i = 0; i < whole; i += WIDE) multiply_vectors(dot, query + i, key, i, WIDE, J, P, G);
    if (whole < D) multiply_vectors(dot, query + whole, key, whole, D - whole, J, P, G);
    float sums[8];
    sum_four(dot, sums);
    if (G * J > 4) sum_four(dot + 4, sums + 4);
    UNROLLED for (int k = 0; k < J; k++) {
      const long at = j + k < s->count ? j + k : s->count - 1;
      const float factor = SCALED ? w->scale * UNIT * s->scales[at * w->kv_heads + h] : w->scale;
      UNROLLED for (int g = 0; g < G; g++) score[g * length + at] = sums[k * G + g] * factor;
    }
  }
}

/* Adds two vectors of a token's values, of which `left` elements exist, to the sums of G heads. */
INLINE void add_token(floats sum[][2], const stored *value, const stored *next, const float *weight, const int left,
                      const int G) {
  floats x[2];
  load_two(x, value, left);
  prefetch(next, left);
  UNROLLED for (int g = 0; g < G; g++) {
    const floats factor = (floats){} + weight[g];
    sum[g][0] = fused(sum[g][0], factor, x[0]);
    if (left > LANES) sum[g][1] = fused(sum[g][1], factor, x[1]);
  }
}

/* Adds two vectors of `count` tokens' values, weighed, to the sums of G heads. */
INLINE void add_two(float *sums, const stored *value, const stored *next, long token, const float *weight,
                    const long count, const int P, const int left, const int G) {
  floats sum[MAX_TILE][2];
  UNROLLED for (int g = 0; g < G; g++) memcpy(sum[g], sums + g * P, sizeof sum[g]);
  if (__builtin_constant_p(count))
    UNROLLED for (long j = 0; j < count; j++) add_token(sum, value + j * token, next + j * token, weight + j * G, left, G);
  else
    for (long j = 0; j < count; j++) add_token(sum, value + j * token, next + j * token, weight + j * G, left, G);
  UNROLLED for (int g = 0; g < G; g++) memcpy(sums + g * P, sum[g], sizeof sum[g]);
}

INLINE void span_values(const work *w, const span *s, long h, const float *score, long length, float *sums,
                        const int D, const int G) {
  const int P = (D + PAIR - 1) / PAIR * PAIR, whole = D - D % PAIR, left = D - whole;
  float weight[SPAN * MAX_TILE];
  for (long j = 0; j < s->count; j++) {
    const float factor = SCALED ? UNIT * s->scales[j * w->kv_heads + h] : 1.0f;
    UNROLLED for (int g = 0; g < G; g++) weight[j * G + g] = score[g * length + j] * factor;
  }
  const stored *value = s->from + h * D, *next = s->next + h * D;
  if (__builtin_constant_p(D) && D % PAIR == 0 && G <= 2) { /* all sums stay in registers */
    floats sum[2][128 / LANES];
    UNROLLED for (int g = 0; g < G; g++)
      UNROLLED for (int i = 0; i < D / LANES; i++) memcpy(&sum[g][i], sums + g * P + i * LANES, sizeof(floats));
    for (long j = 0; j < s->count; j++) {
      prefetch(next + j * s->token, D);
      UNROLLED for (int i = 0; i < D / LANES; i += 2) {
        floats x[2];
        load_two(x, value + j * s->token + i * LANES, PAIR);
        UNROLLED for (int g = 0; g < G; g++) {
          const floats factor = (floats){} + weight[j * G + g];
          sum[g][i] = fused(sum[g][i], factor, x[0]);
          sum[g][i + 1] = fused(sum[g][i + 1], factor, x[1]);
        }
      }
    }
    UNROLLED for (int g = 0; g < G; g++)
      UNROLLED for (int i = 0; i < D / LANES; i++) memcpy(sums + g * P + i * LANES, &sum[g][i], sizeof(floats));
    return;
  }
  for (int i = 0; i < whole; i += PAIR)
    if (s->count == SPAN)
      add_two(sums + i, value + i, next + i, s->token, weight, SPAN, P, PAIR, G);
    else
      add_two(sums + i, value + i, next + i, s->token, weight, s->count, P, PAIR, G);
  if (left == LANES)
    add_two(sums + whole, value + whole, next + whole, s->token, weight, s->count, P, LANES, G);
  else if (left)
    add_two(sums + whole, value + whole, next + whole, s->token, weight, s->count, P, left, G);
}

/* A head's scores to weights. first: the position of the first score; query: of the query; count: of scores. */
INLINE void softmax_head(const work *w, float *row, long n, long first, long query, long count, float *stats) {
  const long length = (count + LANES - 1) / LANES * LANES;
  if (w->softcap > 0 || w->slopes) {
    const floats lane = {
        0, 1, 2, 3, 4, 5, 6, 7,
#if LANES == 16
        8, 9, 10, 11, 12, 13, 14, 15,
#endif
    };
    const float slope = w->slopes ? w->slopes[n] : 0;
    for (long j = 0; j < length; j += LANES) {
      floats x;
      memcpy(&x, row + j, sizeof x);
      if (w->softcap > 0) x = capped(x, w->softcap);
      x += slope * (lane + (float)(first + j - query));
      memcpy(row + j, &x, sizeof x);
    }
  }
  softmax_row(row, count, length, stats);
}

#define TILES(call)              \
  switch (tile) {                \
    case 1: call(1); break;      \
    case 2: call(2); break;      \
    case 3: call(3); break;      \
    default: call(4);            \
  }

/* One partition of one row's context, for all heads of `queries` queries of that row, one behind the other. The vectors of
   the queries and heads that share KV head h are h * group * queries + i, i of query i / group and of its i % group-th
   head. first, last: what any of them sees, each up to its own position. */
typedef struct {
  const int32_t *blocks;
  long first, last, position, queries; /* position: of the first query */
} part;

INLINE long seen_from(const work *w, const part *p, long query) {
  const long begin = w->window ? p->position + query + 1 - w->window : 0;
  return begin > p->first ? begin : p->first;
}
INLINE long seen_until(const part *p, long query) {
  return p->position + query + 1 < p->last ? p->position + query + 1 : p->last;
}
INLINE long vector_of(const work *w, long queries, long query, long n) {
  const long group = w->heads / w->kv_heads;
  return n / group * group * queries + query * group + n % group;
}

/* Tokens position to stop of keys or values, within a block; next: what is read after them. */
INLINE span span_of(const work *w, const part *p, const stored *from, const float *scales, long position, long stop,
                    const stored *next) {
  const long slot = slot_of(p->blocks, w->block_size, position), token = w->kv_heads * w->dim;
  return (span){from + slot * token, next, scales + (SCALED ? slot * w->kv_heads : 0), stop - position, token};
}

static void part_scores(const work *w, const part *p, const query_part *query, float *scores, long length) {
  const int D = HEAD_DIM ? HEAD_DIM : w->dim;
  const long token = w->kv_heads * w->dim, vectors = w->heads / w->kv_heads * p->queries;
  for (long position = p->first, stop; position < p->last; position = stop) {
    stop = span_end(position, p->last, w->block_size);
    const stored *next = stop < p->last ? w->keys + slot_of(p->blocks, w->block_size, stop) * token
                                        : w->values + slot_of(p->blocks, w->block_size, p->first) * token;
    const span s = span_of(w, p, w->keys, w->key_scales, position, stop, next);
    for (long h = 0; h < w->kv_heads; h++)
      for (long n = h * vectors; n < (h + 1) * vectors; n += MAX_TILE) {
        const long tile = (h + 1) * vectors - n;
        float *score = scores + n * length + position - p->first;
#define SCORE(G) span_scores(w, &s, h, query + n * w->padded, score, length, D, G)
        TILES(SCORE)
      }
  }
}

/* The values of a span, for the vectors from n on: in tiles where all of a tile see all of it, else one by one. */
INLINE void weigh_span(const work *w, const part *p, long h, long n, long tile, long position, long stop,
                       const stored *next, const float *scores, long length, float *sums, const int D) {
  const long group = w->heads / w->kv_heads, of = n - h * group * p->queries;
  const long last = of + (tile < MAX_TILE ? tile : MAX_TILE) - 1;
  if (seen_from(w, p, last / group) <= position && stop <= seen_until(p, of / group)) {
    const span s = span_of(w, p, w->values, w->value_scales, position, stop, next);
    const float *score = scores + n * length + position - p->first;
#define SUM(G) span_values(w, &s, h, score, length, sums + n * w->padded, D, G)
    TILES(SUM)
    return;
  }
  for (long i = of; i <= last; i++, n++) {
    const long from = seen_from(w, p, i / group), until = seen_until(p, i / group);
    const long begin = from > position ? from : position, end = until < stop ? until : stop;
    if (begin >= end) continue;
    const span s = span_of(w, p, w->values, w->value_scales, begin, end, next);
    span_values(w, &s, h, scores + n * length + begin - p->first, length, sums + n * w->padded, D, 1);
  }
}

static void part_values(const work *w, const part *p, const float *scores, long length, float *sums) {
  const int D = HEAD_DIM ? HEAD_DIM : w->dim;
  const long token = w->kv_heads * w->dim, vectors = w->heads / w->kv_heads * p->queries;
  memset(sums, 0, w->heads * p->queries * w->padded * sizeof *sums);
  for (long position = p->first, stop; position < p->last; position = stop) {
    stop = span_end(position, p->last, w->block_size);
    const long ahead = slot_of(p->blocks, w->block_size, stop < p->last ? stop : position);
    for (long h = 0; h < w->kv_heads; h++)
      for (long n = h * vectors; n < (h + 1) * vectors; n += MAX_TILE)
        weigh_span(w, p, h, n, (h + 1) * vectors - n, position, stop, w->values + ahead * token, scores, length, sums, D);
  }
}

/* partial: the sums of all vectors, then each one's maximum and weight. */
static void attend_part(const work *w, const part *p, const element *q, long q_stride, float *partial, float *scratch) {
  const long all = w->heads * p->queries, more = p->queries > 1 ? LANES : 0; /* one may begin behind the first token */
  const long length = (p->last - p->first + LANES - 1) / LANES * LANES + more; /* of a vector's scores, padded */
  query_part *query = (query_part *)scratch;
  float *scores = scratch + all * w->padded, *stats = partial + all * w->padded;
  for (long i = 0; i < p->queries; i++)
    for (long n = 0; n < w->heads; n++)
      copy_query(query + vector_of(w, p->queries, i, n) * w->padded, q + i * q_stride + n * w->dim, w->dim, w->padded);
  part_scores(w, p, query, scores, length);
  for (long i = 0; i < p->queries; i++) {
    const long from = seen_from(w, p, i), count = seen_until(p, i) - from;
    for (long n = 0; n < w->heads && count > 0; n++) {
      const long v = vector_of(w, p->queries, i, n);
      softmax_head(w, scores + v * length + from - p->first, n, from, p->position + i, count, stats + 2 * v);
    }
  }
  part_values(w, p, scores, length, partial);
}

/* The sum of one head of a query over its row's partitions. row: token, first partition's place among partials, how many
   there are, queries of each, which of them it is. */
static void merge_parts_of(const work *w, const float *partials, long partial_size, const int32_t *row, long n,
                           element *out) {
  floats sum[MAX_DIM / LANES];
  const long v = vector_of(w, row[3], row[4], n), stats = w->heads * row[3] * w->padded + 2 * v;
  const float weight = merge_parts(sum, partials + row[1] * partial_size, row[3] * partial_size, row[2],
                                   v * w->padded, stats, w->dim, w->sinks ? w->sinks + n : 0);
  in_order(sum, (w->dim + LANES - 1) / LANES);
  out += (row[0] * w->heads + n) * w->dim;
  for (long i = 0; i < w->dim; i += LANES) store_some(out + i, sum[i / LANES] / weight, w->dim - i);
}

void decode_attention(const element *q, long q_stride, const stored *keys, const stored *values,
                      const float *key_scales, const float *value_scales, element *out, const int32_t *table,
                      long table_stride, const int32_t *tasks, long num_tasks, const int32_t *rows, long num_rows,
                      float *partials, float *scratch, long scratch_stride, long heads, long kv_heads, long dim,
                      long block_size, long window, float scale, float softcap, const float *slopes,
                      const float *sinks, int threads) {
  const long padded = (dim + PAIR - 1) / PAIR * PAIR;
  const long partial_size = (heads * (padded + 2) + LANES - 1) / LANES * LANES;
  const work w = {keys, values, key_scales, value_scales, heads, kv_heads, dim, padded, block_size, window, scale,
                  softcap, slopes, sinks};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (long t = 0; t < num_tasks; t++) {
      /* row of the table, token, first position, last position + 1, the first query's, queries, place among partials */
      const int32_t *task = tasks + 7 * t;
      const part p = {table + task[0] * table_stride, task[2], task[3], task[4], task[5]};
      attend_part(&w, &p, q + task[1] * q_stride, q_stride, partials + task[6] * partial_size,
                  scratch + omp_get_thread_num() * scratch_stride);
    }
#pragma omp for schedule(static) collapse(2)
    for (long r = 0; r < num_rows; r++)
      for (long n = 0; n < heads; n++) merge_parts_of(&w, partials, partial_size, rows + 5 * r, n, out);
  }
}
