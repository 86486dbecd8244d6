#include "schedule/planner.hpp"

#include <algorithm>

namespace flashmla::schedule {

void plan_on_host(const PlanProblem& problem, const PlanModel& model) {
  const std::int32_t row_start_units = model.row_start_units;
  const auto blocks_of = [&](std::int32_t row) {
    return blocks_of_length(problem.cache_seqlens[row * problem.cache_seqlens_stride]);
  };
  std::int64_t total = 0;
  std::int32_t most_blocks = 0;
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    total += row_cost(blocks_of(row), row_start_units);
    most_blocks = std::max(most_blocks, blocks_of(row));
  }
  const std::int64_t payload = payload_units(total, problem.num_parts, model);
  problem.num_splits[0] = 0;

  const EvenPlan even = if_balanced(even_plan_of_batch(problem.batch, problem.num_parts, model),
                                    total, most_blocks, payload, model);
  if (even.rows_per_part > 0) {
    for (std::int32_t part = 0; part < problem.num_parts; ++part) {
      write_even_part<std::int64_t>(
          problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields, part, problem.batch,
          even, blocks_of);
    }
    for (std::int32_t row = 0; row < problem.batch; ++row) {
      problem.num_splits[row + 1] = problem.num_splits[row] + shares_of_row(blocks_of(row), even);
    }
    return;
  }

  Cut begin{0, 0, 0, 0};
  std::int32_t part = 0;  // the part that `begin` opens
  std::int64_t offset = 0;
  std::int32_t splits_before = 0;
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t blocks = blocks_of(row);
    const std::int64_t row_end = offset + row_cost(blocks, row_start_units);
    // The cuts in (offset, row_end]: those at the offset itself ended the row before.
    for (; part + 1 <= problem.num_parts && (part + 1) * payload <= row_end; ++part) {
      const std::int64_t inside = (part + 1) * payload - offset;
      const std::int32_t block = block_of_cut(inside, row_start_units);
      Cut end{row, block, 0, 0};
      if (block >= blocks) {
        end = {row + 1, 0, 0, blocks};
      } else if (block > 0) {
        end.split = split_of_part(part + 1, offset, payload, row_start_units);
      } else {
        // A cut in the start of a row leaves the row to the next part.
        end.blocks_before = row > 0 ? blocks_of(row - 1) : 0;
      }
      write_part(problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields, begin, end);
      begin = end;
    }
    splits_before += splits_of_row(offset, blocks, payload, row_start_units);
    problem.num_splits[row + 1] = splits_before;
    offset = row_end;
  }
  const std::int32_t last_blocks = problem.batch > 0 ? blocks_of(problem.batch - 1) : 0;
  const Cut end{problem.batch, 0, 0, last_blocks};
  for (; part < problem.num_parts; ++part) {
    write_part(problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields, begin, end);
    begin = end;
  }
}

}  // namespace flashmla::schedule
