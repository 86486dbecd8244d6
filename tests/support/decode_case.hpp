// A decode call with all of its memory: poisoned, guarded, and fed with chosen values.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "flashmla/flashmla.h"
#include "support/array.hpp"

namespace flashmla::testing {

struct DecodeShape {
  DType dtype = DType::kBFloat16;
  std::vector<std::int32_t> lengths = {64};
  std::int64_t seq_len_q = 1;
  std::int64_t num_heads_q = 16;
  std::int64_t num_heads_k = 1;
  std::int64_t head_dim = 576;
  std::int64_t head_dim_v = 512;
  std::int64_t page_size = 64;
  bool causal = false;
  std::optional<double> softmax_scale;
  std::vector<std::int32_t> visible_lens;  // (batch, seq_len_q), row-major; empty: absent
  std::int64_t spare_pages = 2;            // columns of the table past the longest row's pages
  std::int64_t spare_blocks = 3;           // blocks that no row owns
  std::int32_t unused_table_entry = -1;
  std::int64_t max_pages = -1;  // columns of the table; -1: what the lengths need
  // Elements left free between neighbours, so that strides exceed what the shape needs.
  std::int64_t q_gap = 0, cache_gap = 0, table_gap = 0, out_gap = 0, lse_gap = 0;
  // The unused slots of a page, of unused blocks, and gaps between tokens.
  std::byte cache_fill = kPoison;
};

using QueryValue = std::function<double(std::int64_t row, std::int64_t t, std::int64_t head,
                                        std::int64_t channel)>;
using TokenValue = std::function<double(std::int64_t row, std::int64_t token, std::int64_t kv_head,
                                        std::int64_t channel)>;

// Fixed values, exact in bf16 and fp16. Numbers that tests expect are evaluations of these.
inline double fixed_q(std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) {
  return static_cast<double>((5 * i + 7 * t + 13 * h + 3 * c) % 127 - 63) / 64;
}
inline double fixed_k(std::int64_t i, std::int64_t t, std::int64_t g, std::int64_t c) {
  return static_cast<double>((37 * t + 5 * (t / 251) + 59 * i + 17 * g + 11 * c) % 251 - 125) / 128;
}
inline double zero_q(std::int64_t, std::int64_t, std::int64_t, std::int64_t) {
  return 0.0;
}
// Standard-normal values, a pure function of the seed and the place.
QueryValue random_values(std::uint64_t seed, double factor = 1.0);

class DecodeCase {
 public:
  explicit DecodeCase(DecodeShape shape, const QueryValue& query = fixed_q,
                      const TokenValue& token = fixed_k);

  // Points into this case. kernel is null.
  flashmla_decode_args args() const;

  // The library's plan in num_parts parts.
  void plan(std::int32_t num_parts);
  // A plan by hand: rows of (begin_row, begin_block, end_row, end_block); num_splits all zero,
  // which says nothing about the walk.
  void plan_by_hand(const std::vector<std::vector<std::int32_t>>& rows);

  struct Outcome {
    flashmla_status status;
    std::string message;
  };
  // Sizes a workspace that ends at a guard page and is filled with NaN, and decodes. executor null:
  // the library's threads.
  static Outcome decode(const flashmla_decode_args& args, const flashmla_executor* executor);
  // Refills outputs with kUnwritten and decodes. kernel empty: the library chooses.
  Outcome run(const std::string& kernel = {}, const flashmla_executor* executor = nullptr);

  std::int64_t batch() const { return static_cast<std::int64_t>(shape.lengths.size()); }
  std::int64_t visible_tokens(std::int64_t row, std::int64_t t) const;
  // Block and slot of a cached token.
  std::int64_t block_of(std::int64_t row, std::int64_t token) const;
  double token_value(std::int64_t row, std::int64_t token, std::int64_t kv_head,
                     std::int64_t channel) const;
  double scale() const;

  DecodeShape shape;
  Array q, k_cache, block_table, cache_seqlens;
  std::optional<Array> visible;
  Array plan_rows, num_splits;
  Array out, lse;
};

}  // namespace flashmla::testing
