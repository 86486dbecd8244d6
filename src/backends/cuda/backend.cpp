// Translates problems into kernel parameters and launches.
#include "backends/cuda/backend.hpp"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "backends/cuda/kernels.hpp"
#include "select/select.hpp"
#include "tuning/divided.hpp"
#include "tuning/plan.hpp"

namespace flashmla::cuda {
namespace {

constexpr std::int32_t kTileRows = tuning::kWholeRows;  // of a block of the wide kernel
constexpr std::int64_t kAlignedElements = select::kCudaAlignment / 2;
constexpr std::int64_t kMapStrideLimit = std::int64_t{1} << 39;  // of a tensor map, in elements
static_assert(2 * select::kCudaMaxParts - 1 <= INT16_MAX, "Entry::detail holds a slot");

// One line of the manifest after another, as selection numbers them.
constexpr DecodeLaunch kLaunches[] = {
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  launch_##identifier,
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
};

Status cuda_failure(const char* what, cudaError_t error) {
  return {StatusCode::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
}

// Makes the tensors' device current, and the one before again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(std::int32_t device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

Result<EncodeTiled> encode_function() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(function)
               : nullptr;
  }();
  if (found == nullptr) {
    return Status(StatusCode::kInternal,
                  "the CUDA driver has no cuTensorMapEncodeTiled; CUDA 12 or later is needed");
  }
  return found;
}

// Dimensions (64 elements, d1, slice, d3, d4), strides of d1, d3, d4 in elements; a box is 64
// elements x box_rows along d1 x box_slices, in shared memory in the 128-byte swizzle. No promotion
// in L2: a token's slices are fetched one after another anyway, and fetching 256 bytes for each
// cost 6% of the bandwidth.
Status encode_map(CUtensorMap& map, DType dtype, const void* data, std::int32_t head_dim,
                  const std::array<std::int64_t, 3>& extents,
                  const std::array<std::int64_t, 3>& strides, std::int32_t box_rows,
                  std::int32_t box_slices) {
  const Result<EncodeTiled> encode = encode_function();
  if (!encode.ok()) return encode.status();
  const cuuint64_t dimensions[5] = {
      64, static_cast<cuuint64_t>(extents[0]), static_cast<cuuint64_t>(head_dim / 64),
      static_cast<cuuint64_t>(extents[1]), static_cast<cuuint64_t>(extents[2])};
  // A dimension of extent 1 is never stepped along, whatever stride it was given.
  const auto bytes = [&](int i) -> cuuint64_t {
    return extents[i] > 1 ? static_cast<cuuint64_t>(strides[i]) * 2 : 128;
  };
  const cuuint64_t byte_strides[4] = {bytes(0), 128, bytes(1), bytes(2)};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_slices), 1, 1};
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode.value()(&map,
                     dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     5, const_cast<void*>(data), dimensions, byte_strides, box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {StatusCode::kInternal,
            "cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(result))};
  }
  return {};
}

// The kernel that takes a tile in pieces.
bool is_wide(const select::KernelRow& kernel) {
  return kernel.form == select::Form::kWide;
}

// Strides of out that are stepped along, the others as 0: head, token, batch row.
std::array<std::int64_t, 3> out_strides(const Problem& problem) {
  return {problem.num_heads_q > 1 ? problem.out_head_stride : 0,
          problem.seq_len_q > 1 ? problem.out_token_stride : 0,
          problem.batch > 1 ? problem.out_batch_stride : 0};
}

bool is_aligned(const Problem& problem) {
  return reinterpret_cast<std::uintptr_t>(problem.out) % 16 == 0 &&
         std::ranges::all_of(out_strides(problem),
                             [](std::int64_t stride) { return stride % kAlignedElements == 0; });
}

std::int64_t partial_rows(const Problem& problem) {
  return std::int64_t{2} * problem.num_parts * problem.num_heads_k * problem.query_rows();
}

CallShape call_shape(const Problem& problem, void* workspace) {
  CallShape shape{};
  shape.batch = problem.batch;
  shape.seq_len_q = problem.seq_len_q;
  shape.num_heads_k = problem.num_heads_k;
  shape.heads_per_kv_head = Divisor(problem.heads_per_kv_head());
  shape.query_rows = problem.query_rows();
  shape.cache_seqlens = problem.cache_seqlens;
  shape.cache_seqlens_stride = problem.cache_seqlens_stride;
  // Nothing is read of a cache without pages.
  const std::int64_t capacity =
      problem.num_blocks == 0
          ? 0
          : static_cast<std::int64_t>(problem.max_pages_per_row) * problem.page_size;
  shape.max_length = static_cast<std::int32_t>(std::min<std::int64_t>(capacity, INT32_MAX));
  shape.plan_rows = problem.plan_rows;
  shape.plan_row_stride = problem.plan_row_stride;
  shape.num_parts = problem.num_parts;
  shape.out = problem.out;
  shape.out_batch_stride = problem.out_batch_stride;
  shape.out_token_stride = problem.out_token_stride;
  shape.out_head_stride = problem.out_head_stride;
  shape.out_is_aligned = is_aligned(problem);
  shape.lse = problem.lse;
  shape.lse_batch_stride = problem.lse_batch_stride;
  shape.lse_head_stride = problem.lse_head_stride;
  shape.lse_token_stride = problem.lse_token_stride;
  shape.partial_out = static_cast<std::uint16_t*>(workspace);
  shape.partial_statistics = reinterpret_cast<PartialStatistics*>(
      shape.partial_out + partial_rows(problem) * problem.head_dim_v);
  return shape;
}

// Where the wide kernel's results go.
Status encode_results(DecodeParams& params, const Problem& problem) {
  const std::array<std::int64_t, 3> strides = out_strides(problem);
  params.out_has_map = params.shape.out_is_aligned &&
                       problem.heads_per_kv_head() % kStoredRows == 0 &&
                       *std::ranges::max_element(strides) < kMapStrideLimit;
  if (params.out_has_map) {
    if (Status status = encode_map(params.out_map, problem.dtype, problem.out, problem.head_dim_v,
                                   {problem.num_heads_q, problem.seq_len_q, problem.batch}, strides,
                                   kStoredRows, kStoredSlices);
        !status.ok()) {
      return status;
    }
  }
  const std::int64_t row = problem.head_dim_v, head = problem.query_rows() * row;
  return encode_map(params.partial_map, DType::kFloat16, params.shape.partial_out,
                    problem.head_dim_v,
                    {problem.query_rows(), problem.num_heads_k, 2 * problem.num_parts},
                    {row, head, problem.num_heads_k * head}, kStoredRows, kStoredSlices);
}

Status fill_params(DecodeParams& params, const Problem& problem, const select::KernelRow& kernel,
                   void* workspace) {
  params.shape = call_shape(problem, workspace);
  const std::int32_t slices = problem.head_dim / 64;
  const std::int32_t q_box_rows = std::gcd(problem.heads_per_kv_head(), kTileRows);
  const std::int32_t k_box_rows = std::gcd(problem.page_size, kBlockTokens);
  params.q_box_rows_log2 = std::countr_zero(static_cast<std::uint32_t>(q_box_rows));
  params.k_box_rows_log2 = std::countr_zero(static_cast<std::uint32_t>(k_box_rows));
  if (Status status =
          encode_map(params.q_map, problem.dtype, problem.q, problem.head_dim,
                     {problem.num_heads_q, problem.seq_len_q, problem.batch},
                     {problem.q_head_stride, problem.q_token_stride, problem.q_batch_stride},
                     q_box_rows, q_box_rows == kTileRows ? slices : 1);
      !status.ok()) {
    return status;
  }
  const bool has_pages = problem.num_blocks > 0;
  const bool whole_tiles = has_pages && k_box_rows == kBlockTokens;
  const auto encode_cache = [&](CUtensorMap& map, std::int32_t tile_slices) {
    return encode_map(map, problem.dtype, has_pages ? problem.k_cache : problem.q, problem.head_dim,
                      {has_pages ? problem.page_size : 1, problem.num_heads_k,
                       has_pages ? problem.num_blocks : 1},
                      {problem.k_token_stride, problem.k_head_stride, problem.k_block_stride},
                      has_pages ? k_box_rows : 1, whole_tiles ? tile_slices : 1);
  };
  const bool in_pieces = is_wide(kernel);
  if (Status status = encode_cache(params.k_map, in_pieces ? kFirstPieceOfTile : slices);
      !status.ok()) {
    return status;
  }
  if (in_pieces) {
    if (Status status = encode_cache(params.k_rest_map, slices - kFirstPieceOfTile); !status.ok()) {
      return status;
    }
    if (Status status = encode_results(params, problem); !status.ok()) return status;
  }
  params.head_dim = problem.head_dim;
  params.head_dim_v = problem.head_dim_v;
  params.q = problem.q;
  params.q_batch_stride = problem.q_batch_stride;
  params.q_token_stride = problem.q_token_stride;
  params.q_head_stride = problem.q_head_stride;
  params.k_cache = problem.k_cache;
  params.k_block_stride = problem.k_block_stride;
  params.k_token_stride = problem.k_token_stride;
  params.k_head_stride = problem.k_head_stride;
  params.num_blocks = static_cast<std::int32_t>(problem.num_blocks);
  params.block_table = problem.block_table;
  params.block_table_batch_stride = problem.block_table_batch_stride;
  params.block_table_page_stride = problem.block_table_page_stride;
  params.page_size = Divisor(problem.page_size);
  params.visible_lens = problem.visible_lens;
  params.visible_lens_batch_stride = problem.visible_lens_batch_stride;
  params.visible_lens_token_stride = problem.visible_lens_token_stride;
  params.causal = problem.causal;
  // A scale that float does not hold would make a NaN of a score of 0.
  constexpr double kLargest = std::numeric_limits<float>::max();
  params.scale_log2 = static_cast<float>(
      std::clamp(problem.softmax_scale * 1.4426950408889634, -kLargest, kLargest));
  return {};
}

Result<std::int32_t> attribute(std::int32_t device, cudaDeviceAttr which) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, device);
  if (error != cudaSuccess) return cuda_failure("cudaDeviceGetAttribute", error);
  return value;
}

}  // namespace

Result<std::int32_t> compute_capability(std::int32_t device) {
  // Asked for several times a call, and never another: what was found once is kept.
  static std::array<std::atomic<std::int32_t>, 64> known{};
  const bool is_kept = device >= 0 && device < static_cast<std::int32_t>(known.size());
  if (is_kept && known[device] != 0) return known[device].load();
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return Status::unsupported(std::string("no CUDA device was found (") +
                               cudaGetErrorString(error) + "); a GPU of compute capability " +
                               select::gpus_with_kernels() + " is needed");
  }
  if (device < 0 || device >= count) {
    return Status::unsupported("device " + std::to_string(device) + " was asked for, there are " +
                               std::to_string(count));
  }
  const Result<std::int32_t> major = attribute(device, cudaDevAttrComputeCapabilityMajor);
  if (!major.ok()) return major.status();
  const Result<std::int32_t> minor = attribute(device, cudaDevAttrComputeCapabilityMinor);
  if (!minor.ok()) return minor.status();
  const std::int32_t capability = 10 * major.value() + minor.value();
  if (is_kept) known[device] = capability;
  return capability;
}

Result<std::int32_t> num_parts(std::int32_t device, std::int64_t num_heads_per_head_k,
                               std::int64_t num_heads_k) {
  const Result<std::int32_t> multiprocessors = attribute(device, cudaDevAttrMultiProcessorCount);
  if (!multiprocessors.ok()) return multiprocessors.status();
  const std::int64_t blocks = num_heads_k * ((num_heads_per_head_k + kTileRows - 1) / kTileRows);
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, multiprocessors.value() / blocks));
}

std::size_t workspace_bytes(const Problem& problem) {
  // One part needs it, too: a plan that was made for shorter rows leaves shares of longer ones.
  const std::size_t statistics =
      std::max(kPartialHalves * sizeof(PartialStatistics), kPartialWarps * sizeof(WarpStatistics));
  return static_cast<std::size_t>(partial_rows(problem)) *
         (problem.head_dim_v * sizeof(std::uint16_t) + statistics);
}

Status plan(const PlanProblem& problem, void* stream) {
  const DeviceGuard guard(problem.device.index);
  if (guard.error() != cudaSuccess) return cuda_failure("cudaSetDevice", guard.error());
  const cudaError_t error = launch_plan(problem, tuning::cuda_plan(problem.num_heads_per_head_k),
                                        static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : cuda_failure("plan", error);
}

Status decode(const Problem& problem, const select::KernelRow& kernel, void* workspace,
              void* stream) {
  if (problem.batch == 0 || problem.num_parts == 0) return {};
  const DeviceGuard guard(problem.device.index);
  if (guard.error() != cudaSuccess) return cuda_failure("cudaSetDevice", guard.error());
  DecodeParams params{};
  if (Status status = fill_params(params, problem, kernel, workspace); !status.ok()) return status;
  // The kernels for few query rows have statistics of their own.
  if (!is_wide(kernel)) {
    params.shape.warp_statistics =
        reinterpret_cast<WarpStatistics*>(params.shape.partial_statistics);
  }
  cudaError_t error = kLaunches[kernel.index](params, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cuda_failure(kernel.name.data(), error);
  if (problem.num_parts == 1) return {};
  const Result<std::int32_t> multiprocessors =
      attribute(problem.device.index, cudaDevAttrMultiProcessorCount);
  if (!multiprocessors.ok()) return multiprocessors.status();
  error = launch_combine(params, problem.dtype, multiprocessors.value(),
                         static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : cuda_failure("combine", error);
}

Status merge(const MergeProblem& problem, void* stream) {
  const DeviceGuard guard(problem.device.index);
  if (guard.error() != cudaSuccess) return cuda_failure("cudaSetDevice", guard.error());
  const cudaError_t error = launch_merge(problem, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? Status() : cuda_failure("merge", error);
}

Status read_back(std::int32_t* to, const std::int32_t* from, std::int64_t count,
                 std::int32_t device, void* stream) {
  const DeviceGuard guard(device);
  if (guard.error() != cudaSuccess) return cuda_failure("cudaSetDevice", guard.error());
  const auto queue = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(queue, &capture);
  if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone) {
    return Status::unsupported(
        "the stream is being captured and FLASHMLA_CHECK is 1: the checks wait for the GPU, which "
        "a capture does not allow; capture without FLASHMLA_CHECK");
  }
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(to, from, static_cast<std::size_t>(count) * sizeof(std::int32_t),
                            cudaMemcpyDeviceToHost, queue);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(queue);
  return error == cudaSuccess ? Status() : cuda_failure("reading a tensor back", error);
}

}  // namespace flashmla::cuda
