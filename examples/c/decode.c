/* Attention over two cached sequences in pages of 16 tokens, checked against the definition.
 *
 *     cc -std=c99 decode.c $(pkg-config --cflags --libs flashmla) -lm && ./a.out
 */
#include <flashmla/flashmla.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  kBatch = 2,
  kHeads = 4,
  kHeadDim = 576,
  kHeadDimV = 512,
  kPage = 16,
  kBlocks = 8,
  kPagesPerRow = 4,
  kMostParts = 64
};

static float q[kBatch][1][kHeads][kHeadDim];
static float k_cache[kBlocks][kPage][1][kHeadDim];
static float out[kBatch][1][kHeads][kHeadDimV];
static float lse[kBatch][kHeads][1];
static int32_t plan_rows[kMostParts][8];
static int32_t num_splits[kBatch + 1];

/* Sequence 0 has 40 tokens in blocks 5, 2 and 7; sequence 1 has 9 in block 0. What stands in unused
 * entries does not matter. */
static const int32_t cache_seqlens[kBatch] = {40, 9};
static const int32_t block_table[kBatch][kPagesPerRow] = {{5, 2, 7, -1}, {0, -1, -1, -1}};

static void check(flashmla_status status) {
  if (status == FLASHMLA_OK) return;
  fprintf(stderr, "flashmla: %s\n", flashmla_last_error());
  exit(1);
}

/* A contiguous tensor over memory that the library will not leave. */
static flashmla_tensor tensor(const void* data, size_t size_bytes, int32_t dtype, int32_t rank,
                              const int64_t* shape) {
  flashmla_tensor result = {0};
  int64_t stride = 1;
  int32_t i;
  result.data = (void*)data;
  result.dtype = dtype;
  result.rank = rank;
  result.size_bytes = size_bytes;
  for (i = rank - 1; i >= 0; --i) {
    result.shape[i] = shape[i];
    result.strides[i] = stride;
    stride *= shape[i];
  }
  return result;
}

static float value_of(int a, int b, int c) {
  return (float)((a * 37 + b * 13 + c * 11) % 101 - 50) / 64.0f;
}

static const float* token(int row, int j) {
  return k_cache[block_table[row][j / kPage]][j % kPage][0];
}

/* The definition in double precision; returns the largest difference of out and lse. */
static double largest_error(int row, int head) {
  double scores[64], sum = 0.0, expected_lse, worst;
  const double scale = 1.0 / sqrt((double)kHeadDim);
  int j, c;
  for (j = 0; j < cache_seqlens[row]; ++j) {
    double dot = 0.0;
    for (c = 0; c < kHeadDim; ++c) dot += (double)q[row][0][head][c] * token(row, j)[c];
    scores[j] = scale * dot;
    sum += exp(scores[j]);
  }
  expected_lse = log(sum);
  worst = fabs(lse[row][head][0] - expected_lse);
  for (c = 0; c < kHeadDimV; ++c) {
    double expected = 0.0;
    for (j = 0; j < cache_seqlens[row]; ++j) {
      expected += exp(scores[j] - expected_lse) * token(row, j)[c];
    }
    worst = fmax(worst, fabs(out[row][0][head][c] - expected));
  }
  return worst;
}

int main(void) {
  const int64_t q_shape[] = {kBatch, 1, kHeads, kHeadDim};
  const int64_t cache_shape[] = {kBlocks, kPage, 1, kHeadDim};
  const int64_t table_shape[] = {kBatch, kPagesPerRow};
  const int64_t batch_shape[] = {kBatch};
  const int64_t splits_shape[] = {kBatch + 1};
  const int64_t out_shape[] = {kBatch, 1, kHeads, kHeadDimV};
  const int64_t lse_shape[] = {kBatch, kHeads, 1};
  int64_t plan_shape[] = {0, 8};
  flashmla_plan_args plan = {0};
  flashmla_decode_args decode = {0};
  const char *kernel = NULL, *report = NULL;
  size_t workspace_bytes = 0;
  void* workspace = NULL;
  int32_t num_parts = 0;
  double worst = 0.0;
  int row, head, j, c;

  for (row = 0; row < kBatch; ++row) {
    for (head = 0; head < kHeads; ++head) {
      for (c = 0; c < kHeadDim; ++c) q[row][0][head][c] = value_of(row, head, c);
    }
    for (j = 0; j < cache_seqlens[row]; ++j) {
      float* slot = k_cache[block_table[row][j / kPage]][j % kPage][0];
      for (c = 0; c < kHeadDim; ++c) slot[c] = value_of(row + 3, j, c);
    }
  }

  /* Once a decoding step: divide the sequences over the threads. */
  check(flashmla_plan_num_parts(FLASHMLA_CPU, 0, kHeads, 1, 0, &num_parts));
  if (num_parts > kMostParts) num_parts = kMostParts;
  plan_shape[0] = num_parts;
  plan.struct_size = sizeof(plan);
  plan.device_type = FLASHMLA_CPU;
  plan.cache_seqlens = tensor(cache_seqlens, sizeof(cache_seqlens), FLASHMLA_INT32, 1, batch_shape);
  plan.num_heads_per_head_k = kHeads;
  plan.num_heads_k = 1;
  plan.tile_scheduler_metadata =
      tensor(plan_rows, sizeof(plan_rows), FLASHMLA_INT32, 2, plan_shape);
  plan.num_splits = tensor(num_splits, sizeof(num_splits), FLASHMLA_INT32, 1, splits_shape);
  check(flashmla_plan(&plan));

  /* Once a layer: attention. */
  decode.struct_size = sizeof(decode);
  decode.device_type = FLASHMLA_CPU;
  decode.q = tensor(q, sizeof(q), FLASHMLA_FLOAT32, 4, q_shape);
  decode.k_cache = tensor(k_cache, sizeof(k_cache), FLASHMLA_FLOAT32, 4, cache_shape);
  decode.block_table = tensor(block_table, sizeof(block_table), FLASHMLA_INT32, 2, table_shape);
  decode.cache_seqlens = plan.cache_seqlens;
  decode.tile_scheduler_metadata = plan.tile_scheduler_metadata;
  decode.num_splits = plan.num_splits;
  decode.out = tensor(out, sizeof(out), FLASHMLA_FLOAT32, 4, out_shape);
  decode.softmax_lse = tensor(lse, sizeof(lse), FLASHMLA_FLOAT32, 3, lse_shape);
  decode.head_dim_v = kHeadDimV;
  check(flashmla_decode_workspace_size(&decode, 0, &workspace_bytes));
  /* The library wants 64-byte alignment, which C99's malloc does not promise. */
  workspace = malloc(workspace_bytes + 64);
  if (workspace == NULL) return 1;
  check(flashmla_decode(&decode, (char*)workspace + (64 - (uintptr_t)workspace % 64),
                        workspace_bytes, NULL));
  free(workspace);

  check(flashmla_explain_selection(&decode, &kernel, &report));
  printf("flashmla %s, kernel %s\n", flashmla_version(), kernel);
  for (row = 0; row < kBatch; ++row) {
    printf("sequence %d, %2d tokens:", row, (int)cache_seqlens[row]);
    for (head = 0; head < kHeads; ++head) {
      worst = fmax(worst, largest_error(row, head));
      printf("  head %d lse %.6f out %.5f ...", head, lse[row][head][0], out[row][0][head][0]);
    }
    printf("\n");
  }
  printf("largest difference from the definition in double precision: %.1e\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
