// Scores to weights, in slices small enough to run between two tile products.
//
// A row's reference m is not its running maximum: m stays where it is, whatever the scores, until
// the weights of a unit of tokens add up to more than kLargestSum, which float and bf16 hold
// without loss; only then is it raised, to the largest score of that unit, and the unit weighed
// anew. After a row's first unit that hardly ever happens, so no pass looks for maxima and O is
// hardly ever rescaled. Weights of the same block are rounded once more then, unless they are
// split: m then rises by whole powers of two, which round none.
//
// In a guarded task weights carry a factor of kGuardedWeight and scores are capped at the largest
// float, so that no finite value overflows O and no finite score is lost. All its units take the
// path that is made for units that not every row sees.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/products.hpp"
#include "backends/cpu/amx/tile.hpp"
#include "backends/cpu/amx/vector.hpp"

namespace flashmla::cpu::amx {
namespace {

inline constexpr float kLargestSum = 0x1p30f;
// A unit's weights add up to at most 2^-24 then: 2^24 units may hold the largest value.
inline constexpr float kGuardedWeight = 0x1p-54f;

// The softmax of one block of score tiles at a time, while the next one is computed. A unit is the
// scores of 16 rows that make one tile of P (FewRows: two).
template <class Shape>
class Softmax {
 public:
  static constexpr std::int32_t kUnitsPerGroup = Shape::kGroupTokens / Shape::kUnitTokens;
  // Of a unit: 16 of weights, 8 of their transpose.
  static constexpr std::int32_t kWeightSlices = kTileRows;
  static constexpr std::int32_t kSlices = kWeightSlices + 4 + 4;

  Softmax(const Scratch<Shape>& scratch, const Problem& problem, std::int32_t row_tiles,
          bool guarded)
      : scratch_(scratch),
        head_dim_v_(problem.head_dim_v),
        guarded_(guarded),
        weight_(guarded ? kGuardedWeight : 1.0f),
        largest_sum_(guarded ? kLargestSum * kGuardedWeight : kLargestSum) {
    for (std::int32_t row = 0; row < row_tiles * kTileRows; ++row) {
      scratch_.references[row] = -std::numeric_limits<float>::infinity();
      scratch_.totals[row] = 0.0;
    }
  }

  // Row tiles [row_tile, row_tile_end) have their scores of a group of the block's tokens in
  // Scratch::scores: [row tile][token][row], not yet scaled. Those of an earlier call are finished.
  // Rows see all tokens of the task before `least_visible`. When their softmax runs, O has the
  // values of all blocks before, whatever the row tile: else threads that share the rows of a part
  // would change what is rescaled, and with it bits.
  void begin_scores(const Block<Shape>& block, std::int32_t group, std::int32_t row_tile,
                    std::int32_t row_tile_end, std::int32_t least_visible) {
    begin_ = block.begin;
    plain_units_ = guarded_ ? 0 : (least_visible - block.begin) / Shape::kUnitTokens;
    weights_ = block.weights;
    scores_ = scratch_.scores;
    row_tile_ = row_tile;
    row_tile_end_ = row_tile_end;
    first_unit_ = unit_ = group * kUnitsPerGroup;
    // Units past the last token have scores, of zeros, but no weights.
    unit_end_ = std::min(unit_ + kUnitsPerGroup,
                         (block.count + Shape::kUnitTokens - 1) / Shape::kUnitTokens);
  }

  // Whether there is a unit left of which every row sees all, unless guarded. If so it may be done
  // slice by slice: begin_unit(), run_slice<0>() to run_slice<kSlices - 1>(), next_unit().
  [[gnu::always_inline]] bool has_plain_unit() const {
    return row_tile_ < row_tile_end_ && unit_ < plain_units_;
  }

  // A unit on its way, in registers where the slices of one are unrolled.
  struct Unit {
    const float* scores;  // [token][row], not yet scaled
    std::byte* weights;
    __m512 scale;
    __m512 reference;
    __m512 sum;
    // P: an element of 32 bits for each row, [slice][row], and then its transpose in two steps.
    __m512i elements[kWeightSlices];
  };

  [[gnu::always_inline]] void begin_unit(Unit& unit) const {
    unit.scores = scores_;
    unit.weights = weights(unit_);
    unit.scale = _mm512_load_ps(scratch_.scales + row_tile_ * kTileRows);
    unit.reference = _mm512_load_ps(scratch_.references + row_tile_ * kTileRows);
    unit.sum = _mm512_setzero_ps();
  }

  template <std::int32_t kSlice, bool kMasked = false>
  [[gnu::always_inline]] void run_slice(Unit& unit) {
    constexpr std::int32_t kTransposeSlice = kSlice - kWeightSlices;
    if constexpr (kTransposeSlice < 0) {
      compute_weights<kSlice, kMasked>(unit);
    } else if constexpr (kTransposeSlice < 4) {
      if constexpr (kTransposeSlice == 0) settle(unit);
      transpose_in_lanes<kTransposeSlice>(unit);
    } else {
      transpose_lanes<kTransposeSlice - 4>(unit);
    }
  }

  [[gnu::always_inline]] void next_unit() {
    scores_ += kUnitFloats;
    if (++unit_ < unit_end_) return;
    scores_ += (first_unit_ + kUnitsPerGroup - unit_end_) * kUnitFloats;
    unit_ = first_unit_;
    ++row_tile_;
  }

  // The units that are left.
  void finish_scores() {
    while (row_tile_ < row_tile_end_) {
      if (has_plain_unit()) {
        run_unit<false>();
      } else {
        run_unit<true>();
      }
      next_unit();
    }
  }

 private:
  static constexpr std::int32_t kBlockUnits = Shape::kBlockTokens / Shape::kUnitTokens;
  // A weight slice makes one element of P for each row: a pair of tokens, or one token.
  static constexpr std::int32_t kSliceTokens = Shape::kUnitTokens / kWeightSlices;
  static constexpr std::int32_t kUnitFloats = Shape::kUnitTokens * kTileFloats;

  std::byte* weights(std::int32_t unit) const {
    return weights_ + std::int64_t{row_tile_ * kBlockUnits + unit} * Shape::kUnitBytes;
  }

  template <bool kMasked>
  [[gnu::noinline]] void run_unit() {
    if constexpr (kMasked) {
      if (guarded_) cap_scores();
    }
    Unit unit;
    begin_unit(unit);
    for_each_constant<kSlices>([&](auto slice) __attribute__((always_inline)) {
      run_slice<slice, kMasked>(unit);
    });
  }

  // Scales the scores of the unit, to within the range of float; NaN stays NaN.
  void cap_scores() const {
    const __m512 largest = _mm512_set1_ps(std::numeric_limits<float>::max());
    const __m512 least = _mm512_set1_ps(std::numeric_limits<float>::lowest());
    const __m512 first = _mm512_load_ps(scratch_.guarded_scales[0] + row_tile_ * kTileRows);
    const __m512 second = _mm512_load_ps(scratch_.guarded_scales[1] + row_tile_ * kTileRows);
    for (std::int32_t token = 0; token < Shape::kUnitTokens; ++token) {
      float* scores = scores_ + token * kTileFloats;
      const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(scores), first), second);
      _mm512_store_ps(scores, _mm512_max_ps(least, _mm512_min_ps(largest, scaled)));
    }
  }

  // Rows that see a token of the unit.
  [[gnu::always_inline]] __mmask16 seeing(std::int32_t token) const {
    const __m512i visible = _mm512_load_si512(scratch_.visible + row_tile_ * kTileRows);
    const std::int32_t index = begin_ + unit_ * Shape::kUnitTokens + token;
    return _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(index));
  }

  template <std::int32_t kSlice, bool kMasked>
  [[gnu::always_inline]] void compute_weights(Unit& unit) const {
    __m512 p[kSliceTokens];
    for (std::int32_t i = 0; i < kSliceTokens; ++i) {
      const std::int32_t token = kSlice * kSliceTokens + i;
      p[i] = exp2_f32x16(_mm512_fmsub_ps(_mm512_load_ps(unit.scores + token * kTileFloats),
                                         unit.scale, unit.reference));
      if constexpr (kMasked) {
        p[i] = _mm512_maskz_mul_ps(seeing(token), p[i], _mm512_set1_ps(weight_));
      }
      unit.sum = _mm512_add_ps(unit.sum, p[i]);
    }
    if constexpr (kSliceTokens == 2) {
      unit.elements[kSlice] = to_bf16_pairs(p[0], p[1]);
    } else {
      if constexpr (Shape::kSplitsWeights) {
        const __m512i rounded = _mm512_slli_epi32(to_bf16_low(p[0]), 16);
        p[0] = _mm512_mask_sub_ps(p[0], 0xff00, p[0], _mm512_castsi512_ps(rounded));
      }
      unit.elements[kSlice] = to_bf16_low(p[0]);
    }
  }

  // All weights of the unit are there.
  [[gnu::always_inline]] void settle(Unit& unit) {
    // NaN counts as too large, which costs time and changes nothing.
    const __mmask16 raised =
        _mm512_cmp_ps_mask(unit.sum, _mm512_set1_ps(largest_sum_), _CMP_NLE_UQ);
    if (__builtin_expect(raised != 0, 0)) {
      raise(raised);
      for (std::int32_t i = 0; i < kWeightSlices; ++i) {
        unit.elements[i] = _mm512_load_si512(scratch_.elements + i * kTileFloats);
      }
      unit.sum = _mm512_load_ps(scratch_.unit_totals);
    }
    double* totals = scratch_.totals + row_tile_ * kTileRows;
    const __m256 low = _mm512_castps512_ps256(unit.sum);
    const __m256 high = _mm512_extractf32x8_ps(unit.sum, 1);
    _mm512_store_pd(totals, _mm512_add_pd(_mm512_load_pd(totals), _mm512_cvtps_pd(low)));
    _mm512_store_pd(totals + 8, _mm512_add_pd(_mm512_load_pd(totals + 8), _mm512_cvtps_pd(high)));
  }

  // Lifts m of the rows in `raised` to the largest score of the unit, see target(), and what
  // was weighed under the old m with it, and weighs the unit anew, into Scratch::elements and
  // unit_totals.
  [[gnu::noinline]] void raise(__mmask16 raised) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (std::int32_t token = 0; token < Shape::kUnitTokens; ++token) {
      largest = _mm512_mask_max_ps(largest, seeing(token), largest,
                                   _mm512_load_ps(scores_ + token * kTileFloats));
    }
    const __m512 exponent =
        _mm512_mul_ps(largest, _mm512_load_ps(scratch_.scales + row_tile_ * kTileRows));
    float* references = scratch_.references + row_tile_ * kTileRows;
    const __m512 before = _mm512_load_ps(references);
    const __m512 after = _mm512_mask_max_ps(before, raised, before, target(before, exponent));
    _mm512_store_ps(references, after);
    // 2^(before - after): 0 for a row that had seen nothing.
    const __m512 factors =
        _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), raised, exp2_f32x16(_mm512_sub_ps(before, after)));
    alignas(64) float factor_of_row[kTileRows];
    _mm512_store_ps(factor_of_row, factors);
    for (std::int32_t row = 0; row < kTileRows; ++row) {
      if ((raised >> row & 1) != 0) rescale_row(row, factor_of_row[row]);
    }
    Unit unit;
    begin_unit(unit);
    for_each_constant<kWeightSlices>([&](auto slice) __attribute__((always_inline)) {
      compute_weights<slice, true>(unit);
      _mm512_store_si512(scratch_.elements + slice * kTileFloats, unit.elements[slice]);
    });
    _mm512_store_ps(scratch_.unit_totals, unit.sum);
  }

  // Where m rises to from `before` for a largest score of `exponent`. That weighs 1 then, which
  // bf16 holds; of split weights, which need not be that, at least a half, unless what was weighed
  // before is hardly anything any more.
  static __m512 target(__m512 before, __m512 exponent) {
    if constexpr (!Shape::kSplitsWeights) return exponent;
    constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
    // A unit that weighed 2^30 weighs 2^-34 then.
    const __m512 most = _mm512_set1_ps(64.0f);
    const __m512 rise = _mm512_roundscale_ps(_mm512_sub_ps(exponent, before), kUp);
    const __mmask16 counts = _mm512_cmp_ps_mask(rise, most, _CMP_LE_OQ);
    return _mm512_mask_add_ps(exponent, counts, before, rise);
  }

  // row: of the row tile.
  void rescale_row(std::int32_t row, float factor) {
    scratch_.totals[row_tile_ * kTileRows + row] *= static_cast<double>(factor);
    rescale_weights(weights(0), weights(unit_), row, _mm512_set1_ps(factor));
    if (begin_ == 0) return;
    const std::int32_t column_tiles = head_dim_v_ / kTileFloats;
    float* output =
        scratch_.outputs + std::int64_t{row_tile_} * kTileRows * head_dim_v_ + row * kTileFloats;
    for (std::int32_t tile = 0; tile < column_tiles; ++tile, output += kTileRows * kTileFloats) {
      _mm512_store_ps(output, _mm512_mul_ps(_mm512_load_ps(output), _mm512_set1_ps(factor)));
    }
  }

  static void rescale_weights(std::byte* begin, std::byte* end, std::int32_t row, __m512 factor) {
    const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (std::byte* tile = begin; tile < end; tile += kTileBytes) {
      void* elements = tile + row * kTileRowBytes;
      const __m512i pairs = _mm512_load_si512(elements);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high_half));
      _mm512_store_si512(elements,
                         to_bf16_pairs(_mm512_mul_ps(even, factor), _mm512_mul_ps(odd, factor)));
    }
  }

  // The transpose of the elements. First, of four slices, the four elements of a row come together
  // in a 128-bit lane.
  template <std::int32_t kQuarter>
  [[gnu::always_inline]] static void transpose_in_lanes(Unit& unit) {
    __m512i* e = unit.elements + kQuarter * 4;
    __m512i r[4] = {e[0], e[1], e[2], e[3]};
    transpose_4x4_in_lanes(r);
    for (std::int32_t i = 0; i < 4; ++i) e[i] = r[i];
  }

  // Then the lanes of rows kOffset, kOffset + 4, kOffset + 8 and kOffset + 12, which are rows of
  // the P tile.
  template <std::int32_t kOffset>
  [[gnu::always_inline]] static void transpose_lanes(Unit& unit) {
    const __m512i* e = unit.elements + kOffset;
    __m512i r[4] = {e[0], e[4], e[8], e[12]};
    transpose_4x4_of_lanes(r);
    for (std::int32_t i = 0; i < 4; ++i) {
      std::byte* row = unit.weights + (i * 4 + kOffset) * kTileRowBytes;
      _mm512_store_si512(row, r[i]);
      if constexpr (!Shape::kInterleavedValues) {
        _mm512_store_si512(row + kTileBytes, _mm512_slli_epi32(r[i], 16));
      }
    }
  }

  const Scratch<Shape>& scratch_;
  const std::int32_t head_dim_v_;
  const bool guarded_;
  const float weight_;       // of a score of m
  const float largest_sum_;  // of the weights of a unit

  // The block of the scores.
  std::int32_t begin_ = 0;
  std::int32_t plain_units_ = 0;  // of which every row sees all
  std::byte* weights_ = nullptr;
  // What is left of the scores: of row tile `row_tile_` from `unit_` on, and the row tiles after
  // it.
  float* scores_ = nullptr;  // of the unit
  std::int32_t row_tile_ = 0;
  std::int32_t row_tile_end_ = 0;
  std::int32_t first_unit_ = 0;
  std::int32_t unit_ = 0;
  std::int32_t unit_end_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
