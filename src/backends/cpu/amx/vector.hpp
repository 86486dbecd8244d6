// AVX-512 pieces of the AMX kernel: exponential, rounding to bf16, transpose.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace flashmla::cpu::amx {
namespace {

// 2^x, to 3e-6 of its value; 0 below the smallest subnormal. NaN stays NaN.
[[gnu::always_inline]] inline __m512 exp2_f32x16(__m512 x) {
  // x = floor(x) + f. The polynomial is 2^f on [0, 1), of least relative error with value 1 at 0.
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0x1.b7f732p-7f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.abf868p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ee245p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62d6c6p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

// The exponent of a float, -127 for 0 and subnormal numbers, 128 for infinities and NaN.
inline std::int32_t exponent_of(float value) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xffu) - 127;
}

// 2^n, or the power of two nearest to it that is a normal number.
inline float exp2_of(std::int32_t n) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::clamp(n, -126, 127) + 127) << 23);
}

// 32 finite bf16 times 2^-n, given n in the exponent's place of each; what that makes subnormal is
// left as some number below the least normal one.
[[gnu::always_inline]] inline __m512i lower_bf16x32(__m512i x, __m512i exponents) {
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
  return _mm512_sub_epi16(x, _mm512_min_epu16(magnitude, exponents));
}

// 32 bf16 in memory order: low[0..15], high[0..15].
[[gnu::always_inline]] inline __m512i to_bf16x32(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Lane i: bf16 of even[i] in the low half, of odd[i] in the high half.
[[gnu::always_inline]] inline __m512i to_bf16_pairs(__m512 even, __m512 odd) {
  alignas(64) static constexpr std::uint16_t kInterleave[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), to_bf16x32(even, odd));
}

// Lane i: bf16 of x[i] in the low half, zero in the high half.
[[gnu::always_inline]] inline __m512i to_bf16_low(__m512 x) {
  return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// A 4 x 4 transpose of 32-bit elements inside each 128-bit lane: r[c] lane L element i becomes
// what r[i] lane L element c was.
[[gnu::always_inline]] inline void transpose_4x4_in_lanes(__m512i (&r)[4]) {
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
  r[0] = _mm512_unpacklo_epi64(a, b);
  r[1] = _mm512_unpackhi_epi64(a, b);
  r[2] = _mm512_unpacklo_epi64(c, d);
  r[3] = _mm512_unpackhi_epi64(c, d);
}

// A 4 x 4 transpose of 128-bit lanes: lane L of r[i] becomes what lane i of r[L] was.
[[gnu::always_inline]] inline void transpose_4x4_of_lanes(__m512i (&r)[4]) {
  const __m512i a = _mm512_shuffle_i32x4(r[0], r[1], 0x44);  // 0.0 0.1 1.0 1.1 (row.lane)
  const __m512i b = _mm512_shuffle_i32x4(r[2], r[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(r[0], r[1], 0xee);  // 0.2 0.3 1.2 1.3
  const __m512i d = _mm512_shuffle_i32x4(r[2], r[3], 0xee);
  r[0] = _mm512_shuffle_i32x4(a, b, 0x88);
  r[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
  r[2] = _mm512_shuffle_i32x4(c, d, 0x88);
  r[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

}  // namespace
}  // namespace flashmla::cpu::amx
