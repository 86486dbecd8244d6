// A query row in float64, for inputs so large that float32 does not hold a score: the slow way,
// which the kernels take where their own sums tell that they overflowed.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/walk.cuh"

namespace flashmla::cuda {

// Whether a sum of probabilities, or its inverse, is that of scores that overflowed, be it all of
// them to -infinity. Also that of no token at all, or of a NaN: decode_in_float64() tells.
__device__ __forceinline__ bool is_lost(float sum) {
  return !(sum > 0.0f && sum < kInfinity);
}

// sum += the products of two pairs of elements
template <class Element>
__device__ __forceinline__ void add_product(double& sum, std::uint32_t left, std::uint32_t right) {
  const float2 x = unpack<Element>(left), y = unpack<Element>(right);
  sum = fma(static_cast<double>(x.x), static_cast<double>(y.x), sum);
  sum = fma(static_cast<double>(x.y), static_cast<double>(y.y), sum);
}

// How many columns decode_in_float64() computes.
inline constexpr std::int32_t kFloat64Columns = 64;

// Columns from first_column on of a query row's result over all tokens that it sees, and with the
// first of them its lse; an lse that float32 does not hold becomes its largest number. NaN if a
// score is not finite, so that the inputs are not. A warp, of which each lane scores a token and
// then has two columns.
template <class Element>
__device__ __noinline__ void decode_in_float64(const CallInputs& inputs, const CallShape& shape,
                                               std::int32_t row, std::int32_t kv_head,
                                               QueryRow query, std::int32_t first_column) {
  const std::int32_t length = row_length(shape, row);
  const std::int32_t visible = visible_tokens(inputs, shape, row, query.token, length);
  const std::int32_t lane = threadIdx.x % 32;
  const Element* q = static_cast<const Element*>(inputs.q) + row * inputs.q_batch_stride +
                     query.token * inputs.q_token_stride + query.head * inputs.q_head_stride;
  // Null where the table names no page.
  const auto key_of = [&](std::int32_t token) -> const Element* {
    const std::int32_t in_row = inputs.page_size.quotient(token);
    const std::int32_t page = inputs.block_table[row * inputs.block_table_batch_stride +
                                                 in_row * inputs.block_table_page_stride];
    if (page < 0 || page >= inputs.num_blocks) return nullptr;
    return static_cast<const Element*>(inputs.k_cache) + page * inputs.k_block_stride +
           inputs.page_size.remainder(token) * inputs.k_token_stride +
           kv_head * inputs.k_head_stride;
  };
  double largest = -kInfinity, sum = 0.0, low = 0.0, high = 0.0;
#pragma unroll 1
  for (std::int32_t base = 0; base < visible; base += 32) {
    const Element* key = base + lane < visible ? key_of(base + lane) : nullptr;
    double score = 0.0;
    if (key != nullptr) {
#pragma unroll 2
      for (std::int32_t i = 0; i < inputs.head_dim; i += 8) {
        const uint4 ours = *reinterpret_cast<const uint4*>(q + i);
        const uint4 theirs = *reinterpret_cast<const uint4*>(key + i);
        add_product<Element>(score, ours.x, theirs.x);
        add_product<Element>(score, ours.y, theirs.y);
        add_product<Element>(score, ours.z, theirs.z);
        add_product<Element>(score, ours.w, theirs.w);
      }
    }
    score *= inputs.scale_log2;
    if (__any_sync(~0u, !isfinite(score))) {
      sum = low = high = NAN;
      break;
    }
    if (base + lane >= visible) score = -kInfinity;
    double reference = fmax(largest, score);
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      reference = fmax(reference, __shfl_xor_sync(~0u, reference, lanes));
    }
    const float scale = exp2_approximate(static_cast<float>(largest - reference));
    const float weight = exp2_approximate(static_cast<float>(score - reference));
    largest = reference;
    sum = sum * scale + weight;
    low *= scale;
    high *= scale;
#pragma unroll 1
    for (std::int32_t i = 0; i < min(visible - base, 32); ++i) {
      const auto value = reinterpret_cast<const Element*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(key), i));
      const double of_token = __shfl_sync(~0u, weight, i);
      if (value == nullptr) continue;
      const float2 pair =
          unpack<Element>(*reinterpret_cast<const std::uint32_t*>(value + first_column + 2 * lane));
      low = fma(of_token, static_cast<double>(pair.x), low);
      high = fma(of_token, static_cast<double>(pair.y), high);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  // 0 where no token is seen.
  const double scale = visible == 0 ? 0.0 : 1.0 / sum;
  const std::uint32_t pair =
      pack_finite<Element>(static_cast<float>(low * scale), static_cast<float>(high * scale));
  std::uint16_t* out = static_cast<std::uint16_t*>(shape.out) + out_offset(shape, row, query) +
                       first_column + 2 * lane;
  out[0] = static_cast<std::uint16_t>(pair);
  out[1] = static_cast<std::uint16_t>(pair >> 16);
  if (first_column == 0 && lane == 0) {
    const double lse = largest * 0.693147180559945309 + log(sum);
    // Written so that a NaN stays one.
    *lse_at(shape, row, query) = visible == 0     ? kInfinity
                                 : lse > FLT_MAX  ? FLT_MAX
                                 : lse < -FLT_MAX ? -FLT_MAX
                                                  : static_cast<float>(lse);
  }
}

// All of a query row anew if its lse tells that it is lost. A warp.
template <class Element>
__device__ __forceinline__ void redo_query_row(const CallInputs& inputs, const CallShape& shape,
                                               std::int32_t row, std::int32_t kv_head,
                                               QueryRow query) {
  if (isfinite(*lse_at(shape, row, query))) return;
#pragma unroll 1
  for (std::int32_t column = 0; column < inputs.head_dim_v; column += kFloat64Columns) {
    decode_in_float64<Element>(inputs, shape, row, kv_head, query, column);
  }
}

// Of the rows that a part walks whole, those query rows of [first, end) anew whose lse tells that
// they are lost. `warps` warps, of which this one is the `warp`th.
template <class Element>
__device__ void redo_lost_rows(const CallInputs& inputs, const CallShape& shape,
                               std::int32_t part_index, std::int32_t kv_head, std::int32_t first,
                               std::int32_t end, std::int32_t warp, std::int32_t warps) {
  const Part part = read_part(shape, part_index);
#pragma unroll 1
  for (std::int32_t row = part.begin_row; row <= part.end_row; ++row) {
    const Share share = share_of_row(part, row, row_length(shape, row));
    if (!share.is_whole()) continue;
#pragma unroll 1
    for (std::int32_t query_row = first + warp; query_row < end; query_row += warps) {
      const QueryRow query = query_row_at(shape, kv_head, query_row);
      redo_query_row<Element>(inputs, shape, row, kv_head, query);
    }
  }
}

}  // namespace flashmla::cuda
