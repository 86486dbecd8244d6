// Dense cache: a token is head_dim elements of q's dtype, contiguous; the value is its first
// head_dim_v elements. Nothing else is stored.
#pragma once

#include <cstdint>
#include <cstring>

#include "flashmla/types.hpp"
#include "kv/scalar.hpp"

namespace flashmla::kv::dense {

constexpr std::int64_t bytes_per_token(DType dtype, std::int32_t head_dim) {
  return element_size(dtype) * head_dim;
}

// Component `index` of the token that starts at `token`.
template <class Element>
float load(const Element* token, std::int32_t index) {
  return to_float(token[index]);
}

}  // namespace flashmla::kv::dense
