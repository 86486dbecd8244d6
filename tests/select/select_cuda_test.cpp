// The choice among the CUDA kernels, pinned by name for GPUs that are not here.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "select/select.hpp"
#include "tuning/divided.hpp"

namespace flashmla::testing {
namespace {

constexpr std::int32_t kHopper = 90;

alignas(16) const std::byte kMemory[32] = {};

Problem problem_of(DType dtype, std::int32_t head_dim, std::int32_t heads,
                   std::int32_t seq_len_q = 1, std::int32_t kv_heads = 1) {
  Problem problem;
  problem.device = {DeviceType::kCuda, 0};
  problem.dtype = dtype;
  problem.batch = 2;
  problem.seq_len_q = seq_len_q;
  problem.num_heads_q = heads;
  problem.num_heads_k = kv_heads;
  problem.head_dim = head_dim;
  problem.head_dim_v = 512;
  problem.num_blocks = 4;
  problem.page_size = 64;
  problem.num_parts = 132;
  problem.q = kMemory;
  problem.q_head_stride = head_dim;
  problem.q_token_stride = heads * head_dim;
  problem.q_batch_stride = seq_len_q * problem.q_token_stride;
  problem.k_cache = kMemory;
  problem.k_head_stride = head_dim;
  problem.k_token_stride = kv_heads * head_dim;
  problem.k_block_stride = 64 * problem.k_token_stride;
  return problem;
}

std::string chosen(const Problem& problem, std::int32_t capability, std::string_view forced = {}) {
  const auto row = select::select_kernel(problem, {0, capability}, forced);
  return row.ok() ? std::string(row.value()->name) : row.status().message();
}

TEST(SelectCuda, FewestQueryRowsThatHoldTheCall) {
  constexpr auto kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16;
  EXPECT_EQ(chosen(problem_of(kBf16, 576, 1), kHopper), "sm90a_narrow16_bf16_576");
  EXPECT_EQ(chosen(problem_of(kBf16, 576, 16), kHopper), "sm90a_narrow16_bf16_576");
  EXPECT_EQ(chosen(problem_of(kBf16, 576, 17), kHopper), "sm90a_narrow32_bf16_576");
  EXPECT_EQ(chosen(problem_of(kFp16, 576, 32), kHopper), "sm90a_narrow32_fp16_576");
  EXPECT_EQ(chosen(problem_of(kFp16, 512, 33), kHopper), "sm90a_wide_fp16_512");
  EXPECT_EQ(chosen(problem_of(kBf16, 512, 128), kHopper), "sm90a_wide_bf16_512");
  // Query tokens count as rows, heads of another key/value head do not.
  EXPECT_EQ(chosen(problem_of(kBf16, 576, 16, 2), kHopper), "sm90a_narrow32_bf16_576");
  EXPECT_EQ(chosen(problem_of(kBf16, 576, 128, 1, 8), kHopper), "sm90a_narrow16_bf16_576");
}

// A row of so many blocks' worth of pages in a batch of `batch`, for 128 heads.
Problem row_of(std::int32_t blocks, std::int32_t heads = 128, std::int32_t batch = 1) {
  Problem problem = problem_of(DType::kBFloat16, 576, heads);
  problem.batch = batch;
  problem.max_pages_per_row = blocks;
  problem.num_parts = heads > 64 ? 66 : 132;
  return problem;
}

TEST(SelectCuda, OneRowThatItsTableKeepsShortIsDivided) {
  constexpr const char* kDivided = "sm90a_divided_bf16_576";
  EXPECT_EQ(chosen(row_of(1), kHopper), kDivided);
  EXPECT_EQ(chosen(row_of(32), kHopper), kDivided);
  EXPECT_EQ(chosen(row_of(33), kHopper), "sm90a_wide_bf16_576");
  EXPECT_EQ(chosen(row_of(66, 64), kHopper), kDivided);
  EXPECT_EQ(chosen(row_of(67, 64), kHopper), "sm90a_wide_bf16_576");
  EXPECT_EQ(chosen(row_of(88, 40), kHopper), kDivided);
  EXPECT_EQ(chosen(row_of(89, 40), kHopper), "sm90a_wide_bf16_576");
  EXPECT_EQ(chosen(row_of(66, 20), kHopper), kDivided);
  EXPECT_EQ(chosen(row_of(67, 20), kHopper), "sm90a_narrow32_bf16_576");
  EXPECT_EQ(chosen(row_of(1, 16), kHopper), "sm90a_narrow16_bf16_576");
  EXPECT_EQ(chosen(row_of(1, 128, 2), kHopper), "sm90a_wide_bf16_576");
  // What one part walks must not depend on the batch.
  Problem problem = row_of(1);
  problem.num_parts = 1;
  EXPECT_EQ(chosen(problem, kHopper), "sm90a_wide_bf16_576");
  // A plan for more multiprocessors than there are.
  problem = row_of(129);
  problem.num_parts = 4096;
  EXPECT_EQ(chosen(problem, kHopper), "sm90a_wide_bf16_576");
  // Pages of any size count by their tokens.
  problem = row_of(8);
  problem.page_size = 256;
  EXPECT_EQ(chosen(problem, kHopper), kDivided);
  problem.page_size = 257;
  EXPECT_EQ(chosen(problem, kHopper), "sm90a_wide_bf16_576");
}

TEST(SelectCuda, ABlockThatDividesHasFewParts) {
  for (std::int32_t parts = 1; parts <= select::kCudaMaxParts; ++parts) {
    for (const std::int32_t query_rows : {1, 16, 17, 48, 64, 65, 128, 1000}) {
      const std::int32_t blocks = tuning::divided_parts(parts, query_rows);
      ASSERT_GE(blocks, 1);
      ASSERT_LE(blocks, parts);
      ASSERT_LT((parts + blocks - 1) / blocks, 8) << parts << " " << query_rows;
    }
  }
}

TEST(SelectCuda, WhyARowIsNotDivided) {
  const Problem problem = row_of(33);
  const auto row = select::select_kernel(problem, {0, kHopper}, {});
  ASSERT_TRUE(row.ok());
  EXPECT_NE(select::explain(problem, {0, kHopper}, row.value())
                .find("sm90a_divided_bf16_576: is slower than a later one but for one row that "
                      "block_table keeps short"),
            std::string::npos);
}

TEST(SelectCuda, OtherGpusAndNone) {
  const Problem problem = problem_of(DType::kBFloat16, 576, 128);
  for (const std::int32_t capability : {80, 89, 100, 120}) {
    const std::string text = chosen(problem, capability);
    EXPECT_NE(text.find("no CUDA kernel computes this call"), std::string::npos) << text;
    EXPECT_NE(
        text.find("sm90a_wide_bf16_576: needs a GPU of compute capability 9.0, this one has " +
                  std::to_string(capability / 10) + "." + std::to_string(capability % 10)),
        std::string::npos)
        << text;
  }
  EXPECT_EQ(chosen(problem, 0, "sm90a_wide_bf16_576"),
            "kernel sm90a_wide_bf16_576 needs a GPU of compute capability 9.0, there is no GPU");
  EXPECT_EQ(select::gpus_with_kernels(), "9.0");
}

TEST(SelectCuda, ForcedKernelOrItsReason) {
  const Problem problem = problem_of(DType::kBFloat16, 576, 16);
  EXPECT_EQ(chosen(problem, kHopper, "sm90a_wide_bf16_576"), "sm90a_wide_bf16_576");
  EXPECT_EQ(chosen(problem, kHopper, "sm90a_wide_fp16_576"),
            "kernel sm90a_wide_fp16_576 computes float16, q is bfloat16");
  EXPECT_EQ(chosen(problem, kHopper, "sm90a_wide_bf16_512"),
            "kernel sm90a_wide_bf16_512 computes head dims (512, 512), this call has (576, 512)");
  EXPECT_EQ(chosen(problem_of(DType::kBFloat16, 576, 20), kHopper, "sm90a_narrow16_bf16_576"),
            "kernel sm90a_narrow16_bf16_576 computes head dims (576, 512) with up to 16 query "
            "rows, this call "
            "has (576, 512) and 20 query rows");
  EXPECT_EQ(chosen(problem, kHopper, "cpu_portable_bf16"),
            "kernel cpu_portable_bf16 runs on CPU, the tensors are on CUDA");
}

TEST(SelectCuda, TensorsOfTheCpuNeverGetAGpu) {
  Problem problem = problem_of(DType::kBFloat16, 576, 16);
  problem.device = {DeviceType::kCpu, 0};
  EXPECT_EQ(chosen(problem, kHopper), "cpu_portable_bf16");
}

TEST(SelectCuda, DimensionsWithoutAKernelAreNamed) {
  Problem problem = problem_of(DType::kBFloat16, 128, 16);
  problem.head_dim_v = 128;
  const std::string text = chosen(problem, kHopper);
  EXPECT_NE(
      text.find("sm90a_wide_bf16_576: computes head dims (576, 512), this call has (128, 128)\n"),
      std::string::npos)
      << text;
  EXPECT_EQ(text.find("cpu_"), std::string::npos) << text;
}

TEST(SelectCuda, LayoutsThatTheCopyEngineCannotRead) {
  const char* kName = "sm90a_narrow16_bf16_576";
  const auto reason = [&](const Problem& problem) {
    EXPECT_NE(chosen(problem, kHopper).find("no CUDA kernel"), std::string::npos);
    return chosen(problem, kHopper, kName);
  };
  Problem problem = problem_of(DType::kBFloat16, 576, 16);
  problem.q = kMemory + 8;
  EXPECT_EQ(reason(problem), std::string("kernel ") + kName +
                                 " needs an address that is a multiple of 16 bytes, that of q is "
                                 "not");
  problem = problem_of(DType::kBFloat16, 576, 16);
  problem.k_token_stride = 580;
  EXPECT_EQ(reason(problem),
            std::string("kernel ") + kName +
                " needs strides that are multiples of 8 elements, k_cache has one of 580");
  problem.page_size = 1;  // then nothing steps from token to token
  EXPECT_EQ(chosen(problem, kHopper), kName);
  problem.num_parts = 5000;
  EXPECT_EQ(reason(problem),
            std::string("kernel ") + kName +
                " takes up to 4096 rows of tile_scheduler_metadata, this call has 5000");
}

TEST(SelectCuda, EveryKernelIsChosenForSomeCall) {
  for (const select::KernelRow& row : select::kernel_rows()) {
    if (row.device != DeviceType::kCuda) continue;
    const std::int32_t heads = row.max_query_rows == 0 ? 128 : row.max_query_rows;
    Problem problem = problem_of(row.dtype, row.head_dim, heads);
    if (row.form == select::Form::kDivided) problem.batch = 1;
    EXPECT_EQ(chosen(problem, row.compute_capability), row.name);
  }
}

}  // namespace
}  // namespace flashmla::testing
