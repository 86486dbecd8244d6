// Attention for 64 query rows at a time. One warpgroup computes scores and softmax with the queries
// in registers; two accumulate 256 value columns each and keep a ring of three whole tiles filled.
#pragma once

#include <cstdint>

#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/prefetch.cuh"
#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/mma/warpgroup_mma.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "backends/cuda/ptx/matrix.cuh"
#include "backends/cuda/ptx/memory.cuh"
#include "backends/cuda/sm90a/load.cuh"
#include "backends/cuda/sm90a/wide_traits.cuh"

namespace flashmla::cuda::sm90a {

// The block's place in the grid (tiles of query rows, key/value heads, parts). Blocks of one part
// and key/value head are neighbours, because they read the same tiles at the same time and the
// hardware then fetches them once. Read from special registers where it is needed: registers are
// short.
template <class Traits>
struct WidePlace {
  static __device__ __forceinline__ std::int32_t part() { return blockIdx.z; }
  static __device__ __forceinline__ std::int32_t kv_head() { return blockIdx.y; }
  static __device__ __forceinline__ std::int32_t first_query_row() {
    return blockIdx.x * Traits::kTileRows;
  }
};

// Stage of the ring and the parity of the phase that fills it.
template <class Traits>
struct RingPosition {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Traits::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// --- Load: first warp of the last warpgroup ------------------------------------------------------

template <class Traits>
class Loader {
  using Place = WidePlace<Traits>;

 public:
  __device__ __forceinline__ Loader(const DecodeParams& params, WideShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void start() {
    if (threadIdx.x % 32 == 0) begin_walk(shared_.walk, params_.shape, Place::part());
#pragma unroll 1
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      prepare();
      load(stage);
    }
  }

  // Finds the next entry and its pages. All 32 lanes. Done while a product runs, so that nothing
  // but the copy stands between a stage becoming free and its next load.
  __device__ __forceinline__ void prepare() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.next = next_entry(shared_.walk, params_.shape);
    __syncwarp();
    if (shared_.next.kind != Entry::kTile) return;
    page_ = page_of_box(params_, shared_.next, threadIdx.x % 32 & (boxes_of_slice(params_) - 1));
  }

  // Fills a free stage with the prepared entry. All 32 lanes.
  __device__ __forceinline__ void load(int stage) {
    __syncwarp();
    const std::uint32_t full = ptx::shared_address(&shared_.full[stage]);
    const std::uint32_t destination = ptx::shared_address(shared_.stages[stage]);
    const Entry& entry = shared_.next;
    if (threadIdx.x % 32 == 0) {
      shared_.entries[stage] = entry;
      const bool has_data = entry.kind == Entry::kTile || entry.kind == Entry::kQuery;
      ptx::mbarrier_arrive_expect(full, has_data ? Traits::kSlices * Traits::kSliceBytes : 0);
    }
    __syncwarp();
    if (entry.kind == Entry::kTile) {
      copy_tile<Traits::kSlices>(
          params_, entry.block, Place::kv_head(),
          [this](int box) { return box < 32 ? page_ : page_of_box(params_, shared_.next, box); },
          destination, full);
    } else if (entry.kind == Entry::kQuery) {
      copy_queries<Traits::kSlices>(params_, entry.row, Place::kv_head(), Place::first_query_row(),
                                    destination, full);
    }
  }

 private:
  const DecodeParams& params_;
  WideShared<Traits>& shared_;
  std::int32_t page_ = -1;  // of this lane's first box
};

// --- Scores and softmax: warpgroup 0 -------------------------------------------------------------

template <class Traits>
class ScoreRole {
  using Place = WidePlace<Traits>;
  using Element = typename Traits::Element;
  using Mma = mma::WarpgroupMma<Element, false, false, 32>;
  static constexpr int kScores = 32;  // of a thread: 2 query rows x 16 tokens

 public:
  __device__ __forceinline__ ScoreRole(const DecodeParams& params, WideShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    RingPosition<Traits> position;
    std::int32_t row = -1;  // whose statistics are pending
    std::int32_t slot = -1;
    for (;;) {
      ptx::mbarrier_wait(address(shared_.full[position.stage]), position.parity);
      const Entry entry = shared_.entries[position.stage];
      if (row >= 0) finish_row(row, slot, position.stage);
      if (threadIdx.x == 0) shared_.ended[position.stage] = {row, slot};
      row = -1;
      if (entry.kind == Entry::kQuery) {
        row = entry.row;
        slot = entry.detail;
        start_row(entry, position.stage);
      } else if (entry.kind == Entry::kEmptyRow) {
        write_empty_lse(entry.row);
      }
      __syncwarp();
      arrive(shared_.ready[position.stage]);
      arrive(shared_.gate[position.stage]);
      if (entry.kind == Entry::kEnd) return;
      position.advance();
      if (entry.kind == Entry::kQuery) run_tiles(position, entry.block, entry.end_block);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) {
    return ptx::shared_address(&barrier);
  }

  // Where this thread stands, asked again at each use: registers are short.
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x) % 32);
  }
  static __device__ __forceinline__ int warp() {
    return static_cast<int>(ptx::opaque(threadIdx.x) / 32);
  }

  __device__ __forceinline__ void arrive(const std::uint64_t& barrier) const {
    if (threadIdx.x % 32 < ptx::kArrivingLanes) ptx::mbarrier_arrive(address(barrier));
  }

  // Query row of the tile: this thread computes on it and on the one 8 below.
  __device__ __forceinline__ int tile_row() const { return 16 * warp() + lane() / 4; }

  // How many tokens a query row of the block sees. Asked again where it is needed: registers are
  // short, and only the first and the last tiles of a row ask.
  __device__ __forceinline__ std::int32_t visible_of(const Entry& entry, int tile_row) const {
    const std::int32_t query_row =
        min(Place::first_query_row() + tile_row, params_.shape.query_rows - 1);
    return visible_tokens(params_, entry.row, params_.shape.heads_per_kv_head.quotient(query_row),
                          entry.length);
  }

  // Takes the queries out of the stage: kRegisterSteps into registers, the rest into the tail.
  __device__ __forceinline__ void start_row(const Entry& entry, int stage) {
    first_masked_block_ = visible_of(entry, 0) / Traits::kTileTokens;
    reference_[0] = reference_[1] = 0.0f;
    sum_[0] = sum_[1] = 0.0f;

    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]);
    const int fragment_row = 16 * warp() + lane() % 16;
#pragma unroll
    for (int step = 0; step < Traits::kRegisterSteps; ++step) {
      ptx::load_matrices(query_[step],
                         base + step / 4 * Traits::kSliceBytes +
                             mma::chunk_offset(fragment_row, step % 4 * 2 + lane() / 16));
    }
    // Row r, half h of a step goes to core matrix (r / 8, h): 8 rows of 16 bytes.
    const std::uint32_t tail = ptx::shared_address(shared_.query_tail);
#pragma unroll 1
    for (int i = threadIdx.x; i < Traits::kTailSteps * 2 * Traits::kTileRows;
         i += Traits::kWarpgroupThreads) {
      const int tail_row = i % Traits::kTileRows, half = i / Traits::kTileRows;
      const int chunk = Traits::kRegisterSteps * 2 + half;  // of the query row
      const uint4 value = ptx::load_shared_16(base + chunk / 8 * Traits::kSliceBytes +
                                              mma::chunk_offset(tail_row, chunk % 8));
      ptx::store_shared_16(tail + half / 2 * Traits::kTailStepBytes + tail_row / 8 * 256 +
                               half % 2 * 128 + tail_row % 8 * 16,
                           value);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads);
  }

  // Tiles of the row from `block` to `end_block`. What they are follows from there, so that nothing
  // has to be read between a tile's arrival and its scores.
  __device__ __forceinline__ void run_tiles(RingPosition<Traits>& position, std::int32_t block,
                                            std::int32_t end_block) {
    const std::int32_t first_block = block;
    for (; block < end_block; ++block) {
      const int stage = position.stage;
      ptx::mbarrier_wait(address(shared_.full[stage]), position.parity);
      const bool is_masked = block >= first_masked_block_;
      if (is_masked) clear_unseen(shared_.entries[stage], stage);
      float scores[kScores];
      // The value product of the tile before waits for this one's scores.
      compute_scores(scores, stage, block != first_block);
      // P takes the place of the last slice, which the other warps may still be reading.
      arrive(shared_.scored);
      softmax(scores, stage, is_masked, block == first_block);
      __syncwarp();
      arrive(shared_.ready[stage]);
      if (block + 1 == end_block) arrive(shared_.gate[stage]);
      position.advance();
    }
  }

  // Rows from `seen` on hold tokens that no query of this block sees: whatever bits they hold must
  // not reach a product, where 0 times NaN is NaN.
  __device__ __forceinline__ void clear_unseen(const Entry& entry, int stage) {
    const std::int32_t seen =
        max(visible_of(entry, Traits::kTileRows - 1) - entry.block * Traits::kTileTokens, 0);
    if (seen >= Traits::kTileTokens) return;
    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]);
#pragma unroll 1
    for (int i = seen * 8 + threadIdx.x; i < Traits::kTileTokens * 8;
         i += Traits::kWarpgroupThreads) {
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice) {
        ptx::store_shared_16(base + slice * Traits::kSliceBytes + i * 16, uint4{0, 0, 0, 0});
      }
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads);
  }

  // scores (64 query rows, 64 tokens), not scaled. Opens the gate of the tile before on the way.
  __device__ __forceinline__ void compute_scores(float (&scores)[kScores], int stage,
                                                 bool opens_gate) {
    const std::uint64_t keys = mma::rows_descriptor(ptx::shared_address(shared_.stages[stage]));
    const std::uint64_t tail = mma::make_descriptor(ptx::shared_address(shared_.query_tail), 128,
                                                    256, mma::Swizzle::kNone);
    ptx::discard_registers(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      const std::uint64_t key = mma::advance(keys, step / 4 * Traits::kSliceBytes + step % 4 * 32);
      if (step < Traits::kRegisterSteps) {
        Mma::multiply(scores, query_[step < Traits::kRegisterSteps ? step : 0], key, step > 0);
      } else {
        Mma::multiply(scores,
                      mma::advance(tail, (step - Traits::kRegisterSteps) * Traits::kTailStepBytes),
                      key, 1);
      }
      if (step == Traits::kGateSlices * 4 - 1) ptx::wgmma_commit();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (opens_gate) arrive(shared_.gate[stage == 0 ? Traits::kStages - 1 : stage - 1]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(scores);
  }

  // Adds the tile to the sums and leaves P where its last slice was. Each warp decides for its own
  // query rows whether their references still serve.
  __device__ __forceinline__ void softmax(float (&scores)[kScores], int stage, bool is_masked,
                                          bool is_first) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = fmaf(scores[i], params_.scale_log2, -reference_[i / 2 % 2]);
    }
    if (is_masked) mask_unseen(scores, stage);
    float largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < kScores; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    const bool raises =
        __any_sync(~0u, is_first || largest[0] > kOutgrown || largest[1] > kOutgrown);
    if (raises) raise_references(scores, largest, stage, is_first);
    std::uint32_t packed[kScores / 2];
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float low = exp2_approximate(scores[2 * i]), high = exp2_approximate(scores[2 * i + 1]);
      sum_[i % 2] += low + high;
      packed[i] = pack<Element>(low, high);
    }
    if (threadIdx.x % 32 == 0) shared_.rescale[stage][warp()] = raises && !is_first;
    ptx::mbarrier_wait(address(shared_.scored), scored_parity_);
    scored_parity_ ^= 1;
    store_probabilities(packed, stage);
    ptx::fence_async_proxy();
  }

  // Exponents of tokens that their query rows do not see become -infinity.
  __device__ __forceinline__ void mask_unseen(float (&exponents)[kScores], int stage) const {
    const Entry& entry = shared_.entries[stage];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Columns below this one are seen; this thread's are 8 * i + {0, 1} past its first.
      const std::int32_t seen = visible_of(entry, tile_row() + 8 * row) -
                                entry.block * Traits::kTileTokens - lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        if (8 * i >= seen) exponents[4 * i + 2 * row] = -kInfinity;
        if (8 * i + 1 >= seen) exponents[4 * i + 2 * row + 1] = -kInfinity;
      }
    }
  }

  // Raises the references of the warp's query rows by their largest exponents, in the first tile of
  // a row from zero to the true maximum, and leaves what the accumulators have to be multiplied by.
  __device__ __forceinline__ void raise_references(float (&exponents)[kScores],
                                                   const float (&largest)[2], int stage,
                                                   bool is_first) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float rise = fmaxf(largest[row], __shfl_xor_sync(~0u, largest[row], 1));
      rise = fmaxf(rise, __shfl_xor_sync(~0u, rise, 2));
      // A query row that sees nothing of the first tile keeps its zero.
      if (!is_first || rise == -kInfinity) rise = fmaxf(rise, 0.0f);
      reference_[row] += rise;
      const float scale = is_first ? 1.0f : exp2_approximate(-rise);
      sum_[row] *= scale;
      if (lane() % 4 == 0) shared_.scales[stage][tile_row() + 8 * row] = scale;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        exponents[4 * i + 2 * row] -= rise;
        exponents[4 * i + 2 * row + 1] -= rise;
      }
    }
  }

  // P (64 query rows, 64 tokens) over the tile's last slice, which all warps have read.
  __device__ __forceinline__ void store_probabilities(const std::uint32_t (&packed)[kScores / 2],
                                                      int stage) {
    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]) +
                               Traits::kProbabilitySlice * Traits::kSliceBytes;
    const std::uint32_t first = mma::chunk_offset(16 * warp() + lane() % 16, lane() / 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Chunk 2 * i + lane / 16: in the swizzle, two chunks further is an exclusive or.
      ptx::store_matrices(base + (first ^ (2 * i << 4)), packed[4 * i], packed[4 * i + 1],
                          packed[4 * i + 2], packed[4 * i + 3]);
    }
  }

  // The ended row's lse, and its inverse sums for the value warpgroups.
  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot, int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane() % 4 != 0) continue;
      shared_.scales[stage][tile_row() + 8 * half] = inverse_sum(sum);
      const std::int32_t query_row = Place::first_query_row() + tile_row() + 8 * half;
      if (query_row >= params_.shape.query_rows) continue;
      const float lse = natural_lse(reference_[half], sum);
      if (slot < 0) {
        *lse_at(params_.shape, row, query_row_at(params_.shape, Place::kv_head(), query_row)) = lse;
      } else {
        PartialStatistics* statistics =
            params_.shape.partial_statistics +
            partial_index(params_.shape, slot, Place::kv_head(), query_row) * kPartialHalves;
        statistics[0].lse = statistics[1].lse = lse;
      }
    }
  }

  __device__ __forceinline__ void write_empty_lse(std::int32_t row) {
    const std::int32_t query_row = Place::first_query_row() + threadIdx.x;
    if (threadIdx.x < Traits::kTileRows && query_row < params_.shape.query_rows) {
      *lse_at(params_.shape, row, query_row_at(params_.shape, Place::kv_head(), query_row)) =
          kInfinity;
    }
  }

  const DecodeParams& params_;
  WideShared<Traits>& shared_;
  std::uint32_t query_[Traits::kRegisterSteps][4];
  int scored_parity_ = 0;
  float reference_[2];               // base 2, scaled
  float sum_[2];                     // of this thread's columns, relative to the reference
  std::int32_t first_masked_block_;  // from here on some query row does not see the whole tile
};

// --- Values: warpgroups 1 and 2 ------------------------------------------------------------------

template <class Traits>
class ValueRole {
  using Place = WidePlace<Traits>;
  using Element = typename Traits::Element;
  using Mma = mma::WarpgroupMma<Element, false, true, 128>;
  static constexpr int kAccumulators = 128;  // of a thread: 2 query rows x 64 columns

 public:
  __device__ __forceinline__ ValueRole(const DecodeParams& params, WideShared<Traits>& shared)
      : params_(params), shared_(shared), loader_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (is_loader()) loader_.start();
    RingPosition<Traits> position;
    for (;;) {
      ptx::mbarrier_wait(address(shared_.ready[position.stage]), position.parity);
      ptx::mbarrier_wait(address(shared_.gate[position.stage]), position.parity);
      const EndedRow ended = shared_.ended[position.stage];
      if (ended.row >= 0) {
        if (ended.slot < 0) {
          write_rows(ended.row, position.stage);
        } else {
          write_partials(ended.slot, position.stage);
        }
      }
      const Entry::Kind kind = shared_.entries[position.stage].kind;
      if (kind == Entry::kEnd) return;
      if (kind == Entry::kEmptyRow) write_zeros(shared_.entries[position.stage].row);
      if (is_loader()) loader_.prepare();
      refill(position);
      if (kind == Entry::kQuery) run_tiles(position);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) {
    return ptx::shared_address(&barrier);
  }

  // Where this thread stands, asked again at each use: registers are short.
  static __device__ __forceinline__ unsigned thread() { return ptx::opaque(threadIdx.x); }
  static __device__ __forceinline__ int lane() { return static_cast<int>(thread() % 32); }
  static __device__ __forceinline__ int warp() {
    return static_cast<int>(thread() / 32 % Traits::kWarpgroupWarps);
  }
  static __device__ __forceinline__ int warpgroup() {
    return static_cast<int>(thread() / Traits::kWarpgroupThreads) - 1;
  }
  static __device__ __forceinline__ bool is_loader() {
    return thread() / 32 == Traits::kValueWarpgroups * Traits::kWarpgroupWarps;
  }

  // Lets go of the stage and, when all have, has its next entry loaded.
  __device__ __forceinline__ void refill(RingPosition<Traits>& position) {
    __syncwarp();
    if (lane() < ptx::kArrivingLanes) {
      ptx::mbarrier_arrive(address(shared_.free[position.stage]));
    }
    if (is_loader()) {
      ptx::mbarrier_wait(address(shared_.free[position.stage]), position.parity);
      loader_.load(position.stage);
    }
    position.advance();
  }

  __device__ __forceinline__ void run_tiles(RingPosition<Traits>& position) {
    ptx::discard_registers(accumulators_);
    std::int32_t detail;
    do {
      ptx::mbarrier_wait(address(shared_.ready[position.stage]), position.parity);
      detail = shared_.entries[position.stage].detail;
      // While the gate is still closed.
      if (shared_.rescale[position.stage][warp()]) scale_accumulators(position.stage);
      ptx::mbarrier_wait(address(shared_.gate[position.stage]), position.parity);
      accumulate(position.stage, (detail & Entry::kFirst) != 0);
      refill(position);
    } while ((detail & Entry::kLast) == 0);
  }

  // accumulators (64 query rows, 256 columns) += P (64, 64 tokens) * V (64 tokens, 256 columns)
  __device__ __forceinline__ void accumulate(int stage, bool is_first) {
    const std::uint32_t base = ptx::uniform(ptx::shared_address(shared_.stages[stage]));
    const std::uint64_t probabilities =
        mma::rows_descriptor(base + Traits::kProbabilitySlice * Traits::kSliceBytes);
    const std::uint64_t values = mma::columns_descriptor(
        base + ptx::uniform(warpgroup()) * Traits::kOwnSlices * Traits::kSliceBytes,
        Traits::kSliceBytes);
    ptx::pin_registers(accumulators_);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kTileTokens / 16; ++step) {
      Mma::multiply(accumulators_, mma::advance(probabilities, step * 32),
                    mma::advance(values, step * 16 * mma::kRowBytes), step > 0 || !is_first);
    }
    ptx::wgmma_commit();
    if (is_loader()) loader_.prepare();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(accumulators_);
  }

  __device__ __forceinline__ void scale_accumulators(int stage) {
    scale_accumulators(shared_.scales[stage][tile_row()], shared_.scales[stage][tile_row() + 8]);
  }

  __device__ __forceinline__ void scale_accumulators(float upper, float lower) {
    const float scale[2] = {upper, lower};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators_[i] *= scale[i / 2 % 2];
  }

  // Opaque: addresses in the code that ends a row are to be computed there, not kept all along.
  __device__ __forceinline__ int tile_row() const {
    return 16 * warp() + lane() / 4;
  }

  __device__ __forceinline__ Element* out_row(std::int32_t row, const QueryRow& query) const {
    return static_cast<Element*>(params_.shape.out) + out_offset(params_.shape, row, query) +
           warpgroup() * Traits::kOwnColumns;
  }

  // This warpgroup's slices of a stage that nothing else uses.
  __device__ __forceinline__ std::uint32_t own_slices(int stage) const {
    return ptx::opaque(ptx::shared_address(shared_.stages[stage]) +
                       warpgroup() * Traits::kOwnSlices * Traits::kSliceBytes);
  }

  // Puts the accumulators into this warpgroup's slices as rows of 2-byte elements, so that each
  // store instruction of a warp then writes 512 contiguous bytes. A warp reads only what it wrote.
  template <class Stored>
  __device__ __forceinline__ void stage_rows(std::uint32_t base) const {
    const int fragment_row = 16 * warp() + lane() % 16;
#pragma unroll
    for (int i = 0; i < kAccumulators / 8; ++i) {
      const float* a = accumulators_ + 8 * i;
      ptx::store_matrices(base + i / 4 * Traits::kSliceBytes +
                              mma::chunk_offset(fragment_row, i % 4 * 2 + lane() / 16),
                          pack<Stored>(a[0], a[1]), pack<Stored>(a[2], a[3]),
                          pack<Stored>(a[4], a[5]), pack<Stored>(a[6], a[7]));
    }
    __syncwarp();
  }

  // This lane's 16 bytes of a staged row.
  __device__ __forceinline__ uint4 staged_chunk(std::uint32_t base, int tile_row) const {
    return ptx::load_shared_16(base + lane() / 8 * Traits::kSliceBytes +
                               mma::chunk_offset(tile_row, lane() % 8));
  }

  __device__ __forceinline__ void write_rows(std::int32_t row, int stage) {
    const std::uint32_t base = own_slices(stage);
    scale_accumulators(stage);
    stage_rows<Element>(base);
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int tile_row = 16 * warp() + i;
      const std::int32_t query_row = Place::first_query_row() + tile_row;
      if (query_row >= params_.shape.query_rows) break;
      store_row_chunk(
          out_row(row, query_row_at(params_.shape, Place::kv_head(), query_row)) + lane() * 8,
          staged_chunk(base, tile_row), params_.shape.out_is_aligned);
    }
    // The copy engine writes here next.
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void write_partials(std::int32_t slot, int stage) {
    const std::uint32_t base = own_slices(stage);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kAccumulators / 4; ++i) {
        largest = fmaxf(largest, fmaxf(fabsf(accumulators_[4 * i + 2 * half]),
                                       fabsf(accumulators_[4 * i + 2 * half + 1])));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float inverse = shared_.scales[stage][tile_row() + 8 * half];
      const float scale = partial_scale(largest * inverse);
      factor[half] = inverse * inverse_partial_scale(scale);
      const std::int32_t query_row = Place::first_query_row() + tile_row() + 8 * half;
      if (lane() % 4 == 0 && query_row < params_.shape.query_rows) {
        params_.shape
            .partial_statistics[partial_index(params_.shape, slot, Place::kv_head(), query_row) *
                                    kPartialHalves +
                                warpgroup()]
            .scale = scale;
      }
    }
    scale_accumulators(factor[0], factor[1]);
    stage_rows<__half>(base);
    std::uint16_t* destination = params_.shape.partial_out +
                                 partial_index(params_.shape, slot, Place::kv_head(),
                                               Place::first_query_row() + 16 * warp()) *
                                     Traits::kHeadDimV +
                                 warpgroup() * Traits::kOwnColumns + lane() * 8;
    constexpr int kInFlight = 4;
#pragma unroll 1
    for (int begin = 0; begin < 16; begin += kInFlight) {
      uint4 values[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) values[i] = staged_chunk(base, 16 * warp() + begin + i);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (Place::first_query_row() + 16 * warp() + begin + i >= params_.shape.query_rows)
          continue;
        *reinterpret_cast<uint4*>(destination + (begin + i) * Traits::kHeadDimV) = values[i];
      }
    }
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void write_zeros(std::int32_t row) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const std::int32_t query_row = Place::first_query_row() + 16 * warp() + i;
      if (query_row >= params_.shape.query_rows) break;
      store_row_chunk(
          out_row(row, query_row_at(params_.shape, Place::kv_head(), query_row)) + lane() * 8,
          uint4{0, 0, 0, 0}, params_.shape.out_is_aligned);
    }
  }

  const DecodeParams& params_;
  WideShared<Traits>& shared_;
  Loader<Traits> loader_;
  float accumulators_[kAccumulators];
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    wide_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  WideShared<Traits>& shared = *reinterpret_cast<WideShared<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    ptx::prefetch_map(params.q_map);
    ptx::prefetch_map(params.k_map);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.gate[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.free[stage]), Traits::kValueArrivals);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.scored), Traits::kScoreArrivals);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x / 32 == Traits::kThreads / 32 - 1) {
    prefetch_walk(params, WidePlace<Traits>::part());
  }
  __syncthreads();
  ptx::wait_for_previous_grid();
  // Only now: what the combine reads before it waits, the plan, was written before this grid.
  ptx::allow_next_grid();

  const int warpgroup = threadIdx.x / Traits::kWarpgroupThreads;
  if (warpgroup == 0) {
    ptx::take_registers<Traits::kScoreRegisters>();
    ScoreRole<Traits>(params, shared).run();
  } else {
    ptx::give_registers<Traits::kValueRegisters>();
    ValueRole<Traits>(params, shared).run();
  }
}

}  // namespace flashmla::cuda::sm90a
