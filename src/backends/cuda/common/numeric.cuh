// Conversions and the constants of the online softmax, which runs in base 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace flashmla::cuda {

inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kInfinity = __builtin_huge_valf();

// The reference of a query that has seen no token yet: below every score, and finite, so that
// differences with it are numbers.
inline constexpr float kNoReference = -1.0e30f;

// In the place of a score of a token that the query does not see: below every reference, so that
// its probability is 0, and finite, because infinite scores are those that float32 does not hold.
inline constexpr float kUnseen = -1.0e36f;

// How far above the largest score a new reference is put, base 2: values of bf16 reach as far as
// fp32, so that a sum of them must be one of small multiples. fp16 has no room for that, nor need.
template <class Element>
inline constexpr int kHeadroom = 0;
template <>
inline constexpr int kHeadroom<__nv_bfloat16> = 24;

// A thread's share of a row sum of one tile at which the reference has been outgrown. Up to here P
// and its sums are far from overflow (fp16: 65504); above, rounding of a dominating P that is not a
// power of two starts to show. Standard-normal scores stay below.
template <class Element>
inline constexpr float kOutgrownSum = 64.0f / (1 << kHeadroom<Element>);
// The same, of the largest exponent.
template <class Element>
inline constexpr float kOutgrown = 6.0f - kHeadroom<Element>;

__device__ __forceinline__ std::uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
__device__ __forceinline__ std::uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const std::uint32_t&>(pair);
}
// Two elements in one register, the first in the low half.
template <class Element>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  return pack(low, high, Element{});
}

template <class Element>
__device__ __forceinline__ float2 unpack(std::uint32_t pair) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
}

// pack() for results: a mean of finite numbers stays finite, though its probabilities are rounded.
template <class Element>
__device__ __forceinline__ std::uint32_t pack_finite(float low, float high) {
  std::uint32_t pair;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Exponential, logarithm and reciprocal as the hardware has them, within 2^-22: the exact ones are
// long, and where a result is written every instruction runs for the first time.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The sum of a query row; NaN where its scores are so large that float32 does not tell their
// differences well enough to weigh by them.
__device__ __forceinline__ float sum_to_trust(float reference, float sum) {
  constexpr float kMostReference = 1 << 17;
  return fabsf(reference) > kMostReference && sum > 0.0f ? NAN : sum;
}

// Natural logarithm of sum * 2^reference; +inf where no token was seen.
__device__ __forceinline__ float natural_lse(float reference, float sum) {
  return sum == 0.0f ? kInfinity : (reference + log2_approximate(sum)) * kLn2;
}

// What normalises an accumulator; 0 where no token was seen.
__device__ __forceinline__ float inverse_sum(float sum) {
  return sum == 0.0f ? 0.0f : reciprocal_approximate(sum);
}

// The power of two that brings the largest magnitude of a partial result into fp16's upper range:
// quotients below 2^15, and full precision down to 2^-29 of the largest. An infinity or NaN stays
// one in the quotient, and what is finite beside it stays finite.
__device__ __forceinline__ float partial_scale(float largest) {
  const std::uint32_t exponent = __float_as_uint(largest) >> 23;
  return __uint_as_float((max(exponent, 15u) - 14) << 23);
}
// 1 / scale, exactly.
__device__ __forceinline__ float inverse_partial_scale(float scale) {
  return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// Stores 16 bytes of 2-byte elements; `aligned` says that 16-byte stores are possible.
__device__ __forceinline__ void store_row_chunk(void* destination, uint4 value, bool aligned) {
  if (aligned) {
    *static_cast<uint4*>(destination) = value;
    return;
  }
  std::uint16_t* elements = static_cast<std::uint16_t*>(destination);
  const std::uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    elements[2 * i] = static_cast<std::uint16_t>(words[i]);
    elements[2 * i + 1] = static_cast<std::uint16_t>(words[i] >> 16);
  }
}

}  // namespace flashmla::cuda
