// What this machine can do at most, measured beside what is compared with it. Rates change from
// second to second on a shared machine: use these in the same process, around each timed call.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace flashmla::bench {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool has_amx_bf16();  // asks the operating system for the tiles, too
bool has_avx512();

// GFLOP/s of `num_threads` OpenMP threads together, each busy for about `microseconds`.
//
// Two by two bf16 tiles from the first-level cache.
double amx_bf16_rate(int num_threads, double microseconds);
// Independent chains of float multiply-adds, registers only.
double avx512_fma_rate(int num_threads, double microseconds);
double avx2_fma_rate(int num_threads, double microseconds);

// GB/s of plain loads over `runs` of `bytes_each` bytes, dealt out to the threads in order.
double read_rate(int num_threads, std::span<const std::byte* const> runs, std::size_t bytes_each);

}  // namespace flashmla::bench
