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
         const schedule::PlanModel& model)
      : rows(static_cast<std::size_t>(num_parts) * 8, 0x5a5a5a5a),
        num_splits(lengths.size() + 1, 0x5a5a5a5a) {
    PlanProblem problem;
    problem.batch = static_cast<std::int32_t>(lengths.size());
    problem.cache_seqlens = lengths.data();
    problem.cache_seqlens_stride = 1;
    problem.plan_rows = rows.data();
    problem.num_parts = num_parts;
    problem.num_splits = num_splits.data();
    schedule::plan_on_host(problem, model);
  }
};

void expect_plan_holds(const std::vector<std::int32_t>& lengths, std::int32_t num_parts,
                       const schedule::PlanModel& model) {
  const PlanOf plan(lengths, num_parts, model);
  ASSERT_TRUE(plan_holds(lengths, plan.rows, plan.num_splits, model))
      << "row_start_units " << model.row_start_units << " least_blocks " << model.least_blocks
      << " may_be_even " << model.may_be_even;
}

constexpr schedule::PlanModel kLine{1, 1, false};
constexpr schedule::PlanModel kEven{4, 1, true};
constexpr schedule::PlanModel kEvenPairs{4, 2, true};

TEST(Planner, BlocksOfLength) {
  EXPECT_EQ(schedule::blocks_of_length(0), 0);
  EXPECT_EQ(schedule::blocks_of_length(1), 1);
  EXPECT_EQ(schedule::blocks_of_length(64), 1);
  EXPECT_EQ(schedule::blocks_of_length(65), 2);
  EXPECT_EQ(schedule::blocks_of_length(2147483647), 33554432);
  EXPECT_EQ(schedule::blocks_of_length(-5), 0);
}

TEST(Planner, OnePartWalksAll) {
  const PlanOf plan({130, 0, 65}, 1, kLine);
  EXPECT_EQ(plan.rows, (std::vector<std::int32_t>{0, 0, 2, 2, 0, 0, 0, 0}));
  EXPECT_EQ(plan.num_splits, (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(Planner, EmptyBatchHasNoWork) {
  const PlanOf plan({}, 2, kLine);
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
          for (const schedule::PlanModel& model :
               {kLine, schedule::PlanModel{8, 1, false}, kEven, kEvenPairs}) {
            ASSERT_NO_FATAL_FAILURE(expect_plan_holds({a, b, c}, parts, model));
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
    const schedule::PlanModel model{static_cast<std::int32_t>(1 + random() % 64),
                                    static_cast<std::int32_t>(1 + random() % 3), random() % 2 == 0};
    ASSERT_NO_FATAL_FAILURE(
        expect_plan_holds(lengths, static_cast<std::int32_t>(1 + random() % 150), model));
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
      ASSERT_NO_FATAL_FAILURE(expect_plan_holds(lengths, parts, kLine));
      ASSERT_NO_FATAL_FAILURE(expect_plan_holds(lengths, parts, kEven));
    }
  }
}

TEST(Planner, AllRowsEmpty) {
  for (const std::size_t batch : {1, 9, 128, 1024, 8192, 65536}) {
    ASSERT_NO_FATAL_FAILURE(expect_plan_holds(std::vector<std::int32_t>(batch, 0), 132, kLine));
  }
}

TEST(Planner, LongestRowsDoNotOverflow) {
  for (const bool may_be_even : {false, true}) {
    ASSERT_NO_FATAL_FAILURE(
        expect_plan_holds(std::vector<std::int32_t>(60, 2147483647), 132, {8, 1, may_be_even}));
  }
}

std::vector<std::int32_t> row(const PlanOf& plan, std::size_t part) {
  return {plan.rows.begin() + static_cast<std::ptrdiff_t>(8 * part),
          plan.rows.begin() + static_cast<std::ptrdiff_t>(8 * part + 5)};
}

TEST(Planner, ACutAtTheEndOfARowLeavesAnEmptyRowToTheNextPart) {
  const PlanOf plan({64, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 2, kLine);
  EXPECT_EQ(row(plan, 0), (std::vector<std::int32_t>{0, 0, 0, 1, 0}));
  EXPECT_EQ(row(plan, 1), (std::vector<std::int32_t>{1, 0, 9, 0, 0}));
}

TEST(Planner, RowsThatAreAlikeStayWhole) {
  // 128 rows on 66 parts: two each, though an equal share is 3% less.
  const PlanOf plan(std::vector<std::int32_t>(128, 8192), 66, kEven);
  EXPECT_EQ(row(plan, 0), (std::vector<std::int32_t>{0, 0, 1, 128, 0}));
  EXPECT_EQ(row(plan, 63), (std::vector<std::int32_t>{126, 0, 127, 128, 0}));
  EXPECT_EQ(row(plan, 64), (std::vector<std::int32_t>{-1, 0, 0, 0, 0}));
  EXPECT_EQ(plan.num_splits.back(), 128);
}

TEST(Planner, RowsThatAreAlikeHaveEqualShares) {
  // 16 rows of 64 blocks on 66 parts: four shares of 16 blocks each.
  const PlanOf plan(std::vector<std::int32_t>(16, 4096), 66, kEven);
  EXPECT_EQ(row(plan, 5), (std::vector<std::int32_t>{1, 16, 1, 32, 1}));
  EXPECT_EQ(plan.num_splits, (std::vector<std::int32_t>{0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44,
                                                        48, 52, 56, 60, 64}));
}

TEST(Planner, ASharesLeastBlocksLimitTheSplits) {
  const PlanOf plan({4096}, 66, kEvenPairs);
  EXPECT_EQ(row(plan, 31), (std::vector<std::int32_t>{0, 62, 0, 64, 31}));
  EXPECT_EQ(row(plan, 32), (std::vector<std::int32_t>{-1, 0, 0, 0, 0}));
  EXPECT_EQ(plan.num_splits.back(), 32);
}

TEST(Planner, AnEvenPlanThatWouldBeUnbalancedIsNotUsed) {
  // 100 whole rows on 132 parts would leave a quarter of the parts idle.
  const PlanOf plan(std::vector<std::int32_t>(100, 8192), 132, kEven);
  EXPECT_NE(row(plan, 131)[0], -1);
  EXPECT_GT(plan.num_splits.back(), 100);
}

TEST(Planner, ALoneRowOfManyQueryRowsHasSharesOfTwoBlocksOnACpu) {
  for (const std::int32_t blocks : {2, 3, 15, 16, 17, 31, 32}) {
    for (const std::int32_t parts : {2, 16, 40}) {
      const PlanOf plan({64 * blocks}, parts, tuning::cpu_plan(1, 17));
      for (std::int32_t part = 0; part < parts && row(plan, part)[0] >= 0; ++part) {
        const std::int32_t share = row(plan, part)[3] - row(plan, part)[1];
        EXPECT_TRUE(share >= 2 || row(plan, part)[3] == blocks) << blocks << " on " << parts;
        EXPECT_LE(share, (blocks - 1) / parts + 2) << blocks << " on " << parts;
      }
    }
  }
  EXPECT_EQ(PlanOf({1024}, 16, tuning::cpu_plan(1, 17)).num_splits.back(), 8);
  // Nothing else is cut otherwise.
  EXPECT_EQ(PlanOf({1024}, 16, tuning::cpu_plan(1, 16)).rows, PlanOf({1024}, 16, kLine).rows);
  EXPECT_EQ(PlanOf({512, 512}, 16, tuning::cpu_plan(2, 17)).rows,
            PlanOf({512, 512}, 16, kLine).rows);
}

TEST(Planner, PartsOfACpu) {
  EXPECT_EQ(schedule::cpu_num_parts(1, 1), 1);
  EXPECT_EQ(schedule::cpu_num_parts(1, 32), 32);
  EXPECT_EQ(schedule::cpu_num_parts(8, 32), 4);
  EXPECT_EQ(schedule::cpu_num_parts(8, 2), 1);
}

}  // namespace
}  // namespace flashmla::testing
