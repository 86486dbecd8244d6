// The definition of right: attention of one query over a range of cached tokens, scalar and in
// double precision. Slow on purpose; every kernel answers to it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kv/dense.hpp"
#include "problem/problem.hpp"

namespace flashmla::reference {

// q is head_dim elements. token(j) gives the head_dim elements of cached token j, for j in
// [token_begin, token_end), all of which the query sees. Writes out[0 .. head_dim_v) and returns
// the natural log-sum-exp; with no token out is 0 and the result +inf. `sums` is head_dim_v
// doubles.
//
// Scores are computed twice, once for their maximum, so that no score needs to be kept.
template <class Element, class TokenOf>
double attend(const Problem& problem, const Element* q, std::int32_t token_begin,
              std::int32_t token_end, const TokenOf& token, double* sums) {
  for (std::int32_t c = 0; c < problem.head_dim_v; ++c) sums[c] = 0.0;
  if (token_begin >= token_end) return std::numeric_limits<double>::infinity();

  const auto score_of = [&](const Element* key) {
    double dot = 0.0;
    for (std::int32_t c = 0; c < problem.head_dim; ++c) {
      dot += static_cast<double>(to_float(q[c])) * kv::dense::load(key, c);
    }
    return dot * problem.softmax_scale;
  };
  double largest = -std::numeric_limits<double>::infinity();
  for (std::int32_t j = token_begin; j < token_end; ++j) {
    const double score = score_of(token(j));
    if (!(score <= largest)) largest = score;
  }
  double total = 0.0;
  for (std::int32_t j = token_begin; j < token_end; ++j) {
    const Element* key = token(j);
    const double weight = std::exp(score_of(key) - largest);
    total += weight;
    for (std::int32_t c = 0; c < problem.head_dim_v; ++c) {
      sums[c] += weight * kv::dense::load(key, c);
    }
  }
  for (std::int32_t c = 0; c < problem.head_dim_v; ++c) sums[c] /= total;
  return largest + std::log(total);
}

}  // namespace flashmla::reference
