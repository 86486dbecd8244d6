// Attention for up to 32 query rows of a key/value head. One warp keeps a ring of tiles filled; one
// warpgroup computes S^T = K Q^T, P^T, and O^T += V^T P^T.
#pragma once

#include <cstdint>

#include "backends/cuda/common/entry_walk.cuh"
#include "backends/cuda/common/first_reads.cuh"
#include "backends/cuda/common/float64_decode.cuh"
#include "backends/cuda/common/numeric.cuh"
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

// What a block computes: query rows of a key/value head, for the parts of the plan from part() on
// that stand step() apart. All query rows, for one part.
struct UndividedPlace {
  static constexpr bool kIsDivided = false;
  static __device__ __forceinline__ std::int32_t part() { return blockIdx.z; }
  static __device__ __forceinline__ std::int32_t step() { return gridDim.z; }
  static __device__ __forceinline__ std::int32_t kv_head() { return blockIdx.y; }
  static __device__ __forceinline__ std::int32_t first_query_row() { return 0; }
};

// Some query rows, in a grid of fewer blocks a tile of them than there are parts. Made for plans
// with work for the first parts alone.
template <int kQueryRows>
struct DividedPlace {
  static constexpr bool kIsDivided = true;
  static __device__ __forceinline__ std::int32_t part() { return blockIdx.z; }
  static __device__ __forceinline__ std::int32_t step() { return gridDim.z; }
  static __device__ __forceinline__ std::int32_t kv_head() { return blockIdx.y; }
  static __device__ __forceinline__ std::int32_t first_query_row() {
    return blockIdx.x * kQueryRows;
  }
};

// The parts of the block that are still to come. All lanes of a warp.
template <class Place>
class LaterParts {
 public:
  // Asks which have work, ...
  __device__ __forceinline__ explicit LaterParts(const CallShape& shape) {
    if constexpr (Place::kIsDivided) {
      const std::int32_t index = part_of(threadIdx.x % 32);
      if (index < shape.num_parts) begin_row_ = shape.plan_rows[index * shape.plan_row_stride];
    }
  }
  // ... and takes the answers.
  __device__ __forceinline__ void count(const CallShape& shape) {
    if constexpr (Place::kIsDivided) {
      parts_ = __ballot_sync(~0u, begin_row_ >= 0 && begin_row_ < shape.batch);
    }
  }
  __device__ __forceinline__ bool has_more() const { return Place::kIsDivided && parts_ != 0; }
  __device__ __forceinline__ std::int32_t next() {
    const std::int32_t part = part_of(__ffs(parts_) - 1);
    parts_ &= parts_ - 1;
    return part;
  }

 private:
  // There are fewer than eight: see tuning::divided_parts().
  static __device__ __forceinline__ std::int32_t part_of(std::int32_t index) {
    if constexpr (Place::kIsDivided) return Place::part() + (index + 1) * Place::step();
    return 0;
  }

  std::int32_t begin_row_ = -1;
  std::uint32_t parts_ = 0;  // bit i: part_of(i) has work
};

// How many query rows the block has.
template <class Traits, class Place>
__device__ __forceinline__ std::int32_t query_rows_of_block(const CallShape& shape) {
  return Place::kIsDivided ? min(shape.query_rows - Place::first_query_row(), Traits::kQueryRows)
                           : shape.query_rows;
}

// --- Scout: the last warp ------------------------------------------------------------------------

// The tile that the part begins with if plan, lengths and table are what the scout read before it
// was allowed to; no tokens: none. Waits for the scout, which began to read with the block.
template <class Traits>
__device__ __forceinline__ Entry guessed_tile(const NarrowShared<Traits>& shared) {
  ptx::mbarrier_wait(ptx::shared_address(&shared.guessed), 0);
  return {Entry::kTile, 0, shared.guess.row, shared.guess.block, 0, shared.guess.length};
}

template <class Traits, class Place>
class NarrowScout {
 public:
  __device__ __forceinline__ NarrowScout(const DecodeParams& params, NarrowShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  // Before the grid may read anything: a guess of where it begins, and that tile into L2. Whatever
  // is found there leads to no other use.
  __device__ __forceinline__ void look_ahead() {
    const EarlyLoad load;
    const FirstReads first = read_first(params_, Place::part());
    part_ = first.part;
    begin_length_ = first.length;
    const bool has_rows = part_.begin_row <= part_.end_row;
    const Share share = share_of_row(part_, part_.begin_row, begin_length_);
    const bool has_tiles = has_rows && share.begin_block < share.end_block;
    // A block that no row has may lie past what a token's number can hold.
    TileGuess guess{0, 0, 0};
    if (has_tiles) guess = {part_.begin_row, share.begin_block, begin_length_};
    if (threadIdx.x % 32 == 0) {
      shared_.guess = guess;
      ptx::mbarrier_arrive(ptx::shared_address(&shared_.guessed));
    }
    if (has_tiles && boxes_of_slice(params_) == 1) {
      const std::int32_t page = first.page_of(params_, share.begin_block << kTileRowsLog2);
      if (threadIdx.x % 32 == 0) {
        prefetch_tile(params_, share.begin_block, Place::kv_head(), page);
      }
    }
    if (!has_rows) {
      part_ = {0, 0, 0, 0};
      begin_length_ = 0;
    }
    end_length_ = begin_length_;
    if (part_.end_row != part_.begin_row) {
      end_length_ = __shfl_sync(~0u, row_length(params_.shape, part_.end_row, load), 0);
    }
  }

  // Marks what the combine is to wait for as not written, and lets it begin. By the guess, at once:
  // what is asked for after the first tile, a fence too, comes after that.
  __device__ __forceinline__ void open_combine() const {
    const CallShape& shape = params_.shape;
    LaterParts<Place> later(shape);
    const Part part = read_part(shape, Place::part());
    const std::int32_t begin_length = row_length(shape, part_.begin_row);
    const std::int32_t end_length = row_length(shape, part_.end_row);
    const int guessed = fragments(part_, begin_length_, end_length_);
    clear_partials(Place::part(), guessed);
    if (part.begin_row != part_.begin_row || part.begin_block != part_.begin_block ||
        part.end_row != part_.end_row || part.end_block != part_.end_block ||
        begin_length != begin_length_ || end_length != end_length_) {
      if (part.begin_row <= part.end_row) {
        clear_partials(Place::part(), fragments(part) & ~guessed);
      }
    }
    if constexpr (Place::kIsDivided) {
      later.count(shape);
      while (later.has_more()) {
        const std::int32_t index = later.next();
        const Part later_part = read_part(shape, index);
        if (later_part.begin_row <= later_part.end_row) {
          clear_partials(index, fragments(later_part));
        }
      }
    }
    // The results may now take the places of the marks.
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared_.opened));
    ptx::allow_next_grid();
  }

 private:
  // Which of its two slots the part uses, as bits.
  static __device__ __forceinline__ int fragments(const Part& part, std::int32_t begin_length,
                                                  std::int32_t end_length) {
    int slots = share_of_row(part, part.begin_row, begin_length).is_fragment() ? 1 : 0;
    if (part.begin_row < part.end_row &&
        share_of_row(part, part.end_row, end_length).is_fragment()) {
      slots |= 2;
    }
    return slots;
  }

  __device__ __forceinline__ int fragments(const Part& part) const {
    return fragments(part, row_length(params_.shape, part.begin_row),
                     row_length(params_.shape, part.end_row));
  }

  __device__ __forceinline__ void clear_partials(std::int32_t part_index, int slots) const {
    if (slots == 0) return;
    const CallShape& shape = params_.shape;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if ((slots >> i & 1) == 0) continue;
      const std::int64_t first =
          partial_index(shape, 2 * part_index + i, Place::kv_head(), Place::first_query_row());
      const std::int32_t query_rows = query_rows_of_block<Traits, Place>(shape);
      set_marks(shape.partial_out + first * Traits::kHeadDimV,
                query_rows * (Traits::kHeadDimV / 8));
      set_marks(shape.warp_statistics + first * kPartialWarps, query_rows * kPartialWarps);
    }
    ptx::fence_device();
    __syncwarp();
  }

  static __device__ __forceinline__ void set_marks(void* memory, int chunks) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < chunks; i += 32) {
      ptx::store_whole_16(static_cast<uint4*>(memory) + i,
                          uint4{kNotYet, kNotYet, kNotYet, kNotYet});
    }
  }

  const DecodeParams& params_;
  NarrowShared<Traits>& shared_;
  // The guess: a part without blocks of row 0, if there is none.
  Part part_{0, 0, 0, 0};
  std::int32_t begin_length_ = 0, end_length_ = 0;
};

// --- Load: the warp before it --------------------------------------------------------------------

// The next entry of the block's parts. later: those that are still to come.
template <class Place>
__device__ __forceinline__ Entry next_entry_of_block(EntryWalk& walk, const CallShape& shape,
                                                     LaterParts<Place>& later) {
  Entry entry = next_entry(walk, shape);
  while (entry.kind == Entry::kEnd && later.has_more()) {
    begin_walk(walk, shape, later.next());
    entry = next_entry(walk, shape);
  }
  return entry;
}

template <class Traits, class Place>
class NarrowLoader {
 public:
  __device__ __forceinline__ NarrowLoader(const DecodeParams& params, NarrowShared<Traits>& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
    // Asked for at once: the part, the length and the page of the tile that it probably begins
    // with.
    const Entry guess = guessed_tile(shared_);
    const Pages guessed_pages = pages_of(guess);
    EntryWalk walk;
    LaterParts<Place> later(params_.shape);
    begin_walk(walk, params_.shape, Place::part(), guess.row, [] {});
    later.count(params_.shape);
    Entry entry = next_tile(walk, later);
    const bool is_guess = entry.kind == Entry::kTile && entry.row == guess.row &&
                          entry.block == guess.block && entry.length == guess.length;
    Pages pages = is_guess ? guessed_pages : pages_of(entry);
    StagePosition<Traits> position;
    while (entry.kind == Entry::kTile) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.empty[position.stage]), position.parity ^ 1);
      const std::uint32_t full = ptx::shared_address(&shared_.full[position.stage]);
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive_expect(full, Traits::kTileBytes);
      __syncwarp();
      const std::uint32_t stage = ptx::shared_address(shared_.stages[position.stage]);
      if (boxes_of_slice(params_) > 1) {
        copy_tile_by_boxes<0, Traits::kSlices>(
            params_, params_.k_map, entry.block, Place::kv_head(),
            [&](int box) { return box < 32 ? pages.near : pages.far; }, stage, full);
      } else if (threadIdx.x % 32 == 0) {
        copy_whole_tile<0>(params_, params_.k_map, entry.block, Place::kv_head(), pages.near, stage,
                           full);
      }
      position.advance();
      // The next tile's pages are asked for before it waits for its stage.
      entry = next_tile(walk, later);
      pages = pages_of(entry);
    }
  }

 private:
  // Of the boxes that this lane copies.
  struct Pages {
    std::int32_t near, far;
  };

  __device__ __forceinline__ Entry next_tile(EntryWalk& walk, LaterParts<Place>& later) const {
    for (;;) {
      const Entry entry = next_entry_of_block<Place>(walk, params_.shape, later);
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

template <class Traits, class Place>
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
    // The queries of the row that the part probably begins with are asked for with the plan.
    const std::int32_t guess = guessed_tile(shared_).row;
    EntryWalk walk;
    LaterParts<Place> later(params_.shape);
    begin_walk(walk, params_.shape, Place::part(), guess, [&] { load_queries(guess); });
    later.count(params_.shape);
    for (;;) {
      const Entry entry = next_entry_of_block<Place>(walk, params_.shape, later);
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
    const std::int32_t token = params_.shape.heads_per_kv_head.quotient(
        Place::first_query_row() + min(query_row, query_rows() - 1));
    return visible_tokens(params_, params_.shape, entry.row, token, entry.length);
  }

  __device__ __forceinline__ std::int32_t query_rows() const {
    return query_rows_of_block<Traits, Place>(params_.shape);
  }

  // Query row of the block, as token and head.
  __device__ __forceinline__ QueryRow query_at(int query_row) const {
    return query_row_at(params_.shape, Place::kv_head(), Place::first_query_row() + query_row);
  }

  __device__ __forceinline__ void start_row(const Entry& entry) {
    first_masked_block_ = visible_of(entry, 0) / Traits::kTileTokens;
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      reference_[i] = kNoReference;
      sum_[i] = 0.0f;
    }
    if (entry.row != loaded_row_) load_queries(entry.row);
    ptx::fence_async_proxy();
    synchronise();
  }

  // Queries of a row into shared memory, those that are missing as zeros. Eight threads for each.
  __device__ __forceinline__ void load_queries(std::int32_t row) {
    constexpr int kRowThreads = mma::kSliceElements / 8;
    const int chunk = threadIdx.x % kRowThreads;
    const Element* q = static_cast<const Element*>(params_.q) + row * params_.q_batch_stride;
#pragma unroll 1
    for (int query_row = threadIdx.x / kRowThreads; query_row < Traits::kQueryRows;
         query_row += Traits::kComputeThreads / kRowThreads) {
      uint4 values[Traits::kSlices] = {};
      if (query_row < query_rows()) {
        const QueryRow query = query_at(query_row);
        const Element* from =
            q + query.token * params_.q_token_stride + query.head * params_.q_head_stride;
#pragma unroll
        for (int slice = 0; slice < Traits::kSlices; ++slice) {
          values[slice] = reinterpret_cast<const uint4*>(from)[slice * kRowThreads + chunk];
        }
      }
      const std::uint32_t to =
          ptx::shared_address(shared_.query) + mma::chunk_offset(query_row, chunk);
#pragma unroll
      for (int slice = 0; slice < Traits::kSlices; ++slice) {
        ptx::store_shared_16(to + slice * Traits::kQuerySliceBytes, values[slice]);
      }
    }
    loaded_row_ = row;
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
    if (exact) exact_softmax(scores, probabilities, tile, is_first, is_masked);
    store_probabilities(probabilities);
    ptx::fence_async_proxy();
    synchronise();
    accumulate(is_first, (tile.detail & Entry::kLast) != 0);
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

  // Of two probabilities; NaN where a score is infinite.
  static __device__ __forceinline__ float sum_of(float low_score, float high_score, float low,
                                                 float high) {
    return fmaf(low_score + high_score, 0.0f, low + high);
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
      tile_sum[i] = sum_of(scores[low], scores[high], probabilities[low], probabilities[high]);
      // Written so that NaN counts as outgrown.
      outgrown |= !(tile_sum[i] <= kOutgrownSum<Element>);
    }
    if (ptx::named_barrier_or(Traits::kComputeWarpgroup, Traits::kComputeThreads, outgrown)) {
      return true;
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) sum_[i] += tile_sum[i];
    return false;
  }

  // Masks where asked to, raises the references to the true maxima and their headroom where they
  // were lower, and rescales.
  __device__ __forceinline__ void exact_softmax(float (&scores)[kScores],
                                                float (&probabilities)[kScores], const Entry& tile,
                                                bool is_first, bool is_masked) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= params_.scale_log2;
    if (is_masked) {
      const std::int32_t token = tile.block * Traits::kTileTokens + 16 * warp_ + lane_ / 4;
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        const int low = i / 2 * 4 + i % 2, high = low + 2;
        const std::int32_t visible = visible_of(tile, column(i));
        if (token >= visible) scores[low] = kUnseen;
        if (token + 8 >= visible) scores[high] = kUnseen;
      }
    }
    float maximum[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
      maximum[i] = fmaxf(reference_[i], fmaxf(scores[low], scores[high]) + kHeadroom<Element>);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], lanes));
      }
    }
    if (lane_ < 4) {
#pragma unroll
      for (int i = 0; i < kHeads; ++i) shared_.reduction[column(i)][warp_] = maximum[i];
    }
    synchronise();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int low = i / 2 * 4 + i % 2, high = low + 2;
      const float4 of_warps = *reinterpret_cast<const float4*>(shared_.reduction[column(i)]);
      maximum[i] = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
      const float scale = exp2_approximate(reference_[i] - maximum[i]);
      reference_[i] = maximum[i];
      probabilities[low] = exp2_approximate(scores[low] - maximum[i]);
      probabilities[high] = exp2_approximate(scores[high] - maximum[i]);
      sum_[i] = sum_[i] * scale +
                sum_of(scores[low], scores[high], probabilities[low], probabilities[high]);
      // What the first tile is about to overwrite needs no scale.
      if (!is_first) scale_accumulators(i, scale);
    }
    // All have read the reduction when P is complete, and it is not written before.
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
  // Meanwhile, of the row's last tile, the sums over the warp's tokens.
  __device__ __forceinline__ void accumulate(bool is_first, bool is_last) {
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
    if (is_last) add_up_sums();
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

  __device__ __forceinline__ void add_up_sums() {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        sum_[i] += __shfl_xor_sync(~0u, sum_[i], lanes);
      }
    }
  }

  __device__ __forceinline__ void finish_row(std::int32_t row, std::int32_t slot) {
    if (slot < 0) {
      finish_whole(row);
    } else {
      finish_fragment(slot);
    }
    // A later part may begin with the same row, whose queries lie under its output now.
    if constexpr (Place::kIsDivided) loaded_row_ = -1;
    // Queries and reduction are free for the next row.
    synchronise();
  }

  __device__ __forceinline__ void finish_whole(std::int32_t row) {
    if (lane_ < 4) {
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        shared_.reduction[column(i)][warp_] = sum_[i];
        if (warp_ == 0) shared_.reference[column(i)] = reference_[i];
      }
    }
    synchronise();
    if (threadIdx.x < Traits::kQueryRows) finish_query_row(row, threadIdx.x);
    synchronise();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) scale_accumulators(i, shared_.factor[column(i)]);
    stage_rows<pack_finite<Element>>([&](int query_row, int slice) {
      return staged(query_row, slice * 8 + 2 * warp_ + lane_ / 8 % 2);
    });
    synchronise();
    constexpr int kChunks = Traits::kHeadDimV / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < query_rows() * kChunks; i += Traits::kComputeThreads) {
      store_row_chunk(out_row(row, i / kChunks) + i % kChunks * 8,
                      ptx::load_shared_16(staged(i / kChunks, i % kChunks)),
                      params_.shape.out_is_aligned);
    }
  }

  // Each warp for itself: it waits for no other, and nothing is divided by sums.
  __device__ __forceinline__ void finish_fragment(std::int32_t slot) {
    const CallShape& shape = params_.shape;
    const std::int64_t first =
        partial_index(shape, slot, Place::kv_head(), Place::first_query_row());
    // Each query row has a scale of its own: their magnitudes have nothing to do with each other.
    float scale[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float largest = 0.0f;
#pragma unroll
      for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
        const float* a = accumulators_[slice] + i / 2 * 4 + i % 2;
        largest = fmaxf(largest, fmaxf(fabsf(a[0]), fabsf(a[2])));
      }
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      }
      scale[i] = partial_scale(largest);
      scale_accumulators(i, inverse_partial_scale(scale[i]));
    }
    stage_rows<pack<__half>>([&](int query_row, int slice) {
      return staged_share(query_row, slice * 2 + lane_ / 8 % 2);
    });
    ptx::mbarrier_wait(ptx::shared_address(&shared_.opened), 0);
    if (lane_ < 4) {
      WarpStatistics* statistics = shape.warp_statistics + first * kPartialWarps + warp_;
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        if (column(i) >= query_rows()) continue;
        ptx::store_whole_16(statistics + column(i) * kPartialWarps,
                            uint4{__float_as_uint(reference_[i]), __float_as_uint(sum_[i]),
                                  __float_as_uint(scale[i]), 0});
      }
    }
    __syncwarp();
    // The warp's 128 columns of a query row lie together.
    constexpr int kChunks = Traits::kHeadDimV / 8 / kPartialWarps;
    constexpr int kCount = Traits::kQueryRows == 16 ? 8 : 4;
    uint4* out = reinterpret_cast<uint4*>(shape.partial_out + first * Traits::kHeadDimV) +
                 warp_ * kChunks + lane_ % kChunks;
#pragma unroll 1
    for (int base = lane_ / kChunks; base < query_rows(); base += 2 * kCount) {
      uint4 values[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = ptx::load_shared_16(staged_share(base + 2 * i, lane_ % kChunks));
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int query_row = base + 2 * i;
        if (query_row < query_rows()) {
          ptx::store_whole_16(out + query_row * (Traits::kHeadDimV / 8), values[i]);
        }
      }
    }
  }

  // What the accumulators of a query row are multiplied by, and its lse.
  __device__ __forceinline__ void finish_query_row(std::int32_t row, int query_row) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Traits::kComputeWarps; ++warp) {
      sum += shared_.reduction[query_row][warp];
    }
    sum = sum_to_trust(shared_.reference[query_row], sum);
    shared_.factor[query_row] = inverse_sum(sum);
    if (query_row >= query_rows()) return;
    if (is_lost(sum)) shared_.is_lost[query_row] = true;
    *lse_at(params_.shape, row, query_at(query_row)) =
        natural_lse(shared_.reference[query_row], sum);
  }

  // 16-byte chunk of the result as it is staged over the queries.
  __device__ __forceinline__ std::uint32_t staged(int query_row, int chunk) const {
    return ptx::shared_address(shared_.query) +
           (query_row * (Traits::kHeadDimV / 8) + (chunk ^ (query_row & 7))) * 16;
  }

  // 16-byte chunk of this warp's share of the columns as it is staged there: those of one slice
  // after those of the one before.
  __device__ __forceinline__ std::uint32_t staged_share(int query_row, int chunk) const {
    constexpr int kChunks = Traits::kHeadDimV / 8 / kPartialWarps;
    return ptx::shared_address(shared_.query) +
           ((warp_ * Traits::kQueryRows + query_row) * kChunks + (chunk ^ (query_row & 7))) * 16;
  }

  // The accumulators over the queries, as rows of 2-byte elements. address(query row, slice): where
  // the lane's 16 bytes of them go.
  template <auto kPack, class Address>
  __device__ __forceinline__ void stage_rows(const Address& address) const {
    const int query_row = lane_ / 16 * 8 + lane_ % 8;
#pragma unroll
    for (int slice = 0; slice < Traits::kValueSlices; ++slice) {
#pragma unroll
      for (int group = 0; group < Traits::kQueryRows / 16; ++group) {
        const float* a = accumulators_[slice] + 8 * group;
        ptx::store_matrices_transposed(address(query_row + 16 * group, slice), kPack(a[0], a[1]),
                                       kPack(a[2], a[3]), kPack(a[4], a[5]), kPack(a[6], a[7]));
      }
    }
  }

  __device__ __forceinline__ Element* out_row(std::int32_t row, int query_row) const {
    return static_cast<Element*>(params_.shape.out) +
           out_offset(params_.shape, row, query_at(query_row));
  }

  __device__ __forceinline__ void write_empty(std::int32_t row) {
    constexpr int kChunks = Traits::kHeadDimV / 8;
    for (int i = threadIdx.x; i < query_rows() * kChunks; i += Traits::kComputeThreads) {
      store_row_chunk(out_row(row, i / kChunks) + i % kChunks * 8, uint4{0, 0, 0, 0},
                      params_.shape.out_is_aligned);
    }
    if (static_cast<int>(threadIdx.x) < query_rows()) {
      *lse_at(params_.shape, row, query_at(threadIdx.x)) = kInfinity;
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
  std::int32_t loaded_row_;  // whose queries are in shared memory
  float accumulators_[Traits::kValueSlices][kScores] = {};
};

template <class Traits, class Place>
__device__ void redo_lost_rows_of_block(const DecodeParams& params) {
  const std::int32_t first = Place::first_query_row();
  const std::int32_t end = first + query_rows_of_block<Traits, Place>(params.shape);
  for (std::int32_t part = Place::part(); part < params.shape.num_parts; part += Place::step()) {
    redo_lost_rows<typename Traits::Element>(params, params.shape, part, Place::kv_head(), first,
                                             end, threadIdx.x / 32, Traits::kComputeWarps);
  }
}

template <class Traits, class Place>
__global__ void __maxnreg__(Traits::kRegisters)
    narrow_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  NarrowShared<Traits>& shared = *reinterpret_cast<NarrowShared<Traits>*>(shared_bytes);

  if (threadIdx.x == 0) {
    ptx::prefetch_map(params.k_map);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), Traits::kEmptyArrivals);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.guessed), 1);
    ptx::mbarrier_init(ptx::shared_address(&shared.opened), 1);
    ptx::fence_mbarrier_init();
  }
  if (threadIdx.x < Traits::kQueryRows) shared.is_lost[threadIdx.x] = false;
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < Traits::kLoadWarp) {
    if constexpr (Traits::kGivesRegisters) ptx::take_registers<Traits::kComputeRegisters>();
    ptx::wait_for_previous_grid();
    NarrowCompute<Traits, Place>(params, shared).run();
    if (__any_sync(~0u, shared.is_lost[threadIdx.x % Traits::kQueryRows])) {
      redo_lost_rows_of_block<Traits, Place>(params);
    }
    return;
  }
  if constexpr (Traits::kGivesRegisters) ptx::give_registers<Traits::kOtherRegisters>();
  if (warp == Traits::kLoadWarp) {
    ptx::wait_for_previous_grid();
    NarrowLoader<Traits, Place>(params, shared).run();
  } else if (warp == Traits::kLoadWarp + 1) {
    NarrowScout<Traits, Place> scout(params, shared);
    scout.look_ahead();
    ptx::wait_for_previous_grid();
    scout.open_combine();
  }
}

}  // namespace flashmla::cuda::sm90a
