// What must hold of a plan that the library makes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "schedule/planner.hpp"

namespace flashmla::testing {

// rows: (num_parts, 8), row-major.
inline ::testing::AssertionResult plan_holds(const std::vector<std::int32_t>& lengths,
                                             const std::vector<std::int32_t>& rows,
                                             const std::vector<std::int32_t>& num_splits,
                                             const schedule::PlanModel& model) {
  using ::testing::AssertionFailure;
  const std::int64_t row_start_units = model.row_start_units;
  const auto batch = static_cast<std::int32_t>(lengths.size());
  const auto num_parts = static_cast<std::int32_t>(rows.size() / 8);
  const auto blocks_of = [&](std::int32_t row) {
    return static_cast<std::int32_t>((std::int64_t{lengths[row]} + 63) / 64);
  };
  std::int64_t total_units = 0;
  for (std::int32_t row = 0; row < batch; ++row) {
    total_units += row_start_units + 8 * std::int64_t{blocks_of(row)};
  }
  // The mean in whole blocks, one block or empty row more, and the start of a row. Parts without
  // work count where the plan cannot be even.
  std::int64_t parts_in_use = num_parts;
  if (model.may_be_even) {
    parts_in_use = 0;
    for (std::int32_t part = 0; part < num_parts; ++part) {
      parts_in_use += rows[8 * static_cast<std::size_t>(part)] >= 0;
    }
  }
  const std::int64_t mean = parts_in_use == 0
                                ? 0
                                : std::max((total_units + parts_in_use - 1) / parts_in_use,
                                           row_start_units + 8 * model.least_blocks);
  const std::int64_t most_units =
      (mean + 7) / 8 * 8 + std::max<std::int64_t>(8, row_start_units) + row_start_units;

  if (num_splits[0] != 0) return AssertionFailure() << "num_splits[0] is " << num_splits[0];
  std::vector<std::int32_t> covered(lengths.size(), 0);  // blocks walked so far
  std::vector<std::int32_t> splits(lengths.size(), 0);   // parts that walked so far
  std::int32_t next_row = 0, next_block = 0;             // where the next part must begin
  for (std::int32_t part = 0; part < num_parts; ++part) {
    const std::int32_t* fields = &rows[8 * static_cast<std::size_t>(part)];
    const auto fail = [&](const char* what) {
      return AssertionFailure() << "part " << part << " [" << fields[0] << ", " << fields[1] << ", "
                                << fields[2] << ", " << fields[3] << ", " << fields[4] << "] "
                                << what << " (next is row " << next_row << " block " << next_block
                                << ", " << num_parts << " parts, batch " << batch << ")";
    };
    if (fields[5] != 0 || fields[6] != 0 || fields[7] != 0)
      return fail("has a nonzero spare field");
    if (fields[0] == -1) continue;
    if (fields[0] != next_row || fields[1] != next_block) return fail("does not begin where due");
    if (fields[2] < fields[0] || fields[2] >= batch) return fail("has a bad end_row");
    if (fields[3] < 0 || fields[3] > blocks_of(fields[2])) return fail("has a bad end_block");
    if (fields[4] != splits[fields[0]]) return fail("has a wrong begin_split");
    std::int64_t units = 0;
    for (std::int32_t row = fields[0]; row <= fields[2]; ++row) {
      const std::int32_t begin = row == fields[0] ? fields[1] : 0;
      const std::int32_t end = row == fields[2] ? fields[3] : blocks_of(row);
      if (begin > end || (begin == end && blocks_of(row) > 0))
        return fail("walks nothing of a row");
      covered[row] += end - begin;
      ++splits[row];
      units += row_start_units + 8 * (end - begin);
    }
    // A part that resumes a row pays its start again; the bound is on top of that.
    if (fields[1] > 0) units -= row_start_units;
    if (units > most_units) return fail("has more than its share");
    next_row = fields[2];
    next_block = fields[3];
    if (next_block == blocks_of(next_row)) {
      ++next_row;
      next_block = 0;
    }
  }
  if (next_row != batch) return AssertionFailure() << "row " << next_row << " is not covered";
  for (std::int32_t row = 0; row < batch; ++row) {
    if (covered[row] != blocks_of(row)) {
      return AssertionFailure() << "row " << row << " has " << covered[row] << " blocks walked of "
                                << blocks_of(row);
    }
    if (num_splits[row + 1] - num_splits[row] != splits[row]) {
      return AssertionFailure() << "num_splits of row " << row << " grows by "
                                << num_splits[row + 1] - num_splits[row] << "; " << splits[row]
                                << " parts walk it";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace flashmla::testing
