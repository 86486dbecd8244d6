// The CUDA backend's calls. Nothing here needs CUDA headers, and nothing synchronises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "flashmla/status.hpp"
#include "problem/problem.hpp"

namespace flashmla::cuda {

// OK, or what was found and what is needed. Works with no driver, and creates no context.
Status device_supported(std::int32_t device);

// Rows of tile_scheduler_metadata that give every multiprocessor of the device one block.
Result<std::int32_t> num_parts(std::int32_t device, std::int64_t num_heads_per_head_k,
                               std::int64_t num_heads_k);

// OK, or why no kernel of this backend computes the problem, a line a reason. `forced`: empty, or
// the name of the kernel to use.
Status supported(const Problem& problem, std::string_view forced);

// The kernel that decode() would use; empty when none would.
std::string_view selected_kernel(const Problem& problem, std::string_view forced);

// Bytes of workspace, to be aligned to 256 bytes.
std::size_t workspace_bytes(const Problem& problem);

// Each enqueues work on `stream` (a cudaStream_t) of the problem's device and returns. The
// workspace belongs to the call until the stream has passed it.
Status plan(const PlanProblem& problem, void* stream);
Status decode(const Problem& problem, std::string_view forced, void* workspace, void* stream);
Status merge(const MergeProblem& problem, void* stream);

}  // namespace flashmla::cuda
