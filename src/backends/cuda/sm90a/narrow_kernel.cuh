// Attention for up to 32 query rows of a key/value head. One warp keeps a ring of slices filled;
// one warpgroup computes S^T = K Q^T, P^T, and O^T += V^T P^T.
#pragma once

#include <cstdint>

#include "backends/cuda/common/entry_walk.cuh"
#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/mma/warpgroup_mma.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "backends/cuda/ptx/matrix.cuh"
#include "backends/cuda/ptx/memory.cuh"
#include "backends/cuda/sm90a/narrow_traits.cuh"

namespace flashmla::cuda::sm90a {

// Slot of the ring and the parity of its phase.
template <class Traits>
struct SlotPosition {
  int slot = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == Traits::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// --- Load: the last warp -------------------------------------------------------------------------

template <class Traits>
class NarrowLoader {
 public:
  __device__ __forceinline__ NarrowLoader(const DecodeParams& params, NarrowShared<Traits>& shared)
      : params_(params),
        shared_(shared),
        lane_(threadIdx.x % 32),
        boxes_(Traits::kTileTokens >> params.k_box_rows_log2) {}

  __device__ __forceinline__ void run() {
    EntryWalk walk;
    begin_walk(walk, params_.shape, blockIdx.z);
    std::int32_t length;
    Entry entry = next_tile(walk, length);
    std::int32_t page = page_of(entry, length);
    while (entry.kind == Entry::kTile) {
      // The page of the tile after this one is asked for before this one waits for its slots.
      std::int32_t next_length;
      const Entry next = next_tile(walk, next_length);
      const std::int32_t next_page = page_of(next, next_length);
      load_tile(entry, length, page);
      entry = next;
      page = next_page;
      length = next_length;
    }
  }

 private:
  __device__ __forceinline__ Entry next_tile(EntryWalk& walk, std::int32_t& length) const {
    for (;;) {
      length = walk.length;
      const Entry entry = next_entry(walk, params_.shape);
      if (entry.kind == Entry::kTile || entry.kind == Entry::kEnd) return entry;
    }
  }

  // First token of the tile's box `box` of a slice.
  __device__ __forceinline__ std::int32_t token_of(const Entry& entry, int box) const {
    return entry.block * Traits::kTileTokens + (box << params_.k_box_rows_log2);
  }

  // Page of this lane's box, or of the one `boxes_further` on; -1, which the copy engine answers
  // with zeros, past the end of the row, where the table may hold anything.
  __device__ __forceinline__ std::int32_t page_of(const Entry& entry, std::int32_t length,
                                                  int boxes_further = 0) const {
    const std::int32_t token = token_of(entry, lane_ % boxes_ + boxes_further);
    if (entry.kind != Entry::kTile || token >= length) return -1;
    return params_.block_table[entry.row * params_.block_table_batch_stride +
                               params_.page_size.quotient(token) * params_.block_table_page_stride];
  }

  // Lane l copies box l of every slice; with boxes of one token, box l + 32 too.
  __device__ __forceinline__ void load_tile(const Entry& entry, std::int32_t length,
                                            std::int32_t page) {
    const std::int32_t far_page = boxes_ > 32 ? page_of(entry, length, 32) : -1;
    const std::int32_t in_page = params_.page_size.remainder(token_of(entry, lane_));
    const std::int32_t far_in_page = params_.page_size.remainder(token_of(entry, lane_ + 32));
    const std::uint32_t row_offset = (lane_ << params_.k_box_rows_log2) * mma::kRowBytes;
#pragma unroll 1
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.empty[position_.slot]), position_.parity ^ 1);
      const std::uint32_t full = ptx::shared_address(&shared_.full[position_.slot]);
      const std::uint32_t destination =
          ptx::shared_address(shared_.slots[position_.slot]) + row_offset;
      if (lane_ == 0) ptx::mbarrier_arrive_expect(full, Traits::kSliceBytes);
      __syncwarp();
      if (lane_ < boxes_) {
        ptx::copy_box(destination, params_.k_map, full, 0, in_page, slice, blockIdx.y, page);
      }
      if (boxes_ > 32) {
        ptx::copy_box(destination + 32 * mma::kRowBytes, params_.k_map, full, 0, far_in_page, slice,
                      blockIdx.y, far_page);
      }
      position_.advance();
    }
  }

  const DecodeParams& params_;
  NarrowShared<Traits>& shared_;
  int lane_;
  int boxes_;  // of a slice
  SlotPosition<Traits> position_;
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
    if (is_masked) clear_unseen(tile);
    float scores[kScores];
    compute_scores(scores);

    float probabilities[kScores];
    bool exact = is_first || is_masked;
    if (!exact) exact = fast_softmax(scores, probabilities);
    if (exact) exact_softmax(scores, probabilities, tile);
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
    SlotPosition<Traits> position = position_;
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.full[position.slot]), position.parity);
      const std::uint32_t base = ptx::shared_address(shared_.slots[position.slot]);
      for (int i = seen * 8 + threadIdx.x; i < Traits::kTileTokens * 8;
           i += Traits::kComputeThreads) {
        ptx::store_shared_16(base + i * 16, uint4{0, 0, 0, 0});
      }
      position.advance();
    }
    ptx::fence_async_proxy();
    synchronise();
  }

  // The ring's position in uniform registers, from which descriptors follow.
  __device__ __forceinline__ SlotPosition<Traits> uniform_position() const {
    return {static_cast<int>(ptx::uniform(position_.slot)),
            static_cast<int>(ptx::uniform(position_.parity))};
  }

  // scores (64 tokens, kQueryRows), not scaled; slice by slice, as they arrive.
  __device__ __forceinline__ void compute_scores(float (&scores)[kScores]) {
    SlotPosition<Traits> position = uniform_position();
    ptx::discard_registers(scores);
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.full[position.slot]), position.parity);
      // Without it the compiler puts its own here, and serialises.
      ptx::wgmma_fence();
      const std::uint64_t keys =
          mma::rows_descriptor(ptx::shared_address(shared_.slots[position.slot]));
      const std::uint64_t queries = mma::rows_descriptor(ptx::shared_address(shared_.query[slice]));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ScoreMma::multiply(scores, mma::advance(keys, step * 32), mma::advance(queries, step * 32),
                           slice > 0 || step > 0);
      }
      position.advance();
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
      probabilities[low] =
          ptx::exp2_approximate(fmaf(scores[low], params_.scale_log2, -reference_[i]));
      probabilities[high] =
          ptx::exp2_approximate(fmaf(scores[high], params_.scale_log2, -reference_[i]));
      tile_sum[i] = probabilities[low] + probabilities[high];
      // Written so that NaN counts as outgrown.
      outgrown |= !(tile_sum[i] <= kOutgrown);
    }
    if (ptx::named_barrier_or(Traits::kComputeWarpgroup, Traits::kComputeThreads, outgrown)) {
      return true;
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) sum_[i] += tile_sum[i];
    return false;
  }

  // Masks, raises the references to the true maxima where they were lower, and rescales.
  __device__ __forceinline__ void exact_softmax(const float (&scores)[kScores],
                                                float (&probabilities)[kScores],
                                                const Entry& tile) {
    const std::int32_t token = tile.block * Traits::kTileTokens + 16 * warp_ + lane_ / 4;
    float maximum[kHeads];
    bool sees_low[kHeads], sees_high[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
      const std::int32_t visible = visible_of(tile, column(i));
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
      const float scale = ptx::exp2_approximate(reference_[i] - maximum[i]);
      reference_[i] = maximum[i];
      probabilities[low] =
          sees_low[i] ? ptx::exp2_approximate(fmaf(scores[low], params_.scale_log2, -maximum[i]))
                      : 0.0f;
      probabilities[high] =
          sees_high[i] ? ptx::exp2_approximate(fmaf(scores[high], params_.scale_log2, -maximum[i]))
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
    SlotPosition<Traits> position = uniform_position();
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      ptx::pin_registers(accumulators_[slice]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      const std::uint64_t values = mma::columns_descriptor(
          ptx::shared_address(shared_.slots[position.slot]), Traits::kSliceBytes);
#pragma unroll
      for (int step = 0; step < Traits::kTileTokens / 16; ++step) {
        ValueMma::multiply(accumulators_[slice], mma::advance(values, step * 16 * mma::kRowBytes),
                           mma::advance(probabilities, step * 32), step > 0 || !is_first);
      }
      position.advance();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      ptx::pin_registers(accumulators_[slice]);
    }
  }

  // Each warp lets go of the tile's slots, a lane a slot.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_ < Traits::kSlices) {
      const int slot = (position_.slot + lane_) % Traits::kSlots;
      ptx::mbarrier_arrive(ptx::shared_address(&shared_.empty[slot]));
    }
#pragma unroll
    for (int slice = 0; slice < Traits::kSlices; ++slice) position_.advance();
  }

  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum_[i] += __shfl_xor_sync(~0u, sum_[i], lanes);
      if (lane_ < 4) shared_.reduction[warp_][column(i)] = sum_[i];
    }
    synchronise();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < Traits::kComputeWarps; ++warp) {
        sum += shared_.reduction[warp][column(i)];
      }
      scale_accumulators(i, inverse_sum(sum));
      if (threadIdx.x < 4 && column(i) < params_.shape.query_rows) {
        const float lse = natural_lse(reference_[i], sum);
        if (slot < 0) {
          *lse_at(params_.shape, row, query_row_at(params_.shape, blockIdx.y, column(i))) = lse;
        } else {
          params_.shape.partial_lse[partial_index(params_.shape, slot, blockIdx.y, column(i))] =
              lse;
        }
      }
    }
    if (slot < 0) {
      write_rows(row);
    } else {
      write_partials(slot);
    }
    // Queries and reduction are free for the next row.
    synchronise();
  }

  __device__ __forceinline__ void write_partials(std::int32_t slot) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (column(i) >= params_.shape.query_rows) continue;
      float* destination =
          params_.shape.partial_out +
          partial_index(params_.shape, slot, blockIdx.y, column(i)) * Traits::kHeadDimV +
          16 * warp_ + lane_ / 4;
#pragma unroll
      for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
        destination[slice * 64] = accumulators_[slice][i / 2 * 4 + i % 2];
        destination[slice * 64 + 8] = accumulators_[slice][i / 2 * 4 + i % 2 + 2];
      }
    }
  }

  // 16-byte chunk of the output as it is staged over the queries.
  __device__ __forceinline__ std::uint32_t staged(int query_row, int chunk) const {
    return ptx::shared_address(shared_.query) +
           (query_row * (Traits::kHeadDimV / 8) + (chunk ^ (query_row & 7))) * 16;
  }

  __device__ __forceinline__ Element* out_row(std::int32_t row, int query_row) const {
    return static_cast<Element*>(params_.shape.out) +
           out_offset(params_.shape, row, query_row_at(params_.shape, blockIdx.y, query_row));
  }

  __device__ __forceinline__ void write_rows(std::int32_t row) {
    const int query_row = lane_ / 16 * 8 + lane_ % 8;
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
      const int chunk = slice * 8 + 2 * warp_ + lane_ / 8 % 2;
#pragma unroll
      for (int group = 0; group < Traits::kQueryRows / 16; ++group) {
        const float* a = accumulators_[slice] + 8 * group;
        ptx::store_matrices_transposed(staged(query_row + 16 * group, chunk),
                                       pack<Element>(a[0], a[1]), pack<Element>(a[2], a[3]),
                                       pack<Element>(a[4], a[5]), pack<Element>(a[6], a[7]));
      }
    }
    synchronise();
    constexpr int kChunks = Traits::kHeadDimV / 8;
    for (int i = threadIdx.x; i < params_.shape.query_rows * kChunks;
         i += Traits::kComputeThreads) {
      store_row_chunk(out_row(row, i / kChunks) + i % kChunks * 8,
                      ptx::load_shared_16(staged(i / kChunks, i % kChunks)),
                      params_.shape.out_is_aligned);
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
  SlotPosition<Traits> position_;
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
    for (int slot = 0; slot < Traits::kSlots; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[slot]), Traits::kComputeWarps);
    }
    ptx::fence_mbarrier_init();
  }
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
