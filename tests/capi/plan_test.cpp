// Planning as callers see it.
#include <gtest/gtest.h>

#include <random>

#include "support/array.hpp"
#include "support/calls.hpp"
#include "support/decode_case.hpp"
#include "support/plan_check.hpp"

namespace flashmla::testing {
namespace {

struct PlanCall {
  PlanCall(const std::vector<std::int32_t>& lengths, std::int32_t num_parts)
      : lengths_array(int32_array({static_cast<std::int64_t>(lengths.size())}, lengths)),
        rows(DType::kInt32, {num_parts, 8}, kUnwritten),
        splits(DType::kInt32, {static_cast<std::int64_t>(lengths.size()) + 1}, kUnwritten) {}

  flashmla_status run() {
    const flashmla_plan_args args = plan_args(lengths_array, rows, splits, 128);
    return flashmla_plan(&args);
  }
  static std::vector<std::int32_t> ints(const Array& array) {
    std::vector<std::int32_t> values(array.size_bytes() / 4);
    std::memcpy(values.data(), array.bytes(), array.size_bytes());
    return values;
  }

  Array lengths_array, rows, splits;
};

// What the CPU's planner charges for a row, in eighths of a block, at most.
constexpr std::int64_t kMostRowStart = 8;

TEST(Plan, CoversEveryRowOnceAndEvenly) {
  std::mt19937 random(1);
  for (const std::size_t batch : {0, 1, 2, 9, 128, 1024, 8192, 65536, 100000}) {
    for (const bool all_empty : {true, false}) {
      std::vector<std::int32_t> lengths(batch, 0);
      for (std::int32_t& length : lengths) {
        if (!all_empty && random() % 4 != 0) length = static_cast<std::int32_t>(random() % 3000);
      }
      if (!all_empty && batch > 0) lengths[random() % batch] = 1000000;
      for (const std::int32_t parts : {1, 2, 132}) {
        PlanCall call(lengths, parts);
        ASSERT_EQ(call.run(), FLASHMLA_OK) << flashmla_last_error();
        const std::vector<std::int32_t> rows = PlanCall::ints(call.rows);
        // The charge is the library's own affair: one of the possible ones must fit.
        ::testing::AssertionResult fits = ::testing::AssertionFailure();
        for (std::int64_t start = 1; start <= kMostRowStart && !fits; ++start) {
          fits = plan_holds(lengths, rows, PlanCall::ints(call.splits),
                            {static_cast<std::int32_t>(start), 1, false});
        }
        ASSERT_TRUE(fits) << "batch " << batch << ", " << parts << " parts";
      }
    }
  }
}

TEST(Plan, StridedLengths) {
  PlanCall plain({130, 0, 65, 1000}, 3);
  ASSERT_EQ(plain.run(), FLASHMLA_OK);
  PlanCall strided({130, 0, 65, 1000}, 3);
  strided.lengths_array = Array(DType::kInt32, {4}, {3});
  for (const auto& [row, length] : {std::pair{0, 130}, {1, 0}, {2, 65}, {3, 1000}}) {
    strided.lengths_array.set(length, row);
  }
  ASSERT_EQ(strided.run(), FLASHMLA_OK);
  EXPECT_EQ(strided.rows.copy_bytes(), plain.rows.copy_bytes());
  EXPECT_EQ(strided.splits.copy_bytes(), plain.splits.copy_bytes());
}

TEST(Plan, NumberOfPartsFollowsThreadsAndHeads) {
  std::int32_t parts = 0;
  ASSERT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 128, 1, 16, &parts), FLASHMLA_OK);
  EXPECT_EQ(parts, 16);
  ASSERT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 16, 8, 16, &parts), FLASHMLA_OK);
  EXPECT_EQ(parts, 2);
  ASSERT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 16, 8, 0, &parts), FLASHMLA_OK);
  EXPECT_GE(parts, 1);
}

TEST(Plan, DecodeLeavesThePlanAsItWas) {
  DecodeShape shape;
  shape.lengths = {200, 65};
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  DecodeCase call(shape);
  call.plan(3);
  const auto rows = call.plan_rows.copy_bytes(), splits = call.num_splits.copy_bytes();
  ASSERT_EQ(call.run().status, FLASHMLA_OK);
  EXPECT_EQ(call.plan_rows.copy_bytes(), rows);
  EXPECT_EQ(call.num_splits.copy_bytes(), splits);
}

TEST(Plan, PartThatBeginsPastItsRowHasNothingOfIt) {
  // Row 0 shrank from 5 blocks to 3 after the plan was made: the second part has none of it left.
  DecodeShape shape;
  shape.lengths = {150, 65};
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  DecodeCase call(shape);
  call.plan_by_hand({{0, 0, 0, 4}, {0, 4, 1, 2}});
  ASSERT_EQ(call.run().status, FLASHMLA_OK);
  const auto shrunk = call.out.copy_bytes();
  call.plan_by_hand({{0, 0, 1, 2}});
  ASSERT_EQ(call.run().status, FLASHMLA_OK);
  EXPECT_EQ(call.out.copy_bytes(), shrunk);
}

}  // namespace
}  // namespace flashmla::testing
