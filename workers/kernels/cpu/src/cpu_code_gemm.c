/* Products of weights held as codes of 4 or 8 bits, with a scale and perhaps a zero for each group of inputs, and inputs
   of 1, 2 or 3 bytes: integers are summed within a group, and the groups' sums in order. CPUs with VNNI multiply bytes,
   others with AVX2 integers of 16 bits. See cpu_code_gemm.py for the layout and the meaning. */
#include "cpu_grouped.h"
#include "cpu_code_layout.h"
#if defined(VNNI) || (defined(__AVX2__) && defined(__FMA__))
#ifdef VNNI
#include "cpu_code_vnni.h"
#else
#include "cpu_code_avx2.h"
#endif
const int code_gemm_digit_bytes = sizeof(digit);

/* Rows [first, end) times one block, of which `outputs` are there. */
static void multiply_block(const layout *l, const uint8_t *held, long block, const rounded_rows *rows, long first, long end,
                           float unit, const element *bias, element *out, long out_stride, long outputs) {
  const long parts = (end - first + GROUP_ROWS - 1) / GROUP_ROWS;
  const float *outer = l->outer_at ? (const float *)(held + l->outer_at) + block * BLOCK : 0;
  for (long part = 0; part < parts; part++) {
    const long begin = first + (end - first) * part / parts, stop = first + (end - first) * (part + 1) / parts;
    float results[GROUP_ROWS * BLOCK];
    memset(results, 0, (stop - begin) * BLOCK * sizeof *results);
    multiply_all(l, held, block, rows, begin, stop - begin, results);
    for (long row = begin; row < stop; row++)
      for (long o = 0; o < BLOCK && o < outputs; o += LANES) {
        floats sum;
        memcpy(&sum, results + (row - begin) * BLOCK + o, sizeof sum);
        floats y = sum * (rows->scales[row] * unit);
        if (outer) {
          floats of_outputs;
          memcpy(&of_outputs, outer + o, sizeof of_outputs);
          y *= of_outputs;
        }
        if (bias) y += load_some(bias + o, outputs - o);
        store_some(out + row * out_stride + o, y, outputs - o);
      }
  }
}

/* One row's inputs as integers, group by group, each from the start of an eight. sorted: where the inputs go if the weight
   has an order of its own. */
static void round_row(const layout *l, const uint8_t *held, const element *x, element *sorted, int planes, digit *codes,
                      long stride, float *scale, int32_t *sums, float *totals) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at), *order = (const int32_t *)(held + l->order_at);
  const float steps = row_steps(x, l->inputs, planes, scale);
  if (l->order_at) {
    for (long i = 0; i < l->inputs; i++) sorted[i] = x[order[i]];
    x = sorted;
  }
  for (long g = 0, start = 0, at = 0; g < l->groups; at += eights_of(ends, g) * TOGETHER, start = ends[g], g++) {
    round_group(l, x + start, ends[g] - start, steps, planes, codes, at, stride, sums + g, l->groups);
    if (!l->zero_at) continue;
    totals[g] = 0;
    for (int d = 0; d < DIGITS(planes); d++) totals[g] = totals[g] * 256 + sums[d * l->groups + g];
  }
}

/* codes [rows][digits][stride], row_scales [rows], sums [rows][digits][groups], totals [rows][groups] and sorted
   [rows][inputs]: to work in; the last two where the weight has zeros, and an order. unit: of the values. */
void code_gemm(const layout *l, const uint8_t *held, float unit, const element *x, long x_stride, const element *bias,
               element *out, digit *codes, long stride, float *row_scales, int32_t *sums, float *totals, element *sorted,
               int planes, long rows, int threads) {
  const long blocks = (l->outputs + BLOCK - 1) / BLOCK;
  const int digits = DIGITS(planes);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++)
    round_row(l, held, x + row * x_stride, sorted + row * l->inputs, planes, codes + row * digits * stride, stride,
              row_scales + row, sums + row * digits * l->groups, totals + row * l->groups);
  const rounded_rows all = {codes, stride, row_scales, sums, totals, planes};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long block = 0; block < blocks; block++) {
    const long o = block * BLOCK;
    multiply_block(l, held, block, &all, 0, rows, unit, bias ? bias + o : 0, out + o, l->outputs, l->outputs - o);
  }
}

/* Lays out codes [count][inputs] of the outputs from `first` on, a byte each, in `held`, whose ends of groups are there
   and whose rest is zero. */
void pack_codes(const layout *l, const uint8_t *codes, long first, long count, uint8_t *held, int threads) {
  const int32_t *ends = (const int32_t *)(held + l->ends_at);
  long all = 0;
  for (long g = 0; g < l->groups; g++) all += eights_of(ends, g);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long given = 0; given < count; given++) {
    const uint8_t *row = codes + given * l->inputs;
    const long o = first + given;
    uint8_t *at = held + o / BLOCK * all * l->line + o % BLOCK * 4;
    for (long g = 0, start = 0; g < l->groups; start = ends[g], g++)
      for (long i = start; i < ends[g]; i += TOGETHER, at += l->line) {
        uint32_t halves[2] = {0, 0};
        memcpy(halves, row + i, ends[g] - i < TOGETHER ? ends[g] - i : TOGETHER);
        if (l->line == NIBBLES) halves[0] |= halves[1] << 4;
        memcpy(at, halves, 4);
        if (l->line > NIBBLES) memcpy(at + NIBBLES, halves + 1, 4);
      }
  }
}

/* As grouped_gemm (cpu_grouped_gemm.c). held: of each expert, `expert_bytes` apart. */
void grouped_code_gemm(const layout *l, const uint8_t *held, long expert_bytes, float unit, const element *x, long x_stride,
                       const element *bias, element *out, digit *codes, long stride, float *row_scales, int32_t *sums,
                       float *totals, element *sorted, int planes, const int32_t *order, const int32_t *ends, long experts,
                       long top_k, int threads) {
  const long blocks = (l->outputs + BLOCK - 1) / BLOCK, rows = ends[experts - 1];
  const int digits = DIGITS(planes);
  int used[experts];
  const long count = experts_used(ends, experts, used), run = blocks_of_item(count * blocks, threads);
  const long runs = (blocks + run - 1) / run;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows >= 16)
  for (long row = 0; row < rows; row++) {
    long expert = 0;
    while (ends[expert] <= row) expert++;
    round_row(l, held + expert * expert_bytes, x + (top_k ? order[row] / top_k : row) * x_stride, sorted + row * l->inputs,
              planes, codes + row * digits * stride, stride, row_scales + row, sums + row * digits * l->groups,
              totals + row * l->groups);
  }
  const rounded_rows all = {codes, stride, row_scales, sums, totals, planes};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long item = 0; item < count * runs; item++) {
    const long expert = used[item / runs], begin = expert ? ends[expert - 1] : 0, first = item % runs * run;
    for (long block = first; block < first + run && block < blocks; block++) {
      const long o = block * BLOCK;
      multiply_block(l, held + expert * expert_bytes, block, &all, begin, ends[expert], unit,
                     bias ? bias + expert * l->outputs + o : 0, out + o, l->outputs, l->outputs - o);
    }
  }
}
#endif

