// Every call from many threads at once. ThreadSanitizer runs these too, on executors of our own: it
// does not know the OpenMP runtime's synchronisation.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "support/calls.hpp"
#include "support/decode_case.hpp"
#include "support/executors.hpp"
#include "support/kernels.hpp"

namespace flashmla::testing {
namespace {

constexpr int kThreads = 8;

void on_threads(const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

DecodeShape small_shape(DType dtype, int thread) {
  DecodeShape shape;
  shape.dtype = dtype;
  shape.lengths = {200 + thread, 0, 65};
  shape.num_heads_q = 4;
  shape.seq_len_q = 2;
  shape.causal = true;
  shape.head_dim = 96;
  shape.head_dim_v = 64;
  return shape;
}

TEST(Threads, DecodeFromManyThreadsEachWithItsOwnExecutor) {
  for (const Kernel& kernel : usable_kernels()) {
    std::atomic<int> failures{0};
    on_threads([&](int thread) {
      DecodeCase call(small_shape(kernel.dtype, thread));
      call.plan(5);
      TestExecutor serial = serial_executor();
      if (call.run(kernel.name, serial.get()).status != FLASHMLA_OK) ++failures;
      const auto out = call.out.copy_bytes(), lse = call.lse.copy_bytes();
      TestExecutor threads = thread_executor(3);
      for (int round = 0; round < 3; ++round) {
        if (call.run(kernel.name, threads.get()).status != FLASHMLA_OK) ++failures;
        if (call.out.copy_bytes() != out || call.lse.copy_bytes() != lse) ++failures;
      }
    });
    EXPECT_EQ(failures, 0) << kernel.name;
  }
}

TEST(Threads, SharedInputsAndTheLibrarysOwnThreads) {
  // All threads read the same tensors and plan; each has its own outputs.
  DecodeCase shared(small_shape(DType::kBFloat16, 0));
  shared.plan(4);
  ASSERT_EQ(shared.run().status, FLASHMLA_OK);
  std::atomic<int> failures{0};
  on_threads([&](int) {
    const Array out(DType::kBFloat16, shared.out.shape(), kUnwritten);
    const Array lse(DType::kFloat32, shared.lse.shape(), kUnwritten);
    flashmla_decode_args args = shared.args();
    args.out = out.tensor();
    args.softmax_lse = lse.tensor();
    std::size_t bytes = 0;
    if (flashmla_decode_workspace_size(&args, 0, &bytes) != FLASHMLA_OK) ++failures;
    const GuardedMemory workspace((bytes + 63) / 64 * 64);
    for (int round = 0; round < 5; ++round) {
      if (flashmla_decode(&args, workspace.data(), bytes, nullptr) != FLASHMLA_OK) ++failures;
      if (out.copy_bytes() != shared.out.copy_bytes()) ++failures;
      if (lse.copy_bytes() != shared.lse.copy_bytes()) ++failures;
    }
  });
  EXPECT_EQ(failures, 0);
}

TEST(Threads, PlanMergeErrorsAndLists) {
  std::atomic<int> failures{0};
  on_threads([&](int thread) {
    for (int round = 0; round < 20; ++round) {
      const Array lengths = int32_array({3}, {1000 + thread, 0, 65});
      const Array rows(DType::kInt32, {thread + 1, 8}), splits(DType::kInt32, {4});
      flashmla_plan_args plan = plan_args(lengths, rows, splits);
      if (flashmla_plan(&plan) != FLASHMLA_OK) ++failures;

      plan.num_heads_k = -thread;
      if (flashmla_plan(&plan) != FLASHMLA_INVALID_ARGUMENT) ++failures;
      const std::string wanted = "num_heads_k is " + std::to_string(-thread);
      if (std::string(flashmla_last_error()).find(wanted) == std::string::npos) ++failures;

      Array outs(DType::kFloat32, {2, 1, 1, 2, 64}, std::byte{0}),
          lses(DType::kFloat32, {2, 1, 2, 1});
      for (std::int64_t h = 0; h < 2; ++h) {
        lses.set(thread, 0, 0, h, 0);
        lses.set(HUGE_VAL, 1, 0, h, 0);
        for (std::int64_t c = 0; c < 64; ++c) outs.set(thread + 0.5, 0, 0, 0, h, c);
      }
      const Array out(DType::kFloat32, {1, 1, 2, 64}), lse(DType::kFloat32, {1, 2, 1});
      const flashmla_merge_args merge = merge_args(outs, lses, out, lse);
      TestExecutor executor = thread_executor(2);
      if (flashmla_merge(&merge, executor.get()) != FLASHMLA_OK) ++failures;
      if (out.at(0, 0, 1, 63) != thread + 0.5 || lse.at(0, 1, 0) != thread) ++failures;

      if (usable_kernels().empty() || std::string(flashmla_cpu_features()).empty()) ++failures;
    }
  });
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace flashmla::testing
