// The vocabulary of common/decode_loop.hpp in NEON, the baseline of 64-bit Arm.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kv/scalar.hpp"

namespace flashmla::cpu::neon {

struct Vector {
  using Float = float32x4_t;
  struct Pair {
    Float first, second;
  };
  static constexpr std::int32_t kLanes = 4;
  // 16 accumulators of 32 registers.
  static constexpr std::int32_t kScoreRows = 4;
  static constexpr std::int32_t kValueRows = 4;
  static constexpr std::int32_t kScoreTokens = 4;
  static constexpr std::int32_t kValuePairs = 2;
  static constexpr std::int32_t kStageRows = 32;
  template <class Element>
  static constexpr bool kDotsElements = false;

  static Float load(const float* address) { return vld1q_f32(address); }
  static void store(float* address, Float value) { vst1q_f32(address, value); }
  static Float broadcast(float value) { return vdupq_n_f32(value); }
  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float maximum(Float a, Float b) { return vmaxq_f32(a, b); }
  static Float minimum(Float a, Float b) { return vminq_f32(a, b); }
  template <int kBias>
  static Float power_of_two(Float x) {
    const int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(x), 23);
    return vreinterpretq_f32_s32(vaddq_s32(n, vdupq_n_s32(kBias << 23)));
  }
  static float reduce_add(Float x) { return vaddvq_f32(x); }
  static float reduce_maximum(Float x) { return vmaxvq_f32(x); }

  // bf16: even elements, then odd ones (see avx512/vector.hpp). Other types: in order.
  template <class Element>
  static Pair load_pair(const Element* address);
  template <class Element>
  static void store_pair(Element* address, Pair pair);
  template <class Element>
  static void unpack_pair(Pair pair, float* address) {
    store(address, pair.first);
    store(address + kLanes, pair.second);
  }

  // Sums of the 4 x 4 accumulators, [row][token].
  static void reduce_tile(const Float* accumulators, float* sums) {
    for (int row = 0; row < 4; ++row) {
      const Float* of_row = accumulators + row * 4;
      store(sums + row * 4,
            vpaddq_f32(vpaddq_f32(of_row[0], of_row[1]), vpaddq_f32(of_row[2], of_row[3])));
    }
  }
};

// The bits of a float rounded to bf16, in the high half of each word; NaN stays NaN.
inline uint32x4_t round_to_bf16(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vbslq_u32(vceqq_f32(x, x), rounded, quiet);
}

template <>
inline Vector::Pair Vector::load_pair<BFloat16>(const BFloat16* address) {
  const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(&address->bits));
  return {vreinterpretq_f32_u32(vshlq_n_u32(both, 16)),
          vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)))};
}
template <>
inline void Vector::store_pair<BFloat16>(BFloat16* address, Pair pair) {
  const uint32x4_t even = vshrq_n_u32(round_to_bf16(pair.first), 16);
  const uint32x4_t odd = vandq_u32(round_to_bf16(pair.second), vdupq_n_u32(0xffff0000u));
  vst1q_u16(&address->bits, vreinterpretq_u16_u32(vorrq_u32(even, odd)));
}
template <>
inline void Vector::unpack_pair<BFloat16>(Pair pair, float* address) {
  store(address, vzip1q_f32(pair.first, pair.second));
  store(address + kLanes, vzip2q_f32(pair.first, pair.second));
}

template <>
inline Vector::Pair Vector::load_pair<Float16>(const Float16* address) {
  const float16x8_t both = vreinterpretq_f16_u16(vld1q_u16(&address->bits));
  return {vcvt_f32_f16(vget_low_f16(both)), vcvt_f32_f16(vget_high_f16(both))};
}
template <>
inline void Vector::store_pair<Float16>(Float16* address, Pair pair) {
  const float16x8_t both = vcombine_f16(vcvt_f16_f32(pair.first), vcvt_f16_f32(pair.second));
  vst1q_u16(&address->bits, vreinterpretq_u16_f16(both));
}

template <>
inline Vector::Pair Vector::load_pair<float>(const float* address) {
  return {load(address), load(address + kLanes)};
}
template <>
inline void Vector::store_pair<float>(float* address, Pair pair) {
  store(address, pair.first);
  store(address + kLanes, pair.second);
}

}  // namespace flashmla::cpu::neon
