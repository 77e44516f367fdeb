/* Product of any number of rows, y = x W^T + b, in which a row's sums have one order. See cpu_row_gemm.py. */
#include "cpu_vector.h"

#define BLOCK 64 /* outputs of one block of the packed weight */
#define VECTORS (BLOCK / LANES)
#define PIECE 60 /* rows that share one read of the weight */
#define TILE_ROWS 6 /* times VECTORS: 24 sums and what feeds them fill the registers */
#ifdef __AVX512F__
const int row_gemm_fills_registers = 1; /* elsewhere a tile's sums do not fit into them */
#endif
#define RUN 128 /* inputs whose weights stay in the L1 cache while a piece's rows pass over them */

INLINE floats spread(element x) {
#if ELEMENT == 0
  return (floats){} + x;
#else
  return (floats)((words){} + ((uint32_t)x << 16));
#endif
}

/* R rows times BLOCK outputs over one run of inputs, which are summed one by one, in order; then the run's sum is added
   to those before it. sums: [row][BLOCK]. */
INLINE void multiply(const element *w, const element *x, long x_stride, float *sums, long count, int first, const int R) {
  floats sum[TILE_ROWS * VECTORS];
  UNROLLED for (int i = 0; i < R * VECTORS; i++) sum[i] = (floats){};
  for (long i = 0; i < count; i++) {
    floats weight[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) weight[v] = load(w + i * BLOCK + v * LANES);
    UNROLLED for (int v = 0; v < BLOCK * (int)sizeof(element); v += 64)
      __builtin_prefetch((const char *)(w + (i + RUN) * BLOCK) + v, 0, 3);
    UNROLLED for (int r = 0; r < R; r++) {
      const floats input = spread(x[r * x_stride + i]);
      UNROLLED for (int v = 0; v < VECTORS; v++) sum[r * VECTORS + v] += weight[v] * input;
    }
  }
  UNROLLED for (int i = 0; i < R * VECTORS; i++) {
    floats before = {};
    if (!first) memcpy(&before, sums + i * LANES, sizeof before);
    sum[i] += before;
    memcpy(sums + i * LANES, sum + i, sizeof *sum);
  }
}

typedef void tile(const element *, const element *, long, float *, long, int);
#define TILE(R)                                                                                            \
  static void tile_##R(const element *w, const element *x, long xs, float *s, long n, int first) {         \
    multiply(w, x, xs, s, n, first, R);                                                                    \
  }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile *const TILES[TILE_ROWS] = {tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

static void finish(const float *sums, const element *bias, element *out, long out_stride, long rows, long outputs) {
  for (long row = 0; row < rows; row++)
    for (long o = 0; o < outputs; o += LANES) {
      const long left = outputs - o < LANES ? outputs - o : LANES;
      element narrow[LANES] = {0};
      floats sum;
      memcpy(&sum, sums + row * BLOCK + o, sizeof sum);
      if (bias) {
        memcpy(narrow, bias + o, left * sizeof *narrow);
        sum += load(narrow);
      }
      store(narrow, sum);
      memcpy(out + row * out_stride + o, narrow, left * sizeof *narrow);
    }
}

/* weight: [outputs / BLOCK][inputs][BLOCK], padded with zeros. */
void row_gemm(const element *weight, const element *x, long x_stride, const element *bias, element *out, long rows,
              long inputs, long outputs, int threads) {
  const long blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
  for (long piece = 0; piece < rows; piece += PIECE) {
    const long count = rows - piece < PIECE ? rows - piece : PIECE;
#pragma omp for schedule(static) nowait
    for (long block = 0; block < blocks; block++) {
      float sums[PIECE * BLOCK];
      for (long from = 0; from < inputs; from += RUN)
        for (long row = 0; row < count; row += TILE_ROWS) {
          const long height = count - row < TILE_ROWS ? count - row : TILE_ROWS;
          TILES[height - 1](weight + (block * inputs + from) * BLOCK, x + (piece + row) * x_stride + from, x_stride,
                            sums + row * BLOCK, inputs - from < RUN ? inputs - from : RUN, from == 0);
        }
      const long o = block * BLOCK, left = outputs - o < BLOCK ? outputs - o : BLOCK;
      finish(sums, bias ? bias + o : 0, out + piece * outputs + o, outputs, count, left);
    }
  }
}
