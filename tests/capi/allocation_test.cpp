// What calls allocate: nothing, once they are right.
#include <gtest/gtest.h>

#include "support/allocations.hpp"
#include "support/calls.hpp"
#include "support/decode_case.hpp"
#include "support/kernels.hpp"

namespace flashmla::testing {
namespace {

template <class Call>
int allocations_of(const Call& call) {
  count_allocations();
  call();
  return stop_counting();
}

TEST(Allocation, IsCounted) {
  flashmla_decode_args args{};  // refused, in a message
  EXPECT_GT(allocations_of([&] { flashmla_decode(&args, nullptr, 0, nullptr); }), 0);
}

TEST(Allocation, DecodeNeedsNoneWithAnyKernel) {
  for (const Kernel& kernel : usable_kernels()) {
    DecodeShape shape;
    shape.dtype = kernel.dtype;
    shape.lengths = {200, 0, 65, 300};
    shape.seq_len_q = 2;
    shape.num_heads_q = 20;
    shape.causal = true;
    DecodeCase call(shape);
    call.plan(3);
    flashmla_decode_args args = call.args();
    for (const char* name : {kernel.name.c_str(), static_cast<const char*>(nullptr)}) {
      args.kernel = name;  // null: the fastest is looked for
      std::size_t bytes = 0;
      flashmla_status status = FLASHMLA_INTERNAL;
      EXPECT_EQ(allocations_of([&] { status = flashmla_decode_workspace_size(&args, 2, &bytes); }),
                0)
          << kernel.name;
      ASSERT_EQ(status, FLASHMLA_OK) << flashmla_last_error();
      const GuardedMemory workspace((bytes + 63) / 64 * 64);
      flashmla_executor executor{};
      executor.struct_size = sizeof(executor);
      executor.num_threads = 2;
      executor.parallel_for = [](void*, std::int64_t count, void (*body)(void*, std::int64_t),
                                 void* data) {
        for (std::int64_t i = 0; i < count; ++i) body(data, i);
      };
      const auto decode = [&] {
        status = flashmla_decode(&args, workspace.data(), bytes, &executor);
      };
      EXPECT_EQ(allocations_of(decode), 0) << kernel.name;
      EXPECT_EQ(status, FLASHMLA_OK) << flashmla_last_error();
    }
  }
}

TEST(Allocation, PlanAndMergeNeedNone) {
  const Array lengths = int32_array({3}, {130, 0, 65});
  const Array rows(DType::kInt32, {4, 8}), splits(DType::kInt32, {4});
  const flashmla_plan_args plan = plan_args(lengths, rows, splits);
  flashmla_status status = FLASHMLA_INTERNAL;
  EXPECT_EQ(allocations_of([&] { status = flashmla_plan(&plan); }), 0);
  EXPECT_EQ(status, FLASHMLA_OK) << flashmla_last_error();

  const Array outs(DType::kFloat16, {2, 3, 1, 4, 64}), lses(DType::kFloat32, {2, 3, 4, 1});
  const Array out(DType::kFloat16, {3, 1, 4, 64}), lse(DType::kFloat32, {3, 4, 1});
  const flashmla_merge_args merge = merge_args(outs, lses, out, lse);
  EXPECT_EQ(allocations_of([&] { status = flashmla_merge(&merge, nullptr); }), 0);
  EXPECT_EQ(status, FLASHMLA_OK) << flashmla_last_error();
}

}  // namespace
}  // namespace flashmla::testing
