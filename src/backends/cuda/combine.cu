// The merge of rows that several parts walked, and merge_attention_states.
#include <cstdint>

#include "backends/cuda/common/float64_decode.cuh"
#include "backends/cuda/common/launch.cuh"
#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/shared_memory.cuh"
#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/ptx/launch.cuh"
#include "backends/cuda/ptx/memory.cuh"
#include "select/select.hpp"

namespace flashmla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr std::int32_t kHeadDimV = 512;
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  static_assert(head_dim_v == kHeadDimV);
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
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
  __shared__ std::int32_t row_lengths[kThreads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of few rows the lengths are asked for together with the plan.
  const bool has_lengths = shape.batch <= kThreads;
  const std::int32_t my_length =
      row_length(shape, min(static_cast<std::int32_t>(threadIdx.x), shape.batch - 1));
  const auto length_of = [&](std::int32_t row) {
    return has_lengths ? row_lengths[row] : row_length(shape, row);
  };
  std::int32_t listed = 0;
  for (std::int32_t base = 0; base < shape.num_parts; base += kThreads) {
    const std::int32_t index = base + threadIdx.x;
    std::int32_t rows[2] = {-1, -1};  // of which the part leaves a fragment
    bool is_first[2] = {false, false};
    const Part part = read_part(shape, min(index, shape.num_parts - 1));
    if (base == 0) row_lengths[threadIdx.x] = my_length;
    __syncthreads();
    if (index < shape.num_parts) {
      if (part.begin_row <= part.end_row) {
        const std::int32_t candidates[2] = {part.begin_row, part.end_row};
        const std::int32_t lengths[2] = {length_of(part.begin_row), length_of(part.end_row)};
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
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % 32;
  std::int32_t count = 0;
#pragma unroll 1
  for (std::int32_t base = lane; base - lane < 2 * shape.num_parts; base += 32 * kAtOnce) {
    bool match[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t slot = base + 32 * i;
      match[i] = slot < 2 * shape.num_parts && shared.fragment_row[slot] == row;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t lanes = __ballot_sync(~0u, match[i]);
      if (match[i]) list[count + __popc(lanes & ((1u << lane) - 1))] = base + 32 * i;
      count += __popc(lanes);
    }
  }
  __syncwarp();
  return count;
}

// --- What a merge reads of a part ----------------------------------------------------------------

// A part's result is columns * scale / sum, relative to 2^reference, as is its sum.
struct Weighing {
  float reference = kNoReference;
  float sum = 0.0f;
  float scale = 0.0f;
};

// Results are read by lanes that hold eight neighbouring numbers each, of one query row. place: of
// the first of them in its row; row: partial_index(). What reads says whether it was there.

// Of the kernel for any number of query rows, whose grid must have ended.
struct WideResults {
  static constexpr bool kAppear = false;
  static constexpr int kBlocks = 3;         // for which there are registers in a multiprocessor
  static constexpr int kPartsInFlight = 5;  // of a lane that has few query rows
  static constexpr int kMostRounds = 1;     // of a warp that has 64 columns of some
  static constexpr int kSumLanes = 1;       // neighbouring lanes over which the sum is spread

  static __device__ bool weighing(const CallShape& shape, std::int64_t row, std::int32_t place,
                                  Weighing& to) {
    const int half = place / (kHeadDimV / kPartialHalves);
    // As one access.
    const float2 words =
        *reinterpret_cast<const float2*>(shape.partial_statistics + row * kPartialHalves + half);
    const PartialStatistics statistics{words.x, words.y};
    to = Weighing{};
    // A part that saw no token has lse +inf. The weights of all parts together stay below 1, so
    // that a sum of the largest numbers that there are is none larger.
    constexpr int kHeadroomOfParts = 14;
    constexpr float kWeight = 1.0f / (1 << kHeadroomOfParts);
    static_assert(2 * select::kCudaMaxParts < 1 << kHeadroomOfParts);
    if (statistics.lse != kInfinity) {
      to = {fmaf(statistics.lse, kLog2E, kHeadroomOfParts), kWeight, kWeight * statistics.scale};
    }
    return true;
  }
  static __device__ bool numbers(const CallShape& shape, std::int64_t row, std::int32_t place,
                                 uint4& to) {
    to = *reinterpret_cast<const uint4*>(shape.partial_out + row * kHeadDimV + place);
    return true;
  }
  static __device__ float scale_of(const Weighing& weighing, std::int32_t) {
    return weighing.scale;
  }
  static __device__ std::int32_t column(std::int32_t place) { return place; }
};

// The same where all rows together are few: a block need not leave room for others.
struct FewWideResults : WideResults {
  static constexpr int kBlocks = 2;
  static constexpr int kPartsInFlight = 8;
};

// Of the kernel whose blocks have few query rows. They appear while it runs; it cleared their
// places before this grid began. A warp's columns lie together, and each lane has the statistics of
// another warp.
struct NarrowResults {
  static constexpr bool kAppear = true;
  // 128 registers at most, of which there are 112 beside a block of attention.
  static constexpr int kBlocks = 2;
  static constexpr int kPartsInFlight = 5;
  static constexpr int kMostRounds = 2;
  static constexpr int kSumLanes = kPartialWarps;
  static constexpr std::int32_t kWarpColumns = kHeadDimV / kPartialWarps;

  static __device__ bool weighing(const CallShape& shape, std::int64_t row, std::int32_t place,
                                  Weighing& to) {
    const uint4 words = ptx::load_whole_16(shape.warp_statistics + row * kPartialWarps +
                                           place / kLaneColumns % kPartialWarps);
    to = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z)};
    return words.w != kNotYet;
  }
  static __device__ bool numbers(const CallShape& shape, std::int64_t row, std::int32_t place,
                                 uint4& to) {
    to = ptx::load_whole_16(shape.partial_out + row * kHeadDimV + place);
    return to.x != kNotYet;
  }
  static __device__ float scale_of(const Weighing& weighing, std::int32_t place) {
    return __shfl_sync(~0u, weighing.scale, place / kWarpColumns, kPartialWarps);
  }
  static __device__ std::int32_t column(std::int32_t place) {
    return place % kWarpColumns / 16 * (16 * kPartialWarps) + place / kWarpColumns * 16 +
           place % 16;
  }
};

// Waits for results, or for the end of the grid that writes them.
template <class Results>
class Patience {
 public:
  // read() reads what this lane waits for and says whether it was there; the warp waits together.
  template <class Read>
  __device__ __forceinline__ void wait_for(const Read& read) {
    for (;;) {
      const bool has_all = read();
      if (!Results::kAppear || __all_sync(~0u, has_all) || attempts_ == 0) return;
      if (--attempts_ == 0) ptx::wait_for_previous_grid();
      __nanosleep(40);
    }
  }
  __device__ __forceinline__ void wait_for_end() {
    if (attempts_ > 0) ptx::wait_for_previous_grid();
    attempts_ = 0;
  }

 private:
  int attempts_ = 1000;  // then it is cheaper to wait for the end
};

// Adds eight columns of a part of this weight.
__device__ __forceinline__ void add_columns(float* sums, float weight, const uint4& values) {
  const std::uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<__half>(words[i]);
    sums[2 * i] = fmaf(weight, pair.x, sums[2 * i]);
    sums[2 * i + 1] = fmaf(weight, pair.y, sums[2 * i + 1]);
  }
}

// A lane's sum over parts in progress, relative to 2^reference.
template <int kColumns>
struct Merged {
  float reference = kNoReference;
  float sum = 0.0f;
  float columns[kColumns] = {};

  __device__ __forceinline__ void raise(float new_reference) {
    const float scale = exp2_approximate(reference - new_reference);
    reference = new_reference;
    sum *= scale;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) columns[i] *= scale;
  }
};

// A query row of a row that several parts walked.
struct MergedQueryRow {
  std::int32_t row = -1;  // of the batch; -1: none
  std::int32_t kv_head = 0;
  std::int32_t query_row = 0;
};

// How the items of FewMerger are numbered.
struct FewItems {
  Divisor of_row;      // query rows of all key/value heads
  Divisor of_kv_head;  // query rows
};

__host__ __device__ __forceinline__ std::uint32_t query_rows_of_row(const CallShape& shape) {
  return shape.num_heads_k * shape.query_rows;
}

// --- Few query rows: a team of warps for 64 columns of one ---------------------------------------

// Each team has one item at most or, with kHasRounds, a team of one warp some, one after the other.
// A lane has 8 columns of it, for one part in four of its warp's. All that it reads is asked for at
// once.
template <class Element, class Results, bool kHasRounds = false>
class FewMerger {
 public:
  static constexpr int kItemColumns = 64;
  static constexpr std::uint32_t kPieces = kHeadDimV / kItemColumns;  // of a query row

  __device__ FewMerger(const CallShape& shape, const CallInputs& inputs, const FewItems& items,
                       const CombineShared& shared, std::int32_t num_merged, int team_log2)
      : shape_(shape),
        inputs_(inputs),
        items_(items),
        shared_(shared),
        num_merged_(num_merged),
        team_log2_(team_log2),
        list_(shared.slots + threadIdx.x / 32 * shape_.num_parts) {
    locate(item_of_round(0) >> team_log2);
  }

  // Number of items of one merged row.
  static __host__ __device__ std::uint32_t items_of_row(const CallShape& shape) {
    return query_rows_of_row(shape) * kPieces;
  }

  __device__ void run() {
    Patience<Results> patience;
    if constexpr (!Results::kAppear) patience.wait_for_end();
    std::uint32_t lost = 0;  // bit i: this warp's item of round i
    for (int round = 0;;) {
      publish(sum_of_parts(patience));
      // With rounds a team is one warp, which reads and writes what is its own alone.
      __syncthreads();
      if (threadIdx.x / 32 % team_warps() == 0 && count_ > 0 && !write()) lost |= 1u << round;
      if constexpr (!kHasRounds) break;
      if (++round * gridDim.x * kWarps >= num_merged_ * items_of_row(shape_)) break;
      locate(item_of_round(round));
    }
    patience.wait_for_end();
    // Not where they are found, for want of registers.
#pragma unroll 1
    for (int round = 0; lost >> round != 0; ++round) {
      if (lost >> round & 1) redo(item_of_round(round) >> team_log2_);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t item_of_round(int round) {
    return (round * gridDim.x + blockIdx.x) * kWarps + threadIdx.x / 32;
  }

  static constexpr int kGroupLanes = kItemColumns / kLaneColumns;
  static constexpr int kGroups = 32 / kGroupLanes;
  static constexpr int kPartsInFlight = Results::kPartsInFlight;
  using Sum = Merged<kLaneColumns>;

  __device__ __forceinline__ int team_warps() const {
    return 1 << team_log2_;
  }

  __device__ void locate(std::uint32_t item) {
    count_ = 0;
    const std::int32_t query_row = item / kPieces;
    const std::int32_t merged = items_.of_row.quotient(query_row);
    if (merged >= num_merged_) return;
    const std::int32_t row = shared_.merged[merged];
    count_ = list_slots(shape_, shared_, row, list_);
    first_place_ = item % kPieces * kItemColumns;
    of_slot_ = query_row - merged * items_.of_row.divisor;
    if (threadIdx.x % 32 == 0) {
      const std::int32_t kv_head = items_.of_kv_head.quotient(of_slot_);
      const QueryRow query =
          query_row_at(shape_, kv_head, of_slot_ - kv_head * items_.of_kv_head.divisor);
      Target& target = targets()[threadIdx.x / 32];
      target.out = static_cast<Element*>(shape_.out) + out_offset(shape_, row, query);
      target.lse = first_place_ == 0 ? lse_at(shape_, row, query) : nullptr;
    }
    __syncwarp();
  }

  // The items of a query row are lost together, so that between them they compute all columns.
  __device__ void redo(std::uint32_t item) const {
    const std::int32_t query_row = item / kPieces;
    const std::int32_t merged = items_.of_row.quotient(query_row);
    const std::int32_t of_slot = query_row - merged * items_.of_row.divisor;
    const std::int32_t kv_head = items_.of_kv_head.quotient(of_slot);
    decode_in_float64<Element>(
        inputs_, shape_, shared_.merged[merged], kv_head,
        query_row_at(shape_, kv_head, of_slot - kv_head * items_.of_kv_head.divisor),
        item % kPieces * kItemColumns);
  }

  // Where a warp's item goes; no lse but with the first columns.
  struct Target {
    Element* out;
    float* lse;
  };
  static __device__ Target* targets() {
    __shared__ Target of_warps[kWarps];
    return of_warps;
  }

  // What a warp has summed up, of all of an item's columns.
  struct Member {
    alignas(8) float columns[kItemColumns];
    float reference, sum;
  };
  static __device__ Member* members() {
    __shared__ Member of_warps[kWarps];
    return of_warps;
  }

  // In the lanes of the first group, the sum over the warp's parts.
  __device__ Sum sum_of_parts(Patience<Results>& patience) const {
    const int lane = threadIdx.x % 32;
    const std::int32_t place = first_place_ + lane % kGroupLanes * kLaneColumns;
    const int step = team_warps() * kGroups;
    const int first = threadIdx.x / 32 % team_warps() * kGroups + lane / kGroupLanes;
    Sum total;
#pragma unroll 1
    for (std::int32_t base = 0; base < count_; base += step * kPartsInFlight) {
      std::int32_t rows[kPartsInFlight];
      Weighing weighings[kPartsInFlight];
      uint4 values[kPartsInFlight];
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        rows[j] = list_[min(base + first + j * step, count_ - 1)] *
                      static_cast<std::int32_t>(query_rows_of_row(shape_)) +
                  of_slot_;
      }
      if constexpr (Results::kAppear) {
        // Until one is there, only that is asked for.
        patience.wait_for([&] { return Results::numbers(shape_, rows[0], place, values[0]); });
      }
      patience.wait_for([&] {
        bool has_all = true;
#pragma unroll
        for (int j = 0; j < kPartsInFlight; ++j) {
          has_all &= Results::weighing(shape_, rows[j], place, weighings[j]);
        }
#pragma unroll
        for (int j = 0; j < kPartsInFlight; ++j) {
          has_all &= Results::numbers(shape_, rows[j], place, values[j]);
        }
        return has_all;
      });
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        if (base + first + j * step >= count_) weighings[j] = Weighing{};
      }
      float reference = total.reference;
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        reference = fmaxf(reference, weighings[j].reference);
      }
#pragma unroll
      for (int lanes = kGroupLanes; lanes < 32; lanes *= 2) {
        reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, lanes));
      }
      total.raise(reference);
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        const float weight = exp2_approximate(weighings[j].reference - reference);
        total.sum = fmaf(weight, weighings[j].sum, total.sum);
        add_columns(total.columns, weight * Results::scale_of(weighings[j], first_place_),
                    values[j]);
      }
    }
#pragma unroll
    for (int lanes = kGroupLanes; lanes < 32; lanes *= 2) {
      total.sum += __shfl_xor_sync(~0u, total.sum, lanes);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        total.columns[i] += __shfl_xor_sync(~0u, total.columns[i], lanes);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < Results::kSumLanes; lanes *= 2) {
      total.sum += __shfl_xor_sync(~0u, total.sum, lanes);
    }
    return total;
  }

  __device__ void publish(const Sum& total) const {
    const int lane = threadIdx.x % 32;
    Member& member = members()[threadIdx.x / 32];
    if (lane == 0) {
      member.reference = total.reference;
      member.sum = total.sum;
    }
    if (lane < kGroupLanes) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        member.columns[lane * kLaneColumns + i] = total.columns[i];
      }
    }
  }

  // The sum over the team's warps; a lane has two columns. False: it is lost, as is that of the
  // query row's other items, and nothing is written.
  __device__ bool write() const {
    const Member* team = members() + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float weights[kWarps], reference = kNoReference;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      weights[i] = i < team_warps() ? team[i].reference : -kInfinity;
      reference = fmaxf(reference, weights[i]);
    }
    float sum = 0.0f, low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      // Past the team's warps the weight is 0.
      const Member& member = team[i < team_warps() ? i : 0];
      const float weight = exp2_approximate(weights[i] - reference);
      const float2 columns = reinterpret_cast<const float2*>(member.columns)[lane];
      sum = fmaf(weight, member.sum, sum);
      low = fmaf(weight, columns.x, low);
      high = fmaf(weight, columns.y, high);
    }
    if (is_lost(sum_to_trust(reference, sum))) return false;
    const Target target = targets()[threadIdx.x / 32];
    const float scale = inverse_sum(sum);
    const std::uint32_t pair = pack_finite<Element>(low * scale, high * scale);
    std::uint16_t* out =
        reinterpret_cast<std::uint16_t*>(target.out) + Results::column(first_place_ + 2 * lane);
    if (shape_.out_is_aligned) {
      *reinterpret_cast<std::uint32_t*>(out) = pair;
    } else {
      out[0] = static_cast<std::uint16_t>(pair);
      out[1] = static_cast<std::uint16_t>(pair >> 16);
    }
    if (lane == 0 && target.lse != nullptr) *target.lse = natural_lse(reference, sum);
    return true;
  }

  static_assert(kItemColumns == kFloat64Columns);

  const CallShape& shape_;
  const CallInputs& inputs_;  // for rows that are lost
  const FewItems& items_;
  const CombineShared& shared_;
  std::int32_t num_merged_;
  int team_log2_;       // of its warps, which divide kWarps
  std::int32_t* list_;  // slots of the row's partial results...
  std::int32_t count_ = 0;
  std::int32_t of_slot_ = 0;  // ...in each of which this is the query row
  std::int32_t first_place_ = 0;
};

// --- Many query rows: a warp for each ------------------------------------------------------------

template <class Element, class Results>
class ManyMerger {
 public:
  __device__ ManyMerger(const CallShape& shape, const CallInputs& inputs,
                        const CombineShared& shared, std::int32_t num_merged)
      : shape_(shape),
        inputs_(inputs),
        shared_(shared),
        items_(num_merged * query_rows_of_row(shape_)),
        item_(first_item()),
        list_(shared.slots + threadIdx.x / 32 * shape_.num_parts) {
    locate();
  }

  // Reads the partial results; what stands before follows from the plan alone.
  __device__ void run() {
    ptx::wait_for_previous_grid();
    while (current_.row >= 0) {
      write(sum_of_parts());
      item_ += gridDim.x * kWarps;
      locate();
    }
    if (has_lost_) redo_lost();
  }

 private:
  static constexpr int kChunks = 2;  // of 8 numbers, one in each half
  static constexpr int kPartsInFlight = 2;
  using Sum = Merged<kChunks * kLaneColumns>;

  // Query rows are dealt to blocks in turn, so that few of them reach every multiprocessor. Where
  // results appear while the attention runs, neighbours go to one block, whose warps share L1.
  static __device__ std::uint32_t first_item() {
    return Results::kAppear ? blockIdx.x * kWarps + threadIdx.x / 32
                            : threadIdx.x / 32 * gridDim.x + blockIdx.x;
  }

  __device__ void locate() {
    const std::int32_t row_before = current_.row;
    current_.row = -1;
    if (item_ >= items_) return;
    const std::uint32_t of_row = item_ % query_rows_of_row(shape_);
    current_.row = shared_.merged[item_ / query_rows_of_row(shape_)];
    current_.kv_head = of_row / shape_.query_rows;
    current_.query_row = of_row % shape_.query_rows;
    if (current_.row != row_before) count_ = list_slots(shape_, shared_, current_.row, list_);
  }

  // Not where they are found, for want of registers.
  __device__ void redo_lost() {
    __syncwarp();
#pragma unroll 1
    for (item_ = first_item(), locate(); current_.row >= 0; item_ += gridDim.x * kWarps, locate()) {
      const QueryRow query = query_row_at(shape_, current_.kv_head, current_.query_row);
      redo_query_row<Element>(inputs_, shape_, current_.row, current_.kv_head, query);
    }
  }

  // Of a chunk of this lane.
  static __device__ std::int32_t place(int chunk) {
    return (chunk * 32 + threadIdx.x % 32) * kLaneColumns;
  }

  __device__ Sum sum_of_parts() const {
    Sum total;
#pragma unroll 1
    for (std::int32_t base = 0; base < count_; base += kPartsInFlight) {
      Weighing weighings[kPartsInFlight][kChunks];
      uint4 values[kPartsInFlight][kChunks];
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        if (base + j >= count_) continue;
        const std::int64_t row =
            partial_index(shape_, list_[base + j], current_.kv_head, current_.query_row);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          Results::weighing(shape_, row, place(chunk), weighings[j][chunk]);
          Results::numbers(shape_, row, place(chunk), values[j][chunk]);
        }
      }
      float reference = total.reference;
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        reference = fmaxf(reference, weighings[j][0].reference);
      }
      total.raise(reference);
#pragma unroll
      for (int j = 0; j < kPartsInFlight; ++j) {
        if (base + j >= count_) continue;
        const float weight = exp2_approximate(weighings[j][0].reference - reference);
        total.sum = fmaf(weight, weighings[j][0].sum, total.sum);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          add_columns(total.columns + chunk * kLaneColumns,
                      weight * Results::scale_of(weighings[j][chunk], place(chunk)),
                      values[j][chunk]);
        }
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < Results::kSumLanes; lanes *= 2) {
      total.sum += __shfl_xor_sync(~0u, total.sum, lanes);
    }
    return total;
  }

  __device__ void write(const Sum& total) {
    const QueryRow query = query_row_at(shape_, current_.kv_head, current_.query_row);
    const float sum = sum_to_trust(total.reference, total.sum);
    has_lost_ |= is_lost(sum);
    const float scale = inverse_sum(sum);
    Element* out = static_cast<Element*>(shape_.out) + out_offset(shape_, current_.row, query);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float* columns = total.columns + chunk * kLaneColumns;
      const uint4 packed = {pack_finite<Element>(columns[0] * scale, columns[1] * scale),
                            pack_finite<Element>(columns[2] * scale, columns[3] * scale),
                            pack_finite<Element>(columns[4] * scale, columns[5] * scale),
                            pack_finite<Element>(columns[6] * scale, columns[7] * scale)};
      store_row_chunk(out + Results::column(place(chunk)), packed, shape_.out_is_aligned);
    }
    if (threadIdx.x % 32 == 0) {
      *lse_at(shape_, current_.row, query) = natural_lse(total.reference, sum);
    }
  }

  const CallShape& shape_;
  const CallInputs& inputs_;  // for rows that are lost
  const CombineShared& shared_;
  std::uint32_t items_, item_;
  std::int32_t* list_;  // slots of the row's partial results
  MergedQueryRow current_;
  std::int32_t count_ = 0;
  bool has_lost_ = false;
};

template <class Element, class Results>
__global__ void __launch_bounds__(kThreads, Results::kBlocks)
    combine_kernel(const __grid_constant__ CallShape shape,
                   const __grid_constant__ FewItems few_items,
                   const __grid_constant__ CallInputs inputs) {
  extern __shared__ std::int32_t memory[];
  // The grid after this one waits for its end before it reads or writes anything.
  ptx::allow_next_grid();
  const CombineShared shared = carve(memory, shape.num_parts);
  // The plan was written before the attention grid began, so this need not wait for its end.
  const std::int32_t num_merged = list_fragments(shape, shared);
  using Few = FewMerger<Element, Results>;
  if (num_merged == 0) {
    ptx::wait_for_previous_grid();
    return;
  }
  const std::int64_t items = static_cast<std::int64_t>(num_merged) * Few::items_of_row(shape);
  const std::int64_t warps = std::int64_t{kWarps} * gridDim.x;
  if (items > Results::kMostRounds * warps) {
    ManyMerger<Element, Results>(shape, inputs, shared, num_merged).run();
    return;
  }
  if constexpr (Results::kMostRounds > 1) {
    if (items > warps) {
      FewMerger<Element, Results, true>(shape, inputs, few_items, shared, num_merged, 0).run();
      return;
    }
  }
  int team_log2 = 0;
  while ((2 << team_log2) <= kWarps && items << (team_log2 + 1) <= warps) ++team_log2;
  Few(shape, inputs, few_items, shared, num_merged, team_log2).run();
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

template <auto kKernel>
cudaError_t launch(const DecodeParams& params, int blocks, cudaStream_t stream) {
  const CallShape& shape = params.shape;
  const cudaError_t error =
      allow_shared_memory<kKernel>(static_cast<int>(shared_bytes_of(select::kCudaMaxParts)));
  if (error != cudaSuccess) return error;
  const FewItems items{Divisor(shape.num_heads_k * shape.query_rows), Divisor(shape.query_rows)};
  return launch_overlapping(kKernel, blocks, kThreads, shared_bytes_of(shape.num_parts), stream,
                            shape, items, static_cast<const CallInputs&>(params));
}

template <class Element>
cudaError_t launch_combine(const DecodeParams& params, std::int32_t num_multiprocessors,
                           cudaStream_t stream) {
  const CallShape& shape = params.shape;
  // Beside the blocks of the kernel for few query rows there is room for one.
  if (shape.warp_statistics != nullptr) {
    return launch<combine_kernel<Element, NarrowResults>>(params, num_multiprocessors, stream);
  }
  // Of all rows, were they shared.
  using Few = FewMerger<Element, FewWideResults>;
  const std::int64_t items = std::int64_t{shape.batch} * Few::items_of_row(shape);
  const int warps = kWarps * num_multiprocessors;
  if (items > 2 * warps) {
    return launch<combine_kernel<Element, WideResults>>(params, 2 * num_multiprocessors, stream);
  }
  // With fewer blocks more of them begin beside the last of the attention.
  return launch<combine_kernel<Element, FewWideResults>>(
      params, items > warps ? 2 * num_multiprocessors : num_multiprocessors, stream);
}

}  // namespace

cudaError_t launch_combine(const DecodeParams& params, DType dtype,
                           std::int32_t num_multiprocessors, cudaStream_t stream) {
  return dtype == DType::kBFloat16
             ? launch_combine<__nv_bfloat16>(params, num_multiprocessors, stream)
             : launch_combine<__half>(params, num_multiprocessors, stream);
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
