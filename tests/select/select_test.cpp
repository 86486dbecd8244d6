// The choice of kernel, pinned by name for processors that are not here.
#include "select/select.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace flashmla::testing {
namespace {

using namespace cpu_feature;

#if defined(__x86_64__)

std::string chosen(DType dtype, CpuFeatures features, std::string_view forced = {}) {
  Problem problem;
  problem.dtype = dtype;
  const auto row = select::select_kernel(problem, {features}, forced);
  return row.ok() ? std::string(row.value()->name) : row.status().message();
}

// The first kernel of the instruction set and dtype in the manifest.
std::string instruction_set_of(const std::string& name) {
  for (const select::KernelRow& row : select::kernel_rows()) {
    if (row.name == name) return row.instruction_set;
  }
  return "no kernel";
}

TEST(Select, BestInstructionSetOfFakedProcessors) {
  constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  for (const DType dtype : kTypes) {
    EXPECT_EQ(instruction_set_of(chosen(dtype, 0)), "portable");
    EXPECT_EQ(instruction_set_of(chosen(dtype, kAvx2)), "avx2");
    EXPECT_EQ(instruction_set_of(chosen(dtype, kAvx2 | kAvx512)), "avx512");
    EXPECT_EQ(instruction_set_of(chosen(dtype, kAvx2 | kAvx512 | kAvx512Bf16)), "avx512");
  }
  constexpr CpuFeatures kUpToAmx = kAvx2 | kAvx512 | kAvx512Bf16 | kAmxBf16;
  EXPECT_EQ(instruction_set_of(chosen(DType::kBFloat16, kUpToAmx)), "amx");
  EXPECT_EQ(instruction_set_of(chosen(DType::kFloat32, kUpToAmx)), "avx512");
  EXPECT_EQ(chosen(DType::kBFloat16, 0), "cpu_portable_bf16");
  EXPECT_EQ(chosen(DType::kFloat16, kAvx2), "cpu_avx2_fp16");
  EXPECT_EQ(chosen(DType::kFloat32, kAvx2 | kAvx512), "cpu_avx512_fp32");
}

// AMD's processors dot bf16 at the rate of a multiply-add, Intel's do not. Both can be asked for.
TEST(Select, DotProductsOnlyWhereTheyAreFast) {
  constexpr CpuFeatures kIntel = kAvx2 | kAvx512 | kAvx512Bf16;
  constexpr CpuFeatures kAmd = kIntel | kFastBf16Dot;
  EXPECT_EQ(chosen(DType::kBFloat16, kIntel), "cpu_avx512_bf16");
  EXPECT_EQ(chosen(DType::kBFloat16, kAmd), "cpu_avx512_bf16_dot");
  EXPECT_EQ(chosen(DType::kFloat16, kAmd), "cpu_avx512_fp16");
  EXPECT_EQ(chosen(DType::kBFloat16, kAmd | kAmxBf16), "cpu_amx_bf16");
  EXPECT_EQ(chosen(DType::kBFloat16, kIntel, "cpu_avx512_bf16_dot"), "cpu_avx512_bf16_dot");
  EXPECT_EQ(chosen(DType::kBFloat16, kAmd, "cpu_avx512_bf16"), "cpu_avx512_bf16");
  EXPECT_EQ(chosen(DType::kBFloat16, cap_cpu_features(kAmd, "avx2").value()), "cpu_avx2_bf16");

  Problem problem;
  problem.dtype = DType::kBFloat16;
  const select::DeviceFacts facts{kIntel};
  const auto row = select::select_kernel(problem, facts, {});
  ASSERT_TRUE(row.ok());
  EXPECT_NE(select::explain(problem, facts, row.value())
                .find("cpu_avx512_bf16_dot: is slower than a later one without FAST_BF16_DOT\n"),
            std::string::npos);
}

TEST(Select, ForcedKernelOrItsReason) {
  EXPECT_EQ(chosen(DType::kBFloat16, kAvx2 | kAvx512, "cpu_avx2_bf16"), "cpu_avx2_bf16");
  EXPECT_EQ(chosen(DType::kBFloat16, kAvx2 | kAvx512, "cpu_reference_bf16"), "cpu_reference_bf16");
  EXPECT_EQ(chosen(DType::kBFloat16, kAvx2, "cpu_avx512_bf16"),
            "kernel cpu_avx512_bf16 needs AVX512, usable here: AVX2");
  EXPECT_EQ(chosen(DType::kBFloat16, kAvx2, "cpu_avx2_fp32"),
            "kernel cpu_avx2_fp32 computes float32, q is bfloat16");
}

TEST(Select, ExplainsWhyBetterKernelsDecline) {
  Problem problem;
  problem.dtype = DType::kFloat32;
  const select::DeviceFacts facts{kAvx2};
  const auto row = select::select_kernel(problem, facts, {});
  ASSERT_TRUE(row.ok());
  const std::string report = select::explain(problem, facts, row.value());
  EXPECT_NE(report.find("cpu_avx512_fp32: needs AVX512, usable here: AVX2\n"), std::string::npos);
  EXPECT_NE(report.find("cpu_avx512_bf16: computes bfloat16, q is float32\n"), std::string::npos);
  // Nothing of those that stand after the chosen one, whether they would decline or not.
  EXPECT_EQ(report.find("cpu_portable"), std::string::npos);
}

TEST(Select, CapsNest) {
  constexpr CpuFeatures kAvx512All = kAvx2 | kAvx512 | kAvx512Bf16 | kAvx512Fp16 | kFastBf16Dot;
  constexpr CpuFeatures kAll = kAvx512All | kAmxBf16 | kAmxFp16;
  EXPECT_EQ(cap_cpu_features(kAll, "").value(), kAll);
  EXPECT_EQ(cap_cpu_features(kAll, "portable").value(), 0u);
  EXPECT_EQ(cap_cpu_features(kAll, "avx2").value(), kAvx2);
  EXPECT_EQ(cap_cpu_features(kAll, "avx512").value(), kAvx512All);
  EXPECT_EQ(cap_cpu_features(kAll, "amx").value(), kAll);
  EXPECT_EQ(cap_cpu_features(kAvx2, "avx512").value(), kAvx2);  // a cap adds nothing
  EXPECT_FALSE(cap_cpu_features(kAll, "AVX2").ok());
  EXPECT_EQ(describe_cpu_features(kAvx2 | kAvx512Bf16), "AVX2 AVX512_BF16");
  EXPECT_EQ(describe_cpu_features(0), "none");
}

#endif

TEST(Select, ReferenceIsLastForEveryDtype) {
  const auto rows = select::kernel_rows();
  ASSERT_GE(rows.size(), 3u);
  for (const select::KernelRow& row : rows.last(3)) EXPECT_STREQ(row.instruction_set, "reference");
  std::map<DeviceType, std::int32_t> lines;  // of each backend's manifest
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i].index, lines[rows[i].device]++);
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(rows[i].name, rows[j].name);
  }
}

}  // namespace
}  // namespace flashmla::testing
