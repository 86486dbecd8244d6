// The CPU backend: threads over a plan's walks, one kernel call a fragment, merge of shared rows.
#pragma once

#include <cstddef>

#include "backends/cpu/executor.hpp"
#include "backends/cpu/kernel.hpp"
#include "flashmla/status.hpp"
#include "problem/problem.hpp"
#include "schedule/resolve.hpp"

namespace flashmla::cpu {

// The parallel work of a call: every part, times key/value heads, times groups of query rows that a
// kernel takes at once. Items are independent, so who runs which changes no bit.
struct WorkItems {
  std::int32_t num_parts = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t num_row_groups = 0;
  std::int32_t rows_per_group = 0;

  std::int64_t per_part() const { return std::int64_t{num_kv_heads} * num_row_groups; }
  std::int64_t count() const { return num_parts * per_part(); }
};

// Where everything lies in the workspace; offsets in bytes from its start, which is 64-byte
// aligned.
struct WorkspaceLayout {
  std::int64_t num_fragments = 0;
  WorkItems items;
  std::int32_t num_workers = 0;   // threads that find work
  std::size_t schedule = 0;       // what resolve() fills
  std::size_t next_rows = 0;      // int32 (items.count()): rows of each item that are begun
  std::int32_t row_tile = 0;      // DecodeKernel::row_tile
  std::int64_t partial_rows = 0;  // query rows of a key/value head, in whole row tiles
  // float (num_fragments, num_heads_k, partial_rows, head_dim_v) and without head_dim_v.
  std::size_t partial_outs = 0;
  std::size_t partial_lses = 0;
  std::size_t scratch = 0;  // num_workers areas of scratch_stride bytes
  std::size_t scratch_stride = 0;
  std::size_t total_bytes = 0;
};

// One body for "how many bytes" and "where": the size cannot drift from its use. Fails when 64 bits
// cannot count the bytes.
Result<WorkspaceLayout> lay_out_workspace(const Problem& problem, const DecodeKernel& kernel,
                                          std::int32_t num_threads);

// Runs the kernel over every walk. Rows walked whole are written; the others leave partial results.
void launch(const Problem& problem, const DecodeKernel& kernel, const schedule::Schedule& schedule,
            const WorkspaceLayout& layout, std::byte* workspace, const Executor& executor);

// Merges the partial results of the rows that several parts walked.
void combine(const Problem& problem, const DecodeKernel& kernel, const schedule::Schedule& schedule,
             const WorkspaceLayout& layout, std::byte* workspace, const Executor& executor);

// merge_attention_states.
void merge(const MergeProblem& problem, const Executor& executor);

}  // namespace flashmla::cpu
