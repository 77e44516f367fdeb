/* Products of rows with the weights of their experts, for CPUs with AVX512. See cpu_experts.py for the layout and the
   meaning. */
#include "cpu_grouped.h"
#ifdef __AVX512F__

#define TILE_UNROLLED _Pragma("GCC unroll 24")
#define STEPS_UNROLLED _Pragma("GCC unroll 2")
#define BLOCK 64 /* outputs of one block of weights */
#if ELEMENT == 1 && defined(__AVX512BF16__)
#define TOGETHER 2 /* inputs of one output that stand together */
INLINE __m512 load_weights(const element *w) { return _mm512_loadu_ps((const float *)w); }
INLINE __m512 add_products(__m512 sum, __m512 weights, const element *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
}
#else
#define TOGETHER 1
INLINE __m512 load_weights(const element *w) { return (__m512)load(w); }
INLINE __m512 add_products(__m512 sum, __m512 weights, const element *x) {
  return _mm512_fmadd_ps(weights, _mm512_set1_ps(load_one(x)), sum);
}
#endif
const int grouped_together = TOGETHER;
#define LINE (BLOCK * TOGETHER) /* elements of a step: what stands together, of all outputs of a block */
#define LINE_BYTES (LINE * (long)sizeof(element))
#define RUN 64      /* steps that stay in the L1 cache while rows pass over them */
#define GROUP 64    /* rows whose sums are kept at a time */
#define TILE_ROWS 6 /* times 4 vectors of outputs: 24 sums and what feeds them fill the registers */
#define VECTORS 4

/* R rows times a block of outputs over `steps`; sums: [row][BLOCK]. `ahead`: memory that is read next, of which
   `a_step` bytes are fetched with each step. */
INLINE void multiply(const element *w, const element *const *x, long from, float *sums, long steps, int first,
                     const char *ahead, long a_step, const int R) {
  __m512 sum[TILE_ROWS * VECTORS];
  const element *row[TILE_ROWS];
  TILE_UNROLLED for (int r = 0; r < R; r++) row[r] = x[r] + from;
  TILE_UNROLLED for (int i = 0; i < R * VECTORS; i++)
    sum[i] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * LANES);
  STEPS_UNROLLED for (long s = 0; s < steps; s++) {
    __m512 weights[VECTORS];
    for (long o = 0; o < a_step; o += 64) _mm_prefetch(ahead + s * a_step + o, _MM_HINT_T0);
    TILE_UNROLLED for (int v = 0; v < VECTORS; v++)
      weights[v] = load_weights(w + s * LINE + v * LANES * TOGETHER);
    TILE_UNROLLED for (int r = 0; r < R; r++)
      TILE_UNROLLED for (int v = 0; v < VECTORS; v++)
        sum[r * VECTORS + v] = add_products(sum[r * VECTORS + v], weights[v], row[r] + s * TOGETHER);
  }
  TILE_UNROLLED for (int i = 0; i < R * VECTORS; i++) _mm512_storeu_ps(sums + i * LANES, sum[i]);
}

typedef void tile(const element *, const element *const *, long, float *, long, int, const char *, long);
#define TILE(R)                                                                                                     \
  static void tile_##R(const element *w, const element *const *x, long from, float *s, long n, int first,           \
                       const char *ahead, long a_step) {                                                            \
    multiply(w, x, from, s, n, first, ahead, a_step, R);                                                            \
  }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile *const TILE_OF[TILE_ROWS] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* Up to GROUP rows times one block, run by run, in tiles of nearly equal height. fetches: the block is not in a cache,
   so each of several tiles fetches its part of the run after its own, within the block; one alone is served by the CPU's
   own prefetching. */
static void multiply_all(const element *w, const element *const *x, float *sums, long rows, long steps, int fetches) {
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, a_step = (LINE_BYTES / 64 + tiles - 1) / tiles * 64;
  for (long s = 0; s < steps; s += RUN) {
    const long count = steps - s < RUN ? steps - s : RUN, left = steps - s - count;
    const long bytes = (left < RUN ? left : RUN) * LINE_BYTES; /* of the next run */
    for (long t = 0, row = 0; t < tiles; t++) {
      const long height = (rows - row + tiles - t - 1) / (tiles - t), begin = t * count * a_step;
      const long here = fetches && tiles > 1 && begin < bytes ? a_step : 0;
      TILE_OF[height - 1](w + s * LINE, x + row, s * TOGETHER, sums + row * BLOCK, count, s == 0,
                          (const char *)(w + (s + count) * LINE) + begin, here);
      row += height;
    }
  }
}

INLINE void finish(const float *sums, const element *bias, element *out, long out_stride, long rows, long outputs) {
  for (long row = 0; row < rows; row++)
    for (long o = 0; o < outputs; o += LANES) {
      floats y = (floats)_mm512_loadu_ps(sums + row * BLOCK + o);
      if (bias) y += load_first(bias + o, outputs - o);
      store_first(out + row * out_stride + o, y, outputs - o);
    }
}

/* weight: [experts][blocks][steps][BLOCK][TOGETHER]. order: the pairs of each expert; the input of pair p is row
   p / top_k of x, or with top_k 0 that of its place in order. out: [pairs, outputs], in order. */
void grouped_gemm(const element *weight, long expert_stride, const element *x, long x_stride, const element *bias,
                  element *out, const int32_t *order, const int32_t *ends, long experts, long top_k, long inputs,
                  long outputs, int threads) {
  const long steps = inputs / TOGETHER, blocks = (outputs + BLOCK - 1) / BLOCK;
  int used[experts];
  const long count = experts_used(ends, experts, used), run = blocks_of_item(count * blocks, threads);
  const long runs = (blocks + run - 1) / run;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < count * runs; item++) {
    const long expert = used[item / runs], start = expert ? ends[expert - 1] : 0, end = ends[expert];
    const long begin = item % runs * run * BLOCK, stop = begin + run * BLOCK < outputs ? begin + run * BLOCK : outputs;
    const element *rows[GROUP];
    float sums[GROUP * BLOCK];
    for (long first = start; first < end; first += GROUP) {
      const long height = end - first < GROUP ? end - first : GROUP;
      for (long i = 0; i < height; i++) rows[i] = x + (top_k ? order[first + i] / top_k : first + i) * x_stride;
      for (long o = begin; o < stop; o += BLOCK) {
        multiply_all(weight + expert * expert_stride + o * inputs, rows, sums, height, steps, first == start);
        finish(sums, bias ? bias + expert * outputs + o : 0, out + first * outputs + o, outputs, height,
               stop - o < BLOCK ? stop - o : BLOCK);
      }
    }
  }
}
#endif
