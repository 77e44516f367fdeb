/* Paged attention of rows with one query each, for CPUs. See cpu_decode_attention.py for shapes and meaning. */
#include <omp.h>

#include "cpu_stored.h"

#define MAX_DIM 256
#define MAX_TILE 4
#define LINE (64 / (int)sizeof(stored)) /* elements of a cache line */

typedef struct {
  const stored *keys, *values;
  const float *key_scales, *value_scales; /* of each token and KV head, where SCALED */
} cache;

/* One partition of one row's context, all heads, G query heads of one KV head at a time.
   partial: per query head D sums, then the maximum, then the weight. */
INLINE void attend_partition(const element *q, const cache *kv, float *partial, float *scores, const int32_t *blocks,
                             long first, long last, long heads, long kv_heads, const int D, const int G,
                             long block_size, float scale) {
  const int V = D / LANES;
  const long tiles = heads / kv_heads / G;
  const long token = kv_heads * D, block = block_size * token;
  const long length = (last - first + LANES - 1) / LANES * LANES; /* of a head's scores, padded */
  for (long position = first; position < last;) {
    const long in_block = position % block_size;
    const long stop = position - in_block + block_size < last ? position - in_block + block_size : last;
    const long slot = blocks[position / block_size] * block_size + in_block;
    const stored *from = kv->keys + slot * token;
    const stored *next = stop < last ? kv->keys + blocks[stop / block_size] * block : kv->values + blocks[first / block_size] * block;
    for (long h = 0; h < kv_heads * tiles; h++) {
      floats query[MAX_TILE * MAX_DIM / LANES];
      UNROLLED for (int i = 0; i < G * V; i++) query[i] = load(q + h * G * D + i * LANES);
      float *score = scores + h * G * length + position - first;
      for (long j = 0; j < stop - position; j++) {
        const long offset = j * token + h / tiles * D;
        for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 2);
        floats dot[MAX_TILE];
        UNROLLED for (int g = 0; g < G; g++) dot[g] = (floats){};
        UNROLLED for (int i = 0; i < V; i++) {
          const floats key = load_stored(from + offset + i * LANES);
          UNROLLED for (int g = 0; g < G; g++) dot[g] += query[g * V + i] * key;
        }
        const float factor = SCALED ? scale * UNIT * kv->key_scales[(slot + j) * kv_heads + h / tiles] : scale;
        UNROLLED for (int g = 0; g < G; g++) score[g * length + j] = sum_lanes(dot[g]) * factor;
      }
    }
    position = stop;
  }
  for (long n = 0; n < heads; n++) {
    float *row = scores + n * length, *mine = partial + n * (D + 2);
    for (long j = last - first; j < length; j++) row[j] = -INFINITY;
    floats x, most = {}, weight = {};
    most -= INFINITY;
    for (long j = 0; j < length; j += LANES) {
      memcpy(&x, row + j, sizeof x);
      most = choose_lanes(x > most, x, most);
    }
    most = (floats){} + max_lanes(most);
    for (long j = 0; j < length; j += LANES) {
      memcpy(&x, row + j, sizeof x);
      x = exponential(x - most);
      memcpy(row + j, &x, sizeof x);
      weight += x;
    }
    memset(mine, 0, D * sizeof(float));
    mine[D] = most[0];
    mine[D + 1] = sum_lanes(weight);
  }
  for (long position = first; position < last;) {
    const long in_block = position % block_size;
    const long stop = position - in_block + block_size < last ? position - in_block + block_size : last;
    const long slot = blocks[position / block_size] * block_size + in_block;
    const stored *from = kv->values + slot * token;
    const stored *next = stop < last ? kv->values + blocks[stop / block_size] * block : from;
    for (long h = 0; h < kv_heads * tiles; h++) {
      const float *score = scores + h * G * length + position - first;
      float *mine = partial + h * G * (D + 2);
      floats sum[MAX_TILE * MAX_DIM / LANES];
      UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < V; i++) memcpy(sum + g * V + i, mine + g * (D + 2) + i * LANES, sizeof *sum);
      for (long j = 0; j < stop - position; j++) {
        const long offset = j * token + h / tiles * D;
        for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 2);
        const float factor = SCALED ? UNIT * kv->value_scales[(slot + j) * kv_heads + h / tiles] : 1.0f;
        UNROLLED for (int i = 0; i < V; i++) {
          const floats value = load_stored(from + offset + i * LANES);
          UNROLLED for (int g = 0; g < G; g++) sum[g * V + i] += score[g * length + j] * factor * value;
        }
      }
      UNROLLED for (int g = 0; g < G; g++)
        UNROLLED for (int i = 0; i < V; i++) memcpy(mine + g * (D + 2) + i * LANES, sum + g * V + i, sizeof *sum);
    }
    position = stop;
  }
}

typedef void partition_function(const element *, const cache *, float *, float *, const int32_t *, long, long, long,
                                long, int, long, float);

/* Constants for the shapes in use, so that sums stay in registers. */
#define FIXED(name, dim, group)                                                                                 \
  static void name##_##group(const element *q, const cache *kv, float *p, float *s, const int32_t *b, long f, long l, \
                             long n, long m, int d, long z, float c) {                                          \
    (void)d;                                                                                                    \
    attend_partition(q, kv, p, s, b, f, l, n, m, dim, group, z, c);                                             \
  }
#define FIXED_DIM(name, dim) FIXED(name, dim, 1) FIXED(name, dim, 2) FIXED(name, dim, 3) FIXED(name, dim, 4)
FIXED_DIM(attend_64, 64)
FIXED_DIM(attend_128, 128)
FIXED_DIM(attend_any, d)

#define CHOOSE(name) (tile == 1 ? name##_1 : tile == 2 ? name##_2 : tile == 3 ? name##_3 : name##_4)
static partition_function *choose(long dim, long group) {
  const int tile = group % 4 == 0 ? 4 : group % 3 == 0 ? 3 : group % 2 == 0 ? 2 : 1;
  return dim == 64 ? CHOOSE(attend_64) : dim == 128 ? CHOOSE(attend_128) : CHOOSE(attend_any);
}

void decode_attention(const element *q, long q_stride, const stored *keys, const stored *values,
                      const float *key_scales, const float *value_scales, element *out, const int32_t *table, long table_stride, const int32_t *tasks, long num_tasks,
                      const int32_t *rows, long num_rows, float *partials, float *scores, long scores_stride,
                      long heads, long kv_heads, long dim, long block_size, float scale, int threads) {
  const cache kv = {keys, values, key_scales, value_scales};
  partition_function *attend = choose(dim, heads / kv_heads);
  const long partial_size = heads * (dim + 2);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (long t = 0; t < num_tasks; t++) {
      const int32_t *task = tasks + 4 * t; /* row of the table, token, first position, last position + 1 */
      attend(q + task[1] * q_stride, &kv, partials + t * partial_size, scores + omp_get_thread_num() * scores_stride,
             table + task[0] * table_stride, task[2], task[3], heads, kv_heads, dim, block_size, scale);
    }
#pragma omp for schedule(static) collapse(2)
    for (long r = 0; r < num_rows; r++)
      for (long n = 0; n < heads; n++) {
        const int32_t *row = rows + 3 * r; /* token, first task, last task + 1 */
        float most = -INFINITY, weight = 0;
        floats sum[MAX_DIM / LANES];
        memset(sum, 0, sizeof sum);
        for (long t = row[1]; t < row[2]; t++) {
          const float m = partials[t * partial_size + n * (dim + 2) + dim];
          most = m > most ? m : most;
        }
        for (long t = row[1]; t < row[2]; t++) {
          const float *part = partials + t * partial_size + n * (dim + 2);
          const float factor = expf(part[dim] - most);
          weight += part[dim + 1] * factor;
          for (long i = 0; i < dim / LANES; i++) {
            floats x;
            memcpy(&x, part + i * LANES, sizeof x);
            sum[i] += x * factor;
          }
        }
        for (long i = 0; i < dim / LANES; i++) store(out + (row[0] * heads + n) * dim + i * LANES, sum[i] / weight);
      }
  }
}
