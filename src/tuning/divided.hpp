// When the query rows of one short row are divided among the blocks of a GPU that would be idle.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/problem.hpp"
#include "tuning/plan.hpp"

namespace flashmla::tuning {

inline constexpr std::int32_t kDividedRows = 16;  // query rows of a block then
inline constexpr std::int32_t kWholeRows = 64;    // of those for which parts were counted

constexpr std::int64_t tiles_of(std::int64_t query_rows, std::int32_t tile_rows) {
  return (query_rows + tile_rows - 1) / tile_rows;
}

// For how many parts there are blocks when each takes kDividedRows query rows; at least a quarter
// of all parts, or 1.
inline std::int32_t divided_parts(const Problem& problem) {
  const std::int64_t rows = problem.query_rows();
  return static_cast<std::int32_t>(std::max<std::int64_t>(
      1, problem.num_parts * tiles_of(rows, kWholeRows) / tiles_of(rows, kDividedRows)));
}

// With one row that a plan cuts into no more shares than that, half of the time is what begins and
// ends a block, which is shorter for fewer query rows: one token and 128 heads 8.3 to 5.8 us, 1,024
// tokens 11.3 to 8.3 (`cuda_bench 1x`). The lengths lie in the GPU's memory, so what the block
// table can hold stands for them. A lone part is not divided: with such plans a row's result does
// not depend on the batch that it is in.
inline bool is_worth_dividing(const Problem& problem) {
  const std::int64_t blocks = tiles_of(
      static_cast<std::int64_t>(problem.max_pages_per_row) * problem.page_size, kBlockTokens);
  return problem.batch == 1 && problem.num_parts > 1 &&
         blocks <=
             std::int64_t{cuda_plan(problem.query_rows()).least_blocks} * divided_parts(problem);
}

}  // namespace flashmla::tuning
