// The vocabulary of common/decode_loop.hpp in the compiler's own vectors of four floats: no
// intrinsics, any processor.
#pragma once

#include <bit>
#include <cstdint>

#include "kv/scalar.hpp"

namespace flashmla::cpu::portable {

struct Vector {
  using Float = float __attribute__((vector_size(16)));
  using Bits = std::uint32_t __attribute__((vector_size(16)));
  struct Pair {
    Float first, second;
  };
  static constexpr std::int32_t kLanes = 4;
  static constexpr std::int32_t kScoreRows = 4;
  static constexpr std::int32_t kValueRows = 4;
  static constexpr std::int32_t kScoreTokens = 2;
  static constexpr std::int32_t kValuePairs = 1;
  static constexpr std::int32_t kStageRows = 8;
  template <class Element>
  static constexpr bool kDotsElements = false;

  static Float load(const float* address) {
    return Float{address[0], address[1], address[2], address[3]};
  }
  static void store(float* address, Float value) {
    for (int lane = 0; lane < kLanes; ++lane) address[lane] = value[lane];
  }
  static Float broadcast(float value) { return Float{value, value, value, value}; }
  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float maximum(Float a, Float b) { return a > b ? a : b; }
  static Float minimum(Float a, Float b) { return a < b ? a : b; }
  template <int kBias>
  static Float power_of_two(Float x) {
    return std::bit_cast<Float>((std::bit_cast<Bits>(x) << 23) + (kBias << 23));
  }
  static float reduce_add(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
  static float reduce_maximum(Float x) {
    const float low = x[0] > x[2] ? x[0] : x[2];
    const float high = x[1] > x[3] ? x[1] : x[3];
    return low > high ? low : high;
  }

  template <class Element>
  static Pair load_pair(const Element* address) {
    Pair pair;
    for (int lane = 0; lane < kLanes; ++lane) {
      pair.first[lane] = to_float(address[lane]);
      pair.second[lane] = to_float(address[kLanes + lane]);
    }
    return pair;
  }
  template <class Element>
  static void store_pair(Element* address, Pair pair) {
    for (int lane = 0; lane < kLanes; ++lane) {
      address[lane] = from_float<Element>(pair.first[lane]);
      address[kLanes + lane] = from_float<Element>(pair.second[lane]);
    }
  }
  template <class Element>
  static void unpack_pair(Pair pair, float* address) {
    store(address, pair.first);
    store(address + kLanes, pair.second);
  }

  static void reduce_tile(const Float* accumulators, float* sums) {
    for (int i = 0; i < 4 * kScoreTokens; ++i) sums[i] = reduce_add(accumulators[i]);
  }
};

}  // namespace flashmla::cpu::portable
