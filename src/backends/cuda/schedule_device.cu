// The planner on the device: one block, prefix sums over groups of rows, then a search a part. No
// loop runs over all rows, and no memory grows with the batch.
#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/plan_cut.hpp"

namespace flashmla::cuda {
namespace {

// Exclusive prefix sum over the block's threads; `total` is the sum of all.
template <int kThreads, class Number>
__device__ Number exclusive_sum(Number value, Number* total) {
  constexpr int kWarps = kThreads / 32;
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
  const Number mine = lane < kWarps ? warp_sums[lane] : Number{0};
  Number sums = mine;
#pragma unroll
  for (int lanes = 1; lanes < kWarps; lanes *= 2) {
    const Number other = __shfl_up_sync(~0u, sums, lanes);
    if (lane >= lanes) sums += other;
  }
  *total = __shfl_sync(~0u, sums, kWarps - 1);
  return inclusive - value + __shfl_sync(~0u, sums - mine, warp);
}

// What follows from all rows together.
struct Division {
  std::int64_t payload;
  schedule::EvenPlan even;
  Divisor divisor;  // by the payload, of units below 2^31
};

// Place of a row in shared memory: each thread of a warp has eight in sequence, and they lie in
// different banks.
template <int kRows>
__device__ __forceinline__ std::int32_t place_of(std::int32_t row) {
  return kRows > 1 ? row + row / 32 : row;
}

// kRows: of a thread, kept in shared memory; 0: any number, read again where they are needed.
template <int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_kernel(const __grid_constant__ PlanProblem problem,
                const __grid_constant__ schedule::PlanModel model) {
  __shared__ std::int64_t group_offset[kThreads + 1];
  __shared__ std::int32_t row_blocks[kRows > 0 ? kThreads * kRows * 33 / 32 : 1];
  __shared__ std::int32_t warp_most[kThreads / 32];
  __shared__ PlanCut cuts[kThreads];
  __shared__ Division division;
  const std::int32_t batch = problem.batch, row_start_units = model.row_start_units;
  const std::int32_t rows_per_group = kRows > 0 ? kRows : (batch + kThreads - 1) / kThreads;
  const std::int32_t first = min(static_cast<std::int32_t>(threadIdx.x) * rows_per_group, batch);
  const std::int32_t count = min(rows_per_group, batch - first);
  if constexpr (kRows > 0) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t row = i * kThreads + threadIdx.x;
      if (row < batch) {
        row_blocks[place_of<kRows>(row)] =
            schedule::blocks_of_length(problem.cache_seqlens[row * problem.cache_seqlens_stride]);
      }
    }
    __syncthreads();
  }
  const auto blocks_of = [&](std::int32_t row) {
    if constexpr (kRows > 0) return row_blocks[place_of<kRows>(row)];
    return schedule::blocks_of_length(problem.cache_seqlens[row * problem.cache_seqlens_stride]);
  };

  std::int64_t cost = 0;
  std::int32_t most_blocks = 0;
#pragma unroll 4
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t blocks = blocks_of(first + i);
    cost += schedule::row_cost(blocks, row_start_units);
    most_blocks = max(most_blocks, blocks);
  }
  most_blocks = __reduce_max_sync(~0u, most_blocks);
  if (threadIdx.x % 32 == 0) warp_most[threadIdx.x / 32] = most_blocks;
  std::int64_t total;
  std::int64_t offset = exclusive_sum<kThreads>(cost, &total);  // a barrier, after which...
  group_offset[threadIdx.x] = offset;
  // Divisions are slow: one thread does them for all.
  if (threadIdx.x < 32) {
    most_blocks = threadIdx.x < kThreads / 32 ? warp_most[threadIdx.x] : 0;  // ...this is whole
    most_blocks = __reduce_max_sync(~0u, most_blocks);
    if (threadIdx.x == 0) {
      group_offset[kThreads] = total;
      const std::int64_t payload = schedule::payload_units(total, problem.num_parts, model);
      division.payload = payload;
      division.even =
          schedule::even_plan(batch, problem.num_parts, total, most_blocks, payload, model);
      // To divide by the payload twice a row: worth its own division where a thread has several.
      if (kRows != 1 && division.even.rows_per_part == 0 && total < (std::int64_t{1} << 31)) {
        division.divisor = Divisor(static_cast<std::int32_t>(payload));
      }
    }
  }
  __syncthreads();
  const std::int64_t payload = division.payload;
  const schedule::EvenPlan even = division.even;
  const bool is_even = even.rows_per_part > 0;

  const auto fields_of = [&](std::int32_t part) {
    return problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields;
  };
  if (is_even) {
    for (std::int32_t part = threadIdx.x; part < problem.num_parts; part += kThreads) {
      schedule::write_even_part(fields_of(part), part, batch, even, model, blocks_of);
    }
  } else {
    // A part lies between two cuts, so that kThreads cuts give one part fewer.
    for (std::int32_t base = 0; base < problem.num_parts; base += kThreads - 1) {
      const std::int32_t part = base + threadIdx.x;
      if (part <= problem.num_parts) {
        cuts[threadIdx.x] = find_cut(part, payload, batch, group_offset, kThreads, rows_per_group,
                                     row_start_units, blocks_of);
      }
      __syncthreads();
      if (threadIdx.x < kThreads - 1 && part < problem.num_parts) {
        write_plan_row(fields_of(part), cuts[threadIdx.x], cuts[threadIdx.x + 1]);
      }
      __syncthreads();
    }
  }

  // Splits of the rows before each row: of its group first.
  std::int32_t splits = 0;
  const auto count_splits = [&](const auto& splits_of) {
#pragma unroll 4
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t blocks = blocks_of(first + i);
      splits += splits_of(blocks);
      offset += schedule::row_cost(blocks, row_start_units);
      if constexpr (kRows > 0) {
        row_blocks[place_of<kRows>(first + i)] = splits;
      } else {
        problem.num_splits[first + i + 1] = splits;
      }
    }
  };
  // All have read the blocks of other threads' rows.
  __syncthreads();
  if (is_even) {
    count_splits([&](std::int32_t blocks) {
      return schedule::shares_of_row(blocks, even.shares_per_row, model);
    });
  } else if (kRows == 1 && total < (std::int64_t{1} << 31)) {
    count_splits([&](std::int32_t blocks) {
      return splits_of_row(offset, blocks, row_start_units, [&](std::int64_t units) {
        return static_cast<std::uint32_t>(units) / static_cast<std::uint32_t>(payload);
      });
    });
  } else if (total < (std::int64_t{1} << 31)) {
    const Divisor divisor = division.divisor;
    count_splits([&](std::int32_t blocks) {
      return splits_of_row(offset, blocks, row_start_units, [&](std::int64_t units) {
        return divisor.quotient(static_cast<std::int32_t>(units));
      });
    });
  } else {
    count_splits([&](std::int32_t blocks) {
      return splits_of_row(offset, blocks, row_start_units,
                           [&](std::int64_t units) { return units / payload; });
    });
  }
  std::int32_t total_splits;
  const std::int32_t before = exclusive_sum<kThreads>(splits, &total_splits);
  if constexpr (kRows > 1) {
    // Neighbouring threads write neighbouring numbers.
    __shared__ std::int32_t splits_before[kThreads];
    splits_before[threadIdx.x] = before;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t row = i * kThreads + threadIdx.x;
      if (row < batch) {
        problem.num_splits[row + 1] = splits_before[row / kRows] + row_blocks[place_of<kRows>(row)];
      }
    }
  } else {
    for (std::int32_t i = 0; i < count; ++i) {
      std::int32_t& splits_to = problem.num_splits[first + i + 1];
      splits_to = before + (kRows == 1 ? splits : splits_to);
    }
  }
  if (threadIdx.x == 0) problem.num_splits[0] = 0;
}

}  // namespace

cudaError_t launch_plan(const PlanProblem& problem, const schedule::PlanModel& model,
                        cudaStream_t stream) {
  if (problem.batch <= 256) {
    plan_kernel<256, 1><<<1, 256, 0, stream>>>(problem, model);
  } else if (problem.batch <= 1024) {
    plan_kernel<1024, 1><<<1, 1024, 0, stream>>>(problem, model);
  } else if (problem.batch <= 8 * 1024) {
    plan_kernel<1024, 8><<<1, 1024, 0, stream>>>(problem, model);
  } else {
    plan_kernel<1024, 0><<<1, 1024, 0, stream>>>(problem, model);
  }
  return cudaPeekAtLastError();
}

}  // namespace flashmla::cuda
