// Score tiles to weights, in pieces small enough to run between tile products.
//
// A row's reference m is not its running maximum: m is raised, to the largest score, only when a
// score exceeds it by kRaise in powers of two, which float and bf16 hold without loss. After a
// row's first unit of tokens that hardly ever happens, so O is hardly ever rescaled; and what is
// rescaled then weighs less than 2^-kRaise of the rest, so that rounding it anew costs nothing.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/tile.hpp"
#include "backends/cpu/amx/vector.hpp"

namespace flashmla::cpu::amx {
namespace {

inline constexpr float kRaise = 30.0f;

// The units of a block, in the order in which their scores are finished: by group of tokens, then
// row tile, then unit of the group. A unit is one check of the reference and four pieces each of
// weights and of their transpose.
template <class Shape>
class SoftmaxQueue {
 public:
  static constexpr std::int32_t kUnitsPerGroup = Shape::kGroupTokens / Shape::kUnitTokens;
  static constexpr std::int32_t kPieces = 1 + 4 + 4;
  // In instructions, roughly, for each token of a quarter of a unit.
  static constexpr std::int32_t kPieceCosts[kPieces] = {12, 25, 25, 25, 25, 6, 6, 6, 6};
  static constexpr std::int32_t kUnitCost = 12 + 4 * 25 + 4 * 6;

  SoftmaxQueue(const Scratch<Shape>& scratch, const Problem& problem, std::int32_t row_tiles)
      : scratch_(scratch),
        head_dim_v_(problem.head_dim_v),
        row_tiles_(row_tiles),
        scale_(std::abs(problem.softmax_scale) * kLog2E) {
    for (std::int32_t row = 0; row < row_tiles_ * kTileRows; ++row) {
      scratch_.references[row] = -std::numeric_limits<float>::infinity();
      scratch_.totals[row] = 0.0f;
      scratch_.block_totals[row] = 0.0f;
    }
  }

  // Tokens [begin, begin + count) of the task follow. `masked`: some row does not see all of their
  // units. `first`: O holds nothing yet.
  void begin_block(std::int32_t begin, std::int32_t count, bool masked, bool first) {
    begin_ = begin;
    masked_ = masked;
    first_ = first;
    units_ = (count + Shape::kUnitTokens - 1) / Shape::kUnitTokens;
    ready_ = group_ = row_tile_ = unit_of_group_ = piece_ = budget_ = 0;
  }

  // The scores of a group of tokens for a row tile: [token][row].
  float* scores(std::int32_t group, std::int32_t row_tile) const {
    constexpr std::int32_t kGroupFloats = Shape::kGroupTokens * kTileFloats;
    return scratch_.scores + (score_block(group, row_tile) % kScoreBlocks * Shape::kGroupRowTiles +
                              row_tile % Shape::kGroupRowTiles) *
                                 kGroupFloats;
  }

  // The scores of `row_tiles` more row tiles are stored, in the queue's order.
  void add_ready(std::int32_t row_tiles) { ready_ += row_tiles; }

  // Lets `cost` more be spent on pieces, and does the pieces that this pays for: one with
  // exponentials costs several times what the others do, and must not come four times in a row.
  [[gnu::always_inline]] void run(std::int32_t cost) {
    budget_ += cost;
    while (ready_ > 0 && budget_ >= kPieceCosts[piece_]) {
      budget_ -= kPieceCosts[piece_];
      run_piece();
    }
    if (ready_ == 0) budget_ = 0;
  }

  // The scores of this group and row tile are about to take the place of an earlier block's.
  void make_room(std::int32_t group, std::int32_t row_tile) {
    while (score_block(group_, row_tile_) + kScoreBlocks <= score_block(group, row_tile)) {
      run_piece();
    }
  }

  void finish_block() {
    while (ready_ > 0) run_piece();
    for (std::int32_t row = 0; row < row_tiles_ * kTileRows; row += kTileFloats) {
      add_and_clear(scratch_.totals + row, scratch_.block_totals + row);
    }
  }

 private:
  static constexpr float kLog2E = 1.44269504f;
  static constexpr std::int32_t kBlockUnits = Shape::kBlockTokens / Shape::kUnitTokens;

  static void add_and_clear(float* total, float* part) {
    _mm512_store_ps(total, _mm512_add_ps(_mm512_load_ps(total), _mm512_load_ps(part)));
    _mm512_store_ps(part, _mm512_setzero_ps());
  }

  // The number of a block of score tiles, in the order in which they are computed.
  std::int32_t score_block(std::int32_t group, std::int32_t row_tile) const {
    const std::int32_t blocks = (row_tiles_ + Shape::kGroupRowTiles - 1) / Shape::kGroupRowTiles;
    return group * blocks + row_tile / Shape::kGroupRowTiles;
  }
  std::int32_t unit() const { return group_ * kUnitsPerGroup + unit_of_group_; }
  std::byte* weights(std::int32_t unit) const {
    return scratch_.weights + std::int64_t{row_tile_ * kBlockUnits + unit} * Shape::kUnitBytes;
  }

  [[gnu::always_inline]] void run_piece() {
    // Units past the last token have scores, of zeros, but no weights.
    if (unit() < units_) {
      if (piece_ > 4) {
        store_weights(piece_ - 5);
      } else if (masked_) {
        run_masked_piece();
      } else {
        run_scores_piece<false>();
      }
      if (++piece_ < kPieces) return;
    }
    piece_ = 0;
    if (++unit_of_group_ < kUnitsPerGroup) return;
    unit_of_group_ = 0;
    --ready_;
    if (++row_tile_ < row_tiles_) return;
    row_tile_ = 0;
    ++group_;
  }

  // Out of line: few blocks are masked, and the loops that run pieces are long as they are.
  [[gnu::noinline]] void run_masked_piece() { run_scores_piece<true>(); }

  template <bool kMasked>
  [[gnu::always_inline]] void run_scores_piece() {
    if (piece_ == 0) {
      check_reference<kMasked>();
    } else {
      compute_weights<kMasked>(piece_ - 1);
    }
  }

  // Scores of the unit: [token][row], not yet scaled.
  [[gnu::always_inline]] const float* unit_scores() const {
    return scores(group_, row_tile_) + unit_of_group_ * Shape::kUnitTokens * kTileFloats;
  }

  // Rows that see a token of the unit.
  [[gnu::always_inline]] __mmask16 seeing(std::int32_t token) const {
    const __m512i visible = _mm512_load_si512(scratch_.visible + row_tile_ * kTileRows);
    const std::int32_t index = begin_ + unit() * Shape::kUnitTokens + token;
    return _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(index));
  }

  template <bool kMasked>
  [[gnu::always_inline]] void check_reference() {
    const float* scores = unit_scores();
    // Two chains, so that the latency of the maximum is half hidden.
    __m512 largest[2] = {_mm512_set1_ps(-std::numeric_limits<float>::infinity()),
                         _mm512_set1_ps(-std::numeric_limits<float>::infinity())};
    for (std::int32_t token = 0; token < Shape::kUnitTokens; ++token) {
      __m512& chain = largest[token % 2];
      if constexpr (kMasked) {
        chain = _mm512_mask_max_ps(chain, seeing(token), chain,
                                   _mm512_load_ps(scores + token * kTileFloats));
      } else {
        chain = _mm512_max_ps(chain, _mm512_load_ps(scores + token * kTileFloats));
      }
    }
    const __m512 exponent =
        _mm512_mul_ps(_mm512_max_ps(largest[0], largest[1]), _mm512_set1_ps(scale_));
    const __m512 reference = _mm512_load_ps(scratch_.references + row_tile_ * kTileRows);
    const __mmask16 raised =
        _mm512_cmp_ps_mask(exponent, _mm512_add_ps(reference, _mm512_set1_ps(kRaise)), _CMP_GT_OQ);
    if (__builtin_expect(raised != 0, 0)) raise(raised, exponent);
  }

  // Lifts m of the rows in `raised` to `exponent`, and what was weighed under the old m with it.
  [[gnu::noinline]] void raise(__mmask16 raised, __m512 exponent) {
    float* references = scratch_.references + row_tile_ * kTileRows;
    const __m512 before = _mm512_load_ps(references);
    const __m512 after = _mm512_mask_mov_ps(before, raised, exponent);
    _mm512_store_ps(references, after);
    // 2^(before - after): 0 for a row that had seen nothing.
    const __m512 factors =
        _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), raised, exp2_f32x16(_mm512_sub_ps(before, after)));
    for (float* sums : {scratch_.totals, scratch_.block_totals}) {
      float* of_tile = sums + row_tile_ * kTileRows;
      _mm512_store_ps(of_tile, _mm512_mul_ps(_mm512_load_ps(of_tile), factors));
    }
    alignas(64) float factor_of_row[kTileRows];
    _mm512_store_ps(factor_of_row, factors);
    for (std::int32_t row = 0; row < kTileRows; ++row) {
      if ((raised >> row & 1) != 0) rescale_row(row, _mm512_set1_ps(factor_of_row[row]));
    }
  }

  void rescale_row(std::int32_t row, __m512 factor) {
    // Weights of this block's earlier units.
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (std::byte* tile = weights(0); tile < weights(unit()); tile += kTileBytes) {
      void* elements = tile + row * kTileRowBytes;
      const __m512i pairs = _mm512_load_si512(elements);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half));
      _mm512_store_si512(elements,
                         to_bf16_pairs(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor)));
    }
    if (first_) return;
    const std::int32_t column_tiles = head_dim_v_ / kTileFloats;
    float* output =
        scratch_.outputs + std::int64_t{row_tile_} * kTileRows * head_dim_v_ + row * kTileFloats;
    for (std::int32_t tile = 0; tile < column_tiles; ++tile, output += kTileRows * kTileFloats) {
      _mm512_store_ps(output, _mm512_mul_ps(_mm512_load_ps(output), factor));
    }
  }

  // P of a quarter of the unit's tokens, rounded and half transposed: four vectors with a lane a
  // row and one 32-bit element a pair of tokens (FewRows: a token) become four with four such
  // elements of a row in each 128-bit lane.
  template <bool kMasked>
  [[gnu::always_inline]] void compute_weights(std::int32_t quarter) {
    const float* scores = unit_scores();
    constexpr std::int32_t kTokens = Shape::kUnitTokens / 4;
    const __m512 scale = _mm512_set1_ps(scale_);
    const __m512 reference = _mm512_load_ps(scratch_.references + row_tile_ * kTileRows);
    __m512 p[kTokens];
    for (std::int32_t i = 0; i < kTokens; ++i) {
      const std::int32_t token = quarter * kTokens + i;
      p[i] = exp2_f32x16(
          _mm512_fmsub_ps(_mm512_load_ps(scores + token * kTileFloats), scale, reference));
      if constexpr (kMasked) p[i] = _mm512_maskz_mov_ps(seeing(token), p[i]);
    }
    __m512i r[4];
    __m512 sum[4];
    for (std::int32_t i = 0; i < 4; ++i) {
      if constexpr (kTokens == 8) {
        r[i] = to_bf16_pairs(p[2 * i], p[2 * i + 1]);
        sum[i] = _mm512_add_ps(p[2 * i], p[2 * i + 1]);
      } else {
        r[i] = to_bf16_low(p[i]);
        sum[i] = p[i];
      }
    }
    transpose_4x4_in_lanes(r);
    for (std::int32_t i = 0; i < 4; ++i) {
      _mm512_store_si512(scratch_.transposed + (i * 4 + quarter) * kTileFloats, r[i]);
    }
    const __m512 quarter_sum =
        _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    float* totals = scratch_.block_totals + row_tile_ * kTileRows;
    _mm512_store_ps(totals, _mm512_add_ps(_mm512_load_ps(totals), quarter_sum));
  }

  // The other half of the transpose: rows `offset`, offset + 4, offset + 8, offset + 12 of the P
  // tile.
  [[gnu::always_inline]] void store_weights(std::int32_t offset) {
    __m512i r[4];
    for (std::int32_t i = 0; i < 4; ++i) {
      r[i] = _mm512_load_si512(scratch_.transposed + (offset * 4 + i) * kTileFloats);
    }
    transpose_4x4_of_lanes(r);
    std::byte* rows = weights(unit()) + offset * kTileRowBytes;
    for (std::int32_t i = 0; i < 4; ++i) {
      std::byte* row = rows + i * 4 * kTileRowBytes;
      _mm512_store_si512(row, r[i]);
      if constexpr (!Shape::kInterleavedValues) {
        _mm512_store_si512(row + kTileBytes, _mm512_slli_epi32(r[i], 16));
      }
    }
  }

  const Scratch<Shape>& scratch_;
  const std::int32_t head_dim_v_;
  const std::int32_t row_tiles_;
  const float scale_;  // |softmax_scale| in units of log2

  std::int32_t begin_ = 0;
  bool masked_ = false;
  bool first_ = true;
  std::int32_t units_ = 0;
  std::int32_t ready_ = 0;  // row tiles of a group with scores but not yet all their weights
  std::int32_t group_ = 0;
  std::int32_t row_tile_ = 0;
  std::int32_t unit_of_group_ = 0;
  std::int32_t piece_ = 0;
  std::int32_t budget_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
