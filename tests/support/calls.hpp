// Arguments of planning and merging calls over arrays.
#pragma once

#include <cstdint>

#include "flashmla/flashmla.h"
#include "support/array.hpp"

namespace flashmla::testing {

inline flashmla_plan_args plan_args(const Array& cache_seqlens, const Array& plan_rows,
                                    const Array& num_splits, std::int64_t num_heads_per_head_k = 16,
                                    std::int64_t num_heads_k = 1) {
  flashmla_plan_args args{};
  args.struct_size = sizeof(args);
  args.cache_seqlens = cache_seqlens.tensor();
  args.num_heads_per_head_k = num_heads_per_head_k;
  args.num_heads_k = num_heads_k;
  args.tile_scheduler_metadata = plan_rows.tensor();
  args.num_splits = num_splits.tensor();
  return args;
}

inline flashmla_merge_args merge_args(const Array& outs, const Array& lses, const Array& out,
                                      const Array& lse) {
  flashmla_merge_args args{};
  args.struct_size = sizeof(args);
  args.outs = outs.tensor();
  args.lses = lses.tensor();
  args.out = out.tensor();
  args.lse = lse.tensor();
  return args;
}

}  // namespace flashmla::testing
