// The pipeline: validate, select, schedule, launch, combine.
#include "decode.hpp"

#include <string>

#include "backends/cpu/decode.hpp"
#include "backends/cpu/kernels.hpp"
#include "backends/cuda/backend.hpp"
#include "problem/problem.hpp"
#include "schedule/parts.hpp"
#include "schedule/planner.hpp"
#include "schedule/resolve.hpp"
#include "select/select.hpp"
#include "tuning/plan.hpp"

namespace flashmla {
namespace {

Result<const cpu::DecodeKernel*> select_cpu_kernel(const Problem& problem,
                                                   std::string_view forced) {
  const Result<select::DeviceFacts> facts = select::device_facts();
  if (!facts.ok()) return facts.status();
  const Result<const select::KernelRow*> row =
      select::select_kernel(problem, facts.value(), forced);
  if (!row.ok()) return row.status();
  return &cpu::decode_kernel(row.value()->index);
}

constexpr std::size_t kCpuAlignment = 64;
constexpr std::size_t kCudaAlignment = 256;

Status check_workspace(const std::byte* workspace, std::size_t given, std::size_t needed,
                       std::size_t alignment) {
  if (given < needed || (needed > 0 && workspace == nullptr)) {
    return Status::invalid_argument("workspace holds " +
                                    std::to_string(workspace == nullptr ? 0 : given) +
                                    " bytes; this call needs " + std::to_string(needed));
  }
  if (reinterpret_cast<std::uintptr_t>(workspace) % alignment != 0) {
    return Status::invalid_argument("workspace is not aligned to " + std::to_string(alignment) +
                                    " bytes");
  }
  return {};
}

}  // namespace

Result<select::DeviceFacts> process_facts() {
  Result<select::DeviceFacts> facts = select::device_facts();
  if (facts.ok()) facts.value().cuda = cuda::device_supported(0).ok();
  return facts;
}

Status device_supported(const Device& device) {
  if (device.type == DeviceType::kCpu) return {};
  return cuda::device_supported(device.index);
}

Result<std::int32_t> plan_num_parts(const Device& device, std::int64_t num_heads_per_head_k,
                                    std::int64_t num_heads_k, std::int32_t num_threads) {
  if (num_heads_per_head_k < 1 || num_heads_k < 1) {
    return Status::invalid_argument("(num_heads_per_head_k, num_heads_k) is (" +
                                    std::to_string(num_heads_per_head_k) + ", " +
                                    std::to_string(num_heads_k) + "); both must be at least 1");
  }
  if (Status status = device_supported(device); !status.ok()) return status;
  if (device.type == DeviceType::kCuda) {
    return cuda::num_parts(device.index, num_heads_per_head_k, num_heads_k);
  }
  return schedule::cpu_num_parts(num_heads_k, num_threads);
}

Status plan(const PlanRequest& request, const Execution& execution) {
  const Result<PlanProblem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    return cuda::plan(problem.value(), execution.stream);
  }
  schedule::plan_on_host(problem.value(), tuning::kCpuRowStartUnits);
  return {};
}

Result<std::size_t> decode_workspace_size(const DecodeRequest& request, std::int32_t num_threads) {
  const Result<Problem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    if (Status status = cuda::supported(problem.value(), request.kernel); !status.ok()) {
      return status;
    }
    return cuda::workspace_bytes(problem.value());
  }
  const Result<const cpu::DecodeKernel*> kernel =
      select_cpu_kernel(problem.value(), request.kernel);
  if (!kernel.ok()) return kernel.status();
  const Result<cpu::WorkspaceLayout> layout =
      cpu::lay_out_workspace(problem.value(), *kernel.value(), num_threads);
  if (!layout.ok()) return layout.status();
  return layout.value().total_bytes;
}

Status decode(const DecodeRequest& request, std::byte* workspace, std::size_t workspace_bytes,
              const Execution& execution) {
  const Result<Problem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    if (Status status = check_workspace(workspace, workspace_bytes,
                                        cuda::workspace_bytes(problem.value()), kCudaAlignment);
        !status.ok()) {
      return status;
    }
    return cuda::decode(problem.value(), request.kernel, workspace, execution.stream);
  }
  const Result<const cpu::DecodeKernel*> kernel =
      select_cpu_kernel(problem.value(), request.kernel);
  if (!kernel.ok()) return kernel.status();
  const Result<cpu::WorkspaceLayout> layout =
      cpu::lay_out_workspace(problem.value(), *kernel.value(), execution.executor.num_threads);
  if (!layout.ok()) return layout.status();
  if (Status status =
          check_workspace(workspace, workspace_bytes, layout.value().total_bytes, kCpuAlignment);
      !status.ok()) {
    return status;
  }
  const Result<schedule::Schedule> schedule = schedule::resolve(
      problem.value(), layout.value().num_fragments, workspace + layout.value().schedule);
  if (!schedule.ok()) return schedule.status();
  cpu::launch(problem.value(), *kernel.value(), schedule.value(), layout.value(), workspace,
              execution.executor);
  cpu::combine(problem.value(), schedule.value(), layout.value(), workspace, execution.executor);
  return {};
}

Status merge(const MergeRequest& request, const Execution& execution) {
  const Result<MergeProblem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    return cuda::merge(problem.value(), execution.stream);
  }
  cpu::merge(problem.value(), execution.executor);
  return {};
}

}  // namespace flashmla
