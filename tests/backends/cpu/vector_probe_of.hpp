// The probe of one vocabulary; included by the sources that have its flags.
#pragma once

#include "backends/cpu/common/exponential.hpp"
#include "backends/cpu/vector_probe.hpp"

namespace flashmla::testing {

template <class V, class Element>
constexpr ElementProbe<Element> element_probe() {
  using Pair = typename V::Pair;
  return {
      [](const Element* elements, float* natural) {
        V::template unpack_pair<Element>(V::template load_pair<Element>(elements), natural);
      },
      [](const float* floats, Element* elements, float* natural) {
        const Pair pair{V::load(floats), V::load(floats + V::kLanes)};
        V::template store_pair<Element>(elements, pair);
        V::template unpack_pair<Element>(pair, natural);
      },
  };
}

template <class V>
constexpr VectorProbe probe_of() {
  return {
      V::kLanes,
      V::kScoreRows * V::kScoreTokens,
      element_probe<V, BFloat16>(),
      element_probe<V, Float16>(),
      element_probe<V, float>(),
      [](const float* in, float* out) { V::store(out, cpu::exponential<V>(V::load(in))); },
      [](const float* in, float* out) { V::store(out, cpu::exponential<V, 24>(V::load(in))); },
      [](const float* a, const float* b, float* out) {
        V::store(out, V::maximum(V::load(a), V::load(b)));
      },
      [](const float* a, const float* b, float* out) {
        V::store(out, V::minimum(V::load(a), V::load(b)));
      },
      [](const float* in) { return V::reduce_add(V::load(in)); },
      [](const float* in) { return V::reduce_maximum(V::load(in)); },
      [](const float* in, float* sums) {
        typename V::Float registers[V::kScoreRows * V::kScoreTokens];
        for (auto& value : registers) {
          value = V::load(in);
          in += V::kLanes;
        }
        V::reduce_tile(registers, sums);
      },
  };
}

}  // namespace flashmla::testing
