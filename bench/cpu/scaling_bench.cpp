// How a decode call scales with its threads, beside what the machine's units and memory do.
//
//   scaling_bench [--threads N[,N]...] [--parts N] [--calls N] [BATCH,LENGTH,HEADS,SEQ_LEN_Q]...
//
// A line a shape and number of threads, of medians over calls on a cold cache:
//   us, efficiency  of the call; efficiency is us * threads of the first line / (us * threads)
//   AMX, read       what the call reaches of the ceilings of as many threads
//   unit, memory    the ceilings themselves, as efficiencies over those of the first line
//   wake            us until the last thread begins its work
//   work            us that a thread works, mean
//   uneven          us that the slowest works longer than the mean
//   merge           us from the end of the work to the end of the call
//
// As in decode_bench, bursts of products stand around each call, and it counts only when both are
// near the best seen. Numbers of threads take turns, so that they meet the same machine.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <omp.h>

#include "decode_call.hpp"

namespace flashmla::bench {
namespace {

constexpr int kRounds = 4;
constexpr int kMostThreads = 256;

// OpenMP as the library uses it, with the times of the first parallel loop of a call: the work. The
// second one, where there is one, is the merge.
class TimedExecutor {
 public:
  explicit TimedExecutor(int num_threads) {
    fields_.struct_size = sizeof(fields_);
    fields_.context = this;
    fields_.num_threads = num_threads;
    fields_.parallel_for = run;
  }

  const flashmla_executor* fields() const { return &fields_; }

  void begin_call() { loops_ = count_ = 0; }
  // Whether the call had a loop to time: it asks no executor for one body.
  bool has_times() const { return count_ > 0; }
  double wake() const { return largest(&Times::begin) - begin_; }
  double mean_work() const {
    double total = 0;
    for (int i = 0; i < count_; ++i) total += times_[i].end - times_[i].begin;
    return total / count_;
  }
  double uneven() const {
    double most = 0;
    for (int i = 0; i < count_; ++i) most = std::max(most, times_[i].end - times_[i].begin);
    return most - mean_work();
  }
  double work_end() const { return largest(&Times::end); }

 private:
  struct alignas(64) Times {
    double begin, end;
  };

  double largest(double Times::*field) const {
    double most = times_[0].*field;
    for (int i = 1; i < count_; ++i) most = std::max(most, times_[i].*field);
    return most;
  }

  static void run(void* context, std::int64_t count, void (*body)(void*, std::int64_t),
                  void* data) {
    auto& self = *static_cast<TimedExecutor*>(context);
    const bool is_work = self.loops_++ == 0 && count <= kMostThreads;
    if (is_work) {
      self.begin_ = now_seconds();
      self.count_ = static_cast<int>(count);
    }
#pragma omp parallel for schedule(static, 1)
    for (std::int64_t index = 0; index < count; ++index) {
      if (is_work) self.times_[index].begin = now_seconds();
      body(data, index);
      if (is_work) self.times_[index].end = now_seconds();
    }
  }

  flashmla_executor fields_{};
  int loops_ = 0;
  int count_ = 0;  // bodies of the work
  double begin_ = 0;
  Times times_[kMostThreads] = {};
};

// What was measured of a shape at a number of threads.
struct Samples {
  std::vector<double> seconds, bursts, reads, wakes, works, unevens, merges;
  double best_burst = 0;
};

void measure_round(Samples& samples, const Shape& shape, PagePool& pool, int num_threads,
                   const Options& options, int num_parts) {
  use_threads(num_threads);
  Call call(shape, pool, num_threads, num_parts, "");
  TimedExecutor executor(num_threads);
  // The threads are there, and the workspace has its memory.
  for (int i = 0; i < 2; ++i) call.time(executor.fields());
  const int wanted = (options.calls + kRounds - 1) / kRounds;
  for (int counted = 0, tries = 0; counted < wanted && tries < 4 * wanted; ++tries) {
    call.take_pages();
    const double before = burst(num_threads);
    executor.begin_call();
    const double begin = now_seconds();
    const double elapsed = call.time(executor.fields());
    const double after = burst(num_threads);
    const double read = call.read_rate_of_other_pages();
    samples.best_burst = std::max({samples.best_burst, before, after});
    if (std::min(before, after) < kQuietShare * samples.best_burst) continue;
    ++counted;
    samples.seconds.push_back(elapsed);
    samples.bursts.push_back((before + after) / 2);
    samples.reads.push_back(read);
    if (!executor.has_times()) continue;
    samples.wakes.push_back(executor.wake());
    samples.works.push_back(executor.mean_work());
    samples.unevens.push_back(executor.uneven());
    samples.merges.push_back(begin + elapsed - executor.work_end());
  }
}

double median_or_zero(const std::vector<double>& values) {
  return values.empty() ? 0 : median(values);
}

// num_parts: of the plan; 0: the library's choice.
void measure(const Shape& shape, PagePool& pool, const Options& options, int num_parts) {
  std::vector<Samples> samples(options.num_threads.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < samples.size(); ++i) {
      measure_round(samples[i], shape, pool, options.num_threads[i], options, num_parts);
    }
  }
  const double first_seconds = median_or_zero(samples[0].seconds);
  const double first_unit = median_or_zero(samples[0].bursts);
  const double first_read = median_or_zero(samples[0].reads);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Samples& here = samples[i];
    const double threads = options.num_threads[i];
    const double ratio = threads / options.num_threads[0];
    if (here.seconds.empty()) {
      std::printf("%-16s %7.0f  the machine was never quiet\n", shape.name().c_str(), threads);
      continue;
    }
    const double seconds = median(here.seconds);
    const double unit = median(here.bursts), read = median(here.reads);
    std::printf("%-16s %7.0f %8.1f %10.0f%% %5.0f%% %5.0f%% %5.0f%% %6.0f%%", shape.name().c_str(),
                threads, seconds * 1e6, 100 * first_seconds / seconds / ratio,
                100 * shape.flop() / seconds * 1e-9 / unit,
                100 * shape.bytes() / seconds * 1e-9 / read, 100 * unit / first_unit / ratio,
                100 * read / first_read / ratio);
    if (!here.works.empty()) {
      std::printf(" %6.1f %8.1f %7.1f %6.1f", median(here.wakes) * 1e6, median(here.works) * 1e6,
                  median(here.unevens) * 1e6, median(here.merges) * 1e6);
    }
    std::printf("  %.0f GFLOP/s %.1f GB/s, %zu calls\n", unit, read, here.seconds.size());
  }
  std::fflush(stdout);
}

Options parse(int count, char** words, int& num_parts) {
  Options options = parse_options(
      count, words,
      "[--threads N[,N]...] [--parts N] [--calls N] [BATCH,LENGTH,HEADS,SEQ_LEN_Q]...",
      [&](const std::string& word, const char* value) {
        if (word != "--parts" || value == nullptr) return 0;
        num_parts = parse_count(value);
        return num_parts == 0 ? 0 : 2;
      });
  if (options.num_threads.empty()) {
    for (int n = 1; n <= omp_get_max_threads(); n *= 2) options.num_threads.push_back(n);
  }
  if (options.shapes.empty()) {
    options.shapes = {{1, 32768, 16, 1}, {8, 2048, 128, 1}, {1, 4096, 128, 1}, {4, 1024, 128, 2}};
  }
  return options;
}

}  // namespace
}  // namespace flashmla::bench

int main(int count, char** words) {
  using namespace flashmla::bench;
  int num_parts = 0;
  const Options options = parse(count, words, num_parts);
  PagePool pool;
  std::printf("%-16s %7s %8s %11s %6s %6s %6s %7s %6s %8s %7s %6s  ceilings\n", "shape", "threads",
              "us", "efficiency", "AMX", "read", "unit", "memory", "wake", "work", "uneven",
              "merge");
  for (const Shape& shape : options.shapes) measure(shape, pool, options, num_parts);
}
