/* Skinny GEMM, y = x W^T + b of 1 to 64 rows, for CPUs that multiply bf16 pairs. See cpu_skinny_gemm.py for shapes and meaning. */
#if ELEMENT == 1 && defined(__AVX512BF16__)
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 24")
#define BLOCK 64             /* outputs of one block of the packed weight */
#define DEPTH 32             /* inputs of one block */
#define SIZE (BLOCK * DEPTH) /* its elements: DEPTH / 2 pairs of inputs, each for BLOCK outputs */
#define RUN 4                /* blocks that stay in the L1 cache while all rows pass over them */
#define MAX_ROWS 64
const int skinny_gemm_max_rows = MAX_ROWS;
#define ALONE_ROWS 16 /* up to so many the CPU's own prefetching keeps up: asking for lines ahead of it only takes its place */
#define TILE_ROWS 6 /* times 4 vectors of outputs: 24 sums and what feeds them fill the registers */

/* The memory that this thread reads next; multiply() prefetches it in parts. */
typedef struct {
  const char *from;
  long bytes; /* of each block of a run */
} fetch;

/* R rows times V vectors of 16 outputs over `count` blocks; sums: [row][BLOCK]. */
INLINE void multiply(const uint16_t *w, const uint16_t *x, long x_stride, float *sums, long count, int first, fetch ahead,
                     const int R, const int V) {
  __m512 sum[TILE_ROWS * 4];
  UNROLLED for (int i = 0; i < R * V; i++)
    sum[i] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i / V * BLOCK + i % V * 16);
  for (long b = 0; b < count; b++) {
    for (long o = 0; o < ahead.bytes; o += 64) _mm_prefetch(ahead.from + b * ahead.bytes + o, _MM_HINT_T0);
    UNROLLED for (int p = 0; p < DEPTH / 2; p++) {
      __m512i weights[4];
      UNROLLED for (int v = 0; v < V; v++) weights[v] = _mm512_loadu_si512(w + b * SIZE + p * 2 * BLOCK + v * 32);
      UNROLLED for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * x_stride + b * DEPTH + 2 * p, sizeof pair);
        const __m512i inputs = _mm512_set1_epi32(pair);
        UNROLLED for (int v = 0; v < V; v++)
          sum[r * V + v] = _mm512_dpbf16_ps(sum[r * V + v], (__m512bh)weights[v], (__m512bh)inputs);
      }
    }
  }
  UNROLLED for (int i = 0; i < R * V; i++) _mm512_storeu_ps(sums + i / V * BLOCK + i % V * 16, sum[i]);
}

typedef void tile(const uint16_t *, const uint16_t *, long, float *, long, int, fetch);
#define TILE(R, V)                                                                                               \
  static void tile_##R##_##V(const uint16_t *w, const uint16_t *x, long xs, float *s, long n, int first, fetch f) { \
    multiply(w, x, xs, s, n, first, f, R, V);                                                                    \
  }
#define TILES(V) TILE(1, V) TILE(2, V) TILE(3, V) TILE(4, V) TILE(5, V) TILE(6, V)
TILES(2)
TILES(4)
#define NAMES(V) {tile_1_##V, tile_2_##V, tile_3_##V, tile_4_##V, tile_5_##V, tile_6_##V}
static tile *const TILES_OF[2][TILE_ROWS] = {NAMES(2), NAMES(4)};

/* All rows over one run of blocks, in tiles of nearly equal height; of many rows each fetches its part of the next run. */
static void pass(const uint16_t *w, const uint16_t *x, long x_stride, float *sums, long rows, long count, int first,
                 int vectors) {
  const long tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, lines = vectors == 4 && rows > ALONE_ROWS ? SIZE * 2 / 64 : 0;
  for (long t = 0, row = 0; t < tiles; t++) {
    const long height = (rows - row + tiles - t - 1) / (tiles - t);
    const long begin = lines * t / tiles, end = lines * (t + 1) / tiles;
    const fetch ahead = {(const char *)(w + RUN * SIZE) + begin * 64 * count, (end - begin) * 64};
    TILES_OF[vectors / 4][height - 1](w, x + row * x_stride, x_stride, sums + row * BLOCK, count, first, ahead);
    row += height;
  }
}

static void finish(const float *sums, const uint16_t *bias, uint16_t *out, long out_stride, long rows, long outputs) {
  for (long row = 0; row < rows; row++)
    for (long o = 0; o < outputs; o += 16) {
      const __mmask16 there = outputs - o < 16 ? (__mmask16)((1u << (outputs - o)) - 1) : (__mmask16)0xffff;
      __m512 sum = _mm512_loadu_ps(sums + row * BLOCK + o);
      if (bias) {
        const __m256i narrow = _mm256_maskz_loadu_epi16(there, bias + o);
        sum = _mm512_add_ps(sum, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
      }
      _mm256_mask_storeu_epi16(out + row * out_stride + o, there, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

void skinny_gemm(const uint16_t *weight, const uint16_t *x, long x_stride, const uint16_t *bias, uint16_t *out, long rows,
              long inputs, long outputs, int threads) {
  const long blocks = inputs / DEPTH, halves = (outputs + BLOCK / 2 - 1) / (BLOCK / 2);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long part = 0; part < threads; part++) {
    float sums[MAX_ROWS * BLOCK];
    const long last = halves * (part + 1) / threads;
    for (long half = halves * part / threads, vectors; half < last; half += vectors / 2) {
      const uint16_t *w = weight + half / 2 * blocks * SIZE + half % 2 * BLOCK;
      vectors = half % 2 == 0 && half + 1 < last ? 4 : 2; /* a block that two threads share is halved */
      for (long b = 0; b < blocks; b += RUN)
        pass(w + b * SIZE, x + b * DEPTH, x_stride, sums, rows, blocks - b < RUN ? blocks - b : RUN, b == 0, vectors);
      const long o = half * BLOCK / 2, left = outputs - o < vectors * 16 ? outputs - o : vectors * 16;
      finish(sums, bias ? bias + o : 0, out + o, outputs, rows, left);
    }
  }
}
#endif
