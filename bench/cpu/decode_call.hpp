// A decode call on a cold paged cache, as the benchmarks make it, and what it is judged by.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ceilings.hpp"
#include "flashmla/flashmla.h"

namespace flashmla::bench {

inline constexpr std::int64_t kHeadDim = 576;
inline constexpr std::int64_t kHeadDimV = 512;
inline constexpr std::int64_t kPageSize = 64;
inline constexpr std::size_t kPageBytes = kHeadDim * kPageSize * 2;
// Well above a quarter, and below the three quarters to which the clock alone may fall under AMX.
inline constexpr double kQuietShare = 0.6;

struct Shape {
  std::int32_t batch, length, heads, seq_len_q;

  double flop() const { return 2.0 * (kHeadDim + kHeadDimV) * batch * length * heads * seq_len_q; }
  double bytes() const { return 2.0 * kHeadDim * batch * length; }
  std::string name() const {
    return std::to_string(batch) + "," + std::to_string(length) + "," + std::to_string(heads) +
           "," + std::to_string(seq_len_q);
  }
  std::int64_t pages() const {
    return std::int64_t{batch} * ((length + kPageSize - 1) / kPageSize);
  }
};

struct Options {
  std::vector<int> num_threads;
  int calls = 40;  // that count, of a shape
  std::vector<Shape> shapes;
};

// "7" and the like, at least 1; 0 where it is something else.
int parse_count(const char* word);

// Reads [--threads N[,N]...] [--calls N] [BATCH,LENGTH,HEADS,SEQ_LEN_Q]..., each number at least 1.
// other(word, value): whether `word` is the program's own, with the word after it, if any, and how
// many words that is. Prints `usage` and ends the program for anything else.
using OtherOption = std::function<int(const std::string& word, const char* value)>;
Options parse_options(int count, char** words, const char* usage, const OtherOption& other);

double median(std::vector<double> values);

// From here on the library and the ceilings have this many threads, each bound to a processor of
// its own where there are enough. A thread that waits spins: where two share a processor, the one
// that has work waits for the scheduler.
void use_threads(int num_threads);

// GFLOP/s of the fastest unit that there is, over a short burst.
double burst(int num_threads);

// Random pages of a pool too large for any cache, each handed out once a round.
class PagePool {
 public:
  PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;
  ~PagePool();

  std::byte* base() const { return base_; }
  std::int64_t size() const { return static_cast<std::int64_t>(order_.size()); }
  std::int32_t next();
  const std::byte* page(std::int32_t id) const { return base_ + std::size_t(id) * kPageBytes; }

 private:
  std::byte* base_;
  std::vector<std::int32_t> order_;
  std::size_t next_ = 0;
};

class Call {
 public:
  // num_parts: of the plan. 0, and kernel empty: the library's choice.
  Call(const Shape& shape, PagePool& pool, int num_threads, int num_parts,
       const std::string& kernel);

  // Pages that no call has touched for a round of the pool.
  void take_pages();

  // Seconds. executor null: the library's threads.
  double time(const flashmla_executor* executor = nullptr);

  // GB/s of plain loads over as many other pages.
  double read_rate_of_other_pages();

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  const Shape shape_;
  PagePool& pool_;
  const int num_threads_;
  std::vector<std::uint16_t> q_, out_;
  std::vector<float> lse_;
  std::vector<std::int32_t> table_, lengths_, plan_rows_, num_splits_;
  flashmla_decode_args args_{};
  std::size_t workspace_bytes_ = 0;
  std::unique_ptr<std::byte, Free> workspace_;
};

}  // namespace flashmla::bench
