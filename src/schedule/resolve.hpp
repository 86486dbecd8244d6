// Reads a plan, anybody's, into the walks that a CPU backend follows, and refuses one that does not
// cover each walked row exactly once. What is computed follows from the walks alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "flashmla/status.hpp"
#include "problem/problem.hpp"

namespace flashmla::schedule {

// Blocks [block_begin, block_end) of one row, walked by one part; never empty, and never the row's
// only fragment.
struct Fragment {
  std::int32_t row;
  std::int32_t block_begin;
  std::int32_t block_end;
  std::int32_t part;
};

// What one part walks: rows [begin_row, end_row], from begin_block of the first up to, not
// including, end_block of the last; every row between them whole, but for empty ones that another
// part owns. end_block is clamped to the row.
struct Walk {
  std::int32_t begin_row;  // -1: the part has no work
  std::int32_t begin_block;
  std::int32_t end_row;
  std::int32_t end_block;
  // Index into Schedule::fragments of the part's share of begin_row and of end_row, where another
  // part shares that row; -1 where the row is walked whole or not at all. A part that shares a
  // single row has it in begin_fragment.
  std::int32_t begin_fragment;
  std::int32_t end_fragment;
};

// A plain value over memory of the workspace.
struct Schedule {
  std::span<const Walk> walks;          // one a part
  std::span<const Fragment> fragments;  // by row, then by block: neighbours of one row are merged
  // The part that walks a row whole, or -1. Others may name an empty row too: it is not theirs.
  std::span<const std::int32_t> owners;  // one a batch row
};

// What a plan asks for, before it is resolved.
struct Extent {
  std::int64_t num_fragments = 0;  // that resolve() will list: partial results that need memory
  std::int64_t num_row_walks = 0;  // rows that each part walks, wholly or in part, of all parts
};
Extent measure(const Problem& problem);

// Bytes that resolve() needs, given that count.
std::size_t resolve_bytes(const Problem& problem, std::int64_t num_fragments);

// `memory` is 8-byte aligned and at least resolve_bytes() long. Fails, naming part and row, when a
// part ends before it begins, a block is walked twice, or a row is walked in part only.
Result<Schedule> resolve(const Problem& problem, std::int64_t num_fragments, std::byte* memory);

// resolve() for its verdict alone, in memory of its own.
Status check_plan(const Problem& problem);

}  // namespace flashmla::schedule
