// The merge of one row. Whole tensors are merged in capi/.
#include "combine/merge.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace flashmla::testing {
namespace {

float merge(const std::vector<float>& lses, const std::vector<std::vector<float>>& outs,
            std::vector<float>& out) {
  return combine::merge_row<float>(
      static_cast<std::int64_t>(lses.size()), [&](std::int64_t i) { return lses[i]; },
      [&](std::int64_t i) { return outs[i].data(); }, static_cast<std::int32_t>(out.size()),
      out.data());
}

TEST(MergeRow, WeighsByExponentials) {
  std::vector<float> out(1);
  const float lse = merge({std::log(1.0f), std::log(3.0f)}, {{8.0f}, {4.0f}}, out);
  EXPECT_NEAR(lse, std::log(4.0), 1e-6);
  EXPECT_NEAR(out[0], 5.0, 1e-6);
}

TEST(MergeRow, MoreColumnsThanOneChunk) {
  constexpr int kColumns = 1300;
  std::vector<float> a(kColumns), b(kColumns), out(kColumns);
  for (int c = 0; c < kColumns; ++c) {
    a[c] = static_cast<float>(c);
    b[c] = static_cast<float>(-2 * c);
  }
  merge({0.0f, 0.0f}, {a, b}, out);
  for (int c = 0; c < kColumns; ++c) ASSERT_FLOAT_EQ(out[c], -0.5f * static_cast<float>(c));
}

TEST(MergeRow, LonePartPassesThroughBitForBit) {
  const std::vector<float> values = {0.1f, -0.0f, 1e-42f, 3e38f};
  for (const float empty : {HUGE_VALF, -HUGE_VALF}) {
    for (const bool first : {true, false}) {
      std::vector<float> out(values.size());
      const std::vector<float> nothing(values.size(), NAN);
      const float lse = first ? merge({0.3f, empty}, {values, nothing}, out)
                              : merge({empty, 0.3f}, {nothing, values}, out);
      EXPECT_EQ(lse, 0.3f);
      for (std::size_t c = 0; c < values.size(); ++c) {
        EXPECT_EQ(std::signbit(out[c]), std::signbit(values[c]));
        EXPECT_EQ(out[c], values[c]);
      }
    }
  }
}

TEST(MergeRow, ALonePartsNegativeZeroIsKept) {
  std::vector<float> out(1);
  EXPECT_TRUE(std::signbit(merge({-0.0f, HUGE_VALF}, {{1.0f}, {1.0f}}, out)));
}

TEST(MergeRow, RoundingDoesNotLeaveTheRangeOfTheParts) {
  constexpr float kLargest = 0x1.fffffep127f;
  for (int parts = 2; parts < 40; ++parts) {
    std::vector<float> lses;
    for (int i = 0; i < parts; ++i) lses.push_back(0.37f * static_cast<float>(i % 5));
    std::vector<float> out(2);
    merge(lses, std::vector(lses.size(), std::vector{kLargest, -kLargest}), out);
    EXPECT_EQ(out[0], kLargest);
    EXPECT_EQ(out[1], -kLargest);
  }
  std::vector<float> out(2);
  merge({0.0f, 0.0f}, {{HUGE_VALF, 1.0f}, {2.0f, NAN}}, out);
  EXPECT_EQ(out[0], HUGE_VALF);
  EXPECT_TRUE(std::isnan(out[1]));
}

// A sum of thousands outgrows what is added to it.
TEST(MergeRow, ThousandsOfParts) {
  constexpr int kParts = 4097, kColumns = 40;
  std::vector<float> lses;
  std::vector<std::vector<float>> parts;
  std::vector<double> expected(kColumns);
  double total = 0.0;
  for (int i = 0; i < kParts; ++i) {
    lses.push_back(0.37f * static_cast<float>(i % 5));
    parts.emplace_back();
    const double weight = std::exp(static_cast<double>(lses.back()));
    total += weight;
    for (int c = 0; c < kColumns; ++c) {
      parts.back().push_back(1.1f + 0.03f * static_cast<float>(c * (i % 3)));
      expected[c] += weight * static_cast<double>(parts.back().back());
    }
  }
  std::vector<float> out(kColumns);
  EXPECT_NEAR(merge(lses, parts, out), std::log(total), 6e-7);
  for (int c = 0; c < kColumns; ++c) EXPECT_NEAR(out[c] * total / expected[c], 1.0, 1e-6);
}

TEST(MergeRow, NothingAtAll) {
  std::vector<float> out(2, 7.0f);
  EXPECT_EQ(merge({HUGE_VALF, -HUGE_VALF}, {{NAN, NAN}, {NAN, NAN}}, out), HUGE_VALF);
  EXPECT_EQ(out, (std::vector<float>{0.0f, 0.0f}));
}

TEST(MergeRow, NanIsNotHidden) {
  std::vector<float> out(1);
  EXPECT_TRUE(std::isnan(merge({NAN, 1.0f}, {{1.0f}, {1.0f}}, out)));
  EXPECT_TRUE(std::isnan(merge({1.0f, NAN}, {{1.0f}, {1.0f}}, out)));
}

}  // namespace
}  // namespace flashmla::testing
