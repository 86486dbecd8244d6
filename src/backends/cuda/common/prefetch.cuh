// Brings what a block reads first into L2 before it may read: each is the address of the next.
#pragma once

#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "backends/cuda/ptx/memory.cuh"

namespace flashmla::cuda {

// The part's row of the plan, the lengths, and the pages of the row that the part begins with if
// the rows are alike. All lanes of a warp, a line each; nothing that may still be written is read.
__device__ __forceinline__ void prefetch_walk(const DecodeParams& params, std::int32_t part) {
  constexpr int kLineInts = 32;
  const CallShape& shape = params.shape;
  const std::int32_t lane = threadIdx.x % 32;
  if (lane == 0) ptx::prefetch_line(shape.plan_rows + part * shape.plan_row_stride);
  if (shape.batch == 0) return;
  const std::int32_t row = static_cast<std::int32_t>(std::int64_t{part} * shape.batch /
                                                     static_cast<std::int64_t>(shape.num_parts));
  const std::int32_t line_row =
      min(row / kLineInts * kLineInts + lane * kLineInts, shape.batch - 1);
  ptx::prefetch_line(shape.cache_seqlens + line_row * shape.cache_seqlens_stride);
  const std::int32_t page = lane * kLineInts;
  if (page < params.page_size.quotient(shape.max_length)) {
    ptx::prefetch_line(params.block_table + row * params.block_table_batch_stride +
                       page * params.block_table_page_stride);
  }
}

}  // namespace flashmla::cuda
