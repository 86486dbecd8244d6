// Where a query row of a key/value head lies in q, out and lse. A query row is a pair of query
// token and query head: row = t * heads_per_kv_head + (h % heads_per_kv_head).
#pragma once

#include <cstdint>

#include "problem/problem.hpp"

namespace flashmla::cpu {

struct QueryRow {
  std::int32_t token;  // t
  std::int32_t head;   // h, over all query heads
};

inline QueryRow query_row(const Problem& problem, std::int32_t kv_head, std::int32_t row) {
  const std::int32_t heads = problem.heads_per_kv_head();
  return {row / heads, kv_head * heads + row % heads};
}

// head_dim contiguous elements.
template <class Element>
const Element* q_of(const Problem& problem, std::int32_t batch_row, QueryRow query) {
  return static_cast<const Element*>(problem.q) + batch_row * problem.q_batch_stride +
         query.token * problem.q_token_stride + query.head * problem.q_head_stride;
}

// head_dim_v contiguous elements.
template <class Element>
Element* out_of(const Problem& problem, std::int32_t batch_row, QueryRow query) {
  return static_cast<Element*>(problem.out) + batch_row * problem.out_batch_stride +
         query.token * problem.out_token_stride + query.head * problem.out_head_stride;
}

inline float& lse_of(const Problem& problem, std::int32_t batch_row, QueryRow query) {
  return problem.lse[batch_row * problem.lse_batch_stride + query.head * problem.lse_head_stride +
                     query.token * problem.lse_token_stride];
}

// head_dim contiguous elements of cached token `token`, which must be below the row's length.
template <class Element>
const Element* cached_token(const Problem& problem, std::int32_t batch_row, std::int32_t kv_head,
                            std::int32_t token) {
  const std::int64_t page = problem.page(batch_row, token / problem.page_size);
  return static_cast<const Element*>(problem.k_cache) + page * problem.k_block_stride +
         token % problem.page_size * problem.k_token_stride + kv_head * problem.k_head_stride;
}

}  // namespace flashmla::cpu
