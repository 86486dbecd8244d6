// The vocabulary of common/decode_loop.hpp in AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kv/scalar.hpp"

namespace flashmla::cpu::avx2 {

struct Vector {
  using Float = __m256;
  struct Pair {
    Float first, second;
  };
  static constexpr std::int32_t kLanes = 8;
  // 8 accumulators, as many as two multiply-adds a cycle of latency 4 need, of 16 registers.
  static constexpr std::int32_t kScoreRows = 4;
  static constexpr std::int32_t kValueRows = 4;
  static constexpr std::int32_t kScoreTokens = 2;
  static constexpr std::int32_t kValuePairs = 1;
  static constexpr std::int32_t kStageRows = 32;
  template <class Element>
  static constexpr bool kDotsElements = false;

  static Float load(const float* address) { return _mm256_loadu_ps(address); }
  static void store(float* address, Float value) { _mm256_storeu_ps(address, value); }
  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float maximum(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float minimum(Float a, Float b) { return _mm256_min_ps(a, b); }
  template <int kBias>
  static Float power_of_two(Float x) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(x), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(kBias << 23)));
  }
  static float reduce_add(Float x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static float reduce_maximum(Float x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }

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

  // Sums of the 4 x 2 accumulators, [row][token]: two rounds of horizontal adds leave the sums of
  // the low and the high 128 bits of accumulators 0-3 and 4-7.
  static void reduce_tile(const Float* accumulators, float* sums) {
    const Float low = _mm256_hadd_ps(_mm256_hadd_ps(accumulators[0], accumulators[1]),
                                     _mm256_hadd_ps(accumulators[2], accumulators[3]));
    const Float high = _mm256_hadd_ps(_mm256_hadd_ps(accumulators[4], accumulators[5]),
                                      _mm256_hadd_ps(accumulators[6], accumulators[7]));
    store(sums, _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                              _mm256_permute2f128_ps(low, high, 0x31)));
  }
};

// The bits of a float rounded to bf16, in the high half of each dword; NaN stays NaN.
inline __m256i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, nan);
}

template <>
inline Vector::Pair Vector::load_pair<BFloat16>(const BFloat16* address) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)),
          _mm256_castsi256_ps(
              _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
template <>
inline void Vector::store_pair<BFloat16>(BFloat16* address, Pair pair) {
  const __m256i even = _mm256_srli_epi32(round_to_bf16(pair.first), 16);
  const __m256i odd = _mm256_and_si256(round_to_bf16(pair.second),
                                       _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), _mm256_or_si256(even, odd));
}
template <>
inline void Vector::unpack_pair<BFloat16>(Pair pair, float* address) {
  const Float low = _mm256_unpacklo_ps(pair.first, pair.second);
  const Float high = _mm256_unpackhi_ps(pair.first, pair.second);
  store(address, _mm256_permute2f128_ps(low, high, 0x20));
  store(address + kLanes, _mm256_permute2f128_ps(low, high, 0x31));
}

template <>
inline Vector::Pair Vector::load_pair<Float16>(const Float16* address) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(address);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
template <>
inline void Vector::store_pair<Float16>(Float16* address, Pair pair) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  __m128i* halves = reinterpret_cast<__m128i*>(address);
  _mm_storeu_si128(halves, _mm256_cvtps_ph(pair.first, kNearest));
  _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(pair.second, kNearest));
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

}  // namespace flashmla::cpu::avx2
