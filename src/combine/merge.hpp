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
  float sum = 0.0f;  // of exp(lse_i - largest); 0: every part is empty

  float weight(float lse) const {
    return is_empty_part(lse) ? 0.0f : std::exp(lse - largest) / sum;
  }
  float merged_lse() const {
    if (sum == 0.0f) return std::numeric_limits<float>::infinity();
    if (sum == 1.0f) return largest;  // adding log(1) would turn -0 into 0
    return static_cast<float>(static_cast<double>(largest) + std::log(static_cast<double>(sum)));
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
    if (!is_empty_part(lse)) scale.sum += std::exp(lse - scale.largest);
  }
  return scale;
}

// Merges the num_parts rows out_of(i), each `columns` contiguous elements, into out, and returns
// the merged lse.
template <class In, class Out, class LseOf, class OutOf>
float merge_row(std::int64_t num_parts, const LseOf& lse_of, const OutOf& out_of,
                std::int32_t columns, Out* out) {
  const MergeScale scale = merge_scale(num_parts, lse_of);
  constexpr std::int32_t kChunk = 512;  // columns summed at once, on the stack
  float sums[kChunk];
  // Rounding must not carry the mean of the largest floats past them; 16-bit elements round such a
  // mean to their own largest number.
  constexpr bool kKeepsRange = std::is_same_v<Out, float>;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  [[maybe_unused]] float least[kChunk], largest[kChunk];
  for (std::int32_t begin = 0; begin < columns; begin += kChunk) {
    const std::int32_t count = columns - begin < kChunk ? columns - begin : kChunk;
    // -0 is the identity of addition: 0 would turn a lone part's -0 into 0.
    const float start = scale.sum == 0.0f ? 0.0f : -0.0f;
    for (std::int32_t c = 0; c < count; ++c) sums[c] = start;
    if constexpr (kKeepsRange) {
      std::fill_n(least, count, kInfinity);
      std::fill_n(largest, count, -kInfinity);
    }
    for (std::int64_t i = 0; i < num_parts; ++i) {
      const float lse = lse_of(i);
      if (is_empty_part(lse)) continue;
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
    if constexpr (kKeepsRange) {
      for (std::int32_t c = 0; c < count && scale.sum != 0.0f; ++c) {
        sums[c] = std::max(std::min(sums[c], largest[c]), least[c]);
      }
    }
    for (std::int32_t c = 0; c < count; ++c) out[begin + c] = from_float<Out>(sums[c]);
  }
  return scale.merged_lse();
}

}  // namespace flashmla::combine
