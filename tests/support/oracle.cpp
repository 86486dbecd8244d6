#include "support/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashmla::testing {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Expected evaluate(const DecodeCase& call) {
  const DecodeShape& shape = call.shape;
  const std::int64_t heads = shape.num_heads_q / shape.num_heads_k;
  Expected expected;
  expected.out.assign(call.batch() * shape.seq_len_q * shape.num_heads_q * shape.head_dim_v, 0.0);
  expected.lse.assign(call.batch() * shape.num_heads_q * shape.seq_len_q, kInfinity);
  std::vector<double> tokens, weights, query(shape.head_dim);
  for (std::int64_t i = 0; i < call.batch(); ++i) {
    for (std::int64_t g = 0; g < shape.num_heads_k; ++g) {
      const std::int64_t seen = call.visible_tokens(i, shape.seq_len_q - 1);
      tokens.assign(seen * shape.head_dim, 0.0);
      for (std::int64_t j = 0; j < seen; ++j) {
        for (std::int64_t c = 0; c < shape.head_dim; ++c) {
          tokens[j * shape.head_dim + c] = call.token_value(i, j, g, c);
        }
      }
      for (std::int64_t t = 0; t < shape.seq_len_q; ++t) {
        const std::int64_t visible = call.visible_tokens(i, t);
        if (visible == 0) continue;
        for (std::int64_t h = g * heads; h < (g + 1) * heads; ++h) {
          for (std::int64_t c = 0; c < shape.head_dim; ++c) query[c] = call.q.at(i, t, h, c);
          weights.assign(visible, 0.0);
          double largest = -kInfinity;
          for (std::int64_t j = 0; j < visible; ++j) {
            const double* key = &tokens[j * shape.head_dim];
            double dot = 0.0;
            for (std::int64_t c = 0; c < shape.head_dim; ++c) dot += query[c] * key[c];
            weights[j] = call.scale() * dot;
            largest = std::isnan(weights[j]) ? weights[j] : std::max(largest, weights[j]);
          }
          double sum = 0.0;
          for (double& weight : weights) sum += weight = std::exp(weight - largest);
          double* out =
              &expected.out[((i * shape.seq_len_q + t) * shape.num_heads_q + h) * shape.head_dim_v];
          for (std::int64_t j = 0; j < visible; ++j) {
            for (std::int64_t c = 0; c < shape.head_dim_v; ++c) {
              out[c] += weights[j] / sum * tokens[j * shape.head_dim + c];
            }
          }
          expected.lse[(i * shape.num_heads_q + h) * shape.seq_len_q + t] = largest + std::log(sum);
        }
      }
    }
  }
  return expected;
}

Expected evaluate_merge(const Array& outs, const Array& lses) {
  const std::int64_t parts = outs.shape()[0], batch = outs.shape()[1], tokens = outs.shape()[2],
                     heads = outs.shape()[3], columns = outs.shape()[4];
  Expected expected;
  expected.out.assign(batch * tokens * heads * columns, 0.0);
  expected.lse.assign(batch * heads * tokens, kInfinity);
  for (std::int64_t i = 0; i < batch; ++i) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        // Shifted by the largest, since exp of an lse near 1e4 has no double.
        double largest = -kInfinity;
        for (std::int64_t p = 0; p < parts; ++p) {
          const double lse = lses.at(p, i, h, t);
          if (!std::isinf(lse)) largest = std::max(largest, lse);
        }
        if (largest == -kInfinity) continue;
        double sum = 0.0;
        for (std::int64_t p = 0; p < parts; ++p) {
          const double lse = lses.at(p, i, h, t);
          if (!std::isinf(lse)) sum += std::exp(lse - largest);
        }
        for (std::int64_t p = 0; p < parts; ++p) {
          const double lse = lses.at(p, i, h, t);
          if (std::isinf(lse)) continue;
          for (std::int64_t c = 0; c < columns; ++c) {
            expected.out[((i * tokens + t) * heads + h) * columns + c] +=
                std::exp(lse - largest) / sum * outs.at(p, i, t, h, c);
          }
        }
        expected.lse[(i * heads + h) * tokens + t] = largest + std::log(sum);
      }
    }
  }
  return expected;
}

}  // namespace flashmla::testing
