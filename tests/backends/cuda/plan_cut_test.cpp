// The device planner's functions on the host, group by group as its threads call them: the bytes of
// the host planner.
#include "backends/cuda/plan_cut.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace flashmla::testing {
namespace {

struct Plan {
  std::vector<std::int32_t> rows, num_splits;

  bool operator==(const Plan&) const = default;
};

PlanProblem problem_of(const std::vector<std::int32_t>& lengths, std::int32_t num_parts,
                       Plan& plan) {
  plan.rows.assign(static_cast<std::size_t>(num_parts) * kPlanRowFields, 0x5a5a5a5a);
  plan.num_splits.assign(lengths.size() + 1, 0x5a5a5a5a);
  PlanProblem problem;
  problem.batch = static_cast<std::int32_t>(lengths.size());
  problem.cache_seqlens = lengths.data();
  problem.cache_seqlens_stride = 1;
  problem.plan_rows = plan.rows.data();
  problem.num_parts = num_parts;
  problem.num_splits = plan.num_splits.data();
  return problem;
}

// `num_groups` stands for the threads of the device's block, Units for what it computes in.
template <class Units>
Plan plan_in_groups(const std::vector<std::int32_t>& lengths, std::int32_t num_parts,
                    const schedule::PlanModel& model, std::int32_t num_groups) {
  Plan plan;
  const PlanProblem problem = problem_of(lengths, num_parts, plan);
  const std::int32_t batch = problem.batch;
  const std::int32_t rows_per_group = cuda::rows_in_each_group(batch, num_groups);
  const auto blocks_of = [&](std::int32_t row) {
    return schedule::blocks_of_length(lengths[static_cast<std::size_t>(row)]);
  };
  std::vector<Units> group_offset(static_cast<std::size_t>(num_groups) + 1, 0);
  std::int32_t most_blocks = 0;
  for (std::int32_t group = 0; group < num_groups; ++group) {
    Units cost = 0;
    const auto [begin, end] = cuda::rows_of_group(group, rows_per_group, batch);
    for (std::int32_t row = begin; row < end; ++row) {
      cost += static_cast<Units>(schedule::row_cost(blocks_of(row), model.row_start_units));
      most_blocks = std::max(most_blocks, blocks_of(row));
    }
    group_offset[static_cast<std::size_t>(group) + 1] = group_offset[group] + cost;
  }
  const Units payload = schedule::payload_units(group_offset.back(), num_parts, model);
  const schedule::EvenPlan even =
      schedule::if_balanced(schedule::even_plan_of_batch(batch, num_parts, model),
                            group_offset.back(), most_blocks, payload, model);
  const bool is_even = even.rows_per_part > 0;
  const auto cut = [&](std::int32_t number) {
    return cuda::find_cut(number, payload, batch, group_offset.data(), num_groups, rows_per_group,
                          model.row_start_units, blocks_of);
  };
  for (std::int32_t part = 0; part < num_parts; ++part) {
    std::int32_t* fields = plan.rows.data() + static_cast<std::size_t>(part) * kPlanRowFields;
    if (is_even) {
      schedule::write_even_part<Units>(fields, part, batch, even, blocks_of);
    } else {
      schedule::write_part(fields, cut(part), cut(part + 1));
    }
  }
  plan.num_splits[0] = 0;
  Units offset = 0;
  for (std::int32_t row = 0; row < batch; ++row) {
    const std::int32_t blocks = blocks_of(row);
    const std::int32_t splits =
        is_even ? schedule::shares_of_row(blocks, even)
                : schedule::splits_of_row(offset, blocks, payload, model.row_start_units);
    plan.num_splits[static_cast<std::size_t>(row) + 1] = plan.num_splits[row] + splits;
    offset += static_cast<Units>(schedule::row_cost(blocks, model.row_start_units));
  }
  return plan;
}

TEST(PlanCut, GivesTheBytesOfTheHostPlanner) {
  std::mt19937 random(11);
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::int32_t> lengths(random() % 40);
    const std::uint32_t most = std::vector<std::uint32_t>{0, 1, 100, 3000, 200000}[random() % 5];
    const bool alike = random() % 3 == 0;
    for (std::int32_t& length : lengths) {
      length = static_cast<std::int32_t>(alike ? most : random() % (most + 1));
      if (random() % 9 == 0 && !alike) length = 0;
    }
    const auto num_parts = static_cast<std::int32_t>(1 + random() % 140);
    const schedule::PlanModel model{static_cast<std::int32_t>(1 + random() % 64),
                                    static_cast<std::int32_t>(1 + random() % 3), random() % 2 == 0};
    Plan expected;
    schedule::plan_on_host(problem_of(lengths, num_parts, expected), model);
    for (const std::int32_t groups : {1, 3, 32, 1024}) {
      ASSERT_EQ(plan_in_groups<std::int64_t>(lengths, num_parts, model, groups), expected)
          << "round " << round << ", " << groups << " groups";
      // No round costs 2^30 units.
      ASSERT_EQ(plan_in_groups<std::int32_t>(lengths, num_parts, model, groups), expected)
          << "round " << round << ", " << groups << " groups";
    }
  }
}

// What the device plans in 32 bits at most: 65,535 blocks in the rows of a thread, 4096 parts.
TEST(PlanCut, In32BitsAtTheirLimits) {
  std::mt19937 random(13);
  for (const std::size_t batch : {std::size_t{1}, std::size_t{3}, std::size_t{256}}) {
    std::vector<std::int32_t> lengths(batch, 65535 * 64);
    for (std::size_t row = 1; row < batch; ++row) {
      lengths[row] -= static_cast<std::int32_t>(random() % 3) * 63;
    }
    for (const std::int32_t parts : {1, 132, 4096}) {
      for (const schedule::PlanModel& model :
           {schedule::PlanModel{4, 1, true}, schedule::PlanModel{64, 2, false}}) {
        Plan expected;
        schedule::plan_on_host(problem_of(lengths, parts, expected), model);
        ASSERT_EQ(plan_in_groups<std::int32_t>(lengths, parts, model, 256), expected)
            << batch << " " << parts;
      }
    }
  }
}

// Up to the most rows that int32 counts, by the threads of every block that plans: the groups
// follow one another, and together are all rows.
TEST(PlanCut, GroupsCoverEveryBatch) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> batches = {0, 1, 2, 415, 416, 417, 1023, 1024, 1025, 100000, 1 << 30};
  // About as many that the last group ends past int32.
  for (const std::int32_t fewer : {0, 1, 2, 671, 1022, 1023, 1024, 1 << 21, (1 << 21) + 1}) {
    batches.push_back(kMost - fewer);
  }
  for (const std::int32_t batch : batches) {
    for (const std::int32_t groups : {1, 3, 416, 672, 1024}) {
      const std::int32_t rows_per_group = cuda::rows_in_each_group(batch, groups);
      ASSERT_GE(std::int64_t{rows_per_group} * groups, batch);
      ASSERT_LT(std::int64_t{rows_per_group} * groups, std::int64_t{batch} + groups);
      std::int32_t covered = 0;
      for (std::int32_t group = 0; group < groups; ++group) {
        const auto [begin, end] = cuda::rows_of_group(group, rows_per_group, batch);
        ASSERT_EQ(begin, covered) << batch << " rows, group " << group << " of " << groups;
        ASSERT_GE(end, begin) << batch << " rows, group " << group << " of " << groups;
        ASSERT_LE(end - begin, rows_per_group);
        covered = end;
      }
      ASSERT_EQ(covered, batch) << groups << " groups";
    }
  }
}

TEST(PlanCut, LargeBatches) {
  std::mt19937 random(12);
  for (const std::size_t batch : {std::size_t{1025}, std::size_t{8192}, std::size_t{65536}}) {
    std::vector<std::int32_t> lengths(batch);
    for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(random() % 5000);
    lengths[random() % batch] = 2147483647;
    for (const std::int32_t parts : {1, 66, 132, 1500}) {
      const schedule::PlanModel model{4, 1, true};
      Plan expected;
      schedule::plan_on_host(problem_of(lengths, parts, expected), model);
      ASSERT_EQ(plan_in_groups<std::int64_t>(lengths, parts, model, 1024), expected)
          << batch << " " << parts;
    }
  }
}

}  // namespace
}  // namespace flashmla::testing
