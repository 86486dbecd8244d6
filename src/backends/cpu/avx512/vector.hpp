// The vocabulary of common/decode_loop.hpp in AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kv/scalar.hpp"

namespace flashmla::cpu::avx512 {

struct Vector {
  using Float = __m512;
  struct Pair {
    Float first, second;
  };
  static constexpr std::int32_t kLanes = 16;
  // 4 rows x 4 tokens of scores and 4 rows x 4 registers of columns: 16 accumulators of 32
  // registers.
  static constexpr std::int32_t kScoreRows = 4;
  static constexpr std::int32_t kValueRows = 4;
  static constexpr std::int32_t kScoreTokens = 4;
  static constexpr std::int32_t kValuePairs = 2;
  static constexpr std::int32_t kStageRows = 16;
  template <class Element>
  static constexpr bool kDotsElements = false;

  static Float load(const float* address) { return _mm512_loadu_ps(address); }
  static void store(float* address, Float value) { _mm512_storeu_ps(address, value); }
  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float maximum(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float minimum(Float a, Float b) { return _mm512_min_ps(a, b); }
  template <int kBias>
  static Float power_of_two(Float x) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(x), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(kBias << 23)));
  }
  static float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }
  static float reduce_maximum(Float x) { return _mm512_reduce_max_ps(x); }

  // bf16: a dword holds an even element in its low half and an odd one in its high half, so one
  // shift and one mask widen 32 elements. Other types: the first 16 elements, then the next.
  template <class Element>
  static Pair load_pair(const Element* address);
  template <class Element>
  static void store_pair(Element* address, Pair pair);
  template <class Element>
  static void unpack_pair(Pair pair, float* address) {
    store(address, pair.first);
    store(address + kLanes, pair.second);
  }

  // Sums of the 16 accumulators, in order. A transposing reduction: each step adds the halves of
  // two registers into one. The steps leave accumulator 4 * r + t in 128-bit lane {0, 2, 1, 3}[r],
  // element {0, 2, 1, 3}[t], hence the order in which they take the accumulators.
  static void reduce_tile(const Float* accumulators, float* sums) {
    const __m512d a = _mm512_castps_pd(fold_128<0>(accumulators));
    const __m512d b = _mm512_castps_pd(fold_128<1>(accumulators));
    store(sums, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                              _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))));
  }
  template <int kIndex>
  static Float fold_512(const Float* accumulators) {
    constexpr int kOrder[4] = {0, 2, 1, 3};
    constexpr int kFirst = kOrder[kIndex / 4] * 4 + kOrder[kIndex % 4];
    constexpr int kSecond = kOrder[kIndex / 4 + 2] * 4 + kOrder[kIndex % 4];
    const Float a = accumulators[kFirst], b = accumulators[kSecond];
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  template <int kIndex>
  static Float fold_256(const Float* accumulators) {
    const Float a = fold_512<kIndex>(accumulators), b = fold_512<kIndex + 4>(accumulators);
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  template <int kIndex>
  static Float fold_128(const Float* accumulators) {
    const Float a = fold_256<kIndex>(accumulators), b = fold_256<kIndex + 2>(accumulators);
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
};

// The bits of a float rounded to bf16, in the high half of each dword; NaN stays NaN.
inline __m512i round_to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
}

template <>
inline Vector::Pair Vector::load_pair<BFloat16>(const BFloat16* address) {
  const __m512i both = _mm512_loadu_si512(address);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)),
          _mm512_castsi512_ps(
              _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
template <>
inline void Vector::store_pair<BFloat16>(BFloat16* address, Pair pair) {
  const __m512i even = _mm512_srli_epi32(round_to_bf16(pair.first), 16);
  const __m512i odd = _mm512_and_si512(round_to_bf16(pair.second),
                                       _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  _mm512_storeu_si512(address, _mm512_or_si512(even, odd));
}
template <>
inline void Vector::unpack_pair<BFloat16>(Pair pair, float* address) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  store(address, _mm512_permutex2var_ps(pair.first, low, pair.second));
  store(address + kLanes, _mm512_permutex2var_ps(pair.first, high, pair.second));
}

template <>
inline Vector::Pair Vector::load_pair<Float16>(const Float16* address) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(address);
  return {_mm512_cvtph_ps(_mm256_loadu_si256(halves)),
          _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
}
template <>
inline void Vector::store_pair<Float16>(Float16* address, Pair pair) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  __m256i* halves = reinterpret_cast<__m256i*>(address);
  _mm256_storeu_si256(halves, _mm512_cvtps_ph(pair.first, kNearest));
  _mm256_storeu_si256(halves + 1, _mm512_cvtps_ph(pair.second, kNearest));
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

}  // namespace flashmla::cpu::avx512
