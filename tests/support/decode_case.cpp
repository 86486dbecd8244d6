#include "support/decode_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "support/calls.hpp"

namespace flashmla::testing {
namespace {

std::int64_t pages_of(std::int64_t length, std::int64_t page_size) {
  return (length + page_size - 1) / page_size;
}

std::int64_t table_columns(const DecodeShape& shape) {
  if (shape.max_pages >= 0) return shape.max_pages;
  std::int64_t most = 0;
  for (const std::int32_t length : shape.lengths) {
    most = std::max(most, pages_of(length, shape.page_size));
  }
  return most + shape.spare_pages;
}

// Blocks enough for a permutation that is never the identity: not a multiple of 7.
std::int64_t count_blocks(const DecodeShape& shape) {
  const auto batch = static_cast<std::int64_t>(shape.lengths.size());
  std::int64_t blocks = batch * table_columns(shape) + shape.spare_blocks;
  if (blocks % 7 == 0) ++blocks;
  return std::max<std::int64_t>(1, blocks);
}

// Row-major strides with `gap` elements between neighbours of the last dimension but one.
Sizes spaced_strides(const Sizes& sizes, std::int64_t gap) {
  Sizes strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * sizes[i] + (i + 1 == sizes.size() ? gap : 0);
  }
  return strides;
}

Array spaced(DType dtype, Sizes sizes, std::int64_t gap, std::byte fill) {
  const Sizes strides = spaced_strides(sizes, gap);
  return Array(dtype, std::move(sizes), strides, fill);
}

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

QueryValue random_values(std::uint64_t seed, double factor) {
  return [=](std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
    std::uint64_t state = seed;
    for (const std::int64_t index : {a, b, c, d}) {
      state = mix(state ^ static_cast<std::uint64_t>(index));
    }
    const double u = (static_cast<double>(state >> 32) + 0.5) * 0x1p-32;
    const double v = static_cast<double>(state & 0xffffffffu) * 0x1p-32;
    return factor * std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
  };
}

DecodeCase::DecodeCase(DecodeShape given, const QueryValue& query, const TokenValue& token)
    : shape(std::move(given)),
      q(spaced(shape.dtype, {batch(), shape.seq_len_q, shape.num_heads_q, shape.head_dim},
               shape.q_gap, kPoison)),
      k_cache(spaced(shape.dtype,
                     {count_blocks(shape), shape.page_size, shape.num_heads_k, shape.head_dim},
                     shape.cache_gap, shape.cache_fill)),
      block_table(spaced(DType::kInt32, {batch(), table_columns(shape)}, shape.table_gap, kPoison)),
      cache_seqlens(int32_array({batch()}, shape.lengths)),
      plan_rows(DType::kInt32, {0, 8}),
      num_splits(DType::kInt32, {batch() + 1}),
      out(spaced(shape.dtype, {batch(), shape.seq_len_q, shape.num_heads_q, shape.head_dim_v},
                 shape.out_gap, kUnwritten)),
      lse(spaced(DType::kFloat32, {batch(), shape.num_heads_q, shape.seq_len_q}, shape.lse_gap,
                 kUnwritten)) {
  if (!shape.visible_lens.empty()) {
    visible.emplace(int32_array({batch(), shape.seq_len_q}, shape.visible_lens));
  }
  for (std::int64_t i = 0; i < batch(); ++i) {
    for (std::int64_t t = 0; t < shape.seq_len_q; ++t) {
      for (std::int64_t h = 0; h < shape.num_heads_q; ++h) {
        for (std::int64_t c = 0; c < shape.head_dim; ++c) q.set(query(i, t, h, c), i, t, h, c);
      }
    }
    const std::int64_t columns = block_table.shape()[1];
    for (std::int64_t j = 0; j < columns; ++j) {
      const std::int64_t used = pages_of(shape.lengths[i], shape.page_size);
      const std::int64_t id = (7 * (i * columns + j) + 3) % k_cache.shape()[0];
      block_table.set(static_cast<double>(j < used ? id : shape.unused_table_entry), i, j);
    }
    for (std::int64_t j = 0; j < shape.lengths[i]; ++j) {
      for (std::int64_t g = 0; g < shape.num_heads_k; ++g) {
        for (std::int64_t c = 0; c < shape.head_dim; ++c) {
          k_cache.set(token(i, j, g, c), block_of(i, j), j % shape.page_size, g, c);
        }
      }
    }
  }
  plan(1);
}

std::int64_t DecodeCase::block_of(std::int64_t row, std::int64_t token) const {
  return static_cast<std::int64_t>(block_table.at(row, token / shape.page_size));
}

double DecodeCase::token_value(std::int64_t row, std::int64_t token, std::int64_t kv_head,
                               std::int64_t channel) const {
  return k_cache.at(block_of(row, token), token % shape.page_size, kv_head, channel);
}

double DecodeCase::scale() const {
  return shape.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
}

std::int64_t DecodeCase::visible_tokens(std::int64_t row, std::int64_t t) const {
  if (!shape.visible_lens.empty()) return shape.visible_lens[row * shape.seq_len_q + t];
  if (!shape.causal) return shape.lengths[row];
  return std::max<std::int64_t>(0, shape.lengths[row] - shape.seq_len_q + t + 1);
}

flashmla_decode_args DecodeCase::args() const {
  flashmla_decode_args args{};
  args.struct_size = sizeof(args);
  args.q = q.tensor();
  args.k_cache = k_cache.tensor();
  args.block_table = block_table.tensor();
  args.cache_seqlens = cache_seqlens.tensor();
  if (visible) args.visible_lens = visible->tensor();
  args.tile_scheduler_metadata = plan_rows.tensor();
  args.num_splits = num_splits.tensor();
  args.out = out.tensor();
  args.softmax_lse = lse.tensor();
  args.head_dim_v = shape.head_dim_v;
  args.has_softmax_scale = shape.softmax_scale.has_value();
  args.softmax_scale = shape.softmax_scale.value_or(0.0);
  args.causal = shape.causal;
  return args;
}

void DecodeCase::plan(std::int32_t num_parts) {
  plan_rows = Array(DType::kInt32, {num_parts, 8});
  const flashmla_plan_args args =
      plan_args(cache_seqlens, plan_rows, num_splits,
                shape.seq_len_q * shape.num_heads_q / shape.num_heads_k, shape.num_heads_k);
  if (flashmla_plan(&args) != FLASHMLA_OK) std::abort();
}

void DecodeCase::plan_by_hand(const std::vector<std::vector<std::int32_t>>& rows) {
  plan_rows = Array(DType::kInt32, {static_cast<std::int64_t>(rows.size()), 8}, std::byte{0});
  for (std::size_t part = 0; part < rows.size(); ++part) {
    for (std::size_t field = 0; field < rows[part].size(); ++field) {
      plan_rows.set(rows[part][field], part, field);
    }
  }
  num_splits.refill(std::byte{0});
}

DecodeCase::Outcome DecodeCase::decode(const flashmla_decode_args& args,
                                       const flashmla_executor* executor) {
  std::size_t bytes = 0;
  flashmla_status status = flashmla_decode_workspace_size(
      &args, executor != nullptr ? executor->num_threads : 0, &bytes);
  if (status != FLASHMLA_OK) return {status, flashmla_last_error()};
  // A whole number of 64 bytes, so that it both ends at the guard and is aligned.
  const GuardedMemory workspace((bytes + 63) / 64 * 64);
  std::memset(workspace.data(), 0xff, workspace.size());
  status = flashmla_decode(&args, workspace.data(), bytes, executor);
  return {status, flashmla_last_error()};
}

DecodeCase::Outcome DecodeCase::run(const std::string& kernel, const flashmla_executor* executor) {
  out.refill(kUnwritten);
  lse.refill(kUnwritten);
  flashmla_decode_args call = args();
  if (!kernel.empty()) call.kernel = kernel.c_str();
  return decode(call, executor);
}

}  // namespace flashmla::testing
