// The AMX decode kernel for bf16. See docs/performance/cpu.md for what decided its loops.
//
// For each block of tokens:
//   load        where its tokens lie; copies of the 16-token tiles that cross a page or the end
//   scores      S^T = K Q^T: the cache is read in place as the A operand
//   softmax     P = 2^(S - m), rounded to bf16 and transposed, between the products of the scores
//   accumulate  O += P V
// and after the last one:
//   finish      out = O / sum, lse
// The lines of the next block are asked for all along.
//
// AMX takes bf16 subnormals for zero, and flushes float ones.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "backends/cpu/amx/interleave.hpp"
#include "backends/cpu/amx/layout.hpp"
#include "backends/cpu/amx/prefetch.hpp"
#include "backends/cpu/amx/products.hpp"
#include "backends/cpu/amx/softmax.hpp"
#include "backends/cpu/amx/tile.hpp"
#include "backends/cpu/amx/vector.hpp"
#include "backends/cpu/kernels.hpp"
#include "backends/cpu/query_row.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu {
namespace amx {
namespace {

constexpr std::int32_t divide_up(std::int32_t a, std::int32_t b) {
  return (a + b - 1) / b;
}

template <class Shape>
class Decode {
 public:
  static void run(const Problem& problem, const Task& task, std::byte* memory) {
    Decode decode(problem, task, memory);
    decode.load_queries();
    for (std::int32_t begin = 0; begin < decode.end_; begin += Shape::kBlockTokens) {
      decode.load_block(begin);
      decode.scores();
      decode.accumulate();
    }
    decode.finish();
  }

 private:
  static constexpr std::int32_t kBlockTiles = Shape::kBlockTokens / kTileRows;
  static constexpr std::int32_t kGroupTiles = Shape::kGroupTokens / kTileRows;
  static constexpr std::int32_t kBlockUnits = Shape::kBlockTokens / Shape::kUnitTokens;

  Decode(const Problem& problem, const Task& task, std::byte* memory)
      : problem_(problem),
        task_(task),
        scratch_(problem, memory),
        rows_(task.query_row_end - task.query_row_begin),
        row_tiles_(divide_up(rows_, kTileRows)),
        dot_steps_(problem.head_dim / kTileElements),
        results_(scratch_.sink),
        softmax_(scratch_, problem, row_tiles_),
        interleave_(scratch_.values, problem.head_dim_v) {
    for (std::int32_t row = 0; row < row_tiles_ * kTileRows; ++row) {
      const std::int32_t token = query(std::min(row, rows_ - 1)).token;
      scratch_.visible[row] = std::clamp(problem.visible_tokens(task.row, token) - task.token_begin,
                                         0, task.token_end - task.token_begin);
    }
    // Visible counts do not decrease with the row.
    least_visible_ = scratch_.visible[0];
    end_ = scratch_.visible[rows_ - 1];
    std::memset(scratch_.zero_row, 0, static_cast<std::size_t>(problem.head_dim) * 2);
  }

  QueryRow query(std::int32_t row) const {
    return query_row(problem_, task_.kv_head, task_.query_row_begin + row);
  }

  // --- load -------------------------------------------------------------------------------------

  // Q to B tiles: a 16 x 16 transpose of pairs of dims for each 32 dims. Rows past the last are
  // zero. A negative scale goes into the sign of Q, so that softmax may take the largest score for
  // the largest exponent.
  void load_queries() {
    const bool negate = problem_.softmax_scale < 0.0f;
    const __m512i signs = _mm512_set1_epi16(static_cast<short>(negate ? 0x8000 : 0));
    for (std::int32_t row_tile = 0; row_tile < row_tiles_; ++row_tile) {
      const BFloat16* rows[kTileRows];
      for (std::int32_t r = 0; r < kTileRows; ++r) {
        const std::int32_t row = row_tile * kTileRows + r;
        rows[r] = row < rows_ ? q_of<BFloat16>(problem_, task_.row, query(row))
                              : reinterpret_cast<const BFloat16*>(scratch_.zero_row);
      }
      for (std::int32_t step = 0; step < dot_steps_; ++step) {
        __m512i of_lane[4][4];  // [r / 4][r % 4], then [row / 4][pair % 4] with lane = pair / 4
        for (std::int32_t group = 0; group < 4; ++group) {
          for (std::int32_t r = 0; r < 4; ++r) {
            of_lane[group][r] = _mm512_xor_si512(
                signs, _mm512_loadu_si512(rows[group * 4 + r] + step * kTileElements));
          }
          transpose_4x4_in_lanes(of_lane[group]);
        }
        std::byte* tile = query_tile(row_tile, step);
        for (std::int32_t pair = 0; pair < 4; ++pair) {
          __m512i pairs[4] = {of_lane[0][pair], of_lane[1][pair], of_lane[2][pair],
                              of_lane[3][pair]};
          transpose_4x4_of_lanes(pairs);
          for (std::int32_t lane = 0; lane < 4; ++lane) {
            _mm512_store_si512(tile + (lane * 4 + pair) * kTileRowBytes, pairs[lane]);
          }
        }
      }
    }
  }

  std::byte* query_tile(std::int32_t row_tile, std::int32_t step) const {
    return scratch_.queries + (std::int64_t{row_tile} * dot_steps_ + step) * kTileBytes;
  }

  // Finds the block that begins at token `begin`.
  void load_block(std::int32_t begin) {
    begin_ = begin;
    count_ = std::min(Shape::kBlockTokens, end_ - begin);
    for (std::int32_t tile = 0; tile < divide_up(count_, kTileRows); ++tile) {
      keys_[tile] = locate_tile(tile);
    }
    const TileView nothing{scratch_.zero_row, 0};
    std::fill(keys_ + divide_up(count_, kTileRows), keys_ + kBlockTiles, nothing);

    const std::int32_t units_end =
        begin + divide_up(count_, Shape::kUnitTokens) * Shape::kUnitTokens;
    softmax_.begin_block(begin, count_, units_end > least_visible_, begin == 0);
    if constexpr (Shape::kInterleavedValues) interleave_.begin_block(keys_);

    const std::int32_t next = std::min(end_, begin + Shape::kBlockTokens);
    const std::int32_t next_end = std::min(end_, next + Shape::kBlockTokens);
    prefetch_ = BlockPrefetch(problem_, task_.row, task_.kv_head, task_.token_begin + next,
                              task_.token_begin + next_end, steps_of_block());
  }

  // Steps of products in a block of this size, over which the next block's lines are spread.
  std::int32_t steps_of_block() const {
    const std::int32_t score_blocks =
        divide_up(count_, Shape::kGroupTokens) * divide_up(row_tiles_, Shape::kGroupRowTiles);
    return score_blocks * dot_steps_ + divide_up(count_, Shape::kUnitTokens) * value_blocks();
  }

  // The 16 tokens of a tile, in place where they lie in one page; else a copy in which tokens past
  // the end are zero.
  TileView locate_tile(std::int32_t tile) {
    const std::int32_t first = begin_ + tile * kTileRows;
    const std::int32_t token = task_.token_begin + first;
    if (token % problem_.page_size + kTileRows <= problem_.page_size && first + kTileRows <= end_) {
      return {reinterpret_cast<const std::byte*>(
                  cached_token<BFloat16>(problem_, task_.row, task_.kv_head, token)),
              problem_.k_token_stride * 2};
    }
    const std::int64_t token_bytes = std::int64_t{problem_.head_dim} * 2;
    std::byte* copy = scratch_.gathered + tile * kTileRows * token_bytes;
    for (std::int32_t i = 0; i < kTileRows; ++i) {
      const void* source = first + i < end_ ? static_cast<const void*>(cached_token<BFloat16>(
                                                  problem_, task_.row, task_.kv_head, token + i))
                                            : scratch_.zero_row;
      std::memcpy(copy + i * token_bytes, source, static_cast<std::size_t>(token_bytes));
    }
    return {copy, token_bytes};
  }

  // --- scores and softmax -----------------------------------------------------------------------

  void scores() {
    const std::int32_t groups = divide_up(count_, Shape::kGroupTokens);
    for (std::int32_t group = 0; group < groups; ++group) {
      if constexpr (Shape::kInterleavedValues) interleave_.set_ready(group + 1);
      for (std::int32_t row_tile = 0; row_tile < row_tiles_; row_tile += Shape::kGroupRowTiles) {
        softmax_.make_room(group, row_tile);
        score_block(group, row_tile);
      }
    }
    flush_scores();
    softmax_.finish_block();
    if constexpr (Shape::kInterleavedValues) interleave_.finish_block();
  }

  // Scores of a group of tokens and of the row tiles from `row_tile` on.
  void score_block(std::int32_t group, std::int32_t row_tile) {
    const std::int32_t row_tiles = std::min(Shape::kGroupRowTiles, row_tiles_ - row_tile);

    const auto key = [&](std::int32_t step, std::int32_t tile) __attribute__((always_inline)) {
      const TileView& view = keys_[group * kGroupTiles + tile];
      return TileView{view.base + step * kTileRowBytes, view.stride};
    };
    const std::byte* queries = query_tile(row_tile, 0);
    const std::int64_t query_stride = std::int64_t{dot_steps_} * kTileBytes;
    const auto query = [&](std::int32_t step, std::int32_t tile) __attribute__((always_inline)) {
      return TileView{queries + tile * query_stride + step * kTileBytes, kTileRowBytes};
    };
    // Divisions, so not in the loop.
    const std::int32_t softmax_cost = softmax_cost_per_step();
    [[maybe_unused]] const std::int32_t interleave_pieces = interleave_pieces_per_step();
    const auto background = [&](std::int32_t step) __attribute__((always_inline)) {
      if (step == 0) {
        softmax_.add_ready(row_tiles_to_add_);
        row_tiles_to_add_ = 0;
      }
      softmax_.run(softmax_cost);
      if constexpr (Shape::kInterleavedValues) interleave_.run(interleave_pieces);
      prefetch_.step();
    };

    std::byte* first = reinterpret_cast<std::byte*>(softmax_.scores(group, row_tile));
    if constexpr (Shape::kGroupRowTiles == 1) {
      results_.begin({first, first + kTileBytes, first + 2 * kTileBytes, first + 3 * kTileBytes},
                     false);
      multiply_4x1(
          results_, dot_steps_,
          key, [&](std::int32_t step) __attribute__((always_inline)) { return query(step, 0); },
          background);
    } else if (row_tiles == 2) {
      std::byte* second = first + kGroupTiles * kTileBytes;
      results_.begin({first, second, first + kTileBytes, second + kTileBytes}, false);
      multiply_2x2(results_, dot_steps_, key, query, background);
    } else {
      results_.begin({first, first + kTileBytes, scratch_.sink, scratch_.sink}, false);
      multiply_pair<2, 1>(results_, dot_steps_, key, query, background);
    }
    // Ready for softmax once stored, which the next block of products does.
    row_tiles_to_add_ += row_tiles;
  }

  void flush_scores() {
    results_.flush(scratch_.sink);
    softmax_.add_ready(row_tiles_to_add_);
    row_tiles_to_add_ = 0;
  }

  // At these rates softmax and interleave keep up with the products that feed them.
  std::int32_t softmax_cost_per_step() const {
    return divide_up(SoftmaxQueue<Shape>::kUnitsPerGroup * SoftmaxQueue<Shape>::kUnitCost *
                         Shape::kGroupRowTiles,
                     dot_steps_);
  }
  std::int32_t interleave_pieces_per_step() const {
    return divide_up(ValueInterleave::pieces_per_unit(problem_.head_dim_v),
                     dot_steps_ * divide_up(row_tiles_, Shape::kGroupRowTiles));
  }

  // --- accumulate -------------------------------------------------------------------------------

  void accumulate() {
    if (has_hidden_non_finite()) {
      accumulate_apart();
    } else {
      accumulate_values(Shape::kInterleavedValues ? nullptr : keys_);
    }
  }

  // Blocks of products of accumulate_values().
  std::int32_t value_blocks() const {
    if constexpr (Shape::kInterleavedValues) {
      return problem_.head_dim_v / kTileElements * divide_up(row_tiles_, 2);
    } else {
      return problem_.head_dim_v / (2 * kTileElements) * row_tiles_;
    }
  }

  // O += P V for all rows. ManyRows reads `scratch_.values`, FewRows the tiles given.
  void accumulate_values(const TileView* values) {
    for (std::int32_t row_tile = 0; row_tile < row_tiles_; row_tile += Shape::kGroupRowTiles) {
      if constexpr (Shape::kInterleavedValues) {
        for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
          value_block_interleaved(row_tile, column);
        }
      } else {
        for (std::int32_t column = 0; column < problem_.head_dim_v; column += 2 * kTileElements) {
          value_block_in_place(row_tile, column, values);
        }
      }
    }
    results_.flush(scratch_.sink);
  }

  std::byte* output_tile(std::int32_t row_tile, std::int32_t column) const {
    return reinterpret_cast<std::byte*>(scratch_.outputs) +
           (std::int64_t{row_tile} * (problem_.head_dim_v / kTileFloats) + column / kTileFloats) *
               kTileBytes;
  }
  const std::byte* weight_tiles(std::int32_t row_tile) const {
    return scratch_.weights + std::int64_t{row_tile} * kBlockUnits * Shape::kUnitBytes;
  }

  // Two row tiles (or the last one) times 32 columns, 32 tokens a step.
  void value_block_interleaved(std::int32_t row_tile, std::int32_t column) {
    const std::byte* values =
        scratch_.values + std::int64_t{column / kTileElements} * ValueInterleave::kColumnsBytes;
    const std::byte* weights = weight_tiles(row_tile);
    const auto weight = [&](std::int32_t step, std::int32_t i) __attribute__((always_inline)) {
      return TileView{weights + (i * kBlockUnits + step) * kTileBytes, kTileRowBytes};
    };
    const auto value = [&](std::int32_t step, std::int32_t i) __attribute__((always_inline)) {
      return TileView{values + step * ValueInterleave::kUnitBytes + i * kTileBytes, kTileRowBytes};
    };
    const auto background = [&](std::int32_t) __attribute__((always_inline)) {
      prefetch_.step();
    };
    const std::int32_t steps = divide_up(count_, Shape::kUnitTokens);
    std::byte* first = output_tile(row_tile, column);
    if (row_tile + 1 < row_tiles_) {
      std::byte* second = output_tile(row_tile + 1, column);
      results_.begin({first, first + kTileBytes, second, second + kTileBytes}, begin_ != 0);
      multiply_2x2(results_, steps, weight, value, background);
    } else {
      results_.begin({first, first + kTileBytes, scratch_.sink, scratch_.sink}, begin_ != 0);
      multiply_pair<1, 2>(results_, steps, weight, value, background);
    }
  }

  // {p, 0} and {0, p} of a row tile times 64 columns, 16 tokens a step: the even and the odd
  // columns of each 32.
  void value_block_in_place(std::int32_t row_tile, std::int32_t column, const TileView* tokens) {
    const std::byte* weights = weight_tiles(row_tile);
    const auto weight = [&](std::int32_t step, std::int32_t i) __attribute__((always_inline)) {
      return TileView{weights + step * Shape::kUnitBytes + i * kTileBytes, kTileRowBytes};
    };
    const std::int64_t offset = std::int64_t{column} * 2;
    const auto value = [&](std::int32_t step, std::int32_t i) __attribute__((always_inline)) {
      return TileView{tokens[step].base + offset + i * kTileRowBytes, tokens[step].stride};
    };
    const auto background = [&](std::int32_t) __attribute__((always_inline)) {
      prefetch_.step();
    };
    std::byte* first = output_tile(row_tile, column);
    std::byte* second = output_tile(row_tile, column + kTileElements);
    results_.begin({first, second, first + kTileBytes, second + kTileBytes}, begin_ != 0);
    multiply_2x2(results_, divide_up(count_, Shape::kUnitTokens), weight, value, background);
  }

  // A weight of zero hides a token, unless its value is inf or NaN.
  bool has_hidden_non_finite() const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (std::int32_t token = std::max(begin_, least_visible_); token < begin_ + count_; ++token) {
      const std::byte* value = value_of(token);
      for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
        const __m512i bits = _mm512_loadu_si512(value + std::int64_t{column} * 2);
        if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent) != 0) return true;
      }
    }
    return false;
  }
  const std::byte* value_of(std::int32_t token) const {
    const TileView& tile = keys_[(token - begin_) / kTileRows];
    return tile.base + (token - begin_) % kTileRows * tile.stride;
  }

  // As accumulate_values(), once for each visible count, with what that count hides replaced by
  // zeros; of each pass only the rows with that count are kept. What they get is bit for bit what
  // they would get alone.
  void accumulate_apart() {
    for (std::int32_t row = 0; row < rows_;) {
      const std::int32_t visible = scratch_.visible[row];
      std::int32_t row_end = row + 1;
      while (row_end < rows_ && scratch_.visible[row_end] == visible) ++row_end;

      TileView values[kBlockTiles];
      copy_visible_values(visible, values);
      if (begin_ != 0 && row != 0)
        copy_outputs(scratch_.outputs_aside, scratch_.outputs, row, row_end);
      if (begin_ != 0 && row == 0) copy_outputs(scratch_.outputs, scratch_.outputs_aside, 0, rows_);
      accumulate_values(values);
      copy_outputs(scratch_.outputs, scratch_.outputs_aside, row, row_end);
      row = row_end;
    }
    copy_outputs(scratch_.outputs_aside, scratch_.outputs, 0, rows_);
  }

  // Values of the block of which tokens from `visible` on are zero: in `scratch_.values`, as
  // accumulate_values() reads them.
  void copy_visible_values(std::int32_t visible, TileView* values) {
    const std::int64_t stride = std::int64_t{problem_.head_dim} * 2;
    for (std::int32_t tile = 0; tile < kBlockTiles; ++tile) {
      values[tile] = keys_[tile];
      if (begin_ + (tile + 1) * kTileRows <= visible) continue;
      std::byte* copy = scratch_.gathered_values + tile * kTileRows * stride;
      for (std::int32_t i = 0; i < kTileRows; ++i) {
        const std::int32_t token = begin_ + tile * kTileRows + i;
        std::memcpy(copy + i * stride, token < visible ? value_of(token) : scratch_.zero_row,
                    static_cast<std::size_t>(problem_.head_dim_v) * 2);
      }
      values[tile] = {copy, stride};
    }
    if constexpr (Shape::kInterleavedValues) {
      interleave_.begin_block(values);
      interleave_.set_ready(divide_up(count_, Shape::kUnitTokens));
      interleave_.finish_block();
    }
  }

  // Rows [row_begin, row_end) of O.
  void copy_outputs(const float* source, float* target, std::int32_t row_begin,
                    std::int32_t row_end) const {
    const std::int32_t column_tiles = problem_.head_dim_v / kTileFloats;
    for (std::int32_t row = row_begin; row < row_end; ++row) {
      for (std::int32_t tile = 0; tile < column_tiles; ++tile) {
        const std::int64_t offset =
            (std::int64_t{row / kTileRows * column_tiles + tile} * kTileRows + row % kTileRows) *
            kTileFloats;
        _mm512_store_ps(target + offset, _mm512_load_ps(source + offset));
      }
    }
  }

  // --- finish -----------------------------------------------------------------------------------

  void finish() const {
    for (std::int32_t row = 0; row < rows_; ++row) {
      const QueryRow where = query(row);
      const float total = scratch_.totals[row];
      const bool empty = scratch_.visible[row] == 0;
      const float inverse = empty ? 0.0f : 1.0f / total;
      constexpr double kLn2 = 0.69314718055994530942;
      const float lse =
          empty ? std::numeric_limits<float>::infinity()
                : static_cast<float>(static_cast<double>(scratch_.references[row]) * kLn2 +
                                     std::log(static_cast<double>(total)));
      if (task_.partial_out != nullptr) {
        float* out = task_.partial_out + std::int64_t{row} * problem_.head_dim_v;
        for_each_32_columns(row, inverse, [&](std::int32_t column, __m512 low, __m512 high) {
          _mm512_storeu_ps(out + column, low);
          _mm512_storeu_ps(out + column + kTileFloats, high);
        });
        task_.partial_lse[row] = lse;
      } else {
        BFloat16* out = out_of<BFloat16>(problem_, task_.row, where);
        for_each_32_columns(row, inverse, [&](std::int32_t column, __m512 low, __m512 high) {
          _mm512_storeu_si512(out + column, to_bf16x32(low, high));
        });
        lse_of(problem_, task_.row, where) = lse;
      }
    }
  }

  // write(column, O[column..column + 15], O[column + 16..column + 31]) times `factor`, in order.
  // Without a visible token O is taken for zero.
  template <class Write>
  void for_each_32_columns(std::int32_t row, float factor, const Write& write) const {
    // Where columns 0..15 and 16..31 stand in the pair of tiles; 16 and up is the second tile.
    alignas(64) static constexpr std::int32_t kUnpacked[2][kTileFloats] = {
        {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23},
        {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31}};
    alignas(64) static constexpr std::int32_t kEvenOdd[2][kTileFloats] = {
        {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23},
        {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31}};
    const auto& order = Shape::kInterleavedValues ? kUnpacked : kEvenOdd;
    const __m512i low = _mm512_load_si512(order[0]);
    const __m512i high = _mm512_load_si512(order[1]);
    const __m512 factors = _mm512_set1_ps(factor);
    const bool empty = scratch_.visible[row] == 0;
    for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
      const std::byte* tile =
          output_tile(row / kTileRows, column) + row % kTileRows * kTileRowBytes;
      __m512 first = _mm512_setzero_ps();
      __m512 second = _mm512_setzero_ps();
      if (!empty) {
        first = _mm512_mul_ps(factors, _mm512_load_ps(tile));
        second = _mm512_mul_ps(factors, _mm512_load_ps(tile + kTileBytes));
      }
      write(column, _mm512_permutex2var_ps(first, low, second),
            _mm512_permutex2var_ps(first, high, second));
    }
  }

  const TileSession session_;
  const Problem& problem_;
  const Task& task_;
  const Scratch<Shape> scratch_;
  const std::int32_t rows_;
  const std::int32_t row_tiles_;
  const std::int32_t dot_steps_;  // of 32 dims
  // Tokens from the begin of the task: what every row sees, and what some row sees.
  std::int32_t least_visible_ = 0;
  std::int32_t end_ = 0;

  ResultTiles results_;
  SoftmaxQueue<Shape> softmax_;
  ValueInterleave interleave_;
  BlockPrefetch prefetch_;
  std::int32_t row_tiles_to_add_ = 0;  // their last scores are still in the registers

  // The block.
  std::int32_t begin_ = 0;
  std::int32_t count_ = 0;
  TileView keys_[kBlockTiles];  // 16 tokens each
};

std::size_t scratch_bytes(const Problem& problem) {
  return has_few_rows(problem) ? Scratch<FewRows>(problem, nullptr).bytes()
                               : Scratch<ManyRows>(problem, nullptr).bytes();
}

void decode(const Problem& problem, const Task& task, std::byte* scratch) {
  if (has_few_rows(problem)) {
    Decode<FewRows>::run(problem, task, scratch);
  } else {
    Decode<ManyRows>::run(problem, task, scratch);
  }
}

}  // namespace
}  // namespace amx

const DecodeKernel kAmxBf16 = {amx::kMaxQueryRows, amx::scratch_bytes, amx::decode};

}  // namespace flashmla::cpu
