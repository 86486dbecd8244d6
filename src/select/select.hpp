// Which kernel computes a problem: the first row of the manifests that does not decline.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "flashmla/status.hpp"
#include "problem/problem.hpp"
#include "select/cpu_features.hpp"

namespace flashmla::select {

// How a CUDA kernel takes the query rows of a key/value head: a block takes all, which are few; a
// few of any number; or 64 of any number.
enum class Form : std::uint8_t { kNarrow, kDivided, kWide };

// One line of a backend's kernels.inc.
struct KernelRow {
  std::string_view name;
  const char* instruction_set;
  DeviceType device;
  DType dtype;
  CpuFeatures required;
  CpuFeatures preferred_with;  // without these it is computed only when asked for by name
  std::int32_t index;          // line in its backend's manifest
  // Restrictions, 0 meaning none: the pair of head dims, and the most query rows of a key/value
  // head.
  std::int32_t head_dim = 0;
  std::int32_t head_dim_v = 0;
  std::int32_t max_query_rows = 0;
  std::int32_t compute_capability = 0;  // of the GPUs that run it, 10 * major + minor
  Form form = Form::kNarrow;
};

// What every CUDA kernel asks of a call: the copy engine reads rows at multiples of 16 bytes, the
// merge keeps a plan's parts in shared memory, and a grid has this many key/value heads at most.
inline constexpr std::int64_t kCudaAlignment = 16;
inline constexpr std::int32_t kCudaMaxParts = 4096;
inline constexpr std::int32_t kCudaMaxKvHeads = 65535;

// All manifests compiled into this library, in order of preference.
std::span<const KernelRow> kernel_rows();

// What a decision may depend on besides the problem; a plain value, so that tests fake it.
struct DeviceFacts {
  CpuFeatures cpu_features = 0;
  std::int32_t compute_capability = 0;  // of the GPU, 10 * major + minor; 0: there is none
};

// What may be used of this processor, FLASHMLA_ISA considered; a GPU is for the caller to add.
Result<DeviceFacts> processor_facts();

// "9.0": the compute capabilities that some kernel runs on.
std::string gpus_with_kernels();

// Whether this machine can run the kernel at all, for some problem.
bool is_usable(const KernelRow& row, const DeviceFacts& facts);

// Whether a kernel that accepts stands at its place in the order of preference, and is not left to
// who asks for it by name.
bool is_preferred(const KernelRow& row, const Problem& problem, const DeviceFacts& facts);

// Why a row declines; empty when it accepts.
std::string decline_reason(const KernelRow& row, const Problem& problem, const DeviceFacts& facts);

// The first preferred row that accepts or, when `forced` is not empty, the row of that name if it
// accepts. Fails naming the kernels and their reasons.
Result<const KernelRow*> select_kernel(const Problem& problem, const DeviceFacts& facts,
                                       std::string_view forced);

// "name: reason" lines for every row that declines and stands before `chosen`.
std::string explain(const Problem& problem, const DeviceFacts& facts, const KernelRow* chosen);

}  // namespace flashmla::select
