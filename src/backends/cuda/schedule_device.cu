// The planner on the device: one block, prefix sums over groups of rows, then a search a part. No
// loop runs over all rows, and no memory grows with the batch.
#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/plan_cut.hpp"

namespace flashmla::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// Exclusive prefix sum over the block's threads; `total` is the sum of all.
template <class Number>
__device__ Number exclusive_sum(Number value, Number* total) {
  __shared__ Number warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Number inclusive = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Number other = __shfl_up_sync(~0u, inclusive, lanes);
    if (lane >= lanes) inclusive += other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  const Number mine = warp_sums[lane];
  Number sums = mine;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const Number other = __shfl_up_sync(~0u, sums, lanes);
    if (lane >= lanes) sums += other;
  }
  *total = __shfl_sync(~0u, sums, 31);
  return inclusive - value + __shfl_sync(~0u, sums - mine, warp);
}

// kRows: of a thread, kept in registers; 0: any number, read again where they are needed.
template <int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_kernel(const __grid_constant__ PlanProblem problem, std::int32_t row_start_units) {
  __shared__ std::int64_t group_offset[kThreads + 1];
  __shared__ std::int64_t shared_payload;
  __shared__ Divisor shared_divisor;
  const std::int32_t batch = problem.batch;
  const std::int32_t rows_per_group = kRows > 0 ? kRows : (batch + kThreads - 1) / kThreads;
  const std::int32_t first = min(static_cast<std::int32_t>(threadIdx.x) * rows_per_group, batch);
  const std::int32_t count = min(rows_per_group, batch - first);
  const auto length_of = [&](std::int32_t row) {
    return problem.cache_seqlens[row * problem.cache_seqlens_stride];
  };
  std::int32_t blocks[kRows > 0 ? kRows : 1];
  const auto for_rows = [&](const auto& body) {
    if constexpr (kRows > 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i < count) body(i, blocks[i]);
      }
    } else {
#pragma unroll 1
      for (std::int32_t i = 0; i < count; ++i) {
        body(i, schedule::blocks_of_length(length_of(first + i)));
      }
    }
  };
  if constexpr (kRows > 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      blocks[i] = i < count ? schedule::blocks_of_length(length_of(first + i)) : 0;
    }
  }
  const auto cost_of = [&](std::int32_t row_blocks) {
    return row_start_units + schedule::kUnitsPerBlock * row_blocks;
  };

  std::int64_t cost = 0;
  for_rows([&](std::int32_t, std::int32_t row_blocks) { cost += cost_of(row_blocks); });
  std::int64_t total;
  std::int64_t offset = exclusive_sum(cost, &total);
  group_offset[threadIdx.x] = offset;
  if (threadIdx.x == 0) group_offset[kThreads] = total;
  // Divisions are slow: one thread does them for all.
  if (threadIdx.x == 0) {
    shared_payload = schedule::payload_units(total, problem.num_parts, row_start_units);
    // Not used when the total needs more than 31 bits.
    shared_divisor = Divisor(static_cast<std::int32_t>(
        total < (std::int64_t{1} << 31) ? shared_payload : std::int64_t{1}));
  }
  __syncthreads();
  const std::int64_t payload = shared_payload;

  for (std::int32_t part = threadIdx.x; part < problem.num_parts; part += kThreads) {
    const auto cut = [&](std::int64_t number) {
      return find_cut(number, payload, batch, group_offset, kThreads, rows_per_group,
                      row_start_units, length_of);
    };
    write_plan_row(problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields, cut(part),
                   cut(part + 1));
  }

  // Splits before each row: of its group first.
  std::int32_t splits = 0;
  const auto count_splits = [&](const auto& divide) {
    for_rows([&](std::int32_t i, std::int32_t row_blocks) {
      splits += splits_of_row(offset, row_blocks, row_start_units, divide);
      offset += cost_of(row_blocks);
      if constexpr (kRows > 0) {
        blocks[i] = splits;
      } else {
        problem.num_splits[first + i + 1] = splits;
      }
    });
  };
  if (total < (std::int64_t{1} << 31)) {
    const Divisor divisor = shared_divisor;
    count_splits(
        [&](std::int64_t units) { return divisor.quotient(static_cast<std::int32_t>(units)); });
  } else {
    count_splits([&](std::int64_t units) { return units / payload; });
  }
  std::int32_t total_splits;
  const std::int32_t before = exclusive_sum(splits, &total_splits);
  for (std::int32_t i = 0; i < count; ++i) {
    if constexpr (kRows == 0) problem.num_splits[first + i + 1] += before;
  }
  if constexpr (kRows > 0) {
    for_rows([&](std::int32_t i, std::int32_t row_splits) {
      problem.num_splits[first + i + 1] = before + row_splits;
    });
  }
  if (threadIdx.x == 0) problem.num_splits[0] = 0;
}

}  // namespace

cudaError_t launch_plan(const PlanProblem& problem, std::int32_t row_start_units,
                        cudaStream_t stream) {
  if (problem.batch <= kThreads) {
    plan_kernel<1><<<1, kThreads, 0, stream>>>(problem, row_start_units);
  } else if (problem.batch <= 8 * kThreads) {
    plan_kernel<8><<<1, kThreads, 0, stream>>>(problem, row_start_units);
  } else {
    plan_kernel<0><<<1, kThreads, 0, stream>>>(problem, row_start_units);
  }
  return cudaPeekAtLastError();
}

}  // namespace flashmla::cuda
