// When the query rows of one short row are divided among the blocks of a GPU that would be idle.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tuning/plan.hpp"

namespace flashmla::tuning {

inline constexpr std::int32_t kDividedRows = 16;  // query rows of a block then
inline constexpr std::int32_t kWholeRows = 64;    // of those for which parts were counted
// Of a row. A plan of a GPU's own has fewer shares; one written for many more parts has blocks for
// them, but there would not be multiprocessors for the blocks.
inline constexpr std::int64_t kMostDividedBlocks = 128;

// For how many parts of a plan there are blocks when each takes kDividedRows query rows: a quarter
// of all parts or more, rounded down, and at least 1. So a block has less than eight parts.
constexpr std::int32_t divided_parts(std::int32_t num_parts, std::int32_t query_rows) {
  const auto tiles = [&](std::int32_t tile_rows) {
    return (std::int64_t{query_rows} + tile_rows - 1) / tile_rows;
  };
  return static_cast<std::int32_t>(
      std::max<std::int64_t>(1, num_parts * tiles(kWholeRows) / tiles(kDividedRows)));
}

// With one row that a plan cuts into no more shares than that, half of the time is what begins and
// ends a block, which is shorter for fewer query rows: one token and 128 heads 8.3 to 5.9 us, 1,024
// tokens 11.3 to 8.5 (`cuda_bench 1x`, the former with `sm90a_wide_bf16_576` after it). The lengths
// lie in the GPU's memory, so what the block table can hold, most_blocks, stands for them. A lone
// part is not divided: in such plans a row's result does not depend on the batch that it is in.
constexpr bool is_worth_dividing(std::int32_t batch, std::int64_t most_blocks,
                                 std::int32_t num_parts, std::int32_t query_rows) {
  return batch == 1 && num_parts > 1 && most_blocks <= kMostDividedBlocks &&
         most_blocks <= std::int64_t{cuda_plan(query_rows).least_blocks} *
                            divided_parts(num_parts, query_rows);
}

}  // namespace flashmla::tuning
