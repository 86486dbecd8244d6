// The conventions of the C ABI: sizes of structs, texts, the list of kernels, selection.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "support/compare.hpp"
#include "support/decode_case.hpp"
#include "support/kernels.hpp"
#include "support/oracle.hpp"

namespace flashmla::testing {
namespace {

// Sets FLASHMLA_ISA for a scope.
class ScopedIsa {
 public:
  explicit ScopedIsa(const char* value) {
    if (const char* before = std::getenv("FLASHMLA_ISA")) before_ = before;
    setenv("FLASHMLA_ISA", value, 1);
  }
  ~ScopedIsa() {
    if (before_.empty()) {
      unsetenv("FLASHMLA_ISA");
    } else {
      setenv("FLASHMLA_ISA", before_.c_str(), 1);
    }
  }

 private:
  std::string before_;
};

TEST(Abi, VersionIsThatOfTheHeader) {
  EXPECT_STREQ(flashmla_version(), FLASHMLA_VERSION_STRING);
}

TEST(Abi, CpuIsSupportedAndCudaSaysWhyNot) {
  EXPECT_EQ(flashmla_device_supported(FLASHMLA_CPU, 0), FLASHMLA_OK);
  if (flashmla_device_supported(FLASHMLA_CUDA, 0) != FLASHMLA_OK) {
    EXPECT_NE(std::strlen(flashmla_last_error()), 0u);
  }
}

TEST(Abi, ADeviceThatThereIsNoNameForIsNamed) {
  std::int32_t parts = 0;
  EXPECT_EQ(flashmla_device_supported(7, 0), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flashmla_last_error()).find("device type is 7"), std::string::npos);
  EXPECT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, -1, 1, 1, 1, &parts), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flashmla_last_error()).find("device index is -1"), std::string::npos);
}

TEST(Abi, TheCpuIsNotSupportedWithAnUnknownInstructionSet) {
  const ScopedIsa isa("sse9");
  EXPECT_EQ(flashmla_device_supported(FLASHMLA_CPU, 0), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(flashmla_last_error()).find("FLASHMLA_ISA is \"sse9\""), std::string::npos);
  EXPECT_EQ(std::string(flashmla_cpu_features()).find("FLASHMLA_ISA is \"sse9\""), 0u);
}

TEST(Abi, LongerStructOfANewerCallerIsTakenWhenItsNewFieldsAreZero) {
  DecodeCase call(DecodeShape{});
  struct Newer {
    flashmla_decode_args args;
    std::int64_t new_field;
  } newer{call.args(), 0};
  newer.args.struct_size = sizeof(newer);
  std::size_t bytes = 0;
  EXPECT_EQ(flashmla_decode_workspace_size(&newer.args, 1, &bytes), FLASHMLA_OK);
  newer.new_field = 1;
  EXPECT_EQ(flashmla_decode_workspace_size(&newer.args, 1, &bytes), FLASHMLA_UNSUPPORTED);
  EXPECT_NE(std::string(flashmla_last_error()).find("does not know"), std::string::npos);
}

TEST(Abi, ShorterStructOfAnOlderCallerHasDefaultsForTheRest) {
  DecodeCase call(DecodeShape{});
  flashmla_decode_args args = call.args();
  args.struct_size = offsetof(flashmla_decode_args, softmax_scale);
  // Past the end of the caller's struct, so not to be read.
  args.has_softmax_scale = 1;
  args.softmax_scale = NAN;
  args.kernel = reinterpret_cast<const char*>(std::uintptr_t{16});
  std::size_t bytes = 0;
  EXPECT_EQ(flashmla_decode_workspace_size(&args, 1, &bytes), FLASHMLA_OK) << flashmla_last_error();
}

TEST(Abi, KernelsAreListedByName) {
  ASSERT_GT(flashmla_num_kernels(), 0);
  for (std::int32_t i = 0; i < flashmla_num_kernels(); ++i) {
    flashmla_kernel_info info{};
    info.struct_size = sizeof(info);
    ASSERT_EQ(flashmla_kernel_at(i, &info), FLASHMLA_OK);
    EXPECT_NE(std::strlen(info.name), 0u);
    EXPECT_NE(std::strlen(info.instruction_set), 0u);
    EXPECT_EQ(info.struct_size, sizeof(info));
  }
  flashmla_kernel_info info{};
  info.struct_size = sizeof(info);
  for (const std::int32_t index : {-1, flashmla_num_kernels()}) {
    EXPECT_EQ(flashmla_kernel_at(index, &info), FLASHMLA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(flashmla_last_error()).find("index is " + std::to_string(index)),
              std::string::npos);
  }
  // Every dtype has at least the portable kernel and the reference, on any machine.
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    const std::vector<Kernel> kernels = usable_kernels();
    EXPECT_GE(std::count_if(kernels.begin(), kernels.end(),
                            [&](const Kernel& kernel) { return kernel.dtype == dtype; }),
              2);
  }
}

TEST(Abi, KernelInfoWritesNoMoreThanTheCallersStruct) {
  flashmla_kernel_info info{};
  info.struct_size = offsetof(flashmla_kernel_info, device_type);
  info.device_type = 77;
  info.usable = 77;
  ASSERT_EQ(flashmla_kernel_at(0, &info), FLASHMLA_OK);
  EXPECT_NE(info.name, nullptr);
  EXPECT_EQ(info.device_type, 77);
  EXPECT_EQ(info.usable, 77);
}

TEST(Abi, ForcingAKernelUsesIt) {
  for (const Kernel& kernel : usable_kernels()) {
    DecodeShape shape;
    shape.dtype = kernel.dtype;
    DecodeCase call(shape);
    flashmla_decode_args args = call.args();
    args.kernel = kernel.name.c_str();
    const char* name = nullptr;
    const char* report = nullptr;
    ASSERT_EQ(flashmla_explain_selection(&args, &name, &report), FLASHMLA_OK);
    EXPECT_EQ(name, kernel.name);
  }
}

// The forced kernel computes, not only its name: the reference rounds a double once, and the others
// sum in float32, so their last bits differ.
TEST(Abi, ForcedReferenceDiffersInItsLastBits) {
  DecodeShape shape;
  shape.dtype = DType::kFloat32;
  shape.lengths = {300};
  DecodeCase call(shape, random_values(20), random_values(21));
  ASSERT_EQ(call.run("cpu_reference_fp32").status, FLASHMLA_OK);
  const auto reference = call.out.copy_bytes();
  ASSERT_EQ(call.run("cpu_portable_fp32").status, FLASHMLA_OK);
  EXPECT_NE(call.out.copy_bytes(), reference);
}

TEST(Abi, IsaCapsTheSelection) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    DecodeShape shape;
    shape.dtype = dtype;
    DecodeCase call(shape);
    const flashmla_decode_args args = call.args();
    const ScopedIsa isa("portable");
    const char* name = nullptr;
    const char* report = nullptr;
    ASSERT_EQ(flashmla_explain_selection(&args, &name, &report), FLASHMLA_OK);
    EXPECT_EQ(std::string(name).find("cpu_portable"), 0u) << name;
    EXPECT_STREQ(flashmla_cpu_features(), "none");
    EXPECT_EQ(call.run().status, FLASHMLA_OK);
    // A kernel above the cap declines even when it is forced.
    flashmla_decode_args forced = args;
    std::string above;
    for (std::int32_t i = 0; i < flashmla_num_kernels() && above.empty(); ++i) {
      flashmla_kernel_info info{};
      info.struct_size = sizeof(info);
      ASSERT_EQ(flashmla_kernel_at(i, &info), FLASHMLA_OK);
      const bool fits = info.device_type == FLASHMLA_CPU && static_cast<DType>(info.dtype) == dtype;
      if (fits && info.usable == 0) above = info.name;
    }
    ASSERT_NE(above, "");
    forced.kernel = above.c_str();
    EXPECT_EQ(flashmla_explain_selection(&forced, &name, &report), FLASHMLA_UNSUPPORTED);
    EXPECT_NE(std::string(flashmla_last_error()).find(above), std::string::npos);
    EXPECT_NE(std::string(flashmla_last_error()).find("needs "), std::string::npos);
  }
}

TEST(Abi, UnknownIsaIsAnErrorOfEveryCallThatSelects) {
  DecodeCase call(DecodeShape{});
  const ScopedIsa isa("sse9");
  const DecodeCase::Outcome outcome = call.run();
  EXPECT_EQ(outcome.status, FLASHMLA_INVALID_ARGUMENT);
  EXPECT_NE(outcome.message.find("FLASHMLA_ISA is \"sse9\""), std::string::npos);
  EXPECT_NE(outcome.message.find("portable"), std::string::npos);
  EXPECT_NE(outcome.message.find("avx512"), std::string::npos);
  EXPECT_TRUE(call.out.unwritten());
}

TEST(Abi, LastErrorBelongsToItsThread) {
  EXPECT_EQ(flashmla_plan(nullptr), FLASHMLA_INVALID_ARGUMENT);
  const std::string mine = flashmla_last_error();
  std::thread([] {
    EXPECT_STREQ(flashmla_last_error(), "");
    EXPECT_EQ(flashmla_kernel_at(-5, nullptr), FLASHMLA_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(flashmla_last_error(), mine);
  EXPECT_EQ(flashmla_device_supported(FLASHMLA_CPU, 0), FLASHMLA_OK);
  EXPECT_STREQ(flashmla_last_error(), "");
}

TEST(Abi, CudaTensorsAreRefusedWithoutABackend) {
  if (flashmla_device_supported(FLASHMLA_CUDA, 0) == FLASHMLA_OK) GTEST_SKIP();
  DecodeCase call(DecodeShape{});
  flashmla_decode_args args = call.args();
  args.device_type = FLASHMLA_CUDA;
  EXPECT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_UNSUPPORTED);
  EXPECT_NE(std::string(flashmla_last_error()).find("CUDA"), std::string::npos);
  EXPECT_TRUE(call.out.unwritten());
}

}  // namespace
}  // namespace flashmla::testing
