// Asks for the cached vectors of the next block, a few lines at a time, while this one is computed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/amx/products.hpp"
#include "backends/cpu/query_row.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu::amx {
namespace {

inline constexpr std::int32_t kLineBytes = 64;

// Tokens [begin, end) of a row, in runs without a gap.
class TokenRuns {
 public:
  TokenRuns() = default;
  TokenRuns(const Problem& problem, std::int32_t row, std::int32_t kv_head, std::int32_t begin,
            std::int32_t end)
      : problem_(&problem), row_(row), kv_head_(kv_head), next_(begin), end_(end) {}

  // Tokens of the longest run that there can be.
  static std::int32_t longest(const Problem& problem) {
    return problem.k_token_stride == problem.head_dim ? problem.page_size : 1;
  }

  // The first line of the next run and, into `bytes`, its length in whole lines. A run that does
  // not start on a line ends in a line more. Null at the end.
  const std::byte* next(std::int64_t& bytes) {
    if (next_ >= end_) return nullptr;
    const std::byte* first = reinterpret_cast<const std::byte*>(
        cached_token<BFloat16>(*problem_, row_, kv_head_, next_));
    const std::int32_t longest_run = longest(*problem_);
    const std::int32_t tokens = std::min(end_ - next_, longest_run - next_ % longest_run);
    next_ += tokens;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(first) % kLineBytes;
    bytes = (std::int64_t{tokens} * problem_->head_dim * 2 + static_cast<std::int64_t>(misaligned) +
             kLineBytes - 1) /
            kLineBytes * kLineBytes;
    return first - misaligned;
  }

 private:
  const Problem* problem_ = nullptr;
  std::int32_t row_ = 0;
  std::int32_t kv_head_ = 0;
  std::int32_t next_ = 0;
  std::int32_t end_ = 0;
};

// Several streams: with one alone the memory answers a quarter slower. The block is cut into
// kParts, and each run of a part into kStreams that are a fixed distance apart: an address that is
// loaded takes a place in the queue that tile loads wait for. All go forward together, by a
// fraction of a line a step, and ask for the lines they are at even if they did so before, which is
// cheaper than a branch. kLines: of each stream at once.
template <std::int32_t kParts, std::int32_t kStreams, std::int32_t kLines>
class BlockPrefetch {
 public:
  BlockPrefetch() = default;
  // Tokens [begin, end), spread evenly over `turns` calls of run().
  BlockPrefetch(const Problem& problem, std::int32_t row, std::int32_t kv_head, std::int32_t begin,
                std::int32_t end, std::int32_t turns) {
    const std::int32_t tokens_each = (end - begin + kParts - 1) / kParts;
    for (std::int32_t i = 0; i < kParts; ++i) {
      runs_[i] = TokenRuns(problem, row, kv_head, std::min(end, begin + i * tokens_each),
                           std::min(end, begin + (i + 1) * tokens_each));
    }
    // Of a stream: it ends with its run, in a part of a line.
    const std::int32_t run_tokens =
        std::clamp(TokenRuns::longest(problem), 1, std::max(1, tokens_each));
    const std::int64_t bytes =
        distance(std::int64_t{run_tokens} * problem.head_dim * 2) * tokens_each / run_tokens;
    const std::int64_t most = std::int64_t{turns} * kLines * kLineBytes;  // with one step a turn
    steps_ = static_cast<std::int32_t>((bytes + most - 1) / most);
    if (steps_ > 0) rate_ = (bytes << kFractionBits) / (std::int64_t{turns} * steps_) + 1;
  }

  [[gnu::always_inline]] void run() {
    std::int64_t position = position_;
    for (std::int32_t step = steps_; step > 0; --step) {
      const std::int64_t offset = (position >> kFractionBits) & -std::int64_t{kLineBytes};
      if (__builtin_expect(offset >= run_end_, 0)) next_runs(offset);
      for_each_constant<kParts>([&](auto part) __attribute__((always_inline)) {
        std::int64_t address = lines_[part] + offset;
        for_each_constant<kStreams>([&](auto stream) __attribute__((always_inline)) {
          if constexpr (stream > 0) address += distances_[part];
          for (std::int32_t line = 0; line < kLines; ++line) {
            prefetch_line(address + line * kLineBytes);
          }
        });
      });
      position += rate_;
    }
    position_ = position;
  }

 private:
  static constexpr std::int32_t kFractionBits = 8;

  [[gnu::always_inline]] static void prefetch_line(std::int64_t address) {
    // To the second-level cache: first-level fill buffers are what the tile loads need.
    __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
  }

  // From stream to stream of a run of `bytes`.
  static constexpr std::int64_t distance(std::int64_t bytes) {
    constexpr std::int64_t kAllLines = kStreams * kLineBytes;
    return (bytes + kAllLines - 1) / kAllLines * kLineBytes;
  }

  // Begins the next runs of the parts whose runs end at or before `offset`. A part at its end
  // follows one that is not.
  [[gnu::noinline]] void next_runs(std::int64_t offset) {
    run_end_ = std::numeric_limits<std::int64_t>::max();
    std::int32_t other = -1;
    for (std::int32_t i = 0; i < kParts; ++i) {
      std::int64_t bytes = 0;
      while (offset >= run_ends_[i]) {
        const std::byte* first = runs_[i].next(bytes);
        if (first == nullptr) break;
        distances_[i] = distance(bytes);
        lines_[i] = reinterpret_cast<std::int64_t>(first) - run_ends_[i];
        for (std::int64_t begin = run_ends_[i]; begin < offset; begin += kLineBytes) {
          for (std::int32_t stream = 0; stream < kStreams; ++stream) {
            prefetch_line(lines_[i] + begin + stream * distances_[i]);
          }
        }
        run_ends_[i] += distances_[i];
      }
      if (offset >= run_ends_[i]) continue;
      run_end_ = std::min(run_end_, run_ends_[i]);
      other = i;
    }
    if (other < 0) {
      steps_ = 0;
      return;
    }
    for (std::int32_t i = 0; i < kParts; ++i) {
      if (offset < run_ends_[i]) continue;
      lines_[i] = lines_[other];
      distances_[i] = distances_[other];
    }
  }

  std::int64_t lines_[kParts] = {};      // address of the run's first line, less the offset there
  std::int64_t distances_[kParts] = {};  // from stream to stream, in bytes
  std::int64_t run_end_ = 0;             // offset at which the next run's streams end
  std::int64_t position_ = 0;            // the offset of all streams, in fractions of a byte
  std::int64_t rate_ = 0;                // of the position, a step
  std::int32_t steps_ = 0;               // a turn
  std::int64_t run_ends_[kParts] = {};
  TokenRuns runs_[kParts];
};

}  // namespace
}  // namespace flashmla::cpu::amx
