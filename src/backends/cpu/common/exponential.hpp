// exp() over a vocabulary (see decode_loop.hpp).
#pragma once

namespace flashmla::cpu {

// exp(x) * 2^-kShift to about an ulp while the result is at least 2^-126; 0 below about 2^-126.5.
// x at most 87.
template <class V, int kShift = 0>
typename V::Float exponential(typename V::Float x) {
  using Float = typename V::Float;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
  constexpr int kBias = 127 - kShift;
  // Where n reaches -kBias, whose power of two is 0. Keeps NaN.
  x = V::maximum(V::broadcast(static_cast<float>(-kBias) * 0.6931472f), x);
  const Float rounded = V::fma(x, V::broadcast(kLog2E), V::broadcast(kRound));
  const Float n = V::sub(rounded, V::broadcast(kRound));
  Float r = V::fma(n, V::broadcast(-kLn2High), x);
  r = V::fma(n, V::broadcast(-kLn2Low), r);
  // exp(r) on [-ln2/2, ln2/2]: Taylor terms to r^7, remainder below 2^-27.
  Float p = V::broadcast(1.0f / 5040.0f);
  p = V::fma(p, r, V::broadcast(1.0f / 720.0f));
  p = V::fma(p, r, V::broadcast(1.0f / 120.0f));
  p = V::fma(p, r, V::broadcast(1.0f / 24.0f));
  p = V::fma(p, r, V::broadcast(1.0f / 6.0f));
  p = V::fma(p, r, V::broadcast(0.5f));
  p = V::fma(p, r, V::broadcast(1.0f));
  p = V::fma(p, r, V::broadcast(1.0f));
  return V::mul(p, V::template power_of_two<kBias>(rounded));
}

}  // namespace flashmla::cpu
