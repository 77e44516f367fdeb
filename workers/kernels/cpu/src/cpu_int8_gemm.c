/* Products of int8 weights and inputs of 1, 2 or 3 bytes, for CPUs with VNNI: y = (c W^T) * s * scale + b, summed as
   integers. See cpu_int8_gemm.py for the layout and the meaning. */
#include "cpu_grouped.h"
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include "cpu_rounding.h"

#define TILE_UNROLLED _Pragma("GCC unroll 24")
#define STEPS_UNROLLED _Pragma("GCC unroll 4")
#define BLOCK 64            /* outputs of one block of weights */
#define QUAD 4              /* inputs of one output that stand together */
#define RUN 64              /* quads that stay in the L1 cache while rows pass over them */
#define LINE (BLOCK * QUAD) /* bytes of a quad of all outputs of a block */
#define GROUP 64            /* rows of bytes whose sums are kept at a time */
#define ALONE_ROWS 16       /* up to so many the CPU's own prefetching keeps up, and asking for lines only takes its place */
#define TILE_ROWS 6         /* times 4 vectors of outputs: 24 sums and what feeds them fill the registers */

/* The memory that this thread reads next; multiply() fetches `bytes` of it, some lines with each quad. */
typedef struct {
  const uint8_t *from;
  long bytes, a_quad;
} fetch;

/* R rows of bytes times V vectors of 16 outputs over `quads`; sums: [row][BLOCK]. */
INLINE void multiply(const uint8_t *w, const int8_t *x, long x_stride, int32_t *sums, long quads, int first, fetch ahead,
                     const int R, const int V) {
  __m512i sum[TILE_ROWS * 4];
  TILE_UNROLLED for (int i = 0; i < R * V; i++)
    sum[i] = first ? _mm512_setzero_si512() : _mm512_loadu_si512(sums + i / V * BLOCK + i % V * 16);
  STEPS_UNROLLED for (long q = 0; q < quads; q++) {
    __m512i weights[4];
    for (long o = q * ahead.a_quad; o < (q + 1) * ahead.a_quad && o < ahead.bytes; o += 64)
      _mm_prefetch((const char *)ahead.from + o, _MM_HINT_T0);
    TILE_UNROLLED for (int v = 0; v < V; v++) weights[v] = _mm512_loadu_si512(w + q * LINE + v * 64);
    TILE_UNROLLED for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, x + r * x_stride + q * QUAD, sizeof four);
      const __m512i inputs = _mm512_set1_epi32(four);
      TILE_UNROLLED for (int v = 0; v < V; v++) sum[r * V + v] = _mm512_dpbusd_epi32(sum[r * V + v], weights[v], inputs);
    }
  }
  TILE_UNROLLED for (int i = 0; i < R * V; i++) _mm512_storeu_si512(sums + i / V * BLOCK + i % V * 16, sum[i]);
}

typedef void tile(const uint8_t *, const int8_t *, long, int32_t *, long, int, fetch);
#define TILE(R, V)                                                                                                 \
  static void tile_##R##_##V(const uint8_t *w, const int8_t *x, long xs, int32_t *s, long n, int first, fetch f) { \
    multiply(w, x, xs, s, n, first, f, R, V);                                                                      \
  }
#define TILES(V) TILE(1, V) TILE(2, V) TILE(3, V) TILE(4, V) TILE(5, V) TILE(6, V)
TILES(2)
TILES(4)
#define NAMES(V) {tile_1_##V, tile_2_##V, tile_3_##V, tile_4_##V, tile_5_##V, tile_6_##V}
static tile *const TILES_OF[2][TILE_ROWS] = {NAMES(2), NAMES(4)};

/* All rows over all inputs, run by run, in tiles of nearly equal height; of many rows each fetches its part of the next run. end:
   of the weight, behind which nothing is fetched. */
static void multiply_all(const uint8_t *w, const uint8_t *end, const int8_t *x, long x_stride, int32_t *sums, long rows,
                         long quads, int vectors) {
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int fetches = vectors == 4 && rows > ALONE_ROWS;
  const long lines = fetches ? (RUN * LINE / 64 + tiles - 1) / tiles : 0, a_quad = (lines + RUN - 1) / RUN;
  for (long q = 0; q < quads; q += RUN)
    for (long t = 0, row = 0; t < tiles; t++) {
      const long height = (rows - row + tiles - t - 1) / (tiles - t);
      const uint8_t *from = w + (q + RUN) * LINE + t * lines * 64;
      const long left = end - from, bytes = left < 0 ? 0 : left < lines * 64 ? left : lines * 64;
      const fetch ahead = {from, bytes, a_quad * 64};
      TILES_OF[vectors / 4][height - 1](w + q * LINE, x + row * x_stride + q * QUAD, x_stride, sums + row * BLOCK,
                                        quads - q < RUN ? quads - q : RUN, q == 0, ahead);
      row += height;
    }
}

INLINE void round_row(const element *x, long inputs, int planes, int8_t *codes, long stride, float *scale, int32_t *sums) {
  round_inputs(x, inputs, row_steps(x, inputs, planes, scale), planes, codes, stride, sums, 1);
}

/* Rows that have been rounded, the weight that they pass, and where their products go. codes: [rows][planes][stride],
   stride a multiple of 16. */
typedef struct {
  const uint8_t *end; /* of the weight */
  const int8_t *codes;
  long stride;
  const float *scales;  /* [rows] */
  const int32_t *sums;  /* [rows][planes] */
  int planes;
  element *out;
  long out_stride;
} rounded_rows;

/* Rows [first, end) times `vectors` vectors of outputs of one block, of which `outputs` are there. */
static void multiply_block(const uint8_t *w, const float *scale, const element *bias, rounded_rows rows, long first,
                           long end, long quads, long outputs, int vectors) {
  int32_t sums[GROUP * BLOCK];
  const int planes = rows.planes;
  const long groups = (end - first + GROUP / planes - 1) / (GROUP / planes);
  for (long g = 0; g < groups; g++) {
    const long begin = first + (end - first) * g / groups, stop = first + (end - first) * (g + 1) / groups;
    multiply_all(w, rows.end, rows.codes + begin * planes * rows.stride, rows.stride, sums, (stop - begin) * planes,
                 quads, vectors);
    for (long row = begin; row < stop; row++)
      for (long v = 0, o = 0; v < vectors && o < outputs; v++, o += LANES) {
        floats y = {0};
        for (int plane = 0; plane < planes; plane++) { /* weights are stored + 128 */
          const __m512i sum = _mm512_loadu_si512(sums + ((row - begin) * planes + plane) * BLOCK + v * LANES);
          const __m512i excess = _mm512_set1_epi32(128 * rows.sums[row * planes + plane]);
          y = y * 256.0f + (floats)_mm512_cvtepi32_ps(_mm512_sub_epi32(sum, excess));
        }
        y = y * rows.scales[row] * (floats)_mm512_loadu_ps(scale + o);
        if (bias) y += load_first(bias + o, outputs - o);
        store_first(rows.out + row * rows.out_stride + o, y, outputs - o);
      }
  }
}

/* codes, row_scales, row_sums: of all rows, to work in. */
void int8_gemm(const uint8_t *weight, const float *scale, const element *x, long x_stride, const element *bias, element *out,
               int8_t *codes, long stride, float *row_scales, int32_t *row_sums, int planes, long rows, long inputs,
               long outputs, int threads) {
  const long quads = inputs / QUAD, halves = (outputs + BLOCK / 2 - 1) / (BLOCK / 2);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++)
    round_row(x + row * x_stride, inputs, planes, codes + row * planes * stride, stride, row_scales + row,
              row_sums + row * planes);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long part = 0; part < threads; part++) {
    const long last = halves * (part + 1) / threads;
    for (long half = halves * part / threads, vectors; half < last; half += vectors / 2) {
      const uint8_t *w = weight + half / 2 * quads * LINE + half % 2 * (LINE / 2);
      const long o = half * (BLOCK / 2);
      vectors = half % 2 == 0 && half + 1 < last ? 4 : 2; /* a block that two threads share is halved */
      const rounded_rows all = {weight + (halves + 1) / 2 * quads * LINE, codes, stride, row_scales, row_sums, planes,
                                out + o, outputs};
      multiply_block(w, scale + o, bias ? bias + o : 0, all, 0, rows, quads, outputs - o, vectors);
    }
  }
}

/* As grouped_gemm (cpu_grouped_gemm.c). weight: of each expert its blocks, and `scale_at` bytes further its scales. */
void grouped_int8_gemm(const uint8_t *weight, long expert_bytes, long scale_at, const element *x, long x_stride,
                       const element *bias, element *out, int8_t *codes, long stride, float *row_scales,
                       int32_t *row_sums, int planes, const int32_t *order, const int32_t *ends, long experts, long top_k,
                       long inputs, long outputs, int threads) {
  const long quads = inputs / QUAD, blocks = (outputs + BLOCK - 1) / BLOCK, rows = ends[experts - 1];
  int used[experts];
  const long count = experts_used(ends, experts, used), run = blocks_of_item(count * blocks, threads);
  const long runs = (blocks + run - 1) / run;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++)
    round_row(x + (top_k ? order[row] / top_k : row) * x_stride, inputs, planes, codes + row * planes * stride, stride,
              row_scales + row, row_sums + row * planes);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < count * runs; item++) {
    const long expert = used[item / runs], begin = item % runs * run * BLOCK, end = ends[expert];
    const long stop = begin + run * BLOCK < outputs ? begin + run * BLOCK : outputs, in_group = GROUP / planes;
    const uint8_t *w = weight + expert * expert_bytes;
    for (long first = expert ? ends[expert - 1] : 0; first < end; first += in_group)
      for (long o = begin; o < stop; o += BLOCK) {
        const rounded_rows all = {w + scale_at, codes, stride, row_scales, row_sums, planes, out + o, outputs};
        multiply_block(w + o * inputs, (const float *)(w + scale_at) + o, bias ? bias + expert * outputs + o : 0, all,
                       first, end - first < in_group ? end : first + in_group, quads, stop - o, 4);
      }
  }
}
#endif
