// The planner on the device: one block, prefix sums over groups of rows, then a search a part. No
// loop runs over all rows, and no memory grows with the batch.
#include <cstdint>

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

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ PlanProblem problem, std::int32_t row_start_units) {
  __shared__ std::int64_t group_offset[kThreads + 1];
  const std::int32_t batch = problem.batch;
  const std::int32_t rows_per_group = (batch + kThreads - 1) / kThreads;
  const std::int32_t first = min(static_cast<std::int32_t>(threadIdx.x) * rows_per_group, batch);
  const std::int32_t end = min(first + rows_per_group, batch);
  const auto length_of = [&](std::int32_t row) {
    return problem.cache_seqlens[row * problem.cache_seqlens_stride];
  };

  std::int64_t cost = 0;
#pragma unroll 8
  for (std::int32_t row = first; row < end; ++row) {
    cost += schedule::row_cost(length_of(row), row_start_units);
  }
  std::int64_t total;
  std::int64_t offset = exclusive_sum(cost, &total);
  group_offset[threadIdx.x] = offset;
  if (threadIdx.x == 0) group_offset[kThreads] = total;
  const std::int64_t payload = schedule::payload_units(total, problem.num_parts, row_start_units);
  __syncthreads();

  for (std::int32_t part = threadIdx.x; part < problem.num_parts; part += kThreads) {
    const auto cut = [&](std::int64_t number) {
      return find_cut(number, payload, batch, group_offset, kThreads, rows_per_group,
                      row_start_units, length_of);
    };
    write_plan_row(problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields, cut(part),
                   cut(part + 1));
  }

  // Within the group first, then with what stands before it.
  std::int32_t splits = 0;
#pragma unroll 8
  for (std::int32_t row = first; row < end; ++row) {
    const std::int32_t length = length_of(row);
    splits += schedule::splits_of_row(offset, schedule::blocks_of_length(length), payload,
                                      row_start_units);
    offset += schedule::row_cost(length, row_start_units);
    problem.num_splits[row + 1] = splits;
  }
  std::int32_t total_splits;
  const std::int32_t before = exclusive_sum(splits, &total_splits);
  for (std::int32_t row = first; row < end; ++row) problem.num_splits[row + 1] += before;
  if (threadIdx.x == 0) problem.num_splits[0] = 0;
}

}  // namespace

cudaError_t launch_plan(const PlanProblem& problem, std::int32_t row_start_units,
                        cudaStream_t stream) {
  plan_kernel<<<1, kThreads, 0, stream>>>(problem, row_start_units);
  return cudaPeekAtLastError();
}

}  // namespace flashmla::cuda
