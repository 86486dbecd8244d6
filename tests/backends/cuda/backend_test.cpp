// The CUDA backend and what stands before it, on a runtime that only pretends: GPUs 0 and 2 are
// Hoppers, 1 is older; their memory is the host's, and their kernels note that they were launched.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/kernels.hpp"
#include "flashmla/flashmla.h"

namespace {

struct Runtime {
  std::string launched;      // names of kernels, in order
  std::vector<int> devices;  // current at each launch
  int device = 0;            // the current one
  int waits = 0;             // for a stream
  bool is_capturing = false;
};
Runtime runtime;

cudaError_t note(const std::string& name) {
  runtime.launched += name + ";";
  runtime.devices.push_back(runtime.device);
  return cudaSuccess;
}

CUresult encode_nothing(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                        CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                        CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 3;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of the pretended runtime";
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  // Compute capabilities 9.0, 8.0 and 9.0.
  if (attribute == cudaDevAttrComputeCapabilityMajor) {
    *value = device == 1 ? 8 : 9;
  } else {
    *value = attribute == cudaDevAttrComputeCapabilityMinor ? 0 : 132;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = runtime.device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  runtime.device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(encode_nothing);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = runtime.is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++runtime.waits;
  return cudaSuccess;
}

}  // extern "C"

namespace flashmla::cuda {

#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  cudaError_t launch_##identifier(const DecodeParams&, cudaStream_t) {                          \
    return note(name);                                                                          \
  }
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL

cudaError_t launch_combine(const DecodeParams&, DType, std::int32_t, cudaStream_t) {
  return note("combine");
}
cudaError_t launch_merge(const MergeProblem&, cudaStream_t) {
  return note("merge");
}
cudaError_t launch_plan(const PlanProblem&, const schedule::PlanModel&, cudaStream_t) {
  return note("plan");
}

}  // namespace flashmla::cuda

namespace flashmla::testing {
namespace {

flashmla_tensor view(void* data, std::int32_t dtype, std::initializer_list<std::int64_t> shape) {
  flashmla_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  std::int64_t stride = 1;
  for (std::int32_t i = tensor.rank; i-- > 0;) {
    tensor.strides[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

// Two rows of 150 and 65 tokens, two query tokens each.
class CudaBackend : public ::testing::Test {
 protected:
  CudaBackend() { runtime = Runtime{}; }
  ~CudaBackend() override { ::unsetenv("FLASHMLA_CHECK"); }

  static void check_contents(const char* word) { ::setenv("FLASHMLA_CHECK", word, 1); }

  // What was launched, or "refused: ..." with nothing launched.
  std::string decode(const char* kernel = nullptr) {
    flashmla_decode_args args{};
    args.struct_size = sizeof(args);
    args.device_type = FLASHMLA_CUDA;
    args.device_index = device_;
    args.q = view(q_.data(), FLASHMLA_BFLOAT16, {2, 2, heads_, 576});
    args.k_cache = view(cache_.data(), FLASHMLA_BFLOAT16, {8, 64, 1, 576});
    args.block_table = view(table_.data(), FLASHMLA_INT32, {2, 3});
    args.cache_seqlens = view(lengths_.data(), FLASHMLA_INT32, {2});
    args.tile_scheduler_metadata = view(rows_.data(), FLASHMLA_INT32, {2, 8});
    args.num_splits = view(splits_.data(), FLASHMLA_INT32, {3});
    args.out = view(out_.data(), FLASHMLA_BFLOAT16, {2, 2, heads_, 512});
    args.softmax_lse = view(lse_.data(), FLASHMLA_FLOAT32, {2, heads_, 2});
    args.head_dim_v = 512;
    args.causal = 1;
    args.kernel = kernel;
    std::size_t bytes = 0;
    if (flashmla_decode_workspace_size(&args, 0, &bytes) != FLASHMLA_OK) return refusal();
    workspace_.resize(bytes + 256);
    void* memory = workspace_.data();
    std::size_t space = workspace_.size();
    std::align(256, bytes, memory, space);
    if (flashmla_decode(&args, memory, bytes, nullptr) != FLASHMLA_OK) return refusal();
    return std::exchange(runtime.launched, {});
  }

  std::string plan() {
    flashmla_plan_args args{};
    args.struct_size = sizeof(args);
    args.device_type = FLASHMLA_CUDA;
    args.device_index = device_;
    args.cache_seqlens = view(lengths_.data(), FLASHMLA_INT32, {2});
    args.num_heads_per_head_k = 2 * heads_;
    args.num_heads_k = 1;
    args.tile_scheduler_metadata = view(rows_.data(), FLASHMLA_INT32, {2, 8});
    args.num_splits = view(splits_.data(), FLASHMLA_INT32, {3});
    return flashmla_plan(&args) == FLASHMLA_OK ? std::exchange(runtime.launched, {}) : refusal();
  }

  static std::string refusal() {
    EXPECT_EQ(runtime.launched, "");
    return std::string("refused: ") + flashmla_last_error();
  }

  std::int32_t device_ = 0, heads_ = 16;
  std::vector<std::uint16_t> q_ = std::vector<std::uint16_t>(2 * 2 * 128 * 576);
  std::vector<std::uint16_t> cache_ = std::vector<std::uint16_t>(8 * 64 * 576);
  std::vector<std::uint16_t> out_ = std::vector<std::uint16_t>(2 * 2 * 128 * 512);
  std::vector<float> lse_ = std::vector<float>(2 * 128 * 2);
  std::vector<std::int32_t> table_ = {7, 0, 1, 3, 5, 2147480000};
  std::vector<std::int32_t> lengths_ = {150, 65};
  std::vector<std::int32_t> rows_ = {0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 1, 2, 1, 0, 0, 0};
  std::vector<std::int32_t> splits_ = {0, 2, 3};
  std::vector<std::byte> workspace_;
};

TEST_F(CudaBackend, LaunchesTheKernelThatSelectionChose) {
  EXPECT_EQ(decode(), "sm90a_narrow32_bf16_576;combine;");
  heads_ = 8;
  EXPECT_EQ(decode(), "sm90a_narrow16_bf16_576;combine;");
  EXPECT_EQ(decode("sm90a_wide_bf16_576"), "sm90a_wide_bf16_576;combine;");
  EXPECT_EQ(decode("sm90a_wide_fp16_576"),
            "refused: kernel sm90a_wide_fp16_576 computes float16, q is bfloat16");
  EXPECT_EQ(decode("cpu_portable_bf16"),
            "refused: kernel cpu_portable_bf16 runs on CPU, the tensors are on CUDA");
  heads_ = 128;
  EXPECT_EQ(decode(), "sm90a_wide_bf16_576;combine;");
  EXPECT_EQ(plan(), "plan;");
  EXPECT_EQ(runtime.waits, 0);
}

TEST_F(CudaBackend, WorksOnTheTensorsDeviceAndKeepsTheCurrentOne) {
  runtime.device = 1;
  device_ = 2;
  EXPECT_EQ(decode(), "sm90a_narrow32_bf16_576;combine;");
  EXPECT_EQ(plan(), "plan;");
  EXPECT_EQ(runtime.devices, (std::vector<int>{2, 2, 2}));
  EXPECT_EQ(runtime.device, 1);
}

TEST_F(CudaBackend, OtherGpusAreRefused) {
  device_ = 1;
  EXPECT_EQ(decode(), "refused: device 1 has compute capability 8.0; 9.0 is needed");
  EXPECT_EQ(plan(), "refused: device 1 has compute capability 8.0; 9.0 is needed");
  device_ = 3;
  EXPECT_EQ(decode(), "refused: device 3 was asked for, there are 3");
}

TEST_F(CudaBackend, ContentsAreNotReadUnlessAskedFor) {
  table_[1] = 8;
  lengths_[1] = -1;
  rows_[9] = 1;
  EXPECT_EQ(decode(), "sm90a_narrow32_bf16_576;combine;");
  EXPECT_EQ(plan(), "plan;");
  check_contents("0");
  EXPECT_EQ(decode(), "sm90a_narrow32_bf16_576;combine;");
  EXPECT_EQ(runtime.waits, 0);
}

TEST_F(CudaBackend, TheCheckedModePassesWhatIsRight) {
  check_contents("1");
  EXPECT_EQ(decode(), "sm90a_narrow32_bf16_576;combine;");
  EXPECT_EQ(plan(), "plan;");
  EXPECT_GT(runtime.waits, 0);
}

TEST_F(CudaBackend, TheCheckedModeLaunchesNothingThatIsWrong) {
  check_contents("1");
  table_[1] = 8;
  EXPECT_EQ(decode(), "refused: block_table[0, 1] is 8; k_cache has blocks 0 to 7");
  table_[1] = 0;
  lengths_[1] = 193;
  EXPECT_EQ(decode(),
            "refused: cache_seqlens[1] is 193; it must be between 0 and 192 "
            "(max_num_blocks_per_seq * page_block_size)");
  lengths_[1] = -1;
  EXPECT_EQ(plan(), "refused: cache_seqlens[1] is -1; it must be between 0 and 2147483647");
  lengths_[1] = 65;
  rows_[9] = 1;
  EXPECT_EQ(decode(),
            "refused: tile_scheduler_metadata[1] walks blocks of row 0 that another part walks "
            "too; a plan must cover the blocks of a row exactly once");
  check_contents("yes");
  EXPECT_EQ(plan(), "refused: FLASHMLA_CHECK is \"yes\"; it must be 0 or 1");
}

TEST_F(CudaBackend, TheCheckedModeDoesNotWaitInACapture) {
  check_contents("1");
  runtime.is_capturing = true;
  EXPECT_NE(decode().find("refused: the stream is being captured"), std::string::npos);
  EXPECT_NE(plan().find("refused: the stream is being captured"), std::string::npos);
  EXPECT_EQ(runtime.waits, 0);
}

}  // namespace
}  // namespace flashmla::testing
