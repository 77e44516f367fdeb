/* Writes to the KV cache and reads from it, quantized or not, for CPUs. See cpu_kv_quant.py and kv_store.py for the meaning. */
#include "cpu_stored.h"

/* Stores one token and head. `scale` is set where the type needs one. */
INLINE void encode(const element *x, stored *codes, float *scale, long dim) {
#if STORED == 0
  memcpy(codes, x, dim * sizeof *codes);
#elif !SCALED
  for (long i = 0; i < dim; i += LANES) store_stored_some(codes + i, load_some(x + i, dim - i), dim - i);
#else
  ints most = {};
  for (long i = 0; i < dim; i += LANES) { /* as integers, so that NaN is above infinity and infinity above all */
    const ints bits = (ints)load_some(x + i, dim - i) & 0x7fffffff;
    most = (bits & (bits > most)) | (most & ~(bits > most));
  }
  int32_t largest = 0;
  for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
  float magnitude;
  memcpy(&magnitude, &largest, sizeof magnitude);
  *scale = largest >= 0x7f800000 ? NAN : magnitude / LARGEST;
  if (!(*scale > 0)) {
    memset(codes, 0, dim * sizeof *codes);
    return;
  }
  const floats top = (floats){} + LARGEST;
  for (long i = 0; i < dim; i += LANES) {
    floats y = load_some(x + i, dim - i) / *scale;
    y = choose_lanes(y > top, top, y);
    y = choose_lanes(y < -top, -top, y);
    store_stored_some(codes + i, y, dim - i);
  }
#endif
}

INLINE void encode_token(const element *x, stored *cache, float *scales, int64_t slot, long heads, long dim) {
  for (long h = 0; h < heads; h++)
    encode(x + h * dim, cache + (slot * heads + h) * dim, scales + (SCALED ? slot * heads + h : 0), dim);
}

/* Stores the tokens' keys and values at their slots. */
void write_kv(const element *k, long k_stride, const element *v, long v_stride, stored *keys, stored *values,
              float *key_scales, float *value_scales, const int64_t *slots, long tokens, long heads, long dim,
              int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens >= 64)
  for (long t = 0; t < tokens; t++) {
    encode_token(k + t * k_stride, keys, key_scales, slots[t], heads, dim);
    encode_token(v + t * v_stride, values, value_scales, slots[t], heads, dim);
  }
}

/* Copies whole blocks out, in the compute type. heads: of all tokens of a block. */
void gather_blocks(const stored *cache, const float *scales, const int64_t *blocks, long count, element *out,
                   long heads, long dim, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * heads * dim >= 65536)
  for (long b = 0; b < count; b++) {
    const stored *from = cache + blocks[b] * heads * dim;
    element *to = out + b * heads * dim;
#if STORED == 0
    memcpy(to, from, heads * dim * sizeof *to);
#else
    for (long h = 0; h < heads; h++) {
      const float factor = SCALED ? scales[blocks[b] * heads + h] * UNIT : 1.0f;
      for (long i = 0; i < dim; i += LANES) {
        const long at = h * dim + i;
        store_some(to + at, load_stored_some(from + at, dim - i) * factor, dim - i);
      }
    }
#endif
  }
}
