/* LANES floats at a time, and the element type of one library: ELEMENT is 0 for float32, 1 for bfloat16.
   Plain GNU C vectors, which any CPU's compiler maps to its own. Those that are wider than the CPU's are kept in memory:
   a source whose time they would take defines 8 LANES where there are no vectors of sixteen. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 16
#endif
#if defined(__AVX512F__) && LANES == 16
#define SIXTEEN /* a vector is a register of AVX512 */
#endif
#if defined(SIXTEEN) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MASKED /* parts of vectors are read and written under a mask */
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE floats load_bf16(const uint16_t *at) {
#ifdef SIXTEEN /* compilers turn the portable conversion into two instructions */
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#elif defined(__AVX2__) && LANES == 8
  return (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#else
  halves x;
  memcpy(&x, at, sizeof x);
  return (floats)(__builtin_convertvector(x, words) << 16);
#endif
}
/* To nearest, ties to even; NaN stays NaN. */
INLINE words rounded_bits(floats x) {
  words bits = (words)x;
  words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  words is_nan = (words)(x != x);
  return (nearest & ~is_nan) | (0x7fc00000u & is_nan);
}
INLINE void store_bf16(uint16_t *at, floats x) {
#ifdef SIXTEEN
  _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16((__m512i)(rounded_bits(x) >> 16)));
#else
  halves narrow = __builtin_convertvector(rounded_bits(x) >> 16, halves);
  memcpy(at, &narrow, sizeof narrow);
#endif
}

#if ELEMENT == 0
typedef float element;
INLINE floats load(const element *at) { floats x; memcpy(&x, at, sizeof x); return x; }
INLINE void store(element *at, floats x) { memcpy(at, &x, sizeof x); }
INLINE floats rounded(floats x) { return x; }
#else
typedef uint16_t element;
INLINE floats load(const element *at) { return load_bf16(at); }
INLINE void store(element *at, floats x) { store_bf16(at, x); }
INLINE floats rounded(floats x) { return (floats)rounded_bits(x); }
#endif

/* Lanes 0..count of the vector at `at`, the rest zero; count may exceed a vector. */
INLINE floats load_some(const element *at, long count) {
  if (count >= LANES) return load(at);
#if !defined(MASKED)
  element part[LANES] = {0};
  memcpy(part, at, count * sizeof(element));
  return load(part);
#elif ELEMENT == 0
  return (floats)_mm512_maskz_loadu_ps((1u << count) - 1, at);
#else
  return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << count) - 1, at)), 16);
#endif
}
INLINE void store_some(element *at, floats x, long count) {
  if (count >= LANES) {
    store(at, x);
    return;
  }
#if !defined(MASKED)
  element part[LANES];
  store(part, x);
  memcpy(at, part, count * sizeof(element));
#elif ELEMENT == 0
  _mm512_mask_storeu_ps(at, (1u << count) - 1, (__m512)x);
#else
  _mm256_mask_storeu_epi16(at, (1u << count) - 1, _mm512_cvtepi32_epi16((__m512i)(rounded_bits(x) >> 16)));
#endif
}

#if LANES == 8
INLINE float sum_lanes(floats x) {
  x += __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3});
  x += __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5});
  x += __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6});
  return x[0];
}
#else
INLINE float sum_lanes(floats x) {
  x += __builtin_shuffle(x, (ints){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, (ints){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, (ints){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  x += __builtin_shuffle(x, (ints){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
  return x[0];
}
#endif

INLINE floats choose_lanes(ints mask, floats yes, floats no) {
  return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE float max_lanes(floats x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

/* e^x, relative error about 1e-7: 2^n by exponent bits, e^f by a polynomial. Below -87 it stays at e^-87, above 88 it
   is infinite; NaN stays NaN. */
INLINE floats exponential(floats given) {
  floats x = choose_lanes(given < -87.0f, (floats){} - 87.0f, given);
  x = choose_lanes(x > 88.0f, (floats){} + 88.0f, x);
  floats scaled = x * 1.44269504088896341f;
  floats shifter = (floats){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  floats whole = (scaled + shifter) - shifter;
  floats f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  floats p = (floats){} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  ints power = (__builtin_convertvector(whole, ints) + 127) << 23;
  p = choose_lanes(given > 88.0f, (floats){} + INFINITY, p * (floats)power);
  return choose_lanes(given != given, given, p);
}

/* cap * tanh(x / cap), relative error about 1e-7: a rational function, as Eigen has it. NaN stays NaN. */
INLINE floats capped(floats given, float cap) {
  const float end = 7.90531110763549805f; /* from here on it is 1 in float32 */
  floats x = given * (1 / cap);
  x = choose_lanes(x > end, (floats){} + end, x);
  x = choose_lanes(x < -end, (floats){} - end, x);
  const floats y = x * x;
  floats p = y * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * y + -8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  floats q = y * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p / q * cap;
}
