// Cached values to B tiles of token pairs, in pieces small enough to run between tile products.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/tile.hpp"

namespace flashmla::cpu::amx {
namespace {

// V of a block, 32 columns at a time: a panel, which stays in the first-level cache while all rows
// use it and the next one is made. A unit of 32 tokens becomes two tiles. Unpacking works inside
// 128-bit lanes, so of each eight columns the first tile has the first four, the second tile the
// others: O keeps that order until it is finished.
class ValueInterleave {
 public:
  static constexpr std::int32_t kUnitBytes = 2 * kTileBytes;
  static constexpr std::int32_t kPanelBytes =
      ManyRows::kBlockTokens / ManyRows::kUnitTokens * kUnitBytes;
  static constexpr std::int32_t kPiecesPerUnit = 4;

  // `panels`: room for two; null where nothing is interleaved.
  explicit ValueInterleave(std::byte* panels)
      : next_(panels), panel_(panels == nullptr ? nullptr : panels + kPanelBytes) {}

  // The tokens of the panels that follow: two tiles for each unit, 16 tokens each.
  void begin_block(const TileView* tiles, std::int32_t units) {
    tiles_ = tiles;
    pieces_ = units * kPiecesPerUnit;
    begin_panel(0);
  }

  // The panel that begins at `column` follows.
  void begin_panel(std::int32_t column) {
    offset_ = std::int64_t{column} * 2;
    target_ = next_;
    piece_ = 0;
  }

  [[gnu::always_inline]] void run(std::int32_t pieces) {
    for (; pieces > 0 && piece_ < pieces_; --pieces) run_piece();
  }

  // The panel begun, which is valid until another one is begun and finished.
  const std::byte* finish_panel() {
    while (piece_ < pieces_) run_piece();
    std::swap(next_, panel_);
    return panel_;
  }

 private:
  // Four pairs of tokens: a quarter of a unit, half of a tile of the cache.
  static constexpr std::int32_t kPairsPerPiece = kTileRows / kPiecesPerUnit;

  [[gnu::always_inline]] void run_piece() {
    if (piece_ % 2 == 0) {
      const TileView& tile = tiles_[piece_ / 2];
      source_ = tile.base + offset_;
      stride_ = tile.stride;
    }
    const std::int64_t stride = stride_;
    const std::byte* token = source_;
    std::byte* first = target_;
    for (std::int32_t i = 0; i < kPairsPerPiece; ++i) {
      const __m512i even = _mm512_loadu_si512(token);
      const __m512i odd = _mm512_loadu_si512(token + stride);
      _mm512_store_si512(first + i * kTileRowBytes, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(first + i * kTileRowBytes + kTileBytes, _mm512_unpackhi_epi16(even, odd));
      token += 2 * stride;
    }
    source_ = token;
    // The second tile of a unit lies between its first and the next unit.
    target_ = first + kPairsPerPiece * kTileRowBytes;
    if (++piece_ % kPiecesPerUnit == 0) target_ += kTileBytes;
  }

  std::byte* next_;   // where the panel begun goes
  std::byte* panel_;  // the one before
  const TileView* tiles_ = nullptr;
  std::int64_t offset_ = 0;  // of the panel's columns, in bytes
  std::int32_t pieces_ = 0;
  std::int32_t piece_ = 0;
  const std::byte* source_ = nullptr;
  std::int64_t stride_ = 0;
  std::byte* target_ = nullptr;
};

}  // namespace
}  // namespace flashmla::cpu::amx
