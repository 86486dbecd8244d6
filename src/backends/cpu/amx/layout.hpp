// Shapes of the AMX kernel's loops and where everything lies in a task's scratch.
//
// "Row" is a query row, "row tile" 16 of them. Tokens are numbered from the begin of the task.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/amx/tile.hpp"
#include "backends/cpu/kernel.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu::amx {
namespace {

// Query rows of a task. They share the interleave of V and each other's reads of the cache; O of
// more rows would not stay in the second-level cache beside two blocks of tokens.
inline constexpr std::int32_t kMaxQueryRows = 256;
static_assert(kMaxQueryRows % kMostTileRows == 0);

// Tokens whose values are summed up before they join the others: the sum of a long row would
// outgrow what is added to it. Of like tokens, a pair of which is added at a time, 2^16 still leave
// the last ones nine bits.
inline constexpr std::int32_t kChainTokens = 1 << 16;

// Ways to walk the cache. Which one a problem takes depends on its query rows alone, never on
// those of a task, so that a row's bits do not depend on which rows share its task.
//
// FewRows: the memory is the limit. Values are read where they lie: 16 cached tokens are a B tile
// that pairs neighbouring dims, so each element of P is widened to {p, 0} and to {0, p}, which give
// the even and the odd columns of O at twice the products.
struct FewRows {
  // With 128 the memory is 10% slower: measured, not explained.
  static constexpr std::int32_t kBlockTokens = 64;
  // Tokens and row tiles in a tile of scores: 4 x 1 registers.
  static constexpr std::int32_t kGroupTokens = 64;
  static constexpr std::int32_t kGroupRowTiles = 1;
  // Tokens of one row tile that softmax takes at once.
  static constexpr std::int32_t kUnitTokens = 16;
  // Bytes of P for a row tile and a unit: the tile of {p, 0}, the tile of {0, p}.
  static constexpr std::int32_t kUnitBytes = 2 * kTileBytes;
  static constexpr bool kInterleavedValues = false;
  // Parts of a block whose lines are asked for side by side, streams of prefetches in each, cache
  // lines of a stream asked for at once, and how often in a step.
  static constexpr std::int32_t kPrefetchParts = 1;
  static constexpr std::int32_t kPrefetchStreams = 8;
  static constexpr std::int32_t kPrefetchLines = 2;
  static constexpr std::int32_t kPrefetchTurns = 2;
  // The scores of a block are computed before the values of the one before it, so that softmax has
  // products to run between. Its row tile's alone: see Softmax::begin_scores().
  static constexpr std::int32_t kBlocksInFlight = 2;
  // Whether P is as exact as two bf16 numbers make it: see FewestRows.
  static constexpr bool kSplitsWeights = false;
};

// With eight rows at most, the other half of a tile has room for what rounding leaves of P: row
// r + kMirrorRows has the query of row r, and for weights the differences of that row's from what
// bf16 makes of them. O is the sum of both. With so few heads nothing averages the rounding of a
// weight that is most of its row's sum, and the products cost what they did.
struct FewestRows : FewRows {
  static constexpr bool kSplitsWeights = true;
};
inline constexpr std::int32_t kMirrorRows = kTileRows / 2;

// ManyRows: the products are the limit. Values are interleaved once a block, token 2j with 2j + 1,
// and shared by all rows.
struct ManyRows {
  static constexpr std::int32_t kBlockTokens = 256;
  static constexpr std::int32_t kGroupTokens = 32;
  static constexpr std::int32_t kGroupRowTiles = 2;  // 2 x 2 registers
  static constexpr std::int32_t kUnitTokens = 32;
  static constexpr std::int32_t kUnitBytes = kTileBytes;
  static constexpr bool kInterleavedValues = true;
  static constexpr std::int32_t kPrefetchParts = 5;
  static constexpr std::int32_t kPrefetchStreams = 1;
  static constexpr std::int32_t kPrefetchLines = 1;
  static constexpr std::int32_t kPrefetchTurns = 1;
  static constexpr std::int32_t kBlocksInFlight = 1;
  static constexpr bool kSplitsWeights = false;
};

// The most query rows of a problem for which FewRows is the faster one: a row tile.
inline constexpr std::int32_t kFewRowsLimit = kTileRows;
static_assert(kFewRowsLimit <= FewRows::kGroupRowTiles * kTileRows);

// visit(shape): the one that the problem takes.
template <class Visit>
decltype(auto) visit_shape(const Problem& problem, const Visit& visit) {
  if (problem.query_rows() <= kMirrorRows) return visit(FewestRows{});
  if (problem.query_rows() <= kFewRowsLimit) return visit(FewRows{});
  return visit(ManyRows{});
}

// Where 16 columns of a query row lie in its partial result, and how far the next 16 are. ManyRows
// has them in tiles, for which O is made there; a copy is better off with rows in order.
template <class Shape>
struct PartialLayout {
  // DecodeKernel::row_tile.
  static constexpr std::int32_t kRowTile = Shape::kInterleavedValues ? kTileRows : 1;
  static_assert(kMostTileRows % kRowTile == 0);
  static constexpr std::int64_t kNextColumns =
      Shape::kInterleavedValues ? kTileRows * kTileFloats : kTileFloats;

  static std::int64_t offset(std::int32_t head_dim_v, std::int32_t row, std::int32_t column) {
    const std::int64_t row_offset =
        Shape::kInterleavedValues
            ? std::int64_t{row / kTileRows} * kTileRows * head_dim_v + row % kTileRows * kTileFloats
            : std::int64_t{row} * head_dim_v;
    return row_offset + column / kTileFloats * kNextColumns;
  }
};

// Tokens [begin, begin + count) of the task on their way through the phases.
template <class Shape>
struct Block {
  std::int32_t begin;
  std::int32_t count;
  TileView keys[Shape::kBlockTokens / kTileRows];  // 16 tokens each, the last ones past the end
  std::byte* weights;                              // of Scratch::weights
  std::byte* gathered;                             // of Scratch::gathered
};

// The areas of a task's scratch, each 64-byte aligned.
template <class Shape>
class Scratch {
 public:
  Scratch(const Problem& problem, std::byte* memory) : memory_(memory) {
    const std::int64_t rows = std::min(kMaxQueryRows, problem.query_rows());
    const std::int64_t row_tiles = (rows + kTileRows - 1) / kTileRows;
    const std::int64_t token_bytes = std::int64_t{problem.head_dim} * 2;
    const std::int64_t score_block =
        std::int64_t{Shape::kGroupTokens} * Shape::kGroupRowTiles * kTileRowBytes;
    const std::int64_t units = Shape::kBlockTokens / Shape::kUnitTokens;

    queries = take<std::byte>(row_tiles * token_bytes * kTileRows);
    scores = take<float>(score_block);
    for (std::byte*& area : weights) area = take<std::byte>(row_tiles * units * Shape::kUnitBytes);
    outputs = take<float>(row_tiles * kTileRows * problem.head_dim_v * 4);
    outputs_aside = take<float>(row_tiles * kTileRows * problem.head_dim_v * 4);
    const bool may_chain =
        std::int64_t{problem.max_pages_per_row} * problem.page_size > kChainTokens;
    chain_outputs = take<float>(may_chain ? row_tiles * kTileRows * problem.head_dim_v * 4 : 0);
    chain_references = take<float>(may_chain ? row_tiles * kTileRowBytes : 0);
    for (std::byte*& area : gathered) area = take<std::byte>(Shape::kBlockTokens * token_bytes);
    gathered_values = take<std::byte>(Shape::kBlockTokens * token_bytes);
    if (Shape::kInterleavedValues) {
      panel = take<std::byte>(std::int64_t{Shape::kBlockTokens} * kTileElements * 2);
    }
    zero_row = take<std::byte>(token_bytes);
    sink = take<std::byte>(4 * kTileBytes);
    elements = take<std::int32_t>(kTileBytes);
    unit_totals = take<float>(kTileRowBytes);
    scales = take<float>(row_tiles * kTileRowBytes);
    for (float*& area : guarded_scales) area = take<float>(row_tiles * kTileRowBytes);
    references = take<float>(row_tiles * kTileRowBytes);
    totals = take<double>(row_tiles * 2 * kTileRowBytes);
    visible = take<std::int32_t>(row_tiles * kTileRowBytes);
  }

  std::size_t bytes() const { return end_; }

  // Q as B tiles, times a power of two and negated where softmax_scale is negative:
  // [row tile][head_dim / 32][pair of dims][row][2] bf16.
  std::byte* queries;
  // S of one block of score tiles, transposed, as the tiles are stored: [row tile of the block]
  // [token of the group][row] float.
  float* scores;
  // P as A tiles, of each block in flight: [row tile][unit] of kUnitBytes. ManyRows: [row][token]
  // bf16. FewRows:
  // [{p, 0} or {0, p}][row][token][2] bf16.
  std::byte* weights[Shape::kBlocksInFlight];
  // O: [row tile][head_dim_v / 16][row][16 columns] float. Pairs of column tiles share 32 columns,
  // in the order that the shape's value tiles give. Of ManyRows it may be Task::partial_out: it
  // then outlives the task, and ends divided by the sum and with its columns in order.
  float* outputs;
  // A copy of `outputs`, for those blocks too.
  float* outputs_aside;
  // O of the chains that have ended, laid out as `outputs`, and [row] m when the last of them
  // ended.
  float* chain_outputs;
  float* chain_references;
  // Copies of the tokens that cannot be read where they lie, of each block in flight: [token of the
  // block][head_dim] bf16.
  std::byte* gathered[Shape::kBlocksInFlight];
  // Copies of the values of which hidden tokens are zero, in blocks with a hidden token that is not
  // finite: [token of the block][head_dim], of which head_dim_v are used.
  std::byte* gathered_values;
  // ManyRows: V as B tiles, a panel of 32 columns: [unit][first or second tile][pair of tokens]
  // [16][2].
  std::byte* panel = nullptr;
  std::byte* zero_row;  // head_dim zeros: stands for tokens past the end
  std::byte* sink;      // takes the four tiles that the registers hold before the first result
  // A unit that was weighed anew: P before its transpose, and its sums [row of the row tile].
  std::int32_t* elements;
  float* unit_totals;
  // [row]. What makes exponents of two of the scores. A guarded task scales scores as it caps them,
  // by two factors, of which one may be too large to be applied at once, and has ones here.
  float* scales;
  float* guarded_scales[2];
  // [row]. m, in units of log2; -inf before the row has seen a token.
  float* references;
  double* totals;         // sum of P: a long row adds thousands of units
  std::int32_t* visible;  // tokens of the task that the row sees

 private:
  template <class T>
  T* take(std::int64_t bytes) {
    // Null when only the bytes are counted.
    std::byte* area = memory_ == nullptr ? nullptr : memory_ + end_;
    end_ += static_cast<std::size_t>(bytes + 63) / 64 * 64;
    return reinterpret_cast<T*>(area);
  }

  std::byte* memory_;
  std::size_t end_ = 0;
};

}  // namespace
}  // namespace flashmla::cpu::amx
