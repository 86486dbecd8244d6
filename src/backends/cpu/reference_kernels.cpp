// The reference as the last candidate of the selection: any instruction set, any dtype.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

#include "backends/cpu/kernels.hpp"
#include "backends/cpu/query_row.hpp"
#include "backends/reference/attention.hpp"

namespace flashmla::cpu {
namespace {

// A finite double that float does not hold becomes the largest float: infinity means no tokens.
float lse_to_float(double lse) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::isinf(lse) ? lse : std::clamp(lse, -kLargest, kLargest));
}

std::size_t scratch_bytes(const Problem& problem) {
  return static_cast<std::size_t>(problem.head_dim_v) * sizeof(double);
}

template <class Element>
void decode(const Problem& problem, const Task& task, std::byte* scratch) {
  double* sums = new (scratch) double[static_cast<std::size_t>(problem.head_dim_v)];
  for (std::int32_t r = task.query_row_begin; r < task.query_row_end; ++r) {
    const QueryRow query = query_row(problem, task.kv_head, r);
    const std::int32_t end =
        std::min(task.token_end, problem.visible_tokens(task.row, query.token));
    const double lse = reference::attend(
        problem, q_of<Element>(problem, task.row, query), task.token_begin, end,
        [&](std::int32_t token) {
          return cached_token<Element>(problem, task.row, task.kv_head, token);
        },
        sums);
    const std::int64_t index = r - task.query_row_begin;
    const auto write = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      for (std::int32_t c = 0; c < problem.head_dim_v; ++c) {
        out[c] = from_float<Out>(static_cast<float>(sums[c]));
      }
    };
    if (task.partial_out != nullptr) {
      write(task.partial_out + index * problem.head_dim_v);
      task.partial_lse[index] = lse_to_float(lse);
    } else {
      write(out_of<Element>(problem, task.row, query));
      lse_of(problem, task.row, query) = lse_to_float(lse);
    }
  }
}

// A row tile is one row, in order.
template <class Element>
void merge(const Problem& problem, const Partials& partials, void* const* outs) {
  for (std::int32_t c = 0; c < problem.head_dim_v; ++c) {
    double sum = -0.0;
    double largest = 0.0;  // in magnitude, past which rounding must not carry the mean
    for (std::int64_t i = 0; i < partials.count; ++i) {
      const double weight = static_cast<double>(partials.weights[i * partials.weight_stride]);
      if (weight < 0.0) continue;
      const double value = static_cast<double>(partials.outs[i * partials.out_stride + c]);
      sum += weight * value;
      largest = std::max(largest, std::abs(value));
    }
    sum = std::max(std::min(sum, largest), -largest);
    static_cast<Element*>(outs[0])[c] = from_float<Element>(static_cast<float>(sum));
  }
}

constexpr std::int32_t kMaxQueryRows = 64;
static_assert(kMaxQueryRows % kMostTileRows == 0);

std::int32_t row_tile(const Problem&) {
  return 1;
}

}  // namespace

const DecodeKernel kReferenceBf16{kMaxQueryRows, row_tile, scratch_bytes, decode<BFloat16>,
                                  merge<BFloat16>};
const DecodeKernel kReferenceFp16{kMaxQueryRows, row_tile, scratch_bytes, decode<Float16>,
                                  merge<Float16>};
const DecodeKernel kReferenceFp32{kMaxQueryRows, row_tile, scratch_bytes, decode<float>,
                                  merge<float>};

}  // namespace flashmla::cpu
