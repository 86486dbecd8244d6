#include "schedule/resolve.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/planner.hpp"

namespace flashmla::schedule {
namespace {

constexpr std::int32_t kNoOwner = -1;

std::int32_t row_blocks(const Problem& problem, std::int32_t row) {
  return blocks_of_length(problem.row_length(row));
}

// A part's fields with its end clamped to the batch and to the row. begin_row -1: no work.
Walk read_walk(const Problem& problem, std::int32_t part) {
  const std::int32_t* fields = problem.plan_rows + part * problem.plan_row_stride;
  Walk walk{fields[0], fields[1], fields[2], fields[3], -1, -1};
  if (walk.begin_row < 0 || walk.begin_row >= problem.batch) {
    walk.begin_row = -1;
    return walk;
  }
  if (walk.end_row >= problem.batch) {
    walk.end_row = problem.batch - 1;
    walk.end_block = row_blocks(problem, walk.end_row);
  } else if (walk.end_row >= walk.begin_row) {
    walk.end_block = std::min(walk.end_block, row_blocks(problem, walk.end_row));
  }
  return walk;
}

// A walk's blocks of its first or last row.
struct Share {
  std::int32_t block_begin;
  std::int32_t block_end;
  bool whole;  // all blocks of the row, of which there may be none

  bool is_fragment() const { return !whole && block_begin < block_end; }
};

Share share_of_row(const Problem& problem, const Walk& walk, std::int32_t row) {
  const std::int32_t blocks = row_blocks(problem, row);
  const std::int32_t begin = row == walk.begin_row ? walk.begin_block : 0;
  const std::int32_t end = row == walk.end_row ? walk.end_block : blocks;
  return {begin, end, begin == 0 && end == blocks};
}

// Judged on the fields as given: clamping to a row that has become shorter is no fault.
bool is_malformed(const Problem& problem, std::int32_t part) {
  const std::int32_t* fields = problem.plan_rows + part * problem.plan_row_stride;
  return fields[1] < 0 || fields[3] < 0 || fields[2] < fields[0] ||
         (fields[2] == fields[0] && fields[3] < fields[1]);
}

std::string part_name(std::int32_t part) {
  return "tile_scheduler_metadata[" + std::to_string(part) + "]";
}

Status walked_twice(std::int32_t part, std::int32_t row) {
  return Status::invalid_argument(
      part_name(part) + " walks blocks of row " + std::to_string(row) +
      " that another part walks too; a plan must cover the blocks of a row exactly once");
}

Status left_out(std::int32_t row, std::int32_t begin, std::int32_t end) {
  return Status::invalid_argument(
      "tile_scheduler_metadata leaves out blocks " + std::to_string(begin) + " to " +
      std::to_string(end - 1) + " of row " + std::to_string(row) +
      "; a plan must cover the blocks of a row exactly once (was it made for other "
      "cache_seqlens?)");
}

// Makes the part the owner of the rows that it walks whole. An empty row has no blocks, so several
// parts may name it: it stays with the first of them that is read, lest two threads write its
// results at once.
Status claim_whole_rows(const Walk& walk, std::int32_t part, const Problem& problem,
                        std::int32_t* owners) {
  for (std::int32_t row = walk.begin_row; row <= walk.end_row; ++row) {
    if (!share_of_row(problem, walk, row).whole) continue;
    if (owners[row] == kNoOwner) {
      owners[row] = part;
    } else if (row_blocks(problem, row) > 0) {
      return walked_twice(part, row);
    }
  }
  return {};
}

// Neighbouring fragments of a row meet, the first begins at block 0 and the last ends the row.
Status check_coverage(const Problem& problem, std::span<const Fragment> fragments,
                      const std::int32_t* owners) {
  for (std::size_t i = 0; i < fragments.size();) {
    const std::int32_t row = fragments[i].row;
    std::int32_t covered = 0;
    for (; i < fragments.size() && fragments[i].row == row; ++i) {
      const Fragment& fragment = fragments[i];
      if (owners[row] != kNoOwner || fragment.block_begin < covered) {
        return walked_twice(fragment.part, row);
      }
      if (fragment.block_begin > covered) return left_out(row, covered, fragment.block_begin);
      covered = fragment.block_end;
    }
    const std::int32_t blocks = row_blocks(problem, row);
    if (covered < blocks) return left_out(row, covered, blocks);
  }
  return {};
}

}  // namespace

Extent measure(const Problem& problem) {
  Extent extent;
  for (std::int32_t part = 0; part < problem.num_parts; ++part) {
    const Walk walk = read_walk(problem, part);
    if (walk.begin_row < 0 || is_malformed(problem, part)) continue;
    extent.num_row_walks += std::int64_t{walk.end_row} - walk.begin_row + 1;
    extent.num_fragments += share_of_row(problem, walk, walk.begin_row).is_fragment();
    if (walk.end_row != walk.begin_row) {
      extent.num_fragments += share_of_row(problem, walk, walk.end_row).is_fragment();
    }
  }
  return extent;
}

std::size_t resolve_bytes(const Problem& problem, std::int64_t num_fragments) {
  return static_cast<std::size_t>(problem.num_parts) * sizeof(Walk) +
         static_cast<std::size_t>(num_fragments) * sizeof(Fragment) +
         static_cast<std::size_t>(problem.batch) * sizeof(std::int32_t);
}

Result<Schedule> resolve(const Problem& problem, std::int64_t num_fragments, std::byte* memory) {
  Walk* walks = reinterpret_cast<Walk*>(memory);
  Fragment* fragments = reinterpret_cast<Fragment*>(walks + problem.num_parts);
  std::int32_t* owners = reinterpret_cast<std::int32_t*>(fragments + num_fragments);
  std::fill_n(owners, problem.batch, kNoOwner);

  std::int64_t found = 0;
  const auto add_fragment = [&](const Walk& walk, std::int32_t part, std::int32_t row) {
    const Share share = share_of_row(problem, walk, row);
    if (!share.is_fragment()) return true;
    if (found == num_fragments) return false;
    fragments[found++] = {row, share.block_begin, share.block_end, part};
    return true;
  };
  for (std::int32_t part = 0; part < problem.num_parts; ++part) {
    Walk& walk = walks[part] = read_walk(problem, part);
    if (walk.begin_row < 0) continue;
    if (is_malformed(problem, part)) {
      const std::int32_t* fields = problem.plan_rows + part * problem.plan_row_stride;
      return Status::invalid_argument(
          part_name(part) + " walks from (row " + std::to_string(fields[0]) + ", block " +
          std::to_string(fields[1]) + ") to (row " + std::to_string(fields[2]) + ", block " +
          std::to_string(fields[3]) +
          "); a part must not end before it begins, and blocks count from 0");
    }
    if (Status status = claim_whole_rows(walk, part, problem, owners); !status.ok()) return status;
    if (!add_fragment(walk, part, walk.begin_row) ||
        (walk.end_row != walk.begin_row && !add_fragment(walk, part, walk.end_row))) {
      return Status::invalid_argument(
          "tile_scheduler_metadata changed while it was read; it must not be written during a "
          "call");
    }
  }

  const std::span<Fragment> listed(fragments, static_cast<std::size_t>(found));
  std::sort(listed.begin(), listed.end(), [](const Fragment& a, const Fragment& b) {
    return a.row != b.row ? a.row < b.row : a.block_begin < b.block_begin;
  });
  if (Status status = check_coverage(problem, listed, owners); !status.ok()) return status;

  for (std::int32_t index = 0; index < static_cast<std::int32_t>(found); ++index) {
    Walk& walk = walks[listed[index].part];
    (listed[index].row == walk.begin_row ? walk.begin_fragment : walk.end_fragment) = index;
  }
  return Schedule{{walks, static_cast<std::size_t>(problem.num_parts)},
                  listed,
                  {owners, static_cast<std::size_t>(problem.batch)}};
}

Status check_plan(const Problem& problem) {
  const std::int64_t num_fragments = measure(problem).num_fragments;
  std::vector<std::byte> memory(resolve_bytes(problem, num_fragments));
  const Result<Schedule> schedule = resolve(problem, num_fragments, memory.data());
  return schedule.ok() ? Status() : schedule.status();
}

}  // namespace flashmla::schedule
