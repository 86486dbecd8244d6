// The merge of partial results, over the vocabulary of an instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "backends/cpu/kernel.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu {

// V: kLanes, Float, load, store, broadcast, add, fma, minimum, maximum, store_pair. A row tile is
// one row, in order.
template <class V, class Element>
void merge_partials(const Problem& problem, const Partials& partials, void* const* outs) {
  // Every head_dim_v is a multiple of 64.
  constexpr std::int32_t kRegisters = 4;
  constexpr std::int32_t kColumns = kRegisters * V::kLanes;
  // Parts that are summed up before they join the others: the sum of thousands would outgrow what
  // is added to it.
  constexpr std::int64_t kChainParts = 64;
  // Rounding must not carry the mean of the largest floats past them; 16-bit elements round such a
  // mean to their own largest number.
  constexpr bool kKeepsRange = std::is_same_v<Element, float>;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Element* elements = static_cast<Element*>(outs[0]);
  // -0 is the identity of addition: 0 would turn a lone -0 into 0.
  const typename V::Float start = V::broadcast(-0.0f);
  for (std::int32_t column = 0; column < problem.head_dim_v; column += kColumns) {
    typename V::Float sums[kRegisters] = {start, start, start, start};
    typename V::Float chain[kRegisters] = {start, start, start, start};
    std::int64_t in_chain = 0;
    [[maybe_unused]] typename V::Float least[kRegisters], largest[kRegisters];
    if constexpr (kKeepsRange) {
      std::fill_n(least, kRegisters, V::broadcast(kInfinity));
      std::fill_n(largest, kRegisters, V::broadcast(-kInfinity));
    }
    for (std::int64_t i = 0; i < partials.count; ++i) {
      const float weight = partials.weights[i * partials.weight_stride];
      if (weight < 0.0f) continue;
      const typename V::Float weights = V::broadcast(weight);
      const float* part = partials.outs + i * partials.out_stride + column;
      if (in_chain++ == kChainParts) {
        for (std::int32_t r = 0; r < kRegisters; ++r) {
          sums[r] = V::add(sums[r], chain[r]);
          chain[r] = start;
        }
        in_chain = 1;
      }
      for (std::int32_t r = 0; r < kRegisters; ++r) {
        const typename V::Float value = V::load(part + r * V::kLanes);
        chain[r] = V::fma(weights, value, chain[r]);
        if constexpr (kKeepsRange) {
          least[r] = V::minimum(value, least[r]);
          largest[r] = V::maximum(value, largest[r]);
        }
      }
    }
    for (std::int32_t r = 0; r < kRegisters; ++r) sums[r] = V::add(sums[r], chain[r]);
    if constexpr (kKeepsRange) {
      for (std::int32_t r = 0; r < kRegisters; ++r) {
        sums[r] = V::maximum(least[r], V::minimum(largest[r], sums[r]));
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
