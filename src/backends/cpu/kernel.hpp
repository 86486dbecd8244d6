// What a CPU decode kernel is: one row of kernels.inc. The driver (decode.cpp) walks the plan and
// hands each kernel one fragment of one row at a time; a kernel never sees threads or the plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "problem/problem.hpp"

namespace flashmla::cpu {

// Query rows of a row tile at most: see DecodeKernel::row_tile.
inline constexpr std::int32_t kMostTileRows = 16;

// Attention of some query rows of one (batch row, key/value head) over a range of its tokens.
struct Task {
  std::int32_t row = 0;      // batch row
  std::int32_t kv_head = 0;  // key/value head
  // Inclusive, in the numbering of Problem::query_rows(); a multiple of DecodeKernel::row_tile.
  std::int32_t query_row_begin = 0;
  std::int32_t query_row_end = 0;  // exclusive; at most DecodeKernel::max_query_rows more
  std::int32_t token_begin = 0;    // inclusive
  std::int32_t token_end = 0;      // exclusive, at most the row's length
  // Where the result goes. Null: the row is walked whole, so write Problem::out and Problem::lse
  // in their dtypes and strides. Otherwise float partial results normalised over this range alone:
  // partial_out holds (query_row_end - query_row_begin, head_dim_v), rows rounded up to whole tiles
  // of DecodeKernel::row_tile, in an order inside a tile that only the kernel knows; partial_lse is
  // (query_row_end - query_row_begin). A query row that sees no token of the range has out 0 and
  // lse +inf in both cases.
  float* partial_out = nullptr;
  float* partial_lse = nullptr;
  // A batch row that the same thread is likely to decode next, for the same query rows: its tokens
  // [0, next_token_end) may be asked for while this task ends. -1: not known.
  std::int32_t next_row = -1;
  std::int32_t next_token_end = 0;
};

// The partial results of query rows [row_begin, row_end) of a row tile, in the order of their
// tokens.
struct Partials {
  const float* outs;  // of the tile: (count), out_stride elements apart
  std::int64_t out_stride;
  std::int32_t row_begin;
  std::int32_t row_end;
  // (count, row_end - row_begin), weight_stride elements apart; below 0: empty, not read. At least
  // one weight of a row is not.
  const float* weights;
  std::int64_t weight_stride;
  std::int64_t count;
};

// Rules for every kernel:
//  - a cached token that a query row does not see never touches that row's result, whatever bits it
//    holds; tokens at or past token_end are not read at all;
//  - the result of a query row depends only on the problem and the token range, not on which other
//    query rows share the task, so that any split over threads gives the same bits;
//  - no allocation, no global state, nothing thrown; `scratch` is 64-byte aligned, at least
//    scratch_bytes(problem) long, and holds garbage at entry.
// Name, instruction set and dtype of a kernel stand in its row of kernels.inc.
struct DecodeKernel {
  std::int32_t max_query_rows;  // of a task, a multiple of kMostTileRows
  // Query rows that are a row tile of partial results (Task::partial_out): a divisor of
  // kMostTileRows. A tile takes the room of all its rows: 1 where they are few.
  std::int32_t (*row_tile)(const Problem& problem);
  std::size_t (*scratch_bytes)(const Problem& problem);
  void (*decode)(const Problem& problem, const Task& task, std::byte* scratch);
  // outs[row - row_begin] = sum of weight * partial result, head_dim_v elements in the problem's
  // dtype. One partial result of weight 1 passes bit for bit.
  void (*merge)(const Problem& problem, const Partials& partials, void* const* outs);
};

}  // namespace flashmla::cpu
