// The C++ interface over the C ABI.
#include "flashmla/flashmla.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "support/decode_case.hpp"

// A sanitizer reads these; without one nobody does. Asking for more memory than there is must fail
// as it does elsewhere.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace flashmla::testing {
namespace {

struct Call {
  std::vector<float> q = std::vector<float>(2 * 4 * 64);
  std::vector<float> k_cache = std::vector<float>(5 * 16 * 64);
  std::vector<std::int32_t> block_table = {4, 1, 3, 0, -1, -1};
  std::array<std::int32_t, 2> cache_seqlens = {40, 7};
  std::vector<float> out = std::vector<float>(2 * 4 * 64, 9.0f);
  std::vector<float> lse = std::vector<float>(2 * 4, 9.0f);
  Plan plan = flashmla::plan(cache_seqlens, 4, 1, 2);

  // Token j of row i is i + j in its first channel; a query scores it by that times log 2.
  Call() {
    for (std::size_t query = 0; query < 8; ++query) q[query * 64] = std::log(2.0f);
    for (std::int32_t i = 0; i < 2; ++i) {
      for (std::int32_t j = 0; j < cache_seqlens[i]; ++j) {
        k_cache[(block_table[i * 3 + j / 16] * 16 + j % 16) * 64] = static_cast<float>(j % 3 + i);
      }
    }
  }
  DecodeArguments arguments() {
    DecodeArguments arguments;
    arguments.q = view(q, {2, 1, 4, 64});
    arguments.k_cache = view(k_cache, {5, 16, 1, 64});
    arguments.block_table = view(block_table, {2, 3});
    arguments.cache_seqlens = view(cache_seqlens, {2});
    arguments.out = view(out, {2, 1, 4, 64});
    arguments.softmax_lse = view(lse, {2, 4, 1});
    arguments.head_dim_v = 64;
    arguments.softmax_scale = 1.0;
    arguments.use(plan);
    return arguments;
  }
  // log(sum of 2^value), and the mean of the values under those weights.
  std::pair<double, double> expected(int i) const {
    double sum = 0, weighted = 0;
    for (std::int32_t j = 0; j < cache_seqlens[i]; ++j) {
      const int value = j % 3 + i;
      sum += std::exp2(value);
      weighted += value * std::exp2(value);
    }
    return {std::log(sum), weighted / sum};
  }
};

void expect_result(const Call& call) {
  for (int i = 0; i < 2; ++i) {
    const auto [lse, mean] = call.expected(i);
    for (int h = 0; h < 4; ++h) {
      EXPECT_NEAR(call.lse[i * 4 + h], lse, 1e-5);
      EXPECT_NEAR(call.out[(i * 4 + h) * 64], mean, 1e-5);
      EXPECT_EQ(call.out[(i * 4 + h) * 64 + 63], 0.0f);
    }
  }
}

template <class Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(StatusCode::kOk, "");
}

TEST(CppApi, DecodesWithAWorkspaceThatGrows) {
  Call call;
  Workspace workspace;
  decode(call.arguments(), workspace);
  expect_result(call);
  const std::size_t bytes = workspace.size_bytes();
  decode(call.arguments(), workspace);
  EXPECT_EQ(workspace.size_bytes(), bytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.reserve(1)) % Workspace::kAlignment, 0u);
}

TEST(CppApi, AWorkspaceThatWasMovedFromMayBeUsedAgain) {
  Call call;
  Workspace first;
  flashmla::decode(call.arguments(), first);
  const std::size_t bytes = first.size_bytes();
  Workspace second = std::move(first);
  EXPECT_EQ(second.size_bytes(), bytes);
  EXPECT_EQ(first.size_bytes(), 0u);
  flashmla::decode(call.arguments(), first);
  flashmla::decode(call.arguments(), second);
  first = std::move(second);
  EXPECT_EQ(second.size_bytes(), 0u);
  flashmla::decode(call.arguments(), second);
  flashmla::decode(call.arguments(), first);
}

template <class ParallelFor>
concept MakesExecutor = requires(ParallelFor&& parallel_for) {
  make_executor(std::forward<ParallelFor>(parallel_for), 1);
};
template <class Values>
concept IsViewed = requires(Values&& values) {
  view(std::forward<Values>(values), {1});
  view(std::forward<Values>(values), DType::kFloat32, {1});
};
template <class PlanType>
concept IsUsed = requires(DecodeArguments& arguments, PlanType&& plan) {
  arguments.use(std::forward<PlanType>(plan));
};

TEST(CppApi, BorrowsNoTemporaries) {
  struct Loop {};
  EXPECT_TRUE(MakesExecutor<Loop&>);
  EXPECT_TRUE(MakesExecutor<const Loop&>);
  EXPECT_FALSE(MakesExecutor<Loop>);
  EXPECT_TRUE(IsUsed<Plan&>);
  EXPECT_TRUE(IsUsed<const Plan&>);
  EXPECT_FALSE(IsUsed<Plan>);
  EXPECT_TRUE(IsViewed<std::vector<float>&>);
  EXPECT_TRUE((IsViewed<const std::array<float, 3>&>));
  EXPECT_TRUE(IsViewed<float(&)[3]>);
  EXPECT_TRUE(IsViewed<std::span<const float>>);
  EXPECT_FALSE(IsViewed<std::vector<float>>);
  EXPECT_FALSE((IsViewed<std::array<float, 3>>));
}

TEST(CppApi, DecodesOnACallersExecutor) {
  Call call;
  std::int64_t calls = 0;
  const auto backwards = [&](std::int64_t count, const auto& body) {
    for (std::int64_t i = count; i-- > 0;) {
      ++calls;
      body(i);
    }
  };
  const flashmla_executor executor = make_executor(backwards, 3);
  Workspace workspace;
  decode(call.arguments(), workspace, &executor);
  EXPECT_GT(calls, 0);
  expect_result(call);
}

TEST(CppApi, PlanByHandAndItsFields) {
  Call call;
  call.plan = Plan(2, 2);
  const std::int32_t fields[] = {0, 0, 1, 1};
  std::copy_n(fields, 4, call.plan.part(1).begin());
  call.plan.part(0)[0] = -1;
  const Plan& plan = call.plan;
  EXPECT_EQ(plan.num_parts(), 2);
  EXPECT_EQ(plan.batch(), 2);
  EXPECT_EQ(plan.part(0)[0], -1);
  EXPECT_TRUE(std::ranges::equal(plan.part(1).first<4>(), fields));
  Workspace workspace;
  decode(call.arguments(), workspace);
  expect_result(call);
}

TEST(CppApi, PlanOfAnImpossibleSize) {
  struct Size {
    std::int32_t num_parts;
    std::int64_t batch;
    const char* wrong;
  };
  for (const Size& size :
       {Size{-1, 2, "num_parts"}, Size{2, -1, "batch"}, Size{2, std::int64_t{1} << 31, "batch"}}) {
    const Error error = error_of([&] { Plan(size.num_parts, size.batch); });
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(std::string(error.what()).find(size.wrong), 0u) << error.what();
  }
}

TEST(CppApi, ThrowsTheStatusAndTheMessage) {
  Call call;
  Workspace workspace;
  DecodeArguments arguments = call.arguments();
  arguments.head_dim_v = 65;
  const Error error = error_of([&] { decode(arguments, workspace); });
  EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("(64, 65)"), std::string::npos);
  EXPECT_EQ(call.out[0], 9.0f);

  arguments = call.arguments();
  arguments.device.type = DeviceType::kCuda;
  EXPECT_NE(
      std::string(error_of([&] { decode(arguments, workspace); }).what()).find("is host memory"),
      std::string::npos);

  arguments = call.arguments();
  arguments.kernel = "cpu_reference_bf16";
  EXPECT_EQ(error_of([&] { decode(arguments, workspace); }).code(), StatusCode::kUnsupported);
  const std::int32_t negative[] = {5, -1};
  EXPECT_NE(std::string(error_of([&] { plan(negative, 1, 1); }).what()).find("cache_seqlens[1]"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { plan(negative, 0, 1); }).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { merge({}); }).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { workspace.reserve(std::size_t{1} << 62); }).code(),
            StatusCode::kOutOfMemory);
}

TEST(CppApi, ViewsKnowTheirMemory) {
  const std::vector<float> values(24);
  const TensorView tensor = view(values, {2, 3, 4});
  EXPECT_EQ(tensor.dtype, DType::kFloat32);
  EXPECT_EQ(tensor.strides[0], 12);
  EXPECT_EQ(tensor.strides[2], 1);
  EXPECT_EQ(tensor.size_bytes, 96u);
  EXPECT_EQ(view(values, {2, 3}, {12, 4}).strides[1], 4);
  const std::vector<std::uint16_t> halves(8);
  EXPECT_EQ(view(halves, DType::kBFloat16, {8}).size_bytes, 16u);

  error_of([&] { (void)view(values, {1, 1, 1, 1, 1, 1}); });
  error_of([&] { (void)view(values, {2, 3}, {1}); });
  error_of([&] { (void)view(std::span<const float>(), {2}); });
  error_of([&] { (void)view(values, {INT64_MAX, INT64_MAX, 2}); });

  // A shape larger than its memory is the library's error.
  Call call;
  Workspace workspace;
  DecodeArguments arguments = call.arguments();
  arguments.out = view(call.lse, {2, 1, 4, 64});
  EXPECT_NE(std::string(error_of([&] { decode(arguments, workspace); }).what()).find("out with"),
            std::string::npos);
}

TEST(CppApi, Merges) {
  const std::vector<float> outs = {1.0f, 3.0f}, lses = {0.0f, std::log(3.0f)};
  std::vector<float> out(1), lse(1);
  MergeArguments arguments;
  arguments.outs = view(outs, {2, 1, 1, 1, 1});
  arguments.lses = view(lses, {2, 1, 1, 1});
  arguments.out = view(out, {1, 1, 1, 1});
  arguments.lse = view(lse, {1, 1, 1});
  merge(arguments);
  EXPECT_NEAR(out[0], 2.5, 1e-6);
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-6);
}

TEST(CppApi, TellsAboutItself) {
  EXPECT_EQ(version(), FLASHMLA_VERSION_STRING);
  EXPECT_EQ(cpu_features(), flashmla_cpu_features());
  EXPECT_EQ(kernels().size(), static_cast<std::size_t>(flashmla_num_kernels()));
  Call call;
  DecodeArguments arguments = call.arguments();
  arguments.kernel = "cpu_reference_fp32";
  const Selection selection = explain_selection(arguments);
  EXPECT_EQ(selection.kernel, "cpu_reference_fp32");
  EXPECT_NE(selection.report.find("cpu_portable_bf16: "), std::string::npos);
}

}  // namespace
}  // namespace flashmla::testing
