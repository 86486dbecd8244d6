// A part's walk as the sequence of things that an attention kernel loads.
#pragma once

#include <cstdint>

#include "backends/cuda/common/walk.cuh"

namespace flashmla::cuda {

// A step of a part's walk.
struct Entry {
  enum Kind : std::int16_t { kTile, kQuery, kEmptyRow, kEnd };
  Kind kind;
  std::int16_t detail;  // tile: flags, of its share; query: slot of the partials, -1: whole
  std::int32_t row;
  std::int32_t block;      // tile: of the row; query: the first of its tiles
  std::int32_t end_block;  // query: past its last tile
  std::int32_t length;     // of the row

  static constexpr std::int16_t kFirst = 1;
  static constexpr std::int16_t kLast = 2;
};

// Where a part's walk stands.
struct EntryWalk {
  std::int32_t row, length;
  std::int32_t begin_block;  // at which the row's share begins
  std::int32_t end_row, last_end_block;
  std::int32_t block, end_block;  // the row's tiles still to come; none: equal
  std::int32_t slot;              // of the next fragment's partials
};

// Lists, in order: for each row that the part walks, its queries, then its tiles; an entry without
// data for an empty row; the end, again and again.
//
// expected_row: the row, of those that there are, that the part probably begins with. Its length is
// asked for together with the part, and both before meanwhile() runs.
template <class Meanwhile>
__device__ __forceinline__ void begin_walk(EntryWalk& walk, const CallShape& shape,
                                           std::int32_t part_index, std::int32_t expected_row,
                                           const Meanwhile& meanwhile) {
  const std::int32_t expected_length = row_length(shape, expected_row);
  const Part part = read_part(shape, part_index);
  meanwhile();
  walk.row = part.begin_row;
  walk.begin_block = max(part.begin_block, 0);
  walk.end_row = part.end_row;
  walk.last_end_block = part.end_block;
  walk.length = part.begin_row > part.end_row    ? 0
                : part.begin_row == expected_row ? expected_length
                                                 : row_length(shape, part.begin_row);
  walk.block = walk.end_block = 0;
  walk.slot = 2 * part_index;
}

__device__ __forceinline__ void begin_walk(EntryWalk& walk, const CallShape& shape,
                                           std::int32_t part_index) {
  begin_walk(walk, shape, part_index, 0, [] {});
}

__device__ __forceinline__ void step_row(EntryWalk& walk, const CallShape& shape) {
  const std::int32_t row = ++walk.row;
  walk.begin_block = 0;
  walk.slot |= 1;
  if (row <= walk.end_row) walk.length = row_length(shape, row);
}

__device__ __forceinline__ Entry next_entry(EntryWalk& walk, const CallShape& shape) {
  const std::int32_t block = walk.block;
  if (block < walk.end_block) {
    Entry entry{Entry::kTile,
                static_cast<std::int16_t>(block == walk.begin_block ? Entry::kFirst : 0),
                walk.row,
                block,
                0,
                walk.length};
    walk.block = block + 1;
    if (block + 1 == walk.end_block) {
      entry.detail |= Entry::kLast;
      step_row(walk, shape);
    }
    return entry;
  }
  while (walk.row <= walk.end_row) {
    const std::int32_t row = walk.row;
    const Part part{row, walk.begin_block, walk.end_row, walk.last_end_block};
    const Share share = share_of_row(part, row, walk.length);
    if (share.begin_block < share.end_block) {
      walk.block = share.begin_block;
      walk.end_block = share.end_block;
      return {Entry::kQuery,
              static_cast<std::int16_t>(share.is_whole() ? -1 : walk.slot),
              row,
              share.begin_block,
              share.end_block,
              walk.length};
    }
    step_row(walk, shape);
    if (share.is_whole()) return {Entry::kEmptyRow, 0, row, 0, 0, 0};
  }
  return {Entry::kEnd, 0, 0, 0, 0, 0};
}

// Leaves out the tiles of the queries that next_entry() has just given, for who counts them
// himself.
__device__ __forceinline__ void skip_tiles(EntryWalk& walk, const CallShape& shape) {
  walk.block = walk.end_block;
  step_row(walk, shape);
}

}  // namespace flashmla::cuda
