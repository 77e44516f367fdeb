/* Attention over latents, absorbed, for CPUs, and the products between latents and heads. See
   kernels/cpu/attention/cpu_latent_attention.py for shapes and meaning. */
#include <omp.h>

#include "cpu_attention.h"

#define MOST_WIDTH 1024  /* elements of a token in the cache */
const int latent_most_width = MOST_WIDTH;
#define TILE 4           /* heads, or tokens, that share what is read */
#define ROWS 4           /* rows whose products with them are summed at once */
#define NEAR 8           /* rows that stay in the L1 cache while all heads pass over them */
#define TOGETHER 32      /* heads of a task */
#define CHUNK (2 * PAIR) /* elements of a row that are weighed at once */
#define OUTPUTS 16       /* rows of a head's matrix that many tokens pass over */

/* Rows are read where the cache has them if products take its elements, else from floats that a task makes of them. */
#if STORED == 0 && (ELEMENT == 0 || defined(PAIRED))
#define IN_PLACE 1
INLINE operand load_row(const query_part *at, int left) { return load_key(at, left); }
INLINE void load_values(floats *value, const query_part *at, int left) { load_two(value, at, left); }
INLINE void values_in_order(floats *sum, int vectors) { in_order(sum, vectors); }
#else
#define IN_PLACE 0
INLINE operand load_row(const query_part *at, int left) { (void)left; return load_query(at); }
INLINE void load_values(floats *value, const query_part *at, int left) {
  (void)left;
  value[0] = load_query(at);
  value[1] = load_query(at + LANES);
}
INLINE void values_in_order(floats *sum, int vectors) { (void)sum, (void)vectors; }
#endif

/* Two vectors of a matrix, and the order of their sums. */
#if ELEMENT == 1
INLINE void load_weights(floats *value, const element *at, int left) {
  if (left <= LANES) {
    value[0] = load_some(at, left);
    value[1] = (floats){};
  } else {
    load_even_odd(value, at, left);
  }
}
INLINE void weights_in_order(floats *sum, int vectors) { even_odd_in_order(sum, vectors); }
#else
INLINE void load_weights(floats *value, const element *at, int left) {
  value[0] = load_some(at, left);
  value[1] = left > LANES ? load_some(at + LANES, left - LANES) : (floats){};
}
INLINE void weights_in_order(floats *sum, int vectors) { (void)sum, (void)vectors; }
#endif

#define TILES(tile, call)        \
  switch (tile) {                \
    case 1: call(1); break;      \
    case 2: call(2); break;      \
    case 3: call(3); break;      \
    default: call(TILE);         \
  }

/* Products of G vectors, `padded` apart, with ROWS rows of `count` elements: four to a vector. */
INLINE void dots(const query_part *query, long padded, const query_part *const *row, long count, float *out,
                 long stride, const int G) {
  floats dot[TILE * ROWS] = {};
  const long whole = count - count % WIDE;
  for (long i = 0; i < whole; i += WIDE) {
    operand x[ROWS];
    UNROLLED for (int k = 0; k < ROWS; k++) x[k] = load_row(row[k] + i, WIDE);
    UNROLLED for (int g = 0; g < G; g++) {
      const operand q = load_query(query + g * padded + i);
      UNROLLED for (int k = 0; k < ROWS; k++) dot[g * ROWS + k] = multiply_add(dot[g * ROWS + k], q, x[k]);
    }
  }
  if (whole < count)
    UNROLLED for (int k = 0; k < ROWS; k++) {
      const operand x = load_row(row[k] + whole, count - whole);
      UNROLLED for (int g = 0; g < G; g++)
        dot[g * ROWS + k] = multiply_add(dot[g * ROWS + k], load_query(query + g * padded + whole), x);
    }
  UNROLLED for (int g = 0; g < G; g++) sum_four(dot + g * ROWS, out + g * stride);
}

/* Sums of `count` rows' elements i to i + CHUNK, weighed by G vectors of weights, `stride` apart: G times `length`
   floats, `padded` apart. */
#define WEIGH(name, type, load_pair)                                                                          \
  INLINE void name(const float *weight, long stride, const type *const *row, long count, long i, long length, \
                   float *sums, long padded, const int G) {                                                   \
    const int left = length - i < CHUNK ? length - i : CHUNK;                                                 \
    floats sum[TILE * 4] = {};                                                                                \
    if (left == CHUNK) {                                                                                      \
      for (long j = 0; j < count; j++) {                                                                      \
        floats x[4];                                                                                          \
        load_pair(x, row[j] + i, PAIR);                                                                       \
        load_pair(x + 2, row[j] + i + PAIR, PAIR);                                                            \
        UNROLLED for (int g = 0; g < G; g++)                                                                  \
          UNROLLED for (int v = 0; v < 4; v++) sum[g * 4 + v] += weight[g * stride + j] * x[v];               \
      }                                                                                                       \
    } else {                                                                                                  \
      for (long j = 0; j < count; j++)                                                                        \
        for (int at = 0; at < left; at += PAIR) {                                                             \
          floats x[2];                                                                                        \
          load_pair(x, row[j] + i + at, left - at < PAIR ? left - at : PAIR);                                 \
          for (int g = 0; g < G; g++)                                                                         \
            for (int v = 0; v < 2; v++) sum[g * 4 + at / LANES + v] += weight[g * stride + j] * x[v];         \
        }                                                                                                     \
    }                                                                                                         \
    for (int g = 0; g < G; g++)                                                                               \
      memcpy(sums + g * padded, sum + g * 4, (left + PAIR - 1) / PAIR * PAIR * sizeof(float));                \
  }
WEIGH(weigh_values, query_part, load_values)
WEIGH(weigh_weights, element, load_weights)

/* What all tasks of a call share. width: a token's elements in the cache, of which the first `rank` are its latent;
   padded: whole pairs of vectors. */
typedef struct {
  const stored *plane;
  const float *scales; /* of each token, where SCALED */
  long heads, width, padded, rank, padded_rank, block_size;
  float scale;
} work;

/* Asks for a share of what rows first to first + NEAR have, while others are computed. */
INLINE void fetch(const work *w, const stored *const *source, long first, long last, long share, long shares) {
  const long lines = (w->width + LINE - 1) / LINE, count = last - first < NEAR ? last - first : NEAR;
  const long begin = count * lines * share / shares, end = count * lines * (share + 1) / shares;
  long row = begin / lines, line = begin % lines;
  for (long i = begin; i < end; i++) {
    __builtin_prefetch(source[first + row] + line * LINE, 0, 3);
    if (++line == lines) row++, line = 0;
  }
}

/* Makes floats of a token, behind which zeros stand. */
INLINE void unpack(const work *w, const stored *from, query_part *to) {
#if !IN_PLACE
  const float factor = SCALED ? UNIT * w->scales[(from - w->plane) / w->width] : 1.0f;
  for (long i = 0; i < w->padded; i += LANES) {
    floats x = i < w->width ? load_stored_some(from + i, w->width - i) : (floats){};
    if (SCALED) x *= factor;
    memcpy(to + i, &x, sizeof x);
  }
#else
  (void)w, (void)from, (void)to;
#endif
}

/* Memory of a thread. rows: of the part's tokens, and the last one's again behind them. */
typedef struct {
  query_part *query;
  float *scores;
  const stored **source;
  const query_part **rows;
  float *unpacked;
} memory;

INLINE memory lay_out(const work *w, float *scratch, long length) {
  const long heads = w->heads < TOGETHER ? w->heads : TOGETHER;
  float *scores = scratch + heads * w->padded, *pointers = scores + heads * length;
  return (memory){(query_part *)scratch, scores, (const stored **)pointers,
                  (const query_part **)(pointers + 2 * length), pointers + 4 * length};
}

/* One part of one row's context, for `heads` heads: their sums, then each one's maximum and weight. */
static void attend_part(const work *w, const element *q, float *sums, float *stats, float *scratch,
                        const int32_t *blocks, long first, long last, long heads) {
  const long count = last - first, length = (count + LANES - 1) / LANES * LANES;
  const memory m = lay_out(w, scratch, length);
  for (long n = 0; n < heads; n++) copy_query(m.query + n * w->padded, q + n * w->width, w->width, w->padded);
  for (long j = 0; j < length; j++) {
    const long position = first + (j < count ? j : count - 1);
    m.source[j] = w->plane + slot_of(blocks, w->block_size, position) * w->width;
    m.rows[j] = IN_PLACE ? (const query_part *)m.source[j]
                         : (const query_part *)m.unpacked + (position - first) * w->padded;
  }
  const long tiles = (heads + TILE - 1) / TILE;
  for (long near = 0; near < count; near += NEAR) {
    if (!IN_PLACE)
      for (long j = near; j < near + NEAR && j < count; j++) unpack(w, m.source[j], (query_part *)m.rows[j]);
    for (long tile = 0; tile < tiles; tile++) {
      const long n = tile * TILE;
      if (near + NEAR < count) fetch(w, m.source, near + NEAR, count, tile, tiles);
      for (long j = near; j < near + NEAR && j < count; j += ROWS) {
#define DOTS(G) dots(m.query + n * w->padded, w->padded, m.rows + j, w->width, m.scores + n * length + j, length, G)
        TILES(heads - n, DOTS)
      }
    }
  }
  for (long n = 0; n < heads; n++) {
    float *row = m.scores + n * length;
    for (long j = 0; j < count; j++) row[j] *= w->scale;
    softmax_row(row, count, length, stats + 2 * n);
  }
  for (long i = 0; i < w->rank; i += CHUNK)
    for (long n = 0; n < heads; n += TILE) {
#define SUM(G)                                                                                            \
  weigh_values(m.scores + n * length, length, m.rows, count, i, w->rank, sums + n * w->padded_rank + i,    \
               w->padded_rank, G)
      TILES(heads - n, SUM)
    }
}

static void merge_head(const work *w, const float *parts, long size, long count, long n, element *out) {
  floats sum[MOST_WIDTH / LANES];
  const long stats = w->heads * w->padded_rank + 2 * n;
  const float weight = merge_parts(sum, parts, size, count, n * w->padded_rank, stats, w->rank, 0);
  values_in_order(sum, (w->rank + LANES - 1) / LANES);
  for (long i = 0; i < w->rank; i += LANES) store_some(out + i, sum[i / LANES] / weight, w->rank - i);
}

/* q: [tokens][heads][width]; out: [tokens][heads][rank]. room: parts that `partials` holds, at least those of each row:
   rows whose parts fit are computed and merged at a time. */
void latent_attention(const element *q, const stored *plane, const float *scales, element *out, const int32_t *table,
                      long table_stride, const int32_t *tasks, const int32_t *rows, long num_rows, float *partials,
                      long room, float *scratch, long scratch_stride, long heads, long width, long rank,
                      long block_size, float scale, int threads) {
  const long padded = (width + PAIR - 1) / PAIR * PAIR, padded_rank = (rank + PAIR - 1) / PAIR * PAIR;
  const long size = (heads * (padded_rank + 2) + LANES - 1) / LANES * LANES, sets = (heads + TOGETHER - 1) / TOGETHER;
  const work w = {plane, scales, heads, width, padded, rank, padded_rank, block_size, scale};
#pragma omp parallel num_threads(threads)
  for (long begin = 0, end; begin < num_rows; begin = end) {
    const long first = rows[5 * begin + 1]; /* of a row: token, first task, how many */
    for (end = begin + 1; end < num_rows && rows[5 * end + 1] + rows[5 * end + 2] - first <= room;) end++;
    const long last = rows[5 * end - 4] + rows[5 * end - 3];
#pragma omp for schedule(dynamic, 1)
    for (long i = first * sets; i < last * sets; i++) {
      const int32_t *task = tasks + 7 * (i / sets); /* row of the table, token, first position, last position + 1 */
      const long n = i % sets * TOGETHER, count = heads - n < TOGETHER ? heads - n : TOGETHER;
      float *part = partials + (i / sets - first) * size;
      attend_part(&w, q + (task[1] * heads + n) * width, part + n * padded_rank, part + heads * padded_rank + 2 * n,
                  scratch + omp_get_thread_num() * scratch_stride, table + task[0] * table_stride, task[2], task[3],
                  count);
    }
#pragma omp for schedule(static)
    for (long i = begin * heads; i < end * heads; i++) {
      const int32_t *row = rows + 5 * (i / heads);
      merge_head(&w, partials + (row[1] - first) * size, size, row[2], i % heads,
                 out + (row[0] * heads + i % heads) * rank);
    }
  }
}

/* q: [tokens][heads][nope + rope], tokens `q_stride` apart; weight: [heads][nope + values][rank]; out: [tokens][heads]
   [rank + rope], in which the first `rank` elements are products with the head's first `nope` rows and the others q's. */
void latent_absorb(const element *q, long q_stride, const element *weight, element *out, long tokens, long heads,
                   long nope, long values, long rope, long rank, int threads) {
  const long chunks = (rank + CHUNK - 1) / CHUNK, width = rank + rope, key = nope + rope;
  const long padded = (nope + LANES - 1) / LANES * LANES;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long n = 0; n < heads; n++)
    for (long chunk = 0; chunk < chunks; chunk++) {
      const element *row[nope];
      float factor[TILE * padded];
      for (long p = 0; p < nope; p++) row[p] = weight + (n * (nope + values) + p) * rank;
      const long i = chunk * CHUNK, left = rank - i < CHUNK ? rank - i : CHUNK;
      for (long t = 0; t < tokens; t += TILE) {
        floats sum[TILE][CHUNK / LANES] = {};
        const long tile = tokens - t < TILE ? tokens - t : TILE;
        for (long g = 0; g < tile; g++)
          for (long p = 0; p < nope; p += LANES) {
            const floats x = load_some(q + (t + g) * q_stride + n * key + p, nope - p);
            memcpy(factor + g * padded + p, &x, sizeof x);
          }
#define ABSORB(G) weigh_weights(factor, padded, row, nope, i, rank, (float *)sum, CHUNK, G)
        TILES(tile, ABSORB)
        for (long g = 0; g < tile; g++) {
          element *to = out + ((t + g) * heads + n) * width;
          weights_in_order(sum[g], (left + LANES - 1) / LANES);
          for (long o = 0; o < left; o += LANES) store_some(to + i + o, sum[g][o / LANES], left - o);
          if (chunk == 0) memcpy(to + rank, q + (t + g) * q_stride + n * key + nope, rope * sizeof *to);
        }
      }
    }
}

/* x: [tokens][heads][rank]; weight: as above; out: [tokens][heads][values], products with the head's last rows. */
void latent_release(const element *x, const element *weight, element *out, long tokens, long heads, long nope,
                    long values, long rank, int threads) {
  const long blocks = (values + OUTPUTS - 1) / OUTPUTS, padded = (rank + PAIR - 1) / PAIR * PAIR;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
  for (long n = 0; n < heads; n++)
    for (long block = 0; block < blocks; block++) {
      query_part own[OUTPUTS * padded], query[TILE * padded];
      const query_part *row[OUTPUTS];
      const long o = block * OUTPUTS, left = values - o < OUTPUTS ? values - o : OUTPUTS;
      for (long j = 0; j < OUTPUTS; j++) {
        const long there = j < left ? j : left - 1;
        row[j] = own + there * padded;
        if (j == there) copy_query(own + j * padded, weight + (n * (nope + values) + nope + o + j) * rank, rank, padded);
      }
      for (long t = 0; t < tokens; t += TILE) {
        float sums[TILE * OUTPUTS];
        const long tile = tokens - t < TILE ? tokens - t : TILE;
        for (long g = 0; g < tile; g++)
          copy_query(query + g * padded, x + ((t + g) * heads + n) * rank, rank, padded);
        for (long j = 0; j < OUTPUTS; j += ROWS) {
#define RELEASE(G) dots(query, padded, row + j, rank, sums + j, OUTPUTS, G)
          TILES(tile, RELEASE)
        }
        for (long g = 0; g < tile; g++) {
          floats y;
          memcpy(&y, sums + g * OUTPUTS, sizeof y);
          store_some(out + ((t + g) * heads + n) * values + o, y, left);
        }
      }
    }
}
