// What the kernels are launched with: a Problem in the form that a GPU wants.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmla::cuda {

// The part of a call that attention and combine share. Strides are in elements.
struct CallShape {
  std::int32_t batch;
  std::int32_t seq_len_q;
  std::int32_t num_heads_k;
  std::int32_t heads_per_kv_head;
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

  // Normalised results of shared rows: float (2 * num_parts, num_heads_k, query_rows, head_dim_v)
  // and (2 * num_parts, num_heads_k, query_rows). Part p leaves its share of the first row that it
  // walks at 2 * p and of the last one, if another, at 2 * p + 1.
  float* partial_out;
  float* partial_lse;
};

struct DecodeParams {
  // q as (64 elements, head, slice of 64 elements, token, batch row) and k_cache as (64 elements,
  // token in page, slice, key/value head, page). A box is 64 elements x box rows.
  CUtensorMap q_map;
  CUtensorMap k_map;
  std::int32_t q_box_rows;  // divides 64 and heads_per_kv_head
  std::int32_t k_box_rows;  // divides 64 and page_size

  CallShape shape;
  const void* q;
  std::int64_t q_batch_stride, q_token_stride, q_head_stride;
  const std::int32_t* block_table;
  std::int64_t block_table_batch_stride, block_table_page_stride;
  std::int32_t page_size;
  const std::int32_t* visible_lens;  // null: `causal` decides
  std::int64_t visible_lens_batch_stride, visible_lens_token_stride;
  bool causal;
  float scale_log2;  // softmax_scale * log2(e)
};

}  // namespace flashmla::cuda
