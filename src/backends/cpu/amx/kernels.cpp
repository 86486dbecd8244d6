// The AMX decode kernel for bf16. See docs/performance/cpu.md for what decided its loops.
//
// For each block of tokens:
//   load        where its tokens lie; copies of the 16-token tiles that cross a page or the end
//   scores      S^T = K Q^T: the cache is read in place as the A operand
//   softmax     P = 2^(S - m), rounded to bf16 and transposed, between the products of the scores
//   accumulate  O += P V
// where more tokens follow kChainTokens of them:
//   end_chain   what O holds joins the sum of the chains before it, and O begins at 0 again
// and after the last one:
//   finish      out = O / sum, lse
// The lines of the next block are asked for all along.
//
// No finite input gives an infinity or a NaN. Queries are taken times a power of two that leaves
// room for head_dim products with the largest value there is, which the scale of their scores takes
// back. What overflows all the same, capped scores and sums of the largest values, leaves an
// infinity or a NaN in the row's results, and scores too large to be told from their reference
// leave that: the task is then decoded anew, guarded, for such rows. So ordinary inputs pay for a
// look at queries and results alone, and a row's bits depend on no other row.
//
// AMX takes bf16 subnormals for zero, and flushes float ones.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
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

// A set of the rows of a task.
struct RowSet {
  void add(std::int32_t row) { words[row / 64] |= std::uint64_t{1} << row % 64; }
  bool has(std::int32_t row) const { return (words[row / 64] >> row % 64 & 1) != 0; }
  bool empty() const {
    return std::all_of(std::begin(words), std::end(words), [](std::uint64_t w) { return w == 0; });
  }

  static_assert(kMaxQueryRows % 64 == 0);
  std::uint64_t words[kMaxQueryRows / 64] = {};
};

template <class Shape>
class Decode {
 public:
  static void run(const Problem& problem, const Task& task, std::byte* memory) {
    RowSet all;
    std::fill(std::begin(all.words), std::end(all.words), ~std::uint64_t{0});
    const RowSet overflown = run_rows(problem, task, memory, all, false);
    if (!overflown.empty()) run_rows(problem, task, memory, overflown, true);
  }

 private:
  // Decodes the task and writes the results of `wanted` rows. Returns those that are to be guarded.
  [[gnu::noinline]] static RowSet run_rows(const Problem& problem, const Task& task,
                                           std::byte* memory, const RowSet& wanted, bool guarded) {
    Decode decode(problem, task, memory, wanted, guarded);
    decode.load_queries();
    if constexpr (Shape::kBlocksInFlight == 2) {
      decode.run_blocks_overlapped();
    } else {
      for (std::int32_t begin = 0; begin < decode.end_; begin += Shape::kBlockTokens) {
        decode.load_block(decode.blocks_[0], begin);
        decode.scores(decode.blocks_[0]);
        decode.finish_scores();
        decode.accumulate(decode.blocks_[0]);
      }
    }
    decode.finish();
    return decode.overflown_;
  }

  // Tokens are counted in int32, past the last block and the one after it too.
  static_assert(kMaxRowTokens <=
                std::numeric_limits<std::int32_t>::max() - 2 * Shape::kBlockTokens);
  static_assert(kChainTokens % Shape::kBlockTokens == 0);
  static constexpr std::int32_t kBlockTiles = Shape::kBlockTokens / kTileRows;
  static constexpr std::int32_t kGroupTiles = Shape::kGroupTokens / kTileRows;
  static constexpr std::int32_t kBlockUnits = Shape::kBlockTokens / Shape::kUnitTokens;

  // Queries are taken below 2^(1 - kQueryMargin): head_dim products with values below 2^128 then
  // sum to less than 2^127.
  static constexpr std::int32_t kQueryMargin = 12;
  // A reference is rounded, what weights subtract it from is not. Below this one the weight of the
  // largest score is between a quarter and 4; far past it that may be nothing at all. In a guarded
  // task both are rounded alike.
  static constexpr float kLargestReference = 0x1p26f;

  Decode(const Problem& problem, const Task& task, std::byte* memory, const RowSet& wanted,
         bool guarded)
      : problem_(problem),
        task_(task),
        wanted_(wanted),
        guarded_(guarded),
        scratch_(areas(problem, task, memory, guarded)),
        rows_(task.query_row_end - task.query_row_begin),
        row_tiles_(divide_up(rows_, kTileRows)),
        dot_steps_(problem.head_dim / kTileElements),
        results_(scratch_.sink),
        softmax_(scratch_, problem, row_tiles_, guarded),
        interleave_(scratch_.panel) {
    for (std::int32_t row = 0; row < row_tiles_ * kTileRows; ++row) {
      const std::int32_t token = query(std::min(source_row(row), rows_ - 1)).token;
      scratch_.visible[row] = std::clamp(problem.visible_tokens(task.row, token) - task.token_begin,
                                         0, task.token_end - task.token_begin);
    }
    // Visible counts do not decrease with the row.
    least_visible_ = scratch_.visible[0];
    end_ = scratch_.visible[rows_ - 1];
    for (std::int32_t i = 0; i < Shape::kBlocksInFlight; ++i) {
      blocks_[i].weights = scratch_.weights[i];
      blocks_[i].gathered = scratch_.gathered[i];
    }
    std::memset(scratch_.zero_row, 0, static_cast<std::size_t>(problem.head_dim) * 2);
  }

  // O of a partial result is made where it is to stay, which saves a copy that is in no cache. A
  // guarded task decodes rows that are not to be touched as well.
  static Scratch<Shape> areas(const Problem& problem, const Task& task, std::byte* memory,
                              bool guarded) {
    Scratch<Shape> scratch(problem, memory);
    if (Shape::kInterleavedValues && task.partial_out != nullptr && !guarded) {
      scratch.outputs = task.partial_out;
    }
    return scratch;
  }

  // The scores of a block, between which the softmax of the one before runs, then that one's
  // values.
  void run_blocks_overlapped() {
    const Block<Shape>* before = nullptr;
    for (std::int32_t begin = 0; begin < end_; begin += Shape::kBlockTokens) {
      Block<Shape>& block = blocks_[begin / Shape::kBlockTokens % Shape::kBlocksInFlight];
      load_block(block, begin);
      scores(block);
      if (before != nullptr) accumulate(*before);
      before = &block;
    }
    finish_scores();
    if (before != nullptr) accumulate(*before);
  }

  // The row of the task whose query a row of the tiles has; rows_ and more: none.
  static constexpr std::int32_t source_row(std::int32_t row) {
    return Shape::kSplitsWeights ? row % kMirrorRows : row;
  }

  QueryRow query(std::int32_t row) const {
    return query_row(problem_, task_.kv_head, task_.query_row_begin + row);
  }

  // --- load -------------------------------------------------------------------------------------

  // Q to B tiles: a 16 x 16 transpose of pairs of dims for each 32 dims. Rows past the last are
  // zero. A negative scale goes into the sign of Q, so that softmax may take the largest score for
  // the largest exponent.
  void load_queries() {
    const bool negate = problem_.softmax_scale < 0.0;
    const __m512i signs = _mm512_set1_epi16(static_cast<short>(negate ? 0x8000 : 0));
    for (std::int32_t row_tile = 0; row_tile < row_tiles_; ++row_tile) {
      const BFloat16* rows[kTileRows];
      std::int32_t exponents[kTileRows];  // of the power of two, twice, as bf16 has them
      for (std::int32_t r = 0; r < kTileRows; ++r) {
        const std::int32_t row = row_tile * kTileRows + r;
        rows[r] = source_row(row) < rows_
                      ? q_of<BFloat16>(problem_, task_.row, query(source_row(row)))
                      : reinterpret_cast<const BFloat16*>(scratch_.zero_row);
        exponents[r] = lower_query(row, rows[r]) * 0x00800080;
      }
      for (std::int32_t step = 0; step < dot_steps_; ++step) {
        __m512i of_lane[4][4];  // [r / 4][r % 4], then [row / 4][pair % 4] with lane = pair / 4
        for (std::int32_t group = 0; group < 4; ++group) {
          for (std::int32_t r = 0; r < 4; ++r) {
            const std::int32_t row = group * 4 + r;
            const __m512i query = _mm512_loadu_si512(rows[row] + step * kTileElements);
            of_lane[group][r] =
                _mm512_xor_si512(signs, lower_bf16x32(query, _mm512_set1_epi32(exponents[row])));
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

  // The row's query is taken times 2^-n: returns n and sets the scales of its scores.
  std::int32_t lower_query(std::int32_t row, const BFloat16* query) {
    // exp(x) = 2^(x log2(e)). A mantissa below 1 and a power of two: float may not hold the scale.
    constexpr double kLog2E = 1.4426950408889634;
    int exponent = 0;
    const double mantissa = std::frexp(std::abs(problem_.softmax_scale) * kLog2E, &exponent);
    const std::int32_t largest = exponent_of_largest(query);
    // Infinities and NaN stay what they are.
    const std::int32_t n = largest == 128 ? 0 : std::max(0, largest + kQueryMargin);
    exponent += n;
    // What the scale does not hold is another factor, and makes the row a guarded one. The scale
    // takes all that it can, so that what both do not hold makes any score the largest number. A
    // mantissa that rounds to 1 would make it infinite.
    const std::int32_t into_scale = std::min(exponent, 128);
    const float first = std::min(static_cast<float>(mantissa), 0x1.fffffep-1f) *
                        exp2_of(into_scale / 2) * exp2_of(into_scale - into_scale / 2);
    scratch_.scales[row] = guarded_ ? 1.0f : first;
    scratch_.guarded_scales[0][row] = first;
    scratch_.guarded_scales[1][row] = exp2_of(exponent - into_scale);
    if (into_scale != exponent && row < rows_) overflown_.add(row);
    return n;
  }

  // The exponent of the component of a query that is largest in magnitude.
  std::int32_t exponent_of_largest(const BFloat16* query) const {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i largest = _mm512_setzero_si512();
    for (std::int32_t step = 0; step < dot_steps_; ++step) {
      const __m512i bits = _mm512_loadu_si512(query + step * kTileElements);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(bits, magnitude));
    }
    // The exponent of the larger one of a pair of elements decides.
    const __m512i other = _mm512_slli_epi32(largest, 16);
    const std::int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epu16(largest, other));
    return exponent_of(std::bit_cast<float>(bits));
  }

  std::byte* query_tile(std::int32_t row_tile, std::int32_t step) const {
    return scratch_.queries + (std::int64_t{row_tile} * dot_steps_ + step) * kTileBytes;
  }

  // Finds the block that begins at token `begin`.
  void load_block(Block<Shape>& block, std::int32_t begin) {
    block.begin = begin;
    block.count = std::min(Shape::kBlockTokens, end_ - begin);
    for (std::int32_t tile = 0; tile < divide_up(block.count, kTileRows); ++tile) {
      block.keys[tile] = locate_tile(block, tile);
    }
    const TileView nothing{scratch_.zero_row, 0};
    std::fill(block.keys + divide_up(block.count, kTileRows), block.keys + kBlockTiles, nothing);
    if constexpr (Shape::kInterleavedValues) {
      interleave_.begin_block(block.keys, divide_up(block.count, Shape::kUnitTokens));
    }
  }

  // What is asked for from the scores of a group of tokens on, spread evenly over the steps of
  // products: the next block, by the last group of the first block and the first of the others. The
  // first block itself nobody may have asked for, so each of its groups asks for the next.
  void ask_ahead(const Block<Shape>& block, std::int32_t group) {
    const std::int32_t steps = divide_up(row_tiles_, Shape::kGroupRowTiles) * dot_steps_;
    const std::int32_t next_group = (group + 1) * Shape::kGroupTokens;
    if (block.begin == 0 && next_group < block.count) {
      const std::int32_t end = std::min(block.count, next_group + Shape::kGroupTokens);
      ask_for(task_.row, task_.token_begin + next_group, task_.token_begin + end, steps);
      return;
    }
    if (block.begin != 0 && group != 0) return;
    const std::int32_t groups = divide_up(block.count, Shape::kGroupTokens);
    const std::int32_t steps_left =
        (groups - group) * steps + divide_up(block.count, Shape::kUnitTokens) * value_blocks();
    const std::int32_t next = block.begin + Shape::kBlockTokens;
    if (next < end_) {
      const std::int32_t end = std::min(end_, next + Shape::kBlockTokens);
      ask_for(task_.row, task_.token_begin + next, task_.token_begin + end, steps_left);
    } else {
      // The last block: what the next task begins with, if it is known.
      const std::int32_t end =
          task_.next_row < 0 ? 0 : std::min(task_.next_token_end, Shape::kBlockTokens);
      ask_for(std::max(0, task_.next_row), 0, end, steps_left);
    }
  }

  // Tokens [begin, end) of a row, during `steps` of products.
  void ask_for(std::int32_t row, std::int32_t begin, std::int32_t end, std::int32_t steps) {
    prefetch_ =
        BlockPrefetch<Shape::kPrefetchParts, Shape::kPrefetchStreams, Shape::kPrefetchLines>(
            problem_, row, task_.kv_head, begin, end, Shape::kPrefetchTurns * steps);
  }

  static constexpr bool prefetches_after(int part) {
    return part % (4 / Shape::kPrefetchTurns) == 1;
  }

  // The 16 tokens of a tile, in place where they lie in one page; else a copy in which tokens past
  // the end are zero.
  TileView locate_tile(const Block<Shape>& block, std::int32_t tile) {
    const std::int32_t first = block.begin + tile * kTileRows;
    const std::int32_t token = task_.token_begin + first;
    if (token % problem_.page_size + kTileRows <= problem_.page_size && first + kTileRows <= end_) {
      return {reinterpret_cast<const std::byte*>(
                  cached_token<BFloat16>(problem_, task_.row, task_.kv_head, token)),
              problem_.k_token_stride * 2};
    }
    const std::int64_t token_bytes = std::int64_t{problem_.head_dim} * 2;
    std::byte* copy = block.gathered + tile * kTileRows * token_bytes;
    for (std::int32_t i = 0; i < kTileRows; ++i) {
      const void* source = first + i < end_ ? static_cast<const void*>(cached_token<BFloat16>(
                                                  problem_, task_.row, task_.kv_head, token + i))
                                            : scratch_.zero_row;
      std::memcpy(copy + i * token_bytes, source, static_cast<std::size_t>(token_bytes));
    }
    return {copy, token_bytes};
  }

  // --- scores and softmax -----------------------------------------------------------------------

  // The scores of a block; their softmax but for that of the last block of score tiles.
  void scores(const Block<Shape>& block) {
    const std::int32_t groups = divide_up(block.count, Shape::kGroupTokens);
    for (std::int32_t group = 0; group < groups; ++group) {
      ask_ahead(block, group);
      for (std::int32_t row_tile = 0; row_tile < row_tiles_; row_tile += Shape::kGroupRowTiles) {
        score_block(block, group, row_tile);
        // That of the last row tiles runs when the values of the block before are done.
        const std::int32_t row_tile_end = std::min(row_tiles_, row_tile + Shape::kGroupRowTiles);
        softmax_.begin_scores(block, group, row_tile, row_tile_end, least_visible_);
      }
    }
  }

  void finish_scores() {
    results_.flush(scratch_.sink);
    softmax_.finish_scores();
  }

  // Scores of a group of tokens and of the row tiles from `row_tile` on. Between the products runs
  // the softmax of the block of products before this one.
  void score_block(const Block<Shape>& block, std::int32_t group, std::int32_t row_tile) {
    const TileView* keys = block.keys + group * kGroupTiles;
    const TileView first_query{query_tile(row_tile, 0), kTileRowBytes};
    std::byte* first = reinterpret_cast<std::byte*>(scratch_.scores);
    if constexpr (Shape::kGroupRowTiles == 1) {
      results_.begin({first, first + kTileBytes, first + 2 * kTileBytes, first + 3 * kTileBytes},
                     false);
      multiply_scores(Products4x1{{{keys[0], keys[1], keys[2], keys[3]}, kTileRowBytes},
                                  {{first_query}, kTileBytes}});
    } else {
      const Operand<2> key_tiles{{keys[0], keys[1]}, kTileRowBytes};
      if (row_tile + 1 < row_tiles_) {
        std::byte* second = first + kGroupTiles * kTileBytes;
        const TileView second_query{query_tile(row_tile + 1, 0), kTileRowBytes};
        results_.begin({first, second, first + kTileBytes, second + kTileBytes}, false);
        multiply_scores(Products2x2<false, true, Operand<2>, Operand<2>>{
            key_tiles, {{first_query, second_query}, kTileBytes}});
      } else {
        results_.begin({first, first + kTileBytes, scratch_.sink, scratch_.sink}, false);
        multiply_scores(ProductsPair<2>{key_tiles, {{first_query}, kTileBytes}});
      }
    }
    softmax_.finish_scores();
  }

  // Softmax slices after a product: one is the smoothest; more where there are too few products.
  template <class Products>
  [[gnu::always_inline]] void multiply_scores(const Products& products) {
    constexpr std::int32_t kUnits = Softmax<Shape>::kUnitsPerGroup * Shape::kGroupRowTiles;
    constexpr std::int32_t kPartsNeeded = kUnits * Softmax<Shape>::kSlices;
    if (kPartsNeeded <= 4 * (dot_steps_ - 2)) {
      multiply_scores_at<1>(products);
    } else if (kPartsNeeded <= 2 * 4 * (dot_steps_ - 2)) {
      multiply_scores_at<2>(products);
    } else {
      multiply_scores_at<6>(products);
    }
  }

  template <std::int32_t kSlicesPerPart, class Products>
  [[gnu::noinline]] void multiply_scores_at(const Products products) {
    constexpr std::int32_t kUnitSteps = Softmax<Shape>::kSlices / (4 * kSlicesPerPart);
    const auto others = [&](auto part) __attribute__((always_inline)) {
      // The first panel of values.
      if constexpr (Shape::kInterleavedValues) interleave_.run();
      if constexpr (prefetches_after(part)) prefetch_.run();
    };
    multiply_first_step(results_, products, dot_steps_, others);
    std::int32_t step = 1;
    for (; softmax_.has_plain_unit() && step + kUnitSteps < dot_steps_; step += kUnitSteps) {
      typename Softmax<Shape>::Unit unit;
      softmax_.begin_unit(unit);
      for_each_constant<kUnitSteps>([&](auto unit_step) __attribute__((always_inline)) {
        const auto softmax = [&](auto part) __attribute__((always_inline)) {
          for_each_constant<kSlicesPerPart>([&](auto i) __attribute__((always_inline)) {
            softmax_.template run_slice<(unit_step * 4 + part) * kSlicesPerPart + i>(unit);
          });
          if constexpr (prefetches_after(part)) prefetch_.run();
        };
        multiply_step<false>(products, step + unit_step, softmax);
      });
      softmax_.next_unit();
    }
    for (; step < dot_steps_ - 1; ++step) multiply_step<false>(products, step, others);
    multiply_step<true>(products, step, others);
  }

  // --- accumulate -------------------------------------------------------------------------------

  void accumulate(const Block<Shape>& block) {
    if (has_hidden_non_finite(block)) {
      accumulate_apart(block);
    } else {
      accumulate_values(block, block.keys);
    }
    const std::int32_t next = block.begin + Shape::kBlockTokens;
    if (next % kChainTokens == 0 && next < end_) end_chain();
  }

  // What O holds joins the sum of the chains before it, and O begins at 0 again.
  [[gnu::noinline]] void end_chain() {
    const std::int32_t column_tiles = problem_.head_dim_v / kTileFloats;
    for (std::int32_t row_tile = 0; row_tile < row_tiles_; ++row_tile) {
      const std::int32_t first_row = row_tile * kTileRows;
      const __m512 before = _mm512_load_ps(scratch_.chain_references + first_row);
      const __m512 after = _mm512_load_ps(scratch_.references + first_row);
      // Those of a row that has seen nothing are infinite.
      const __mmask16 same = _mm512_cmp_ps_mask(before, after, _CMP_EQ_OQ);
      alignas(64) float factors[kTileRows];
      _mm512_store_ps(factors, _mm512_mask_mov_ps(exp2_f32x16(_mm512_sub_ps(before, after)), same,
                                                  _mm512_set1_ps(1.0f)));
      _mm512_store_ps(scratch_.chain_references + first_row, after);
      const std::int64_t first = std::int64_t{first_row} * problem_.head_dim_v;
      for (std::int32_t i = 0; i < column_tiles * kTileRows; ++i) {
        float* output = scratch_.outputs + first + i * kTileFloats;
        float* chains = scratch_.chain_outputs + first + i * kTileFloats;
        __m512 sum = _mm512_load_ps(output);
        // What was never written is not read: it may be no number.
        if (has_chains_) {
          sum =
              _mm512_fmadd_ps(_mm512_load_ps(chains), _mm512_set1_ps(factors[i % kTileRows]), sum);
        }
        _mm512_store_ps(chains, sum);
        _mm512_store_ps(output, _mm512_setzero_ps());
      }
    }
    has_chains_ = true;
  }

  // Blocks of products of accumulate_values().
  std::int32_t value_blocks() const {
    if constexpr (Shape::kInterleavedValues) {
      return problem_.head_dim_v / kTileElements * divide_up(row_tiles_, 2);
    } else {
      return problem_.head_dim_v / (2 * kTileElements) * row_tiles_;
    }
  }

  // O += P V for all rows. ManyRows reads the panels of `interleave_`, FewRows the tiles given.
  void accumulate_values(const Block<Shape>& block, const TileView* values) {
    if constexpr (Shape::kInterleavedValues) {
      const std::byte* panel = interleave_.finish_panel();
      for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
        const std::int32_t next_column = column + kTileElements;
        interleave_.begin_panel(next_column < problem_.head_dim_v ? next_column : -1);
        for (std::int32_t row_tile = 0; row_tile < row_tiles_; row_tile += 2) {
          value_block_interleaved(block, row_tile, column, panel);
        }
      }
    } else {
      for (std::int32_t row_tile = 0; row_tile < row_tiles_; ++row_tile) {
        for (std::int32_t column = 0; column < problem_.head_dim_v; column += 2 * kTileElements) {
          value_block_in_place(block, row_tile, column, values);
        }
      }
    }
    results_.flush(scratch_.sink);
  }

  // Where a tile of O lies in Scratch::outputs, and in Scratch::chain_outputs.
  std::int64_t output_offset(std::int32_t row_tile, std::int32_t column) const {
    return (std::int64_t{row_tile} * (problem_.head_dim_v / kTileFloats) + column / kTileFloats) *
           kTileBytes;
  }
  std::byte* output_tile(std::int32_t row_tile, std::int32_t column) const {
    return reinterpret_cast<std::byte*>(scratch_.outputs) + output_offset(row_tile, column);
  }
  static const std::byte* weight_tiles(const Block<Shape>& block, std::int32_t row_tile) {
    return block.weights + std::int64_t{row_tile} * kBlockUnits * Shape::kUnitBytes;
  }

  // Two row tiles (or the last one) times 32 columns, 32 tokens a step.
  void value_block_interleaved(const Block<Shape>& block, std::int32_t row_tile,
                               std::int32_t column, const std::byte* values) {
    const std::byte* weights = weight_tiles(block, row_tile);
    const TileView first_weights{weights, kTileRowBytes};
    const Operand<2> value_tiles{{{values, kTileRowBytes}, {values + kTileBytes, kTileRowBytes}},
                                 ValueInterleave::kUnitBytes};
    const std::int32_t steps = divide_up(block.count, Shape::kUnitTokens);
    const bool interleaves = row_tile + 2 >= row_tiles_ && interleave_.has_panel();
    std::byte* first = output_tile(row_tile, column);
    if (row_tile + 1 < row_tiles_) {
      const TileView second_weights{weights + kBlockUnits * kTileBytes, kTileRowBytes};
      std::byte* second = output_tile(row_tile + 1, column);
      results_.begin({first, first + kTileBytes, second, second + kTileBytes}, block.begin != 0);
      multiply_values(
          Products2x2<true, false, Operand<2>, Operand<2>>{
              {{first_weights, second_weights}, kTileBytes}, value_tiles},
          steps, interleaves);
    } else {
      results_.begin({first, first + kTileBytes, scratch_.sink, scratch_.sink}, block.begin != 0);
      multiply_values(ProductsPair<1>{{{first_weights}, kTileBytes}, value_tiles}, steps,
                      interleaves);
    }
  }

  // {p, 0} and {0, p} of a row tile times 64 columns, 16 tokens a step: the even and the odd
  // columns of each 32.
  void value_block_in_place(const Block<Shape>& block, std::int32_t row_tile, std::int32_t column,
                            const TileView* tokens) {
    const std::byte* weights = weight_tiles(block, row_tile);
    const Operand<2> weight_tiles{{{weights, kTileRowBytes}, {weights + kTileBytes, kTileRowBytes}},
                                  Shape::kUnitBytes};
    std::byte* first = output_tile(row_tile, column);
    std::byte* second = output_tile(row_tile, column + kTileElements);
    results_.begin({first, second, first + kTileBytes, second + kTileBytes}, block.begin != 0);
    multiply_values(
        Products2x2<false, true, Operand<2>, TokenOperand>{weight_tiles,
                                                           {tokens, std::int64_t{column} * 2}},
        divide_up(block.count, Shape::kUnitTokens), false);
  }

  // Tokens where they lie, 16 a step: columns from `offset` bytes on.
  struct TokenOperand {
    const TileView* tokens;
    std::int64_t offset;

    [[gnu::always_inline]] TileView operator()(std::int32_t step, int tile) const {
      return {tokens[step].base + offset + tile * kTileRowBytes, tokens[step].stride};
    }
  };

  // interleaves: the next columns take the places of the values, a unit once its step has them in
  // registers.
  template <class Products>
  [[gnu::always_inline]] void multiply_values(const Products& products, std::int32_t steps,
                                              bool interleaves) {
    if (interleaves) {
      multiply_values_and<true>(products, steps);
    } else {
      multiply_values_and<false>(products, steps);
    }
  }

  template <bool kInterleaves, class Products>
  [[gnu::always_inline]] void multiply_values_and(const Products& products, std::int32_t steps) {
    std::int32_t step = 0;
    const auto background = [&](auto part) __attribute__((always_inline)) {
      if constexpr (kInterleaves) interleave_.run_piece(step, part);
      if constexpr (prefetches_after(part)) prefetch_.run();
    };
    multiply_first_step(results_, products, steps, background);
    if (steps == 1) return;
    for (step = 1; step < steps - 1; ++step) multiply_step<false>(products, step, background);
    multiply_step<true>(products, step, background);
  }

  // A weight of zero hides a token, unless its value is inf or NaN.
  bool has_hidden_non_finite(const Block<Shape>& block) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (std::int32_t token = std::max(block.begin, least_visible_);
         token < block.begin + block.count; ++token) {
      const std::byte* value = value_of(block, token);
      for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
        const __m512i bits = _mm512_loadu_si512(value + std::int64_t{column} * 2);
        if (_mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent) != 0) return true;
      }
    }
    return false;
  }
  const std::byte* value_of(const Block<Shape>& block, std::int32_t token) const {
    const TileView& tile = block.keys[(token - block.begin) / kTileRows];
    return tile.base + (token - block.begin) % kTileRows * tile.stride;
  }

  // As accumulate_values(), once for each visible count, with what that count hides replaced by
  // zeros; of each pass only the rows with that count are kept. What they get is bit for bit what
  // they would get alone.
  void accumulate_apart(const Block<Shape>& block) {
    for (std::int32_t row = 0; row < rows_;) {
      const std::int32_t visible = scratch_.visible[row];
      std::int32_t row_end = row + 1;
      while (row_end < rows_ && scratch_.visible[row_end] == visible) ++row_end;

      TileView values[kBlockTiles];
      copy_visible_values(block, visible, values);
      if (block.begin != 0 && row != 0)
        copy_outputs(scratch_.outputs_aside, scratch_.outputs, row, row_end);
      if (block.begin != 0 && row == 0)
        copy_outputs(scratch_.outputs, scratch_.outputs_aside, 0, rows_);
      accumulate_values(block, values);
      copy_outputs(scratch_.outputs, scratch_.outputs_aside, row, row_end);
      row = row_end;
    }
    copy_outputs(scratch_.outputs_aside, scratch_.outputs, 0, rows_);
  }

  // Values of the block of which tokens from `visible` on are zero, as accumulate_values() reads
  // them: tiles that hold such a token in Scratch::gathered_values, the others where they lie.
  void copy_visible_values(const Block<Shape>& block, std::int32_t visible, TileView* values) {
    const std::int64_t stride = std::int64_t{problem_.head_dim} * 2;
    for (std::int32_t tile = 0; tile < kBlockTiles; ++tile) {
      values[tile] = block.keys[tile];
      if (block.begin + (tile + 1) * kTileRows <= visible) continue;
      std::byte* copy = scratch_.gathered_values + tile * kTileRows * stride;
      for (std::int32_t i = 0; i < kTileRows; ++i) {
        const std::int32_t token = block.begin + tile * kTileRows + i;
        std::memcpy(copy + i * stride, token < visible ? value_of(block, token) : scratch_.zero_row,
                    static_cast<std::size_t>(problem_.head_dim_v) * 2);
      }
      values[tile] = {copy, stride};
    }
    if constexpr (Shape::kInterleavedValues) {
      interleave_.begin_block(values, divide_up(block.count, Shape::kUnitTokens));
    }
  }

  // Rows [row_begin, row_end) of O, of both halves where P is split.
  void copy_outputs(const float* source, float* target, std::int32_t row_begin,
                    std::int32_t row_end) const {
    copy_tile_rows(source, target, row_begin, row_end);
    if constexpr (Shape::kSplitsWeights) {
      copy_tile_rows(source, target, row_begin + kMirrorRows, row_end + kMirrorRows);
    }
  }
  void copy_tile_rows(const float* source, float* target, std::int32_t row_begin,
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

  void finish() {
    if (has_chains_) end_chain();
    for (std::int32_t row = 0; row < rows_; ++row) {
      if (!wanted_.has(row)) continue;
      const double total = scratch_.totals[row];
      const bool empty = scratch_.visible[row] == 0;
      const float inverse = empty ? 0.0f : static_cast<float>(1.0 / total);
      constexpr double kLn2 = 0.69314718055994530942;
      const float lse =
          empty ? std::numeric_limits<float>::infinity()
                : static_cast<float>(static_cast<double>(scratch_.references[row]) * kLn2 +
                                     std::log(guarded_ ? total / double{kGuardedWeight} : total));
      const bool is_partial = task_.partial_out != nullptr;
      (is_partial ? task_.partial_lse[row] : lse_of(problem_, task_.row, query(row))) = lse;
      const bool is_finite = (is_partial ? write_partial(row, inverse) : write_out(row, inverse)) &&
                             std::isfinite(lse);
      const bool is_exact = std::abs(scratch_.references[row]) < kLargestReference;
      if (!empty && !(is_finite && is_exact)) overflown_.add(row);
    }
  }

  // The bits of a bf16, the last finite one but one, from which on a result is not to be trusted:
  // rounding a weight may have made it that little, and rounding a merge may make it infinite.
  static constexpr std::int32_t kTooLarge = 0x7f7e;

  // Both write a row of O times `factor`, and return whether all of it is finite and below that.
  bool write_out(std::int32_t row, float factor) const {
    BFloat16* out = out_of<BFloat16>(problem_, task_.row, query(row));
    __m512i largest = _mm512_setzero_si512();
    for_each_32_columns(row, factor, [&](std::int32_t column, __m512 low, __m512 high) {
      const __m512i elements = to_bf16x32(low, high);
      largest = _mm512_max_epu16(largest, _mm512_and_si512(elements, _mm512_set1_epi16(0x7fff)));
      _mm512_storeu_si512(out + column, elements);
    });
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kTooLarge)) == 0;
  }
  bool write_partial(std::int32_t row, float factor) const {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    float* out = task_.partial_out + PartialLayout<Shape>::offset(problem_.head_dim_v, row, 0);
    __m512i largest = _mm512_setzero_si512();
    for_each_32_columns(row, factor, [&](std::int32_t, __m512 low, __m512 high) {
      largest = _mm512_max_epu32(largest, _mm512_and_si512(magnitude, _mm512_castps_si512(low)));
      largest = _mm512_max_epu32(largest, _mm512_and_si512(magnitude, _mm512_castps_si512(high)));
      _mm512_store_ps(out, low);
      _mm512_store_ps(out + PartialLayout<Shape>::kNextColumns, high);
      out += 2 * PartialLayout<Shape>::kNextColumns;
    });
    return _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(kTooLarge << 16)) == 0;
  }

  // Weights are rounded and their total is not, so the mean of values of the largest number may
  // come out above it, by less than their last place.
  static __m512 cap_finite(__m512 x) {
    const __m512 largest = _mm512_set1_ps(0x1.fep127f);
    const __m512 magnitude = _mm512_abs_ps(x);
    const __mmask16 finite = _mm512_cmp_ps_mask(
        magnitude, _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_LT_OQ);
    return _mm512_mask_max_ps(x, finite, _mm512_sub_ps(_mm512_setzero_ps(), largest),
                              _mm512_min_ps(largest, x));
  }

  // 16 columns of a row of O. An infinite value leaves an infinity in it and, of weights without
  // a remainder, a NaN in what is to be added.
  static __m512 output_of(const std::byte* tile_row) {
    const __m512 output = _mm512_load_ps(tile_row);
    if constexpr (!Shape::kSplitsWeights) return output;
    const __m512 rest = _mm512_load_ps(tile_row + kMirrorRows * kTileRowBytes);
    const __mmask16 finite = _mm512_cmp_ps_mask(
        _mm512_abs_ps(rest), _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_LT_OQ);
    return _mm512_mask_add_ps(output, finite, output, rest);
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
    const auto* outputs =
        reinterpret_cast<const std::byte*>(has_chains_ ? scratch_.chain_outputs : scratch_.outputs);
    for (std::int32_t column = 0; column < problem_.head_dim_v; column += kTileElements) {
      const std::byte* tile =
          outputs + output_offset(row / kTileRows, column) + row % kTileRows * kTileRowBytes;
      __m512 first = _mm512_setzero_ps();
      __m512 second = _mm512_setzero_ps();
      if (!empty) {
        first = _mm512_mul_ps(factors, output_of(tile));
        second = _mm512_mul_ps(factors, output_of(tile + kTileBytes));
      }
      if (guarded_) {
        first = cap_finite(first);
        second = cap_finite(second);
      }
      write(column, _mm512_permutex2var_ps(first, low, second),
            _mm512_permutex2var_ps(first, high, second));
    }
  }

  const TileSession session_;
  const Problem& problem_;
  const Task& task_;
  const RowSet wanted_;  // rows to be written
  const bool guarded_;
  RowSet overflown_;  // rows whose results are not finite, or not to be trusted
  const Scratch<Shape> scratch_;
  const std::int32_t rows_;
  const std::int32_t row_tiles_;
  const std::int32_t dot_steps_;  // of 32 dims
  // Tokens from the begin of the task: what every row sees, and what some row sees.
  std::int32_t least_visible_ = 0;
  std::int32_t end_ = 0;
  bool has_chains_ = false;

  ResultTiles results_;
  Softmax<Shape> softmax_;
  ValueInterleave interleave_;
  BlockPrefetch<Shape::kPrefetchParts, Shape::kPrefetchStreams, Shape::kPrefetchLines> prefetch_;

  Block<Shape> blocks_[Shape::kBlocksInFlight];
};

std::int32_t row_tile(const Problem& problem) {
  return visit_shape(problem, [](auto shape) { return PartialLayout<decltype(shape)>::kRowTile; });
}

std::size_t scratch_bytes(const Problem& problem) {
  return visit_shape(
      problem, [&](auto shape) { return Scratch<decltype(shape)>(problem, nullptr).bytes(); });
}

void decode(const Problem& problem, const Task& task, std::byte* scratch) {
  visit_shape(problem, [&](auto shape) { Decode<decltype(shape)>::run(problem, task, scratch); });
}

// Some columns of all rows before the next columns, so that tiles are read in order: half of them
// come from the cache of another core.
template <class Shape>
void merge_rows(const Problem& problem, const Partials& partials, void* const* outs) {
  constexpr std::int32_t kColumns = 2 * kTileElements;  // every head_dim_v is a multiple
  for (std::int32_t column = 0; column < problem.head_dim_v; column += kColumns) {
    for (std::int32_t row = partials.row_begin; row < partials.row_end; ++row) {
      const float* weights = partials.weights + (row - partials.row_begin);
      const float* first =
          partials.outs + PartialLayout<Shape>::offset(problem.head_dim_v, row, column);
      // -0 is the identity of addition: 0 would turn a lone -0 into 0.
      __m512 sums[kColumns / kTileFloats];
      std::fill(std::begin(sums), std::end(sums), _mm512_set1_ps(-0.0f));
      for (std::int64_t i = 0; i < partials.count; ++i) {
        const float weight = weights[i * partials.weight_stride];
        if (weight < 0.0f) continue;
        const float* part = first + i * partials.out_stride;
        for (__m512& sum : sums) {
          sum = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_load_ps(part), sum);
          part += PartialLayout<Shape>::kNextColumns;
        }
      }
      BFloat16* out = static_cast<BFloat16*>(outs[row - partials.row_begin]) + column;
      _mm512_storeu_si512(out, to_bf16x32(sums[0], sums[1]));
      _mm512_storeu_si512(out + kTileElements, to_bf16x32(sums[2], sums[3]));
    }
  }
}

void merge(const Problem& problem, const Partials& partials, void* const* outs) {
  visit_shape(problem, [&](auto shape) { merge_rows<decltype(shape)>(problem, partials, outs); });
}

}  // namespace
}  // namespace amx

const DecodeKernel kAmxBf16 = {amx::kMaxQueryRows, amx::row_tile, amx::scratch_bytes, amx::decode,
                               amx::merge};

}  // namespace flashmla::cpu
