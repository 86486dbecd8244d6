// exp() over a vocabulary (see decode_loop.hpp).
#pragma once

namespace flashmla::cpu {

// exp(x) to about an ulp for x in [-87, 87]; 0 below -87.7.
template <class V>
typename V::Float exponential(typename V::Float x) {
  using Float = typename V::Float;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
  x = V::maximum(V::broadcast(-88.0f), x);  // keeps NaN; -88 is where n reaches -127
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
  return V::mul(p, V::power_of_two(rounded));
}

}  // namespace flashmla::cpu
