// The planner on the device: one block, prefix sums over groups of rows, then a search a part. No
// loop runs over all rows, and no memory grows with the batch.
//
// All of its code is fetched for the first time, which takes longer than to run it: what several
// warps need they all compute, rather than hand it from one to the others.
#include <cstdint>
#include <type_traits>

#include "backends/cuda/common/launch.cuh"
#include "backends/cuda/common/params.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/plan_cut.hpp"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "select/select.hpp"

namespace flashmla::cuda {
namespace {

using schedule::EvenPlan;
using schedule::PlanModel;

// Exclusive prefix sum over a warp; `total` is the sum of all.
template <int kLanes, class Number>
__device__ __forceinline__ Number exclusive_sum_of_warp(Number value, Number* total) {
  Number inclusive = value;
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    const Number other = __shfl_up_sync(~0u, inclusive, lanes);
    if (threadIdx.x % 32 >= lanes) inclusive += other;
  }
  *total = __shfl_sync(~0u, inclusive, kLanes - 1);
  return inclusive - value;
}

// The sum of what the warps before this one hold; `total` is that of all. sums: one a warp.
template <int kWarps, class Number>
__device__ __forceinline__ Number sum_of_warps_before(const Number* sums, Number* total = nullptr) {
  const int lane = threadIdx.x % 32;
  Number all;
  const Number before = exclusive_sum_of_warp<kWarps>(lane < kWarps ? sums[lane] : Number{0}, &all);
  if (total != nullptr) *total = all;
  return __shfl_sync(~0u, before, threadIdx.x / 32);
}

// Writes the parts. thread: of num_threads, all of their warps.
template <class Units, class BlocksOf>
__device__ __forceinline__ void write_parts(std::int32_t thread, std::int32_t num_threads,
                                            const PlanProblem& problem, const PlanModel& model,
                                            const EvenPlan& even, Units payload,
                                            const Units* group_offset, std::int32_t num_groups,
                                            std::int32_t rows_per_group,
                                            const BlocksOf& blocks_of) {
  const auto fields_of = [&](std::int32_t part) {
    return problem.plan_rows + static_cast<std::int64_t>(part) * kPlanRowFields;
  };
  if (even.rows_per_part > 0) {
#pragma unroll 1
    for (std::int32_t part = thread; part < problem.num_parts; part += num_threads) {
      schedule::write_even_part<Units>(fields_of(part), part, problem.batch, even, blocks_of);
    }
    return;
  }
  // A lane has the cut that begins its part, the next lane the one that ends it.
  constexpr int kPartsOfWarp = 31;
  const std::int32_t lane = thread % 32;
#pragma unroll 1
  for (std::int32_t first = thread / 32 * kPartsOfWarp; first < problem.num_parts;
       first += num_threads / 32 * kPartsOfWarp) {
    const std::int32_t part = first + lane;
    const schedule::Cut begin =
        find_cut(min(part, problem.num_parts), payload, problem.batch, group_offset, num_groups,
                 rows_per_group, model.row_start_units, blocks_of);
    const schedule::Cut end{__shfl_down_sync(~0u, begin.row, 1),
                            __shfl_down_sync(~0u, begin.block, 1), 0,
                            __shfl_down_sync(~0u, begin.blocks_before, 1)};
    if (lane < kPartsOfWarp && part < problem.num_parts) {
      schedule::write_part(fields_of(part), begin, end);
    }
  }
}

// How a block plans up to kThreads * kRows rows in 32 bits: so many threads have kRows rows each
// and write num_splits; the warps after them write the parts meanwhile.
template <int kThreads, int kRows>
class SmallPlanner {
  static constexpr int kWarps = kThreads / 32;

 public:
  static constexpr int kPartThreads = 160;

  struct Shared {
    alignas(2 * kRows) std::uint16_t row_blocks[kThreads * kRows];
    alignas(2 * kRows) std::uint16_t row_splits[kThreads * kRows];  // of the thread's rows so far
    std::int32_t group_offset[kThreads + 1];
    std::int32_t warp_units[kWarps], warp_most[kWarps], warp_splits[kWarps];
  };

  __device__ SmallPlanner(const PlanProblem& problem, const PlanModel& model, Shared& shared)
      : problem_(problem), model_(model), shared_(shared) {}

  // False, and nothing is written, if the rows cost too much for 32 bits.
  __device__ __forceinline__ bool run(const EvenPlan& even_plan) {
    const bool has_rows = threadIdx.x < kThreads;
    std::int32_t blocks[kRows], offset = 0;
    if (has_rows) {
      const bool fit = read_rows(blocks);
      offset = sum_up(blocks, fit);
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const std::int32_t units = lane < kWarps ? shared_.warp_units[lane] : 0;
    if (__any_sync(~0u, units < 0)) return false;
    std::int32_t total;
    const std::int32_t before = exclusive_sum_of_warp<kWarps>(units, &total);
    if (has_rows) {
      offset += __shfl_sync(~0u, before, threadIdx.x / 32);
      shared_.group_offset[threadIdx.x] = offset;
      if (threadIdx.x == 0) shared_.group_offset[kThreads] = total;
    }
    __syncthreads();
    const std::int32_t most_blocks =
        __reduce_max_sync(~0u, lane < kWarps ? shared_.warp_most[lane] : 0);
    const std::int32_t payload = schedule::payload_units(total, problem_.num_parts, model_);
    const EvenPlan even = schedule::if_balanced(even_plan, total, most_blocks, payload, model_);
    if (has_rows) {
      write_splits(blocks, offset, payload, even);
    } else {
      const auto blocks_of = [&](std::int32_t row) -> std::int32_t {
        return shared_.row_blocks[row];
      };
      write_parts<std::int32_t>(threadIdx.x - kThreads, kPartThreads, problem_, model_, even,
                                payload, shared_.group_offset, kThreads, kRows, blocks_of);
    }
    return true;
  }

 private:
  static constexpr std::int32_t kMostBlocks = (1 << 16) - 1;  // of a thread's rows
  static_assert(kThreads * (std::int64_t{schedule::kUnitsPerBlock} * kMostBlocks +
                            tuning::kMostRowStartUnits * kRows) <
                1 << 30);
  static constexpr std::int32_t kTooMany = -1;
  enum NamedBarrier { kRowThreads = 1 };
  struct alignas(2 * kRows) OfThread {
    std::uint16_t rows[kRows];
  };

  // A warp has 32 * kRows rows in sequence, a thread of it kRows; it reads and writes global memory
  // so that neighbours have neighbouring rows.
  static __device__ __forceinline__ std::int32_t row_in_order(int i) {
    return threadIdx.x / 32 * 32 * kRows + 32 * i + threadIdx.x % 32;
  }
  __device__ __forceinline__ std::int32_t count() const {
    return min(max(problem_.batch - static_cast<std::int32_t>(threadIdx.x) * kRows, 0), kRows);
  }

  // Into shared memory, and this thread's into registers. Whether all of the warp's fit.
  __device__ __forceinline__ bool read_rows(std::int32_t (&blocks)[kRows]) const {
    if constexpr (kRows >= 16) {
      if (is_in_quads()) return read_quads(blocks);
    }
    const std::int32_t* length =
        problem_.cache_seqlens + row_in_order(0) * problem_.cache_seqlens_stride;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      blocks[i] = schedule::blocks_of_length(row_in_order(i) < problem_.batch ? *length : 0);
      length += 32 * problem_.cache_seqlens_stride;
    }
    bool fit = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      fit &= blocks[i] <= kMostBlocks;
      shared_.row_blocks[row_in_order(i)] = static_cast<std::uint16_t>(blocks[i]);
    }
    fit = __all_sync(~0u, fit);
    __syncwarp();
    const OfThread own = reinterpret_cast<const OfThread*>(shared_.row_blocks)[threadIdx.x];
#pragma unroll
    for (int i = 0; i < kRows; ++i) blocks[i] = own.rows[i];
    return fit;
  }

  // Whether lengths can be read four at a time, and the warp has all of its rows.
  __device__ __forceinline__ bool is_in_quads() const {
    const std::int32_t end = (static_cast<std::int32_t>(threadIdx.x) / 32 + 1) * 32 * kRows;
    return problem_.cache_seqlens_stride == 1 && end <= problem_.batch &&
           reinterpret_cast<std::uintptr_t>(problem_.cache_seqlens) % sizeof(int4) == 0;
  }

  // The same as read_rows(), each thread its own rows.
  __device__ __forceinline__ bool read_quads(std::int32_t (&blocks)[kRows]) const {
    const int4* lengths =
        reinterpret_cast<const int4*>(problem_.cache_seqlens) + threadIdx.x * (kRows / 4);
    int4 quads[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) quads[i] = lengths[i];
    bool fit = true;
    OfThread own;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int4& quad = quads[i / 4];
      const std::int32_t of_quad[4] = {quad.x, quad.y, quad.z, quad.w};
      blocks[i] = schedule::blocks_of_length(of_quad[i % 4]);
      fit &= blocks[i] <= kMostBlocks;
      own.rows[i] = static_cast<std::uint16_t>(blocks[i]);
    }
    reinterpret_cast<OfThread*>(shared_.row_blocks)[threadIdx.x] = own;
    return __all_sync(~0u, fit);
  }

  // Leaves the sums of the warp. Returns the units of its rows before this thread's.
  __device__ __forceinline__ std::int32_t sum_up(const std::int32_t (&blocks)[kRows],
                                                 bool fit) const {
    std::int32_t sum = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum += blocks[i];
      most = max(most, blocks[i]);
    }
    fit = __all_sync(~0u, fit && sum <= kMostBlocks);
    std::int32_t units;
    const std::int32_t before = exclusive_sum_of_warp<32>(
        count() * model_.row_start_units + schedule::kUnitsPerBlock * sum, &units);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) {
      shared_.warp_units[threadIdx.x / 32] = fit ? units : kTooMany;
      shared_.warp_most[threadIdx.x / 32] = most;
    }
    return before;
  }

  __device__ __forceinline__ void write_splits(const std::int32_t (&blocks)[kRows],
                                               std::int32_t offset, std::int32_t payload,
                                               const EvenPlan& even) const {
    const std::int32_t start = model_.row_start_units;
    // To multiply by the inverse is worth the inverse's own division where there are many rows.
    const std::conditional_t<(kRows >= 8), Divisor, std::int32_t> divisor(payload);
    // Rows past the last count here, too: they come after all others, so nobody reads their sums.
    std::int32_t splits = 0;
    OfThread own;
    const auto add_up = [&](const auto& splits_of) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        splits += splits_of(blocks[i]);
        own.rows[i] = static_cast<std::uint16_t>(splits);
      }
    };
    if (even.rows_per_part > 0) {
      add_up([&](std::int32_t row_blocks) { return schedule::shares_of_row(row_blocks, even); });
    } else {
      add_up([&](std::int32_t row_blocks) {
        const std::int32_t here = schedule::splits_of_row(offset, row_blocks, divisor, start);
        offset += start + schedule::kUnitsPerBlock * row_blocks;
        return here;
      });
    }
    reinterpret_cast<OfThread*>(shared_.row_splits)[threadIdx.x] = own;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    std::int32_t of_warp;
    std::int32_t before = exclusive_sum_of_warp<32>(splits, &of_warp);
    if (lane == 0) shared_.warp_splits[warp] = of_warp;
    ptx::named_barrier_sync(kRowThreads, kThreads);
    before += sum_of_warps_before<kWarps>(shared_.warp_splits);
    if (threadIdx.x == 0) problem_.num_splits[0] = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t row = row_in_order(i);
      const std::int32_t before_owner = __shfl_sync(~0u, before, (32 * i + lane) / kRows);
      if (row < problem_.batch)
        problem_.num_splits[row + 1] = before_owner + shared_.row_splits[row];
    }
  }

  const PlanProblem& problem_;
  const PlanModel& model_;
  Shared& shared_;
};

// Plans any rows. They are read again where they are needed.
template <int kThreads>
__device__ __forceinline__ void plan_any_rows(const PlanProblem& problem, const PlanModel& model,
                                              const EvenPlan& even_plan) {
  constexpr int kWarps = kThreads / 32;
  __shared__ std::int64_t group_offset[kThreads + 1];
  __shared__ std::int64_t warp_units[kWarps];
  __shared__ std::int32_t warp_most[kWarps], warp_splits[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int32_t batch = problem.batch, start = model.row_start_units;
  const std::int32_t rows_per_group = rows_in_each_group(batch, kThreads);
  const auto [first, end] =
      rows_of_group(static_cast<std::int32_t>(threadIdx.x), rows_per_group, batch);
  const auto blocks_of = [&](std::int32_t row) {
    return schedule::blocks_of_length(problem.cache_seqlens[row * problem.cache_seqlens_stride]);
  };

  std::int64_t units = 0;
  std::int32_t most_blocks = 0;
#pragma unroll 4
  for (std::int32_t row = first; row < end; ++row) {
    const std::int32_t blocks = blocks_of(row);
    units += schedule::row_cost(blocks, start);
    most_blocks = max(most_blocks, blocks);
  }
  std::int64_t units_of_warp;
  std::int64_t offset = exclusive_sum_of_warp<32>(units, &units_of_warp);
  most_blocks = __reduce_max_sync(~0u, most_blocks);
  if (lane == 0) {
    warp_units[warp] = units_of_warp;
    warp_most[warp] = most_blocks;
  }
  __syncthreads();
  std::int64_t total;
  offset += sum_of_warps_before<kWarps>(warp_units, &total);
  most_blocks = __reduce_max_sync(~0u, lane < kWarps ? warp_most[lane] : 0);
  group_offset[threadIdx.x] = offset;
  if (threadIdx.x == 0) group_offset[kThreads] = total;

  const std::int64_t payload = schedule::payload_units(total, problem.num_parts, model);
  const EvenPlan even = schedule::if_balanced(even_plan, total, most_blocks, payload, model);
  const bool is_even = even.rows_per_part > 0;

  // Splits of the rows before each row: of its group first.
  std::int32_t splits = 0;
#pragma unroll 4
  for (std::int32_t row = first; row < end; ++row) {
    const std::int32_t blocks = blocks_of(row);
    splits += is_even ? schedule::shares_of_row(blocks, even)
                      : schedule::splits_of_row(offset, blocks, payload, start);
    offset += schedule::row_cost(blocks, start);
    problem.num_splits[row + 1] = splits;
  }
  std::int32_t splits_of_warp;
  std::int32_t splits_before = exclusive_sum_of_warp<32>(splits, &splits_of_warp);
  if (lane == 0) warp_splits[warp] = splits_of_warp;
  __syncthreads();
  splits_before += sum_of_warps_before<kWarps>(warp_splits);
  for (std::int32_t row = first; row < end; ++row) problem.num_splits[row + 1] += splits_before;
  if (threadIdx.x == 0) problem.num_splits[0] = 0;

  write_parts<std::int64_t>(threadIdx.x, kThreads, problem, model, even, payload, group_offset,
                            kThreads, rows_per_group, blocks_of);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    plan_any_rows_kernel(const __grid_constant__ PlanProblem problem,
                         const __grid_constant__ PlanModel model,
                         const __grid_constant__ EvenPlan even_plan) {
  // What reads the plan waits for the end of this grid.
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  plan_any_rows<kThreads>(problem, model, even_plan);
}

template <int kThreads, int kRows>
__global__ void __launch_bounds__(kThreads + SmallPlanner<kThreads, kRows>::kPartThreads, 1)
    plan_rows_kernel(const __grid_constant__ PlanProblem problem,
                     const __grid_constant__ PlanModel model,
                     const __grid_constant__ EvenPlan even_plan) {
  using Planner = SmallPlanner<kThreads, kRows>;
  __shared__ typename Planner::Shared shared;
  ptx::allow_next_grid();
  ptx::wait_for_previous_grid();
  if (Planner(problem, model, shared).run(even_plan)) return;
  plan_any_rows<kThreads + Planner::kPartThreads>(problem, model, even_plan);
}

template <int kThreads, int kRows>
cudaError_t launch_rows(const PlanProblem& problem, const PlanModel& model,
                        const EvenPlan& even_plan, cudaStream_t stream) {
  return launch_overlapping(plan_rows_kernel<kThreads, kRows>, 1,
                            kThreads + SmallPlanner<kThreads, kRows>::kPartThreads, 0, stream,
                            problem, model, even_plan);
}

}  // namespace

cudaError_t launch_plan(const PlanProblem& problem, const PlanModel& model, cudaStream_t stream) {
  const EvenPlan even_plan = schedule::even_plan_of_batch(problem.batch, problem.num_parts, model);
  // With more parts a product might not fit in 32 bits, nor the splits of a thread's rows in 16.
  if (problem.num_parts <= select::kCudaMaxParts) {
    if (problem.batch <= 256) return launch_rows<256, 1>(problem, model, even_plan, stream);
    if (problem.batch <= 1024) return launch_rows<256, 4>(problem, model, even_plan, stream);
    if (problem.batch <= 8 * 1024) return launch_rows<512, 16>(problem, model, even_plan, stream);
  }
  constexpr int kThreads = 1024;
  return launch_overlapping(plan_any_rows_kernel<kThreads>, 1, kThreads, 0, stream, problem, model,
                            even_plan);
}

}  // namespace flashmla::cuda
