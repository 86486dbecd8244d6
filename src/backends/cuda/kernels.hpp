// The launches of this backend, one function a kernel. Each only enqueues.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "problem/problem.hpp"
#include "schedule/planner.hpp"

namespace flashmla::cuda {

// Attention; returns cudaSuccess or why the launch failed. One function an instantiation, declared
// by the manifest: kernels.inc.
using DecodeLaunch = cudaError_t (*)(const DecodeParams& params, cudaStream_t stream);
#define FLASHMLA_CUDA_KERNEL(identifier, name, architecture, dtype, head_dim, head_dim_v, rows, \
                             form)                                                              \
  cudaError_t launch_##identifier(const DecodeParams& params, cudaStream_t stream);
#include "backends/cuda/kernels.inc"
#undef FLASHMLA_CUDA_KERNEL

// Merges the rows that several parts walked; programmatically dependent on the attention before.
cudaError_t launch_combine(const DecodeParams& params, DType dtype,
                           std::int32_t num_multiprocessors, cudaStream_t stream);

cudaError_t launch_merge(const MergeProblem& problem, cudaStream_t stream);

// The rows of schedule::plan_on_host, byte for byte.
cudaError_t launch_plan(const PlanProblem& problem, const schedule::PlanModel& model,
                        cudaStream_t stream);

}  // namespace flashmla::cuda
