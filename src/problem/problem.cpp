#include "problem/problem.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <string>

#include "problem/check.hpp"
#include "problem/contents.hpp"

// Returns the first error of a list of checks from the calling function.
#define FLASHMLA_RETURN_IF_ERROR(expression)                       \
  do {                                                             \
    if (Status status = (expression); !status.ok()) return status; \
  } while (false)

namespace flashmla {
namespace {

using problem::Argument;
using problem::check_apart;
using problem::check_contiguous;
using problem::check_dtype;
using problem::check_int32;
using problem::check_last_stride;
using problem::check_no_overlap;
using problem::check_same_dtype;
using problem::check_shape;
using problem::check_tensor;

constexpr std::array<HeadDims, 8> kHeadDims = {
    {{576, 512}, {512, 512}, {320, 256}, {288, 256}, {192, 128}, {128, 128}, {96, 64}, {64, 64}}};

Status check_head_dims(std::int64_t head_dim, std::int64_t head_dim_v) {
  for (const HeadDims& dims : kHeadDims) {
    if (dims.head_dim == head_dim && dims.head_dim_v == head_dim_v) return {};
  }
  std::string text = "(head_dim, head_dim_v) is (" + std::to_string(head_dim) + ", " +
                     std::to_string(head_dim_v) + "); it must be one of";
  const char* separator = " ";
  for (const HeadDims& dims : kHeadDims) {
    text += separator;
    text += "(" + std::to_string(dims.head_dim) + ", " + std::to_string(dims.head_dim_v) + ")";
    separator = ", ";
  }
  return Status::invalid_argument(text);
}

Status check_floating(const Argument& argument, const Device& device) {
  if (device.type == DeviceType::kCpu) {
    return check_dtype(argument, {DType::kBFloat16, DType::kFloat16, DType::kFloat32});
  }
  return check_dtype(argument, {DType::kBFloat16, DType::kFloat16});
}

// All but the contents of the tensors.
Status check(const DecodeRequest& request) {
  const Argument q{"q", request.q};
  const Argument k_cache{"k_cache", request.k_cache};
  const Argument block_table{"block_table", request.block_table};
  const Argument cache_seqlens{"cache_seqlens", request.cache_seqlens};
  const Argument visible_lens{"visible_lens", request.visible_lens};
  const Argument plan_rows{"tile_scheduler_metadata", request.tile_scheduler_metadata};
  const Argument num_splits{"num_splits", request.num_splits};
  const Argument out{"out", request.out};
  const Argument lse{"softmax_lse", request.softmax_lse};

  FLASHMLA_RETURN_IF_ERROR(check_device(request.device));
  FLASHMLA_RETURN_IF_ERROR(check_floating(q, request.device));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(q, 4, "(batch, seq_len_q, num_heads_q, head_dim)"));
  FLASHMLA_RETURN_IF_ERROR(check_same_dtype(k_cache, q));
  FLASHMLA_RETURN_IF_ERROR(
      check_tensor(k_cache, 4, "(num_blocks, page_block_size, num_heads_k, head_dim)"));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(block_table, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(block_table, 2, "(batch, max_num_blocks_per_seq)"));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(cache_seqlens, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(cache_seqlens, 1, "(batch)"));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(plan_rows, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(plan_rows, 2, "(num_sm_parts, 8)"));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(num_splits, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(num_splits, 1, "(batch + 1)"));

  const std::int64_t batch = request.q.shape[0];
  const std::int64_t seq_len_q = request.q.shape[1];
  const std::int64_t num_heads_q = request.q.shape[2];
  const std::int64_t head_dim = request.q.shape[3];
  const std::int64_t num_blocks = request.k_cache.shape[0];
  const std::int64_t page_size = request.k_cache.shape[1];
  const std::int64_t num_heads_k = request.k_cache.shape[2];
  const std::int64_t max_pages = request.block_table.shape[1];
  const std::int64_t num_parts = request.tile_scheduler_metadata.shape[0];

  FLASHMLA_RETURN_IF_ERROR(check_int32("batch (q.shape[0])", batch, 0));
  FLASHMLA_RETURN_IF_ERROR(check_int32("seq_len_q (q.shape[1])", seq_len_q, 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_heads_q (q.shape[2])", num_heads_q, 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("page_block_size (k_cache.shape[1])", page_size, 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_heads_k (k_cache.shape[2])", num_heads_k, 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_blocks (k_cache.shape[0])", num_blocks, 0));
  FLASHMLA_RETURN_IF_ERROR(
      check_int32("max_num_blocks_per_seq (block_table.shape[1])", max_pages, 0));
  FLASHMLA_RETURN_IF_ERROR(
      check_int32("num_sm_parts (tile_scheduler_metadata.shape[0])", num_parts, batch > 0 ? 1 : 0));
  FLASHMLA_RETURN_IF_ERROR(check_head_dims(head_dim, request.head_dim_v));
  FLASHMLA_RETURN_IF_ERROR(
      check_shape(k_cache, {-1, -1, -1, head_dim},
                  "(num_blocks, page_block_size, num_heads_k, head_dim of q)"));
  if (num_heads_q % num_heads_k != 0) {
    return Status::invalid_argument("q has " + std::to_string(num_heads_q) +
                                    " heads; they must be a multiple of the " +
                                    std::to_string(num_heads_k) + " heads of k_cache");
  }
  FLASHMLA_RETURN_IF_ERROR(check_int32("seq_len_q * num_heads_q / num_heads_k",
                                       seq_len_q * (num_heads_q / num_heads_k), 1));
  FLASHMLA_RETURN_IF_ERROR(
      check_shape(block_table, {batch, -1}, "(batch of q, max_num_blocks_per_seq)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(cache_seqlens, {batch}, "(batch of q)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(plan_rows, {-1, kPlanRowFields}, "(num_sm_parts, 8)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(num_splits, {batch + 1}, "(batch of q + 1)"));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(q));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(k_cache));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(plan_rows));

  if (request.visible_lens.given()) {
    FLASHMLA_RETURN_IF_ERROR(check_dtype(visible_lens, {DType::kInt32}));
    FLASHMLA_RETURN_IF_ERROR(check_tensor(visible_lens, 2, "(batch, seq_len_q)"));
    FLASHMLA_RETURN_IF_ERROR(
        check_shape(visible_lens, {batch, seq_len_q}, "(batch of q, seq_len_q of q)"));
    if (request.causal) {
      return Status::invalid_argument(
          "causal is True and visible_lens is given; visible_lens takes the place of causal, so "
          "give one of the two");
    }
  }

  FLASHMLA_RETURN_IF_ERROR(check_same_dtype(out, q));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(out, 4, "(batch, seq_len_q, num_heads_q, head_dim_v)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(out, {batch, seq_len_q, num_heads_q, request.head_dim_v},
                                       "(batch, seq_len_q, num_heads_q, head_dim_v)"));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(out));
  FLASHMLA_RETURN_IF_ERROR(check_no_overlap(out));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(lse, 3, "(batch, num_heads_q, seq_len_q)"));
  FLASHMLA_RETURN_IF_ERROR(
      check_shape(lse, {batch, num_heads_q, seq_len_q}, "(batch, num_heads_q, seq_len_q)"));
  FLASHMLA_RETURN_IF_ERROR(check_no_overlap(lse));
  FLASHMLA_RETURN_IF_ERROR(check_apart(
      {out, lse}, {q, k_cache, block_table, cache_seqlens, visible_lens, plan_rows, num_splits}));
  if (request.has_softmax_scale && !std::isfinite(static_cast<float>(request.softmax_scale))) {
    std::array<char, 32> text;
    char* const end =
        std::to_chars(text.data(), text.data() + text.size(), request.softmax_scale).ptr;
    return Status::invalid_argument("softmax_scale is " + std::string(text.data(), end) +
                                    "; it must be a finite float32");
  }
  return {};
}

// Of a request that passed check().
Problem problem_of(const DecodeRequest& request) {
  Problem problem;
  problem.device = request.device;
  problem.dtype = request.q.dtype;
  problem.kv_format = KvFormat::kDense;
  problem.batch = static_cast<std::int32_t>(request.q.shape[0]);
  problem.seq_len_q = static_cast<std::int32_t>(request.q.shape[1]);
  problem.num_heads_q = static_cast<std::int32_t>(request.q.shape[2]);
  problem.num_heads_k = static_cast<std::int32_t>(request.k_cache.shape[2]);
  problem.head_dim = static_cast<std::int32_t>(request.q.shape[3]);
  problem.head_dim_v = static_cast<std::int32_t>(request.head_dim_v);
  problem.num_blocks = request.k_cache.shape[0];
  problem.page_size = static_cast<std::int32_t>(request.k_cache.shape[1]);
  problem.max_pages_per_row = static_cast<std::int32_t>(request.block_table.shape[1]);
  problem.softmax_scale = request.has_softmax_scale
                              ? request.softmax_scale
                              : 1.0 / std::sqrt(static_cast<double>(problem.head_dim));
  problem.causal = request.causal;
  problem.q = request.q.data;
  problem.q_batch_stride = request.q.strides[0];
  problem.q_token_stride = request.q.strides[1];
  problem.q_head_stride = request.q.strides[2];
  problem.k_cache = request.k_cache.data;
  problem.k_block_stride = request.k_cache.strides[0];
  problem.k_token_stride = request.k_cache.strides[1];
  problem.k_head_stride = request.k_cache.strides[2];
  problem.block_table = static_cast<const std::int32_t*>(request.block_table.data);
  problem.block_table_batch_stride = request.block_table.strides[0];
  problem.block_table_page_stride = request.block_table.strides[1];
  problem.cache_seqlens = static_cast<const std::int32_t*>(request.cache_seqlens.data);
  problem.cache_seqlens_stride = request.cache_seqlens.strides[0];
  if (request.visible_lens.given()) {
    problem.visible_lens = static_cast<const std::int32_t*>(request.visible_lens.data);
    problem.visible_lens_batch_stride = request.visible_lens.strides[0];
    problem.visible_lens_token_stride = request.visible_lens.strides[1];
  }
  problem.plan_rows = static_cast<const std::int32_t*>(request.tile_scheduler_metadata.data);
  problem.plan_row_stride = request.tile_scheduler_metadata.strides[0];
  problem.num_parts = static_cast<std::int32_t>(request.tile_scheduler_metadata.shape[0]);
  problem.out = request.out.data;
  problem.out_batch_stride = request.out.strides[0];
  problem.out_token_stride = request.out.strides[1];
  problem.out_head_stride = request.out.strides[2];
  problem.lse = static_cast<float*>(request.softmax_lse.data);
  problem.lse_batch_stride = request.softmax_lse.strides[0];
  problem.lse_head_stride = request.softmax_lse.strides[1];
  problem.lse_token_stride = request.softmax_lse.strides[2];
  return problem;
}

}  // namespace

std::span<const HeadDims> supported_head_dims() {
  return kHeadDims;
}

Status check_device(const Device& device) {
  if (device.type == DeviceType::kCpu || device.type == DeviceType::kCuda) {
    if (device.index >= 0) return {};
    return Status::invalid_argument("device index is " + std::to_string(device.index) +
                                    "; it must not be negative");
  }
  return Status::invalid_argument("device type is " +
                                  std::to_string(static_cast<std::int32_t>(device.type)) +
                                  "; it must be 0 (CPU) or 1 (CUDA)");
}

Result<Problem> validate_shapes(const DecodeRequest& request) {
  FLASHMLA_RETURN_IF_ERROR(check(request));
  return problem_of(request);
}

Result<Problem> validate(const DecodeRequest& request) {
  FLASHMLA_RETURN_IF_ERROR(check(request));
  const Problem problem = problem_of(request);
  if (request.device.type == DeviceType::kCpu) FLASHMLA_RETURN_IF_ERROR(check_contents(problem));
  return problem;
}

Status check_workspace(const DecodeRequest& request, void* memory, std::size_t bytes) {
  TensorView workspace;
  workspace.data = memory;
  workspace.dtype = DType::kInt32;
  workspace.rank = 1;
  workspace.shape[0] = static_cast<std::int64_t>(bytes / sizeof(std::int32_t));
  workspace.strides[0] = 1;
  return check_apart({{"workspace", workspace}},
                     {{"q", request.q},
                      {"k_cache", request.k_cache},
                      {"block_table", request.block_table},
                      {"cache_seqlens", request.cache_seqlens},
                      {"visible_lens", request.visible_lens},
                      {"tile_scheduler_metadata", request.tile_scheduler_metadata},
                      {"num_splits", request.num_splits},
                      {"out", request.out},
                      {"softmax_lse", request.softmax_lse}});
}

Result<PlanProblem> validate_shapes(const PlanRequest& request) {
  const Argument cache_seqlens{"cache_seqlens", request.cache_seqlens};
  const Argument plan_rows{"tile_scheduler_metadata", request.tile_scheduler_metadata};
  const Argument num_splits{"num_splits", request.num_splits};
  FLASHMLA_RETURN_IF_ERROR(check_device(request.device));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(cache_seqlens, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(cache_seqlens, 1, "(batch)"));
  const std::int64_t batch = request.cache_seqlens.shape[0];
  FLASHMLA_RETURN_IF_ERROR(check_int32("batch (cache_seqlens.shape[0])", batch, 0));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_heads_per_head_k", request.num_heads_per_head_k, 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_heads_k", request.num_heads_k, 1));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(plan_rows, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(plan_rows, 2, "(num_sm_parts, 8)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(plan_rows, {-1, kPlanRowFields}, "(num_sm_parts, 8)"));
  FLASHMLA_RETURN_IF_ERROR(check_contiguous(plan_rows));
  const std::int64_t num_parts = request.tile_scheduler_metadata.shape[0];
  FLASHMLA_RETURN_IF_ERROR(
      check_int32("num_sm_parts (tile_scheduler_metadata.shape[0])", num_parts, 1));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(num_splits, {DType::kInt32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(num_splits, 1, "(batch + 1)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(num_splits, {batch + 1}, "(batch + 1)"));
  FLASHMLA_RETURN_IF_ERROR(check_contiguous(num_splits));
  FLASHMLA_RETURN_IF_ERROR(check_apart({plan_rows, num_splits}, {cache_seqlens}));

  PlanProblem problem;
  problem.device = request.device;
  problem.batch = static_cast<std::int32_t>(batch);
  problem.cache_seqlens = static_cast<const std::int32_t*>(request.cache_seqlens.data);
  problem.cache_seqlens_stride = request.cache_seqlens.strides[0];
  problem.num_heads_per_head_k = request.num_heads_per_head_k;
  problem.plan_rows = static_cast<std::int32_t*>(request.tile_scheduler_metadata.data);
  problem.num_parts = static_cast<std::int32_t>(num_parts);
  problem.num_splits = static_cast<std::int32_t*>(request.num_splits.data);
  return problem;
}

Result<PlanProblem> validate(const PlanRequest& request) {
  const Result<PlanProblem> problem = validate_shapes(request);
  if (problem.ok() && request.device.type == DeviceType::kCpu) {
    FLASHMLA_RETURN_IF_ERROR(check_contents(problem.value()));
  }
  return problem;
}

Result<MergeProblem> validate(const MergeRequest& request) {
  const Argument outs{"outs", request.outs};
  const Argument lses{"lses", request.lses};
  const Argument out{"out", request.out};
  const Argument lse{"lse", request.lse};
  FLASHMLA_RETURN_IF_ERROR(check_device(request.device));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(outs, {DType::kBFloat16, DType::kFloat16, DType::kFloat32}));
  FLASHMLA_RETURN_IF_ERROR(
      check_tensor(outs, 5, "(parts, batch, seq_len_q, num_heads_q, head_dim_v)"));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(lses, {DType::kFloat32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(lses, 4, "(parts, batch, num_heads_q, seq_len_q)"));
  const std::int64_t* shape = request.outs.shape;
  FLASHMLA_RETURN_IF_ERROR(check_int32("parts (outs.shape[0])", shape[0], 1));
  FLASHMLA_RETURN_IF_ERROR(check_int32("batch (outs.shape[1])", shape[1], 0));
  FLASHMLA_RETURN_IF_ERROR(check_int32("seq_len_q (outs.shape[2])", shape[2], 0));
  FLASHMLA_RETURN_IF_ERROR(check_int32("num_heads_q (outs.shape[3])", shape[3], 0));
  FLASHMLA_RETURN_IF_ERROR(check_int32("head_dim_v (outs.shape[4])", shape[4], 1));
  FLASHMLA_RETURN_IF_ERROR(check_shape(lses, {shape[0], shape[1], shape[3], shape[2]},
                                       "(parts, batch, num_heads_q, seq_len_q of outs)"));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(outs));
  FLASHMLA_RETURN_IF_ERROR(check_same_dtype(out, outs));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(out, 4, "(batch, seq_len_q, num_heads_q, head_dim_v)"));
  FLASHMLA_RETURN_IF_ERROR(check_shape(out, {shape[1], shape[2], shape[3], shape[4]},
                                       "(batch, seq_len_q, num_heads_q, head_dim_v of outs)"));
  FLASHMLA_RETURN_IF_ERROR(check_last_stride(out));
  FLASHMLA_RETURN_IF_ERROR(check_no_overlap(out));
  FLASHMLA_RETURN_IF_ERROR(check_dtype(lse, {DType::kFloat32}));
  FLASHMLA_RETURN_IF_ERROR(check_tensor(lse, 3, "(batch, num_heads_q, seq_len_q)"));
  FLASHMLA_RETURN_IF_ERROR(
      check_shape(lse, {shape[1], shape[3], shape[2]}, "(batch, num_heads_q, seq_len_q of outs)"));
  FLASHMLA_RETURN_IF_ERROR(check_no_overlap(lse));
  FLASHMLA_RETURN_IF_ERROR(check_apart({out, lse}, {outs, lses}));

  MergeProblem problem;
  problem.device = request.device;
  problem.dtype = request.outs.dtype;
  problem.num_parts = static_cast<std::int32_t>(shape[0]);
  problem.batch = static_cast<std::int32_t>(shape[1]);
  problem.seq_len_q = static_cast<std::int32_t>(shape[2]);
  problem.num_heads_q = static_cast<std::int32_t>(shape[3]);
  problem.head_dim_v = static_cast<std::int32_t>(shape[4]);
  problem.outs = request.outs.data;
  problem.lses = static_cast<const float*>(request.lses.data);
  problem.out = request.out.data;
  problem.lse = static_cast<float*>(request.lse.data);
  for (int i = 0; i < 4; ++i) problem.outs_strides[i] = request.outs.strides[i];
  for (int i = 0; i < 4; ++i) problem.lses_strides[i] = request.lses.strides[i];
  for (int i = 0; i < 3; ++i) problem.out_strides[i] = request.out.strides[i];
  for (int i = 0; i < 3; ++i) problem.lse_strides[i] = request.lse.strides[i];
  return problem;
}

}  // namespace flashmla
