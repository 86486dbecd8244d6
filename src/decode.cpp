// The pipeline: validate, select, schedule, launch, combine.
#include "decode.hpp"

#include <cstdint>
#include <string>
#include <type_traits>

#include "backends/cpu/decode.hpp"
#include "backends/cpu/kernels.hpp"
#include "backends/cuda/backend.hpp"
#include "problem/contents.hpp"
#include "problem/problem.hpp"
#include "schedule/parts.hpp"
#include "schedule/planner.hpp"
#include "schedule/resolve.hpp"
#include "select/select.hpp"
#include "tuning/plan.hpp"

namespace flashmla {
namespace {

// The row of the manifests that computes a problem on its device.
Result<const select::KernelRow*> select_kernel(const Problem& problem, std::string_view forced) {
  const Result<select::DeviceFacts> facts = facts_of(problem.device);
  if (!facts.ok()) return facts.status();
  return select::select_kernel(problem, facts.value(), forced);
}

Result<const cpu::DecodeKernel*> select_cpu_kernel(const Problem& problem,
                                                   std::string_view forced) {
  const Result<const select::KernelRow*> row = select_kernel(problem, forced);
  if (!row.ok()) return row.status();
  return &cpu::decode_kernel(row.value()->index);
}

// What FLASHMLA_CHECK=1 adds on a GPU: the checks of the CPU, on copies.
template <class AnyProblem>
Status check_on_host(const AnyProblem& problem, void* stream) {
  const Result<bool> wanted = contents_are_checked();
  if (!wanted.ok()) return wanted.status();
  if (!wanted.value()) return {};
  const auto read = [&](std::int32_t* to, const std::int32_t* from, std::int64_t count) {
    return cuda::read_back(to, from, count, problem.device.index, stream);
  };
  const Result<OnHost<AnyProblem>> host = copy_contents(problem, read);
  if (!host.ok()) return host.status();
  if (Status status = check_contents(host.value().problem); !status.ok()) return status;
  if constexpr (std::is_same_v<AnyProblem, Problem>) {
    return schedule::check_plan(host.value().problem);
  }
  return {};
}

// Whether a device is there to be judged. A program may be made for a GPU where there is none.
bool is_known(const Device& device) {
  return device.type == DeviceType::kCpu || cuda::compute_capability(device.index).ok();
}

constexpr std::size_t kCpuAlignment = 64;
constexpr std::size_t kCudaAlignment = 256;

Result<std::byte*> take_workspace(const DecodeRequest& request, const WorkspaceSource& source,
                                  std::size_t needed, std::size_t alignment) {
  std::byte* memory = source.memory;
  std::size_t bytes = memory == nullptr ? 0 : source.bytes;
  if (memory == nullptr && needed > 0 && source.allocate != nullptr) {
    memory = static_cast<std::byte*>(source.allocate(source.context, needed));
    if (memory == nullptr) {
      return Status(StatusCode::kOutOfMemory, "out of memory: " + std::to_string(needed) +
                                                  " bytes of workspace could not be allocated");
    }
    bytes = needed;
  }
  if (bytes < needed) {
    return Status::invalid_argument("workspace holds " + std::to_string(bytes) +
                                    " bytes; this call needs " + std::to_string(needed));
  }
  if (reinterpret_cast<std::uintptr_t>(memory) % alignment != 0) {
    return Status::invalid_argument("workspace is not aligned to " + std::to_string(alignment) +
                                    " bytes");
  }
  if (Status status = check_workspace(request, memory, needed); !status.ok()) return status;
  return memory;
}

Status decode_on_gpu(const DecodeRequest& request, const Problem& problem,
                     const WorkspaceSource& source, void* stream) {
  const Result<const select::KernelRow*> kernel = select_kernel(problem, request.kernel);
  if (!kernel.ok()) return kernel.status();
  const Result<std::byte*> workspace =
      take_workspace(request, source, cuda::workspace_bytes(problem), kCudaAlignment);
  if (!workspace.ok()) return workspace.status();
  if (Status status = check_on_host(problem, stream); !status.ok()) return status;
  return cuda::decode(problem, *kernel.value(), workspace.value(), stream);
}

Status decode_on_cpu(const DecodeRequest& request, const Problem& problem,
                     const WorkspaceSource& source, const cpu::Executor& executor) {
  const Result<const cpu::DecodeKernel*> selected = select_cpu_kernel(problem, request.kernel);
  if (!selected.ok()) return selected.status();
  const cpu::DecodeKernel& kernel = *selected.value();
  const Result<cpu::WorkspaceLayout> layout =
      cpu::lay_out_workspace(problem, kernel, executor.num_threads);
  if (!layout.ok()) return layout.status();
  const Result<std::byte*> workspace =
      take_workspace(request, source, layout.value().total_bytes, kCpuAlignment);
  if (!workspace.ok()) return workspace.status();
  const Result<schedule::Schedule> schedule = schedule::resolve(
      problem, layout.value().num_fragments, workspace.value() + layout.value().schedule);
  if (!schedule.ok()) return schedule.status();
  cpu::launch(problem, kernel, schedule.value(), layout.value(), workspace.value(), executor);
  cpu::combine(problem, kernel, schedule.value(), layout.value(), workspace.value(), executor);
  return {};
}

}  // namespace

Result<select::DeviceFacts> facts_of(const Device& device) {
  Result<select::DeviceFacts> facts = select::processor_facts();
  if (facts.ok() && device.type == DeviceType::kCuda) {
    const Result<std::int32_t> capability = cuda::compute_capability(device.index);
    if (capability.ok()) facts.value().compute_capability = capability.value();
  }
  return facts;
}

Status device_supported(const Device& device) {
  if (Status status = check_device(device); !status.ok()) return status;
  if (device.type == DeviceType::kCpu) return select::processor_facts().status();
  const Result<std::int32_t> capability = cuda::compute_capability(device.index);
  if (!capability.ok()) return capability.status();
  select::DeviceFacts facts;
  facts.compute_capability = capability.value();
  for (const select::KernelRow& row : select::kernel_rows()) {
    if (row.device == device.type && select::is_usable(row, facts)) return {};
  }
  return Status::unsupported("device " + std::to_string(device.index) + " has compute capability " +
                             std::to_string(capability.value() / 10) + "." +
                             std::to_string(capability.value() % 10) + "; " +
                             select::gpus_with_kernels() + " is needed");
}

Result<std::int32_t> plan_num_parts(const Device& device, std::int64_t num_heads_per_head_k,
                                    std::int64_t num_heads_k, std::int32_t num_threads) {
  for (const std::int64_t heads : {num_heads_per_head_k, num_heads_k}) {
    if (heads >= 1 && heads <= INT32_MAX) continue;
    return Status::invalid_argument(
        "(num_heads_per_head_k, num_heads_k) is (" + std::to_string(num_heads_per_head_k) + ", " +
        std::to_string(num_heads_k) + "); both must be between 1 and " + std::to_string(INT32_MAX));
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
    if (Status status = check_on_host(problem.value(), execution.stream); !status.ok()) {
      return status;
    }
    return cuda::plan(problem.value(), execution.stream);
  }
  schedule::plan_on_host(problem.value(), tuning::cpu_plan(problem.value().batch,
                                                           problem.value().num_heads_per_head_k));
  return {};
}

Result<std::size_t> decode_workspace_size(const DecodeRequest& request, std::int32_t num_threads) {
  const Result<Problem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    const Result<const select::KernelRow*> kernel = select_kernel(problem.value(), request.kernel);
    if (!kernel.ok()) return kernel.status();
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

Status decode(const DecodeRequest& request, const WorkspaceSource& workspace,
              const Execution& execution) {
  const Result<Problem> problem = validate(request);
  if (!problem.ok()) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  if (request.device.type == DeviceType::kCuda) {
    return decode_on_gpu(request, problem.value(), workspace, execution.stream);
  }
  return decode_on_cpu(request, problem.value(), workspace, execution.executor);
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

Status check(const PlanRequest& request) {
  const Result<PlanProblem> problem = validate_shapes(request);
  return problem.ok() && is_known(request.device) ? device_supported(request.device)
                                                  : problem.status();
}

Status check(const DecodeRequest& request) {
  const Result<Problem> problem = validate_shapes(request);
  if (!problem.ok() || !is_known(request.device)) return problem.status();
  if (Status status = device_supported(request.device); !status.ok()) return status;
  return select_kernel(problem.value(), request.kernel).status();
}

Status check(const MergeRequest& request) {
  const Result<MergeProblem> problem = validate(request);
  return problem.ok() && is_known(request.device) ? device_supported(request.device)
                                                  : problem.status();
}

}  // namespace flashmla
