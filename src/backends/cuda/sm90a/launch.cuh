// Launches one instantiation of a kernel of this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/common/launch.cuh"
#include "backends/cuda/common/params.cuh"
#include "backends/cuda/common/shared_memory.cuh"

namespace flashmla::cuda::sm90a {

// A block for each (tile of tile_rows query rows, key/value head, one of so many parts).
template <auto kKernel>
cudaError_t launch(const DecodeParams& params, int tile_rows, std::int32_t parts, int threads,
                   int shared_bytes, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes); error != cudaSuccess) {
    return error;
  }
  const dim3 grid((params.shape.query_rows + tile_rows - 1) / tile_rows, params.shape.num_heads_k,
                  parts);
  return launch_overlapping(kKernel, grid, threads, shared_bytes, stream, params);
}

}  // namespace flashmla::cuda::sm90a
