// Cached values to B tiles of token pairs, in pieces small enough to run between tile products.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/tile.hpp"

namespace flashmla::cpu::amx {
namespace {

// V of a block, 32 columns at a time: a panel, which stays in the first-level cache while all rows
// use it. A unit of 32 tokens becomes two tiles. Unpacking works inside 128-bit lanes, so of each
// eight columns the first tile has the first four, the second tile the others: O keeps that order
// until it is finished.
//
// There is one panel: the last rows that use it are done with it unit by unit, and the next columns
// take the places. Two panels, with what the next one is made of, would be more than that cache
// holds beside O.
class ValueInterleave {
 public:
  static constexpr std::int32_t kUnitBytes = 2 * kTileBytes;
  static constexpr std::int32_t kPiecesPerUnit = 4;

  // `panel`: null where nothing is interleaved.
  explicit ValueInterleave(std::byte* panel) : panel_(panel) {}

  // The tokens of the panels that follow: two tiles for each unit, 16 tokens each. The panel that
  // begins at column 0 is first, made by run() and finish_panel().
  void begin_block(const TileView* tiles, std::int32_t units) {
    tiles_ = tiles;
    pieces_ = units * kPiecesPerUnit;
    piece_ = 0;
    column_bytes_ = 0;
  }

  // What is left of the panel.
  const std::byte* finish_panel() {
    while (piece_ < pieces_) run();
    return panel_;
  }

  // The panel that begins at `column` follows, by run_piece(); -1: none.
  void begin_panel(std::int32_t column) { column_bytes_ = std::int64_t{column} * 2; }
  bool has_panel() const { return column_bytes_ >= 0; }

  // A piece of column 0.
  void run() {
    if (piece_ == pieces_) return;
    run_piece(piece_ / kPiecesPerUnit, piece_ % kPiecesPerUnit);
    ++piece_;
  }

  // A quarter of a unit, half of a tile of the cache: four pairs of tokens.
  [[gnu::always_inline]] void run_piece(std::int32_t unit, std::int32_t piece) const {
    constexpr std::int32_t kPairs = kTileRows / kPiecesPerUnit;
    const TileView& tile = tiles_[unit * 2 + piece / 2];
    const std::int64_t stride = tile.stride;
    const std::byte* token = tile.base + column_bytes_ + piece % 2 * (2 * kPairs) * stride;
    std::byte* first = panel_ + unit * kUnitBytes + piece * kPairs * kTileRowBytes;
    for (std::int32_t i = 0; i < kPairs; ++i) {
      const __m512i even = _mm512_loadu_si512(token);
      const __m512i odd = _mm512_loadu_si512(token + stride);
      _mm512_store_si512(first + i * kTileRowBytes, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(first + i * kTileRowBytes + kTileBytes, _mm512_unpackhi_epi16(even, odd));
      token += 2 * stride;
    }
  }

 private:
  std::byte* panel_;
  const TileView* tiles_ = nullptr;
  std::int64_t column_bytes_ = 0;  // of the columns that are interleaved
  std::int32_t pieces_ = 0;        // of column 0
  std::int32_t piece_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
