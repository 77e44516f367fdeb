/* How weights are held that are codes, for every CPU. See cpu_code_gemm.py. */
#include <stdint.h>

/* What an input of some bytes is held in: bytes, which VNNI multiplies, or integers of 16 bits. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define VNNI
typedef int8_t digit;
#define DIGITS(planes) (planes)
#else
typedef int16_t digit;
#define DIGITS(planes) (((planes) + 1) / 2)
#endif

#define TILE_UNROLLED _Pragma("GCC unroll 24")
#define BLOCK 32      /* outputs of one block of weights */
#define TOGETHER 8    /* inputs whose codes stand together: two of each output in a byte, four apart, or a byte each */
#define GROUP_ROWS 48 /* rows whose sums are kept at a time */

/* How a weight is held: the numbers of cpu_code_gemm.py's CodeLayout, places in bytes; 0: there is none. Scales that
   have outer ones are numbers in E4M3, a byte each. tables: what
   codes of 4 bits mean, less offset, up to three bytes of it: the highest first. */
typedef struct {
  long outputs, inputs, groups, line, scale_at, zero_at, outer_at, ends_at, order_at, planes;
  long offsets[3], tables[3][16];
} layout;
#define NIBBLES (BLOCK * TOGETHER / 2) /* `line`: bytes of eight inputs of a block; the other one is BLOCK * TOGETHER */

/* Eights of inputs of a group, which its codes are padded to. */
INLINE long eights_of(const int32_t *ends, long g) {
  return (ends[g] - (g ? ends[g - 1] : 0) + TOGETHER - 1) / TOGETHER;
}

/* Rows that have been rounded. */
typedef struct {
  const digit *codes; /* [row][digit][stride] */
  long stride;
  const float *scales; /* [row] */
  const int32_t *sums; /* of a group's digits: [row][digit][groups] */
  const float *totals; /* of a group's integers: [row][groups], where there are zeros */
  int planes; /* bytes of an input */
} rounded_rows;
