/* Paged attention of rows with one query each, for CPUs. See cpu_decode_attention.py for shapes and meaning. */
#include "cpu_vector.h"

#define MAX_DIM 256
#define LINE (64 / (int)sizeof(element)) /* elements of a cache line */

/* One partition of one row's context, all heads. partial: per query head D sums, then the maximum, then the weight. */
INLINE void attend_partition(const element *q, const element *keys, const element *values, float *partial,
                             float *scores, const int32_t *blocks, long first, long last, long heads, long kv_heads,
                             const int D, const int G, long block_size, float scale) {
  const int V = D / LANES;
  const long token = kv_heads * D, block = block_size * token, length = last - first;
  for (long position = first; position < last;) {
    const long in_block = position % block_size;
    const long stop = position - in_block + block_size < last ? position - in_block + block_size : last;
    const element *from = keys + blocks[position / block_size] * block + in_block * token;
    const element *next = stop < last ? keys + blocks[stop / block_size] * block : from;
    for (long h = 0; h < kv_heads; h++) {
      floats query[G * V];
      for (int i = 0; i < G * V; i++) query[i] = load(q + h * G * D + i * LANES);
      float *score = scores + h * G * length + position - first;
      for (long j = 0; j < stop - position; j++) {
        const long offset = j * token + h * D;
        for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 2);
        floats dot[G];
        for (int g = 0; g < G; g++) dot[g] = (floats){};
        for (int i = 0; i < V; i++) {
          const floats key = load(from + offset + i * LANES);
          for (int g = 0; g < G; g++) dot[g] += query[g * V + i] * key;
        }
        for (int g = 0; g < G; g++) score[g * length + j] = sum_lanes(dot[g]) * scale;
      }
    }
    position = stop;
  }
  for (long n = 0; n < heads; n++) {
    float *row = scores + n * length, most = row[0], weight = 0;
    for (long j = 1; j < length; j++) most = row[j] > most ? row[j] : most;
    long j = 0;
    for (; j + LANES <= length; j += LANES) {
      floats x;
      memcpy(&x, row + j, sizeof x);
      x = exponential(x - most);
      memcpy(row + j, &x, sizeof x);
      weight += sum_lanes(x);
    }
    for (; j < length; j++) weight += row[j] = expf(row[j] - most);
    float *mine = partial + n * (D + 2);
    memset(mine, 0, D * sizeof(float));
    mine[D] = most;
    mine[D + 1] = weight;
  }
  for (long position = first; position < last;) {
    const long in_block = position % block_size;
    const long stop = position - in_block + block_size < last ? position - in_block + block_size : last;
    const element *from = values + blocks[position / block_size] * block + in_block * token;
    const element *next = stop < last ? values + blocks[stop / block_size] * block : from;
    for (long h = 0; h < kv_heads; h++) {
      floats sum[G * V];
      for (int g = 0; g < G; g++) memcpy(sum + g * V, partial + (h * G + g) * (D + 2), D * sizeof(float));
      const float *score = scores + h * G * length + position - first;
      for (long j = 0; j < stop - position; j++) {
        const long offset = j * token + h * D;
        for (int i = 0; i < D; i += LINE) __builtin_prefetch(next + offset + i, 0, 2);
        for (int i = 0; i < V; i++) {
          const floats value = load(from + offset + i * LANES);
          for (int g = 0; g < G; g++) sum[g * V + i] += score[g * length + j] * value;
        }
      }
      for (int g = 0; g < G; g++) memcpy(partial + (h * G + g) * (D + 2), sum + g * V, D * sizeof(float));
    }
    position = stop;
  }
}

typedef void partition_function(const element *, const element *, const element *, float *, float *, const int32_t *,
                                long, long, long, long, int, int, long, float);

/* Constants for the shapes in use, so that sums stay in registers; any other shape runs the general form. */
#define FIXED(dim, group)                                                                                             \
  static void attend_##dim##_##group(const element *q, const element *k, const element *v, float *p, float *s,        \
                                     const int32_t *b, long f, long l, long n, long m, int d, int g, long z, float c) { \
    (void)d, (void)g;                                                                                                 \
    attend_partition(q, k, v, p, s, b, f, l, n, m, dim, group, z, c);                                                 \
  }
#define FIXED_DIM(dim) FIXED(dim, 1) FIXED(dim, 2) FIXED(dim, 3) FIXED(dim, 4) FIXED(dim, 8)
FIXED_DIM(64)
FIXED_DIM(128)
static void attend_any(const element *q, const element *k, const element *v, float *p, float *s, const int32_t *b,
                       long f, long l, long n, long m, int d, int g, long z, float c) {
  attend_partition(q, k, v, p, s, b, f, l, n, m, d, g, z, c);
}

#define CHOOSE(dim)                        \
  if (d == dim) {                          \
    if (g == 1) return attend_##dim##_1;   \
    if (g == 2) return attend_##dim##_2;   \
    if (g == 3) return attend_##dim##_3;   \
    if (g == 4) return attend_##dim##_4;   \
    if (g == 8) return attend_##dim##_8;   \
  }
static partition_function *choose(long d, long g) {
  CHOOSE(64)
  CHOOSE(128)
  return attend_any;
}

void decode_attention(const element *q, long q_stride, const element *keys, const element *values, element *out,
                      const int32_t *table, long table_stride, const int32_t *tasks, long num_tasks,
                      const int32_t *rows, long num_rows, float *partials, float *scores, long scores_stride,
                      long heads, long kv_heads, long dim, long block_size, float scale, int threads) {
  partition_function *attend = choose(dim, heads / kv_heads);
  const long partial_size = heads * (dim + 2);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (long t = 0; t < num_tasks; t++) {
      const int32_t *task = tasks + 4 * t; /* row of the table, token, first position, last position + 1 */
      attend(q + task[1] * q_stride, keys, values, partials + t * partial_size, scores + t * scores_stride,
             table + task[0] * table_stride, task[2], task[3], heads, kv_heads, dim, heads / kv_heads, block_size,
             scale);
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

/* Stores the tokens' keys and values at their slots. size: elements of one token, all KV heads. */
void write_kv(const element *k, long k_stride, const element *v, long v_stride, element *keys, element *values,
              const int64_t *slots, long tokens, long size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens >= 64)
  for (long t = 0; t < tokens; t++) {
    memcpy(keys + slots[t] * size, k + t * k_stride, size * sizeof(element));
    memcpy(values + slots[t] * size, v + t * v_stride, size * sizeof(element));
  }
}
