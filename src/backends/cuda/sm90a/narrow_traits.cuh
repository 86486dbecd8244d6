// The narrow kernel: few query rows of one key/value head, which are the columns of every product;
// cached tokens, and then value columns, are its rows. DESIGN.md says why.
#pragma once

#include <cstdint>

#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/ptx/barrier.cuh"

namespace flashmla::cuda::sm90a {

template <class ElementType, int kHeadDimension, int kMaxQueryRows>
struct NarrowTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kHeadDimV = 512;
  static constexpr int kQueryRows = kMaxQueryRows;  // 16 or 32; missing ones are zeros

  static constexpr int kTileTokens = 64;  // a block of the plan
  static constexpr int kSlices = kHeadDim / mma::kSliceElements;
  static constexpr int kValueSlices = kHeadDimV / mma::kSliceElements;
  static constexpr int kSliceBytes = kTileTokens * mma::kRowBytes;
  static constexpr int kQuerySliceBytes = kQueryRows * mma::kRowBytes;

  static constexpr int kComputeThreads = 128;
  static constexpr int kComputeWarps = 4;
  static constexpr int kLoadWarp = kComputeWarps;
  // The loading warp and the scout. With 32 query rows two idle warps make a warpgroup of them, so
  // that it can give registers to the other: kRegisters a thread leave room for the combine.
  static constexpr bool kGivesRegisters = kQueryRows == 32;
  static constexpr int kThreads = kComputeThreads + (kGivesRegisters ? 4 : 2) * 32;
  static constexpr int kRegisters = 144;
  static constexpr int kComputeRegisters = 232;
  static constexpr int kOtherRegisters = 2 * kRegisters - kComputeRegisters;

  // Two tiles are enough in flight, and leave room for a block of the combine to be resident.
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kSlices * kSliceBytes;
  // A lane of each compute warp says that it has let go of a stage.
  static constexpr int kEmptyArrivals = kComputeWarps * ptx::kArrivingLanes;

  enum NamedBarrier { kComputeWarpgroup = 1 };  // 0 is __syncthreads

  static_assert(kHeadDim == 576 || kHeadDim == 512);
  static_assert(kQueryRows == 16 || kQueryRows == 32);
};

// Where a part probably begins. length 0: with no tile.
struct TileGuess {
  std::int32_t row, block, length;
};

template <class Traits>
struct NarrowShared {  // at a multiple of 1024 bytes
  std::uint8_t stages[Traits::kStages][Traits::kTileBytes];
  // Slices of kQueryRows rows; when a row ends, its output (kQueryRows, kHeadDimV).
  std::uint8_t query[Traits::kSlices][Traits::kQuerySliceBytes];
  std::uint8_t probabilities[Traits::kQuerySliceBytes];  // one slice (kQueryRows, 64 tokens)
  alignas(16) float reduction[Traits::kQueryRows][Traits::kComputeWarps];
  float reference[Traits::kQueryRows];
  float factor[Traits::kQueryRows];
  std::uint64_t full[Traits::kStages];
  std::uint64_t empty[Traits::kStages];
  std::uint64_t guessed;  // the scout has written `guess`
  std::uint64_t opened;   // the scout has marked where results go
  TileGuess guess;
  bool is_lost[Traits::kQueryRows];  // of a row that is whole
};

// Of 228 KB a multiprocessor; what is left holds blocks of the combine.
static_assert(sizeof(NarrowShared<NarrowTraits<std::uint16_t, 576, 16>>) <= 170 * 1024);
static_assert(sizeof(NarrowShared<NarrowTraits<std::uint16_t, 576, 32>>) <= 190 * 1024);

}  // namespace flashmla::cuda::sm90a
