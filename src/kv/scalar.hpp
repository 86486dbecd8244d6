// Scalar conversions of the 16-bit element types: exact to float, round to nearest even from it.
#pragma once

#include <bit>
#include <cstdint>

#include "flashmla/types.hpp"

namespace flashmla {

// Storage types: the bits alone.
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline float to_float(float value) {
  return value;
}

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

inline float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN: keep the payload
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude >= 0x400u) {  // normal: move the exponent bias from 15 to 127
    return std::bit_cast<float>(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  }
  // Subnormal: the significand counts units of 2^-24.
  const float unsigned_value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(unsigned_value));
}

template <class Element>
Element from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // NaN: quiet, never rounded into inf
    return {static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  // 65520 and above round to infinity.
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 aligns the significand so that the float adder rounds to 2^-24.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) & 0x7ffu))};
  }
  const std::uint32_t rebased = magnitude - ((127u - 15u) << 23);
  return {static_cast<std::uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13))};
}

// The storage type of a floating dtype, and a call with it: visit_float_dtype(dtype, [](auto e) {
// using Element = decltype(e); ... }).
template <class Visitor>
decltype(auto) visit_float_dtype(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::kBFloat16:
      return visitor(BFloat16{});
    case DType::kFloat16:
      return visitor(Float16{});
    default:
      return visitor(float{});
  }
}

}  // namespace flashmla
