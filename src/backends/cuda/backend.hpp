// The CUDA backend's calls. Nothing here needs CUDA headers, and nothing but read_back
// synchronises.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashmla/status.hpp"
#include "problem/problem.hpp"
#include "select/select.hpp"

namespace flashmla::cuda {

// 10 * major + minor, or why there is no such GPU. Works with no driver, and creates no context.
Result<std::int32_t> compute_capability(std::int32_t device);

// Rows of tile_scheduler_metadata that give every multiprocessor of the device one block.
Result<std::int32_t> num_parts(std::int32_t device, std::int64_t num_heads_per_head_k,
                               std::int64_t num_heads_k);

// Bytes of workspace, to be aligned to 256 bytes.
std::size_t workspace_bytes(const Problem& problem);

// Each enqueues work on `stream` (a cudaStream_t) of the problem's device and returns. `kernel` is
// the row that selection chose for the problem. The workspace belongs to the call until the stream
// has passed it.
Status plan(const PlanProblem& problem, void* stream);
Status decode(const Problem& problem, const select::KernelRow& kernel, void* workspace,
              void* stream);
Status merge(const MergeProblem& problem, void* stream);

// Copies int32 from a device to the host, once the stream has written them; waits for both.
Status read_back(std::int32_t* to, const std::int32_t* from, std::int64_t count,
                 std::int32_t device, void* stream);

}  // namespace flashmla::cuda
