// The planner's rule: lengths and tile facts in, the plan's rows out. The host and the device
// planner are both written over these functions and agree byte for byte.
//
// Cost model, in units of 1/8 block: row i costs
//     row_start_units + 8 * ceil(length_i / 64)
// and lies on a line at [offset_i, offset_i + cost_i), offset being the exclusive prefix sum of the
// costs. The line is cut at multiples of a payload; a cut inside a row moves up to the next block,
// so that a part holds at most one block more than its share. Everything about a row follows from
// its offset and length, and everything about a part from the row that its cut falls in: no part
// depends on another, so a device computes all of them at once.
//
// All quantities: 1 <= row_start_units <= 8, payload >= row_start_units + 8 (see payload_units).
#pragma once

#include <cstdint>

#include "problem/problem.hpp"

#if defined(__CUDACC__)
#define FLASHMLA_HD __host__ __device__
#else
#define FLASHMLA_HD
#endif

namespace flashmla::schedule {

inline constexpr std::int64_t kUnitsPerBlock = 8;

// Blocks of the plan in a row of `length` tokens; a negative length counts as none.
FLASHMLA_HD constexpr std::int32_t blocks_of_length(std::int32_t length) {
  return length <= 0 ? 0 : (length - 1) / kBlockTokens + 1;
}

FLASHMLA_HD constexpr std::int64_t row_cost(std::int32_t length, std::int32_t row_start_units) {
  return row_start_units + kUnitsPerBlock * blocks_of_length(length);
}

// Units between two cuts: an equal share, and never so little that two cuts could meet in one
// block (a part of less than a block would be empty).
FLASHMLA_HD constexpr std::int64_t payload_units(std::int64_t total, std::int32_t num_parts,
                                                 std::int32_t row_start_units) {
  const std::int64_t share = (total + num_parts - 1) / num_parts;
  const std::int64_t least = row_start_units + kUnitsPerBlock;
  return share > least ? share : least;
}

// The block of a row before which a cut falls, `inside` units after the row's offset
// (0 <= inside < cost). A result equal to the row's number of blocks means the start of the next
// row; an empty row is never cut, so inside > 0 means the next row there too.
FLASHMLA_HD constexpr std::int32_t block_of_cut(std::int64_t inside, std::int32_t row_start_units) {
  if (inside <= row_start_units) return 0;
  return static_cast<std::int32_t>((inside - row_start_units + kUnitsPerBlock - 1) /
                                   kUnitsPerBlock);
}

// The lowest-numbered cut that falls after the first block of a row has begun, were the row
// endless. Cut k is the begin of part k, so the part before it is the one that walks the row's
// block 0.
FLASHMLA_HD constexpr std::int64_t first_inner_cut(std::int64_t offset, std::int64_t payload,
                                                   std::int32_t row_start_units) {
  return (offset + row_start_units) / payload + 1;
}

// How many parts walk blocks of a row (1 for an empty row). Cuts inside a row are at least a block
// apart because payload > kUnitsPerBlock, so each of them begins another split.
FLASHMLA_HD constexpr std::int32_t splits_of_row(std::int64_t offset, std::int32_t blocks,
                                                 std::int64_t payload,
                                                 std::int32_t row_start_units) {
  if (blocks <= 1) return 1;
  const std::int64_t last = (offset + row_start_units + kUnitsPerBlock * (blocks - 1)) / payload;
  const std::int64_t first = first_inner_cut(offset, payload, row_start_units);
  return last < first ? 1 : static_cast<std::int32_t>(last - first) + 2;
}

// The split number of part `part` in the row that it begins inside of (block > 0).
FLASHMLA_HD constexpr std::int32_t split_of_part(std::int64_t part, std::int64_t offset,
                                                 std::int64_t payload,
                                                 std::int32_t row_start_units) {
  return static_cast<std::int32_t>(part - first_inner_cut(offset, payload, row_start_units)) + 1;
}

// Writes the plan of the contract: plan_rows (num_parts, kPlanRowFields) and num_splits
// (batch + 1), both contiguous. One pass over the rows, no memory of its own. num_parts >= 1.
void plan_on_host(const PlanProblem& problem, std::int32_t row_start_units);

}  // namespace flashmla::schedule
