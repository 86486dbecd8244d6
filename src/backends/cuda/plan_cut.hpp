// What the device planner makes of groups of rows, among them the search for one cut of the plan.
// It also runs on the host, for its tests.
#pragma once

#include <cstdint>

#include "schedule/planner.hpp"

namespace flashmla::cuda {

// Rows [begin, end) of a batch.
struct RowRange {
  std::int32_t begin, end;
};

// Rows of each of num_groups groups of a batch; of the last ones fewer, or none.
FLASHMLA_HD constexpr std::int32_t rows_in_each_group(std::int32_t batch, std::int32_t num_groups) {
  return batch / num_groups + (batch % num_groups != 0 ? 1 : 0);
}

FLASHMLA_HD constexpr RowRange rows_of_group(std::int32_t group, std::int32_t rows_per_group,
                                             std::int32_t batch) {
  const std::int64_t begin = std::int64_t{group} * rows_per_group, end = begin + rows_per_group;
  return {static_cast<std::int32_t>(begin < batch ? begin : batch),
          static_cast<std::int32_t>(end < batch ? end : batch)};
}

// Cut number `part` (at part * payload). The rows come in groups of rows_per_group; group_offset
// (num_groups + 1) holds the exclusive prefix sums of their costs, so that a search among the
// groups and a walk through one of them find the row. blocks_of(row) for row in [0, batch).
template <class Units, class BlocksOf>
FLASHMLA_HD schedule::Cut find_cut(std::int32_t part, Units payload, std::int32_t batch,
                                   const Units* group_offset, std::int32_t num_groups,
                                   std::int32_t rows_per_group, std::int32_t row_start_units,
                                   const BlocksOf& blocks_of) {
  if (part == 0) return {0, 0, 0, 0};
  const Units at = part * payload;
  if (at > group_offset[num_groups]) {
    return {batch, 0, 0, batch > 0 ? blocks_of(batch - 1) : 0};
  }
  // The last group whose offset is less than `at`: it holds the row with offset < at <= row's end.
  // Of the steps that a place can go on, all that a search looks at in one round are asked for at
  // once.
  constexpr std::int32_t kProbes = 3;
  std::int32_t low = 0, step = 1;
  while (step < num_groups) step *= kProbes + 1;
  while ((step /= kProbes + 1) > 0) {
    std::int32_t passed = 0;
    for (std::int32_t probe = 1; probe <= kProbes; ++probe) {
      const std::int32_t group = low + probe * step;
      passed += group_offset[group < num_groups ? group : num_groups] < at && group < num_groups;
    }
    low += passed * step;
  }
  Units offset = group_offset[low];
  std::int32_t row = low * rows_per_group;
  std::int32_t blocks = blocks_of(row);
  Units cost = static_cast<Units>(schedule::row_cost(blocks, row_start_units));
  while (offset + cost < at) {
    offset += cost;
    blocks = blocks_of(++row);
    cost = static_cast<Units>(schedule::row_cost(blocks, row_start_units));
  }
  const std::int32_t block = schedule::block_of_cut(at - offset, row_start_units);
  if (block >= blocks) return {row + 1, 0, 0, blocks};
  if (block > 0) {
    return {row, block, schedule::split_of_part(part, offset, payload, row_start_units), 0};
  }
  return {row, 0, 0, row > 0 ? blocks_of(row - 1) : 0};
}

}  // namespace flashmla::cuda
