// The validated forms of a request. Whoever holds a Problem may rely on every statement here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "flashmla/status.hpp"
#include "flashmla/types.hpp"
#include "kv/format.hpp"
#include "problem/request.hpp"

namespace flashmla {

// Tokens in a block of the plan, whatever the page size.
inline constexpr std::int32_t kBlockTokens = 64;
// The longest row that is computed. Kernels count tokens in int32, by blocks of up to 1024: the
// count past the last block must fit.
inline constexpr std::int32_t kMaxRowTokens = INT32_MAX - 1023;
// int32 fields in a row of tile_scheduler_metadata.
inline constexpr std::int32_t kPlanRowFields = 8;

struct HeadDims {
  std::int32_t head_dim;
  std::int32_t head_dim_v;
};
// Every pair that the operator accepts, in the order in which messages list them.
std::span<const HeadDims> supported_head_dims();

// A validated attention call. Strides are in elements and non-negative; the last dimension of q,
// k_cache and out has stride 1. head_dim and head_dim_v are multiples of 32, num_heads_k divides
// num_heads_q. On the CPU the contents are valid too: lengths, used block ids, visible_lens.
struct Problem {
  Device device;
  DType dtype = DType::kBFloat16;
  KvFormat kv_format = KvFormat::kDense;
  std::int32_t batch = 0;
  std::int32_t seq_len_q = 0;
  std::int32_t num_heads_q = 0;
  std::int32_t num_heads_k = 0;
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  std::int64_t num_blocks = 0;
  std::int32_t page_size = 0;
  std::int32_t max_pages_per_row = 0;
  double softmax_scale = 0.0;
  bool causal = false;

  const void* q = nullptr;
  std::int64_t q_batch_stride = 0, q_token_stride = 0, q_head_stride = 0;
  const void* k_cache = nullptr;
  std::int64_t k_block_stride = 0, k_token_stride = 0, k_head_stride = 0;
  const std::int32_t* block_table = nullptr;
  std::int64_t block_table_batch_stride = 0, block_table_page_stride = 0;
  const std::int32_t* cache_seqlens = nullptr;
  std::int64_t cache_seqlens_stride = 0;
  const std::int32_t* visible_lens = nullptr;  // null: `causal` decides
  std::int64_t visible_lens_batch_stride = 0, visible_lens_token_stride = 0;

  const std::int32_t* plan_rows = nullptr;  // (num_parts, kPlanRowFields), fields contiguous
  std::int64_t plan_row_stride = 0;
  std::int32_t num_parts = 0;  // num_splits is checked, but not kept: the walk says all

  void* out = nullptr;
  std::int64_t out_batch_stride = 0, out_token_stride = 0, out_head_stride = 0;
  float* lse = nullptr;
  std::int64_t lse_batch_stride = 0, lse_head_stride = 0, lse_token_stride = 0;

  // Query heads that share one key/value head.
  std::int32_t heads_per_kv_head() const { return num_heads_q / num_heads_k; }
  // Query rows of one key/value head: row = t * heads_per_kv_head() + (h % heads_per_kv_head()).
  // Fits in int32 by validation.
  std::int32_t query_rows() const { return seq_len_q * heads_per_kv_head(); }

  // The accessors below read tensors, so they are for code that runs on `device`.
  std::int32_t row_length(std::int64_t row) const {
    return cache_seqlens[row * cache_seqlens_stride];
  }
  // How many leading cached tokens query token t of a row sees: in [0, row_length(row)].
  std::int32_t visible_tokens(std::int64_t row, std::int64_t t) const {
    const std::int32_t length = row_length(row);
    if (visible_lens != nullptr) {
      return visible_lens[row * visible_lens_batch_stride + t * visible_lens_token_stride];
    }
    if (!causal) return length;
    return static_cast<std::int32_t>(
        std::max<std::int64_t>(0, static_cast<std::int64_t>(length) - seq_len_q + t + 1));
  }
  std::int32_t page(std::int64_t row, std::int64_t index) const {
    return block_table[row * block_table_batch_stride + index * block_table_page_stride];
  }
};

// A validated planning call.
struct PlanProblem {
  Device device;
  std::int32_t batch = 0;
  const std::int32_t* cache_seqlens = nullptr;
  std::int64_t cache_seqlens_stride = 0;
  std::int64_t num_heads_per_head_k = 0;
  std::int32_t* plan_rows = nullptr;  // (num_parts, kPlanRowFields) contiguous
  std::int32_t num_parts = 0;
  std::int32_t* num_splits = nullptr;  // (batch + 1) contiguous
};

// A validated merge.
struct MergeProblem {
  Device device;
  DType dtype = DType::kBFloat16;
  std::int32_t num_parts = 0;
  std::int32_t batch = 0;
  std::int32_t seq_len_q = 0;
  std::int32_t num_heads_q = 0;
  std::int32_t head_dim_v = 0;
  const void* outs = nullptr;
  std::int64_t outs_strides[4] = {};  // part, batch, token, head
  const float* lses = nullptr;
  std::int64_t lses_strides[4] = {};  // part, batch, head, token
  void* out = nullptr;
  std::int64_t out_strides[3] = {};  // batch, token, head
  float* lse = nullptr;
  std::int64_t lse_strides[3] = {};  // batch, head, token
};

// Whether the device is one that there is a name for.
Status check_device(const Device& device);

// The only places that reject input. On the CPU the contents of the int32 tensors are checked too
// (the plan itself is checked when it is resolved: schedule/resolve.hpp).
Result<Problem> validate(const DecodeRequest& request);
// Of the scratch memory of a request that passed, whose bytes are less than 2^63.
Status check_workspace(const DecodeRequest& request, void* memory, std::size_t bytes);
Result<PlanProblem> validate(const PlanRequest& request);
Result<MergeProblem> validate(const MergeRequest& request);

// The same but for the contents: no tensor's memory is read, addresses are only compared.
Result<Problem> validate_shapes(const DecodeRequest& request);
Result<PlanProblem> validate_shapes(const PlanRequest& request);

}  // namespace flashmla
