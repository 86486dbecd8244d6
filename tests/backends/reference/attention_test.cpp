// The reference by itself, on sums that fit on paper.
#include "backends/reference/attention.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace flashmla::testing {
namespace {

TEST(Reference, TwoTokensByHand) {
  Problem problem;
  problem.head_dim = 3;
  problem.head_dim_v = 2;
  problem.softmax_scale = 0.5f;
  const float q[3] = {2.0f, 0.0f, 4.0f};
  const float tokens[2][3] = {{1.0f, 10.0f, 0.0f}, {0.0f, 20.0f, 1.0f}};  // scores 1 and 2
  double out[2];
  const auto token = [&](std::int32_t j) { return tokens[j]; };
  const double lse = reference::attend(problem, q, 0, 2, token, out);
  const double sum = std::exp(1.0) + std::exp(2.0);
  EXPECT_NEAR(lse, std::log(sum), 1e-14);
  EXPECT_NEAR(out[0], std::exp(1.0) / sum, 1e-14);
  EXPECT_NEAR(out[1], (10 * std::exp(1.0) + 20 * std::exp(2.0)) / sum, 1e-13);
}

TEST(Reference, RangeAndEmptyRange) {
  Problem problem;
  problem.head_dim = 1;
  problem.head_dim_v = 1;
  problem.softmax_scale = 1.0f;
  const float q[1] = {3.0f};
  const float tokens[3] = {NAN, 2.0f, NAN};
  double out[1] = {7.0};
  const auto token = [&](std::int32_t j) { return tokens + j; };
  EXPECT_EQ(reference::attend(problem, q, 1, 2, token, out), 6.0);
  EXPECT_EQ(out[0], 2.0);
  EXPECT_EQ(reference::attend(problem, q, 1, 1, token, out), HUGE_VAL);
  EXPECT_EQ(out[0], 0.0);
}

}  // namespace
}  // namespace flashmla::testing
