// The comparison that all results pass through: what it must not let by.
#include "support/compare.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <utility>
#include <vector>

namespace flashmla::testing {
namespace {

constexpr Tolerance kTolerance{1e-2, 1e-4, 5e-2};

Array floats(const std::vector<double>& values) {
  Array array(DType::kFloat32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t i = 0; i < values.size(); ++i) array.set(values[i], i);
  return array;
}

TEST(Compare, SpecialValuesStandWhereTheyAreExpected) {
  EXPECT_TRUE(same_special_values({1, NAN, HUGE_VAL, -HUGE_VAL}, {2, NAN, HUGE_VAL, -HUGE_VAL}));
  for (const auto& [value, expected] : {std::pair{NAN, 1.0f},
                                        {HUGE_VALF, 1.0f},
                                        {1.0f, NAN},
                                        {HUGE_VALF, NAN},
                                        {1.0f, HUGE_VALF},
                                        {NAN, HUGE_VALF},
                                        {-HUGE_VALF, HUGE_VALF}}) {
    EXPECT_FALSE(same_special_values({0, value}, {0, expected})) << value << " " << expected;
  }
  EXPECT_FALSE(same_special_values({1}, {1, 2}));
}

TEST(Compare, OutIsBoundedInNormAndByElement) {
  std::vector<double> expected(10000, 1.0), values = expected;
  EXPECT_TRUE(out_close(floats(values), expected, kTolerance));
  // A single element, which the norm does not see.
  values[77] = 1.06;
  EXPECT_FALSE(out_close(floats(values), expected, kTolerance));
  values[77] = 1.04;
  EXPECT_TRUE(out_close(floats(values), expected, kTolerance));
  // All of them by a little, which no element shows.
  for (double& value : values) value = 1.02;
  EXPECT_FALSE(out_close(floats(values), expected, kTolerance));
  EXPECT_FALSE(out_close(floats({1, NAN}), {1, 2}, kTolerance));
  EXPECT_FALSE(out_close(floats({1e-30}), {0}, kTolerance));
}

TEST(Compare, LseIsBoundedByElement) {
  EXPECT_TRUE(lse_close(floats({1, HUGE_VAL, 3.00009}), {1, HUGE_VAL, 3}, kTolerance));
  EXPECT_FALSE(lse_close(floats({1, HUGE_VAL, 3.0002}), {1, HUGE_VAL, 3}, kTolerance));
  EXPECT_FALSE(lse_close(floats({1, HUGE_VAL}), {1, -HUGE_VAL}, kTolerance));
  // An lse of 1e4 has a last place of 1e-3.
  EXPECT_TRUE(lse_close(floats({1e4 + 2e-3}), {1e4}, kTolerance));
  EXPECT_FALSE(lse_close(floats({1e4 + 2e-2}), {1e4}, kTolerance));
}

TEST(Compare, AResultLeavesTheGapsOfItsTensorsAlone) {
  DecodeShape shape;
  shape.lengths = {70};
  shape.num_heads_q = 2;
  shape.out_gap = shape.lse_gap = 3;
  DecodeCase call(shape);
  ASSERT_EQ(call.run("cpu_reference_bf16").status, FLASHMLA_OK);
  const Expected expected = evaluate(call);
  EXPECT_TRUE(result_close(call, expected));
  for (const Array* array : {&call.out, &call.lse}) {
    // The first gap lies behind the first row of the last dimension.
    const std::int64_t row = array->shape().back();
    std::byte* gap = array->bytes() + row * element_size(array->dtype());
    const std::byte before = std::exchange(*gap, std::byte{0});
    EXPECT_FALSE(result_close(call, expected));
    *gap = before;
  }
  EXPECT_TRUE(result_close(call, expected));
}

}  // namespace
}  // namespace flashmla::testing
