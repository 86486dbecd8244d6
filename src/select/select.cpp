#include "select/select.hpp"

#include <array>

namespace flashmla::select {
namespace {

enum CpuLine : std::int32_t {
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, dtype) identifier,
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

#if defined(FLASHMLA_WITH_CUDA)
enum CudaLine : std::int32_t {
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows) \
  identifier,
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
};
#endif

constexpr std::array kRows = {
#if defined(FLASHMLA_WITH_CUDA)
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows) \
  KernelRow{name,       architecture, DeviceType::kCuda, dtype, 0,                              \
            identifier, head_dim,     head_dim_v,        rows},
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL
#endif
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, dtype) \
  KernelRow{name, instruction_set, DeviceType::kCpu, dtype, required, identifier},
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

// The conditions in order; the cheap form of decline_reason.
bool accepts(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  return row.device == problem.device.type && row.dtype == problem.dtype && is_usable(row, facts) &&
         takes_shape(row, problem);
}

}  // namespace

std::span<const KernelRow> kernel_rows() {
  return kRows;
}

Result<DeviceFacts> device_facts() {
  const Result<CpuFeatures> features = usable_cpu_features();
  if (!features.ok()) return features.status();
  return DeviceFacts{features.value()};
}

bool is_usable(const KernelRow& row, const DeviceFacts& facts) {
  if (row.device == DeviceType::kCuda) return facts.cuda;
  return (row.required & ~facts.cpu_features) == 0;
}

std::string decline_reason(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  if (row.device != problem.device.type) {
    return std::string("runs on ") + device_name(row.device) + ", the tensors are on " +
           device_name(problem.device.type);
  }
  if (row.dtype != problem.dtype) {
    return std::string("computes ") + dtype_name(row.dtype) + ", q is " + dtype_name(problem.dtype);
  }
  if (row.device == DeviceType::kCuda && !facts.cuda) {
    return "needs a CUDA GPU of its architecture; there is none";
  }
  if (!takes_shape(row, problem)) {
    std::string reason =
        "computes (" + std::to_string(row.head_dim) + ", " + std::to_string(row.head_dim_v) + ")";
    if (row.max_query_rows != 0) {
      reason += " with up to " + std::to_string(row.max_query_rows) + " query rows";
    }
    return reason + ", this call has (" + std::to_string(problem.head_dim) + ", " +
           std::to_string(problem.head_dim_v) + ") and " + std::to_string(problem.query_rows());
  }
  if (const CpuFeatures missing = row.required & ~facts.cpu_features; missing != 0) {
    return "needs " + describe_cpu_features(missing) +
           ", usable here: " + describe_cpu_features(facts.cpu_features);
  }
  return {};
}

Result<const KernelRow*> select_kernel(const Problem& problem, const DeviceFacts& facts,
                                       std::string_view forced) {
  for (const KernelRow& row : kRows) {
    if (!forced.empty() && row.name != forced) continue;
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
  return Status::unsupported("no kernel computes this call:\n" + explain(problem, facts, nullptr));
}

std::string explain(const Problem& problem, const DeviceFacts& facts, const KernelRow* chosen) {
  std::string text;
  for (const KernelRow& row : kRows) {
    if (&row == chosen) break;
    const std::string reason = decline_reason(row, problem, facts);
    if (!reason.empty()) text += std::string(row.name) + ": " + reason + "\n";
  }
  return text;
}

}  // namespace flashmla::select
