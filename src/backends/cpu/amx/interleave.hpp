// Cached values to B tiles of token pairs, in pieces small enough to run between tile products.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/tile.hpp"

namespace flashmla::cpu::amx {
namespace {

// V of a block, 32 tokens and 32 columns at a time, becomes two tiles. Unpacking works inside
// 128-bit lanes, so of each eight columns the first tile has the first four, the second tile the
// others: O keeps that order until it is finished.
class ValueInterleave {
 public:
  // A piece is four pairs of tokens of 32 columns.
  static constexpr std::int32_t kPairsPerPiece = 4;
  static std::int32_t pieces_per_unit(std::int32_t head_dim_v) {
    return head_dim_v / kTileElements * (kTileRows / kPairsPerPiece);
  }
  // Tiles of 32 columns of a unit; units of the same columns follow one another.
  static constexpr std::int32_t kUnitBytes = 2 * kTileBytes;
  static constexpr std::int32_t kColumnsBytes =
      ManyRows::kBlockTokens / ManyRows::kUnitTokens * kUnitBytes;

  ValueInterleave(std::byte* values, std::int32_t head_dim_v)
      : values_(values), column_groups_(head_dim_v / kTileElements) {}

  // `tiles`: two for each unit, 16 tokens each.
  void begin_block(const TileView* tiles) {
    tiles_ = tiles;
    ready_ = unit_ = columns_ = pair_ = 0;
  }

  void set_ready(std::int32_t units) { ready_ = units; }

  [[gnu::always_inline]] void run(std::int32_t pieces) {
    for (; pieces > 0 && unit_ < ready_; --pieces) run_piece();
  }

  void finish_block() {
    while (unit_ < ready_) run_piece();
  }

 private:
  [[gnu::always_inline]] void run_piece() {
    constexpr std::int32_t kPairsPerTile = kTileRows / 2;
    const TileView tile = tiles_[unit_ * 2 + pair_ / kPairsPerTile];
    const std::byte* token =
        tile.base + pair_ % kPairsPerTile * 2 * tile.stride + columns_ * kTileRowBytes;
    std::byte* first = values_ + std::int64_t{columns_} * kColumnsBytes +
                       std::int64_t{unit_} * kUnitBytes + pair_ * kTileRowBytes;
    for (std::int32_t i = 0; i < kPairsPerPiece; ++i) {
      const __m512i even = _mm512_loadu_si512(token);
      const __m512i odd = _mm512_loadu_si512(token + tile.stride);
      _mm512_store_si512(first, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(first + kTileBytes, _mm512_unpackhi_epi16(even, odd));
      token += 2 * tile.stride;
      first += kTileRowBytes;
    }
    pair_ += kPairsPerPiece;
    if (pair_ < kTileRows) return;
    pair_ = 0;
    if (++columns_ < column_groups_) return;
    columns_ = 0;
    ++unit_;
  }

  std::byte* values_;
  std::int32_t column_groups_;
  const TileView* tiles_ = nullptr;
  std::int32_t ready_ = 0;
  std::int32_t unit_ = 0;
  std::int32_t columns_ = 0;
  std::int32_t pair_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
