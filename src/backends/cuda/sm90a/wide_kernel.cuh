// Attention for 64 query rows at a time. One warpgroup computes scores and softmax with the queries
// in registers; two accumulate 256 value columns each and keep a ring of three whole tiles filled.
#pragma once

#include <cstdint>

#include "backends/cuda/common/numeric.cuh"
#include "backends/cuda/common/walk.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/mma/warpgroup_mma.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "backends/cuda/ptx/matrix.cuh"
#include "backends/cuda/ptx/memory.cuh"
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

// --- Load: the first warp of the last warpgroup
// ---------------------------------------------------

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

  // Finds the next entry and asks for its page. All 32 lanes. Done while a product runs, so that
  // nothing but the copies stands between a stage becoming free and its next load.
  __device__ __forceinline__ void prepare() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared_.next = next_entry(shared_.walk, params_.shape);
    __syncwarp();
    if (shared_.next.kind == Entry::kTile) {
      page_ = page_of(shared_.next, shared_.next.block * Traits::kTileTokens +
                                        (first_box() << params_.k_box_rows_log2));
    }
  }

  // Fills a free stage with the prepared entry. All 32 lanes.
  __device__ __forceinline__ void load(int stage) {
    const std::uint32_t full = ptx::shared_address(&shared_.full[stage]);
    const std::uint32_t full_rest = ptx::shared_address(&shared_.full_rest[stage]);
    const Entry entry = shared_.next;
    if (threadIdx.x % 32 == 0) {
      shared_.entries[stage] = entry;
      const bool has_data = entry.kind == Entry::kTile || entry.kind == Entry::kQuery;
      ptx::mbarrier_arrive_expect(full, has_data ? Traits::kFirstSlices * Traits::kSliceBytes : 0);
      ptx::mbarrier_arrive_expect(
          full_rest, has_data ? (Traits::kSlices - Traits::kFirstSlices) * Traits::kSliceBytes : 0);
    }
    __syncwarp();
    if (entry.kind == Entry::kTile) copy_tile(entry, stage, full, full_rest);
    if (entry.kind == Entry::kQuery) copy_query(entry.row, stage, full, full_rest);
  }

 private:
  // A tile is so many boxes a slice; lane l copies those that are l modulo 32, counted through all
  // slices. The first of them in a slice:
  __device__ __forceinline__ int boxes_log2() const {
    return 6 - params_.k_box_rows_log2;
  }
  __device__ __forceinline__ int first_box() const {
    return threadIdx.x % 32 & ((1 << boxes_log2()) - 1);
  }

  // Page of a token; -1, which the copy engine answers with zeros, past the end of the row, where
  // the table may hold anything.
  __device__ __forceinline__ std::int32_t page_of(const Entry& entry, std::int32_t token) const {
    if (token >= entry.length) return -1;
    return params_.block_table[entry.row * params_.block_table_batch_stride +
                               params_.page_size.quotient(token) * params_.block_table_page_stride];
  }

  __device__ __forceinline__ std::uint32_t box_address(int stage, int slice, int row) const {
    return ptx::shared_address(shared_.stages[stage]) + slice * Traits::kSliceBytes +
           row * mma::kRowBytes;
  }

  __device__ __forceinline__ void copy_tile(const Entry& entry, int stage, std::uint32_t full,
                                            std::uint32_t full_rest) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Traits::kSlices << boxes_log2(); i += 32) {
      const int slice = i >> boxes_log2(), box = i - (slice << boxes_log2());
      const std::int32_t row = box << params_.k_box_rows_log2;
      const std::int32_t token = entry.block * Traits::kTileTokens + row;
      // With boxes of one token a lane has two of them, and looked up the page of the first.
      const std::int32_t page = box < 32 ? page_ : page_of(entry, token);
      ptx::copy_box(box_address(stage, slice, row), params_.k_map,
                    slice < Traits::kFirstSlices ? full : full_rest, 0,
                    params_.page_size.remainder(token), slice, Place::kv_head(), page);
    }
  }

  __device__ __forceinline__ void copy_query(std::int32_t batch_row, int stage, std::uint32_t full,
                                             std::uint32_t full_rest) const {
    const int boxes_log2 = 6 - params_.q_box_rows_log2;  // of a slice
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Traits::kSlices << boxes_log2; i += 32) {
      const int slice = i >> boxes_log2;
      const int row = (i - (slice << boxes_log2)) << params_.q_box_rows_log2;
      // Rows past the last query lie at a token past the end and arrive as zeros.
      const QueryRow query =
          query_row_at(params_.shape, Place::kv_head(), Place::first_query_row() + row);
      ptx::copy_box(box_address(stage, slice, row), params_.q_map,
                    slice < Traits::kFirstSlices ? full : full_rest, 0, query.head, slice,
                    query.token, batch_row);
    }
  }

  const DecodeParams& params_;
  WideShared<Traits>& shared_;
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
      : params_(params), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    RingPosition<Traits> position;
    std::int32_t row = -1;  // whose statistics are pending
    std::int32_t slot = -1;
    for (;;) {
      ptx::mbarrier_wait(address(shared_.full[position.stage]), position.parity);
      ptx::mbarrier_wait(address(shared_.full_rest[position.stage]), position.parity);
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
      if (entry.kind == Entry::kQuery) run_tiles(position);
    }
  }

 private:
  static __device__ __forceinline__ std::uint32_t address(const std::uint64_t& barrier) {
    return ptx::shared_address(&barrier);
  }

  __device__ __forceinline__ void arrive(const std::uint64_t& barrier) const {
    if (lane_ < ptx::kArrivingLanes) ptx::mbarrier_arrive(address(barrier));
  }

  // Query row of the tile: this thread computes on it and on the one 8 below.
  __device__ __forceinline__ int tile_row() const { return 16 * warp_ + lane_ / 4; }

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
    reference_[0] = reference_[1] = kNoReference;
    sum_[0] = sum_[1] = 0.0f;

    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]);
    const int fragment_row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int step = 0; step < Traits::kRegisterSteps; ++step) {
      ptx::load_matrices(query_[step],
                         base + step / 4 * Traits::kSliceBytes +
                             mma::chunk_offset(fragment_row, step % 4 * 2 + lane_ / 16));
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

  __device__ __forceinline__ void run_tiles(RingPosition<Traits>& position) {
    bool opens_gate = false;  // the value product of the tile before waits for this one's scores
    std::int32_t detail;
    do {
      ptx::mbarrier_wait(address(shared_.full[position.stage]), position.parity);
      const Entry entry = shared_.entries[position.stage];
      detail = entry.detail;
      const bool is_masked = entry.block >= first_masked_block_;
      if (is_masked) {
        ptx::mbarrier_wait(address(shared_.full_rest[position.stage]), position.parity);
        clear_unseen(entry, position.stage);
      }
      bool exact = is_masked || (detail & Entry::kFirst) != 0;

      float scores[kScores];
      std::uint32_t packed[kScores / 2];
      bool rescale = false;
      for (;;) {
        compute_scores(scores, position, opens_gate);
        opens_gate = false;
        if (exact) {
          rescale = exact_softmax(scores, packed, entry, position.stage);
          break;
        }
        // The scores of a tile that outgrows its reference are computed once more.
        exact = fast_softmax(scores, packed);
        if (!exact) break;
      }
      // All warps have read the entry: they have met since.
      if (rescale && threadIdx.x == 0) {
        shared_.entries[position.stage].detail = detail | Entry::kRescale;
      }
      store_probabilities(packed, position.stage);
      ptx::fence_async_proxy();
      __syncwarp();
      arrive(shared_.ready[position.stage]);
      opens_gate = (detail & Entry::kLast) == 0;
      if (!opens_gate) arrive(shared_.gate[position.stage]);
      position.advance();
    } while ((detail & Entry::kLast) == 0);
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
  __device__ __forceinline__ void compute_scores(float (&scores)[kScores],
                                                 const RingPosition<Traits>& position,
                                                 bool opens_gate) {
    const std::uint64_t keys =
        mma::rows_descriptor(ptx::uniform(ptx::shared_address(shared_.stages[position.stage])));
    const std::uint64_t tail = mma::make_descriptor(
        ptx::uniform(ptx::shared_address(shared_.query_tail)), 128, 256, mma::Swizzle::kNone);
    ptx::discard_registers(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kSteps; ++step) {
      if (step == Traits::kFirstSlices * 4) {
        ptx::mbarrier_wait(address(shared_.full_rest[position.stage]), position.parity);
        // Without it the compiler puts its own here, and serialises.
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
      if (step == Traits::kGateSlices * 4 - 1) ptx::wgmma_commit();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (opens_gate)
      arrive(shared_.gate[position.stage == 0 ? Traits::kStages - 1 : position.stage - 1]);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(scores);
  }

  // P relative to the reference as it stands; true, in all threads, if that has been outgrown and
  // nothing was added to the sums.
  __device__ __forceinline__ bool fast_softmax(const float (&scores)[kScores],
                                               std::uint32_t (&packed)[kScores / 2]) {
    float tile_sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const int half = i % 2;
      const float low =
          ptx::exp2_approximate(fmaf(scores[2 * i], params_.scale_log2, -reference_[half]));
      const float high =
          ptx::exp2_approximate(fmaf(scores[2 * i + 1], params_.scale_log2, -reference_[half]));
      tile_sum[half] += low + high;
      packed[i] = pack<Element>(low, high);
    }
    // Written so that NaN counts as outgrown.
    const bool outgrown = !(tile_sum[0] <= kOutgrown && tile_sum[1] <= kOutgrown);
    if (ptx::named_barrier_or(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads, outgrown)) {
      return true;
    }
    sum_[0] += tile_sum[0];
    sum_[1] += tile_sum[1];
    return false;
  }

  // Masks, and raises the reference to the true maximum where it was lower. Returns, in all
  // threads, whether the accumulators have to be rescaled.
  __device__ __forceinline__ bool exact_softmax(const float (&scores)[kScores],
                                                std::uint32_t (&packed)[kScores / 2],
                                                const Entry& entry, int stage) {
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Opaque: what follows from it is computed again where it is needed; registers are short.
      const int lane = static_cast<int>(ptx::opaque(threadIdx.x % 32));
      // Columns below this one are seen; this thread's are 8 * i + {0, 1} past its first.
      const std::int32_t seen = visible_of(entry, tile_row() + 8 * half) -
                                entry.block * Traits::kTileTokens - lane % 4 * 2;
      float maximum = reference_[half];
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        const float low = scores[4 * i + 2 * half] * params_.scale_log2;
        const float high = scores[4 * i + 2 * half + 1] * params_.scale_log2;
        if (8 * i < seen) maximum = fmaxf(maximum, low);
        if (8 * i + 1 < seen) maximum = fmaxf(maximum, high);
      }
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
      const float scale = ptx::exp2_approximate(reference_[half] - maximum);
      raised |= maximum > reference_[half];
      reference_[half] = maximum;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kScores / 4; ++i) {
        float low =
            ptx::exp2_approximate(fmaf(scores[4 * i + 2 * half], params_.scale_log2, -maximum));
        float high =
            ptx::exp2_approximate(fmaf(scores[4 * i + 2 * half + 1], params_.scale_log2, -maximum));
        if (8 * i >= seen) low = 0.0f;
        if (8 * i + 1 >= seen) high = 0.0f;
        sum += low + high;
        packed[2 * i + half] = pack<Element>(low, high);
      }
      sum_[half] = sum_[half] * scale + sum;
      if (static_cast<int>(ptx::opaque(threadIdx.x)) % 4 == 0)
        shared_.scales[stage][tile_row() + 8 * half] = scale;
    }
    return ptx::named_barrier_or(Traits::kScoreWarpgroup, Traits::kWarpgroupThreads,
                                 raised && (entry.detail & Entry::kFirst) == 0);
  }

  // P (64 query rows, 64 tokens) over the tile's last slice, which all warps have read.
  __device__ __forceinline__ void store_probabilities(const std::uint32_t (&packed)[kScores / 2],
                                                      int stage) {
    const std::uint32_t base = ptx::shared_address(shared_.stages[stage]) +
                               Traits::kProbabilitySlice * Traits::kSliceBytes;
    const int row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::store_matrices(base + mma::chunk_offset(row, 2 * i + lane_ / 16), packed[4 * i],
                          packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3]);
    }
  }

  // The ended row's lse, and its inverse sums for the value warpgroups.
  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot, int stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane_ % 4 != 0) continue;
      shared_.scales[stage][tile_row() + 8 * half] = inverse_sum(sum);
      const std::int32_t query_row = Place::first_query_row() + tile_row() + 8 * half;
      if (query_row >= params_.shape.query_rows) continue;
      const float lse = natural_lse(reference_[half], sum);
      if (slot < 0) {
        *lse_at(params_.shape, row, query_row_at(params_.shape, Place::kv_head(), query_row)) = lse;
      } else {
        params_.shape.partial_lse[partial_index(params_.shape, slot, Place::kv_head(), query_row)] =
            lse;
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
  int warp_;
  int lane_;
  std::uint32_t query_[Traits::kRegisterSteps][4];
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
  __device__ __forceinline__ ValueRole(const DecodeParams& params, WideShared<Traits>& shared,
                                       int warpgroup)
      : params_(params),
        shared_(shared),
        warpgroup_(warpgroup),
        warp_(threadIdx.x / 32 % Traits::kWarpgroupWarps),
        lane_(threadIdx.x % 32),
        loader_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (is_loader()) loader_.start();
    RingPosition<Traits> position;
    for (;;) {
      ptx::mbarrier_wait(address(shared_.ready[position.stage]), position.parity);
      ptx::mbarrier_wait(address(shared_.gate[position.stage]), position.parity);
      const EndedRow ended = shared_.ended[position.stage];
      if (ended.row >= 0) {
        scale_accumulators(position.stage);
        if (ended.slot < 0) {
          write_rows(ended.row, position.stage);
        } else {
          write_partials(ended.slot);
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

  __device__ __forceinline__ bool is_loader() const {
    return warpgroup_ == Traits::kValueWarpgroups - 1 && warp_ == 0;
  }

  // Lets go of the stage and, when all have, has its next entry loaded.
  __device__ __forceinline__ void refill(RingPosition<Traits>& position) {
    __syncwarp();
    if (lane_ < ptx::kArrivingLanes) {
      ptx::mbarrier_arrive(address(shared_.free[position.stage]));
    }
    if (is_loader()) {
      ptx::mbarrier_wait(address(shared_.free[position.stage]), position.parity);
      loader_.load(position.stage);
    }
    position.advance();
  }

  __device__ __forceinline__ void run_tiles(RingPosition<Traits>& position) {
    std::int32_t detail;
    do {
      ptx::mbarrier_wait(address(shared_.ready[position.stage]), position.parity);
      detail = shared_.entries[position.stage].detail;
      // While the gate is still closed.
      if ((detail & Entry::kRescale) != 0) scale_accumulators(position.stage);
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
        base + ptx::uniform(warpgroup_) * Traits::kOwnSlices * Traits::kSliceBytes,
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
    const float scale[2] = {shared_.scales[stage][tile_row()],
                            shared_.scales[stage][tile_row() + 8]};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators_[i] *= scale[i / 2 % 2];
  }

  // Opaque: addresses in the code that ends a row are to be computed there, not kept all along.
  __device__ __forceinline__ int tile_row() const {
    return static_cast<int>(ptx::opaque(16 * warp_ + lane_ / 4));
  }

  __device__ __forceinline__ Element* out_row(std::int32_t row, const QueryRow& query) const {
    return static_cast<Element*>(params_.shape.out) + out_offset(params_.shape, row, query) +
           warpgroup_ * Traits::kOwnColumns;
  }

  // Through this warpgroup's slices of a stage that nothing else uses, so that each store
  // instruction of a warp writes 512 contiguous bytes. A warp reads only what it wrote.
  __device__ __forceinline__ void write_rows(std::int32_t row, int stage) {
    const std::uint32_t base = ptx::opaque(ptx::shared_address(shared_.stages[stage]) +
                                           warpgroup_ * Traits::kOwnSlices * Traits::kSliceBytes);
    const int fragment_row = 16 * warp_ + static_cast<int>(ptx::opaque(lane_ % 16));
#pragma unroll
    for (int i = 0; i < kAccumulators / 8; ++i) {
      const float* a = accumulators_ + 8 * i;
      ptx::store_matrices(base + i / 4 * Traits::kSliceBytes +
                              mma::chunk_offset(fragment_row, i % 4 * 2 + lane_ / 16),
                          pack<Element>(a[0], a[1]), pack<Element>(a[2], a[3]),
                          pack<Element>(a[4], a[5]), pack<Element>(a[6], a[7]));
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int tile_row = 16 * warp_ + i;
      const std::int32_t query_row = Place::first_query_row() + tile_row;
      if (query_row >= params_.shape.query_rows) break;
      const uint4 value = ptx::load_shared_16(base + lane_ / 8 * Traits::kSliceBytes +
                                              mma::chunk_offset(tile_row, lane_ % 8));
      store_row_chunk(
          out_row(row, query_row_at(params_.shape, Place::kv_head(), query_row)) + lane_ * 8, value,
          params_.shape.out_is_aligned);
    }
    // The copy engine writes here next.
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void write_partials(std::int32_t slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t query_row = Place::first_query_row() + tile_row() + 8 * half;
      if (query_row >= params_.shape.query_rows) continue;
      float* destination =
          params_.shape.partial_out +
          partial_index(params_.shape, slot, Place::kv_head(), query_row) * Traits::kHeadDimV +
          warpgroup_ * Traits::kOwnColumns + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < kAccumulators / 4; ++i) {
        *reinterpret_cast<float2*>(destination + 8 * i) =
            float2{accumulators_[4 * i + 2 * half], accumulators_[4 * i + 2 * half + 1]};
      }
    }
  }

  __device__ __forceinline__ void write_zeros(std::int32_t row) {
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const std::int32_t query_row = Place::first_query_row() + 16 * warp_ + i;
      if (query_row >= params_.shape.query_rows) break;
      store_row_chunk(
          out_row(row, query_row_at(params_.shape, Place::kv_head(), query_row)) + lane_ * 8,
          uint4{0, 0, 0, 0}, params_.shape.out_is_aligned);
    }
  }

  const DecodeParams& params_;
  WideShared<Traits>& shared_;
  int warpgroup_;
  int warp_;
  int lane_;
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
      ptx::mbarrier_init(ptx::shared_address(&shared.full_rest[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.ready[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.gate[stage]), Traits::kScoreArrivals);
      ptx::mbarrier_init(ptx::shared_address(&shared.free[stage]), Traits::kValueArrivals);
    }
    ptx::fence_mbarrier_init();
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
    ValueRole<Traits>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace flashmla::cuda::sm90a
