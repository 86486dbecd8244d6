// The planner as a plain function: lengths in, rows out.
#include "schedule/planner.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "schedule/parts.hpp"
#include "support/plan_check.hpp"

namespace flashmla::testing {
namespace {

struct PlanOf {
  std::vector<std::int32_t> rows, num_splits;

  PlanOf(const std::vector<std::int32_t>& lengths, std::int32_t num_parts,
         std::int32_t row_start_units)
      : rows(static_cast<std::size_t>(num_parts) * 8, 0x5a5a5a5a),
        num_splits(lengths.size() + 1, 0x5a5a5a5a) {
    PlanProblem problem;
    problem.batch = static_cast<std::int32_t>(lengths.size());
    problem.cache_seqlens = lengths.data();
    problem.cache_seqlens_stride = 1;
    problem.num_heads_per_head_k = 16;
    problem.num_heads_k = 1;
    problem.plan_rows = rows.data();
    problem.num_parts = num_parts;
    problem.num_splits = num_splits.data();
    schedule::plan_on_host(problem, row_start_units);
  }
};

void expect_plan_holds(const std::vector<std::int32_t>& lengths, std::int32_t num_parts,
                       std::int32_t row_start_units) {
  const PlanOf plan(lengths, num_parts, row_start_units);
  ASSERT_TRUE(plan_holds(lengths, plan.rows, plan.num_splits, row_start_units))
      << "row_start_units " << row_start_units;
}

TEST(Planner, BlocksOfLength) {
  EXPECT_EQ(schedule::blocks_of_length(0), 0);
  EXPECT_EQ(schedule::blocks_of_length(1), 1);
  EXPECT_EQ(schedule::blocks_of_length(64), 1);
  EXPECT_EQ(schedule::blocks_of_length(65), 2);
  EXPECT_EQ(schedule::blocks_of_length(2147483647), 33554432);
  EXPECT_EQ(schedule::blocks_of_length(-5), 0);
}

TEST(Planner, OnePartWalksAll) {
  const PlanOf plan({130, 0, 65}, 1, 1);
  EXPECT_EQ(plan.rows, (std::vector<std::int32_t>{0, 0, 2, 2, 0, 0, 0, 0}));
  EXPECT_EQ(plan.num_splits, (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(Planner, EmptyBatchHasNoWork) {
  const PlanOf plan({}, 2, 1);
  EXPECT_EQ(plan.rows[0], -1);
  EXPECT_EQ(plan.rows[8], -1);
  EXPECT_EQ(plan.num_splits, (std::vector<std::int32_t>{0}));
}

TEST(Planner, EveryBatchOfThreeSmallRows) {
  // All combinations of lengths around the edges of blocks.
  const std::int32_t edges[] = {0, 1, 63, 64, 65, 128, 129, 300};
  for (const std::int32_t a : edges) {
    for (const std::int32_t b : edges) {
      for (const std::int32_t c : edges) {
        for (const std::int32_t parts : {1, 2, 3, 5, 40}) {
          for (const std::int32_t start : {1, 4, 8}) {
            ASSERT_NO_FATAL_FAILURE(expect_plan_holds({a, b, c}, parts, start));
          }
        }
      }
    }
  }
}

TEST(Planner, RandomBatches) {
  std::mt19937 random(99);
  for (int round = 0; round < 4000; ++round) {
    std::vector<std::int32_t> lengths(random() % 40);
    const std::uint32_t most = 1u << (random() % 21);
    for (std::int32_t& length : lengths) {
      length = random() % 5 == 0 ? 0 : static_cast<std::int32_t>(random() % (most + 1));
    }
    ASSERT_NO_FATAL_FAILURE(expect_plan_holds(lengths,
                                              static_cast<std::int32_t>(1 + random() % 150),
                                              static_cast<std::int32_t>(1 + random() % 8)));
  }
}

TEST(Planner, LargeBatches) {
  std::mt19937 random(100);
  for (const std::size_t batch : {std::size_t{65536}, std::size_t{100000}}) {
    std::vector<std::int32_t> lengths(batch);
    for (std::int32_t& length : lengths) {
      length = random() % 3 == 0 ? 0 : static_cast<std::int32_t>(random() % 5000);
    }
    lengths[random() % batch] = 1000000;
    for (const std::int32_t parts : {1, 132, 100001}) {
      ASSERT_NO_FATAL_FAILURE(expect_plan_holds(lengths, parts, 1));
    }
  }
}

TEST(Planner, AllRowsEmpty) {
  for (const std::size_t batch : {1, 9, 128, 1024, 8192, 65536}) {
    ASSERT_NO_FATAL_FAILURE(expect_plan_holds(std::vector<std::int32_t>(batch, 0), 132, 1));
  }
}

TEST(Planner, LongestRowsDoNotOverflow) {
  ASSERT_NO_FATAL_FAILURE(expect_plan_holds(std::vector<std::int32_t>(60, 2147483647), 132, 8));
}

TEST(Planner, PartsOfACpu) {
  EXPECT_EQ(schedule::cpu_num_parts(1, 1), 1);
  EXPECT_EQ(schedule::cpu_num_parts(1, 32), 32);
  EXPECT_EQ(schedule::cpu_num_parts(8, 32), 4);
  EXPECT_EQ(schedule::cpu_num_parts(8, 2), 1);
}

}  // namespace
}  // namespace flashmla::testing
