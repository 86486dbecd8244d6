// What a caller asks for, unchecked. Everything behind problem/ sees a Problem instead.
#pragma once

#include <cstdint>
#include <string_view>

#include "flashmla/types.hpp"

namespace flashmla {

// One attention call. Shapes are those of the public documentation; optional tensors are left
// default-constructed.
struct DecodeRequest {
  Device device;
  TensorView q;                        // (batch, seq_len_q, num_heads_q, head_dim)
  TensorView k_cache;                  // (num_blocks, page_block_size, num_heads_k, head_dim)
  TensorView block_table;              // (batch, max_num_blocks_per_seq) int32
  TensorView cache_seqlens;            // (batch) int32
  TensorView visible_lens;             // optional (batch, seq_len_q) int32
  TensorView tile_scheduler_metadata;  // (num_sm_parts, 8) int32
  TensorView num_splits;               // (batch + 1) int32
  TensorView out;                      // (batch, seq_len_q, num_heads_q, head_dim_v)
  TensorView softmax_lse;              // (batch, num_heads_q, seq_len_q) float32
  std::int64_t head_dim_v = 0;
  bool has_softmax_scale = false;  // false: head_dim ** -0.5
  double softmax_scale = 0.0;
  bool causal = false;
  std::string_view kernel;  // empty: the selection decides; else the kernel of that name
};

// One planning call.
struct PlanRequest {
  Device device;
  TensorView cache_seqlens;  // (batch) int32
  std::int64_t num_heads_per_head_k = 0;
  std::int64_t num_heads_k = 0;
  TensorView tile_scheduler_metadata;  // (num_sm_parts, 8) int32, written
  TensorView num_splits;               // (batch + 1) int32, written
};

// One merge of partial results over disjoint sets of tokens.
struct MergeRequest {
  Device device;
  TensorView outs;  // (parts, batch, seq_len_q, num_heads_q, head_dim_v)
  TensorView lses;  // (parts, batch, num_heads_q, seq_len_q) float32
  TensorView out;   // (batch, seq_len_q, num_heads_q, head_dim_v), dtype of outs
  TensorView lse;   // (batch, num_heads_q, seq_len_q) float32
};

}  // namespace flashmla
