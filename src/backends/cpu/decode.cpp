#include "backends/cpu/decode.hpp"

#include <algorithm>
#include <atomic>
#include <string>

#include "backends/cpu/query_row.hpp"
#include "combine/merge.hpp"
#include "kv/scalar.hpp"

namespace flashmla::cpu {
namespace {

constexpr std::size_t kAlignment = 64;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Groups are as large as the kernel takes, since each reads the cache once more, but where a plan
// has too few rows to keep the threads busy they are cut smaller, down to what fills a tile. Where
// every walk is but a share of a row, so that parts have the same queries, groups are of 128 rows
// at most: a thread takes the same one of each part, and finds its queries and scratch in its cache
// (docs/performance/cpu.md). All but the last are of whole tiles.
WorkItems work_items(const Problem& problem, const DecodeKernel& kernel, std::int32_t row_tile,
                     std::int64_t num_row_walks, bool only_shares, std::int32_t num_threads) {
  constexpr std::int32_t kLeastRows = 16;
  constexpr std::int32_t kMostRowsOfShares = 128;
  static_assert(kMostRowsOfShares % kMostTileRows == 0);
  const std::int32_t rows = problem.query_rows();
  const std::int32_t most_rows =
      only_shares ? std::min(kMostRowsOfShares, kernel.max_query_rows) : kernel.max_query_rows;
  const std::int64_t others = std::max<std::int64_t>(1, num_row_walks * problem.num_heads_k);
  // Rounded down: an item more than there are threads would cost a second round.
  const std::int64_t threads_each = std::max<std::int64_t>(1, num_threads / others);
  const std::int32_t groups = std::max(
      (rows - 1) / most_rows + 1,
      static_cast<std::int32_t>(std::min<std::int64_t>(threads_each, (rows - 1) / kLeastRows + 1)));
  const auto rows_each = static_cast<std::int32_t>(round_up((rows - 1) / groups + 1, row_tile));
  // Without a walk there are none, of however many parts and heads.
  const std::int32_t parts = num_row_walks > 0 ? problem.num_parts : 0;
  return {parts, problem.num_heads_k, (rows - 1) / rows_each + 1, rows_each};
}

// One work item: the part's walk, for one key/value head and one group of query rows.
class ItemWalk {
 public:
  ItemWalk(const Problem& problem, const DecodeKernel& kernel, const schedule::Schedule& schedule,
           const WorkspaceLayout& layout, std::byte* workspace)
      : problem_(problem),
        kernel_(kernel),
        schedule_(schedule),
        items_(layout.items),
        partial_rows_(layout.partial_rows),
        partial_outs_(reinterpret_cast<float*>(workspace + layout.partial_outs)),
        partial_lses_(reinterpret_cast<float*>(workspace + layout.partial_lses)) {}

  std::int64_t count() const { return items_.count(); }

  // Walks rows of the item that no other thread has begun, `next_row` of them being begun.
  void run(std::int64_t item, std::atomic_ref<std::int32_t> next_row, std::byte* scratch) const {
    Task task;
    const std::int64_t group = item % items_.num_row_groups;
    task.kv_head = static_cast<std::int32_t>(item / items_.num_row_groups % items_.num_kv_heads);
    task.query_row_begin = static_cast<std::int32_t>(group * items_.rows_per_group);
    task.query_row_end =
        std::min(problem_.query_rows(), task.query_row_begin + items_.rows_per_group);
    const auto part = static_cast<std::int32_t>(item / items_.num_row_groups / items_.num_kv_heads);
    const schedule::Walk& walk = schedule_.walks[static_cast<std::size_t>(part)];
    if (walk.begin_row < 0) return;
    const std::int32_t rows = walk.end_row - walk.begin_row + 1;
    while (next_row.load(std::memory_order_relaxed) < rows) {
      const std::int32_t index = next_row.fetch_add(1, std::memory_order_relaxed);
      if (index < rows) run_row(part, walk.begin_row + index, task, scratch);
    }
  }

 private:
  // Tokens of a row up to where the walk ends.
  std::int32_t token_end(const schedule::Walk& walk, std::int32_t row) const {
    const std::int64_t length = problem_.row_length(row);
    return static_cast<std::int32_t>(
        row == walk.end_row ? std::min(length, std::int64_t{walk.end_block} * kBlockTokens)
                            : length);
  }

  void run_row(std::int32_t part, std::int32_t row, Task task, std::byte* scratch) const {
    const schedule::Walk& walk = schedule_.walks[static_cast<std::size_t>(part)];
    const std::int32_t length = problem_.row_length(row);
    const std::int32_t fragment = row == walk.begin_row ? walk.begin_fragment
                                  : row == walk.end_row ? walk.end_fragment
                                                        : -1;
    task.row = row;
    if (row < walk.end_row) {
      task.next_row = row + 1;
      task.next_token_end = token_end(walk, row + 1);
    }
    if (fragment >= 0) {
      const schedule::Fragment& share = schedule_.fragments[static_cast<std::size_t>(fragment)];
      task.token_begin = share.block_begin * kBlockTokens;
      task.token_end = static_cast<std::int32_t>(
          std::min<std::int64_t>(length, std::int64_t{share.block_end} * kBlockTokens));
      const std::int64_t first_row =
          (std::int64_t{fragment} * problem_.num_heads_k + task.kv_head) * partial_rows_ +
          task.query_row_begin;
      task.partial_out = partial_outs_ + first_row * problem_.head_dim_v;
      task.partial_lse = partial_lses_ + first_row;
      kernel_.decode(problem_, task, scratch);
      return;
    }
    // No fragment and not whole: the part has nothing of this row.
    if (schedule_.owners[static_cast<std::size_t>(row)] != part) return;
    task.token_begin = 0;
    task.token_end = length;
    kernel_.decode(problem_, task, scratch);
  }

  const Problem& problem_;
  const DecodeKernel& kernel_;
  const schedule::Schedule& schedule_;
  WorkItems items_;
  std::int64_t partial_rows_;
  float* partial_outs_;
  float* partial_lses_;
};

// Of the parts of a query row, `stride` elements apart, the lse becomes the weight: below 0 where a
// part is empty, but for the first one where all are, whose zeros are the result. Returns the lse
// of all.
float lses_to_weights(float* lses, std::int64_t stride, std::int64_t count) {
  const combine::MergeScale scale =
      combine::merge_scale(count, [&](std::int64_t i) { return lses[i * stride]; });
  for (std::int64_t i = 0; i < count; ++i) {
    float& lse = lses[i * stride];
    lse = combine::is_empty_part(lse) ? -1.0f : scale.weight(lse);
  }
  if (scale.sum == 0.0) lses[0] = 0.0f;
  return scale.merged_lse();
}

// Appends areas to a layout, each aligned, with the overflow remembered.
class Areas {
 public:
  std::size_t add(std::size_t count, std::size_t bytes_each) {
    std::size_t bytes = 0;
    overflow_ |= __builtin_mul_overflow(count, bytes_each, &bytes);
    overflow_ |= __builtin_add_overflow(bytes, kAlignment - 1, &bytes);
    const std::size_t begin = end_;
    overflow_ |= __builtin_add_overflow(end_, bytes / kAlignment * kAlignment, &end_);
    return begin;
  }
  std::size_t end() const { return end_; }
  bool overflow() const { return overflow_; }

 private:
  std::size_t end_ = 0;
  bool overflow_ = false;
};

template <class Element>
void merge_typed(const MergeProblem& problem, const Executor& executor) {
  const Element* outs = static_cast<const Element*>(problem.outs);
  Element* out = static_cast<Element*>(problem.out);
  const std::int64_t queries = std::int64_t{problem.batch} * problem.seq_len_q;
  const std::int64_t num_tasks =
      std::min<std::int64_t>(queries * problem.num_heads_q, executor.num_threads);
  executor.run(num_tasks, [&](std::int64_t task) {
    const std::int64_t total = queries * problem.num_heads_q;
    const std::int64_t end = total / num_tasks * (task + 1) + std::min(task + 1, total % num_tasks);
    const std::int64_t begin = total / num_tasks * task + std::min(task, total % num_tasks);
    for (std::int64_t index = begin; index < end; ++index) {
      const std::int64_t head = index % problem.num_heads_q;
      const std::int64_t t = index / problem.num_heads_q % problem.seq_len_q;
      const std::int64_t row = index / problem.num_heads_q / problem.seq_len_q;
      const std::int64_t* ls = problem.lses_strides;
      const std::int64_t* os = problem.outs_strides;
      const float* lse_first = problem.lses + row * ls[1] + head * ls[2] + t * ls[3];
      const Element* out_first = outs + row * os[1] + t * os[2] + head * os[3];
      problem.lse[row * problem.lse_strides[0] + head * problem.lse_strides[1] +
                  t * problem.lse_strides[2]] =
          combine::merge_row<Element>(
              problem.num_parts, [&](std::int64_t part) { return lse_first[part * ls[0]]; },
              [&](std::int64_t part) { return out_first + part * os[0]; }, problem.head_dim_v,
              out + row * problem.out_strides[0] + t * problem.out_strides[1] +
                  head * problem.out_strides[2]);
    }
  });
}

}  // namespace

Result<WorkspaceLayout> lay_out_workspace(const Problem& problem, const DecodeKernel& kernel,
                                          std::int32_t num_threads) {
  WorkspaceLayout layout;
  const schedule::Extent extent = schedule::measure(problem);
  layout.num_fragments = extent.num_fragments;
  // More than there are threads make no difference, nor an overflow.
  const std::int64_t row_walks = std::min<std::int64_t>(extent.num_row_walks, num_threads);
  const bool only_shares = extent.num_fragments == extent.num_row_walks;
  layout.row_tile = kernel.row_tile(problem);
  layout.partial_rows = round_up(problem.query_rows(), layout.row_tile);
  layout.items = work_items(problem, kernel, layout.row_tile, row_walks, only_shares, num_threads);
  layout.num_workers = static_cast<std::int32_t>(
      std::min<std::int64_t>(num_threads, row_walks * layout.items.per_part()));
  const auto fragments = static_cast<std::size_t>(layout.num_fragments);
  const std::size_t rows =
      static_cast<std::size_t>(problem.num_heads_k) * static_cast<std::size_t>(layout.partial_rows);
  std::size_t partials = 0;
  const bool too_many = __builtin_mul_overflow(fragments, rows, &partials);

  Areas areas;
  layout.schedule = areas.add(1, schedule::resolve_bytes(problem, layout.num_fragments));
  layout.next_rows =
      areas.add(static_cast<std::size_t>(layout.items.count()), sizeof(std::int32_t));
  layout.partial_outs =
      areas.add(partials, static_cast<std::size_t>(problem.head_dim_v) * sizeof(float));
  layout.partial_lses = areas.add(partials, sizeof(float));
  layout.scratch_stride =
      (kernel.scratch_bytes(problem) + kAlignment - 1) / kAlignment * kAlignment;
  layout.scratch = areas.add(static_cast<std::size_t>(layout.num_workers), layout.scratch_stride);
  layout.total_bytes = areas.end();
  if (too_many || areas.overflow() || layout.total_bytes > PTRDIFF_MAX) {
    return Status(StatusCode::kOutOfMemory, "the workspace of " +
                                                std::to_string(layout.num_fragments) +
                                                " partial results is larger than 64 bits count");
  }
  return layout;
}

void launch(const Problem& problem, const DecodeKernel& kernel, const schedule::Schedule& schedule,
            const WorkspaceLayout& layout, std::byte* workspace, const Executor& executor) {
  const ItemWalk walk(problem, kernel, schedule, layout, workspace);
  const std::int64_t count = walk.count();
  std::int32_t* next_rows = reinterpret_cast<std::int32_t*>(workspace + layout.next_rows);
  std::fill_n(next_rows, count, 0);
  std::atomic<std::int64_t> next{0};
  executor.run(layout.num_workers, [&](std::int64_t worker) {
    std::byte* scratch =
        workspace + layout.scratch + static_cast<std::size_t>(worker) * layout.scratch_stride;
    const auto run = [&](std::int64_t item) {
      walk.run(item, std::atomic_ref(next_rows[item]), scratch);
    };
    std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    for (; item < count; item = next.fetch_add(1, std::memory_order_relaxed)) run(item);
    // Threads are not equally fast: who is done takes rows that others have not begun.
    for (std::int64_t i = 0; i < count; ++i) run((worker + i) % count);
  });
}

void combine(const Problem& problem, const DecodeKernel& kernel, const schedule::Schedule& schedule,
             const WorkspaceLayout& layout, std::byte* workspace, const Executor& executor) {
  const std::span<const schedule::Fragment> fragments = schedule.fragments;
  if (fragments.empty()) return;
  const float* outs = reinterpret_cast<const float*>(workspace + layout.partial_outs);
  float* lses = reinterpret_cast<float*>(workspace + layout.partial_lses);
  const std::int64_t rows = std::int64_t{problem.num_heads_k} * problem.query_rows();
  const std::int64_t stride = problem.num_heads_k * layout.partial_rows;  // of fragments

  // Query rows [begin, end) of a tile of a key/value head, of the batch row whose fragments are
  // [first, first + count).
  const auto merge_rows = [&](std::size_t first, std::int64_t count, std::int32_t kv_head,
                              std::int32_t begin, std::int32_t end) {
    const std::int32_t row = fragments[first].row;
    const std::int32_t tile_row = begin % layout.row_tile;
    const std::int64_t base =
        static_cast<std::int64_t>(first) * stride + kv_head * layout.partial_rows + begin;
    float* weights = lses + base;
    void* results[kMostTileRows];
    for (std::int32_t i = 0; i < end - begin; ++i) {
      const QueryRow query = query_row(problem, kv_head, begin + i);
      lse_of(problem, row, query) = lses_to_weights(weights + i, stride, count);
      visit_float_dtype(problem.dtype, [&](auto element) {
        results[i] = out_of<decltype(element)>(problem, row, query);
      });
    }
    const Partials partials{outs + (base - tile_row) * problem.head_dim_v,
                            stride * problem.head_dim_v,
                            tile_row,
                            tile_row + end - begin,
                            weights,
                            stride,
                            count};
    kernel.merge(problem, partials, results);
  };
  const std::int64_t workers = std::min<std::int64_t>(layout.num_workers, rows);
  executor.run(workers, [&](std::int64_t worker) {
    // Neighbours in memory go to one worker.
    const std::int64_t begin = rows * worker / workers, end = rows * (worker + 1) / workers;
    for (std::size_t first = 0; first < fragments.size();) {
      std::size_t last = first;
      while (last < fragments.size() && fragments[last].row == fragments[first].row) ++last;
      const auto count = static_cast<std::int64_t>(last - first);
      for (std::int64_t r = begin; r < end;) {
        const auto head_row = static_cast<std::int32_t>(r % problem.query_rows());
        const std::int64_t tile_end = std::min<std::int64_t>(
            round_up(head_row + std::int64_t{1}, layout.row_tile), problem.query_rows());
        const auto num_rows = static_cast<std::int32_t>(std::min(tile_end - head_row, end - r));
        merge_rows(first, count, static_cast<std::int32_t>(r / problem.query_rows()), head_row,
                   head_row + num_rows);
        r += num_rows;
      }
      first = last;
    }
  });
}

void merge(const MergeProblem& problem, const Executor& executor) {
  if (problem.batch == 0 || problem.seq_len_q == 0 || problem.num_heads_q == 0) return;
  visit_float_dtype(problem.dtype,
                    [&](auto element) { merge_typed<decltype(element)>(problem, executor); });
}

}  // namespace flashmla::cpu
