#include "select/select.hpp"

#include <array>

namespace flashmla::select {
namespace {

enum CpuLine : std::int32_t {
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, dtype) identifier,
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

constexpr std::array kRows = {
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, dtype) \
  KernelRow{name, instruction_set, DeviceType::kCpu, dtype, required, identifier},
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

const char* device_name(DeviceType type) {
  return type == DeviceType::kCpu ? "CPU" : "CUDA";
}

// The conditions in order; the cheap form of decline_reason.
bool accepts(const KernelRow& row, const Problem& problem, const DeviceFacts& facts) {
  return row.device == problem.device.type && row.dtype == problem.dtype && is_usable(row, facts);
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
