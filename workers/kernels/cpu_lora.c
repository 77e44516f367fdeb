/* Grouped LoRA of a few tokens per adapter, for CPUs. See cpu_lora.py for its meaning. */
#include <omp.h>

#include "cpu_vector.h"

#define TILE 4    /* tokens of one adapter that share a read of its rows */
#define ROWS 4    /* rows of A read side by side */
#define PIECE 256 /* columns of y that one thread takes at a time */
#define PARALLEL_ELEMENTS 65536 /* below this a second thread costs more than it brings */

typedef struct { /* as SectionTables in lora_ops.py; all fields have 8 bytes */
  const int64_t *a_rows, *b_rows;
  const int32_t *ranks;
  const float *scales;
  int64_t room, outputs, start;
} section;

typedef struct { /* of the list of tokens, and their adapter */
  int32_t first, count, slot;
} tile;

typedef struct {
  element *y;
  const element *x, *slab;
  long y_stride, x_stride, inputs;
  const int32_t *tokens;
} layer;

/* Whether the work that begins at `before` of `total` is thread `me`'s: neighbours go to one thread, shares are even. */
INLINE int is_mine(long before, long total, int me, int threads) { return before * threads / total == me; }

/* out[c * stride + k] = scale * x[c] . a[k] */
INLINE void dots(const element *const *x, const element *const *a, long inputs, float *out, long stride, float scale,
                 const int C, const int K) {
  floats sum[TILE * ROWS];
  UNROLLED for (int i = 0; i < C * K; i++) sum[i] = (floats){};
  for (long i = 0; i < inputs; i += LANES) {
    floats row[ROWS];
    UNROLLED for (int k = 0; k < K; k++) row[k] = load(a[k] + i);
    UNROLLED for (int c = 0; c < C; c++) {
      const floats token = load(x[c] + i);
      UNROLLED for (int k = 0; k < K; k++) sum[c * K + k] += token * row[k];
    }
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int k = 0; k < K; k++) out[c * stride + k] = scale * sum_lanes(sum[c * K + k]);
}

/* Rows k..k + count of A against the tile's tokens. */
INLINE void shrink(const layer *l, const section *s, const tile *t, long k, long count, float *out, const int C) {
  const element *x[TILE], *a[ROWS];
  UNROLLED for (int c = 0; c < C; c++) x[c] = l->x + l->tokens[t->first + c] * l->x_stride;
  for (long i = 0; i < count; i++) a[i] = l->slab + s->a_rows[t->slot * s->room + k + i];
  const float scale = s->scales[t->slot];
  if (count == ROWS)
    dots(x, a, l->inputs, out + k, s->room, scale, C, ROWS);
  else
    for (long i = 0; i < count; i++) dots(x, a + i, l->inputs, out + k + i, s->room, scale, C, 1);
}

/* y[c][..] += sum over k of shrunk[c * stride + k] * b[k][..], V vectors wide */
INLINE void add_columns(element *const *y, const element *slab, const int64_t *rows, long column, const float *shrunk,
                        long stride, long rank, const int C, const int V) {
  floats sum[TILE * TILE];
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int v = 0; v < V; v++) sum[c * V + v] = load(y[c] + column + v * LANES);
  for (long k = 0; k < rank; k++) {
    const element *b = slab + rows[k] + column;
    floats factor[TILE];
    UNROLLED for (int c = 0; c < C; c++) factor[c] = (floats){} + shrunk[c * stride + k];
    UNROLLED for (int v = 0; v < V; v++) {
      const floats part = load(b + v * LANES);
      UNROLLED for (int c = 0; c < C; c++) sum[c * V + v] += factor[c] * part;
    }
  }
  UNROLLED for (int c = 0; c < C; c++)
    UNROLLED for (int v = 0; v < V; v++) store(y[c] + column + v * LANES, sum[c * V + v]);
}

/* Columns first..last of the section. */
INLINE void expand(const layer *l, const section *s, const tile *t, long first, long last, const float *shrunk,
                   const int C) {
  const int V = TILE * TILE / (C == 3 ? 4 : C);
  const int64_t *rows = s->b_rows + t->slot * s->room;
  const long rank = s->ranks[t->slot];
  element *y[TILE];
  UNROLLED for (int c = 0; c < C; c++) y[c] = l->y + l->tokens[t->first + c] * l->y_stride + s->start;
  long column = first;
  for (; column + V * LANES <= last; column += V * LANES) add_columns(y, l->slab, rows, column, shrunk, s->room, rank, C, V);
  for (; column < last; column += LANES) add_columns(y, l->slab, rows, column, shrunk, s->room, rank, C, 1);
}

/* Constants for the number of tokens, so that sums stay in registers. */
#define FIXED(count)                                                                                                  \
  static void shrink_##count(const layer *l, const section *s, const tile *t, long k, long rows, float *out) {        \
    shrink(l, s, t, k, rows, out, count);                                                                             \
  }                                                                                                                   \
  static void expand_##count(const layer *l, const section *s, const tile *t, long first, long last, const float *x) { \
    expand(l, s, t, first, last, x, count);                                                                           \
  }
FIXED(1)
FIXED(2)
FIXED(3)
FIXED(4)

#define CHOOSE(name, count) ((count) == 1 ? name##_1 : (count) == 2 ? name##_2 : (count) == 3 ? name##_3 : name##_4)

INLINE long least(long a, long b) { return a < b ? a : b; }

/* shrunk: room for every section's [tokens, its room] floats, one section after another. tiles cover num_tokens. */
void lora_add(element *y, long y_stride, const element *x, long x_stride, const element *slab, long inputs,
              const section *sections, long num_sections, const int32_t *tokens, long num_tokens, const tile *tiles,
              long num_tiles, float *shrunk, int threads) {
  const layer l = {y, x, slab, y_stride, x_stride, inputs, tokens};
  long blocks = 0, cells = 0, rows = 0; /* of A: blocks of ROWS; of B: rank x columns; of A: rows */
  for (long i = 0; i < num_sections; i++)
    for (long j = 0; j < num_tiles; j++) {
      const long rank = sections[i].ranks[tiles[j].slot];
      rows += rank;
      blocks += (rank + ROWS - 1) / ROWS;
      cells += rank * sections[i].outputs;
    }
#pragma omp parallel num_threads(threads) if (rows * inputs + cells >= PARALLEL_ELEMENTS)
  {
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    long before = 0;
    float *out = shrunk;
    for (long i = 0; i < num_sections; out += num_tokens * sections[i++].room)
      for (const tile *t = tiles; t < tiles + num_tiles; t++) {
        const long rank = sections[i].ranks[t->slot];
        for (long k = 0; k < rank; k += ROWS)
          if (is_mine(before++, blocks, me, all))
            CHOOSE(shrink, t->count)(&l, sections + i, t, k, least(ROWS, rank - k), out + t->first * sections[i].room);
      }
#pragma omp barrier
    before = 0, out = shrunk;
    for (long i = 0; i < num_sections; out += num_tokens * sections[i++].room)
      for (const tile *t = tiles; t < tiles + num_tiles; t++) {
        const long rank = sections[i].ranks[t->slot], outputs = sections[i].outputs;
        for (long first = 0; rank && first < outputs; first += PIECE) {
          const long last = least(first + PIECE, outputs);
          if (is_mine(before, cells, me, all))
            CHOOSE(expand, t->count)(&l, sections + i, t, first, last, out + t->first * sections[i].room);
          before += rank * (last - first);
        }
      }
  }
}
