// merge through the C ABI.
#include <gtest/gtest.h>

#include <cmath>

#include "support/calls.hpp"
#include "support/compare.hpp"
#include "support/decode_case.hpp"
#include "support/executors.hpp"
#include "support/oracle.hpp"

namespace flashmla::testing {
namespace {

constexpr float kInfinity = HUGE_VALF;

struct MergeCase {
  MergeCase(DType dtype, std::int64_t parts, std::int64_t batch, std::int64_t tokens,
            std::int64_t heads, std::int64_t columns)
      : outs(dtype, {parts, batch, tokens, heads, columns}),
        lses(DType::kFloat32, {parts, batch, heads, tokens}),
        out(dtype, {batch, tokens, heads, columns}, kUnwritten),
        lse(DType::kFloat32, {batch, heads, tokens}, kUnwritten) {}

  void fill(std::uint64_t seed) {
    const QueryValue value = random_values(seed);
    const QueryValue logarithm = random_values(seed + 1, 3.0);
    for (std::int64_t p = 0; p < outs.shape()[0]; ++p) {
      for (std::int64_t i = 0; i < outs.shape()[1]; ++i) {
        for (std::int64_t t = 0; t < outs.shape()[2]; ++t) {
          for (std::int64_t h = 0; h < outs.shape()[3]; ++h) {
            lses.set(logarithm(p, i, h, t), p, i, h, t);
            for (std::int64_t c = 0; c < outs.shape()[4]; ++c) {
              outs.set(value(p * 1000 + i, t, h, c), p, i, t, h, c);
            }
          }
        }
      }
    }
  }
  flashmla_merge_args args() const { return merge_args(outs, lses, out, lse); }
  flashmla_status run(const flashmla_executor* executor = nullptr) {
    out.refill(kUnwritten);
    lse.refill(kUnwritten);
    const flashmla_merge_args call = args();
    return flashmla_merge(&call, executor);
  }

  Array outs, lses, out, lse;
};

class Merge : public ::testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, Merge,
                         ::testing::Values(DType::kBFloat16, DType::kFloat16, DType::kFloat32),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_P(Merge, EqualsTheDefinition) {
  MergeCase merge(GetParam(), 5, 2, 3, 4, 513);
  merge.fill(7);
  ASSERT_EQ(merge.run(), FLASHMLA_OK) << flashmla_last_error();
  const Expected expected = evaluate_merge(merge.outs, merge.lses);
  EXPECT_TRUE(out_close(merge.out, expected.out, tolerance_of(GetParam())));
  EXPECT_TRUE(lse_close(merge.lse, expected.lse, tolerance_of(GetParam())));
}

TEST_P(Merge, EmptyPartsWeighNothingWhateverTheyHold) {
  // Part p of (row, head) is empty when its bit of the head's number is set; outs there hold NaN.
  for (const float empty : {kInfinity, -kInfinity}) {
    MergeCase merge(GetParam(), 3, 2, 2, 8, 96);
    merge.fill(8);
    for (std::int64_t h = 0; h < 8; ++h) {
      for (std::int64_t p = 0; p < 3; ++p) {
        if ((h >> p & 1) == 0) continue;
        for (std::int64_t i = 0; i < 2; ++i) {
          for (std::int64_t t = 0; t < 2; ++t) {
            merge.lses.set(empty, p, i, h, t);
            for (std::int64_t c = 0; c < 96; ++c) merge.outs.set(std::nan(""), p, i, t, h, c);
          }
        }
      }
    }
    ASSERT_EQ(merge.run(), FLASHMLA_OK);
    const Expected expected = evaluate_merge(merge.outs, merge.lses);
    EXPECT_TRUE(out_close(merge.out, expected.out, tolerance_of(GetParam())));
    EXPECT_TRUE(lse_close(merge.lse, expected.lse, tolerance_of(GetParam())));
    EXPECT_EQ(merge.lse.at(1, 7, 1), kInfinity);
    for (std::int64_t c = 0; c < 96; ++c) {
      EXPECT_EQ(merge.out.at(1, 1, 7, c), 0.0);
      // Head 5 is empty in parts 0 and 2: part 1 passes through, bit for bit.
      EXPECT_EQ(merge.out.at(1, 1, 5, c), merge.outs.at(1, 1, 1, 5, c));
    }
    EXPECT_EQ(merge.lse.at(1, 5, 1), merge.lses.at(1, 1, 5, 1));
  }
}

TEST_P(Merge, LoneNegativeZeroPassesThrough) {
  MergeCase merge(GetParam(), 2, 1, 1, 1, 64);
  merge.fill(9);
  merge.lses.set(kInfinity, 0, 0, 0, 0);
  for (std::int64_t c = 0; c < 64; ++c) merge.outs.set(-0.0, 1, 0, 0, 0, c);
  ASSERT_EQ(merge.run(), FLASHMLA_OK);
  for (std::int64_t c = 0; c < 64; ++c) EXPECT_TRUE(std::signbit(merge.out.at(0, 0, 0, c)));
}

TEST_P(Merge, StridedInputsAndOutputs) {
  MergeCase merge(GetParam(), 3, 2, 2, 3, 64);
  merge.fill(10);
  ASSERT_EQ(merge.run(), FLASHMLA_OK);
  MergeCase strided(GetParam(), 3, 2, 2, 3, 64);
  // Heads before tokens in memory, and gaps.
  strided.outs = Array(GetParam(), {3, 2, 2, 3, 64}, {1000, 500, 70, 150, 1});
  strided.lses = Array(DType::kFloat32, {3, 2, 3, 2}, {40, 20, 3, 10});
  strided.out = Array(GetParam(), {2, 2, 3, 64}, {600, 70, 150, 1}, kUnwritten);
  strided.lse = Array(DType::kFloat32, {2, 3, 2}, {13, 2, 7}, kUnwritten);
  strided.fill(10);
  ASSERT_EQ(strided.run(), FLASHMLA_OK) << flashmla_last_error();
  EXPECT_EQ(strided.out.values(), merge.out.values());
  EXPECT_EQ(strided.lse.values(), merge.lse.values());
  EXPECT_TRUE(strided.out.gaps_unwritten());
  EXPECT_TRUE(strided.lse.gaps_unwritten());
}

TEST_P(Merge, SameBitsWithAnyThreads) {
  MergeCase merge(GetParam(), 4, 3, 2, 5, 512);
  merge.fill(11);
  TestExecutor serial = serial_executor();
  ASSERT_EQ(merge.run(serial.get()), FLASHMLA_OK);
  const auto out = merge.out.copy_bytes(), lse = merge.lse.copy_bytes();
  for (TestExecutor executor :
       {thread_executor(2), thread_executor(5), thread_executor(64), backward_executor(7)}) {
    ASSERT_EQ(merge.run(executor.get()), FLASHMLA_OK);
    EXPECT_EQ(merge.out.copy_bytes(), out);
    EXPECT_EQ(merge.lse.copy_bytes(), lse);
  }
}

TEST(MergeValues, LogSumExpIsNatural) {
  // Two shards of ten tokens with uniform scores.
  const auto shard = [](std::int32_t begin, std::int32_t end) {
    DecodeShape shape;
    shape.dtype = DType::kFloat32;
    shape.lengths = {end - begin};
    shape.num_heads_q = 1;
    DecodeCase call(shape, zero_q,
                    [=](auto i, auto j, auto g, auto c) { return fixed_k(i, j + begin, g, c); });
    EXPECT_EQ(call.run().status, FLASHMLA_OK);
    return call;
  };
  const DecodeCase a = shard(0, 2), b = shard(2, 10);
  EXPECT_NEAR(a.lse.at(0, 0, 0), 0.693147181, 1e-6);
  EXPECT_NEAR(b.lse.at(0, 0, 0), 2.079441542, 1e-6);
  MergeCase merge(DType::kFloat32, 2, 1, 1, 1, 512);
  for (std::int64_t c = 0; c < 512; ++c) {
    merge.outs.set(a.out.at(0, 0, 0, c), 0, 0, 0, 0, c);
    merge.outs.set(b.out.at(0, 0, 0, c), 1, 0, 0, 0, c);
  }
  merge.lses.set(a.lse.at(0, 0, 0), 0, 0, 0, 0);
  merge.lses.set(b.lse.at(0, 0, 0), 1, 0, 0, 0);
  ASSERT_EQ(merge.run(), FLASHMLA_OK);
  EXPECT_NEAR(merge.lse.at(0, 0, 0), 2.302585093, 1e-6);
  EXPECT_NEAR(merge.out.at(0, 0, 0, 0), -0.2640625, 1e-6);
}

TEST(MergeValues, LargeLogarithmsDoNotOverflow) {
  MergeCase merge(DType::kFloat32, 3, 1, 1, 2, 64);
  merge.fill(12);
  const double logarithms[3][2] = {{1e4, -1e4}, {9999.5, -1e4}, {-1e4, 1e4}};
  for (std::int64_t p = 0; p < 3; ++p) {
    for (std::int64_t h = 0; h < 2; ++h) merge.lses.set(logarithms[p][h], p, 0, h, 0);
  }
  ASSERT_EQ(merge.run(), FLASHMLA_OK);
  const Expected expected = evaluate_merge(merge.outs, merge.lses);
  EXPECT_TRUE(out_close(merge.out, expected.out, tolerance_of(DType::kFloat32)));
  EXPECT_TRUE(lse_close(merge.lse, expected.lse, tolerance_of(DType::kFloat32)));
}

TEST(MergeValues, EmptyBatch) {
  MergeCase merge(DType::kBFloat16, 3, 0, 1, 4, 64);
  EXPECT_EQ(merge.run(), FLASHMLA_OK) << flashmla_last_error();
}

}  // namespace
}  // namespace flashmla::testing
