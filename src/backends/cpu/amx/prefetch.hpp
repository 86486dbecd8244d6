// Asks for the cached vectors of the next block, a few lines at a time, while this one is computed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/query_row.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu::amx {
namespace {

inline constexpr std::int32_t kLineBytes = 64;

// The lines of tokens [begin, end) of a row, in order.
class TokenLines {
 public:
  TokenLines() = default;
  TokenLines(const Problem& problem, std::int32_t row, std::int32_t kv_head, std::int32_t begin,
             std::int32_t end)
      : problem_(&problem),
        row_(row),
        kv_head_(kv_head),
        next_(begin),
        end_(end),
        token_bytes_(problem.head_dim * 2) {}

  // Asks for up to `count` lines.
  [[gnu::always_inline]] void prefetch(std::int32_t count) {
    while (count > 0) {
      if (line_ == line_end_ && !next_run()) return;
      const std::byte* stop =
          line_ + std::min<std::int64_t>(std::int64_t{count} * kLineBytes, line_end_ - line_);
      count -= static_cast<std::int32_t>((stop - line_) / kLineBytes);
      for (; line_ != stop; line_ += kLineBytes) {
        // To the second-level cache: first-level fill buffers are what the tile loads need.
        __builtin_prefetch(line_, 0, 2);
      }
    }
  }

 private:
  // Tokens that follow one another without a gap, up to the end of a page. A run that does not
  // start on a line ends in a line more.
  [[gnu::noinline]] bool next_run() {
    if (next_ >= end_) return false;
    const std::byte* first = reinterpret_cast<const std::byte*>(
        cached_token<BFloat16>(*problem_, row_, kv_head_, next_));
    const bool contiguous = problem_->k_token_stride == problem_->head_dim;
    const std::int32_t left_in_page = problem_->page_size - next_ % problem_->page_size;
    const std::int32_t tokens = contiguous ? std::min(end_ - next_, left_in_page) : 1;
    next_ += tokens;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(first) % kLineBytes;
    line_ = first - misaligned;
    const auto bytes = std::int64_t{tokens} * token_bytes_ + static_cast<std::int64_t>(misaligned);
    line_end_ = line_ + (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
    return true;
  }

  const Problem* problem_ = nullptr;
  std::int32_t row_ = 0;
  std::int32_t kv_head_ = 0;
  std::int32_t next_ = 0;
  std::int32_t end_ = 0;
  std::int32_t token_bytes_ = 0;
  const std::byte* line_ = nullptr;
  const std::byte* line_end_ = nullptr;
};

// Two streams, one through each half of the block: with one alone the memory answers a tenth
// slower.
class BlockPrefetch {
 public:
  BlockPrefetch() = default;
  // Tokens [begin, end), spread evenly over `steps` calls of step().
  BlockPrefetch(const Problem& problem, std::int32_t row, std::int32_t kv_head, std::int32_t begin,
                std::int32_t end, std::int32_t steps) {
    const std::int32_t middle = begin + (end - begin) / 2;
    first_ = TokenLines(problem, row, kv_head, begin, middle);
    second_ = TokenLines(problem, row, kv_head, middle, end);
    const std::int64_t lines = std::int64_t{end - middle} * problem.head_dim * 2 / kLineBytes;
    rate_ = static_cast<std::int32_t>(((lines << kFractionBits) + steps - 1) / steps);
  }

  [[gnu::always_inline]] void step() {
    due_ += rate_;
    const std::int32_t lines = due_ >> kFractionBits;
    due_ -= lines << kFractionBits;
    first_.prefetch(lines);
    second_.prefetch(lines);
  }

 private:
  static constexpr std::int32_t kFractionBits = 8;

  TokenLines first_;
  TokenLines second_;
  std::int32_t rate_ = 0;  // lines a step and stream, in fractions
  std::int32_t due_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
