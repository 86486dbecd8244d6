// Which blocks of which rows a part of the plan walks. The attention kernels and the combine read
// plans through these functions alone, so that they cannot disagree about which rows are shared.
#pragma once

#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "backends/cuda/ptx/memory.cuh"
#include "schedule/planner.hpp"

namespace flashmla::cuda {

// A part of the plan with its end clamped to the batch. begin_row > end_row: no work.
struct Part {
  std::int32_t begin_row;
  std::int32_t begin_block;
  std::int32_t end_row;    // inclusive
  std::int32_t end_block;  // exclusive; may lie past the row's end
};

// What a part walks of one row.
struct Share {
  std::int32_t begin_block;  // inclusive
  std::int32_t end_block;    // exclusive
  std::int32_t row_blocks;

  __device__ bool is_whole() const { return begin_block == 0 && end_block == row_blocks; }
  // Leaves a partial result. A share that is neither this nor whole has no blocks.
  __device__ bool is_fragment() const { return !is_whole() && begin_block < end_block; }
};

// How a grid reads what stands in the plan, the lengths and the table: after its wait, and before.
struct PlainLoad {
  __device__ std::int32_t operator()(const std::int32_t* address) const { return *address; }
};
struct EarlyLoad {
  __device__ std::int32_t operator()(const std::int32_t* address) const {
    return ptx::load_early(address);
  }
};

template <class Load = PlainLoad>
__device__ __forceinline__ Part read_part(const CallShape& shape, std::int32_t index,
                                          const Load& load = {}) {
  const std::int32_t* fields = shape.plan_rows + index * shape.plan_row_stride;
  Part part{load(fields), load(fields + 1), load(fields + 2), load(fields + 3)};
  if (part.begin_row < 0) part.begin_row = shape.batch;
  if (part.end_row >= shape.batch) {
    part.end_row = shape.batch - 1;
    part.end_block = INT32_MAX;
  }
  return part;
}

template <class Load = PlainLoad>
__device__ __forceinline__ std::int32_t row_length(const CallShape& shape, std::int32_t row,
                                                   const Load& load = {}) {
  return min(max(load(shape.cache_seqlens + row * shape.cache_seqlens_stride), 0),
             shape.max_length);
}

// `row` lies in [part.begin_row, part.end_row].
__device__ __forceinline__ Share share_of_row(const Part& part, std::int32_t row,
                                              std::int32_t length) {
  const std::int32_t blocks = schedule::blocks_of_length(length);
  return {row == part.begin_row ? max(part.begin_block, 0) : 0,
          row == part.end_row ? min(part.end_block, blocks) : blocks, blocks};
}

// How many leading tokens query token t of a row of `length` tokens sees: in [0, length].
__device__ __forceinline__ std::int32_t visible_tokens(const CallInputs& inputs,
                                                       const CallShape& shape, std::int32_t row,
                                                       std::int32_t t, std::int32_t length) {
  if (inputs.visible_lens != nullptr) {
    const std::int32_t visible = inputs.visible_lens[row * inputs.visible_lens_batch_stride +
                                                     t * inputs.visible_lens_token_stride];
    return min(max(visible, 0), length);
  }
  if (!inputs.causal) return length;
  return max(0, length - shape.seq_len_q + t + 1);
}

// Query row `query_row` of one key/value head, as token and head.
struct QueryRow {
  std::int32_t token;
  std::int32_t head;  // of num_heads_q
};

__device__ __forceinline__ QueryRow query_row_at(const CallShape& shape, std::int32_t kv_head,
                                                 std::int32_t query_row) {
  const std::int32_t token = shape.heads_per_kv_head.quotient(query_row);
  const std::int32_t heads = shape.heads_per_kv_head.divisor;
  return {token, kv_head * heads + query_row - token * heads};
}

__device__ __forceinline__ std::int64_t out_offset(const CallShape& shape, std::int32_t row,
                                                   const QueryRow& query) {
  return row * shape.out_batch_stride + query.token * shape.out_token_stride +
         query.head * shape.out_head_stride;
}

__device__ __forceinline__ float* lse_at(const CallShape& shape, std::int32_t row,
                                         const QueryRow& query) {
  return shape.lse + row * shape.lse_batch_stride + query.head * shape.lse_head_stride +
         query.token * shape.lse_token_stride;
}

// Index of a query row's partial result; times head_dim_v in partial_out, times kPartialHalves in
// partial_statistics.
__device__ __forceinline__ std::int64_t partial_index(const CallShape& shape, std::int32_t slot,
                                                      std::int32_t kv_head,
                                                      std::int32_t query_row) {
  return (static_cast<std::int64_t>(slot) * shape.num_heads_k + kv_head) * shape.query_rows +
         query_row;
}

}  // namespace flashmla::cuda
