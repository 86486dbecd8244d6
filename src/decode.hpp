// The library's calls on checked types of its own: what the C ABI translates to. Internal.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/executor.hpp"
#include "flashmla/status.hpp"
#include "problem/request.hpp"
#include "select/select.hpp"

namespace flashmla {

// What a call runs on. The executor is for the CPU, the stream (a cudaStream_t) for a GPU.
struct Execution {
  cpu::Executor executor;
  void* stream = nullptr;
};

// Scratch memory of a call: what is at hand or, where that is nothing, what `allocate` gives.
struct WorkspaceSource {
  std::byte* memory = nullptr;
  std::size_t bytes = 0;
  void* (*allocate)(void* context, std::size_t bytes) = nullptr;
  void* context = nullptr;
};

// What selection may depend on for tensors of a device; a GPU that is not there counts as none.
Result<select::DeviceFacts> facts_of(const Device& device);

// OK, or what was found and what is needed.
Status device_supported(const Device& device);

// Rows of tile_scheduler_metadata that suit a device; num_threads (at least 1) counts on the CPU.
Result<std::int32_t> plan_num_parts(const Device& device, std::int64_t num_heads_per_head_k,
                                    std::int64_t num_heads_k, std::int32_t num_threads);

Status plan(const PlanRequest& request, const Execution& execution);

Result<std::size_t> decode_workspace_size(const DecodeRequest& request, std::int32_t num_threads);

Status decode(const DecodeRequest& request, const WorkspaceSource& workspace,
              const Execution& execution);

Status merge(const MergeRequest& request, const Execution& execution);

// What these calls refuse without reading a tensor. Where there is no GPU, what a GPU declines is
// left to the call.
Status check(const PlanRequest& request);
Status check(const DecodeRequest& request);
Status check(const MergeRequest& request);

}  // namespace flashmla
