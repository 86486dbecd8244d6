// What a part is about to read first, found before its grid may read: plan, length and pages are
// asked for at once where the rows are alike, not each at the address that the one before gives.
// Another grid may be writing them, so that all of this is a guess and leads to no result.
#pragma once

#include <cstdint>

#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/ptx/memory.cuh"

namespace flashmla::cuda {

// All lanes of a warp, and the same in all but `pages`.
struct FirstReads {
  static constexpr int kLanePages = 4;

  Part part;
  std::int32_t length;             // of the row that the part begins with
  std::int32_t row;                // that the part was expected to begin with
  std::int32_t pages[kLanePages];  // of it: a lane has every 32nd

  // The page of a token of the row that the part begins with, which has that token.
  __device__ __forceinline__ std::int32_t page_of(const DecodeParams& params,
                                                  std::int32_t token) const {
    const std::int32_t index = params.page_size.quotient(token);
    if (part.begin_row != row || index >= 32 * kLanePages) {
      return ptx::load_early(params.block_table + part.begin_row * params.block_table_batch_stride +
                             index * params.block_table_page_stride);
    }
    std::int32_t page = -1;
#pragma unroll
    for (int i = 0; i < kLanePages; ++i) {
      const std::int32_t here = __shfl_sync(~0u, pages[i], index % 32);
      if (index / 32 == i) page = here;
    }
    return page;
  }
};

__device__ __forceinline__ FirstReads read_first(const DecodeParams& params,
                                                 std::int32_t part_index) {
  const CallShape& shape = params.shape;
  const EarlyLoad load;
  FirstReads first;
  first.row = static_cast<std::int32_t>(
      schedule::quotient(std::int64_t{part_index} * shape.batch, std::int64_t{shape.num_parts}));
  // Pages that a row of the table has: those that max_length reaches.
  const std::int32_t count = params.page_size.quotient(shape.max_length);
  const std::int32_t* table = params.block_table + first.row * params.block_table_batch_stride;
#pragma unroll
  for (int i = 0; i < FirstReads::kLanePages; ++i) {
    const std::int32_t index = 32 * i + static_cast<std::int32_t>(threadIdx.x % 32);
    first.pages[i] = index < count ? load(table + index * params.block_table_page_stride) : -1;
  }
  first.length = row_length(shape, first.row, load);
  first.part = read_part(shape, part_index, load);
  if (first.part.begin_row != first.row && first.part.begin_row <= first.part.end_row) {
    first.length = row_length(shape, first.part.begin_row, load);
  }
  // Lanes that read at different times may have found different values.
  const auto share = [](std::int32_t& value) { value = __shfl_sync(~0u, value, 0); };
  share(first.length);
  share(first.part.begin_row);
  share(first.part.begin_block);
  share(first.part.end_row);
  share(first.part.end_block);
  return first;
}

}  // namespace flashmla::cuda
