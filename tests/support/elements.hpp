// Element types of tests, written from the IEEE definitions and independent of src/kv/scalar.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "flashmla/types.hpp"

namespace flashmla::testing {

// A binary floating format with 16 bits: `fraction_bits` stored bits, exponents from min_exponent.
struct SmallFormat {
  int fraction_bits;
  int min_exponent;  // of the smallest normal number
  int max_exponent;
};
inline constexpr SmallFormat kBFloat16Format{7, -126, 127};
inline constexpr SmallFormat kFloat16Format{10, -14, 15};

inline double decode_small(SmallFormat format, std::uint16_t bits) {
  const double sign = bits >> 15 != 0 ? -1.0 : 1.0;
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.fraction_bits;
  const int special = (1 << (15 - format.fraction_bits)) - 1;
  if (exponent == special) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const int implicit = exponent == 0 ? 0 : 1 << format.fraction_bits;
  const int power = exponent == 0 ? format.min_exponent : format.min_exponent + exponent - 1;
  return sign * std::ldexp(implicit + fraction, power - format.fraction_bits);
}

// Rounds to nearest, ties to even.
inline std::uint16_t encode_small(SmallFormat format, double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int special = ((1 << (15 - format.fraction_bits)) - 1) << format.fraction_bits;
  if (std::isnan(value)) return static_cast<std::uint16_t>(special | 1);
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | special);
  int exponent = format.min_exponent;
  if (magnitude > 0) exponent = std::max(exponent, std::ilogb(magnitude));
  // In units of the last place; may carry into the next binade, which the sum below absorbs.
  const auto units = static_cast<std::int64_t>(
      std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent)));
  const std::int64_t bits =
      units + (static_cast<std::int64_t>(exponent - format.min_exponent) << format.fraction_bits);
  if (exponent > format.max_exponent || bits >= special) {
    return static_cast<std::uint16_t>(sign | special);
  }
  return static_cast<std::uint16_t>(sign | bits);
}

inline double load_element(DType dtype, const std::byte* from) {
  switch (dtype) {
    case DType::kFloat32: {
      float value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    case DType::kInt32: {
      std::int32_t value;
      std::memcpy(&value, from, sizeof(value));
      return value;
    }
    default: {
      std::uint16_t bits;
      std::memcpy(&bits, from, sizeof(bits));
      return decode_small(dtype == DType::kBFloat16 ? kBFloat16Format : kFloat16Format, bits);
    }
  }
}

inline void store_element(DType dtype, std::byte* to, double value) {
  switch (dtype) {
    case DType::kFloat32: {
      const auto narrow = static_cast<float>(value);
      std::memcpy(to, &narrow, sizeof(narrow));
      return;
    }
    case DType::kInt32: {
      const auto narrow = static_cast<std::int32_t>(value);
      std::memcpy(to, &narrow, sizeof(narrow));
      return;
    }
    default: {
      const std::uint16_t bits =
          encode_small(dtype == DType::kBFloat16 ? kBFloat16Format : kFloat16Format, value);
      std::memcpy(to, &bits, sizeof(bits));
    }
  }
}

}  // namespace flashmla::testing
