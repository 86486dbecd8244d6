// Division by a number that is known ahead, as a multiplication.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FLASHMLA_HD __host__ __device__
#else
#define FLASHMLA_HD
#endif

namespace flashmla::schedule {

// Divides 0 <= n < 2^31. With shift = ceil(log2(divisor)) and multiplier =
// ceil(2^(31 + shift) / divisor), the product's error is less than n / 2^31 < 1 parts of
// 1 / divisor, so that the floor is exact.
struct Divisor {
  std::int32_t divisor;
  std::uint32_t multiplier;
  std::int32_t shift;

  Divisor() = default;
  FLASHMLA_HD constexpr explicit Divisor(std::int32_t value)
      : divisor(value),
        multiplier(0),
        shift(std::bit_width(static_cast<std::uint32_t>(value) - 1)) {
    multiplier = static_cast<std::uint32_t>(
        ((std::uint64_t{1} << (31 + shift)) + static_cast<std::uint64_t>(value) - 1) / value);
  }

  FLASHMLA_HD constexpr std::int32_t quotient(std::int32_t n) const {
    const std::uint64_t product = std::uint64_t{2u * static_cast<std::uint32_t>(n)} * multiplier;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(product >> 32) >> shift);
  }
  FLASHMLA_HD constexpr std::int32_t remainder(std::int32_t n) const {
    return n - quotient(n) * divisor;
  }
};

}  // namespace flashmla::schedule
