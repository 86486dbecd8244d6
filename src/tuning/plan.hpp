// Constants of the planner's cost model, by device. See docs/scheduling.md for their meaning and
// docs/performance for the measurement of each: `scaling_bench` of the CPU, `cuda_bench lens`,
// `cuda_bench mixed` and `cuda_bench 4096` of a GPU.
#pragma once

#include <cstdint>

namespace flashmla::tuning {

inline constexpr std::int32_t kMostRowStartUnits = 64;

// What a device is like, to its planner.
struct PlanModel {
  // What starting a row costs, in units of 1/8 block: 1 to kMostRowStartUnits.
  std::int32_t row_start_units;
  std::int32_t least_blocks;     // of a share of a row: less is not worth its merge
  bool may_be_even;              // whether rows that are alike are divided evenly
  std::int32_t least_units = 0;  // between two cuts, where that is more than the two above ask for
};

// CPU: packing the queries and writing the result of a row takes about an eighth of the time of a
// block of 64 tokens, for 16 heads and for 128. A merge costs little, so the line is always cut.
// But with more query rows than a tile has, threads can share the rows instead, which beats shares
// of one block by a quarter to a half (docs/performance/cpu.md), so a lone row has shares of two.
// With more rows that would leave some parts with two blocks and two starts, too far above the
// mean.
inline constexpr std::int32_t kCpuFewQueryRows = 16;
constexpr PlanModel cpu_plan(std::int32_t batch, std::int64_t query_rows) {
  return {1, 1, false, batch == 1 && query_rows > kCpuFewQueryRows ? 16 : 0};
}

// CUDA: loading queries and writing a result takes about half a block's time. With more query rows
// than this it takes two; counted as more than one, parts of short rows would leave the others more
// blocks than a plan's balance allows. And a partial result is then so large that a share of one
// block is not worth its merge (docs/performance/h200.md).
inline constexpr std::int32_t kCudaFewQueryRows = 32;
constexpr PlanModel cuda_plan(std::int64_t query_rows) {
  if (query_rows <= kCudaFewQueryRows) return {4, 1, true};
  return {8, 2, true};
}

static_assert(cpu_plan(1, 1).row_start_units <= kMostRowStartUnits &&
              cuda_plan(kCudaFewQueryRows).row_start_units <= kMostRowStartUnits &&
              cuda_plan(kCudaFewQueryRows + 1).row_start_units <= kMostRowStartUnits);

}  // namespace flashmla::tuning
