// Division by multiplication.
#include "schedule/divisor.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace flashmla::testing {
namespace {

using schedule::Divisor;

constexpr std::int32_t kMost = 2147483647;

// Known when compiled.
static_assert(Divisor(64).quotient(129) == 2 && Divisor(7).remainder(20) == 6);

// Numbers at which a quotient that is off by one shows: multiples and their neighbours.
void expect_exact(std::int32_t divisor, std::mt19937& random) {
  std::vector<std::int32_t> numbers = {0, 1, divisor - 1, divisor, kMost - 1, kMost};
  const std::int32_t largest = kMost / divisor;
  numbers.push_back(largest * divisor);
  numbers.push_back(largest * divisor - 1);
  for (int i = 0; i < 200; ++i) {
    const auto multiple = static_cast<std::int32_t>(
        static_cast<std::int64_t>(random() % (static_cast<std::uint32_t>(largest) + 1)) * divisor);
    numbers.push_back(multiple);
    if (multiple > 0) numbers.push_back(multiple - 1);
    if (multiple < kMost) numbers.push_back(multiple + 1);
  }
  const Divisor by(divisor);
  for (const std::int32_t number : numbers) {
    ASSERT_EQ(by.quotient(number), number / divisor) << number << " / " << divisor;
    ASSERT_EQ(by.remainder(number), number % divisor) << number << " % " << divisor;
  }
}

TEST(Divisor, IsExactForSmallDivisors) {
  std::mt19937 random(1);
  for (std::int32_t divisor = 1; divisor <= 2000; ++divisor) expect_exact(divisor, random);
}

TEST(Divisor, IsExactAroundPowersOfTwoAndAtTheLimit) {
  std::mt19937 random(2);
  for (int bits = 11; bits < 31; ++bits) {
    for (int around = -1; around <= 1; ++around) expect_exact((1 << bits) + around, random);
    for (int i = 0; i < 50; ++i) {
      expect_exact((1 << bits) + static_cast<std::int32_t>(random() % (1u << bits)), random);
    }
  }
  for (const std::int32_t divisor : {kMost - 2, kMost - 1, kMost}) expect_exact(divisor, random);
}

}  // namespace
}  // namespace flashmla::testing
