// The wide kernel: 64 query rows of one key/value head as the rows of every product.
// DESIGN.md draws the pipeline and says why.
#pragma once

#include <cstdint>

#include "backends/cuda/common/entry_walk.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/ptx/barrier.cuh"

namespace flashmla::cuda::sm90a {

template <class ElementType, int kHeadDimension>
struct WideTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kHeadDimV = 512;

  static constexpr int kTileRows = 64;    // query rows
  static constexpr int kTileTokens = 64;  // a block of the plan
  static constexpr int kSlices = kHeadDim / mma::kSliceElements;
  static constexpr int kSteps = kHeadDim / 16;  // of the score product
  // Steps whose query fragments stay in registers: 4 each. 184 registers hold 31, not 32.
  static constexpr int kRegisterSteps = 31;
  static constexpr int kTailSteps = kSteps - kRegisterSteps;
  // The value product of a tile starts when so many slices of the next tile's scores are done.
  static constexpr int kGateSlices = kSlices == 9 ? 6 : 5;

  static constexpr int kWarpgroupThreads = 128;
  static constexpr int kWarpgroupWarps = 4;
  static constexpr int kValueWarpgroups = 2;
  static constexpr int kValueWarps = kValueWarpgroups * kWarpgroupWarps;
  static constexpr int kThreads = (1 + kValueWarpgroups) * kWarpgroupThreads;
  static constexpr int kScoreRegisters = 184;
  static constexpr int kValueRegisters = 160;
  // What a value warpgroup owns: these columns of V and of the output, these slices of a stage.
  static constexpr int kOwnColumns = kHeadDimV / kValueWarpgroups;
  static constexpr int kOwnSlices = kOwnColumns / mma::kSliceElements;

  static constexpr int kSliceBytes = kTileTokens * mma::kRowBytes;
  static constexpr int kStages = 3;
  // A tile arrives in two pieces, so that its first scores do not wait for its last bytes.
  static constexpr int kPieces = 2;
  static constexpr int kFirstPieceSlices = kFirstPieceOfTile;
  static constexpr int kProbabilitySlice = 8;  // of a stage: RoPE columns first, then P
  static constexpr int kStageBytes = (kProbabilitySlice + 1) * kSliceBytes;
  static constexpr int kTailStepBytes = kTileRows * 32;

  // 0 is __syncthreads. kLostRows and the three after it: the value warps of 16 query rows.
  enum NamedBarrier { kScoreWarpgroup = 1, kLostRows = 2 };

  // A lane of each score warp says that P is written or the gate open; a lane of each value warp,
  // that it has let go of a stage.
  static constexpr int kScoreArrivals = kWarpgroupWarps * ptx::kArrivingLanes;
  static constexpr int kValueArrivals = kValueWarps * ptx::kArrivingLanes;

  static_assert(kHeadDim == 576 || kHeadDim == 512);
  static_assert(kTailSteps >= 1 && kTailSteps <= 5);
};

// The row whose last tile stands before this entry, as the score warpgroup hands it on.
struct EndedRow {
  std::int32_t row;   // -1: none
  std::int32_t slot;  // of its partials; -1: it is whole
};

template <class Traits>
struct WideShared {  // at a multiple of 1024 bytes
  std::uint8_t stages[Traits::kStages][Traits::kStageBytes];
  // Query steps that did not fit into registers, as 8 x 8 core matrices, not swizzled.
  std::uint8_t query_tail[5 * Traits::kTailStepBytes];
  // By query row. Tile: what the accumulators are multiplied by first, if `rescale` says so.
  // Otherwise: the inverse sum of the row that has just ended.
  float scales[Traits::kStages][Traits::kTileRows];
  bool rescale[Traits::kStages][Traits::kWarpgroupWarps];  // by 16 query rows
  bool has_lost[Traits::kValueWarps];  // of a row that is whole, a query row: see is_lost()
  Entry entries[Traits::kStages];
  EntryWalk walk;
  Entry next;                                            // what will be loaded when a stage is free
  std::uint64_t full[Traits::kStages][Traits::kPieces];  // the stage holds that piece of its entry
  std::uint64_t ready[Traits::kStages];                  // P is written, or the query consumed
  std::uint64_t gate[Traits::kStages];                   // the value product may start
  std::uint64_t free[Traits::kStages];                   // nothing reads the stage any more
};

static_assert(sizeof(WideShared<WideTraits<std::uint16_t, 576>>) <= 232448,
              "a block of sm_90 can have 227 KB");

}  // namespace flashmla::cuda::sm90a
