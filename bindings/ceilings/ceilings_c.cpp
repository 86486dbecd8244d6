// C functions over the machine's ceilings: what the calling thread reaches alone, 0 where the
// processor lacks the unit.
#include "ceilings.hpp"

#include <array>

#define FLASHMLA_CEILING __attribute__((visibility("default")))

namespace bench = flashmla::bench;

extern "C" {

// GFLOP/s, measured for `microseconds`.
FLASHMLA_CEILING double flashmla_ceiling_amx_bf16(double microseconds) {
  return bench::has_amx_bf16() ? bench::amx_bf16_rate(1, microseconds) : 0.0;
}

FLASHMLA_CEILING double flashmla_ceiling_avx512_fma(double microseconds) {
  return bench::has_avx512() ? bench::avx512_fma_rate(1, microseconds) : 0.0;
}

FLASHMLA_CEILING double flashmla_ceiling_avx2_fma(double microseconds) {
  const bool available = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return available ? bench::avx2_fma_rate(1, microseconds) : 0.0;
}

// GB/s of plain loads over [data, data + bytes).
FLASHMLA_CEILING double flashmla_ceiling_read(const void* data, std::size_t bytes) {
  if (!__builtin_cpu_supports("avx2")) return 0.0;
  const std::array runs = {static_cast<const std::byte*>(data)};
  return bench::read_rate(1, runs, bytes);
}

}  // extern "C"
