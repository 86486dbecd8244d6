#include "problem/contents.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

namespace flashmla {
namespace {

// cache_seqlens: 0 <= length <= limit.
Status check_lengths(const std::int32_t* lengths, std::int64_t stride, std::int32_t batch,
                     std::int64_t limit, const char* limit_meaning) {
  for (std::int32_t row = 0; row < batch; ++row) {
    const std::int32_t length = lengths[row * stride];
    if (length < 0 || length > limit) {
      return Status::invalid_argument("cache_seqlens[" + std::to_string(row) + "] is " +
                                      std::to_string(length) + "; it must be between 0 and " +
                                      std::to_string(limit) + limit_meaning);
    }
  }
  return {};
}

// visible_lens: non-decreasing along the query tokens, between 0 and the row's length.
Status check_visible_lens(const Problem& problem) {
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t length = problem.row_length(row);
    std::int32_t previous = 0;
    for (std::int32_t t = 0; t < problem.seq_len_q; ++t) {
      const std::int32_t visible = problem.visible_tokens(row, t);
      if (visible < previous || visible > length) {
        return Status::invalid_argument("visible_lens[" + std::to_string(row) + ", " +
                                        std::to_string(t) + "] is " + std::to_string(visible) +
                                        "; it must be between " + std::to_string(previous) +
                                        (t > 0 ? " (the value before it)" : "") + " and " +
                                        std::to_string(length) + " (the row's cache_seqlens)");
      }
      previous = visible;
    }
  }
  return {};
}

// Block ids of the pages that hold a row's tokens.
Status check_block_ids(const Problem& problem) {
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t length = problem.row_length(row);
    const std::int32_t pages = length == 0 ? 0 : (length - 1) / problem.page_size + 1;
    for (std::int32_t index = 0; index < pages; ++index) {
      const std::int32_t id = problem.page(row, index);
      if (id < 0 || id >= problem.num_blocks) {
        return Status::invalid_argument(
            "block_table[" + std::to_string(row) + ", " + std::to_string(index) + "] is " +
            std::to_string(id) +
            (problem.num_blocks == 0
                 ? "; k_cache has no blocks"
                 : "; k_cache has blocks 0 to " + std::to_string(problem.num_blocks - 1)));
      }
    }
  }
  return {};
}

// Puts a copy of a tensor of rows (rows, columns) in place of `tensor`, gaps between rows included.
Status copy_tensor(const std::int32_t*& tensor, std::int64_t rows, std::int64_t row_stride,
                   std::int64_t columns, std::int64_t column_stride, const ReadInts& read,
                   std::vector<std::vector<std::int32_t>>& copies) {
  if (tensor == nullptr || rows == 0 || columns == 0) return {};
  const std::int64_t count = (rows - 1) * row_stride + (columns - 1) * column_stride + 1;
  std::vector<std::int32_t>& copy = copies.emplace_back(static_cast<std::size_t>(count));
  if (Status status = read(copy.data(), tensor, count); !status.ok()) return status;
  tensor = copy.data();
  return {};
}

}  // namespace

Status check_contents(const Problem& problem) {
  const std::int64_t slots = std::int64_t{problem.max_pages_per_row} * problem.page_size;
  if (Status status = check_lengths(
          problem.cache_seqlens, problem.cache_seqlens_stride, problem.batch,
          std::min<std::int64_t>(slots, kMaxRowTokens),
          slots <= kMaxRowTokens ? " (max_num_blocks_per_seq * page_block_size)" : "");
      !status.ok()) {
    return status;
  }
  if (problem.visible_lens != nullptr) {
    if (Status status = check_visible_lens(problem); !status.ok()) return status;
  }
  return check_block_ids(problem);
}

Status check_contents(const PlanProblem& problem) {
  return check_lengths(problem.cache_seqlens, problem.cache_seqlens_stride, problem.batch,
                       INT32_MAX, "");
}

Result<bool> contents_are_checked() {
  const char* given = std::getenv("FLASHMLA_CHECK");
  const std::string_view word = given == nullptr ? "" : given;
  if (word.empty() || word == "0") return false;
  if (word == "1") return true;
  return Status::invalid_argument("FLASHMLA_CHECK is \"" + std::string(word) +
                                  "\"; it must be 0 or 1");
}

Result<OnHost<Problem>> copy_contents(const Problem& problem, const ReadInts& read) {
  OnHost<Problem> host{problem, {}};
  Problem& copy = host.problem;
  Status status = copy_tensor(copy.cache_seqlens, problem.batch, problem.cache_seqlens_stride, 1, 0,
                              read, host.copies);
  if (status.ok()) {
    status =
        copy_tensor(copy.block_table, problem.batch, problem.block_table_batch_stride,
                    problem.max_pages_per_row, problem.block_table_page_stride, read, host.copies);
  }
  if (status.ok()) {
    status = copy_tensor(copy.visible_lens, problem.batch, problem.visible_lens_batch_stride,
                         problem.seq_len_q, problem.visible_lens_token_stride, read, host.copies);
  }
  if (status.ok()) {
    status = copy_tensor(copy.plan_rows, problem.num_parts, problem.plan_row_stride, kPlanRowFields,
                         1, read, host.copies);
  }
  if (!status.ok()) return status;
  return host;
}

Result<OnHost<PlanProblem>> copy_contents(const PlanProblem& problem, const ReadInts& read) {
  OnHost<PlanProblem> host{problem, {}};
  if (Status status = copy_tensor(host.problem.cache_seqlens, problem.batch,
                                  problem.cache_seqlens_stride, 1, 0, read, host.copies);
      !status.ok()) {
    return status;
  }
  return host;
}

}  // namespace flashmla
