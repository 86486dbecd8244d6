// The log-sum-exp merge: attention over disjoint sets of tokens into attention over their union.
// All logarithms are natural.
//
//     lse = log(sum_i exp(lse_i)),    out = sum_i exp(lse_i - lse) * out_i
//
// A part whose lse is +inf or -inf is empty: it weighs nothing and its out is not read. When all
// are empty, out is 0 and lse +inf. A single part that is not empty passes through bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kv/scalar.hpp"

namespace flashmla::combine {

inline bool is_empty_part(float lse) {
  return std::isinf(lse);
}

// What the weights of a query's parts are relative to.
struct MergeScale {
  float largest = -std::numeric_limits<float>::infinity();  // of the lse of parts not empty
  // Of exp(lse_i - largest), in double: there may be thousands. 0: every part is empty.
  double sum = 0.0;

  float weight(float lse) const {
    if (is_empty_part(lse)) return 0.0f;
    return static_cast<float>(static_cast<double>(std::exp(lse - largest)) / sum);
  }
  float merged_lse() const {
    if (sum == 0.0) return std::numeric_limits<float>::infinity();
    if (sum == 1.0) return largest;  // adding log(1) would turn -0 into 0
    return static_cast<float>(static_cast<double>(largest) + std::log(sum));
  }
};

// lse_of(i) for i in [0, num_parts).
template <class LseOf>
MergeScale merge_scale(std::int64_t num_parts, const LseOf& lse_of) {
  MergeScale scale;
  for (std::int64_t i = 0; i < num_parts; ++i) {
    const float lse = lse_of(i);
    // Written so that a NaN is kept: what it came from must show in the result.
    if (!is_empty_part(lse) && !(lse <= scale.largest)) scale.largest = lse;
  }
  for (std::int64_t i = 0; i < num_parts; ++i) {
    const float lse = lse_of(i);
    if (!is_empty_part(lse)) scale.sum += static_cast<double>(std::exp(lse - scale.largest));
  }
  return scale;
}

// Parts that are summed up before they join the others: the sum of thousands would outgrow what is
// added to it.
inline constexpr std::int64_t kChainParts = 64;

// Merges the num_parts rows out_of(i), each `columns` contiguous elements, into out, and returns
// the merged lse.
template <class In, class Out, class LseOf, class OutOf>
float merge_row(std::int64_t num_parts, const LseOf& lse_of, const OutOf& out_of,
                std::int32_t columns, Out* out) {
  const MergeScale scale = merge_scale(num_parts, lse_of);
  constexpr std::int32_t kChunk = 512;  // columns summed at once, on the stack
  float sums[kChunk], chains[kChunk];
  // Rounding must not carry the mean of the largest floats past them; 16-bit elements round such a
  // mean to their own largest number.
  constexpr bool kKeepsRange = std::is_same_v<Out, float>;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  [[maybe_unused]] float least[kChunk], largest[kChunk];
  for (std::int32_t begin = 0; begin < columns; begin += kChunk) {
    const std::int32_t count = columns - begin < kChunk ? columns - begin : kChunk;
    // -0 is the identity of addition: 0 would turn a lone part's -0 into 0.
    std::fill_n(sums, count, scale.sum == 0.0 ? 0.0f : -0.0f);
    std::int64_t num_summed = 0;
    if constexpr (kKeepsRange) {
      std::fill_n(least, count, kInfinity);
      std::fill_n(largest, count, -kInfinity);
    }
    for (std::int64_t i = 0; i < num_parts; ++i) {
      const float lse = lse_of(i);
      if (is_empty_part(lse)) continue;
      if (num_summed > 0 && num_summed % kChainParts == 0) {
        if (num_summed == kChainParts) std::fill_n(chains, count, -0.0f);
        for (std::int32_t c = 0; c < count; ++c) chains[c] += sums[c];
        std::fill_n(sums, count, -0.0f);
      }
      ++num_summed;
      const float weight = scale.weight(lse);
      const In* part = out_of(i) + begin;
      for (std::int32_t c = 0; c < count; ++c) {
        const float value = to_float(part[c]);
        sums[c] += weight * value;
        if constexpr (kKeepsRange) {
          least[c] = std::min(least[c], value);
          largest[c] = std::max(largest[c], value);
        }
      }
    }
    if (num_summed > kChainParts) {
      for (std::int32_t c = 0; c < count; ++c) sums[c] += chains[c];
    }
    if constexpr (kKeepsRange) {
      for (std::int32_t c = 0; c < count && scale.sum != 0.0; ++c) {
        sums[c] = std::max(std::min(sums[c], largest[c]), least[c]);
      }
    }
    for (std::int32_t c = 0; c < count; ++c) out[begin + c] = from_float<Out>(sums[c]);
  }
  return scale.merged_lse();
}

}  // namespace flashmla::combine
