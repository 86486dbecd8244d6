// The merge of partial results, over the vocabulary of an instruction set.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cpu/kernel.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu {

// V: kLanes, Float, load, store, broadcast, fma, store_pair.
template <class V, class Element>
void merge_partials(const Problem& problem, const Partials& partials, void* out) {
  // Every head_dim_v is a multiple of 64.
  constexpr std::int32_t kRegisters = 4;
  constexpr std::int32_t kColumns = kRegisters * V::kLanes;
  Element* elements = static_cast<Element*>(out);
  // -0 is the identity of addition: 0 would turn a lone -0 into 0.
  const typename V::Float start = V::broadcast(partials.count == 0 ? 0.0f : -0.0f);
  for (std::int32_t column = 0; column < problem.head_dim_v; column += kColumns) {
    typename V::Float sums[kRegisters] = {start, start, start, start};
    for (std::int64_t i = 0; i < partials.count; ++i) {
      const float weight = partials.weights[i * partials.weight_stride];
      if (weight < 0.0f) continue;
      const typename V::Float weights = V::broadcast(weight);
      const float* part = partials.outs + i * partials.out_stride + column;
      for (std::int32_t r = 0; r < kRegisters; ++r) {
        sums[r] = V::fma(weights, V::load(part + r * V::kLanes), sums[r]);
      }
    }
    if constexpr (std::is_same_v<Element, BFloat16>) {
      // The vocabulary's pairs hold even and odd elements; in memory order the compiler's own
      // vectors do as well.
      alignas(64) float ordered[kColumns];
      for (std::int32_t r = 0; r < kRegisters; ++r) V::store(ordered + r * V::kLanes, sums[r]);
      for (std::int32_t c = 0; c < kColumns; ++c) {
        elements[column + c] = from_float<BFloat16>(ordered[c]);
      }
    } else {
      for (std::int32_t r = 0; r < kRegisters; r += 2) {
        V::template store_pair<Element>(elements + column + r * V::kLanes, {sums[r], sums[r + 1]});
      }
    }
  }
}

}  // namespace flashmla::cpu
