// The planner's rule: lengths and tile facts in, the plan's rows out. The host and the device
// planner are both written over these functions and agree byte for byte.
//
// Two ways to divide, of which a device's model may allow the first:
//
// An even plan gives every part that it uses the same number of rows, or cuts every row into the
// same number of shares, so that rows are cut as seldom as possible: every cut needs a merge. It is
// used where rows are so alike that no part has, besides its start, more than a block over the mean
// of the parts in use, and those are nearly all (see even_slack).
//
// Otherwise the line: in units of 1/8 block, row i costs
//     row_start_units + 8 * ceil(length_i / 64)
// and lies on a line at [offset_i, offset_i + cost_i), offset being the exclusive prefix sum of the
// costs. The line is cut at multiples of a payload; a cut inside a row moves up to the next block,
// one in the start of a row down to it, so that a part holds at most one block or empty row more
// than its share, and one row start. Everything about a row follows from its offset and length, and
// everything about a part from the row that its cut falls in: no part depends on another, so a
// device computes all of them at once.
//
// Units: std::int64_t, or, since a device divides 32 bits several times as fast, std::int32_t where
// all rows together cost less than 2^30 and neither the parts times the payload nor the parts times
// the blocks of a row reach 2^31.
#pragma once

#include <cstdint>

#include "problem/problem.hpp"
#include "schedule/divisor.hpp"
#include "tuning/plan.hpp"

namespace flashmla::schedule {

inline constexpr std::int32_t kUnitsPerBlock = 8;

using tuning::PlanModel;

// n / d for n >= 0 and d > 0.
FLASHMLA_HD constexpr std::int32_t quotient(std::int32_t n, std::int32_t d) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(n) / static_cast<std::uint32_t>(d));
}
FLASHMLA_HD constexpr std::int32_t quotient(std::int32_t n, const Divisor& d) {
  return d.quotient(n);
}
FLASHMLA_HD constexpr std::int64_t quotient(std::int64_t n, std::int64_t d) {
  return ((n | d) >> 32) == 0 ? static_cast<std::uint32_t>(n) / static_cast<std::uint32_t>(d)
                              : n / d;
}

// Blocks of the plan in a row of `length` tokens; a negative length counts as none.
FLASHMLA_HD constexpr std::int32_t blocks_of_length(std::int32_t length) {
  const std::uint32_t tokens = length > 0 ? static_cast<std::uint32_t>(length) : 0;
  return static_cast<std::int32_t>((tokens + kBlockTokens - 1) / kBlockTokens);
}

FLASHMLA_HD constexpr std::int64_t row_cost(std::int32_t blocks, std::int32_t row_start_units) {
  return row_start_units + std::int64_t{kUnitsPerBlock} * blocks;
}

// Units between two cuts: an equal share, and never less than the least that a part should have (a
// block at least: two cuts in one would leave a part empty).
template <class Units>
FLASHMLA_HD constexpr Units payload_units(Units total, std::int32_t num_parts,
                                          const PlanModel& model) {
  const Units share = quotient(total + num_parts - 1, Units{num_parts});
  const Units share_of_row = model.row_start_units + kUnitsPerBlock * model.least_blocks;
  const Units least = share_of_row > model.least_units ? share_of_row : model.least_units;
  return share > least ? share : least;
}

// --- The even plan -------------------------------------------------------------------------------

// How much more than the mean of all parts a part of an even plan may cost, besides its start.
FLASHMLA_HD constexpr std::int64_t even_slack(std::int64_t payload) {
  return payload / 32 > kUnitsPerBlock ? payload / 32 : kUnitsPerBlock;
}

// One of the first two is 1; rows_per_part 0: the plan is not even.
struct EvenPlan {
  std::int32_t rows_per_part = 0;
  Divisor shares_per_row{1};    // at most; short rows have fewer
  Divisor least_blocks{1};      // of a share of a row that is cut
  std::int32_t row_groups = 0;  // of rows_per_part rows, the last of fewer
};

FLASHMLA_HD constexpr std::int32_t shares_of_row(std::int32_t blocks, const EvenPlan& plan) {
  const std::int32_t worthwhile = plan.least_blocks.quotient(blocks);
  const std::int32_t most = plan.shares_per_row.divisor;
  return worthwhile < 1 ? 1 : worthwhile < most ? worthwhile : most;
}

// The even plan of so many rows, should they be alike.
constexpr EvenPlan even_plan_of_batch(std::int32_t batch, std::int32_t num_parts,
                                      const PlanModel& model) {
  if (!model.may_be_even || batch == 0) return {};
  const std::int32_t rows_per_part = (batch - 1) / num_parts + 1;
  return {rows_per_part, Divisor(batch < num_parts ? num_parts / batch : 1),
          Divisor(model.least_blocks), (batch - 1) / rows_per_part + 1};
}

// That plan if it is balanced. total: the cost of all rows; most_blocks: of the longest.
template <class Units>
FLASHMLA_HD constexpr EvenPlan if_balanced(const EvenPlan& plan, Units total,
                                           std::int32_t most_blocks, Units payload,
                                           const PlanModel& model) {
  if (plan.rows_per_part == 0) return {};
  const std::int32_t shares = shares_of_row(most_blocks, plan);
  const std::int32_t blocks = most_blocks == 0 ? 0 : quotient(most_blocks - 1, shares) + 1;
  // Without the start that every part has, which the line counts only where a row begins.
  const std::int64_t most =
      plan.rows_per_part * row_cost(blocks, model.row_start_units) - model.row_start_units;
  const std::int64_t all = total - std::int64_t{plan.row_groups} * model.row_start_units;
  const std::int64_t parts_in_use = std::int64_t{plan.row_groups} * shares;
  const bool is_balanced =
      most <= payload + even_slack(payload) && (most - kUnitsPerBlock) * parts_in_use <= all;
  return is_balanced ? plan : EvenPlan{};
}

// Writes a part of an even plan into fields[kPlanRowFields]. blocks_of(row) for row in [0, batch).
// Units hold the product of a row's blocks and the number of parts.
template <class Units, class BlocksOf>
FLASHMLA_HD void write_even_part(std::int32_t* fields, std::int32_t part, std::int32_t batch,
                                 const EvenPlan& plan, const BlocksOf& blocks_of) {
  for (std::int32_t field = 0; field < kPlanRowFields; ++field) fields[field] = 0;
  const std::int32_t group = plan.shares_per_row.quotient(part);
  const std::int64_t begin = std::int64_t{group} * plan.rows_per_part;
  fields[0] = -1;
  if (begin >= batch) return;
  const std::int32_t row = static_cast<std::int32_t>(begin);
  const std::int32_t last =
      batch - row < plan.rows_per_part ? batch - 1 : row + plan.rows_per_part - 1;
  const std::int32_t blocks = blocks_of(last);
  const std::int32_t shares = shares_of_row(blocks, plan);
  const std::int32_t share = part - group * plan.shares_per_row.divisor;
  if (share >= shares) return;
  fields[0] = row;
  fields[1] = static_cast<std::int32_t>(quotient(Units{blocks} * share, Units{shares}));
  fields[2] = last;
  fields[3] = static_cast<std::int32_t>(quotient(Units{blocks} * (share + 1), Units{shares}));
  fields[4] = share;
}

// --- The line: payload >= row_start_units + 8 ----------------------------------------------------

// The block of a row before which a cut falls, `inside` units after the row's offset
// (0 <= inside < cost). A result equal to the row's number of blocks means the start of the next
// row; an empty row is never cut, so inside > 0 means the next row there too.
template <class Units>
FLASHMLA_HD constexpr std::int32_t block_of_cut(Units inside, std::int32_t row_start_units) {
  if (inside <= row_start_units) return 0;
  return static_cast<std::int32_t>((inside - row_start_units + kUnitsPerBlock - 1) /
                                   kUnitsPerBlock);
}

// The lowest-numbered cut that falls after the first block of a row has begun, were the row
// endless. Cut k is the begin of part k, so the part before it is the one that walks the row's
// block 0.
template <class Units, class Payload>
FLASHMLA_HD constexpr Units first_inner_cut(Units offset, const Payload& payload,
                                            std::int32_t row_start_units) {
  return quotient(offset + row_start_units, payload) + 1;
}

// A place between two blocks: `block` blocks of `row` lie before it, and all of the rows before.
struct Cut {
  std::int32_t row;
  std::int32_t block;
  std::int32_t split;          // parts that walk blocks of `row` before this cut
  std::int32_t blocks_before;  // blocks of row - 1, which a part that ends here at block 0 walks
};

// Writes the part between two cuts into fields[kPlanRowFields].
FLASHMLA_HD inline void write_part(std::int32_t* fields, const Cut& begin, const Cut& end) {
  const bool is_empty = begin.row == end.row && begin.block == end.block;
  fields[0] = is_empty ? -1 : begin.row;
  fields[1] = is_empty ? 0 : begin.block;
  fields[2] = is_empty ? 0 : end.block > 0 ? end.row : end.row - 1;
  fields[3] = is_empty ? 0 : end.block > 0 ? end.block : end.blocks_before;
  fields[4] = is_empty ? 0 : begin.split;
  fields[5] = fields[6] = fields[7] = 0;
}

// How many parts walk blocks of a row (1 for an empty row). Cuts inside a row are at least a block
// apart because payload > kUnitsPerBlock, so each of them begins another split.
template <class Units, class Payload>
FLASHMLA_HD constexpr std::int32_t splits_of_row(Units offset, std::int32_t blocks,
                                                 const Payload& payload,
                                                 std::int32_t row_start_units) {
  const Units last =
      offset + row_start_units + Units{kUnitsPerBlock} * (blocks > 1 ? blocks - 1 : 0);
  return static_cast<std::int32_t>(quotient(last, payload) -
                                   first_inner_cut(offset, payload, row_start_units)) +
         2;
}

// The split number of part `part` in the row that it begins inside of (block > 0).
template <class Units>
FLASHMLA_HD constexpr std::int32_t split_of_part(std::int32_t part, Units offset, Units payload,
                                                 std::int32_t row_start_units) {
  return static_cast<std::int32_t>(part - first_inner_cut(offset, payload, row_start_units)) + 1;
}

// Writes the plan of the contract: plan_rows (num_parts, kPlanRowFields) and num_splits
// (batch + 1), both contiguous. Two passes over the rows, no memory of its own. num_parts >= 1.
void plan_on_host(const PlanProblem& problem, const PlanModel& model);

}  // namespace flashmla::schedule
