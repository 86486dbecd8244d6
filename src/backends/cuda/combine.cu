// The merge of rows that several parts walked, and merge_attention_states.
#include <cstdint>

#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/shared_memory.cuh"
#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/ptx/launch.cuh"
#include "select/select.hpp"
#include "tuning/plan.hpp"

namespace flashmla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Registers for three blocks a multiprocessor: then there is room for one beside a block of the
// attention kernel for few query rows.
constexpr int kBlocks = 3;
constexpr int kLaneColumns = 8;  // 16 bytes of a partial result

// Shared memory of a combine block, ints. Everything is indexed by slot of the partial results.
struct CombineShared {
  std::int32_t* fragment_row;  // (2 * num_parts): the row whose fragment the slot holds, or -1
  std::int32_t* merged;  // (2 * num_parts): rows to merge, in an order that all blocks agree on
  std::int32_t* slots;   // (kWarps, num_parts): a warp's list of one row's slots
};
constexpr std::size_t shared_bytes_of(std::int32_t num_parts) {
  return static_cast<std::size_t>(num_parts) * (4 + kWarps) * sizeof(std::int32_t);
}

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

// A sum over parts in progress, relative to the largest lse so far.
template <int kColumns>
struct Merged {
  float largest = -kInfinity;
  float sum = 0.0f;
  float columns[kColumns] = {};

  __device__ void raise(float new_largest) {
    const float scale =
        largest == -kInfinity ? 0.0f : exp2_approximate((largest - new_largest) * kLog2E);
    largest = new_largest;
    sum *= scale;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns[i] *= scale;
  }
  // Eight columns from kFirst on of a part of this weight.
  template <int kFirst>
  __device__ void add(float weight, const uint4& values) {
    const std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      columns[kFirst + 2 * i] = fmaf(weight, pair.x, columns[kFirst + 2 * i]);
      columns[kFirst + 2 * i + 1] = fmaf(weight, pair.y, columns[kFirst + 2 * i + 1]);
    }
  }
  __device__ void add(Merged other) {
    raise(fmaxf(largest, other.largest));
    other.raise(largest);
    sum += other.sum;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns[i] += other.columns[i];
  }
  // Adds up what this lane and the one that differs in `lanes` hold.
  __device__ void exchange(int lanes) {
    raise(fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes)));
    sum += __shfl_xor_sync(~0u, sum, lanes);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns[i] += __shfl_xor_sync(~0u, columns[i], lanes);
  }
};

// An item of work is some columns of one query row of one merged row. A team of warps shares its
// parts, and so do groups of kGroupLanes lanes of a warp; a lane has kChunks chunks of 8 columns,
// each in a half of its own if there are two. All that a lane reads of kPartsInFlight parts is
// asked for at once.
template <class Element, int kGroupLanes, int kChunks, int kPartsInFlight>
class Merger {
 public:
  // Number of items of one merged row.
  static __device__ std::uint32_t items_of_row(const CallShape& shape, std::int32_t head_dim_v) {
    return shape.num_heads_k * shape.query_rows * pieces(head_dim_v);
  }

  __device__ Merger(const CallShape& shape, std::int32_t head_dim_v, const CombineShared& shared,
                    std::int32_t num_merged, int team_warps)
      : shape_(shape),
        head_dim_v_(head_dim_v),
        shared_(shared),
        num_merged_(num_merged),
        team_warps_(team_warps),
        list_(shared.slots + threadIdx.x / 32 * shape.num_parts) {
    advance(blockIdx.x * (kWarps / team_warps));
    locate();
  }

  // Reads the partial results; what stands before follows from the plan alone.
  __device__ void run() {
    while (first_.merged < num_merged_) {
      const Sum sum = sum_of_parts();
      const bool is_leader = threadIdx.x / 32 % team_warps_ == 0;
      if (is_leader && threadIdx.x % 32 < kGroupLanes && row_ >= 0) write(sum);
      advance(gridDim.x * (kWarps / team_warps_));
      locate();
    }
  }

 private:
  using Sum = Merged<kChunks * kLaneColumns>;
  static constexpr int kItemChunks = kGroupLanes * kChunks;
  static constexpr int kGroups = 32 / kGroupLanes;

  // Where an item stands: one of so many of a merged row.
  struct Item {
    std::int32_t merged = 0;
    std::uint32_t of_row = 0;
  };

  static __device__ std::int32_t pieces(std::int32_t head_dim_v) {
    return head_dim_v / (kItemChunks * kLaneColumns);
  }

  __device__ Item further(Item item, std::uint32_t items) const {
    const std::uint32_t of_row = items_of_row(shape_, head_dim_v_);
    item.of_row += items;
    item.merged += item.of_row / of_row;
    item.of_row %= of_row;
    return item;
  }
  __device__ void advance(std::uint32_t items) { first_ = further(first_, items); }

  // Finds this team's item among those that begin at first_, and the slots of its parts.
  __device__ void locate() {
    const Item item = further(first_, threadIdx.x / 32 / team_warps_);
    if (item.merged >= num_merged_) {
      row_ = -1;
      count_ = 0;
      return;
    }
    piece_ = item.of_row % pieces(head_dim_v_);
    const std::uint32_t query_row = item.of_row / pieces(head_dim_v_);
    kv_head_ = query_row / shape_.query_rows;
    query_row_ = query_row % shape_.query_rows;
    const std::int32_t row = shared_.merged[item.merged];
    if (row == row_) return;
    row_ = row;
    count_ = list_slots(shape_, shared_, row, list_);
  }

  // First column of a chunk of this lane.
  __device__ std::int32_t column(int chunk) const {
    return (piece_ * kItemChunks + chunk * kGroupLanes + threadIdx.x % kGroupLanes) * kLaneColumns;
  }

  // In the leading warp of the team, the sum over all parts.
  __device__ Sum sum_of_parts() const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int step = team_warps_ * kGroups;
    Sum total;
#pragma unroll 1
    for (std::int32_t base = warp % team_warps_ * kGroups + lane / kGroupLanes; base < count_;
         base += step * kPartsInFlight) {
      PartialStatistics statistics[kPartsInFlight][kChunks];
      uint4 values[kPartsInFlight][kChunks];
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        statistics[j][0].lse = kInfinity;
        if (base + j * step >= count_) continue;
        const std::int64_t index =
            partial_index(shape_, list_[base + j * step], kv_head_, query_row_);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int half = column(chunk) / (head_dim_v_ / kPartialHalves);
          statistics[j][chunk] = shape_.partial_statistics[index * kPartialHalves + half];
          values[j][chunk] = *reinterpret_cast<const uint4*>(shape_.partial_out +
                                                             index * head_dim_v_ + column(chunk));
        }
      }
      // A part that saw no token has lse +inf, and is left out.
      float largest = total.largest;
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        if (statistics[j][0].lse != kInfinity) largest = fmaxf(largest, statistics[j][0].lse);
      }
      total.raise(largest);
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        if (statistics[j][0].lse == kInfinity) continue;
        const float weight = exp2_approximate((statistics[j][0].lse - largest) * kLog2E);
        total.sum += weight;
        total.template add<0>(weight * statistics[j][0].scale, values[j][0]);
        if constexpr (kChunks == 2) {
          total.template add<kLaneColumns>(weight * statistics[j][1].scale, values[j][1]);
        }
      }
    }
#pragma unroll
    for (int lanes = kGroupLanes; lanes < 32; lanes *= 2) total.exchange(lanes);
    if constexpr (kGroupLanes < 32) {
      if (team_warps_ > 1) {
        __shared__ Sum members[kWarps][kGroupLanes];
        if (lane < kGroupLanes) members[warp][lane] = total;
        __syncthreads();
        if (warp % team_warps_ == 0 && lane < kGroupLanes) {
          for (int i = 1; i < team_warps_; ++i) total.add(members[warp + i][lane]);
        }
        __syncthreads();
      }
    }
    return total;
  }

  __device__ void write(const Sum& total) const {
    const QueryRow query = query_row_at(shape_, kv_head_, query_row_);
    const float scale = inverse_sum(total.sum);
    Element* out = static_cast<Element*>(shape_.out) + out_offset(shape_, row_, query);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float* columns = total.columns + chunk * kLaneColumns;
      const uint4 packed = {pack<Element>(columns[0] * scale, columns[1] * scale),
                            pack<Element>(columns[2] * scale, columns[3] * scale),
                            pack<Element>(columns[4] * scale, columns[5] * scale),
                            pack<Element>(columns[6] * scale, columns[7] * scale)};
      store_row_chunk(out + column(chunk), packed, shape_.out_is_aligned);
    }
    if (column(0) == 0) {
      *lse_at(shape_, row_, query) =
          total.sum == 0.0f ? kInfinity : total.largest + log2_approximate(total.sum) * kLn2;
    }
  }

  const CallShape& shape_;
  std::int32_t head_dim_v_;
  const CombineShared& shared_;
  std::int32_t num_merged_;
  int team_warps_;      // divides kWarps; 1 where groups are whole warps
  std::int32_t* list_;  // slots of row_'s partial results
  Item first_;          // of the block's first team
  std::int32_t row_ = -1, count_ = 0;
  std::int32_t piece_ = 0, query_row_ = 0, kv_head_ = 0;
};

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks)
    combine_kernel(const __grid_constant__ CallShape shape, std::int32_t head_dim_v) {
  extern __shared__ std::int32_t memory[];
  const CombineShared shared = carve(memory, shape.num_parts);
  // The plan was written before the attention grid began, so this need not wait for its end.
  const std::int32_t num_merged = list_fragments(shape, shared);
  const auto run = [&](auto merger) {
    ptx::wait_for_previous_grid();
    ptx::allow_next_grid();
    merger.run();
  };
  // Few query rows: 64 columns an item, and as many warps for each as there are, so that its parts
  // are read at once. Many: a warp for a whole query row.
  using Few = Merger<Element, 8, 1, 5>;
  using Many = Merger<Element, 32, 2, 2>;
  const std::int64_t items =
      static_cast<std::int64_t>(num_merged) * Few::items_of_row(shape, head_dim_v);
  if (items <= std::int64_t{kWarps} * gridDim.x) {
    int team_warps = kWarps;
    while (team_warps > 1 && items * team_warps > std::int64_t{kWarps} * gridDim.x) team_warps /= 2;
    run(Few(shape, head_dim_v, shared, num_merged, team_warps));
  } else {
    run(Many(shape, head_dim_v, shared, num_merged, 1));
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
  const cudaError_t error = allow_shared_memory<combine_kernel<Element>>(
      static_cast<int>(shared_bytes_of(select::kCudaMaxParts)));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  // Beside the blocks of an attention kernel for few query rows there is room for one.
  const int blocks = shape.query_rows <= tuning::kCudaFewQueryRows ? 1 : 2;
  config.gridDim = dim3(blocks * num_multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes_of(shape.num_parts);
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
