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

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <omp.h>

#include "decode_call.hpp"

namespace flashmla::bench {
namespace {

constexpr int kMaxTries = 400;

struct OwnOptions {
  bool warm = false;
  std::string kernel;
};

void measure(benchmark::State& state, const Shape& shape, int num_threads, const Options& options,
             const OwnOptions& own) {
  use_threads(num_threads);
  static PagePool pool;
  Call call(shape, pool, num_threads, 0, own.kernel);
  call.time();
  double best = 0;
  for (int i = 0; i < 40; ++i) best = std::max(best, burst(num_threads));
  std::vector<double> seconds, bursts, reads;
  int tries = 0;
  while (static_cast<int>(seconds.size()) < options.calls && tries < kMaxTries) {
    ++tries;
    if (!own.warm) call.take_pages();
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

Options parse(int count, char** words, OwnOptions& own) {
  Options options = parse_options(count, words,
                                  "[--threads N[,N]...] [--kernel NAME] [--calls N] [--warm] "
                                  "[BATCH,LENGTH,HEADS,SEQ_LEN_Q]...",
                                  [&](const std::string& word, const char* value) {
                                    if (word == "--warm") {
                                      own.warm = true;
                                      return 1;
                                    }
                                    if (word != "--kernel" || value == nullptr) return 0;
                                    own.kernel = value;
                                    return 2;
                                  });
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
  OwnOptions own;
  const Options options = parse(count, all.data(), own);
  benchmark::AddCustomContext("kernel", own.kernel.empty() ? "the library's choice" : own.kernel);
  benchmark::AddCustomContext("pages",
                              own.warm ? "64 tokens, the same each call" : "64 tokens, cold");
  for (const int num_threads : options.num_threads) {
    for (const Shape& shape : options.shapes) {
      const std::string name = "decode/" + shape.name() + "/threads:" + std::to_string(num_threads);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [&shape, num_threads, &options, &own](auto& state) {
                                     for ([[maybe_unused]] auto _ : state)
                                       measure(state, shape, num_threads, options, own);
                                   })
          ->Iterations(1)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}
