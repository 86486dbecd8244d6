// Attention for up to 32 query rows of a key/value head. One warp keeps a ring of tiles filled; one
// warpgroup computes S^T = K Q^T, P^T, and O^T += V^T P^T.
#pragma once

#include <cstdint>

#include "backends/cuda/common/entry_walk.cuh"
#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/prefetch.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/mma/warpgroup_mma.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "backends/cuda/ptx/matrix.cuh"
#include "backends/cuda/ptx/memory.cuh"
#include "backends/cuda/sm90a/load.cuh"
#include "backends/cuda/sm90a/narrow_traits.cuh"

namespace flashmla::cuda::sm90a {

// Stage of the ring and the parity of its phase.
template <class Traits>
struct StagePosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Traits::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- Load: the last warp -------------------------------------------------------------------------

template <class Traits>
class NarrowLoader {
 public:
  __device__ __forceinline__ NarrowLoader(const DecodeParams& params, NarrowShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    EntryWalk walk;
    begin_walk(walk, params_.shape, blockIdx.z);
    Entry entry = next_tile(walk);
    Pages pages = pages_of(entry);
    StagePosition<Traits> position;
    while (entry.kind == Entry::kTile) {
      // The pages of the tile after this one are asked for before this one waits for its stage.
      const Entry next = next_tile(walk);
      const Pages next_pages = pages_of(next);
      ptx::mbarrier_wait(ptx::shared_address(&shared_.empty[position.stage]), position.parity ^ 1);
      const std::uint32_t full = ptx::shared_address(&shared_.full[position.stage]);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect(full, Traits::kTileBytes);
      __syncwarp();
      const std::uint32_t stage = ptx::shared_address(shared_.stages[position.stage]);
      if (boxes_of_slice(params_) > 1) {
        copy_tile_by_boxes<0, Traits::kSlices>(
            params_, params_.k_map, entry.block, blockIdx.y,
            [&](int box) { return box < 32 ? pages.near : pages.far; }, stage, full);
      } else if (threadIdx.x % 32 == 0) {
        copy_whole_tile<0>(params_, params_.k_map, entry.block, blockIdx.y, pages.near, stage,
                           full);
      }
      position.advance();
      entry = next;
      pages = next_pages;
    }
  }

 private:
  // Of the boxes that this lane copies.
  struct Pages {
    std::int32_t near, far;
  };

  __device__ __forceinline__ Entry next_tile(EntryWalk& walk) const {
    for (;;) {
      const Entry entry = next_entry(walk, params_.shape);
      if (entry.kind == Entry::kTile || entry.kind == Entry::kEnd) return entry;
    }
  }

  __device__ __forceinline__ Pages pages_of(const Entry& entry) const {
    if (entry.kind != Entry::kTile) return {-1, -1};
    const int boxes = boxes_of_slice(params_);
    const int box = threadIdx.x % 32 & (boxes - 1);
    return {page_of_box(params_, entry.row, entry.block, entry.length, box),
            boxes > 32 ? page_of_box(params_, entry.row, entry.block, entry.length, box + 32) : -1};
  }

  const DecodeParams& params_;
  NarrowShared<Traits>& shared_;
};

// --- Compute: warpgroup 0 ------------------------------------------------------------------------

template <class Traits>
class NarrowCompute {
  using Element = typename Traits::Element;
  static constexpr int kScores = Traits::kQueryRows / 2;  // of a thread: 2 tokens, kHeads each
  static constexpr int kHeads = Traits::kQueryRows / 4;   // query rows whose columns a thread holds
  using ScoreMma = mma::WarpgroupMma<Element, false, false, kScores>;
  using ValueMma = mma::WarpgroupMma<Element, true, false, kScores>;

 public:
  __device__ __forceinline__ NarrowCompute(const DecodeParams& params, NarrowShared<Traits>& shared)
      : params_(params), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    EntryWalk walk;
    begin_walk(walk, params_.shape, blockIdx.z);
    for (;;) {
      const Entry entry = next_entry(walk, params_.shape);
      if (entry.kind == Entry::kEnd) return;
      if (entry.kind == Entry::kEmptyRow) {
        write_empty(entry.row);
        continue;
      }
      start_row(entry);
      Entry tile;
      do {
        tile = next_entry(walk, params_.shape);
        run_tile(tile);
      } while ((tile.detail & Entry::kLast) == 0);
      finish_row(entry.row, entry.detail);
    }
  }

 private:
  __device__ __forceinline__ void synchronise() const {
    ptx::named_barrier_sync(Traits::kComputeWarpgroup, Traits::kComputeThreads);
  }

  // Column of the products that head `i` of this thread is: the query row.
  __device__ __forceinline__ int column(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }

  __device__ __forceinline__ std::int32_t visible_of(const Entry& entry, int query_row) const {
    const std::int32_t token =
        params_.shape.heads_per_kv_head.quotient(min(query_row, params_.shape.query_rows - 1));
    return visible_tokens(params_, entry.row, token, entry.length);
  }

  // Queries of the row into shared memory, rows that are missing as zeros.
  __device__ __forceinline__ void start_row(const Entry& entry) {
    first_masked_block_ = visible_of(entry, 0) / Traits::kTileTokens;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      reference_[i] = kNoReference;
      sum_[i] = 0.0f;
    }
    constexpr int kChunks = Traits::kHeadDim / 8;  // of 16 bytes, in a query row
    constexpr int kCount = Traits::kQueryRows * kChunks / Traits::kComputeThreads;  // of a thread
    constexpr int kInFlight = Traits::kQueryRows == 16 ? kCount : kCount / 2;
    static_assert(Traits::kQueryRows * kChunks % Traits::kComputeThreads == 0);
    const Element* q = static_cast<const Element*>(params_.q) + entry.row * params_.q_batch_stride;
#pragma unroll 1
    for (int begin = 0; begin < kCount; begin += kInFlight) {
      uint4 values[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = (begin + j) * Traits::kComputeThreads + threadIdx.x;
        const int query_row = i / kChunks;
        values[j] = uint4{0, 0, 0, 0};
        if (query_row < params_.shape.query_rows) {
          const QueryRow query = query_row_at(params_.shape, blockIdx.y, query_row);
          values[j] =
              *reinterpret_cast<const uint4*>(q + query.token * params_.q_token_stride +
                                              query.head * params_.q_head_stride + i % kChunks * 8);
        }
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int i = (begin + j) * Traits::kComputeThreads + threadIdx.x;
        const int query_row = i / kChunks, chunk = i % kChunks;
        ptx::store_shared_16(
            ptx::shared_address(shared_.query[chunk / 8]) + mma::chunk_offset(query_row, chunk % 8),
            values[j]);
      }
    }
    ptx::fence_async_proxy();
    synchronise();
  }

  __device__ __forceinline__ void run_tile(const Entry& tile) {
    const bool is_first = (tile.detail & Entry::kFirst) != 0;
    const bool is_masked = tile.block >= first_masked_block_;
    ptx::mbarrier_wait(ptx::shared_address(&shared_.full[position_.stage]), position_.parity);
    if (is_masked) clear_unseen(tile);
    float scores[kScores];
    compute_scores(scores);

    float probabilities[kScores];
    bool exact = is_first || is_masked;
    if (!exact) exact = fast_softmax(scores, probabilities);
    if (exact) exact_softmax(scores, probabilities, tile, is_masked);
    store_probabilities(probabilities);
    ptx::fence_async_proxy();
    synchronise();
    accumulate(is_first);
    release();
  }

  // Rows of the tile from the first on that no query sees: whatever bits they hold must not reach a
  // product, where 0 times NaN is NaN.
  __device__ __forceinline__ void clear_unseen(const Entry& tile) {
    const std::int32_t seen =
        max(visible_of(tile, Traits::kQueryRows - 1) - tile.block * Traits::kTileTokens, 0);
    if (seen >= Traits::kTileTokens) return;
    const std::uint32_t base = ptx::shared_address(shared_.stages[position_.stage]);
#pragma unroll 1
    for (int i = seen * 8 + threadIdx.x; i < Traits::kTileTokens * 8;
         i += Traits::kComputeThreads) {
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice) {
        ptx::store_shared_16(base + slice * Traits::kSliceBytes + i * 16, uint4{0, 0, 0, 0});
      }
    }
    ptx::fence_async_proxy();
    synchronise();
  }

  // The tile's address in a uniform register, from which descriptors follow.
  __device__ __forceinline__ std::uint32_t tile_address() const {
    return ptx::uniform(ptx::shared_address(shared_.stages[position_.stage]));
  }

  // scores (64 tokens, kQueryRows), not scaled.
  __device__ __forceinline__ void compute_scores(float (&scores)[kScores]) {
    const std::uint64_t keys = mma::rows_descriptor(tile_address());
    const std::uint64_t queries =
        mma::rows_descriptor(ptx::uniform(ptx::shared_address(shared_.query)));
    ptx::discard_registers(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ScoreMma::multiply(scores, mma::advance(keys, slice * Traits::kSliceBytes + step * 32),
                           mma::advance(queries, slice * Traits::kQuerySliceBytes + step * 32),
                           slice > 0 || step > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(scores);
  }

  // P^T relative to the references as they stand; true, in all threads, if one has been outgrown
  // and nothing was added to the sums.
  __device__ __forceinline__ bool fast_softmax(const float (&scores)[kScores],
                                               float (&probabilities)[kScores]) {
    float tile_sum[kHeads];
    bool outgrown = false;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
      probabilities[low] = exp2_approximate(fmaf(scores[low], params_.scale_log2, -reference_[i]));
      probabilities[high] =
          exp2_approximate(fmaf(scores[high], params_.scale_log2, -reference_[i]));
      tile_sum[i] = probabilities[low] + probabilities[high];
      // Written so that NaN counts as outgrown.
      outgrown |= !(tile_sum[i] <= kOutgrownSum);
    }
    if (ptx::named_barrier_or(Traits::kComputeWarpgroup, Traits::kComputeThreads, outgrown)) {
      return true;
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) sum_[i] += tile_sum[i];
    return false;
  }

  // Masks where asked to, raises the references to the true maxima where they were lower, and
  // rescales.
  __device__ __forceinline__ void exact_softmax(const float (&scores)[kScores],
                                                float (&probabilities)[kScores], const Entry& tile,
                                                bool is_masked) {
    const std::int32_t token = tile.block * Traits::kTileTokens + 16 * warp_ + lane_ / 4;
    float maximum[kHeads];
    bool sees_low[kHeads], sees_high[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
      const std::int32_t visible = is_masked ? visible_of(tile, column(i)) : INT32_MAX;
      sees_low[i] = token < visible;
      sees_high[i] = token + 8 < visible;
      maximum[i] = reference_[i];
      if (sees_low[i]) maximum[i] = fmaxf(maximum[i], scores[low] * params_.scale_log2);
      if (sees_high[i]) maximum[i] = fmaxf(maximum[i], scores[high] * params_.scale_log2);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], lanes));
      }
      if (lane_ < 4) shared_.reduction[warp_][column(i)] = maximum[i];
    }
    synchronise();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
#pragma unroll
      for (int warp = 0; warp < Traits::kComputeWarps; ++warp) {
        maximum[i] = fmaxf(maximum[i], shared_.reduction[warp][column(i)]);
      }
      const float scale = exp2_approximate(reference_[i] - maximum[i]);
      reference_[i] = maximum[i];
      probabilities[low] =
          sees_low[i] ? exp2_approximate(fmaf(scores[low], params_.scale_log2, -maximum[i])) : 0.0f;
      probabilities[high] =
          sees_high[i] ? exp2_approximate(fmaf(scores[high], params_.scale_log2, -maximum[i]))
                       : 0.0f;
      sum_[i] = sum_[i] * scale + probabilities[low] + probabilities[high];
      // What the first tile is about to overwrite may be anything, so this is done for it too.
      scale_accumulators(i, scale);
    }
    // The reduction has been read by all before it is written again.
    synchronise();
  }

  __device__ __forceinline__ void scale_accumulators(int head, float scale) {
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      accumulators_[slice][head / 2 * 4 + head % 2] *= scale;
      accumulators_[slice][head / 2 * 4 + head % 2 + 2] *= scale;
    }
  }

  // P (kQueryRows, 64 tokens), from the transposed fragments.
  __device__ __forceinline__ void store_probabilities(const float (&probabilities)[kScores]) {
    const std::uint32_t base = ptx::shared_address(shared_.probabilities);
    const int query_row = lane_ / 16 * 8 + lane_ % 8;
    const int chunk = 2 * warp_ + lane_ / 8 % 2;
#pragma unroll
    for (int group = 0; group < Traits::kQueryRows / 16; ++group) {
      const float* p = probabilities + 8 * group;
      ptx::store_matrices_transposed(base + mma::chunk_offset(query_row + 16 * group, chunk),
                                     pack<Element>(p[0], p[1]), pack<Element>(p[2], p[3]),
                                     pack<Element>(p[4], p[5]), pack<Element>(p[6], p[7]));
    }
  }

  // accumulators (512 value columns, kQueryRows) += V^T (512, 64 tokens) * P^T (64 tokens, rows)
  __device__ __forceinline__ void accumulate(bool is_first) {
    const std::uint64_t probabilities =
        mma::rows_descriptor(ptx::shared_address(shared_.probabilities));
    const std::uint64_t values = mma::columns_descriptor(tile_address(), Traits::kSliceBytes);
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      ptx::pin_registers(accumulators_[slice]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
#pragma unroll
      for (int step = 0; step < Traits::kTileTokens / 16; ++step) {
        ValueMma::multiply(
            accumulators_[slice],
            mma::advance(values, slice * Traits::kSliceBytes + step * 16 * mma::kRowBytes),
            mma::advance(probabilities, step * 32), step > 0 || !is_first);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      ptx::pin_registers(accumulators_[slice]);
    }
  }

  // Each warp lets go of the tile.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ < ptx::kArrivingLanes) {
      ptx::mbarrier_arrive(ptx::shared_address(&shared_.empty[position_.stage]));
    }
    position_.advance();
  }

  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot) {
    // Over the warps: each query row's sum, and the largest magnitude of its accumulators.
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
        largest = fmaxf(largest, fmaxf(fabsf(accumulators_[slice][i / 2 * 4 + i % 2]),
                                       fabsf(accumulators_[slice][i / 2 * 4 + i % 2 + 2])));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum_[i] += __shfl_xor_sync(~0u, sum_[i], lanes);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      if (lane_ < 4) {
        shared_.reduction[warp_][column(i)] = sum_[i];
        shared_.magnitude[warp_][column(i)] = largest;
        if (warp_ == 0) shared_.reference[column(i)] = reference_[i];
      }
    }
    synchronise();
    if (threadIdx.x < Traits::kQueryRows) finish_query_row(row, slot, threadIdx.x);
    synchronise();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) scale_accumulators(i, shared_.factor[column(i)]);
    if (slot < 0) {
      stage_rows<Element>();
      write_rows([&](int query_row, int chunk, uint4 value) {
        store_row_chunk(out_row(row, query_row) + chunk * 8, value, params_.shape.out_is_aligned);
      });
    } else {
      stage_rows<__half>();
      std::uint16_t* partial =
          params_.shape.partial_out +
          partial_index(params_.shape, slot, blockIdx.y, 0) * Traits::kHeadDimV;
      write_rows([&](int query_row, int chunk, uint4 value) {
        reinterpret_cast<uint4*>(partial + query_row * Traits::kHeadDimV)[chunk] = value;
      });
    }
    // Queries and reduction are free for the next row.
    synchronise();
  }

  // What the accumulators of a query row are multiplied by, and its lse or statistics.
  __device__ __forceinline__ void finish_query_row(std::int32_t row, std::int32_t slot,
                                                   int query_row) {
    float sum = 0.0f, largest = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Traits::kComputeWarps; ++warp) {
      sum += shared_.reduction[warp][query_row];
      largest = fmaxf(largest, shared_.magnitude[warp][query_row]);
    }
    float factor = inverse_sum(sum);
    const float scale = partial_scale(largest * factor);
    if (slot >= 0) factor *= inverse_partial_scale(scale);
    shared_.factor[query_row] = factor;
    if (query_row >= params_.shape.query_rows) return;
    const float lse = natural_lse(shared_.reference[query_row], sum);
    if (slot < 0) {
      *lse_at(params_.shape, row, query_row_at(params_.shape, blockIdx.y, query_row)) = lse;
      return;
    }
    PartialStatistics* statistics =
        params_.shape.partial_statistics +
        partial_index(params_.shape, slot, blockIdx.y, query_row) * kPartialHalves;
    statistics[0] = statistics[1] = {lse, scale};
  }

  // 16-byte chunk of the result as it is staged over the queries.
  __device__ __forceinline__ std::uint32_t staged(int query_row, int chunk) const {
    return ptx::shared_address(shared_.query) +
           (query_row * (Traits::kHeadDimV / 8) + (chunk ^ (query_row & 7))) * 16;
  }

  // The accumulators over the queries, as rows of 2-byte elements.
  template <class Stored>
  __device__ __forceinline__ void stage_rows() const {
    const int query_row = lane_ / 16 * 8 + lane_ % 8;
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      const int chunk = slice * 8 + 2 * warp_ + lane_ / 8 % 2;
#pragma unroll
      for (int group = 0; group < Traits::kQueryRows / 16; ++group) {
        const float* a = accumulators_[slice] + 8 * group;
        ptx::store_matrices_transposed(staged(query_row + 16 * group, chunk),
                                       pack<Stored>(a[0], a[1]), pack<Stored>(a[2], a[3]),
                                       pack<Stored>(a[4], a[5]), pack<Stored>(a[6], a[7]));
      }
    }
    synchronise();
  }

  __device__ __forceinline__ Element* out_row(std::int32_t row, int query_row) const {
    return static_cast<Element*>(params_.shape.out) +
           out_offset(params_.shape, row, query_row_at(params_.shape, blockIdx.y, query_row));
  }

  // store(query row, chunk of 8 columns, its 16 bytes) for all that is staged.
  template <class Store>
  __device__ __forceinline__ void write_rows(const Store& store) const {
    constexpr int kChunks = Traits::kHeadDimV / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < params_.shape.query_rows * kChunks;
         i += Traits::kComputeThreads) {
      store(i / kChunks, i % kChunks, ptx::load_shared_16(staged(i / kChunks, i % kChunks)));
    }
  }

  __device__ __forceinline__ void write_empty(std::int32_t row) {
    constexpr int kChunks = Traits::kHeadDimV / 8;
    for (int i = threadIdx.x; i < params_.shape.query_rows * kChunks;
         i += Traits::kComputeThreads) {
      store_row_chunk(out_row(row, i / kChunks) + i % kChunks * 8, uint4{0, 0, 0, 0},
                      params_.shape.out_is_aligned);
    }
    if (static_cast<int>(threadIdx.x) < params_.shape.query_rows) {
      *lse_at(params_.shape, row, query_row_at(params_.shape, blockIdx.y, threadIdx.x)) = kInfinity;
    }
  }

  const DecodeParams& params_;
  NarrowShared<Traits>& shared_;
  int warp_;
  int lane_;
  StagePosition<Traits> position_;
  float reference_[kHeads];  // base 2, scaled
  float sum_[kHeads];        // of this thread's tokens, relative to the reference
  std::int32_t first_masked_block_;
  float accumulators_[Traits::kValueSlices][kScores] = {};
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    narrow_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  NarrowShared<Traits>& shared = *reinterpret_cast<NarrowShared<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    ptx::prefetch_map(params.k_map);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), Traits::kEmptyArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x >= Traits::kComputeThreads) prefetch_walk(params, blockIdx.z);
  __syncthreads();
  ptx::wait_for_previous_grid();
  // Only now: what the combine reads before it waits, the plan, was written before this grid.
  ptx::allow_next_grid();

  if (threadIdx.x < Traits::kComputeThreads) {
    NarrowCompute<Traits>(params, shared).run();
  } else {
    NarrowLoader<Traits>(params, shared).run();
  }
}

}  // namespace flashmla::cuda::sm90a
