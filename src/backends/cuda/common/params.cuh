// What the kernels are launched with: a Problem in the form that a GPU wants.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "schedule/divisor.hpp"

namespace flashmla::cuda {

using schedule::Divisor;

// Of a half of the columns of a partial result.
struct PartialStatistics {
  float lse;
  float scale;  // what its fp16 numbers are multiples of
};
inline constexpr int kPartialHalves = 2;

// Of a partial result of the kernel for few query rows, what one of its warps knows: of a quarter
// of the columns, those with column / 16 % 4 equal to the warp, and of a quarter of the tokens.
struct alignas(16) WarpStatistics {
  float reference;     // base 2, of all that follows
  float sum;           // of the warp's tokens
  float scale;         // what the fp16 numbers of the warp's columns are multiples of
  std::uint32_t mark;  // 0; kNotYet: not written yet
};
inline constexpr int kPartialWarps = 4;

// Bits with which a place waits for a result that is read while its kernel runs. Conversions to
// fp16 give no such NaN.
inline constexpr std::uint32_t kNotYet = 0xffffffffu;

// The part of a call that attention and combine share. Strides are in elements.
struct CallShape {
  std::int32_t batch;
  std::int32_t seq_len_q;
  std::int32_t num_heads_k;
  Divisor heads_per_kv_head;
  std::int32_t query_rows;  // seq_len_q * heads_per_kv_head, numbered as in Problem::query_rows()

  const std::int32_t* cache_seqlens;
  std::int64_t cache_seqlens_stride;
  std::int32_t max_length;  // tokens that a row of the block table can hold; lengths are clamped

  const std::int32_t* plan_rows;  // (num_parts, kPlanRowFields), fields contiguous
  std::int64_t plan_row_stride;
  std::int32_t num_parts;

  void* out;  // (batch, seq_len_q, num_heads_q, head_dim_v)
  std::int64_t out_batch_stride, out_token_stride, out_head_stride;
  bool out_is_aligned;  // every row of out starts at a multiple of 16 bytes
  float* lse;           // (batch, num_heads_q, seq_len_q)
  std::int64_t lse_batch_stride, lse_head_stride, lse_token_stride;

  // Normalised results of shared rows, fp16 multiples of a power of two that each half of the
  // columns has for itself: (2 * num_parts, num_heads_k, query_rows, head_dim_v). Part p leaves its
  // share of the first row that it walks at 2 * p and of the last one, if another, at 2 * p + 1.
  std::uint16_t* partial_out;
  PartialStatistics* partial_statistics;  // (2 * num_parts, num_heads_k, query_rows, halves)
  // In the place of these, if not null: (..., query_rows, warps), and partial_out not normalised.
  WarpStatistics* warp_statistics;
};

// Query rows that a warp of the wide kernel stores at once, and slices of each.
inline constexpr int kStoredRows = 16;
inline constexpr int kStoredSlices = 4;

// The slices of a tile that reach the wide kernel first.
inline constexpr int kFirstPieceOfTile = 4;

// What attention reads. Strides are in elements.
struct CallInputs {
  std::int32_t head_dim, head_dim_v;
  const void* q;
  std::int64_t q_batch_stride, q_token_stride, q_head_stride;
  const void* k_cache;
  std::int64_t k_block_stride, k_token_stride, k_head_stride;
  std::int32_t num_blocks;
  const std::int32_t* block_table;
  std::int64_t block_table_batch_stride, block_table_page_stride;
  Divisor page_size;
  const std::int32_t* visible_lens;  // null: `causal` decides
  std::int64_t visible_lens_batch_stride, visible_lens_token_stride;
  bool causal;
  float scale_log2;  // softmax_scale * log2(e)
};

struct DecodeParams : CallInputs {
  // q as (64 elements, head, slice of 64 elements, token, batch row) and k_cache as (64 elements,
  // token in page, slice, key/value head, page).
  CUtensorMap q_map;
  CUtensorMap k_map;
  // Boxes of 64 rows hold all slices, of k_map for the wide kernel the first kFirstPieceOfTile;
  // smaller ones hold one slice.
  std::int32_t q_box_rows_log2;  // box rows divide 64 and heads_per_kv_head
  std::int32_t k_box_rows_log2;  // box rows divide 64 and page_size

  CallShape shape;
  // The wide kernel's: the other slices of a tile; and where its results go, by boxes of
  // kStoredRows rows: out as q_map is of q, if out_has_map, and partial_out as (64 elements, query
  // row, slice, key/value head, slot).
  CUtensorMap k_rest_map;
  CUtensorMap out_map;
  CUtensorMap partial_map;
  bool out_has_map;
};

}  // namespace flashmla::cuda
