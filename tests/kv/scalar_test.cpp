// The 16-bit conversions against arithmetic written from the IEEE definitions.
#include "kv/scalar.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "kv/dense.hpp"
#include "kv/format.hpp"
#include "support/elements.hpp"

namespace flashmla::testing {
namespace {

template <class Element>
constexpr SmallFormat kFormatOf = kBFloat16Format;
template <>
constexpr SmallFormat kFormatOf<Float16> = kFloat16Format;

template <class Element>
void check_every_pattern_to_float() {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const float value = to_float(Element{pattern});
    const double expected = decode_small(kFormatOf<Element>, pattern);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << std::hex << bits;
    }
  }
}

template <class Element>
void check_from_float(float value) {
  const std::uint16_t bits = from_float<Element>(value).bits;
  if (std::isnan(value)) {
    ASSERT_TRUE(std::isnan(decode_small(kFormatOf<Element>, bits)));
    return;
  }
  ASSERT_EQ(bits, encode_small(kFormatOf<Element>, value)) << std::hexfloat << value;
}

template <class Element>
void check_rounding() {
  std::mt19937 random(5);
  for (int i = 0; i < 200000; ++i)
    check_from_float<Element>(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  // Every value of the format, the points half way to the next, and the floats around those.
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float low = to_float(Element{static_cast<std::uint16_t>(bits)});
    const float high = to_float(Element{static_cast<std::uint16_t>(bits + 1)});
    const float half = low + (high - low) / 2;
    for (const float value :
         {low, half, std::nextafter(half, HUGE_VALF), std::nextafter(half, -HUGE_VALF)}) {
      check_from_float<Element>(value);
    }
  }
}

TEST(Scalar, BFloat16ToFloat) {
  check_every_pattern_to_float<BFloat16>();
}
TEST(Scalar, Float16ToFloat) {
  check_every_pattern_to_float<Float16>();
}
TEST(Scalar, BFloat16FromFloat) {
  check_rounding<BFloat16>();
}
TEST(Scalar, Float16FromFloat) {
  check_rounding<Float16>();
}

TEST(Dense, BytesOfAToken) {
  EXPECT_EQ(kv::dense::bytes_per_token(DType::kBFloat16, 576), 1152);
  EXPECT_EQ(kv::dense::bytes_per_token(DType::kFloat32, 64), 256);
  EXPECT_STREQ(kv_format_name(KvFormat::kDense), "dense");
}

}  // namespace
}  // namespace flashmla::testing
