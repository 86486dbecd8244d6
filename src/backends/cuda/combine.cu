// The merge of rows that several parts walked, and merge_attention_states.
#include <cstdint>

#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/ptx/launch.cuh"

namespace flashmla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksAMultiprocessor = 3;
constexpr int kColumns = 64;        // two a lane
constexpr int kLoadsInFlight = 16;  // of a lane

// Shared memory of a combine block, ints. Everything is indexed by slot of the partial results.
struct CombineShared {
  std::int32_t* fragment_row;  // (2 * num_parts): the row whose fragment the slot holds, or -1
  std::int32_t* merged;  // (2 * num_parts): rows to merge, in an order that all blocks agree on
  std::int32_t* slots;   // (kWarps, num_parts): a warp's list of one row's slots
};

__device__ CombineShared carve(std::int32_t* memory, std::int32_t num_parts) {
  return {memory, memory + 2 * num_parts, memory + 4 * num_parts};
}

// Which slot holds what follows from the plan alone. Returns the number of rows to merge: those of
// which some part walks the first block and not all.
__device__ std::int32_t list_fragments(const CallShape& shape, const CombineShared& shared) {
  __shared__ std::int32_t warp_count[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int32_t listed = 0;
  for (std::int32_t base = 0; base < shape.num_parts; base += kThreads) {
    const std::int32_t index = base + threadIdx.x;
    std::int32_t rows[2] = {-1, -1};  // of which the part leaves a fragment
    bool is_first[2] = {false, false};
    if (index < shape.num_parts) {
      const Part part = read_part(shape, index);
      if (part.begin_row <= part.end_row) {
        const std::int32_t candidates[2] = {part.begin_row, part.end_row};
        const std::int32_t lengths[2] = {row_length(shape, part.begin_row),
                                         row_length(shape, part.end_row)};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i == 1 && part.begin_row == part.end_row) continue;
          const Share share = share_of_row(part, candidates[i], lengths[i]);
          if (!share.is_fragment()) continue;
          rows[i] = candidates[i];
          is_first[i] = share.begin_block == 0;
        }
      }
      shared.fragment_row[2 * index] = rows[0];
      shared.fragment_row[2 * index + 1] = rows[1];
    }
    const std::uint32_t begins = __ballot_sync(~0u, is_first[0]);
    const std::uint32_t ends = __ballot_sync(~0u, is_first[1]);
    if (lane == 0) warp_count[warp] = __popc(begins) + __popc(ends);
    __syncthreads();
    std::int32_t before = listed;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) before += warp_count[i];
      listed += warp_count[i];
    }
    const std::uint32_t lower = (1u << lane) - 1;
    if (is_first[0]) shared.merged[before + __popc(begins & lower)] = rows[0];
    if (is_first[1]) shared.merged[before + __popc(begins) + __popc(ends & lower)] = rows[1];
    __syncthreads();
  }
  return listed;
}

// Slots of the fragments of a row, in slot order, into this warp's list.
__device__ std::int32_t list_slots(const CallShape& shape, const CombineShared& shared,
                                   std::int32_t row, std::int32_t* list) {
  const int lane = threadIdx.x % 32;
  std::int32_t count = 0;
  for (std::int32_t base = 0; base < 2 * shape.num_parts; base += 32) {
    const std::int32_t slot = base + lane;
    const bool match = slot < 2 * shape.num_parts && shared.fragment_row[slot] == row;
    const std::uint32_t lanes = __ballot_sync(~0u, match);
    if (match) list[count + __popc(lanes & ((1u << lane) - 1))] = slot;
    count += __popc(lanes);
  }
  __syncwarp();
  return count;
}

template <class Element>
__device__ void store_pair(const CallShape& shape, Element* destination, float low, float high) {
  const std::uint32_t pair = pack<Element>(low, high);
  if (shape.out_is_aligned) {
    *reinterpret_cast<std::uint32_t*>(destination) = pair;
  } else {
    std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(destination);
    halves[0] = static_cast<std::uint16_t>(pair);
    halves[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

// kChunks * 64 columns of one query row of one merged row an item; kTeamWarps warps divide its
// parts. Lane l holds columns 64 * chunk + 2 * l + {0, 1}.
template <class Element, int kTeamWarps, int kChunks>
__device__ void merge_items(const CallShape& shape, std::int32_t head_dim_v,
                            const CombineShared& shared, std::int32_t num_merged) {
  __shared__ float2 team_sums[kTeamWarps > 1 ? kWarps : 1][kChunks][kTeamWarps > 1 ? 32 : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, member = warp % kTeamWarps;
  constexpr int kTeams = kWarps / kTeamWarps;
  constexpr int kParts = kLoadsInFlight / kChunks;  // read at once
  const std::int32_t pieces = head_dim_v / (kChunks * kColumns);
  const std::int64_t items =
      static_cast<std::int64_t>(num_merged) * shape.num_heads_k * shape.query_rows * pieces;
  std::int32_t* list = shared.slots + warp * shape.num_parts;
  std::int32_t listed_row = -1, count = 0;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kTeams + warp / kTeamWarps;
       item < items; item += static_cast<std::int64_t>(gridDim.x) * kTeams) {
    const std::int32_t piece = item % pieces;
    std::int64_t rest = item / pieces;
    const std::int32_t query_row = rest % shape.query_rows;
    rest /= shape.query_rows;
    const std::int32_t kv_head = rest % shape.num_heads_k;
    const std::int32_t row = shared.merged[rest / shape.num_heads_k];
    if (row != listed_row) {
      __syncwarp();
      count = list_slots(shape, shared, row, list);
      listed_row = row;
    }

    // Parts base to base + kParts - 1, those past the end read again as the last. The first are
    // asked for before the weights are known.
    float2 values[kParts][kChunks];
    const auto load = [&](std::int32_t base) {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float2* source = reinterpret_cast<const float2*>(
            shape.partial_out +
            partial_index(shape, list[min(base + j, count - 1)], kv_head, query_row) * head_dim_v +
            piece * (kChunks * kColumns) + lane * 2);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          values[j][chunk] = source[chunk * (kColumns / 2)];
        }
      }
    };
    load(member * kParts);

    const auto lse_of = [&](std::int32_t i) {
      const float lse = shape.partial_lse[partial_index(shape, list[i], kv_head, query_row)];
      return isinf(lse) ? -kInfinity : lse;
    };
    float largest = -kInfinity;
#pragma unroll 4
    for (std::int32_t i = lane; i < count; i += 32) largest = fmaxf(largest, lse_of(i));
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    const bool is_empty = largest == -kInfinity;
    float sum = 0.0f;
#pragma unroll 4
    for (std::int32_t i = lane; i < count && !is_empty; i += 32) sum += expf(lse_of(i) - largest);
    for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);

    float2 total[kChunks] = {};
    for (std::int32_t base = member * kParts; base < count && !is_empty;
         base += kTeamWarps * kParts) {
      if (base > member * kParts) load(base);
      const float weight =
          lane < kParts && base + lane < count ? expf(lse_of(base + lane) - largest) : 0.0f;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        const float part_weight = __shfl_sync(~0u, weight, j);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          total[chunk].x = fmaf(part_weight, values[j][chunk].x, total[chunk].x);
          total[chunk].y = fmaf(part_weight, values[j][chunk].y, total[chunk].y);
        }
      }
    }
    if constexpr (kTeamWarps > 1) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) team_sums[warp][chunk][lane] = total[chunk];
      __syncthreads();
      if (member == 0) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          for (int i = 1; i < kTeamWarps; ++i) {
            total[chunk].x += team_sums[warp + i][chunk][lane].x;
            total[chunk].y += team_sums[warp + i][chunk][lane].y;
          }
        }
      }
      __syncthreads();
      if (member != 0) continue;
    }
    const QueryRow query = query_row_at(shape, kv_head, query_row);
    const float scale = inverse_sum(sum);
    Element* out = static_cast<Element*>(shape.out) + out_offset(shape, row, query) +
                   piece * (kChunks * kColumns) + lane * 2;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      store_pair(shape, out + chunk * kColumns, total[chunk].x * scale, total[chunk].y * scale);
    }
    if (piece == 0 && lane == 0) {
      *lse_at(shape, row, query) = is_empty ? kInfinity : largest + logf(sum);
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ CallShape shape, std::int32_t head_dim_v) {
  extern __shared__ std::int32_t memory[];
  const CombineShared shared = carve(memory, shape.num_parts);
  // The plan was written before the attention grid began, so this need not wait for its end.
  const std::int32_t num_merged = list_fragments(shape, shared);
  ptx::wait_for_previous_grid();
  ptx::allow_next_grid();
  if (num_merged == 0) return;
  // Few query rows: a block for 64 columns of each, or 256, so that many parts are read at once.
  // Many: a warp each.
  const std::int64_t rows =
      static_cast<std::int64_t>(num_merged) * shape.num_heads_k * shape.query_rows;
  if (rows * (head_dim_v / kColumns) <= gridDim.x) {
    merge_items<Element, kWarps, 1>(shape, head_dim_v, shared, num_merged);
  } else if (rows < std::int64_t{2} * gridDim.x) {
    merge_items<Element, kWarps, 4>(shape, head_dim_v, shared, num_merged);
  } else {
    merge_items<Element, 1, 8>(shape, head_dim_v, shared, num_merged);
  }
}

// --- merge_attention_states ----------------------------------------------------------------------

__device__ float to_float(float value) {
  return value;
}
__device__ float to_float(__half value) {
  return __half2float(value);
}
__device__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <class Element>
__device__ Element from_float(float value) {
  return static_cast<Element>(value);
}

// One warp a query and head; every tensor with free strides.
template <class Element>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeProblem p) {
  const int lane = threadIdx.x % 32;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= static_cast<std::int64_t>(p.batch) * p.seq_len_q * p.num_heads_q) return;
  const std::int64_t head = index % p.num_heads_q;
  const std::int64_t token = index / p.num_heads_q % p.seq_len_q;
  const std::int64_t row = index / p.num_heads_q / p.seq_len_q;
  const float* lses =
      p.lses + row * p.lses_strides[1] + head * p.lses_strides[2] + token * p.lses_strides[3];
  const Element* outs = static_cast<const Element*>(p.outs) + row * p.outs_strides[1] +
                        token * p.outs_strides[2] + head * p.outs_strides[3];
  float largest = -kInfinity;
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const float lse = lses[i * p.lses_strides[0]];
    // Written so that a NaN is kept: what it came from must show in the result.
    if (!isinf(lse) && !(lse <= largest)) largest = lse;
  }
  float sum = 0.0f;
  for (std::int32_t i = 0; i < p.num_parts; ++i) {
    const float lse = lses[i * p.lses_strides[0]];
    if (!isinf(lse)) sum += expf(lse - largest);
  }
  Element* out = static_cast<Element*>(p.out) + row * p.out_strides[0] + token * p.out_strides[1] +
                 head * p.out_strides[2];
  for (std::int32_t column = lane; column < p.head_dim_v; column += 32) {
    // -0 is the identity of addition: 0 would turn a lone part's -0 into 0.
    float total = sum == 0.0f ? 0.0f : -0.0f;
    for (std::int32_t i = 0; i < p.num_parts; ++i) {
      const float lse = lses[i * p.lses_strides[0]];
      if (isinf(lse)) continue;
      total += expf(lse - largest) / sum * to_float(outs[i * p.outs_strides[0] + column]);
    }
    out[column] = from_float<Element>(total);
  }
  if (lane == 0) {
    p.lse[row * p.lse_strides[0] + head * p.lse_strides[1] + token * p.lse_strides[2]] =
        sum == 0.0f ? kInfinity : largest + logf(sum);
  }
}

}  // namespace

namespace {

template <class Element>
cudaError_t launch_combine(const CallShape& shape, std::int32_t head_dim_v,
                           std::int32_t num_multiprocessors, cudaStream_t stream) {
  const std::size_t shared_bytes =
      static_cast<std::size_t>(shape.num_parts) * (4 + kWarps) * sizeof(std::int32_t);
  constexpr std::size_t kBytesWithoutAsking = 48 * 1024 - 4096;
  if (shared_bytes > kBytesWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(combine_kernel<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocksAMultiprocessor * num_multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, combine_kernel<Element>, shape, head_dim_v);
}

}  // namespace

cudaError_t launch_combine(const CallShape& shape, DType dtype, std::int32_t head_dim_v,
                           std::int32_t num_multiprocessors, cudaStream_t stream) {
  return dtype == DType::kBFloat16
             ? launch_combine<__nv_bfloat16>(shape, head_dim_v, num_multiprocessors, stream)
             : launch_combine<__half>(shape, head_dim_v, num_multiprocessors, stream);
}

cudaError_t launch_merge(const MergeProblem& problem, cudaStream_t stream) {
  const std::int64_t warps =
      static_cast<std::int64_t>(problem.batch) * problem.seq_len_q * problem.num_heads_q;
  if (warps == 0) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  switch (problem.dtype) {
    case DType::kBFloat16:
      merge_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(problem);
      break;
    case DType::kFloat16:
      merge_kernel<__half><<<blocks, kThreads, 0, stream>>>(problem);
      break;
    default:
      merge_kernel<float><<<blocks, kThreads, 0, stream>>>(problem);
      break;
  }
  return cudaPeekAtLastError();
}

}  // namespace flashmla::cuda
