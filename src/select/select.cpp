#include "select/select.hpp"

#include <array>

#include "tuning/divided.hpp"

namespace flashmla::select {
namespace {

enum CpuLine : std::int32_t {
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, preferred_with, dtype) \
  identifier,
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

#if defined(FLASHMLA_WITH_CUDA)
enum CudaLine : std::int32_t {
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  identifier,
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
};

// "sm90a": 90. Code for an architecture that ends in a letter runs on that one alone.
constexpr std::int32_t capability_of(std::string_view architecture) {
  std::int32_t capability = 0;
  for (const char c : architecture) {
    if (c >= '0' && c <= '9') capability = 10 * capability + (c - '0');
  }
  return capability;
}
#endif

constexpr std::array kRows = {
#if defined(FLASHMLA_WITH_CUDA)
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  KernelRow{name,                                                                               \
            architecture,                                                                       \
            DeviceType::kCuda,                                                                  \
            dtype,                                                                              \
            0,                                                                                  \
            0,                                                                                  \
            identifier,                                                                         \
            head_dim,                                                                           \
            head_dim_v,                                                                         \
            rows,                                                                               \
            capability_of(architecture),                                                        \
            Form::form},
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
#endif
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, preferred_with, dtype) \
  KernelRow{name, instruction_set, DeviceType::kCpu, dtype, required, preferred_with, identifier},
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

const char* device_name(DeviceType type) {
  return type == DeviceType::kCpu ? "CPU" : "CUDA";
}

bool takes_shape(const KernelRow& row, const Problem& problem) {
  const bool dims = row.head_dim == 0 ||
                    (row.head_dim == problem.head_dim && row.head_dim_v == problem.head_dim_v);
  return dims && (row.max_query_rows == 0 || problem.query_rows() <= row.max_query_rows);
}

std::string capability_name(std::int32_t capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// A stride of 0 stands for one that is never stepped along.
std::string misalignment(const char* tensor, const void* data,
                         const std::array<std::int64_t, 3>& strides, DType dtype) {
  if (reinterpret_cast<std::uintptr_t>(data) % kCudaAlignment != 0) {
    return std::string("needs an address that is a multiple of 16 bytes, that of ") + tensor +
           " is not";
  }
  const std::int64_t elements = kCudaAlignment / element_size(dtype);
  for (const std::int64_t stride : strides) {
    if (stride % elements != 0) {
      return "needs strides that are multiples of " + std::to_string(elements) + " elements, " +
             tensor + " has one of " + std::to_string(stride);
    }
  }
  return {};
}

// Why no CUDA kernel takes a call, whatever its head dims; empty: they may.
std::string cuda_reason(const Problem& problem) {
  if (problem.num_parts > kCudaMaxParts) {
    return "takes up to " + std::to_string(kCudaMaxParts) +
           " rows of tile_scheduler_metadata, this call has " + std::to_string(problem.num_parts);
  }
  if (problem.num_heads_k > kCudaMaxKvHeads) {
    return "takes up to " + std::to_string(kCudaMaxKvHeads) + " heads of k_cache, this call has " +
           std::to_string(problem.num_heads_k);
  }
  const std::string reason = misalignment("q", problem.q,
                                          {problem.batch > 1 ? problem.q_batch_stride : 0,
                                           problem.seq_len_q > 1 ? problem.q_token_stride : 0,
                                           problem.num_heads_q > 1 ? problem.q_head_stride : 0},
                                          problem.dtype);
  if (!reason.empty()) return reason;
  return misalignment("k_cache", problem.k_cache,
                      {problem.num_blocks > 1 ? problem.k_block_stride : 0,
                       problem.page_size > 1 ? problem.k_token_stride : 0,
                       problem.num_heads_k > 1 ? problem.k_head_stride : 0},
                      problem.dtype);
}

// The conditions in order; the cheap form of decline_reason.
bool accepts(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  return row.device == problem.device.type && row.dtype == problem.dtype && is_usable(row, facts) &&
         takes_shape(row, problem) &&
         (row.device != DeviceType::kCuda || cuda_reason(problem).empty());
}

// Whether the kernel that divides query rows is the fastest.
bool is_worth_dividing(const Problem& problem) {
  // What a row of block_table can hold, in blocks of the plan.
  const std::int64_t tokens =
      static_cast<std::int64_t>(problem.max_pages_per_row) * problem.page_size;
  return tuning::is_worth_dividing(problem.batch, (tokens + kBlockTokens - 1) / kBlockTokens,
                                   problem.num_parts, problem.query_rows());
}

}  // namespace

std::span<const KernelRow> kernel_rows() {
  return kRows;
}

Result<DeviceFacts> processor_facts() {
  const Result<CpuFeatures> features = usable_cpu_features();
  if (!features.ok()) return features.status();
  return DeviceFacts{features.value()};
}

std::string gpus_with_kernels() {
  std::string text;
  std::int32_t last = 0;
  for (const KernelRow& row : kRows) {
    if (row.device != DeviceType::kCuda || row.compute_capability == last) continue;
    last = row.compute_capability;
    if (!text.empty()) text += ", ";
    text += capability_name(last);
  }
  return text;
}

bool is_usable(const KernelRow& row, const DeviceFacts& facts) {
  if (row.device == DeviceType::kCuda) return row.compute_capability == facts.compute_capability;
  return (row.required & ~facts.cpu_features) == 0;
}

bool is_preferred(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  return (row.preferred_with & ~facts.cpu_features) == 0 &&
         (row.form != Form::kDivided || is_worth_dividing(problem));
}

std::string decline_reason(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  if (row.device != problem.device.type) {
    return std::string("runs on ") + device_name(row.device) + ", the tensors are on " +
           device_name(problem.device.type);
  }
  if (row.dtype != problem.dtype) {
    return std::string("computes ") + dtype_name(row.dtype) + ", q is " + dtype_name(problem.dtype);
  }
  if (row.device == DeviceType::kCuda && !is_usable(row, facts)) {
    return "needs a GPU of compute capability " + capability_name(row.compute_capability) +
           (facts.compute_capability == 0
                ? ", there is no GPU"
                : ", this one has " + capability_name(facts.compute_capability));
  }
  if (!takes_shape(row, problem)) {
    const auto dims = [](std::int32_t head_dim, std::int32_t head_dim_v) {
      return "(" + std::to_string(head_dim) + ", " + std::to_string(head_dim_v) + ")";
    };
    std::string computed = dims(row.head_dim, row.head_dim_v);
    std::string given = dims(problem.head_dim, problem.head_dim_v);
    if (row.max_query_rows != 0) {
      computed += " with up to " + std::to_string(row.max_query_rows) + " query rows";
      given += " and " + std::to_string(problem.query_rows()) + " query rows";
    }
    return "computes head dims " + computed + ", this call has " + given;
  }
  if (row.device == DeviceType::kCuda) return cuda_reason(problem);
  if (const CpuFeatures missing = row.required & ~facts.cpu_features; missing != 0) {
    return "needs " + describe_cpu_features(missing) +
           ", usable here: " + describe_cpu_features(facts.cpu_features);
  }
  return {};
}

Result<const KernelRow*> select_kernel(const Problem& problem, const DeviceFacts& facts,
                                       std::string_view forced) {
  for (const KernelRow& row : kRows) {
    if (forced.empty() ? !is_preferred(row, problem, facts) : row.name != forced) continue;
    if (accepts(row, problem, facts)) return &row;
    if (!forced.empty()) {
      return Status::unsupported("kernel " + std::string(forced) + " " +
                                 decline_reason(row, problem, facts));
    }
  }
  if (!forced.empty()) {
    std::string text = "kernel is \"" + std::string(forced) + "\"; it must be one of";
    const char* separator = " ";
    for (const KernelRow& row : kRows) {
      text += separator;
      text += row.name;
      separator = ", ";
    }
    return Status::invalid_argument(text);
  }
  std::string text =
      std::string("no ") + device_name(problem.device.type) + " kernel computes this call:";
  for (const KernelRow& row : kRows) {
    if (row.device != problem.device.type) continue;
    text += "\n" + std::string(row.name) + ": " + decline_reason(row, problem, facts);
  }
  return Status::unsupported(text);
}

std::string explain(const Problem& problem, const DeviceFacts& facts, const KernelRow* chosen) {
  std::string text;
  for (const KernelRow& row : kRows) {
    if (&row == chosen) break;
    std::string reason = decline_reason(row, problem, facts);
    if (reason.empty() && !is_preferred(row, problem, facts)) {
      reason = row.form == Form::kDivided
                   ? "is slower than a later one but for one row that block_table keeps short"
                   : "is slower than a later one without " +
                         describe_cpu_features(row.preferred_with & ~facts.cpu_features);
    }
    if (!reason.empty()) text += std::string(row.name) + ": " + reason + "\n";
  }
  return text;
}

}  // namespace flashmla::select
