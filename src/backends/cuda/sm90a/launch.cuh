// Launches one instantiation of a kernel of this folder.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/common/params.cuh"
#include "backends/cuda/common/shared_memory.cuh"

namespace flashmla::cuda::sm90a {

// A block for each (tile of tile_rows query rows, key/value head, part). It may begin while the
// kernel before it ends: it waits for that one before it reads anything that a result comes of.
template <auto kKernel>
cudaError_t launch(const DecodeParams& params, int tile_rows, int threads, int shared_bytes,
                   cudaStream_t stream) {
  if (const cudaError_t error = allow_shared_memory<kKernel>(shared_bytes); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((params.shape.query_rows + tile_rows - 1) / tile_rows,
                        params.shape.num_heads_k, params.shape.num_parts);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace flashmla::cuda::sm90a
