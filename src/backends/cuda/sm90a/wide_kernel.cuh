// Attention for 64 query rows at a time. One warpgroup computes scores and softmax with the queries
// in registers; two accumulate 256 value columns each and keep a ring of three whole tiles filled.
#pragma once

#include <cstdint>

#include "backends/cuda/common/float64_decode.cuh"
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
  static __device__ __forceinline__ std::int32_t kv_head() { return ptx::opaque(blockIdx.y); }
  static __device__ __forceinline__ std::int32_t first_query_row() {
    return ptx::opaque(blockIdx.x) * Traits::kTileRows;
  }
};

// Stage of the ring and the parity of the phase that fills it. Who fills the ring goes around it
// once before, when every stage is free and none is full.
template <class Traits>
class RingPosition {
 public:
  __device__ __forceinline__ explicit RingPosition(bool is_filling = false)
      : parity_(is_filling ? kFilling : 0) {}
  __device__ __forceinline__ bool is_filling() const { return parity_ == kFilling; }
  __device__ __forceinline__ int stage() const { return stage_; }
  __device__ __forceinline__ int parity() const { return parity_; }
  __device__ __forceinline__ int previous_stage() const {
    return stage_ == 0 ? Traits::kStages - 1 : stage_ - 1;
  }
  __device__ __forceinline__ void advance() {
    if (++stage_ == Traits::kStages) {
      stage_ = 0;
      parity_ = parity_ == 0 ? 1 : 0;
    }
  }

 private:
  static constexpr int kFilling = 2;

  int stage_ = 0;
  int parity_;
};

// Of an entry that is not a tile: over the last slice, once queries have left it.
template <class Traits>
__device__ __forceinline__ EndedRow* ended_row(WideShared<Traits>& shared, int stage) {
  return reinterpret_cast<EndedRow*>(shared.stages[stage] +
                                     Traits::kProbabilitySlice * Traits::kSliceBytes);
}

// --- Load: first warp of the last warpgroup ------------------------------------------------------

// What it does for every tile touches shared memory little: products keep that busy, and each
// access waits its turn.
template <class Traits>
class Loader {
  using Place = WidePlace<Traits>;
  static constexpr int kFirstBytes = Traits::kFirstPieceSlices * Traits::kSliceBytes;
  static constexpr int kBytes = Traits::kSlices * Traits::kSliceBytes;

 public:
  __device__ __forceinline__ Loader(const DecodeParams& params, WideShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void start() {
    if (lane() == 0) begin_walk(shared_.walk, params_.shape, Place::part());
  }

  // Finds the next entry and its pages. All 32 lanes. Done while scores are waited for, so that
  // nothing but the copy stands between a stage becoming free and its next load.
  __device__ __forceinline__ void prepare() {
    __syncwarp();
    if (block_ < shared_.next.end_block) {
      if (boxes_of_slice(params_) > 1 || block_ % 32 == 0) ask_pages(block_);
      return;
    }
    block_ = kNoTile;
    __syncwarp();  // all have read `next`
    if (lane() == 0) {
      Entry entry = next_entry(shared_.walk, params_.shape);
      if (entry.kind == Entry::kQuery) skip_tiles(shared_.walk, params_.shape);
      shared_.next = entry;
    }
    __syncwarp();
  }

  // Fills a free stage with the prepared entry. All 32 lanes.
  __device__ __forceinline__ void load(int stage) {
    __syncwarp();
    if (block_ != kNoTile) {
      load_tile(stage);
    } else {
      load_other(stage);
    }
  }

 private:
  static __device__ __forceinline__ int lane() {
    return static_cast<int>(ptx::opaque(threadIdx.x) % 32);
  }

  __device__ __forceinline__ void load_tile(int stage) {
    const std::uint32_t first = ptx::shared_address(&shared_.full[stage][0]);
    const std::uint32_t rest = ptx::shared_address(&shared_.full[stage][1]);
    const std::uint32_t destination = ptx::shared_address(shared_.stages[stage]);
    const Entry& query = shared_.next;
    const bool is_whole = boxes_of_slice(params_) == 1;
    const std::int32_t block = block_++;
    // The lane that knows the page. The copies come first: what they bring is counted until the
    // arrival says how much that is.
    if (lane() == (is_whole ? block % 32 : 0)) {
      if (is_whole) {
        copy_whole_tile<0>(params_, params_.k_map, block, Place::kv_head(), page_, destination,
                           first);
        copy_whole_tile<Traits::kFirstPieceSlices>(params_, params_.k_rest_map, block,
                                                   Place::kv_head(), page_, destination, rest);
      }
      Entry tile{Entry::kTile, 0, query.row, block, 0, query.length};
      if (block == query.block) tile.detail = Entry::kFirst;
      shared_.entries[stage] = tile;
      ptx::mbarrier_arrive_expect(first, kFirstBytes);
      ptx::mbarrier_arrive_expect(rest, kBytes - kFirstBytes);
    }
    if (is_whole) return;
    __syncwarp();
    const auto page = [&](int box) {
      return box < 32 ? page_ : page_of_box(params_, query.row, block, query.length, box);
    };
    copy_tile_by_boxes<0, Traits::kFirstPieceSlices>(params_, params_.k_map, block,
                                                     Place::kv_head(), page, destination, first);
    copy_tile_by_boxes<Traits::kFirstPieceSlices, Traits::kSlices>(
        params_, params_.k_rest_map, block, Place::kv_head(), page, destination, rest);
  }

  // An entry that is not a tile.
  __device__ __forceinline__ void load_other(int stage) {
    const std::uint32_t first = ptx::shared_address(&shared_.full[stage][0]);
    const std::uint32_t rest = ptx::shared_address(&shared_.full[stage][1]);
    const Entry& next = shared_.next;
    const bool is_query = next.kind == Entry::kQuery;
    if (lane() == 0) {
      shared_.entries[stage] = next;
      ptx::mbarrier_arrive_expect(first, is_query ? kBytes : 0);
      ptx::mbarrier_arrive_expect(rest, 0);
    }
    __syncwarp();
    if (!is_query) return;
    copy_queries<Traits::kSlices>(params_, next.row, Place::kv_head(), Place::first_query_row(),
                                  ptx::shared_address(shared_.stages[stage]), first);
    block_ = next.block;
    ask_pages(next.block);
  }

  // Whole tiles: lane i keeps the page of the tile at i mod 32. Smaller boxes: of the tile's box i.
  __device__ __forceinline__ void ask_pages(std::int32_t block) {
    const Entry& query = shared_.next;
    const int boxes = boxes_of_slice(params_);
    page_ = boxes == 1 ? page_of_box(params_, query.row, block / 32 * 32 + lane(), query.length, 0)
                       : page_of_box(params_, query.row, block, query.length, lane() & (boxes - 1));
  }

  const DecodeParams& params_;
  WideShared<Traits>& shared_;
  static constexpr std::int32_t kNoTile = 0x7fffffff;
  std::int32_t block_ = kNoTile;  // of the row whose queries were loaded last, to be loaded next
  std::int32_t page_ = -1;
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
      ptx::mbarrier_wait(address(shared_.full[position.stage()][0]), position.parity());
      ptx::mbarrier_wait(address(shared_.full[position.stage()][1]), position.parity());
      const Entry entry = shared_.entries[position.stage()];
      const EndedRow ended{row, slot};
      if (row >= 0) finish_row(row, slot, position.stage());
      row = -1;
      if (entry.kind == Entry::kQuery) {
        row = entry.row;
        slot = entry.detail;
        start_row(entry, position.stage());
      } else if (entry.kind == Entry::kEmptyRow) {
        write_empty_lse(entry.row);
      }
      if (threadIdx.x == 0) {
        *ended_row(shared_, position.stage()) = ended;
        ptx::fence_async_proxy();
      }
      __syncwarp();
      arrive(shared_.ready[position.stage()]);
      arrive(shared_.gate[position.stage()]);
      if (entry.kind == Entry::kEnd) return;
      position.advance();
      if (entry.kind == Entry::kQuery) {
        run_tiles(position, ptx::uniform(entry.end_block - entry.block),
                  ptx::uniform(visible_of(entry, 0) / Traits::kTileTokens - entry.block));
      }
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
    return visible_tokens(params_, params_.shape, entry.row,
                          params_.shape.heads_per_kv_head.quotient(query_row), entry.length);
  }

  // Takes the queries out of the stage: kRegisterSteps into registers, the rest into the tail.
  __device__ __forceinline__ void start_row(const Entry& entry, int stage) {
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

  // The tiles of a row. How many they are, and how many of them every query row sees whole, says
  // all about them, so that nothing has to be read between a tile's arrival and its scores.
  __device__ __forceinline__ void run_tiles(RingPosition<Traits>& position, std::int32_t remaining,
                                            std::int32_t unmasked) {
    float scores[kScores];
    std::uint32_t packed[kScores / 2];
    bool is_first = true;
    begin_scores<false>(scores, packed, position, unmasked <= 0);
    for (;;) {
      ptx::wgmma_wait<1>();
      // The value product of the tile before waited for this one's scores.
      if (!is_first) arrive(shared_.gate[position.previous_stage()]);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(scores);
      softmax(packed, scores, position.stage(), unmasked <= 0, is_first);
      is_first = false;
      position.advance();
      if (--remaining == 0) break;
      --unmasked;
      begin_scores<true>(scores, packed, position, unmasked <= 0);
    }
    // P takes the place of the last slice, which the other warps may still be reading.
    ptx::named_barrier_sync(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_probabilities(packed, position.previous_stage(), i);
    publish(position.previous_stage());
    arrive(shared_.gate[position.previous_stage()]);
  }

  // Says that P is where the value warpgroups read it.
  __device__ __forceinline__ void publish(int stage) {
    ptx::fence_async_proxy();
    __syncwarp();
    arrive(shared_.ready[stage]);
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

  // Starts scores (64 query rows, 64 tokens), not scaled: two groups of products, the first as many
  // as the gate of the tile before waits for. Between them P of that tile is stored.
  template <bool kStores>
  __device__ __forceinline__ void begin_scores(float (&scores)[kScores],
                                               const std::uint32_t (&packed)[kScores / 2],
                                               const RingPosition<Traits>& position,
                                               bool is_masked) {
    ptx::mbarrier_wait(address(shared_.full[position.stage()][0]), position.parity());
    if (is_masked) {
      ptx::mbarrier_wait(address(shared_.full[position.stage()][1]), position.parity());
      clear_unseen(shared_.entries[position.stage()], position.stage());
    }
    const std::uint64_t keys =
        mma::rows_descriptor(ptx::shared_address(shared_.stages[position.stage()]));
    const std::uint64_t tail = mma::make_descriptor(ptx::shared_address(shared_.query_tail), 128,
                                                    256, mma::Swizzle::kNone);
    constexpr int kStoreStep = 1;  // after which P is stored, a quarter after each
    ptx::discard_registers(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      if (step == 4 * Traits::kFirstPieceSlices) {
        ptx::mbarrier_wait(address(shared_.full[position.stage()][1]), position.parity());
        ptx::wgmma_fence();
      }
      const std::uint64_t key = mma::advance(keys, step / 4 * Traits::kSliceBytes + step % 4 * 32);
      if (step < Traits::kRegisterSteps) {
        Mma::multiply(scores, query_[step < Traits::kRegisterSteps ? step : 0], key, step > 0);
      } else {
        Mma::multiply(scores,
                      mma::advance(tail, (step - Traits::kRegisterSteps) * Traits::kTailStepBytes),
                      key, 1);
      }
      if constexpr (kStores) {
        // P takes the place of the last slice, which the other warps may still be reading.
        if (step == kStoreStep) {
          ptx::named_barrier_sync(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads);
        }
        if (step > kStoreStep && step <= kStoreStep + 4)
          store_probabilities(packed, position.previous_stage(), step - kStoreStep - 1);
        if (step == kStoreStep + 6) publish(position.previous_stage());
      }
      if (step == Traits::kGateSlices * 4 - 1) ptx::wgmma_commit();
    }
    ptx::wgmma_commit();
  }

  // Adds the tile to the sums and leaves P where its last slice was. Each warp decides for its own
  // query rows whether their references still serve.
  __device__ __forceinline__ void softmax(std::uint32_t (&packed)[kScores / 2],
                                          float (&scores)[kScores], int stage, bool is_masked,
                                          bool is_first) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = fmaf(scores[i], params_.scale_log2, -reference_[i / 2 % 2]);
    }
    if (is_masked) mask_unseen(scores, stage);
    float largest[2] = {-kInfinity, -kInfinity};
#pragma unroll
    for (int i = 0; i < kScores; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    const bool raises = __any_sync(
        ~0u, is_first || largest[0] > kOutgrown<Element> || largest[1] > kOutgrown<Element>);
    if (raises) raise_references(scores, largest, stage, is_first);
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float both = scores[2 * i] + scores[2 * i + 1];
      const float low = exp2_approximate(scores[2 * i]), high = exp2_approximate(scores[2 * i + 1]);
      // NaN where a score is infinite.
      sum_[i % 2] += fmaf(both, 0.0f, low + high);
      packed[i] = pack<Element>(low, high);
    }
    if (threadIdx.x % 32 == 0) shared_.rescale[stage][warp()] = raises && !is_first;
  }

  // Exponents of tokens that their query rows do not see.
  __device__ __forceinline__ void mask_unseen(float (&exponents)[kScores], int stage) const {
    const Entry& entry = shared_.entries[stage];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // Columns below this one are seen; this thread's are 8 * i + {0, 1} past its first.
      const std::int32_t seen = visible_of(entry, tile_row() + 8 * row) -
                                entry.block * Traits::kTileTokens - lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        if (8 * i >= seen) exponents[4 * i + 2 * row] = kUnseen;
        if (8 * i + 1 >= seen) exponents[4 * i + 2 * row + 1] = kUnseen;
      }
    }
  }

  // Raises the references of the warp's query rows by their largest exponents, in the first tile of
  // a row from zero, to the true maximum and the headroom, and leaves what the accumulators have to
  // be multiplied by.
  __device__ __forceinline__ void raise_references(float (&exponents)[kScores],
                                                   const float (&largest)[2], int stage,
                                                   bool is_first) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float rise = fmaxf(largest[row], __shfl_xor_sync(~0u, largest[row], 1));
      rise = fmaxf(rise, __shfl_xor_sync(~0u, rise, 2)) + kHeadroom<Element>;
      // A query row that sees nothing of the first tile keeps its zero.
      if (!is_first || rise <= kUnseen) rise = fmaxf(rise, 0.0f);
      // Of scores so large that the headroom is lost in rounding, what is left of it.
      const float raised = reference_[row] + rise;
      rise = raised - reference_[row];
      reference_[row] = raised;
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

  // A quarter of P (64 query rows, 64 tokens) over the tile's last slice, which all warps have
  // read.
  __device__ __forceinline__ void store_probabilities(const std::uint32_t (&packed)[kScores / 2],
                                                      int stage, int quarter) {
    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]) +
                               Traits::kProbabilitySlice * Traits::kSliceBytes;
    const std::uint32_t first = mma::chunk_offset(16 * warp() + lane() % 16, lane() / 16);
    // Chunk 2 * quarter + lane / 16: in the swizzle, two chunks further is an exclusive or.
    const std::uint32_t* p = packed + 4 * quarter;
    ptx::store_matrices(base + (first ^ (2 * quarter << 4)), p[0], p[1], p[2], p[3]);
  }

  // The ended row's lse, and its inverse sums for the value warpgroups.
  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot, int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane() % 4 != 0) continue;
      sum = sum_to_trust(reference_[half], sum);
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
  float reference_[2];  // base 2, scaled
  float sum_[2];        // of this thread's columns, relative to the reference
};

// --- Values: warpgroups 1 and 2 ------------------------------------------------------------------

template <class Traits>
class ValueRole {
  using Place = WidePlace<Traits>;
  using Element = typename Traits::Element;
  using Mma = mma::WarpgroupMma<Element, false, true, 128>;
  static constexpr int kAccumulators = 128;  // of a thread: 2 query rows x 64 columns
  static constexpr int kStoredSliceBytes = kStoredRows * mma::kRowBytes;
  static_assert(kStoredRows * Traits::kWarpgroupWarps == Traits::kTileRows &&
                kStoredSlices == Traits::kOwnSlices);

 public:
  __device__ __forceinline__ ValueRole(const DecodeParams& params, WideShared<Traits>& shared)
      : params_(params), shared_(shared), loader_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (is_loader()) loader_.start();
    RingPosition<Traits> position(is_loader());
    ptx::discard_registers(accumulators_);
    for (;;) {
      if (is_loader()) loader_.prepare();
      if (!position.is_filling()) {
        if (!consume(position)) return;
        release(position);
      }
      if (is_loader()) loader_.load(position.stage());
      position.advance();
    }
  }

  // After run(): of the whole rows, the warp's 16 query rows that are lost, in all columns.
  __device__ __forceinline__ void redo_lost() {
    __syncwarp();
    if (!shared_.has_lost[value_warp()]) return;
    // The two warps that have these query rows know it both. What the copy engine still stores of
    // either would take the place of what follows.
    ptx::wait_for_stores();
    ptx::named_barrier_sync(Traits::kLostRows + warp(), 2 * 32);
    if (warpgroup() > 0) return;
    const std::int32_t first = Place::first_query_row() + kStoredRows * warp();
    redo_lost_rows<Element>(params_, params_.shape, Place::part(), Place::kv_head(), first,
                            min(first + kStoredRows, params_.shape.query_rows), 0, 1);
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
  static __device__ __forceinline__ unsigned value_warp() {
    return thread() / 32 - Traits::kWarpgroupWarps;
  }
  static __device__ __forceinline__ bool is_loader() {
    return thread() / 32 == Traits::kValueWarpgroups * Traits::kWarpgroupWarps;
  }

  // False: that was the end.
  __device__ __forceinline__ bool consume(const RingPosition<Traits>& position) {
    const int stage = position.stage();
    ptx::mbarrier_wait(address(shared_.ready[stage]), position.parity());
    const Entry& entry = shared_.entries[stage];
    if (entry.kind == Entry::kTile) {
      // While the gate is still closed.
      if (shared_.rescale[stage][warp()]) scale_accumulators(stage);
      ptx::mbarrier_wait(address(shared_.gate[stage]), position.parity());
      accumulate(stage, (entry.detail & Entry::kFirst) != 0);
      return true;
    }
    ptx::mbarrier_wait(address(shared_.gate[stage]), position.parity());
    const EndedRow ended = *ended_row(shared_, stage);
    if (ended.row >= 0) {
      if (ended.slot < 0) {
        write_rows(ended.row, stage);
      } else {
        write_partials(ended.slot, stage);
      }
    }
    if (entry.kind == Entry::kEnd) return false;
    if (entry.kind == Entry::kEmptyRow) write_zeros(entry.row);
    return true;
  }

  // Lets go of the stage; the loader waits until all have.
  __device__ __forceinline__ void release(const RingPosition<Traits>& position) {
    __syncwarp();
    if (lane() < ptx::kArrivingLanes) {
      ptx::mbarrier_arrive(address(shared_.free[position.stage()]));
    }
    if (is_loader()) {
      ptx::mbarrier_wait(address(shared_.free[position.stage()]), position.parity());
    }
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

  // This warp's quarter of its warpgroup's slices of a stage that nothing else uses.
  __device__ __forceinline__ std::uint32_t own_box(int stage) const {
    return ptx::opaque(ptx::shared_address(shared_.stages[stage]) +
                       warpgroup() * Traits::kOwnSlices * Traits::kSliceBytes +
                       warp() * kStoredSlices * kStoredSliceBytes);
  }

  // Puts the accumulators into a quarter of this warpgroup's slices as a box of 2-byte elements:
  // kStoredSlices slices of kStoredRows rows, the warp's.
  template <auto kPack>
  __device__ __forceinline__ void stage_rows(std::uint32_t base) const {
#pragma unroll
    for (int i = 0; i < kAccumulators / 8; ++i) {
      const float* a = accumulators_ + 8 * i;
      ptx::store_matrices(base + i / 4 * kStoredSliceBytes +
                              mma::chunk_offset(lane() % 16, i % 4 * 2 + lane() / 16),
                          kPack(a[0], a[1]), kPack(a[2], a[3]), kPack(a[4], a[5]),
                          kPack(a[6], a[7]));
    }
    // The copy engine reads the box, and later writes here.
    ptx::fence_async_proxy();
    __syncwarp();
  }

  __device__ __forceinline__ void write_rows(std::int32_t row, int stage) {
    const std::uint32_t base = own_box(stage);
    const float upper = shared_.scales[stage][tile_row()];
    const float lower = shared_.scales[stage][tile_row() + 8];
    if (__any_sync(~0u, is_lost(upper) || is_lost(lower)) && lane() == 0) {
      shared_.has_lost[value_warp()] = true;
    }
    scale_accumulators(upper, lower);
    stage_rows<pack_finite<Element>>(base);
    const std::int32_t first = Place::first_query_row() + kStoredRows * warp();
    if (params_.out_has_map) {
      if (lane() == 0) {
        const QueryRow query = query_row_at(params_.shape, Place::kv_head(), first);
        ptx::store_box(params_.out_map, base, 0, query.head, warpgroup() * kStoredSlices,
                       query.token, row);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kStoredRows; ++i) {
      if (first + i >= params_.shape.query_rows) break;
      store_row_chunk(
          out_row(row, query_row_at(params_.shape, Place::kv_head(), first + i)) + lane() * 8,
          ptx::load_shared_16(base + lane() / 8 * kStoredSliceBytes +
                              mma::chunk_offset(i, lane() % 8)),
          params_.shape.out_is_aligned);
    }
  }

  __device__ __forceinline__ void write_partials(std::int32_t slot, int stage) {
    const std::uint32_t base = own_box(stage);
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
    stage_rows<pack<__half>>(base);
    if (lane() == 0) {
      ptx::store_box(params_.partial_map, base, 0, Place::first_query_row() + kStoredRows * warp(),
                     warpgroup() * kStoredSlices, Place::kv_head(), slot);
    }
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
    ptx::prefetch_map(params.k_rest_map);
    ptx::prefetch_map(params.partial_map);
    if (params.out_has_map) ptx::prefetch_map(params.out_map);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (std::uint64_t& full : shared.full[stage]) {
        ptx::mbarrier_init(ptx::shared_address(&full), 1);
      }
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.gate[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.free[stage]), Traits::kValueArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < Traits::kValueWarps) shared.has_lost[threadIdx.x] = false;
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
    ValueRole<Traits> role(params, shared);
    role.run();
    role.redo_lost();
  }
}

}  // namespace flashmla::cuda::sm90a
