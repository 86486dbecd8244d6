// Constants of the planner's cost model, by device. See docs/scheduling.md for their meaning and
// bench/ for the measurement of each.
#pragma once

#include <cstdint>

namespace flashmla::tuning {

// What starting a row costs, in units of 1/8 block (1 to 8).
// CPU: packing the queries and writing the result of a row takes about an eighth of the time of a
// block of 64 tokens, for 16 heads and for 128.
inline constexpr std::int32_t kCpuRowStartUnits = 1;
// CUDA: see docs/performance/h200.md.
inline constexpr std::int32_t kCudaRowStartUnits = 4;

}  // namespace flashmla::tuning
