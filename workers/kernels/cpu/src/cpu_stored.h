/* The KV cache's element type. STORED is 0 for the compute type, 1 for int8, 2 for fp8 e4m3, 3 for bfloat16 under float32.
   load_stored() * UNIT is the stored value; where SCALED, times the scale of its token and head. */
#include "cpu_vector.h"

typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));

#define SCALED (STORED == 1 || STORED == 2)
#define UNIT (STORED == 2 ? 256.0f : 1.0f)

#if STORED == 0
typedef element stored;
INLINE floats load_stored(const stored *at) { return load(at); }
INLINE void store_stored(stored *at, floats x) { store(at, x); }

#elif STORED == 1
typedef int8_t stored;
#define LARGEST 127.0f
INLINE floats load_stored(const stored *at) {
#ifdef SIXTEEN
  return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__) && LANES == 8
  return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
  bytes x;
  memcpy(&x, at, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, ints), floats);
#endif
}
INLINE void store_stored(stored *at, floats x) {
  const floats shifter = (floats){} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
  const bytes narrow = __builtin_convertvector(__builtin_convertvector((x + shifter) - shifter, ints), bytes);
  memcpy(at, &narrow, sizeof narrow);
}

#elif STORED == 2
typedef int8_t stored; /* sign, 4 bits of exponent with bias 7, 3 bits of mantissa; NaN codes are never written */
#define LARGEST 448.0f
/* The value / 256: an e4m3 code, moved 7 bits up, is the fp16 of that. */
INLINE floats load_stored(const stored *at) {
#ifdef SIXTEEN
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
  return (floats)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
#elif defined(__F16C__)
  bytes narrow;
  memcpy(&narrow, at, sizeof narrow);
  const shorts wide = (__builtin_convertvector(narrow, shorts) << 7) & (int16_t)0xbf80;
  __m128i half[LANES / 8];
  __m256 x[LANES / 8];
  memcpy(half, &wide, sizeof wide);
  UNROLLED for (int i = 0; i < LANES / 8; i++) x[i] = _mm256_cvtph_ps(half[i]);
  floats all;
  memcpy(&all, x, sizeof all);
  return all;
#else
  bytes x;
  memcpy(&x, at, sizeof x);
  const ints code = __builtin_convertvector(x, ints), magnitude = code & 0x7f;
  const ints normal = (magnitude << 20) + (112 << 23);
  const floats small = __builtin_convertvector(magnitude, floats) * 0x1p-17f;
  return (floats)((ints)choose_lanes(magnitude < 8, small, (floats)normal) | (code & (int32_t)0x80000000));
#endif
}
INLINE void store_stored(stored *at, floats x) {
  const ints bits = (ints)x, magnitude = bits & 0x7fffffff;
  const ints normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const ints small = (ints)((floats)magnitude + 16384.0f) - 0x46800000; /* the unit in the last place of 2^14 is 2^-9 */
  const ints below = magnitude < 0x3c800000;                          /* 2^-6 */
  const ints code = (small & below) | (normal & ~below) | ((bits >> 24) & 0x80);
  const bytes narrow = __builtin_convertvector(code, bytes);
  memcpy(at, &narrow, sizeof narrow);
}

#else
typedef uint16_t stored;
INLINE floats load_stored(const stored *at) { return load_bf16(at); }
INLINE void store_stored(stored *at, floats x) { store_bf16(at, x); }
#endif

/* Elements 0..count of the vector at `at`, the rest zero; count may exceed a vector. */
INLINE floats load_stored_some(const stored *at, long count) {
  if (count >= LANES) return load_stored(at);
#if STORED == 0
  return load_some(at, count);
#else
  stored part[LANES] = {0};
#ifdef MASKED
  if (sizeof(stored) == 1)
    _mm_storeu_si128((__m128i *)part, _mm_maskz_loadu_epi8((1u << count) - 1, at));
  else
    _mm256_storeu_si256((__m256i *)part, _mm256_maskz_loadu_epi16((1u << count) - 1, at));
#else
  memcpy(part, at, count * sizeof *part);
#endif
  return load_stored(part);
#endif
}
/* Writes elements 0..count. */
INLINE void store_stored_some(stored *at, floats x, long count) {
  if (count >= LANES) {
    store_stored(at, x);
    return;
  }
  stored part[LANES];
  store_stored(part, x);
  memcpy(at, part, count * sizeof *part);
}
