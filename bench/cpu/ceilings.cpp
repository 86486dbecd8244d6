#include "ceilings.hpp"

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <vector>

#include <omp.h>

namespace flashmla::bench {
namespace {

// The sum of what the threads reach: each counts its own work over its own time.
double rate_of_threads(int num_threads, const std::function<double()>& rate_of_one) {
  double total = 0.0;
#pragma omp parallel num_threads(num_threads) reduction(+ : total)
  total += rate_of_one();
  return total;
}

struct alignas(64) TileConfiguration {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int kTileBytes = 1024;

double amx_bf16_rate_of_one(double microseconds) {
  alignas(64) std::byte tiles[4 * kTileBytes] = {};
  const TileConfiguration configuration;
  asm volatile("ldtilecfg %0" ::"m"(configuration));
  constexpr int kStepsAtOnce = 64;
  constexpr double kFlopPerStep = 4 * 2.0 * 16 * 16 * 32;
  double steps = 0;
  const double begin = now_seconds();
  double elapsed = 0;
  do {
    for (int step = 0; step < kStepsAtOnce; ++step) {
      asm volatile(
          "tileloadd (%0,%1,1), %%tmm4\n\t"
          "tileloadd 1024(%0,%1,1), %%tmm6\n\t"
          "tileloadd 2048(%0,%1,1), %%tmm7\n\t"
          "tileloadd 3072(%0,%1,1), %%tmm5\n\t"
          "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
          "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
          "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
          "tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(tiles),
          "r"(std::int64_t{64})
          : "memory");
    }
    steps += kStepsAtOnce;
    elapsed = now_seconds() - begin;
  } while (elapsed < microseconds * 1e-6);
  asm volatile("tilerelease");
  return steps * kFlopPerStep / elapsed * 1e-9;
}

// Twelve chains hide the latency of four cycles on two ports, with room to spare.
constexpr int kChains = 12;
// Enough between two looks at the clock, which take as long as some thirty rounds.
constexpr int kFmaRounds = 1024;

__attribute__((target("avx512f"))) double avx512_fma_rate_of_one(double microseconds) {
  __m512 chains[kChains];
  for (__m512& chain : chains) chain = _mm512_set1_ps(1.0f);
  __m512 factor = _mm512_set1_ps(0.999f);
  double rounds = 0;
  const double begin = now_seconds();
  double elapsed = 0;
  do {
    for (int round = 0; round < kFmaRounds; ++round) {
#pragma GCC unroll 12
      for (__m512& chain : chains) chain = _mm512_fmadd_ps(chain, factor, factor);
    }
    // Once a batch: a use of a chain inside the loop would make the compiler store it there.
    for (__m512& chain : chains) asm volatile("" : "+v"(chain));
    rounds += kFmaRounds;
    elapsed = now_seconds() - begin;
  } while (elapsed < microseconds * 1e-6);
  return rounds * kChains * 16 * 2 / elapsed * 1e-9;
}

__attribute__((target("avx2,fma"))) double avx2_fma_rate_of_one(double microseconds) {
  __m256 chains[kChains];
  for (__m256& chain : chains) chain = _mm256_set1_ps(1.0f);
  __m256 factor = _mm256_set1_ps(0.999f);
  double rounds = 0;
  const double begin = now_seconds();
  double elapsed = 0;
  do {
    for (int round = 0; round < kFmaRounds; ++round) {
#pragma GCC unroll 12
      for (__m256& chain : chains) chain = _mm256_fmadd_ps(chain, factor, factor);
    }
    // Once a batch: a use of a chain inside the loop would make the compiler store it there.
    for (__m256& chain : chains) asm volatile("" : "+x"(chain));
    rounds += kFmaRounds;
    elapsed = now_seconds() - begin;
  } while (elapsed < microseconds * 1e-6);
  return rounds * kChains * 8 * 2 / elapsed * 1e-9;
}

// Loads and nothing else, as written: what a compiler makes of a sum decides a fifth of the rate.
void read_avx512(const std::byte* bytes, std::size_t count) {
  for (const std::byte* end = bytes + count / 256 * 256; bytes != end; bytes += 256) {
    asm volatile(
        "vmovups (%0), %%zmm0\n\t"
        "vmovups 64(%0), %%zmm1\n\t"
        "vmovups 128(%0), %%zmm2\n\t"
        "vmovups 192(%0), %%zmm3" ::"r"(bytes)
        : "xmm0", "xmm1", "xmm2", "xmm3", "memory");
  }
}

void read_avx2(const std::byte* bytes, std::size_t count) {
  for (const std::byte* end = bytes + count / 128 * 128; bytes != end; bytes += 128) {
    asm volatile(
        "vmovups (%0), %%ymm0\n\t"
        "vmovups 32(%0), %%ymm1\n\t"
        "vmovups 64(%0), %%ymm2\n\t"
        "vmovups 96(%0), %%ymm3" ::"r"(bytes)
        : "xmm0", "xmm1", "xmm2", "xmm3", "memory");
  }
}

}  // namespace

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") != 0;
}

bool has_amx_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  asm volatile("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(0));
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

double amx_bf16_rate(int num_threads, double microseconds) {
  return rate_of_threads(num_threads, [=] { return amx_bf16_rate_of_one(microseconds); });
}

double avx512_fma_rate(int num_threads, double microseconds) {
  return rate_of_threads(num_threads, [=] { return avx512_fma_rate_of_one(microseconds); });
}

double avx2_fma_rate(int num_threads, double microseconds) {
  return rate_of_threads(num_threads, [=] { return avx2_fma_rate_of_one(microseconds); });
}

double read_rate(int num_threads, std::span<const std::byte* const> runs, std::size_t bytes_each) {
  const auto read = has_avx512() ? read_avx512 : read_avx2;
  const double begin = now_seconds();
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (std::size_t i = 0; i < runs.size(); ++i) read(runs[i], bytes_each);
  return static_cast<double>(runs.size() * bytes_each) / (now_seconds() - begin) * 1e-9;
}

}  // namespace flashmla::bench
