// Asks for the cached vectors of the next block, a few lines at a time, while this one is computed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/amx/products.hpp"
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

  // Asks for up to kCount lines.
  template <std::int32_t kCount>
  [[gnu::always_inline]] void prefetch() {
    const std::byte* line = line_;
    if (line_end_ - line < kCount * kLineBytes) {
      prefetch_across_runs(kCount);
      return;
    }
    for (std::int32_t i = 0; i < kCount; ++i) prefetch_line(line + i * kLineBytes);
    line_ = line + kCount * kLineBytes;
  }

 private:
  [[gnu::always_inline]] static void prefetch_line(const std::byte* line) {
    // To the second-level cache: first-level fill buffers are what the tile loads need.
    __builtin_prefetch(line, 0, 2);
  }

  [[gnu::noinline]] void prefetch_across_runs(std::int32_t count) {
    for (; count > 0; --count) {
      if (line_ == line_end_ && !next_run()) return;
      prefetch_line(line_);
      line_ += kLineBytes;
    }
  }

  // Tokens that follow one another without a gap, up to the end of a page. A run that does not
  // start on a line ends in a line more.
  bool next_run() {
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

// Several streams, each through a part of the block: with one alone the memory answers a quarter
// slower. kLines: of each stream at once.
template <std::int32_t kStreams, std::int32_t kLines>
class BlockPrefetch {
 public:
  BlockPrefetch() = default;
  // Tokens [begin, end), spread evenly over `turns` calls of run().
  BlockPrefetch(const Problem& problem, std::int32_t row, std::int32_t kv_head, std::int32_t begin,
                std::int32_t end, std::int32_t turns) {
    const std::int32_t tokens_each = (end - begin + kStreams - 1) / kStreams;
    for (std::int32_t i = 0; i < kStreams; ++i) {
      streams_[i] = TokenLines(problem, row, kv_head, std::min(end, begin + i * tokens_each),
                               std::min(end, begin + (i + 1) * tokens_each));
    }
    const std::int64_t lines = std::int64_t{tokens_each} * problem.head_dim * 2 / kLineBytes;
    const std::int64_t due = (lines << kFractionBits) / kLines;
    rate_ = static_cast<std::int32_t>((due + turns - 1) / turns);
  }

  [[gnu::always_inline]] void run() {
    for (due_ += rate_; due_ >= kOne; due_ -= kOne) {
      for_each_constant<kStreams>([&](auto i) __attribute__((always_inline)) {
        streams_[i].template prefetch<kLines>();
      });
    }
  }

 private:
  static constexpr std::int32_t kFractionBits = 8;
  static constexpr std::int32_t kOne = 1 << kFractionBits;

  TokenLines streams_[kStreams];
  std::int32_t rate_ = 0;  // in fractions of kLines lines
  std::int32_t due_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
