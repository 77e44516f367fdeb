/* The two passes that make codes of dense weights at load, in float32: the bounds of each group, and the nearest codes.
   The same operations in the same order as parallel/quantization/rounding.py, so the same bits. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define CHUNK 512  /* weights of a row that are widened at a time */
#define MIDDLES 15 /* numbers between the values of a table of 16 */

/* A weight [outputs, inputs], rows `stride` elements apart, and where its groups end. */
typedef struct {
  const char *rows;
  long stride, is_bf16, outputs, inputs, groups;
  const int32_t *ends;
} dense;

INLINE long least_of(long a, long b) { return a < b ? a : b; }

/* Weights of a row as float32: where they are, or in `room`. */
INLINE const float *wide(const dense *w, long o, long first, long count, float *room) {
  const long at = o * w->stride + first;
  if (!w->is_bf16) return (const float *)w->rows + at;
  const uint16_t *halves = (const uint16_t *)w->rows + at;
  for (long i = 0; i < count; i++) {
    const uint32_t bits = (uint32_t)halves[i] << 16;
    memcpy(room + i, &bits, 4);
  }
  return room;
}

void code_bounds(const dense *w, float *least, float *largest, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long o = 0; o < w->outputs; o++) {
    float room[CHUNK];
    for (long g = 0, first = 0; g < w->groups; g++) {
      float low = 0, high = 0;
      while (first < w->ends[g]) {
        const long count = least_of(CHUNK, w->ends[g] - first);
        const float *x = wide(w, o, first, count, room);
#pragma omp simd reduction(min : low) reduction(max : high)
        for (long i = 0; i < count; i++) {
          low = x[i] < low ? x[i] : low;
          high = x[i] > high ? x[i] : high;
        }
        first += count;
      }
      least[o * w->groups + g] = low;
      largest[o * w->groups + g] = high;
    }
  }
}

/* Integers from 0 to `most`, of which `zero` of the group stands for 0. */
INLINE void between(const float *x, long count, float scale, float zero, float most, uint8_t *codes) {
  for (long i = 0; i < count; i++) {
    const float code = __builtin_rintf(x[i] / scale) + zero, above = code > 0 ? code : 0;
    codes[i] = (uint8_t)(int32_t)(above < most ? above : most);
  }
}

/* Places among the values of a table: the middles between them that are less. */
INLINE void nearest(const float *x, long count, float scale, const float *middles, uint8_t *codes) {
  for (long i = 0; i < count; i++) {
    const float unit = x[i] / scale;
    int32_t place = 0;
    for (int k = 0; k < MIDDLES; k++) place += unit > middles[k];
    codes[i] = (uint8_t)place;
  }
}

/* zeros: of each group, and `most`, the largest code; or none, and middles [15]. scales: of each group, 0 where all of
   it is. codes: [outputs][inputs]; places where there are middles. */
void nearest_codes(const dense *w, const float *scales, const float *zeros, float most, const float *middles,
                   uint8_t *codes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long o = 0; o < w->outputs; o++) {
    float room[CHUNK], none[CHUNK] = {0};
    for (long g = 0, first = 0; g < w->groups; g++) {
      const float scale = scales[o * w->groups + g];
      while (first < w->ends[g]) {
        const long count = least_of(CHUNK, w->ends[g] - first);
        const float *x = scale > 0 ? wide(w, o, first, count, room) : none;
        uint8_t *to = codes + o * w->inputs + first;
        if (zeros) between(x, count, scale > 0 ? scale : 1, zeros[o * w->groups + g], most, to);
        else nearest(x, count, scale > 0 ? scale : 1, middles, to);
        first += count;
      }
    }
  }
}
