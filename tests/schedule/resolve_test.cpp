// Reading a plan into walks and fragments. What callers see of it is in capi/.
#include "schedule/resolve.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace flashmla::testing {
namespace {

class Resolve : public ::testing::Test {
 protected:
  // Rows of 4, 0 and 2 blocks.
  Result<schedule::Schedule> resolve(std::vector<std::int32_t> rows) {
    rows_ = std::move(rows);
    Problem problem;
    problem.batch = 3;
    problem.cache_seqlens = lengths_;
    problem.cache_seqlens_stride = 1;
    problem.plan_rows = rows_.data();
    problem.plan_row_stride = kPlanRowFields;
    problem.num_parts = static_cast<std::int32_t>(rows_.size() / kPlanRowFields);
    const std::int64_t count = schedule::measure(problem).num_fragments;
    memory_.resize(schedule::resolve_bytes(problem, count));
    return schedule::resolve(problem, count, memory_.data());
  }

 private:
  const std::int32_t lengths_[3] = {200, 0, 128};
  std::vector<std::int32_t> rows_;
  std::vector<std::byte> memory_;
};

TEST_F(Resolve, WholeRowsHaveNoFragments) {
  const auto result = resolve({0, 0, 2, 2, 0, 0, 0, 0});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result.value().fragments.empty());
  ASSERT_EQ(result.value().walks.size(), 1u);
  EXPECT_EQ(result.value().walks[0].begin_row, 0);
  EXPECT_EQ(result.value().walks[0].end_row, 2);
  EXPECT_EQ(result.value().walks[0].begin_fragment, -1);
  EXPECT_EQ(result.value().walks[0].end_fragment, -1);
}

TEST_F(Resolve, FragmentsAreOrderedByBlockWhateverTheOrderOfParts) {
  const auto result = resolve({0,  3, 2, 1, 0, 0, 0, 0,    //
                               -1, 0, 0, 0, 0, 0, 0, 0,    //
                               2,  1, 9, 9, 0, 0, 0, 0,    //
                               0,  0, 0, 3, 0, 0, 0, 0});  //
  ASSERT_TRUE(result.ok()) << result.status().message();
  const auto& [walks, fragments, owners] = result.value();
  ASSERT_EQ(fragments.size(), 4u);
  const std::int32_t expected[4][4] = {{0, 0, 3, 3}, {0, 3, 4, 0}, {2, 0, 1, 0}, {2, 1, 2, 2}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(fragments[i].row, expected[i][0]);
    EXPECT_EQ(fragments[i].block_begin, expected[i][1]);
    EXPECT_EQ(fragments[i].block_end, expected[i][2]);
    EXPECT_EQ(fragments[i].part, expected[i][3]);
  }
  EXPECT_EQ(walks[0].begin_fragment, 1);
  EXPECT_EQ(walks[0].end_fragment, 2);
  EXPECT_EQ(walks[1].begin_row, -1);
  EXPECT_EQ(walks[2].begin_fragment, 3);
  EXPECT_EQ(walks[2].end_row, 2);  // clamped
  EXPECT_EQ(walks[2].end_block, 2);
  EXPECT_EQ(walks[3].begin_fragment, 0);
  EXPECT_EQ(owners[0], -1);
  EXPECT_EQ(owners[1], 0);
  EXPECT_EQ(owners[2], -1);
}

TEST_F(Resolve, AnEmptyRowInWhichPartsMeetIsWalkedByOneOfThem) {
  // Every part ends where the next begins: before block 0 of a row.
  const std::vector<std::int32_t> rows[2] = {{0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0,  //
                                              2, 0, 3, 0, 0, 0, 0, 0},
                                             {2, 0, 3, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0,  //
                                              0, 0, 1, 0, 0, 0, 0, 0}};
  for (const std::vector<std::int32_t>& order : rows) {
    const auto result = resolve(order);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_TRUE(result.value().fragments.empty());
    // The owner of a row names it.
    for (std::int32_t row = 0; row < 3; ++row) {
      const std::int32_t owner = result.value().owners[static_cast<std::size_t>(row)];
      ASSERT_GE(owner, 0);
      const schedule::Walk& walk = result.value().walks[static_cast<std::size_t>(owner)];
      EXPECT_TRUE(walk.begin_row <= row && row <= walk.end_row);
    }
  }
}

TEST_F(Resolve, AnEmptyRowNamedByPartsThatHaveNothingElse) {
  const auto result = resolve({1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 9, 0, 0, 0, 0});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result.value().owners[0], -1);
  EXPECT_EQ(result.value().owners[1], 0);
  EXPECT_EQ(result.value().owners[2], -1);
}

TEST_F(Resolve, AnEmptyRowNamedInsideAnotherPartsWalk) {
  const std::vector<std::int32_t> rows[2] = {{0, 0, 2, 2, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0},
                                             {1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0}};
  for (const std::vector<std::int32_t>& order : rows) {
    const auto result = resolve(order);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(result.value().owners[0], result.value().owners[2]);
    EXPECT_EQ(result.value().owners[1], 0);  // the part that is read first
  }
}

TEST_F(Resolve, PartsThatAreAllEmptyLeaveEveryRowAlone) {
  const auto result = resolve({-1, 5, 5, 5, 5, 5, 5, 5, 3, 0, 3, 9, 0, 0, 0, 0});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().walks[0].begin_row, -1);
  EXPECT_EQ(result.value().walks[1].begin_row, -1);
}

TEST_F(Resolve, RefusesGapsAndOverlaps) {
  const auto gap = resolve({0, 0, 0, 2, 0, 0, 0, 0, 0, 3, 2, 2, 0, 0, 0, 0});
  ASSERT_FALSE(gap.ok());
  EXPECT_NE(gap.status().message().find("blocks 2 to 2 of row 0"), std::string::npos);
  const auto overlap = resolve({0, 0, 0, 3, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 0});
  ASSERT_FALSE(overlap.ok());
  EXPECT_NE(overlap.status().message().find("tile_scheduler_metadata[1] walks blocks of row 0"),
            std::string::npos);
}

}  // namespace
}  // namespace flashmla::testing
