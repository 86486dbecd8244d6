// Decode calls on a cold paged cache, beside the ceilings of this machine at that moment.
//
//   decode_bench [--threads N[,N]...] [--kernel NAME] [--calls N] [--warm]
//                [Google Benchmark's own flags] [BATCH,LENGTH,HEADS,SEQ_LEN_Q]...
//
// A shared machine has slow spells: AMX may run at a quarter of its rate for seconds. Each call is
// bracketed by short bursts of AMX products (of multiply-adds where there is no AMX), and counts
// only if both bursts reach kQuietShare of the best one seen. Plain loads over as many other random
// pages are timed after each call.
//
// An iteration of a benchmark is that measurement as a whole; its time and its counters are medians
// over the calls that count (`quiet`, of `tries`). `unit` and `read` are the two ceilings, in
// GFLOP/s and GB/s; `of_unit%` and `of_read%` what the call reaches of them.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <omp.h>

#include "ceilings.hpp"
#include "flashmla/flashmla.h"

namespace flashmla::bench {
namespace {

constexpr std::int64_t kHeadDim = 576;
constexpr std::int64_t kHeadDimV = 512;
constexpr std::int64_t kPageSize = 64;
constexpr std::size_t kPageBytes = kHeadDim * kPageSize * 2;
// Several times what a last-level cache keeps between two visits of a page.
constexpr std::size_t kPoolBytes = std::size_t{3} << 29;
// Well above a quarter, and below the three quarters to which the clock alone may fall under AMX.
constexpr double kQuietShare = 0.6;
constexpr double kBurstMicroseconds = 50;
constexpr int kMaxTries = 400;

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
  int calls = 40;
  bool warm = false;
  std::string kernel;
  std::vector<Shape> shapes;
};

// Random pages of a pool too large for any cache, each handed out once a round.
class PagePool {
 public:
  PagePool() : order_(kPoolBytes / kPageBytes) {
    void* base =
        mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) std::abort();
    madvise(base, kPoolBytes, MADV_HUGEPAGE);
    base_ = static_cast<std::byte*>(base);
    // bf16 values in (-2, -1] and [1, 2): the exponent fixed, sign and fraction random.
    auto* words = reinterpret_cast<std::uint64_t*>(base_);
    std::uint64_t state = 1;
    for (std::size_t i = 0; i < kPoolBytes / sizeof(std::uint64_t); ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      words[i] = (state & 0x807f807f807f807fu) | 0x3f803f803f803f80u;
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), std::mt19937(1));
  }

  std::byte* base() const { return base_; }
  std::int64_t size() const { return static_cast<std::int64_t>(order_.size()); }
  std::int32_t next() {
    if (next_ == order_.size()) next_ = 0;
    return order_[next_++];
  }
  const std::byte* page(std::int32_t id) const { return base_ + std::size_t(id) * kPageBytes; }

 private:
  std::byte* base_;
  std::vector<std::int32_t> order_;
  std::size_t next_ = 0;
};

flashmla_tensor tensor(void* data, std::int32_t dtype, std::vector<std::int64_t> shape) {
  flashmla_tensor result{};
  result.data = data;
  result.dtype = dtype;
  result.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    result.shape[i] = shape[i];
    result.strides[i] = stride;
  }
  return result;
}

class Call {
 public:
  Call(const Shape& shape, PagePool& pool, int num_threads, const std::string& kernel)
      : shape_(shape),
        pool_(pool),
        num_threads_(num_threads),
        q_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads * kHeadDim),
        out_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads * kHeadDimV),
        lse_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads),
        table_(static_cast<std::size_t>(shape.pages())),
        lengths_(static_cast<std::size_t>(shape.batch), shape.length),
        plan_rows_(static_cast<std::size_t>(num_threads) * 8),
        num_splits_(static_cast<std::size_t>(shape.batch) + 1) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (std::uint16_t& element : q_) {
      const float value = normal(random);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof(bits));
      element = static_cast<std::uint16_t>(bits >> 16);
    }
    args_.struct_size = sizeof(args_);
    args_.q =
        tensor(q_.data(), FLASHMLA_BFLOAT16, {shape.batch, shape.seq_len_q, shape.heads, kHeadDim});
    args_.k_cache = tensor(pool.base(), FLASHMLA_BFLOAT16, {pool.size(), kPageSize, 1, kHeadDim});
    args_.block_table =
        tensor(table_.data(), FLASHMLA_INT32, {shape.batch, shape.pages() / shape.batch});
    args_.cache_seqlens = tensor(lengths_.data(), FLASHMLA_INT32, {shape.batch});
    args_.tile_scheduler_metadata = tensor(plan_rows_.data(), FLASHMLA_INT32, {num_threads, 8});
    args_.num_splits = tensor(num_splits_.data(), FLASHMLA_INT32, {shape.batch + 1});
    args_.out = tensor(out_.data(), FLASHMLA_BFLOAT16,
                       {shape.batch, shape.seq_len_q, shape.heads, kHeadDimV});
    args_.softmax_lse =
        tensor(lse_.data(), FLASHMLA_FLOAT32, {shape.batch, shape.heads, shape.seq_len_q});
    args_.head_dim_v = kHeadDimV;
    if (!kernel.empty()) args_.kernel = kernel.c_str();

    flashmla_plan_args plan{};
    plan.struct_size = sizeof(plan);
    plan.cache_seqlens = args_.cache_seqlens;
    plan.num_heads_per_head_k = std::int64_t{shape.seq_len_q} * shape.heads;
    plan.num_heads_k = 1;
    plan.tile_scheduler_metadata = args_.tile_scheduler_metadata;
    plan.num_splits = args_.num_splits;
    check(flashmla_plan(&plan));
    take_pages();
    check(flashmla_decode_workspace_size(&args_, num_threads, &workspace_bytes_));
    workspace_.reset(
        static_cast<std::byte*>(std::aligned_alloc(64, (workspace_bytes_ + 63) / 64 * 64)));
    std::memset(workspace_.get(), 0, workspace_bytes_);
  }

  // Pages that no call has touched for a round of the pool.
  void take_pages() {
    for (std::int32_t& id : table_) id = pool_.next();
  }

  double time() {
    const double begin = now_seconds();
    check(flashmla_decode(&args_, workspace_.get(), workspace_bytes_, nullptr));
    return now_seconds() - begin;
  }

  double read_rate_of_other_pages() {
    std::vector<const std::byte*> runs;
    for (std::int64_t i = 0; i < shape_.pages(); ++i) runs.push_back(pool_.page(pool_.next()));
    return read_rate(num_threads_, runs, kPageBytes);
  }

 private:
  static void check(flashmla_status status) {
    if (status == FLASHMLA_OK) return;
    std::fprintf(stderr, "%s\n", flashmla_last_error());
    std::exit(1);
  }

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

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double burst(int num_threads) {
  return has_amx_bf16() ? amx_bf16_rate(num_threads, kBurstMicroseconds)
         : has_avx512() ? avx512_fma_rate(num_threads, kBurstMicroseconds)
                        : avx2_fma_rate(num_threads, kBurstMicroseconds);
}

void measure(benchmark::State& state, const Shape& shape, int num_threads, const Options& options) {
  omp_set_num_threads(num_threads);
  static PagePool pool;
  Call call(shape, pool, num_threads, options.kernel);
  call.time();
  double best = 0;
  for (int i = 0; i < 40; ++i) best = std::max(best, burst(num_threads));
  std::vector<double> seconds, bursts, reads;
  int tries = 0;
  while (static_cast<int>(seconds.size()) < options.calls && tries < kMaxTries) {
    ++tries;
    if (!options.warm) call.take_pages();
    const double before = burst(num_threads);
    const double elapsed = call.time();
    const double after = burst(num_threads);
    const double read = call.read_rate_of_other_pages();
    best = std::max({best, before, after});
    if (std::min(before, after) < kQuietShare * best) continue;
    seconds.push_back(elapsed);
    bursts.push_back((before + after) / 2);
    reads.push_back(read);
  }
  if (seconds.empty()) return state.SkipWithError("the machine was never quiet");
  const double time = median(seconds);
  const double gflops = shape.flop() / time * 1e-9;
  const double gbytes = shape.bytes() / time * 1e-9;
  const double unit = median(bursts), read = median(reads);
  state.SetIterationTime(time);
  state.counters["GFLOP/s"] = gflops;
  state.counters["unit"] = unit;
  state.counters["of_unit%"] = 100 * gflops / unit;
  state.counters["GB/s"] = gbytes;
  state.counters["read"] = read;
  state.counters["of_read%"] = 100 * gbytes / read;
  state.counters["quiet"] = static_cast<double>(seconds.size());
  state.counters["tries"] = tries;
}

// "1,2" and the like, each at least 1; empty where it is something else.
std::vector<int> parse_counts(const char* word) {
  std::vector<int> counts;
  for (char* end = nullptr;; word = end + 1) {
    const long count = std::strtol(word, &end, 10);
    if (end == word || count < 1 || count > 4096) return {};
    counts.push_back(static_cast<int>(count));
    if (*end == '\0') return counts;
    if (*end != ',') return {};
  }
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    Shape shape{};
    if (word == "--threads" && i + 1 < count) {
      options.num_threads = parse_counts(words[++i]);
    } else if (word == "--kernel" && i + 1 < count) {
      options.kernel = words[++i];
    } else if (word == "--calls" && i + 1 < count) {
      options.calls = std::max(1, std::atoi(words[++i]));
    } else if (word == "--warm") {
      options.warm = true;
    } else if (std::sscanf(word.c_str(), "%d,%d,%d,%d", &shape.batch, &shape.length, &shape.heads,
                           &shape.seq_len_q) == 4 &&
               std::min({shape.batch, shape.length, shape.heads, shape.seq_len_q}) > 0) {
      options.shapes.push_back(shape);
    } else {
      std::fprintf(stderr,
                   "%s: expected [--threads N[,N]...] [--kernel NAME] [--calls N] [--warm] "
                   "[BATCH,LENGTH,HEADS,SEQ_LEN_Q]...\n",
                   word.c_str());
      std::exit(2);
    }
  }
  if (options.num_threads.empty()) {
    options.num_threads = {1};
    if (omp_get_max_threads() > 1) options.num_threads.push_back(omp_get_max_threads());
  }
  if (options.shapes.empty()) {
    options.shapes = {{1, 64, 16, 1},   {1, 4096, 1, 1},   {1, 4096, 4, 1},   {1, 4096, 8, 1},
                      {1, 4096, 16, 1}, {8, 2048, 16, 1},  {1, 32768, 16, 1}, {1, 4096, 32, 1},
                      {1, 4096, 64, 1}, {1, 4096, 128, 1}, {8, 2048, 128, 1}, {4, 1024, 128, 2}};
  }
  return options;
}

}  // namespace
}  // namespace flashmla::bench

int main(int count, char** words) {
  using namespace flashmla::bench;
  std::vector<char*> all(words, words + count);
  char tabular[] = "--benchmark_counters_tabular=true";
  all.insert(all.begin() + 1, tabular);  // before the caller's own, which decide
  count = static_cast<int>(all.size());
  benchmark::Initialize(&count, all.data());
  const Options options = parse(count, all.data());
  benchmark::AddCustomContext("kernel",
                              options.kernel.empty() ? "the library's choice" : options.kernel);
  benchmark::AddCustomContext("pages",
                              options.warm ? "64 tokens, the same each call" : "64 tokens, cold");
  for (const int num_threads : options.num_threads) {
    for (const Shape& shape : options.shapes) {
      const std::string name = "decode/" + shape.name() + "/threads:" + std::to_string(num_threads);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [&shape, num_threads, &options](auto& state) {
                                     for ([[maybe_unused]] auto _ : state)
                                       measure(state, shape, num_threads, options);
                                   })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}
